"""Prompts that are read twice: the first pass only chooses tokens, the second reads those as a prompt of their own.

The first pass ends at the layer where the plan's propagator has chosen, and nothing of it survives. The chosen ids are
a fresh prompt at positions 0, 1, ...; the cache holds that one alone and remembers (`Restart`) what its caller knows:
the whole prompt, whose columns come back in front of whatever is generated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvsieve.errors import PlanError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.evict import check_held
from kvsieve.hf.forward.session import StopForward
from kvsieve.hf.inputs import check_callable
from kvsieve.hf.prompt.chunked_compression import condense
from kvsieve.hf.prompt.chunks import check_prompt, chunk_ends, prefill, whole_mask
from kvsieve.hf.prompt.constraints import Wishes
from kvsieve.plans import Plan
from kvsieve.protection import ProtectedTokens
from kvsieve.roles import ChunkedEvictor, Propagator
from kvsieve.types import LayerContext, Selection

if TYPE_CHECKING:
    from kvsieve.hf.attach import Sieve

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Restart:
    """What a cache knows of a prompt that it holds in a shorter reading.

    plan: what passes over the cache run under. columns: int64 [B, K], where each token that was read again stood in the
    prompt as it was given, -1 for filler. length: columns of that prompt. mask: bool [B, length], None when nothing of
    it is padding. lengths: its true tokens per row, which budgets count. held: what the caller wants kept of it.
    layers: int32 [B, H, K], `columns` of the layers whose heads hold different tokens; then `columns` is one head's.
    """

    plan: Plan
    columns: Tensor
    length: int
    mask: Tensor | None
    lengths: tuple[int, ...]
    held: ProtectedTokens | None = None
    layers: dict[int, Tensor] = field(default_factory=dict)

    def told(self, num_seen: int) -> tuple[int, Tensor | None]:
        """See SieveCache.told; num_seen: columns that the cache has seen, those read again and what followed."""
        later = num_seen - self.columns.shape[1]
        if self.mask is None:
            return self.length + later, None
        return self.length + later, torch.cat([self.mask, self.mask.new_ones(len(self.mask), max(later, 0))], 1)

    def as_given(self, index: Tensor, layer: int) -> Tensor:
        """Columns that a layer's store speaks of, int [B, H, n], as columns of what the caller knows; -1 for filler."""
        read = self.columns.shape[1]
        columns = self.layers.get(layer, self.columns[:, None].expand(-1, index.shape[1], -1)).to(index.device)
        given = columns.gather(2, index.long().clamp(0, read - 1))
        given = torch.where(index < read, given, index - read + self.length)
        return given.masked_fill(index < 0, -1)

    def rows(self, rows: Tensor) -> Restart:
        """The same with row ``rows[i]`` as row i."""
        at = rows.to(self.columns.device)
        mask = None if self.mask is None else self.mask.index_select(0, at)
        held = None if self.held is None else self.held.rows(rows)
        lengths = tuple(self.lengths[row] for row in rows.tolist())
        columns = self.columns.index_select(0, at)
        layers = {index: part.index_select(0, at.to(part.device)) for index, part in self.layers.items()}
        return dataclasses.replace(self, columns=columns, mask=mask, lengths=lengths, held=held, layers=layers)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held."""
        yield from (self.columns, *self.layers.values())
        yield from () if self.mask is None else (self.mask,)
        yield from () if self.held is None else self.held.tensors()


@dataclass(eq=False)
class _Filter(Propagator):
    """The propagator of a first pass: ends it where `inner` chooses."""

    inner: Propagator
    cache: SieveCache
    chosen: Selection | None = None
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def window(self) -> int:
        return self.inner.window

    def source(self, num_layers: int) -> int:
        return self.inner.source(num_layers)

    def queries(self, length: int) -> int:
        return self.inner.queries(length)

    def select(self, ctx: LayerContext) -> Selection | None:
        self.chosen = self.inner.select(ctx)
        self.report = ctx.shared.get("report", {})
        if self.chosen is not None:
            check_held(self.inner, ctx, self.chosen, ctx.offered)
            raise StopForward
        # Nothing of this pass survives, so what a layer has attended to can go at once.
        self.cache.layers[ctx.layer_idx].reset()
        return None


def read_prompt(
    sieve: Sieve,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cache: SieveCache,
    *,
    chunk: int | None = None,
    new_tokens: int = 0,
    pad_token_id: int | None = None,
    progress: Progress | None = None,
    leave_last: bool = True,
    wishes: Wishes | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`prefill` under any plan: what to go on with, ids [B, K] and their mask.

    Under a plan that shortens the prompt, these are the ids that are read again; `cache` starts from nothing, also on
    a later turn, whose whole conversation is filtered afresh. Else they are what was given. Raises InputError, and
    PlanError under a plan that lacks a tokenizer.
    """
    if sieve.plan.lacks_tokenizer:
        raise PlanError(
            f"{sieve.plan.name} feeds texts of its own, and there is no tokenizer to make token ids of them: use "
            "attach(model, plan, tokenizer=tokenizer), or attach plan.for_tokenizer(tokenizer)"
        )
    check_callable("progress", progress)
    wishes = Wishes() if wishes is None else wishes
    mask = whole_mask(sieve, input_ids, attention_mask, cache, pad_token_id)
    question = wishes.question_tokens(cache.told()[0], mask, input_ids.shape[1])
    check_prompt(sieve, input_ids, mask, question=question, reduce=wishes.reduce)
    chunk_ends(1, chunk, 0)
    held = wishes.held(sieve.plan, cache, mask, input_ids.shape, question)
    held = None if held is None else held.to(sieve.model.device)
    if pad_token_id is None:
        pad_token_id = sieve.model.generation_config.pad_token_id
    again = sieve.plan.shortens_prompt and (wishes.reduce or cache.restart is None)
    context, context_mask = input_ids, mask
    if question:
        context = input_ids[:, :-question]
        context_mask = None if mask is None else mask[:, :-question]
    if not sieve.plan.shortens_prompt:
        cache.held = held
    if again:
        _read_again(
            sieve,
            context,
            context_mask,
            cache,
            chunk=chunk,
            new_tokens=new_tokens,
            filler=pad_token_id or 0,
            progress=progress,
            leave_last=leave_last and not question,
            held=held,
            question=question,
            reduce=wishes.reduce,
        )
    elif question:
        prefill(
            sieve,
            context,
            context_mask,
            cache,
            chunk=chunk,
            new_tokens=new_tokens,
            progress=_shifted(progress, 0, input_ids.shape[1] - cache.num_seen),
            leave_last=False,
            checked=True,
            prompt_end=input_ids.shape[1],
        )
    ids = input_ids
    if cache.restart is not None:
        ids, mask = _with_later(input_ids, mask, cache, held, pad_token_id or 0)
    if question or not again:
        before = cache.num_seen - cache.turn_start if question else 0
        prefill(
            sieve,
            ids,
            mask,
            cache,
            chunk=chunk,
            new_tokens=new_tokens,
            progress=_shifted(progress, before, before + ids.shape[1] - cache.num_seen),
            leave_last=leave_last,
            checked=True,
            reduce=wishes.reduce,
            question=question,
        )
    return ids, mask


def _with_later(
    input_ids: Tensor, mask: Tensor | None, cache: SieveCache, held: ProtectedTokens | None, filler: int
) -> tuple[Tensor, Tensor]:
    """The ids that were read again and all that was given after those they were chosen from, and their mask.

    The cache is told of the whole conversation: budgets count it from now on.
    """
    restart = cache.restart
    assert restart is not None
    read, rest = restart.columns.to(input_ids.device), input_ids[:, restart.length :]
    later = torch.ones_like(rest) if mask is None else mask[:, restart.length :].long()
    real = torch.cat([(read >= 0).long(), later], 1)
    ids = torch.cat([input_ids.gather(1, read.clamp_min(0)).masked_fill(read < 0, filler), rest], 1)
    lengths = (input_ids.shape[1],) * len(ids) if mask is None else tuple(mask.sum(-1).tolist())
    cache.restart = dataclasses.replace(restart, lengths=lengths, held=held)
    if held is not None and not restart.layers:
        columns = torch.arange(restart.length, input_ids.shape[1], device=read.device).expand(len(ids), -1)
        cache.held = held.reindexed(torch.cat([read, columns], 1).to(restart.columns.device))
    return ids, real


def _read_again(
    sieve: Sieve,
    input_ids: Tensor,
    mask: Tensor | None,
    cache: SieveCache,
    *,
    chunk: int | None,
    new_tokens: int,
    filler: int,
    progress: Progress | None,
    leave_last: bool,
    held: ProtectedTokens | None,
    question: int,
    reduce: bool,
) -> None:
    """Choose tokens of a prompt and read them, or all of them unless `reduce`, into the emptied cache."""
    cache.reset()
    columns, real = _true_columns(input_ids, mask)
    lengths = tuple(real.sum(-1).tolist())
    wanted = lengths
    condensed = None
    if isinstance(sieve.plan.evict, ChunkedEvictor):
        if reduce:
            shown = _shifted(progress, 0, columns.shape[1] + question)
            condensed = condense(sieve, cache, input_ids, columns, real, chunk=chunk, progress=shown, held=held)
            columns, real = condensed.columns, condensed.columns >= 0
    elif reduce:
        assert sieve.plan.propagate is not None
        wanted = tuple(min(sieve.plan.propagate.reread_tokens(length), length) for length in lengths)
    report: dict[str, Any] = {"idle": "every token was read again: the prompt is not longer than what may be kept"}
    before = 0
    if wanted != lengths:
        before = columns.shape[1]
        ids = input_ids.gather(1, columns)
        shown = _shifted(progress, 0, before + max(wanted))
        shown_held = None if held is None else held.reindexed(columns.masked_fill(~real, -1).to(sieve.model.device))
        selection, report = _choose(sieve, ids, real.long(), chunk, shown, shown_held)
        if selection is not None:
            columns = columns.gather(1, selection.indices.to(columns.device))
            chosen = selection.real()
            real = torch.ones_like(columns, dtype=torch.bool) if chosen is None else chosen.to(columns.device)
    plan = Plan(evict=None if isinstance(sieve.plan.evict, ChunkedEvictor) else sieve.plan.evict, name=sieve.plan.name)
    given = None if mask is None else mask.bool().to(sieve.model.device)
    marked = columns.masked_fill(~real, -1).to(sieve.model.device)
    cache.restart = Restart(plan, marked, input_ids.shape[1], given, lengths, held)
    if condensed is not None:
        cache.restart = dataclasses.replace(cache.restart, layers=condensed.layers)
    # Where heads hold different tokens, nothing is evicted after this.
    cache.held = None if held is None or cache.restart.layers else held.reindexed(marked)
    ids, real = input_ids.gather(1, columns.clamp_min(0)).masked_fill(~real, filler), real.long()
    prefill(
        sieve,
        ids,
        real,
        cache,
        chunk=chunk,
        new_tokens=new_tokens,
        progress=_shifted(progress, before, before + ids.shape[1] + question),
        leave_last=leave_last,
        checked=True,
        prompt_end=ids.shape[1] + question,
        reduce=reduce,
    )
    record, kept = cache.record, tuple(real.sum(-1).tolist())
    if condensed is not None:
        record.asked, record.raised_to, record.evicted = condensed.asked, condensed.raised_to, set(condensed.layers)
        return
    record.report = report
    record.propagated = max(kept) if kept != lengths else None
    if plan.evict is None and sieve.plan.propagate is not None and reduce:
        record.asked = max(wanted)


def _choose(
    sieve: Sieve, ids: Tensor, mask: Tensor, chunk: int | None, progress: Progress | None, held: ProtectedTokens | None
) -> tuple[Selection | None, dict[str, Any]]:
    """The first pass: the tokens chosen among ids [B, N], and what the propagator told of its choice."""
    scratch = sieve.new_cache()
    scratch.held = held
    assert sieve.plan.propagate is not None
    chooser = _Filter(sieve.plan.propagate, scratch)
    plan = Plan(propagate=chooser, name=sieve.plan.name)
    scratch.restart = Restart(plan, ids, ids.shape[1], None, tuple(mask.sum(-1).tolist()))
    prefill(sieve, ids, mask, scratch, chunk=chunk, progress=progress, leave_last=False, checked=True)
    return chooser.chosen, chooser.report


def _true_columns(input_ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Columns [B, N'] of each row's true tokens, in order, and bool [B, N'] False for the filler on their left."""
    if mask is None:
        columns = torch.arange(input_ids.shape[1], device=input_ids.device).expand(len(input_ids), -1)
        return columns, torch.ones_like(input_ids, dtype=torch.bool)
    real = mask.bool().to(input_ids.device)
    size = int(real.sum(-1).max())
    order = real.to(torch.uint8).argsort(dim=-1, stable=True)[:, -size:]
    return order, real.gather(1, order)


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    return None if progress is None else lambda done, _: progress(before + done, total)
