"""Passes that a plan needs before a prompt is complete, and that are forgotten (roles.ProbingEvictor).

All but the last ``max(1, window)`` tokens of the prompt are read as they always are, nothing being evicted. Then the
evictor probes branches of the cache, which share its buffers and are dropped, and leaves its scores in the
layers' states. The rest of the prompt completes it as ever: that pass attends to everything, and evicts.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvsieve.budget import Budget
from kvsieve.errors import KvsieveWarning
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.plans import Plan
from kvsieve.roles import Evictor, Observe, ProbingEvictor
from kvsieve.types import LayerContext, Selection, When

if TYPE_CHECKING:
    from kvsieve.hf.attach import Sieve


@dataclass(eq=False)
class _Watch(Evictor):
    """The evictor of a branch's pass: shows what the layers see, and evicts as `inner` does."""

    shown: Observe | None
    inner: Evictor | None

    @property
    def budget(self) -> Budget:
        return Budget(ratio=1.0) if self.inner is None else self.inner.budget

    @property
    def window(self) -> int:
        return 0 if self.inner is None else self.inner.window

    @property
    def minimum(self) -> int:
        return 1 if self.inner is None else self.inner.minimum

    def requested(self, length: int, new_tokens: int = 0) -> int:
        return super().requested(length) if self.inner is None else self.inner.requested(length, new_tokens)

    def entries(self, length: int, new_tokens: int = 0) -> int:
        return super().entries(length) if self.inner is None else self.inner.entries(length, new_tokens)

    @property
    def when(self) -> When:
        return When(observes=self.shown is not None)

    def observe(self, ctx: LayerContext) -> None:
        assert self.shown is not None
        self.shown(ctx)

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | dict[int, Selection] | None:
        return None if self.inner is None else self.inner.select(ctx, counts)


class _Branch:
    """See roles.Branch."""

    def __init__(self, rehearsal: _Rehearsal, cache: SieveCache) -> None:
        self.rehearsal = rehearsal
        self.cache = cache.fork(share=True)

    def branch(self) -> _Branch:
        return _Branch(self.rehearsal, self.cache)

    def read_rest(
        self, *, observe: Observe | None = None, evict: Evictor | None = None, logits: bool = False
    ) -> Tensor | None:
        seen = self.cache.num_seen
        ids, real = self.rehearsal.ids[:, seen:], self.rehearsal.real[:, seen:]
        return self._pass(ids, real, observe, evict, logits)

    def feed(
        self, ids: Tensor, real: Tensor | None = None, *, observe: Observe | None = None, logits: bool = False
    ) -> Tensor | None:
        return self._pass(ids, real, observe, None, logits)

    def _pass(
        self, ids: Tensor, real: Tensor | None, observe: Observe | None, evict: Evictor | None, logits: bool
    ) -> Tensor | None:
        sieve, cache = self.rehearsal.sieve, self.cache
        ids = ids.to(sieve.model.device)
        known, real = cache.mask, None if real is None or bool(real.all()) else real.to(ids.device)
        mask = None
        if known is not None or real is not None:
            known = real.new_ones(len(ids), cache.num_seen) if known is None else known  # type: ignore[union-attr]
            mask = torch.cat([known, torch.ones_like(ids, dtype=torch.bool) if real is None else real], 1).long()
        whole = torch.ones(len(ids), cache.num_seen + ids.shape[1], device=ids.device) if mask is None else mask
        given: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (whole.cumsum(-1).long() - 1).clamp_min(0)[:, cache.num_seen :],
            "past_key_values": cache,
            "use_cache": True,
        }
        cache.own_plan = Plan(evict=_Watch(observe, evict), name=sieve.plan.name)
        if evict is None:
            cache.held = None
        # Whatever is fed belongs to the prompt, and only what ends it evicts.
        cache.awaits_prompt, cache.more_chunks = True, evict is None
        try:
            with torch.no_grad():
                if logits:
                    return sieve.model(**given, logits_to_keep=1).logits[:, -1]
                sieve.decoder(**given)
                return None
        finally:
            cache.more_chunks = False


class _Rehearsal:
    """See roles.ProbePasses."""

    def __init__(self, sieve: Sieve, cache: SieveCache, ids: Tensor, real: Tensor) -> None:
        self.sieve, self.cache = sieve, cache
        self.ids, self.real = ids.to(sieve.model.device), real.bool().to(sieve.model.device)
        ends = sieve.model.generation_config.eos_token_id
        self.ends = frozenset(ends if isinstance(ends, (list, tuple)) else [] if ends is None else [ends])

    def branch(self) -> _Branch:
        return _Branch(self, self.cache)

    def state(self, layer_idx: int) -> dict[str, Any]:
        return self.cache.sieve_layers[layer_idx].state


def rehearsal_tokens(sieve: Sieve, cache: SieveCache, mask: Tensor) -> int:
    """Tokens that the plan's evictor feeds at once before a turn's prompt is complete; 0 where all of it may stay.

    mask: [B, N] of the whole conversation, 0 for padding, of which the cache holds what came before the turn.
    """
    evictor = sieve.plan.evict
    assert isinstance(evictor, ProbingEvictor)
    lengths = mask.sum(-1).tolist()
    unread = mask[:, cache.num_seen :].sum(-1).tolist()
    stored = [
        max((layer.store.lengths[row] for layer in cache.sieve_layers.values() if layer.is_initialized), default=0)
        for row in range(len(lengths))
    ]
    # All processes rehearse or none, though heads that keep more may be another's.
    rows = zip(lengths, unread, sieve.ranks.most(tuple(stored)), strict=True)
    if all(new + held <= evictor.entries(length) for length, new, held in rows):
        return 0
    # No more is fed at once than the prompt and a request that is shorter still.
    rehearsed = min(evictor.probe_tokens, 2 * max(lengths))
    context = getattr(sieve.config, "max_position_embeddings", None)
    if context is not None and max(lengths) + rehearsed > context:
        warnings.warn(
            f"{sieve.plan.name} feeds up to {rehearsed} tokens after the prompt of {max(lengths)}, and the "
            f"model's context ends at {context}: its choice may be poor; shorten the prompt, or what is fed",
            KvsieveWarning,
            stacklevel=5,
        )
    return rehearsed


def rehearse(sieve: Sieve, cache: SieveCache, input_ids: Tensor, mask: Tensor) -> None:
    """Let the plan's evictor rehearse; the cache holds all but the last chunk of the conversation input_ids [B, N]."""
    assert isinstance(sieve.plan.evict, ProbingEvictor)
    sieve.plan.evict.probe(_Rehearsal(sieve, cache, input_ids, mask))
