"""Messages of `kvsieve chat`, of one or several lines, from a pipe or a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from kvsieve.cli.output import say
from kvsieve.cli.prompts import BYTE_ORDER_MARK
from kvsieve.errors import InputError

# Line before and after a message of several lines.
_BLOCK = '"""'
HELP = f"a line that ends in \\ continues in the next; {_BLOCK} alone in a line begins and ends a block of lines"


def piped_messages(joins: bool) -> Iterator[str]:
    """Yield the lines of stdin or, if `joins`, messages of several lines. Raises InputError."""
    lines = _piped_lines()
    for line in lines:
        yield _joined(line, lines) if joins else line


def _piped_lines() -> Iterator[str]:
    try:
        for number, line in enumerate(sys.stdin):
            yield (line if number else line.removeprefix(BYTE_ORDER_MARK)).rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(f"stdin is not UTF-8 text (byte {error.start}); send it as that") from error


def typed_messages() -> Iterator[str]:
    """Yield the messages typed or pasted at a terminal, until Ctrl-D, or Ctrl-C at an empty prompt."""
    with contextlib.suppress(ImportError):
        import readline

        # input() has line editing and history; pasted lines are one message.
        readline.parse_and_bind("set enable-bracketed-paste on")
    while True:
        begun = False
        try:
            line = input("> ")
            begun = True
            message = _joined(line, iter(lambda: input("... "), None))
        except (EOFError, KeyboardInterrupt) as stop:
            print()
            if not begun or isinstance(stop, EOFError):
                return
            say("the message is dropped")
        except UnicodeDecodeError as error:
            say(f"error: that was no UTF-8 text (byte {error.start})")
        else:
            yield message


def _joined(line: str, more: Iterator[str]) -> str:
    if "\n" in line:
        return line  # pasted
    if line.strip() == _BLOCK:
        block: list[str] = []
        for text in more:
            if text.strip() == _BLOCK:
                return "\n".join(block)
            block.append(text)
        raise InputError(f"a block that begins with {_BLOCK} has no end; write {_BLOCK} alone in a line after it")
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{next(more, '')}"
    return line
