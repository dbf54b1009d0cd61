"""Contract of stores: how entries of one layer are stored, reduced, removed, copied and saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from kvsieve.cache.tensors import storage_bytes
from kvsieve.core.kv_rows import SlotRows
from kvsieve.errors import CacheStateError

MIN_ROOM = 64


@dataclass(frozen=True)
class View:
    """Part of a store that this turn attends to, together with later entries.

    Attributes:
        slots: int64 [B, H', K]; H' is the number of stored heads or a multiple of it. For partly encoded entries,
            numbers of real entries, since slots change with encoding.
        real: bool, the shape of `slots` or [B, 1, K], False for filler; None when all are real.
        end: entries that were stored when the view was chosen.
    """

    slots: Tensor
    real: Tensor | None
    end: int

    def rows(self, rows: Tensor) -> View:
        """Return a view with row ``rows[i]`` of this one as row i."""
        slots, real = (None if part is None else part[rows.to(part.device)] for part in (self.slots, self.real))
        return View(slots, real, self.end)  # type: ignore[arg-type]


class Derived(Protocol):
    """Metadata computed from a store's entries."""

    def all_tensors(self) -> Iterator[Tensor]:
        """Yield every tensor."""
        ...

    def drop_last(self, store: Any) -> bool:
        """Remove the entries just removed from `store`, equally many per row; return False if a rebuild is needed."""
        ...


class LayerMemory(ABC):
    """Entries of one layer: one per token and stored KV head, except dropped ones.

    B rows, H stored heads, D channels of a key, Dv of a value. Entries are in slots in token order; padding and filler
    have slots too.

    Attributes:
        lengths: real entries of each row, of its fullest head.
        derived: metadata computed from the entries; cleared by every change except appending and its reversal.
        is_ragged: KV heads keep different numbers of entries.
        is_encoded: older entries are encoded in few bits.
    """

    is_ragged = False
    is_encoded = False

    def __init__(self) -> None:
        self.lengths: tuple[int, ...] = ()
        self.derived: dict[str, Derived] = {}

    @property
    @abstractmethod
    def size(self) -> int:
        """Slots in use."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """True until the first entries are stored."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """Stored KV heads; more than the model has after a per-query-head selection."""

    @property
    @abstractmethod
    def keys(self) -> Tensor:
        """[B, H, N, D], N the slots of a head; a view where possible."""

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """[B, H, N, Dv], as `keys`."""

    @property
    @abstractmethod
    def index(self) -> Tensor:
        """int32 [B, H, N], token index of each entry in its row as fed (padding counted), -1 for filler."""

    @property
    @abstractmethod
    def valid(self) -> Tensor | None:
        """bool [B, H or 1, N], False for padding and filler; None while every entry is real."""

    @property
    def log_weight(self) -> Tensor | None:
        """float32 [B, H, N], logarithms of the entries' weights, 0 for filler; None while all weigh 1."""
        return None

    @property
    @abstractmethod
    def dims(self) -> tuple[int, int]:
        """D and Dv."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values on reading."""

    @property
    def entries(self) -> int:
        """Real entries per KV head of the fullest row; the mean over heads, rounded up."""
        return max(self.lengths, default=0)

    @abstractmethod
    def append(
        self,
        keys: Tensor,
        values: Tensor,
        token_index: Tensor,
        valid: Tensor | None = None,
        counts: tuple[int, ...] | None = None,
        reserve: int = 0,
    ) -> None:
        """Append new entries.

        Args:
            keys: [B, H, L, D].
            values: [B, H, L, Dv].
            token_index: int [1 or B, L], index of each token in its row as fed, padding counted.
            valid: bool [B, L], False for padding; None when all are real.
            counts: real tokens per row, if `valid` is given and they are known; None counts them.
            reserve: tokens to leave room for when the buffers must grow.
        """

    def may_quantize(self, tokens: int) -> bool:
        """Return True if entries may be encoded while up to `tokens` further tokens are stored."""
        return False

    @property
    @abstractmethod
    def droppable(self) -> int:
        """Number of newest tokens that `drop_last` can remove: those stored since the last eviction or encoding."""

    def drop_last(self, counts: Sequence[int]) -> None:
        """Remove the newest tokens of each row, as if they had never been stored.

        If rows differ, slots that only some rows remove become padding.

        Args:
            counts: tokens of each row, including padding.

        Raises:
            CacheStateError: more than `droppable`.
        """
        least = min(counts)
        most = max(counts)
        if most > self.droppable:
            raise CacheStateError(
                f"{most} tokens are to be taken back, and only {self.droppable} were stored since entries were last "
                "dropped or encoded: take tokens back before the plan acts on what is stored"
            )
        if most:
            dropped = self._take_back(counts, least, most)
            self.lengths = tuple(length - count for length, count in zip(self.lengths, dropped, strict=True))
            items = self.derived.items() if least == most else ()
            self.derived = {name: part for name, part in items if part.drop_last(self)}

    @abstractmethod
    def _take_back(self, counts: Sequence[int], least: int, most: int) -> tuple[int, ...]:
        """Remove `counts` tokens, between `least` and `most`; return the number of real ones in each row."""

    @abstractmethod
    def remask(self, mask: Tensor) -> None:
        """Apply a changed attention mask to the stored entries; mask: bool [B, tokens fed]."""

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Make row i a copy of row ``rows[i]`` (int64 [B']): beam search, repetition and row selection."""

    @abstractmethod
    def share(self) -> Self:
        """Return a copy on the same buffers, valid while only one of the two appends; evictions are independent."""

    @abstractmethod
    def clone(self) -> Self:
        """Return a copy that shares no memory with this one."""

    @abstractmethod
    def padded(self) -> LayerMemory:
        """Return a store of the same slots with equally many exact entries per head, possibly itself."""

    @abstractmethod
    def parts(self) -> dict[str, Any]:
        """Return the content as named tensors and numbers, for files; see `cache.parts.from_parts`."""

    @abstractmethod
    def view(self, slots: Tensor, real: Tensor | None) -> View:
        """Return a view of slots [B, H', K]. real: bool, False for filler; None when all are real."""

    @abstractmethod
    def slot_rows(self) -> tuple[SlotRows, SlotRows]:
        """Return keys and values with all slots of all KV rows as rows: [B * H * capacity, D]."""

    def weight_rows(self) -> Tensor | None:
        """Return the logarithms of weights, float32 [B * H * capacity], in `slot_rows`' order; None: all are 0."""
        return None

    def add_scores(self, sums: Tensor, before: int) -> None:
        """Add sums [B, Hq, n] to the scores of the entries after the first `before`; see roles.Reader.observe."""
        raise NotImplementedError(f"a {type(self).__name__} has no scores")

    def forget_scores(self) -> None:
        """Forget the scores, as after passes that have not added to them."""
        self.derived = {}

    def score_rows(self) -> Tensor | None:
        """Return the scores of all slots, [B * H, G, capacity], G query heads per KV head; None if there are none."""
        return None

    @abstractmethod
    def buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and token indices with all slots, used or not. Raises RuntimeError if there are none."""

    @abstractmethod
    def entry_size(self, without: int = 0) -> int:
        """Bytes of an entry's key, value and weight, or their mean. without: newest tokens not to count."""

    @abstractmethod
    def entry_bytes(self) -> int:
        """Bytes of keys, values and weights, including spare room."""

    @abstractmethod
    def all_tensors(self) -> Iterator[Tensor]:
        """Yield every tensor: keys, values, token indices, the mask of real entries, and derived metadata."""

    def nbytes(self) -> int:
        """Bytes of all tensors, including spare room and derived metadata."""
        return storage_bytes(self.all_tensors())

    # The following is for passes of fixed shapes, which write a token's entry on the device.

    @property
    def stride(self) -> int:
        """Slots per new token."""
        return 1

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Number of slots, used or not."""

    @property
    def next_slot(self) -> int:
        """First unused slot of the buffers that `put` writes."""
        return self.size

    @abstractmethod
    def has_room(self, tokens: int) -> bool:
        """Return True if these buffers have room for `tokens` further tokens."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Tensors used by `put` and attention: buffers of keys, values and index, mask of real entries, and weights."""

    @abstractmethod
    def make_room(self, tokens: int) -> None:
        """Allocate slots for `tokens` further tokens; buffers that have them stay the same objects."""

    @abstractmethod
    def prepare_slots(self, token_index: int) -> None:
        """Fill, in all unused slots, the facts that `put` does not write; coming tokens are real.

        Args:
            token_index: token index of the next token in its row.
        """

    @abstractmethod
    def put(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write the entries of new tokens to prepared slots.

        Touches the buffers only and reads nothing back from the device; call `advance_host_length` afterwards.

        Args:
            keys: [B, H, L, D], L being 1 where a token takes several slots.
            values: [B, H, L, Dv].
            slots: int64, one per slot that the tokens take, prepared by `prepare_slots`.
        """

    def advance_host_length(self, tokens: int = 1) -> None:
        """Count on the host the tokens appended by `put` or by a compiled pass, in every row."""
        self.lengths = tuple(length + tokens for length in self.lengths)


def window_room(span: int) -> int:
    """Return the spare slots of a layer with a window of `span` tokens."""
    return max(1, min(MIN_ROOM, span // 4))
