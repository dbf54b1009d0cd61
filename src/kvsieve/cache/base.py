"""What the stores have in common: growing buffers of one layer, and copies of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from torch import Tensor

MIN_ROOM = 64


class Store:
    """Buffers of one layer's entries, of which the first `size` slots are in use.

    lengths: real entries of each row, of its fullest head. valid_buffer: tells real entries from padding and filler;
    None while every entry is real. Subclasses say how the slots are laid out. derived: what others have computed from
    the entries, objects whose ``all_tensors()`` gives their tensors; emptied when entries change other than by
    appending.
    """

    is_ragged = False

    def __init__(self) -> None:
        self.size = 0
        self.lengths: tuple[int, ...] = ()
        self.valid_buffer: Tensor | None = None
        self.derived: dict[str, Any] = {}
        self._shared = False
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._index: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return self._keys is None

    @property
    def entries(self) -> int:
        """Real entries per KV head of the fullest row; the mean where heads differ, rounded up."""
        return max(self.lengths, default=0)

    @property
    def heads(self) -> int:
        """KV heads stored."""
        raise NotImplementedError

    @property
    def stride(self) -> int:
        """Slots that a new token takes."""
        return 1

    @property
    def capacity(self) -> int:
        """Slots there are, used or not."""
        return self._buffers()[0].shape[-2]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All that `put` and reading touch: buffers of keys, values and index, what tells real entries, and more."""
        return (*self._buffers(), self.valid_buffer)

    def make_room(self, tokens: int) -> None:
        """Have slots for `tokens` further tokens; buffers that have them stay what they are."""
        raise NotImplementedError

    def prepare_slots(self, token_index: int) -> None:
        """Write ahead, for all slots not in use, what `put` leaves out: real tokens come, the next is `token_index`."""
        raise NotImplementedError

    def put(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store one token's entries [B, H, 1, D] at `slots` (int64, one per slot it takes), after `prepare_slots`.

        Touches the buffers only, and reads nothing back from the device; call `advance_host_length` afterwards.
        """
        raise NotImplementedError

    def advance_host_length(self) -> None:
        """Count on the host that a token has been `put` behind the last one, in every row."""
        self.size += self.stride
        self.lengths = tuple(length + 1 for length in self.lengths)

    def reorder(self, rows: Tensor) -> None:
        """Make row i a copy of row ``rows[i]`` (int64 [B']): beam search, repetition and row selection."""
        self._apply(lambda buffer: buffer.index_select(0, rows.to(buffer.device)))
        self._shared = False
        self.derived = {}
        if len(set(self.lengths)) > 1 or len(self.lengths) != len(rows):
            self.lengths = tuple(self.lengths[row] for row in rows.tolist())

    def share(self) -> Self:
        """A copy on the same buffers, right while only one of the two appends; what either drops, the other keeps."""
        self._shared = True
        copied = copy.copy(self)
        copied.derived = {}
        return copied

    def clone(self) -> Self:
        """A copy that shares no memory with this one."""
        copied = copy.copy(self)
        copied.derived = {}
        if not self.is_empty:
            copied._apply(Tensor.clone)
        copied._shared = False
        return copied

    def nbytes(self) -> int:
        """Bytes of the tensors held, room for further entries and what is derived from them included."""
        return storage_bytes(self.all_tensors())

    def entry_bytes(self) -> int:
        """Bytes of keys and values, room for further entries included."""
        return storage_bytes(part for part in (self._keys, self._values) if part is not None)

    def all_tensors(self) -> Iterator[Tensor]:
        """Every tensor held: keys, values, where entries stood, which are real, and what is derived from them."""
        yield from (part for part in (self._keys, self._values, self._index, self.valid_buffer) if part is not None)
        for part in self.derived.values():
            yield from part.all_tensors()

    def _buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._keys is None or self._values is None or self._index is None:
            raise RuntimeError("this layer stores nothing yet: run a forward pass with its cache first")
        return self._keys, self._values, self._index

    def _apply(self, change: Callable[[Tensor], Tensor]) -> None:
        self._keys, self._values, self._index = (change(buffer) for buffer in self._buffers())
        if self.valid_buffer is not None:
            self.valid_buffer = change(self.valid_buffer)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that tensors lie in, counted once where several lie in the same."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of dicts, lists and tuples, one within the other, as methods' scratch holds them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def grown(buffer: Tensor, dim: int, used: int, capacity: int) -> Tensor:
    """A buffer with `capacity` slots along `dim` that starts with the `used` slots of this one; the others are zero."""
    shape = list(buffer.shape)
    shape[dim] = capacity
    fresh = buffer.new_zeros(shape)
    fresh.narrow(dim, 0, used).copy_(buffer.narrow(dim, 0, used))
    return fresh
