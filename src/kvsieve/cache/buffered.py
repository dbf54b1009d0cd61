"""Storage in growing buffers with the first slots in use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import torch
from torch import Tensor

from kvsieve.cache.columns import Columns
from kvsieve.cache.contract import LayerMemory, View
from kvsieve.cache.tensors import storage_bytes
from kvsieve.core.kv_rows import SlotRows


class BufferedMemory(LayerMemory):
    """Exact entries in buffers; subclasses define the layout of slots.

    Attributes:
        size: slots in use.
        columns: the buffers.
        shared: slots possibly shared with a copy on the same buffers; never written to.
    """

    size = 0

    def __init__(self, columns: Columns | None = None, size: int = 0, lengths: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.columns = Columns() if columns is None else columns
        self.size = size
        self.lengths = lengths
        self.shared = 0

    @property
    def is_empty(self) -> bool:
        return not self.columns.parts

    @property
    def valid_buffer(self) -> Tensor | None:
        """Mask of real entries among all slots; None while every entry is real."""
        return self.columns.parts.get("valid")

    @property
    def weight_buffer(self) -> Tensor | None:
        """Logarithms of the weights of all slots; None while all entries weigh 1."""
        return self.columns.parts.get("log_weight")

    @property
    def dtype(self) -> torch.dtype:
        return self.buffers()[0].dtype

    @property
    def dims(self) -> tuple[int, int]:
        keys, values, _ = self.buffers()
        return keys.shape[-1], values.shape[-1]

    @property
    def capacity(self) -> int:
        return self.buffers()[0].shape[-2]

    def has_room(self, tokens: int) -> bool:
        return self._has_room(self.size + tokens * self.stride)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (*self.buffers(), self.valid_buffer, self.weight_buffer)

    def buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.columns.parts
        if not parts:
            raise RuntimeError("this layer stores nothing yet: run a forward pass with its cache first")
        return parts["keys"], parts["values"], parts["index"]

    def slot_rows(self) -> tuple[SlotRows, SlotRows]:
        keys, values, _ = self.buffers()
        return keys.flatten(0, -2), values.flatten(0, -2)

    def weight_rows(self) -> Tensor | None:
        return None if self.weight_buffer is None else self.weight_buffer.flatten()

    def score_rows(self) -> Tensor | None:
        scores = self.columns.parts.get("scores")
        return None if scores is None else scores.view(-1, scores.shape[1] // self.heads, scores.shape[2])

    def view(self, slots: Tensor, real: Tensor | None) -> View:
        return View(slots, real, self.size)

    def entry_size(self, without: int = 0) -> int:
        keys, values, _ = self.buffers()
        weight = 0 if self.weight_buffer is None else self.weight_buffer.element_size()
        return (keys.shape[-1] + values.shape[-1]) * keys.element_size() + weight

    def entry_bytes(self) -> int:
        if self.is_empty:
            return 0
        weights = () if self.weight_buffer is None else (self.weight_buffer,)
        return storage_bytes((*self.buffers()[:2], *weights))

    def all_tensors(self) -> Iterator[Tensor]:
        yield from self.columns
        for part in self.derived.values():
            yield from part.all_tensors()

    def make_room(self, tokens: int) -> None:
        if not self._has_room(self.size + tokens * self.stride):
            self._resize(self.size + tokens * self.stride)

    def _has_room(self, end: int) -> bool:
        """Return True if slots up to `end` may be written in these buffers."""
        return self.shared <= self.size and end <= self.columns.parts["index"].shape[-1]

    def _resize(self, capacity: int) -> None:
        self.columns = self.columns.grown(self.size, capacity)
        self.shared = 0

    def advance_host_length(self, tokens: int = 1) -> None:
        self.size += tokens * self.stride
        super().advance_host_length(tokens)

    def _count_new(self, batch: int, new: int, valid: Tensor | None, counts: Sequence[int] | None) -> Sequence[int]:
        """Count the real ones of `new` tokens in each row; return the counts."""
        if counts is None:
            counts = (new,) * batch if valid is None else valid.sum(-1).tolist()
        if valid is not None:
            self.derived = {}
        self.lengths = tuple(old + count for old, count in zip(self.lengths or (0,) * batch, counts, strict=True))
        return counts

    def reorder(self, rows: Tensor) -> None:
        self.apply(lambda buffer: buffer.index_select(0, rows.to(buffer.device)))
        if len(set(self.lengths)) > 1 or len(self.lengths) != len(rows):
            self.lengths = tuple(self.lengths[row] for row in rows.tolist())

    def share(self) -> Self:
        self.shared = max(self.shared, self.size)
        other = copy.copy(self)
        other.derived = {}
        return other

    def clone(self) -> Self:
        other = copy.copy(self)
        other.apply(Tensor.clone)
        return other

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to all buffers; the results are not shared."""
        self.columns = self.columns.map(change)
        self.shared = 0
        self.derived = {}


def last_tokens(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return bool [B, most], True for the last `counts` tokens of each row."""
    most = max(counts)
    return (torch.arange(most) >= most - torch.tensor(counts)[:, None]).to(device)
