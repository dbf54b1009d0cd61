"""Shares of entries that heads keep at every budget, by what entries are worth to answers, for LU-KV (2602.08585)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import UnsupportedModelError
from kvsieve.lab.calibrate.heads import last_weights
from kvsieve.lab.calibrate.reading import read
from kvsieve.methods.base import ScoredEvictor
from kvsieve.methods.criticalkv import projected_norm
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Fingerprint
from kvsieve.planning.roles import DelegatingEvictor, Evictor
from kvsieve.types import LayerContext, Selection, When

# Budgets of 1%, 2% ... 99%; no head drops more than 99% of its entries.
BUDGETS = 99


def utility(ctx: LayerContext, count: int) -> Tensor:
    """Return the utility of the entries before the last `count` ones of a pass without padding, float32 [H, N].

    The largest attention of these last queries to an entry, over the query heads of the group, each times the L2 norm
    of the entry's value after the head's output projection; norms are shares of the layer's sum over heads and entries.
    """
    size = ctx.keys.shape[2] - count
    attention = last_weights(ctx, count)[..., :size].amax(2)
    norms = projected_norm(ctx, power=2)[0, :, :size].view_as(attention)
    return (attention * (norms / norms.sum())).amax(1)


def head_shares(worth: Tensor, scores: Tensor, spare: int) -> Tensor:
    """Return the share of its entries that each head keeps at budgets of 1% to 99%, if the cheapest ranks are dropped.

    Args:
        worth: utility of the entries, [L, H, N].
        scores: the scorer's, [L, H, N], +inf for the `spare` entries of each head that it always keeps.
        spare: at least 0, less than N.

    Returns:
        float64 [L, H, 99]; no head keeps less than `spare` entries, or 1% of N.
    """
    layers, heads, length = worth.shape
    order = scores.double().argsort(dim=-1, descending=True, stable=True)[..., spare:]
    ranked = worth.double().gather(-1, order).flatten(0, 1)
    droppable = length - max(round(length / (BUDGETS + 1)), spare)
    # A head's prices from its lowest rank on; they rise, so that the cheapest of all come in its order, too.
    prices = torch.tensor([rising(head[::-1]) for head in ranked.tolist()], dtype=torch.float64)[:, :droppable]
    owner = prices.flatten().argsort(stable=True) // max(droppable, 1)
    shares = torch.empty(layers, heads, BUDGETS, dtype=torch.float64)
    for budget in range(1, BUDGETS + 1):
        drops = round((BUDGETS + 1 - budget) / (BUDGETS + 1) * worth.numel())
        dropped = owner[:drops].bincount(minlength=layers * heads).view(layers, heads)
        shares[..., budget - 1] = (length - dropped).double() / length
    return shares


def rising(values: Sequence[float]) -> list[float]:
    """Return the slopes of the lower convex hull of the values' running sum, one per value, never falling."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, size = value, 1
        while blocks and blocks[-1][0] * size >= total * blocks[-1][1]:
            before, more = blocks.pop()
            total, size = total + before, size + more
        blocks.append((total, size))
    return [total / size for total, size in blocks for _ in range(size)]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ranking(DelegatingEvictor, heads="own"):
    """Drops nothing; leaves the scores of every layer in `found`, [H, N]."""

    found: dict[int, Tensor]

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        self.found[ctx.layer_idx] = self.base.scores(ctx)[0].cpu()  # type: ignore[attr-defined]
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Utility(Evictor, needs=("output_weight",), heads="own"):
    """Drops nothing; leaves the utility of every layer's entries before the last `count` in `found`, [H, N]."""

    found: dict[int, Tensor]
    count: int
    budget: Budget = Budget(ratio=1.0)

    @property
    def when(self) -> When:
        return When(observes=True)

    def observe(self, ctx: LayerContext) -> None:
        self.found[ctx.layer_idx] = utility(ctx, self.count).cpu()

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        return None


def measured_budgets(
    model: Any,
    answers: Sequence[tuple[Tensor, Tensor]],
    shape: Fingerprint,
    scorer: ScoredEvictor,
    step: Callable[[], None],
) -> Tensor | str:
    """Return the shares that heads keep at budgets of 1% to 99%, the mean over prompts.

    Args:
        model: of transformers.
        answers: prompts [1, N] and their answers [1, T], T at least 2; all tokens but the last attend to the prompt.
        shape: of the model.
        scorer: ranks entries at the end of the prompt alone; its +inf must be ``minimum - 1`` entries of each head.
        step: called before each prompt.

    Returns:
        float64 [layers, KV heads, 99], the budgets themselves for layers with local attention; or the reason why the
        model has none.
    """
    even = torch.arange(1, BUDGETS + 1, dtype=torch.float64) / (BUDGETS + 1)
    total = torch.zeros(shape.layers, shape.kv_heads, BUDGETS, dtype=torch.float64)
    for prompt, answer in answers:
        step()
        scores: dict[int, Tensor] = {}
        worth: dict[int, Tensor] = {}
        try:
            read(model, Plan(evict=_Ranking(base=scorer, found=scores)), prompt)
            ids = torch.cat([prompt, answer[:, :-1]], 1)
            read(model, Plan(evict=_Utility(found=worth, count=answer.shape[1] - 1)), ids)
        except UnsupportedModelError as error:
            return str(error)
        layers = sorted(scores)
        utilities, ranks = (torch.stack([found[layer] for layer in layers]) for found in (worth, scores))
        shares = even.repeat(shape.layers, shape.kv_heads, 1)
        shares[layers] = head_shares(utilities, ranks, scorer.minimum - 1)
        total += shares
    return total / len(answers)
