"""Checks of what a device has computed.

On a CPU they are made at once. Elsewhere the host would wait for the device, which then has nothing to do until the
host has queued more: there they are gathered, and looked at together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

# What would be wrong, on its device, and what to raise then.
Check = tuple[Tensor, Callable[[], Exception]]

_GATHERED: ContextVar[list[Check] | None] = ContextVar("kvsieve_checks", default=None)


@contextlib.contextmanager
def gathered(checks: list[Check]) -> Iterator[None]:
    """Add checks that would wait for a device to `checks`, in place of waiting; see `look`."""
    token = _GATHERED.set(checks)
    try:
        yield
    finally:
        _GATHERED.reset(token)


def refuse(wrong: Tensor, error: Callable[[], Exception]) -> None:
    """Raise what `error` makes if any of bool `wrong` is True: now, or when the checks gathered are looked at."""
    checks = _GATHERED.get()
    if checks is None or wrong.device.type == "cpu":
        if bool(wrong.any()):
            raise error()
    else:
        checks.append((wrong, error))


def look(checks: list[Check]) -> None:
    """Raise for the first of the checks that something is wrong by, and forget them all; reads once per device."""
    made = list(checks)
    checks.clear()
    if not made:
        return
    parts = [wrong.flatten().to(made[0][0].device) for wrong, _ in made]
    found = torch.cat(parts).cpu().split([len(part) for part in parts])
    for part, (_, error) in zip(found, made, strict=True):
        if bool(part.any()):
            raise error()
