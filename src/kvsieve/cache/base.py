"""Base of the stores: growing buffers of one layer, and copies of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from kvsieve.core.kv_rows import SlotRows
from kvsieve.errors import CacheStateError

MIN_ROOM = 64


@dataclass(frozen=True)
class View:
    """Part of a store that is read in this turn, besides what is stored after it.

    Attributes:
        slots: int64 [B, H', K]; H' is the number of stored heads or a multiple of it. Of entries that are partly
            encoded, numbers of real entries, since slots change when more are.
        real: bool, the shape of `slots` or [B, 1, K], False for filler; None when all are real.
        end: entries that were stored when the view was chosen.
    """

    slots: Tensor
    real: Tensor | None
    end: int

    def rows(self, rows: Tensor) -> View:
        """View with row ``rows[i]`` of this one as row i."""
        slots, real = (None if part is None else part[rows.to(part.device)] for part in (self.slots, self.real))
        return View(slots, real, self.end)  # type: ignore[arg-type]


class Derived(Protocol):
    """Metadata computed from a store's entries."""

    def all_tensors(self) -> Iterator[Tensor]:
        """Every tensor held."""
        ...

    def drop_last(self, store: Any) -> bool:
        """Forget the entries that `store` has just taken back, as many in each row; False where all must be redone."""
        ...


class Store:
    """Buffers of one layer's entries, of which the first `size` slots are in use.

    Subclasses define how the slots are laid out.

    Attributes:
        size: slots in use.
        lengths: real entries of each row, of its fullest head.
        valid_buffer: tells real entries from padding and filler; None while every entry is real.
        derived: metadata that others have computed from the entries (`Derived`); emptied whenever entries change other
            than by appending or taking back what was appended.
        shared: slots that a copy on the same buffers may still hold; never written to.
    """

    is_ragged = False
    is_encoded = False

    def __init__(self) -> None:
        self.size = 0
        self.lengths: tuple[int, ...] = ()
        self.valid_buffer: Tensor | None = None
        self.derived: dict[str, Derived] = {}
        self.shared = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._index: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """True before the first entries are stored."""
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
        return self.buffers()[0].shape[-2]

    @property
    def next_slot(self) -> int:
        """First slot of the buffers that `put` writes to that is not in use."""
        return self.size

    @property
    def has_room(self) -> bool:
        """True where these buffers have room for a token."""
        return self.shared <= self.size <= self.capacity - self.stride

    @property
    def value_buffer(self) -> Tensor:
        """Buffer that the values lie in, as the keys do in theirs, slots that are not used included."""
        return self.buffers()[1]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Tensors that `put` and reading touch: buffers of keys, values and index, and the mask of real entries."""
        return (*self.buffers(), self.valid_buffer)

    def slot_rows(self) -> tuple[SlotRows, SlotRows]:
        """Keys and values with all slots of all KV rows as rows: [B * H * capacity, D]."""
        return self.buffers()[0].flatten(0, -2), self.value_buffer.flatten(0, -2)

    def view(self, slots: Tensor, real: Tensor | None) -> View:
        """Make a view of slots [B, H', K]. real: bool, False for filler; None when all are real."""
        return View(slots, real, self.size)

    @property
    def dims(self) -> tuple[int, int]:
        """Channels of a key, and of a value."""
        keys, values, _ = self.buffers()
        return keys.shape[-1], values.shape[-1]

    def entry_size(self) -> int:
        """Bytes of an entry's key and value; the mean where they differ."""
        keys, values, _ = self.buffers()
        return (keys.shape[-1] + values.shape[-1]) * keys.element_size()

    def make_room(self, tokens: int) -> None:
        """Allocate slots for `tokens` further tokens; buffers that have them stay the same objects."""
        raise NotImplementedError

    def prepare_slots(self, token_index: int) -> None:
        """Write ahead, in all slots not in use, what `put` leaves out; the tokens to come are real.

        Args:
            token_index: token index of the next token in its row.
        """
        raise NotImplementedError

    def put(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write the entries of one token to prepared slots.

        Touches the buffers only and reads nothing back from the device; call `advance_host_length` afterwards.

        Args:
            keys: [B, H, 1, D].
            values: [B, H, 1, Dv].
            slots: int64, one per slot that the token takes, prepared by `prepare_slots`.
        """
        raise NotImplementedError

    def advance_host_length(self) -> None:
        """Count on the host that a token has been `put` behind the last one, in every row."""
        self.size += self.stride
        self.lengths = tuple(length + 1 for length in self.lengths)

    @property
    def droppable(self) -> int:
        """Newest tokens that `drop_last` can take back: those stored since entries were last dropped or encoded."""
        raise NotImplementedError

    def drop_last(self, counts: Sequence[int]) -> None:
        """Take back the newest tokens of each row, as if they had never been stored.

        A row that takes back more tokens than another has padding in the slots that the other one keeps.

        Args:
            counts: tokens of each row, padding among them counted.

        Raises:
            CacheStateError: more than `droppable`.
        """
        least, most = min(counts), max(counts)
        if most > self.droppable:
            raise CacheStateError(
                f"{most} tokens are to be taken back, and only {self.droppable} were stored since entries were last "
                "dropped or encoded: take tokens back before the plan acts on what is stored"
            )
        if most:
            dropped = self._take_back(counts, least, most)
            self.lengths = tuple(length - count for length, count in zip(self.lengths, dropped, strict=True))
            kept = self.derived.items() if least == most else ()
            self.derived = {name: part for name, part in kept if part.drop_last(self)}

    def _take_back(self, counts: Sequence[int], least: int, most: int) -> tuple[int, ...]:
        """Take back `counts` tokens, of `least` to `most`; return how many of each row were real."""
        raise NotImplementedError

    def reorder(self, rows: Tensor) -> None:
        """Make row i a copy of row ``rows[i]`` (int64 [B']): beam search, repetition and row selection."""
        self._apply(lambda buffer: buffer.index_select(0, rows.to(buffer.device)))
        self.shared = 0
        self.derived = {}
        if len(set(self.lengths)) > 1 or len(self.lengths) != len(rows):
            self.lengths = tuple(self.lengths[row] for row in rows.tolist())

    def share(self) -> Self:
        """Copy on the same buffers, valid while only one of the two appends; what either drops, the other keeps."""
        self.shared = max(self.shared, self.size)
        copied = copy.copy(self)
        copied.derived = {}
        return copied

    def clone(self) -> Self:
        """Copy that shares no memory with this one."""
        copied = copy.copy(self)
        copied.derived = {}
        if not self.is_empty:
            copied._apply(Tensor.clone)
        copied.shared = 0
        return copied

    def nbytes(self) -> int:
        """Bytes of all tensors held, including room for further entries and derived metadata."""
        return storage_bytes(self.all_tensors())

    def entry_bytes(self) -> int:
        """Bytes of keys and values, room for further entries included."""
        return storage_bytes(part for part in (self._keys, self._values) if part is not None)

    def all_tensors(self) -> Iterator[Tensor]:
        """Every tensor held: keys, values, token indices, the mask of real entries, and derived metadata."""
        yield from (part for part in (self._keys, self._values, self._index, self.valid_buffer) if part is not None)
        for part in self.derived.values():
            yield from part.all_tensors()

    def buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._keys is None or self._values is None or self._index is None:
            raise RuntimeError("this layer stores nothing yet: run a forward pass with its cache first")
        return self._keys, self._values, self._index

    def _apply(self, change: Callable[[Tensor], Tensor]) -> None:
        self._keys, self._values, self._index = (change(buffer) for buffer in self.buffers())
        if self.valid_buffer is not None:
            self.valid_buffer = change(self.valid_buffer)


def last_tokens(counts: Sequence[int], device: torch.device) -> Tensor:
    """Tell which of the newest tokens are the last `counts` ones of each row: bool [B, most]."""
    most = max(counts)
    return (torch.arange(most) >= most - torch.tensor(counts)[:, None]).to(device)


def window_room(span: int) -> int:
    """Slots beyond those in use of a layer that holds a window of `span` tokens."""
    return max(1, min(MIN_ROOM, span // 4))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that tensors lie in, counted once where several share it."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested dicts, lists and tuples, as methods' scratch holds them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def grown(buffer: Tensor, dim: int, used: int, capacity: int) -> Tensor:
    """Copy of a buffer with `capacity` slots along `dim`: the `used` first ones of this one, then zeros."""
    shape = list(buffer.shape)
    shape[dim] = capacity
    fresh = buffer.new_zeros(shape)
    fresh.narrow(dim, 0, used).copy_(buffer.narrow(dim, 0, used))
    return fresh
