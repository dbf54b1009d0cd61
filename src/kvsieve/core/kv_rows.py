"""KV rows: the entries of one KV head of one batch row, in order and without padding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvsieve.lazy import Tensor, torch


@dataclass
class PageOccupancy:
    """Occupancy of the pages of KV rows with one length, which is known on the device only.

    Attributes:
        hidden: bool [pages], True for pages beyond the end.
        part: float64 [pages], filled share of each page, 0 beyond the end.
        newest: int64 [1], index of the page with the newest entry.
        first: bool [1], True if the newest entry is the first of its page.
        count: int64 [], pages with at least one entry.
    """

    hidden: Tensor
    part: Tensor
    newest: Tensor
    first: Tensor
    count: Tensor


class DeviceLength:
    """Length of KV rows, kept on the device so that shapes stay the same from token to token.

    Derived values are computed once for all KV rows with this length.

    Attributes:
        count: int64 [], entries of each KV row, at least 1.
    """

    def __init__(self, count: Tensor) -> None:
        self.count = count
        self._real: dict[tuple[int, int], Tensor] = {}
        self._occupancy: dict[tuple[int, int], PageOccupancy] = {}

    def real(self, size: int) -> Tensor:
        """Return a mask of the entries that exist: bool [size], True below the length."""
        return self.shown(size, 1)[0]

    def shown(self, size: int, new: int) -> Tensor:
        """Return a mask of the entries that each of the last `new` tokens sees: bool [new, size]."""
        if (size, new) not in self._real:
            slots = torch.arange(size, device=self.count.device)
            self._real[size, new] = slots < self.count - torch.arange(new - 1, -1, -1, device=slots.device)[:, None]
        return self._real[size, new]

    def occupancy(self, page: int, pages: int) -> PageOccupancy:
        if (page, pages) not in self._occupancy:
            fills = (self.count - torch.arange(pages, device=self.count.device) * page).clamp(0, page)
            last = self.count - 1
            self._occupancy[page, pages] = PageOccupancy(
                hidden=fills == 0,
                part=fills.double() / page,
                newest=(last // page).view(1),
                first=(last % page == 0).view(1),
                count=last // page + 1,
            )
        return self._occupancy[page, pages]


@runtime_checkable
class IncrementalMetadata(Protocol):
    """Metadata of KV rows that a reader with the trait ``static_shapes`` updates entry by entry.

    Attributes:
        size: entries added. A pass with fixed shapes adds one on the device; the host counts it here.
    """

    size: int

    def make_room(self, entries: int) -> None:
        """Allocate room for `entries` entries in all, so that no shape changes during decode."""
        ...

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that a recorded pass reads and writes."""
        ...

    def accumulators(self) -> tuple[Tensor, ...]:
        """Return those of `tensors` that would be wrong if an entry were added twice."""
        ...

    def all_tensors(self) -> Iterable[Tensor]:
        """Return all tensors, including those that are recomputed when needed."""
        ...

    def update_bytes(self, before: int, after: int) -> int:
        """Return the bytes read to grow from `before` to `after` entries."""
        ...


@runtime_checkable
class TruncatableMetadata(Protocol):
    """Metadata that can forget the newest entries; other metadata is computed again when tokens are taken back."""

    def keep_first(self, entries: int) -> None:
        """Forget all but the first `entries` entries; `size` may become less, and later entries are taken in again."""
        ...


class SlotRows(Protocol):
    """Rows of a buffer by slot: a tensor, or an object that decodes such rows."""

    @property
    def dtype(self) -> torch.dtype: ...

    def element_size(self) -> int: ...

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Return rows [N, D] of slots int64 [N]; dim: 0."""
        ...


@dataclass
class KVRows:
    """X KV rows of `size` entries each.

    A KV row is the entries of one KV head of one batch row (of one query head, where each has its own set).

    Attributes:
        keys: [S, D], all slots that may hold the entries; a tensor, or an object that returns rows by index_select.
        values: [S, Dv], the same slots.
        body: int64 [X, K], slots of the first K entries; None if K is 0.
        tail: int64 [X], slot of entry K.
        stride: slots from one entry after the first K to the next.
        size: entries of each KV row; with `length`, an upper bound.
        length: entries that exist, on the device; the others may be read but must not be chosen. None: all exist.
        heads: consecutive KV rows that belong to one batch row, where its heads have as many entries.
        log_weight: float32 [S], added to the logits of the slots' entries; None: all weigh 1.
        scores: [buffers, G, slots], scores of the slots of each KV head's buffer for its G query heads; `keys` has the
            slots of one buffer after another. None: there are none; see Reader.observes.
    """

    keys: SlotRows
    values: SlotRows
    body: Tensor | None
    tail: Tensor
    stride: int
    size: int
    length: DeviceLength | None = None
    heads: int = 1
    log_weight: Tensor | None = None
    scores: Tensor | None = None

    @property
    def in_buffers(self) -> bool:
        """True if slots belong to buffers that kernels can read; encoded entries do not."""
        return isinstance(self.keys, Tensor)

    def newest(self) -> Tensor:
        """Return the index of the last entry of every KV row, int64 [X, 1]."""
        last = self.size - 1 if self.length is None else self.length.count - 1
        return (torch.zeros_like(self.tail) + last)[:, None]

    def keys_at(self, entries: Tensor) -> Tensor:
        return self._rows(self.keys, self.slots(entries))

    def values_at(self, entries: Tensor) -> Tensor:
        return self._rows(self.values, self.slots(entries))

    def log_weights_at(self, entries: Tensor) -> Tensor | None:
        """Return the logarithms of the entries' weights, the shape of `entries`; None if all weigh 1."""
        return None if self.log_weight is None else self.log_weight[self.slots(entries)]

    def scores_at(self, entries: Tensor) -> Tensor | None:
        """Return the scores of entries [X, n] for each query head, [X, G, n]; None if there are none."""
        if self.scores is None:
            return None
        slots = self.slots(entries)[:, None]
        groups, size = self.scores.shape[1:]
        return self.scores[slots // size, torch.arange(groups, device=slots.device)[:, None], slots % size]

    def read(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        slots = self.slots(entries)
        return self._rows(self.keys, slots), self._rows(self.values, slots)

    def span(self, start: int, end: int) -> Tensor:
        """Return indices start ... end - 1 for every KV row, int64 [X, end - start]."""
        return torch.arange(start, end, device=self.tail.device).expand(len(self.tail), -1)

    def slots(self, entries: Tensor) -> Tensor:
        kept = 0 if self.body is None else self.body.shape[1]
        after = entries * self.stride + (self.tail - kept * self.stride).view(-1, *(1,) * (entries.ndim - 1))
        if self.body is None:
            return after
        before = self.body.gather(1, entries.clamp(max=kept - 1).flatten(1)).view(entries.shape)
        return torch.where(entries < kept, before, after)

    @staticmethod
    def _rows(buffer: SlotRows, slots: Tensor) -> Tensor:
        # Whole rows are copied, which is faster than gather along an expanded index.
        return buffer.index_select(0, slots.reshape(-1)).view(*slots.shape, -1)


@dataclass(frozen=True)
class ReadFacts:
    """Facts about one batch row in one layer, from which a reader may derive its parameters.

    Attributes:
        layer_idx: index of the layer.
        num_layers: layers of the model.
        length: tokens of the conversation without padding, at the end of the turn's prompt.
        new_tokens: tokens expected after the prompt, 0 if unknown.
        dim: D, the size of a key.
        page: entries of an engine's pages, of which whole ones are read; None where any entries can be.
    """

    layer_idx: int
    num_layers: int
    length: int
    new_tokens: int
    dim: int
    page: int | None = None


@dataclass
class Choice:
    """Entries that a reader chose from each KV row.

    Attributes:
        entries: int64 [X, k], the same for all query heads of a KV row, or [X, G, k], one set per query head.
        blend: (weight [X, G], vector [X, Dv]); the output becomes ``weight * output + (1 - weight) * vector``. None: no
            change.
        metadata_bytes: bytes of metadata read to choose.
    """

    entries: Tensor
    blend: tuple[Tensor, Tensor] | None = None
    metadata_bytes: int = 0
