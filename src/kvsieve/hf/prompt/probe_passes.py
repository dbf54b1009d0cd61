"""Temporary passes of a plan before a prompt is complete (roles.ProbingEvictor).

All but the last ``max(1, window)`` tokens of the prompt are prefilled without eviction. Then the evictor probes
branches of the cache, which share its buffers and are dropped, and leaves its scores in the layers' states. The rest of
the prompt completes it normally: that pass attends to everything, and evicts.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import KvsieveWarning
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.model.context import context_of
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import Compact, Evictor, Observe, ProbingEvictor


class _CacheBranch:
    """See roles.Branch."""

    def __init__(self, passes: _ModelPasses, cache: SieveCache) -> None:
        self._passes = passes
        self.cache = cache.fork(share=True)

    def branch(self) -> _CacheBranch:
        return _CacheBranch(self._passes, self.cache)

    def read_rest(
        self, *, observe: Observe | None = None, evict: Evictor | None = None, logits: bool = False
    ) -> Tensor | None:
        seen = self.cache.num_seen
        ids = self._passes.ids[:, seen:]
        return self._feed(ids, self._passes.real[:, seen:], observe, evict, None, logits)

    def feed(
        self,
        ids: Tensor,
        real: Tensor | None = None,
        *,
        observe: Observe | None = None,
        compact: Compact | None = None,
        logits: bool = False,
    ) -> Tensor | None:
        return self._feed(ids, real, observe, None, compact, logits)

    def _feed(
        self,
        ids: Tensor,
        real: Tensor | None,
        observe: Observe | None,
        evict: Evictor | None,
        compact: Compact | None,
        logits: bool,
    ) -> Tensor | None:
        cache = self.cache
        known = cache.conversation.mask
        real = None if real is None or bool(real.all()) else real
        mask = None
        if known is not None or real is not None:
            known = ids.new_ones(len(ids), cache.num_seen) if known is None else known.long()
            mask = torch.cat([known, torch.ones_like(ids) if real is None else real.to(known)], 1)
        chooses = evict is not None or compact is not None
        cache.conversation.protected = self._passes.cache.conversation.protected if chooses else None

        # Every probe pass belongs to the prompt, and only its end evicts.
        plan = Plan(evict=evict, name=self._passes.model.plan.name)
        last = evict is not None
        request = PassRequest(plan, "prefill", last_chunk=last, on_layer=observe, before_attention=compact)
        result = self._passes.model.feed(cache, ids, mask, request, logits=int(logits))
        return None if result.logits is None else result.logits[:, -1]


class _ModelPasses:
    """See roles.ProbePasses."""

    def __init__(self, model: AttachedModel, cache: SieveCache, ids: Tensor, mask: Tensor | None) -> None:
        self.model = model
        self.cache = cache
        self.ids = ids.to(model.model.device)
        self.real = torch.ones_like(self.ids, dtype=torch.bool) if mask is None else mask.to(self.ids.device).bool()
        ends = model.model.generation_config.eos_token_id
        self.ends = frozenset(ends if isinstance(ends, (list, tuple)) else [] if ends is None else [ends])

    def branch(self) -> _CacheBranch:
        return _CacheBranch(self, self.cache)

    def state(self, layer_idx: int) -> dict[str, Any]:
        return self.cache.sieve_layers[layer_idx].state


def tokens_to_probe(model: AttachedModel, cache: SieveCache, mask: Tensor) -> int:
    """Return the tokens of the evictor's largest probe pass for a turn's prompt; 0 if nothing must be dropped.

    Args:
        model: the attached model.
        cache: of the conversation before the turn.
        mask: [B, N] of the whole conversation, 0 for padding.
    """
    evictor = _probing(model)
    lengths = mask.sum(-1).tolist()
    unread = mask[:, cache.num_seen :].sum(-1).tolist()
    stored = [
        max((layer.store.lengths[row] for layer in cache.sieve_layers.values() if layer.is_initialized), default=0)
        for row in range(len(lengths))
    ]
    # All processes probe or none, though heads that keep more may be another's.
    rows = zip(lengths, unread, model.context.ranks.most(tuple(stored)), strict=True)
    if all(new + old <= evictor.entries(length) for length, new, old in rows):
        return 0
    probed = evictor.probe_length(max(lengths))
    context = context_of(model.config)
    if context is not None and max(lengths) + probed > context:
        warnings.warn(
            f"{model.plan.name} feeds up to {probed} tokens after the prompt of {max(lengths)}, and the "
            f"model's context ends at {context}: its choice may be poor; shorten the prompt, or what is fed",
            KvsieveWarning,
            stacklevel=5,
        )
    return probed


def probe(
    model: AttachedModel,
    cache: SieveCache,
    input_ids: Tensor,
    mask: Tensor | None,
    probed: dict[ProbingEvictor, dict[int, dict[str, Any]]] | None = None,
) -> None:
    """Let the plan's evictor probe, or reuse the results of an equal probing.

    Args:
        model: the attached model.
        cache: has all but the last chunk of the conversation.
        input_ids: int64 [B, N], the conversation.
        mask: [B, N], None without padding.
        probed: see ReadOptions.
    """
    evictor = _probing(model)
    known = None if probed is None else probed.get(evictor.probe_identity)
    if known is None:
        evictor.probe(_ModelPasses(model, cache, input_ids, mask))
        if probed is not None:
            probed[evictor.probe_identity] = {index: dict(layer.state) for index, layer in cache.sieve_layers.items()}
        return
    for index, state in known.items():
        cache.sieve_layers[index].state.update(state)


def _probing(model: AttachedModel) -> ProbingEvictor:
    evictor = model.plan.evict
    assert isinstance(evictor, ProbingEvictor)
    return evictor
