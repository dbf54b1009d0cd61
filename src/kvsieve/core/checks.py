"""Checks of values on a device without waiting for it, such as whether scores are numbers.

On a CPU a value is checked at once. Waiting for another device would leave it idle until the host has queued more work:
its values are collected and checked together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from kvsieve.lazy import Tensor, torch

# Values on their device, and a function to call with them on the host.
Value = tuple[Tensor, Callable[[Tensor], None]]

_GATHERED: ContextVar[list[Value] | None] = ContextVar("kvsieve_values", default=None)


@contextlib.contextmanager
def gathered(values: list[Value]) -> Iterator[None]:
    """Collect in `values` the checks that would wait for the device; `look` runs them."""
    token = _GATHERED.set(values)
    try:
        yield
    finally:
        _GATHERED.reset(token)


def tell(value: Tensor, then: Callable[[Tensor], None]) -> None:
    """Call `then` with `value` on the CPU: at once, or when the collected values are checked."""
    values = _GATHERED.get()
    if values is None or value.device.type == "cpu":
        then(value.cpu())
    else:
        values.append((value, then))


def refuse(wrong: Tensor, error: Callable[[], Exception]) -> None:
    """Raise `error()` if any of bool `wrong` is True; see `tell` for when."""

    def check(found: Tensor) -> None:
        if bool(found.any()):
            raise error()

    tell(wrong, check)


def look(values: list[Value]) -> None:
    """Run the checks of `values` in order and clear the list; waits for the device once per dtype."""
    checks = list(values)
    found: dict[int, Tensor] = {}
    values.clear()
    for dtype in {value.dtype for value, _ in checks}:
        parts = {number: value.flatten() for number, (value, _) in enumerate(checks) if value.dtype == dtype}
        whole = torch.cat(list(parts.values())).cpu().split([len(part) for part in parts.values()])
        found.update(zip(parts, whole, strict=True))
    for number, (value, then) in enumerate(checks):
        then(found[number].view(value.shape))
