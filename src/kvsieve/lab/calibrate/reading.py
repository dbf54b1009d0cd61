"""Forward passes of a calibration."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from kvsieve.decoding.answer import Answer
from kvsieve.decoding.asked import Sampling
from kvsieve.decoding.loop import Rows, step
from kvsieve.decoding.sampling import Sampler
from kvsieve.hf.attach import attach
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.compat import CACHE
from kvsieve.hf.forward.request import PassRequest
from kvsieve.planning.plans import Plan
from kvsieve.types import LayerContext


def read(
    model: Any, plan: Plan, ids: Tensor, on_layer: Callable[[LayerContext], None] | None = None
) -> tuple[Tensor, SieveCache]:
    """Prefill ids [1, N] under a plan in one pass.

    Args:
        model: of transformers.
        plan: acts at the end of the pass.
        ids: int64 [1, N].
        on_layer: called in each layer, before the plan acts.

    Returns:
        The final hidden states after the final norm, float32 [1, K, C], of the tokens that were not dropped, and the
        cache.
    """
    with attach(model, plan) as sieve:
        cache = sieve.new_cache()
        hidden = sieve.feed(cache, ids, None, PassRequest(on_layer=on_layer)).hidden
    assert hidden is not None
    return hidden.float(), cache


def greedy(model: Any, cache: SieveCache, logits: Tensor, stops: Collection[int], limit: int) -> Tensor:
    """Decode greedily to a stop: int64 [1, T], at least 2 and at most `limit` tokens; the cache is unchanged.

    logits: [1, V], the next token's.
    """
    answer = Answer(Sampler(Sampling(), torch.empty(0)), (), limit)
    with attach(model, Plan(name="full")) as sieve:
        rows = Rows(sieve, sieve.adopt(cache.fork()), [answer])
        rows.take(logits[:, None].cpu())
        # Later tokens are compared, so no answer ends with the first.
        answer.ends = stops
        while rows.going:
            step(sieve, [rows])
    return torch.tensor([answer.tokens])


def following(model: Any, cache: SieveCache, answer: Tensor) -> Tensor:
    """Return log-probabilities float32 [rows, T - 1, V] of answer [1, T] without its first token; uses the cache up."""
    with attach(model, Plan(name="full")) as sieve, torch.no_grad():
        sieve.adopt(cache)
        ids = answer[:, :-1].to(model.device).expand(cache.conversation.batch, -1)
        return model(input_ids=ids, use_cache=True, **{CACHE: cache}).logits.float().log_softmax(-1)


def divergence(truth: Tensor, estimate: Tensor) -> list[float]:
    """Return mean KL(truth || estimate) over tokens, per row of `estimate` [rows, T, V], both log-probabilities."""
    return (truth.exp() * (truth - estimate)).sum(-1).clamp_min(0).mean(-1).tolist()
