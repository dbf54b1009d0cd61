"""Attention Matching: Fast KV Compaction via Attention Matching (arXiv 2602.16284), with the highest attention keys.

After prefill the model repeats its context, in one pass. Its queries are the references to which fewer entries are
fitted, per layer and KV head, over the query heads of the group and attention to the context alone:

- keys: the entries with the largest root mean square of attention over the references;
- biases: log w, where w within [e^-3, e^3] minimizes |A w - m|^2. A has the exponentials of the chosen keys' logits, m
  their sum over all entries, both divided by each query's largest exponential;
- values: least squares of the attention output, for the chosen keys with their biases.

Layers are compacted during that pass, each before it attends: its queries have passed the compacted layers below.
The choice does not depend on the text after the prompt, so it serves any question. On a later turn the whole
conversation is repeated, and its entries are fitted again with their weights.

Differences from the reference: the chat template and the prompt's end are compacted with the context; the request's
queries count, and of too many, evenly spaced tokens; biases are solved to convergence, not by a clamped least-squares
solution and two steps; values have a ridge towards the chosen entries' own; all heads have the same budget, where the
reference may load measured ones; protected entries keep their values and weights. Keys by orthogonal matching pursuit
are left out.

GRKV (arXiv 2605.31105) spreads evicted information over the values of all kept entries by ridge regression;
`biases=False` is that idea with other keys, references and ridge, and is not the paper's method.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from kvsieve.core.matching import MatchedPart, attended, fitted_values, fitted_weights
from kvsieve.core.selection import entries_at, pack, select_top
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import apply_protection, check_int, hide_padding, parse_layers, refuse_unused, skips
from kvsieve.methods.repeating import RepeatingEvictor, side_by_side
from kvsieve.planning.budget import Budget
from kvsieve.planning.parameters import MOST
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import ProbePasses, Traits
from kvsieve.types import LayerContext, Selection

_STATE = "attention_matching"


@register_method(
    "attentionmatching", title="Attention Matching", paper="arXiv 2602.16284", phase="end of prompt", budget="10%"
)
@dataclass(frozen=True, kw_only=True)
class AttentionMatching(RepeatingEvictor, heads="own", writes=True, query_aware=False):
    """Compact the context into fewer entries with fitted weights and values, for any question.

    budget: entries per layer and KV head. biases: fit weights. values: fit values. on_policy: layers repeat the context
    above compacted ones, else above full KV. queries: most reference queries per KV head. ridge: pull of values towards
    the entries' own, in units of the mean diagonal of the normal equations. repeat_ids, answer_ids: as KVzip's.
    skip_layers: layers that keep all, not counted.
    """

    budget: Budget
    biases: bool = True
    values: bool = True
    on_policy: bool = True
    queries: int = 50_000
    ridge: float = 1e-4
    skip_layers: int | tuple[int, ...] = 0

    @property
    def traits(self) -> Traits:
        return replace(self.TRAITS, writes=self.biases or self.values)

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        super().__post_init__()
        check_int(self, "queries", self.queries, 1)
        if not 0 <= self.ridge < float("inf"):
            raise PlanError(f"AttentionMatching: ridge must be a number of at least 0, got {self.ridge!r}")
        if not self.values:
            refuse_unused(self, "values=False", "ridge")
        object.__setattr__(self, "skip_layers", parse_layers(self, self.skip_layers))
        self.budget.refuse_fewer(self.minimum, "AttentionMatching", "one entry")

    @property
    def probe_tokens(self) -> int:
        return MOST

    def probe_length(self, length: int) -> int:
        return length + len(self._request)

    @property
    def _request(self) -> tuple[int, ...]:
        return (*(self.repeat_ids or ()), *(self.answer_ids or ()))

    def probe(self, passes: ProbePasses) -> None:
        whole = passes.branch()
        whole.read_rest()
        own = [ids[real] for ids, real in zip(passes.ids, passes.real, strict=True)]
        rows = [torch.cat([tokens.new_tensor(self._request), tokens]) for tokens in own]
        counts = tuple(self.entries(len(tokens)) for tokens in own)
        compact = functools.partial(self._compact, passes, counts, tuple(map(len, rows)))
        whole.branch().feed(*side_by_side(rows, passes), compact=compact)

    def _compact(
        self, passes: ProbePasses, counts: tuple[int, ...], fed: tuple[int, ...], ctx: LayerContext
    ) -> Selection | None:
        """Fit the context's entries of a layer; return them with the tokens fed, ``fed[b]`` in row b, on policy."""
        size = ctx.keys.shape[2] - ctx.query.shape[2]
        stored = tuple(entries - new for entries, new in zip(ctx.stored, fed, strict=True))
        kept = tuple(map(min, counts, stored))
        if skips(self.skip_layers, ctx) or kept == stored:
            return None
        real = None if ctx.valid is None else ctx.valid[:, 0, size:]
        most = max(1, self.queries * ctx.keys.shape[1] // ctx.query.shape[1])
        found = self.matched(_first(ctx, size, stored), *_sampled(ctx.query, real, fed, most), kept)
        parts = {"slots": found.indices, "real": found.real(), "values": found.values, "weight": found.log_weight}
        state = {f"{_STATE}_{name}": part for name, part in parts.items() if part is not None}
        passes.state(ctx.layer_idx).update(state)
        return _with_fed(ctx, found, fed) if self.on_policy else None

    def matched(self, ctx: LayerContext, query: Tensor, real: Tensor | None, kept: tuple[int, ...]) -> Selection:
        """Return ``kept[b]`` entries of row b that attract the attention of all for the queries [B, Hq, T, D].

        real: bool [B, T], False for filler; None if all are real.
        """
        part = MatchedPart(ctx.asks(query), ctx.keys, ctx.values, real, ctx.valid, ctx.log_weight)
        whole = attended(part)
        chosen = select_top(*apply_protection(ctx, hide_padding(ctx, whole.scores), kept))
        few = part.at(chosen.indices, chosen.real())
        fixed = None if ctx.protected is None else ctx.protected.gather(2, chosen.indices)
        if self.biases:
            few = replace(few, log_weight=fitted_weights(few, whole, fixed))
            chosen = replace(chosen, log_weight=few.log_weight)
        return replace(chosen, values=fitted_values(few, whole, self.ridge, fixed)) if self.values else chosen

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        parts = {name: ctx.state.pop(f"{_STATE}_{name}", None) for name in ("slots", "real", "values", "weight")}
        if parts["slots"] is None:
            return None
        real = parts["real"]
        lengths = None if real is None else tuple(real.sum(1).tolist())
        return Selection(parts["slots"], lengths, values=parts["values"], log_weight=parts["weight"])


def _first(ctx: LayerContext, size: int, stored: tuple[int, ...]) -> LayerContext:
    """Return a context with the first `size` entries alone, ``stored[b]`` real ones in row b."""
    names = ("keys", "values", "index", "valid", "protected", "log_weight")
    parts: dict[str, Any] = {name: None if vars(ctx)[name] is None else vars(ctx)[name][:, :, :size] for name in names}
    return replace(ctx, stored=stored, quotas=None, **parts)


def _sampled(query: Tensor, real: Tensor | None, fed: tuple[int, ...], most: int) -> tuple[Tensor, Tensor | None]:
    """Return queries [B, Hq, T, D] of evenly spaced tokens of each row, at most `most`, and bool [B, T] or None.

    Args:
        query: [B, Hq, L, D].
        real: bool [B, L], False for filler; None without.
        fed: real ones of each row.
        most: tokens.
    """
    length = query.shape[2]
    counts = [min(count, most) for count in fed]
    if real is None and counts[0] == length:
        return query, None
    columns = torch.zeros(len(fed), max(counts), dtype=torch.int64)
    shown = torch.zeros(len(fed), max(counts), dtype=torch.bool)
    for row, (count, new) in enumerate(zip(counts, fed, strict=True)):
        columns[row, :count] = ((torch.arange(count, dtype=torch.float64) + 0.5) * new / count).long()
        shown[row, :count] = True
    columns, shown = columns.to(query.device), shown.to(query.device)
    if real is not None:
        # The places of each row's tokens, in order.
        columns = (~real).to(torch.uint8).argsort(dim=1, stable=True).gather(1, columns)
    picked = query.gather(2, columns[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
    return picked, None if min(counts) == max(counts) else shown


def _with_fed(ctx: LayerContext, found: Selection, fed: tuple[int, ...]) -> Selection:
    """Return a selection of a context's entries with those of the tokens fed after them."""
    size = ctx.keys.shape[2] - ctx.query.shape[2]
    heads = ctx.keys.shape[1]
    real = found.real()
    # Filler writes to a slot of its own, which is cut off.
    slots = found.indices if real is None else found.indices.masked_fill(~real[:, None], size)
    stays = torch.zeros(*slots.shape[:2], size + 1, dtype=torch.bool, device=slots.device).scatter_(2, slots, True)
    new = torch.ones_like(ctx.index[:, :, size:], dtype=torch.bool)
    new = new if ctx.valid is None else new & ctx.valid[:, :, size:]
    mask = torch.cat([stays[:, :, :size], new.expand(-1, heads, -1)], 2)
    kept = found.lengths or (found.indices.shape[2],) * len(fed)
    whole = pack(mask, tuple(map(sum, zip(kept, fed, strict=True))))

    def written(stored: Tensor, part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        before = torch.cat([stored[:, :, :size], torch.zeros_like(stored[:, :, :1])], 2)
        at = slots if part.ndim == 3 else slots[..., None].expand_as(part)
        before = before.scatter(2, at, part.to(before.dtype))[:, :, :size]
        return entries_at(torch.cat([before, stored[:, :, size:]], 2), whole.indices)

    weights = torch.zeros(ctx.index.shape, device=slots.device) if ctx.log_weight is None else ctx.log_weight
    values, log_weight = written(ctx.values, found.values), written(weights, found.log_weight)
    return replace(whole, values=values, log_weight=log_weight)
