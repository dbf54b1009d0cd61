"""Anchor layers, which choose the entries that later layers read: by similarity of attention, after Kascade."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import UnsupportedModelError
from kvsieve.lab.calibrate.heads import last_weights
from kvsieve.lab.calibrate.reading import read
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Fingerprint
from kvsieve.planning.roles import Evictor
from kvsieve.types import LayerContext, Selection, When

# Entries compared: Kascade's share of the prompt, and its least number.
_SHARE, _LEAST = 0.1, 128


def anchor_count(layers: int) -> int:
    """Return how many anchors a model of so many layers gets: 5 of 32, as in the paper, at least 2."""
    return min(max(2, round(layers * 5 / 32)), layers)


@dataclass
class AnchorSimilarity:
    """Similarity of layers by the entries that their KV heads attend to.

    For each pair of layers and of their KV heads: the attention of the later layer's head on the best k entries of the
    earlier one's head, as a share of its attention on its own best k; the least over the queries of a prompt, and the
    mean over prompts. Attention is summed over the query heads of a KV head, k is a tenth of the prompt, at least 128.

    Attributes:
        sums: float32 [L, L, H, H'], of the pairs (earlier layer, later layer, its head, the earlier one's head).
        importance: float32 [L], summed over prompts: 1 minus the cosine of a layer's input and the input plus its
            attention's output; 1 where that is not known.
    """

    layers: int
    heads: int
    sums: Tensor = field(init=False)
    importance: Tensor = field(init=False)
    prompts: int = 0
    _weights: dict[int, Tensor] = field(default_factory=dict)
    _best: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = torch.zeros(self.layers, self.layers, self.heads, self.heads)
        self.importance = torch.zeros(self.layers)

    def see(self, ctx: LayerContext, count: int) -> None:
        """Note a layer's attention from the last `count` queries of a pass without padding."""
        size = ctx.keys.shape[2]
        weights = last_weights(ctx, count).sum(1).float().cpu()
        self._weights[ctx.layer_idx] = weights
        self._best[ctx.layer_idx] = weights.topk(min(max(_LEAST, int(_SHARE * size)), size - count + 1), dim=-1).indices

    def end_prompt(self) -> None:
        """Compare the layers of a prompt."""
        for later, weights in self._weights.items():
            own = weights.gather(-1, self._best[later]).sum(-1)
            for earlier in [layer for layer in self._best if layer <= later]:
                best = self._best[earlier]
                # [H, H', T, k]: each head's attention on each set.
                pairs = (len(weights), len(best))
                at = best[None].expand(*pairs, -1, -1)
                held = weights[:, None].expand(*pairs, -1, -1).gather(-1, at).sum(-1)
                self.sums[earlier, later] += (held / own[:, None]).amin(-1)
        self.prompts += 1
        self._weights.clear()
        self._best.clear()

    def result(self) -> Tensor:
        """Return the mean similarities [L, L, H, H']."""
        return self.sums / max(self.prompts, 1)

    def between_layers(self) -> Tensor:
        """Return [L, L]: each head with the earlier layer's head that suits it best, times the later's importance."""
        mean = self.importance / max(self.prompts, 1)
        return self.result().amax(-1).mean(-1) * mean

    def heads_of(self, anchors: Sequence[int]) -> list[list[int]]:
        """Return, for each layer and KV head, its anchor's KV head that suits it best; its own in an anchor."""
        similarity = self.result()
        found = []
        for layer in range(self.layers):
            anchor = max(one for one in anchors if one <= layer)
            best = similarity[anchor, layer].argmax(-1).tolist()
            found.append(list(range(self.heads)) if anchor == layer else best)
        return found


def choose_anchors(similarity: Tensor, count: int) -> list[int]:
    """Return `count` anchors, the first being layer 0, that maximize the sum of similarities of layers and anchors.

    Args:
        similarity: [L, L], of an earlier layer as the anchor of a later one.
        count: at most L.
    """
    layers = len(similarity)
    table = similarity.double().tolist()
    # best[i]: the largest sum over the layers before i with so many anchors, and these.
    best: list[tuple[float, list[int]] | None] = [(0.0, [])] + [None] * layers
    for _ in range(count):
        longer: list[tuple[float, list[int]] | None] = [None] * (layers + 1)
        for end in range(1, layers + 1):
            for anchor in range(end):
                before = best[anchor]
                if before is None:
                    continue
                total = before[0] + sum(table[anchor][anchor:end])
                kept = longer[end]
                if kept is None or total > kept[0]:
                    longer[end] = total, [*before[1], anchor]
        best = longer
    found = best[layers]
    assert found is not None
    return found[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Importance(Evictor, needs=("hidden", "output_weight"), heads="own"):
    """Drops nothing; adds the importance of every layer to `sums`."""

    sums: Tensor
    budget: Budget = Budget(ratio=1.0)

    @property
    def when(self) -> When:
        return When(observes=True)

    def observe(self, ctx: LayerContext) -> None:
        assert ctx.hidden is not None and ctx.output is not None and ctx.model is not None
        before = ctx.hidden[0].float()
        weight = ctx.model.output_weight(ctx.layer_idx).float()
        after = before + torch.einsum("hld,hdc->lc", ctx.output[0].float(), weight)
        self.sums[ctx.layer_idx] += 1 - torch.cosine_similarity(before, after, dim=-1).mean().cpu()

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        return None


def importance_into(sums: Tensor) -> Evictor:
    """Return an evictor that drops nothing and adds each layer's importance to `sums` [L]."""
    return _Importance(sums=sums)


def measured_anchors(
    model: Any, answers: Sequence[tuple[Tensor, Tensor]], shape: Fingerprint, step: Callable[[], None]
) -> dict[str, Any]:
    """Return the anchors of a model, their heads, and each layer's similarity with its anchor, JSON-ready.

    Args:
        model: of transformers.
        answers: prompts [1, N] and their answers [1, T].
        shape: of the model.
        step: called before each prompt.
    """
    similarity = AnchorSimilarity(shape.layers, shape.kv_heads)
    plan = Plan(evict=importance_into(similarity.importance))
    for prompt, answer in answers:
        step()
        count = answer.shape[1]

        def see(ctx: LayerContext, count: int = count) -> None:
            similarity.see(ctx, count)

        ids = torch.cat([prompt, answer[:, :-1]], 1)
        try:
            read(model, plan, ids, see)
        except UnsupportedModelError:
            # All layers count alike.
            plan = Plan()
            read(model, plan, ids, see)
        if plan.evict is None:
            similarity.importance += 1
        similarity.end_prompt()
    chosen = choose_anchors(similarity.between_layers(), anchor_count(shape.layers))
    best = similarity.result().amax(-1).mean(-1)
    found = [float(best[max(one for one in chosen if one <= layer), layer]) for layer in range(shape.layers)]
    return {
        "layers": chosen,
        "heads": similarity.heads_of(chosen),
        "weighted": plan.evict is not None,
        "similarity": [round(value, 4) for value in found],
    }
