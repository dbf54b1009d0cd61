"""Choice of tokens before the first layer, by a draft model's scores."""

from __future__ import annotations

from typing import Any

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.evict import check_protected
from kvsieve.hf.forward.request import ModelContext
from kvsieve.hf.forward.travel import Tokens
from kvsieve.planning.plans import Plan
from kvsieve.types import LayerContext, Selection, Step


def choose_drafted(
    plan: Plan, cache: SieveCache, model: ModelContext, step: Step, tokens: Tokens, shared: dict[str, Any]
) -> Selection | None:
    """Let the propagator choose among the turn's tokens [B, N]; None if all continue.

    Args:
        plan: acts on the pass.
        cache: of the turn with the scores.
        model: facts about the attached model.
        step: facts of the pass.
        tokens: all of the turn.
        shared: ``ctx.shared`` of the pass.
    """
    propagator = plan.propagate
    scores = cache.turn.drafted
    protected_tokens = cache.conversation.protected
    if propagator is None or scores is None:
        return None
    # In the order of the pass, which may differ from that of the columns.
    place = (tokens.token_index - step.turn_start).long().expand(len(scores), -1)
    shared["drafted"] = scores.to(tokens.token_index.device).gather(1, place)
    index = tokens.columns().expand(len(scores), -1)[:, None]
    valid = None if tokens.valid is None else tokens.valid[:, None]
    protected, quotas = (None, None) if protected_tokens is None else protected_tokens.at(index, valid)
    nothing = shared["drafted"].new_empty(len(scores), 1, 0, 1)
    ctx = LayerContext(
        layer_idx=-1,
        num_layers=model.num_layers,
        step=step,
        scale=1.0,
        query=nothing,
        keys=nothing,
        values=nothing,
        index=index,
        valid=valid,
        stored=tokens.counts,
        offered=tokens.size,
        offered_counts=tokens.counts,
        shared=shared,
        protected=protected,
        quotas=quotas,
        layers=tuple(cache.sieve_layers),
        ranks=model.ranks,
    )
    selection = propagator.select(ctx)
    if selection is not None:
        check_protected(propagator, ctx, selection, ctx.offered)
    cache.turn.record.report = shared.get("report", {})
    return selection
