"""Facts passed to methods.

Shape legend: B batch, Hq query heads, H KV heads, G = Hq // H, L new tokens, N stored entries, K kept entries, D head
dimension, W observation window.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False)
class AttentionQueries:
    """Queries of a layer, and how the model makes attention weights of their products with keys.

    Attributes:
        query: [B, Hq, L, D]; [X, G, D] where they are those of KV rows.
        scale: factor of the products.
        softcap: logits become softcap * tanh(logits / softcap), after the scale and before masks. Default None: they
            stay as they are.
        sinks: [Hq], a logit per query head that takes part in the softmax and has no value; [X, G] for KV rows.
            Default None: weights of real entries sum to one.
    """

    query: Tensor
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True without cap and sinks."""
        return self.softcap is None and self.sinks is None

    @property
    def stored(self) -> AttentionQueries:
        """Return it with queries in the space of the stored keys."""
        return self

    def output(self, mixed: Tensor) -> Tensor:
        """Return the attention output [B, Hq, L, Dv] for a mix of stored values."""
        return mixed

    def part(self, columns: slice) -> Self:
        """Return it with the queries of a slice of the columns."""
        return replace(self, query=self.query[:, :, columns])

    def of(self, query: Tensor) -> AttentionQueries:
        """Return it with other queries of the same heads."""
        return AttentionQueries(query, self.scale, self.softcap, self.sinks)

    def heads(self, which: slice | Tensor) -> AttentionQueries:
        """Return it for a slice of the query heads, or those with these indices."""
        sinks = None if self.sinks is None else self.sinks[which]
        return AttentionQueries(self.query[:, which], self.scale, self.softcap, sinks)

    def per_kv_row(self, heads: int) -> AttentionQueries:
        """Return it for the KV rows [B * heads] of one token, in order."""
        batch, query_heads, _, dim = self.query.shape
        query = self.query.reshape(batch * heads, query_heads // heads, dim)
        sinks = None if self.sinks is None else self.sinks.view(heads, -1).repeat(batch, 1)
        return AttentionQueries(query, self.scale, self.softcap, sinks)

    def at(self, kv_rows: Tensor) -> AttentionQueries:
        """Return it for some KV rows, of all."""
        sinks = None if self.sinks is None else self.sinks[kv_rows]
        return AttentionQueries(self.query[kv_rows], self.scale, self.softcap, sinks)


@dataclass(frozen=True)
class Step:
    """Facts of one forward pass, the same for all its layers.

    Attributes:
        start: tokens of every row fed before this pass, padding included.
        num_new: tokens fed by this pass (L).
        phase: "prefill" or "decode".
        is_last_chunk: False only for the leading chunks of a chunked prefill.
        turn: 0 for the first prompt on a cache, 1 for the next ...
        turn_start: value of `start` at the start of this turn's prompt.
        lengths: tokens seen so far by each row, including this pass, without padding.
        turn_lengths: those of this turn.
        mask: bool [B, columns], False for padding, of all columns fed so far; None without padding.
    """

    start: int
    num_new: int
    phase: Literal["prefill", "decode"]
    is_last_chunk: bool
    turn: int
    turn_start: int
    lengths: tuple[int, ...]
    turn_lengths: tuple[int, ...]
    mask: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def ends_prompt(self) -> bool:
        """True in the pass that completes a prompt, when post-prompt evictors and propagators act."""
        return self.phase == "prefill" and self.is_last_chunk


@dataclass(frozen=True)
class When:
    """Moments an evictor acts at, besides the end of every prompt.

    Attributes:
        chunks: also after each earlier chunk of a chunked prefill. Default False.
        steps: also during decode, each time this many tokens have been generated. Default None: never.
        observes: call `observe` in every pass of a prompt, and of decode if `steps` is set, before it acts; observing
            drops nothing. Default False.
    """

    chunks: bool = False
    steps: int | None = None
    observes: bool = False


END_OF_PROMPT = When()


@dataclass(frozen=True)
class Quotas:
    """Parts of the prompt that must keep a number of entries, per layer and head.

    Attributes:
        segment: int32 [B, H, N], part of each entry, from 1; 0 for none.
        counts: int64 [B, S], entries of each part that must stay.
    """

    segment: Tensor
    counts: Tensor


class Ranks:
    """Processes that share the heads of every layer, under tensor parallelism; this class is a single process.

    Process `rank` of `size` has the rank-th part of the query heads and of the KV heads, in order. Methods that return
    a tensor or counts are called on all processes equally often and in the same order, and return bit-identical results
    on all.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def check_heads(self, query_heads: int) -> None:
        """Raise UnsupportedModelError unless a layer with `query_heads` query heads is divided by heads."""

    def own(self, heads: int) -> slice:
        """Return the slice of this rank's heads among all `heads`."""
        count = heads // self.size
        return slice(self.rank * count, (self.rank + 1) * count)

    def mean(self, part: Tensor) -> Tensor:
        """Average over the ranks a tensor of the same shape on all."""
        return part

    def gather(self, scores: Tensor) -> Tensor:
        """Gather scores [B, X, N] of this rank's heads to [B, X * size, M] of all.

        M is the largest N of all ranks; shorter ones get -inf on the left.
        """
        return scores

    def most(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the largest count of all ranks, for each row."""
        return counts


ALONE = Ranks()


class ModelFacts(Protocol):
    """Facts of the model that some methods need besides queries, keys and values; computed on demand.

    Both methods raise UnsupportedModelError, with the reason, if the model lacks the fact.
    """

    def output_weight(self, layer_idx: int) -> Tensor:
        """Return a view of the attention's output projection, from each query head's D channels to C.

        In the model's dtype, without the gates and norms that a few models have before the projection.

        Returns:
            [Hq, D, C].
        """
        ...

    def rotate(self, layer_idx: int, x: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotate x as the layer rotates its queries and keys.

        A pure rotation (without a factor such as YaRN's), the identity in a layer without positions.

        Args:
            layer_idx: index of the layer.
            x: [B, heads, L, D].
            positions: int64 [B or 1, L].
            inverse: rotate back.

        Returns:
            The shape of `x`, in float32, or float64 for float64 `x`.
        """
        ...


@dataclass
class LayerContext:
    """One layer right after its attention, with this pass's keys and values stored.

    Attributes:
        layer_idx: index of the layer.
        num_layers: layers of the model.
        step: facts of this pass.
        scale: factor of the model's query-key products.
        query: [B, Hq, L, D], post-RoPE, of the last L of the N stored entries: this pass's queries or, if an evictor
            acts during decode, those of its `window` last tokens. A query is padding if its entry is, which also
            happens in rows with fewer tokens than the window.
        keys: [B, H, N, D], post-RoPE; a read-only view of the store.
        values: [B, H, N, Dv]; a read-only view of the store.
        index: int32 [B, H, N], token index of each entry in its row (padding counted), -1 for filler.
        valid: bool [B, H or 1, N], False for padding and filler; None if there is none.
        stored: real entries of each row, of its fullest head.
        state: scratch of this layer that lives as long as the cache; tensors in it have a row per row of the batch.
        offered: number of last stored entries that are this turn's tokens in this layer, from which a propagator
            chooses.
        offered_counts: real ones among the offered, per row.
        shared: scratch of this pass, the same for all layers; values under "report" are added to the statistics.
        protected: bool [B, H, N], entries that must be kept regardless of their score, the same tokens of a row in
            every layer and head; None for none.
        quotas: parts that must keep a number of entries; None for none.
        model: facts about the model, for an evictor with traits that list it in `needs` (see roles.Traits).
        layers: indices of the layers that the plan may reduce, in order; () for all `num_layers`.
        hidden: [B, T, C], hidden states of this pass's tokens at the layer's input, for an evictor that lists "hidden"
            in `needs`. At `select` these are the last tokens of the prompt, at least the `window` but after a chunked
            prefill no earlier chunk; while decoding, the newest ones.
        output: [B, Hq, T, Dv], each head's attention output; as `hidden`.
        ids: int64 [B, columns], ids of all tokens fed so far, padding included, by the columns of `index`; for an
            evictor that lists "tokens" in `needs`, otherwise maybe None.
        ranks: the processes with the other heads, if Hq and H are not all there are; see roles.Traits.heads.
        softcap: as in AttentionQueries, needed to compute weights; None for no cap.
        sinks: [Hq], as `softcap`.
        log_weight: float32 [B, H, N], logarithms of the entries' weights, see `Selection`; None: all weigh 1.
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
    ids: Tensor | None = None
    ranks: Ranks = ALONE
    softcap: float | None = None
    sinks: Tensor | None = None
    log_weight: Tensor | None = None

    def asks(self, query: Tensor) -> AttentionQueries:
        """Return queries [B, Hq, T, D] with all that this layer makes weights by."""
        return AttentionQueries(query, self.scale, self.softcap, self.sinks)


@dataclass(frozen=True)
class Selection:
    """Entries that stay, as slots of the offered ones.

    Attributes:
        indices: int64, ascending, [B, H, K] per KV head or [B, K] per row. Rows that keep fewer than K have filler on
            the left, like left padding.
        lengths: real entries of each row (of its fullest head), at the right end; None if all K are real in every row.
        head_lengths: real entries of each row and head, if heads keep different numbers; they are then stored ragged.
        keys: [B, H, K, D], post-RoPE, written in place of the stored keys; None: they stay. For evictors with the trait
            `writes`, as `values` and `log_weight`.
        values: [B, H, K, Dv], as `keys`.
        log_weight: float32 [B, H, K], added to an entry's logit in every later attention: an entry of weight w counts
            as w entries. None: the stored weights stay.
    """

    indices: Tensor
    lengths: tuple[int, ...] | None = None
    head_lengths: tuple[tuple[int, ...], ...] | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    log_weight: Tensor | None = None

    @property
    def writes(self) -> bool:
        """True if it carries keys, values or weights."""
        return any(part is not None for part in (self.keys, self.values, self.log_weight))

    def real(self) -> Tensor | None:
        """Mask of the real entries: bool [B, K], or [B, H, K] for a ragged selection; None without filler."""
        counts = self.lengths if self.head_lengths is None else self.head_lengths
        if counts is None:
            return None
        import torch

        size = self.indices.shape[-1]
        lengths = torch.tensor(counts).to(self.indices.device, non_blocking=True)
        return torch.arange(size, device=self.indices.device) >= size - lengths[..., None]

    def real_of_heads(self) -> Tensor | None:
        """Mask of the real entries: bool [B, 1 or H, K]; None without filler."""
        real = self.real()
        return real[:, None] if real is not None and real.ndim == 2 else real
