"""Uninitialised memory that shows: what kvsieve takes with torch.empty and its like is NaN or a huge number."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors

_MAKERS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"))


def filled(tensor: Tensor) -> Tensor:
    """The tensor with every element NaN, or the greatest number of an integer dtype, or True."""
    if tensor.numel() == 0 or tensor.is_meta:
        return tensor
    kind = tensor.dtype
    if kind.is_floating_point or kind.is_complex:
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if kind is torch.bool else torch.iinfo(kind).max)


def poisoned(maker: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A maker of uninitialised tensors that fills those asked for by modules of kvsieve, and leaves others alone."""

    def make(*args: Any, **kwargs: Any) -> Tensor:
        out = maker(*args, **kwargs)
        if torch.compiler.is_compiling():
            return out
        asker = sys._getframe(1).f_globals.get("__name__", "")
        return filled(out) if asker.partition(".")[0] == "kvsieve" else out

    return make


@contextlib.contextmanager
def poison() -> Iterator[None]:
    """Inside the block kvsieve's uninitialised tensors are poisoned."""
    # `with torch.device("meta")` knows the makers from a list that torch makes once: it must hold torch's own, or a
    # model that is only described takes its real memory.
    _device_constructors()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in _MAKERS:
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield
