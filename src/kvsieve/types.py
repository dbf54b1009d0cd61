"""Facts handed to methods. Shape legend: B batch, Hq query heads, H KV heads, G = Hq // H, L new tokens,
N stored entries, K kept entries, D head dimension, W observation window."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Step:
    """Facts of one forward pass, the same for all its layers.

    start: tokens of every row fed before this pass, padding included.
    num_new: tokens fed by this pass (L).
    phase: "prefill" while a turn's prompt is read, "decode" after it.
    is_last_chunk: False only for the leading chunks of a chunked prefill.
    turn: 0 for the first prompt on a cache, 1 for the next ...
    turn_start: value of `start` when this turn's prompt began.
    lengths: true tokens seen so far by each row, this pass included, padding excluded.
    turn_lengths: the same, counting this turn only.
    """

    start: int
    num_new: int
    phase: Literal["prefill", "decode"]
    is_last_chunk: bool
    turn: int
    turn_start: int
    lengths: tuple[int, ...]
    turn_lengths: tuple[int, ...]

    @property
    def ends_prompt(self) -> bool:
        """True in the pass that completes a prompt: the moment post-prompt evictors and propagators act."""
        return self.phase == "prefill" and self.is_last_chunk


@dataclass(frozen=True)
class When:
    """When an evictor acts besides the end of every prompt.

    chunks: also after each earlier chunk of a chunked prefill. steps: also while decoding, whenever this many tokens
    have been generated since it acted last; None for never. looks: it has a `look` as well (roles.Looker), called in
    every pass of a prompt, and of the decoding where `steps` is set, before it acts; looking drops nothing.
    """

    chunks: bool = False
    steps: int | None = None
    looks: bool = False


END_OF_PROMPT = When()


@dataclass(frozen=True)
class Quotas:
    """Parts of the prompt of which a number of entries must stay, per layer and head.

    segment: int32 [B, H, N], the part of each entry from 1 on, 0 for none. counts: int64 [B, S], entries of each part.
    """

    segment: Tensor
    counts: Tensor


class Ranks:
    """The processes that share the heads of every layer, under tensor parallelism; this class is one that is alone.

    Of `size` processes the one of `rank` has the rank-th part of the query heads and of the KV heads, in order. What
    returns a tensor or counts is called on all of them alike, equally often and in the same order, and gives the same
    on all, bit for bit.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def check_heads(self, query_heads: int) -> None:
        """Raise UnsupportedModelError unless a layer that shows so many query heads is divided by heads."""

    def own(self, heads: int) -> slice:
        """Which of `heads`, all there are, are this rank's."""
        each = heads // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def mean(self, part: Tensor) -> Tensor:
        """Mean over the ranks, of what has the same shape on all."""
        return part

    def gather(self, scores: Tensor) -> Tensor:
        """Scores [B, X, N] of this rank's heads -> [B, X * size, M] of all.

        M is the largest N of all ranks; where there are fewer, -inf comes first.
        """
        return scores

    def most(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """For each row the largest count of all ranks."""
        return counts


ALONE = Ranks()


class ModelFacts(Protocol):
    """What some methods need of the model beyond queries, keys and values; worked out when first asked for.

    Both raise UnsupportedModelError, with the reason, where the model does not give it.
    """

    def output_weight(self, layer_idx: int) -> Tensor:
        """[Hq, D, C] view of the attention's output projection: what each query head's D channels become of C.

        In the model's dtype. Gates and norms between attention and projection, which a few models have, are left out.
        """
        ...

    def rotate(self, layer_idx: int, x: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        """Turn x [B, heads, L, D] as the layer turns its queries and keys at `positions`, int64 [B or 1, L].

        A pure rotation (a factor such as YaRN's is left out), the identity in a layer without positions. float32, or
        float64 for float64 `x`. inverse: turn back.
        """
        ...


@dataclass
class LayerContext:
    """What one layer sees right after its attention, with this pass's keys and values already stored.

    query: [B, Hq, L, D], post-RoPE. They belong to the last L of the N stored entries: this pass's queries, or, where
        an evictor acts while decoding, those of its `window` last tokens.
    keys, values: [B, H, N, D], post-RoPE; views of the store, not to be written to.
    index: int32 [B, H, N], column of each entry in the row as it was fed (padding counted), -1 for filler.
    valid: bool [B, H or 1, N], False for padding and filler; None when every entry is real.
    stored: real entries of each row, of its fullest head.
    scale: the factor the model multiplies query-key products with.
    state: scratch of this layer that lives as long as the cache; tensors in it have a row per row of the batch.
    offered: tokens of this turn that have come to this layer, the last `offered` stored entries; offered_counts: real
        ones among them per row. What a propagator chooses from.
    shared: scratch of this pass, the same for all layers; what is put under "report" goes into the statistics.
    protected: bool [B, H, N], entries that the caller wants kept whatever their score; None for none. A row's are the
        same tokens in every layer and head.
    quotas: parts of which so many must stay; None for none.
    model: facts about the model; there for an evictor that names what it needs in `needs` (see roles.Evictor).
    layers: indices of the layers whose entries the plan may reduce, in order; () for all `num_layers`.
    hidden: [B, L, C], the hidden states of this pass's tokens as they enter the layer, and output: [B, Hq, L, Dv], what
        each head's attention made of them; only while a Looker that names "hidden" in `needs` looks.
    ranks: the processes that have the other heads, if Hq and H are not all there are; see roles.heads_needed.
    """

    layer_idx: int
    num_layers: int
    step: Step
    scale: float
    query: Tensor
    keys: Tensor
    values: Tensor
    index: Tensor
    valid: Tensor | None
    stored: tuple[int, ...]
    state: dict[str, Any] = field(default_factory=dict)
    offered: int = 0
    offered_counts: tuple[int, ...] = ()
    shared: dict[str, Any] = field(default_factory=dict)
    protected: Tensor | None = None
    quotas: Quotas | None = None
    model: ModelFacts | None = None
    layers: tuple[int, ...] = ()
    hidden: Tensor | None = None
    output: Tensor | None = None
    ranks: Ranks = ALONE


@dataclass(frozen=True)
class Selection:
    """Entries that stay, per KV head (indices [B, H, K]) or per row (indices [B, K]), as slots of what was offered.

    indices: int64, ascending. Rows that keep fewer than K carry filler on the left, as left padding does.
    lengths: real entries of each row (of its fullest head), at the right end; None when all K are real in every row.
    head_lengths: real entries of each row and head, where heads keep different numbers; then they are stored ragged.
    """

    indices: Tensor
    lengths: tuple[int, ...] | None = None
    head_lengths: tuple[tuple[int, ...], ...] | None = None

    def real(self) -> Tensor | None:
        """bool [B, K], or [B, H, K] for a ragged selection: False for filler; None when there is none."""
        counts = self.lengths if self.head_lengths is None else self.head_lengths
        if counts is None:
            return None
        import torch

        size = self.indices.shape[-1]
        lengths = torch.tensor(counts, device=self.indices.device)
        return torch.arange(size, device=self.indices.device) >= size - lengths[..., None]
