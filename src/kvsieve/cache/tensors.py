"""Tensors in nested objects: search, bytes, growth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' memory; shared memory counts once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested dicts, lists and tuples, such as methods' state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def grown(buffer: Tensor, dim: int, used: int, capacity: int) -> Tensor:
    """Return a buffer with `capacity` places along `dim`: the first `used` of this one, then zeros."""
    shape = list(buffer.shape)
    shape[dim] = capacity
    fresh = buffer.new_zeros(shape)
    fresh.narrow(dim, 0, used).copy_(buffer.narrow(dim, 0, used))
    return fresh
