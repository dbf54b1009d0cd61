"""Eviction: applies an evictor's choice, and checks that protected tokens stay."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvsieve.cache import LayerMemory, keep, quantize_evicted
from kvsieve.core.queries import second_moments
from kvsieve.core.selection import pack_ragged
from kvsieve.errors import PlanError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.layer import SieveLayer
from kvsieve.hf.forward.answers import counted_lengths, keep_prompt
from kvsieve.hf.forward.recent import aligned, stored_slots
from kvsieve.hf.forward.written import check_written, in_rows
from kvsieve.planning.plans import Plan
from kvsieve.planning.protection import lost
from kvsieve.planning.roles import Evictor, Role
from kvsieve.planning.roles.codec import ASKED
from kvsieve.types import LayerContext, Selection, Step


def act_together(plan: Plan, cache: SieveCache, step: Step, due: tuple[bool, ...] = ()) -> Sequence[tuple[bool, ...]]:
    """Return the rows that the evictor acts on, as `due` of `evict`: those with a first act apart from the others."""
    if plan.evict is None:
        return ()
    first = _first_acts(plan, cache, step)
    both = [tuple(map(operator.and_, due, first)), tuple(map(operator.gt, due, first))]
    return both if all(map(any, both)) else (due,)


def evict(plan: Plan, ctx: LayerContext, cache: SieveCache, due: tuple[bool, ...] = ()) -> None:
    """Let a plan's evictor reduce one or several layers, and record the effect on the prompt.

    due: per row, True if it acts now; others keep everything. Empty: all rows. See `act_together`.
    """
    evictor = plan.evict
    assert evictor is not None
    step = ctx.step
    conversation = cache.conversation
    turn = cache.turn
    prompt = step.phase == "prefill"
    record = turn.record
    lengths = counted_lengths(evictor, step, conversation)
    counts = tuple(evictor.entries(length, turn.new_tokens) for length in lengths)
    slots = ctx.shared.setdefault("slots", {})
    shown, slots[ctx.layer_idx] = aligned(ctx)
    shown, counts = keep_prompt(evictor, shown, counts, conversation.prompt_lengths)
    if not all(due):
        rows = zip(counts, ctx.stored, due, strict=True)
        counts = tuple(count if acts else max(count, stored) for count, stored, acts in rows)
    if prompt:
        record.asked = max(evictor.requested(length, turn.new_tokens) for length in lengths)
        record.raised_to = max(counts) if max(counts) > record.asked else None
    elif any(map(operator.and_, due, _first_acts(plan, cache, step))):
        # What methods record at the end of a prompt they record here if all stayed whole (reduce=False).
        shown = dataclasses.replace(shown, step=dataclasses.replace(step, phase="prefill"))
    before = {} if all(due) else copy.deepcopy(ctx.state)
    chosen = evictor.select(shown, counts)
    _restore(ctx.state, before, due)
    if not all(due) and isinstance(chosen, Selection):
        chosen = in_rows(chosen, shown, due)
    per_layer = chosen if isinstance(chosen, dict) else {ctx.layer_idx: chosen}
    for index, selection in per_layer.items():
        if selection is None:
            continue
        if index == ctx.layer_idx and evictor.keeps_prompt and not prompt:
            check_protected(evictor, shown, selection)
        selection = stored_slots(selection, slots.pop(index, None))
        layer = cache.sieve_layers[index]
        selection = _real_only(evictor, selection, layer.store)
        check_written(evictor, selection, layer.store.dims)
        if conversation.protected is not None:
            protected, quotas = conversation.protected.at(layer.store.index, layer.store.valid)
            check_protected(evictor, dataclasses.replace(ctx, protected=protected, quotas=quotas), selection)
        if evictor.traits.is_view:
            layer.view_only(selection)
        else:
            room = turn.room(step.start + step.num_new, max(counts))
            if not prompt:
                # Equally many tokens follow before it acts next: the buffers are kept.
                room = max(room, min(layer.store.size - selection.indices.shape[-1], turn.new_tokens))
            if plan.rest is not None:
                layer.store = quantize_evicted(layer.store, selection, plan.rest, plan.codec, room, _asked(ctx, index))
            else:
                # Entries of a prompt should take no more memory than the budget.
                layer.store = keep(layer.store, selection, room, reuse=not step.ends_prompt)
        record.evicted.add(index)
        if prompt:
            record.kept[index] = layer.store.entries


def _first_acts(plan: Plan, cache: SieveCache, step: Step) -> tuple[bool, ...]:
    """Return per row, True if the plan acts on its answer for the first time, and not on an earlier prompt."""
    conversation = cache.conversation
    rows = zip(step.lengths, conversation.prompt_lengths, strict=True)
    if cache.turn.record.reduced or conversation.acted or plan.evict is None or plan.evict.keeps_prompt:
        return (False,) * conversation.batch
    return tuple(length - prompt == plan.when.steps for length, prompt in rows)


def _restore(state: dict[str, Any], before: dict[str, Any], due: tuple[bool, ...]) -> None:
    """Restore the records of rows that do not act; records per entry have the tokens of their entries beside them."""
    for name in state.keys() & before.keys():
        new, old = state[name], before[name]
        if isinstance(new, Tensor) and new.shape == old.shape and new.shape[:1] == (len(due),):
            acts = torch.tensor(due, device=new.device).view(-1, *(1,) * (new.ndim - 1))
            state[name] = new.where(acts, old.to(new.device))


def _real_only(evictor: Evictor, selection: Selection, store: LayerMemory) -> Selection:
    """Return a selection without filler: after an edit or a join, heads may have different numbers of entries."""
    valid = store.valid
    if evictor.traits.ragged or valid is None or valid.shape[1] == 1 or selection.writes:
        return selection
    indices = selection.indices if selection.indices.ndim == 3 else selection.indices[:, None]
    heads = max(indices.shape[1], valid.shape[1])
    indices = indices.expand(-1, heads, -1)
    valid = valid.repeat_interleave(heads // valid.shape[1], 1)
    real = selection.real_of_heads()
    chosen = valid.gather(2, indices)
    if real is not None:
        chosen = chosen & real
    counts = torch.zeros_like(valid, dtype=torch.uint8).scatter_reduce(2, indices, chosen.to(torch.uint8), "amax")
    return pack_ragged(counts.bool())


def closed_up(store: LayerMemory, room: int) -> LayerMemory:
    """Remove padding and filler, so that each row's last entries are those of its last tokens."""
    if store.valid is None:
        return store
    return keep(store, pack_ragged(store.valid.expand(-1, store.heads, -1)), room)


def _asked(ctx: LayerContext, index: int) -> Tensor | None:
    """Return `second_moments` of a prompt's last queries, to encode evicted keys; None for other layers."""
    return second_moments(ctx.query[:, :, -ASKED:], ctx.keys.shape[1], ctx.valid) if index == ctx.layer_idx else None


def drops_nothing(
    plan: Plan, step: Step, where: tuple[int, int], layer: SieveLayer, stored: tuple[int, ...] | None = None
) -> bool:
    """Return True if a frequently called evictor reports that it would drop nothing of a layer.

    Args:
        plan: of the pass.
        step: the pass.
        where: the layer's index, and the number of layers.
        layer: the layer.
        stored: real entries of each row then; None for those of now.
    """
    evictor = plan.evict
    # Where heads keep different numbers, other processes may have to act.
    if evictor is None or step.phase == "prefill" or evictor.traits.ragged:
        return False
    return evictor.is_noop(*where, layer.store.lengths if stored is None else stored, layer.state)


def check_protected(part: Role, ctx: LayerContext, selection: Selection, offered: int | None = None) -> None:
    """Raise PlanError if `part` drops protected tokens; offered: candidates are the last so many stored entries."""
    if ctx.protected is None and ctx.quotas is None:
        return
    indices = selection.indices
    if indices.ndim == 2:
        indices = indices[:, None]
    protected = ctx.protected
    quotas = ctx.quotas
    if offered is not None:
        # Propagated tokens are the same for all heads.
        protected = None if protected is None else protected[:, :1, -offered:]
        quotas = None if quotas is None else dataclasses.replace(quotas, segment=quotas.segment[:, :1, -offered:])
    reason = lost(protected, quotas, indices, selection.real_of_heads())
    if reason is not None:
        raise PlanError(f"{type(part).__name__} at layer {ctx.layer_idx}: {reason}; leave that out, or use another")
