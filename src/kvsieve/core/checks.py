"""Values that a device has computed and that the host must know of, such as whether scores are numbers.

On a CPU it looks at once. Elsewhere it would wait for the device, which then has nothing to do until the host has
queued more: there values are gathered, and looked at together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from kvsieve.lazy import Tensor, torch

# Values on their device, and what to do with them once they are the host's.
Value = tuple[Tensor, Callable[[Tensor], None]]

_GATHERED: ContextVar[list[Value] | None] = ContextVar("kvsieve_values", default=None)


@contextlib.contextmanager
def gathered(values: list[Value]) -> Iterator[None]:
    """Add to `values` what the host would wait for, in place of waiting; see `look`."""
    token = _GATHERED.set(values)
    try:
        yield
    finally:
        _GATHERED.reset(token)


def tell(value: Tensor, then: Callable[[Tensor], None]) -> None:
    """Call `then` with `value` on the CPU: now, or when the values gathered are looked at."""
    values = _GATHERED.get()
    if values is None or value.device.type == "cpu":
        then(value.cpu())
    else:
        values.append((value, then))


def refuse(wrong: Tensor, error: Callable[[], Exception]) -> None:
    """Raise what `error` makes if any of bool `wrong` is True; see `tell`."""

    def check(found: Tensor) -> None:
        if bool(found.any()):
            raise error()

    tell(wrong, check)


def look(values: list[Value]) -> None:
    """Do in order what is to be done with each value, and forget them all; waits once per dtype."""
    made = list(values)
    found: dict[int, Tensor] = {}
    values.clear()
    for dtype in {value.dtype for value, _ in made}:
        parts = {number: value.flatten() for number, (value, _) in enumerate(made) if value.dtype == dtype}
        whole = torch.cat(list(parts.values())).cpu().split([len(part) for part in parts.values()])
        found.update(zip(parts, whole, strict=True))
    for number, (value, then) in enumerate(made):
        then(found[number].view(value.shape))
