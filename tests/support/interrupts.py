"""Interrupts at every place of a function, one after another: nothing is left to the luck of a moment."""

from __future__ import annotations

import dis
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

# Python raises no interrupt there, and what is raised there all the same spoils what it knows of other exceptions.
_NEVER = {dis.opmap[name] for name in ("POP_EXCEPT", "RERAISE", "COPY")}


class Interrupts:
    """Traces `act()` in this thread, and raises KeyboardInterrupt at one of its places.

    fine: functions of which every bytecode is a place, the functions in them included. coarse: ends of file names of
    whose functions every line is a place. A place is told by its function, its bytecode or line, and how often it was
    come to.
    """

    def __init__(self, fine: list[Any], coarse: tuple[str, ...]) -> None:
        self.fine = {code for each in fine for code in _codes(each.__code__)}
        self.coarse = coarse
        self.times: Counter[tuple[CodeType, int]] = Counter()
        self.at: tuple[CodeType, int, int] | None = None

    def places(self, act: Callable[[], Any]) -> list[tuple[CodeType, int, int]]:
        """The first and the last time that `act` comes to each place of its own."""
        self._run(act, None)
        ends = {(code, place, time) for (code, place), last in self.times.items() for time in (1, last)}
        return sorted(ends, key=lambda each: (each[0].co_filename, each[0].co_firstlineno, *each[1:]))

    def raised(self, act: Callable[[], Any], at: tuple[CodeType, int, int]) -> bool:
        """Whether an interrupt at a place came out of `act`; False where it did not come there."""
        try:
            self._run(act, at)
        except KeyboardInterrupt:
            return True
        return False

    def _run(self, act: Callable[[], Any], at: tuple[CodeType, int, int] | None) -> None:
        self.at = at
        self.times.clear()
        sys.settrace(self._trace)
        try:
            act()
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, given: Any) -> Any:
        if frame.f_code in self.fine:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif not frame.f_code.co_filename.endswith(self.coarse):
            return None
        return self._local

    def _local(self, frame: FrameType, event: str, given: Any) -> Any:
        if event in ("line", "opcode") and frame.f_code.co_code[frame.f_lasti] not in _NEVER:
            place = frame.f_code, frame.f_lasti if event == "opcode" else frame.f_lineno
            self.times[place] += 1
            if self.at == (*place, self.times[place]):
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._local


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)
