"""A device that is far away: a tensor there is one of the CPU, and what would make a GPU's host wait is noted.

These are reading a value, an operation whose result is as long as values say, and copying what the host has made. All
operations are those of the CPU; torch's device without values stands for the one far away.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

AWAY, HOME = torch.device("meta"), torch.device("cpu")
# What gives the host a value, or as many entries as values say.
ASKING = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2", "unique_consecutive"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
SOURCE = f"{os.sep}kvsieve{os.sep}"


class Away(torch.Tensor):
    """A tensor of the CPU, `inner`, that is said to be away; for use within `watched`."""

    is_meta = False

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Away:
        how = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        out = torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=AWAY, **how)
        out.inner = inner
        return out

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a tensor that is away, outside `watched`")


def _away(part):
    return Away(part) if type(part) is torch.Tensor else part


class Operations(TorchDispatchMode):
    """Runs operations on what is away, and counts by line of kvsieve's source those that its host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        to = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        known = {id(each.inner): each for each in tensors if isinstance(each, Away)}
        if not known and to != AWAY:
            return func(*args, **kwargs)
        comes_home = bool(known) and to is not None and to != AWAY
        if comes_home or self._waits(func, name, args, kwargs, tensors):
            self.note(name)
        kwargs |= {} if to is None else {"device": HOME}
        args, kwargs = tree_map(lambda each: each.inner if isinstance(each, Away) else each, (args, kwargs))
        out = func(*args, **kwargs)
        if comes_home:
            return out
        return tree_map(lambda each: known[id(each)] if id(each) in known else _away(each), out)

    @staticmethod
    def _waits(func, name, args, kwargs, tensors) -> bool:
        if name in ("_to_copy", "copy_"):
            moves = {type(each) for each in tensors} != {Away}
            return moves and not (kwargs.get("non_blocking") or any(each is True for each in args[2:]))
        if name in INDEXING:
            return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
        if name == "repeat_interleave":
            return func._overloadname == "Tensor" and kwargs.get("output_size") is None
        return name in ASKING

    def note(self, what: str) -> None:
        frame = sys._getframe()
        while frame is not None and SOURCE not in frame.f_code.co_filename:
            frame = frame.f_back
        where = "" if frame is None else f"{frame.f_code.co_filename.rpartition(SOURCE)[2]}:{frame.f_lineno}"
        self.waits[f"{where} {what}"] += 1


class Lists(TorchFunctionMode):
    """Makes tensors of lists that are to be away, which torch copies there at once, and waits."""

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self.operations = operations

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        to = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and to is not None and torch.device(to) == AWAY:
            if isinstance(args[0], torch.Tensor):
                return args[0].to(AWAY)
            self.operations.note(func.__name__)
            return Away(func(*args, **{**kwargs, "device": HOME}))
        return func(*args, **kwargs)


def sent(model: torch.nn.Module) -> torch.nn.Module:
    """Move a model's weights and buffers away."""
    for module in model.modules():
        for parts in (module._parameters, module._buffers):
            parts.update({name: Away(part.detach()) for name, part in parts.items() if part is not None})
    return model


@contextlib.contextmanager
def watched():
    """Counts of what is waited for within, by line of kvsieve's source and operation."""
    operations = Operations()
    with operations, Lists(operations):
        yield operations.waits
