"""One forward pass under a plan: its facts, scoped by a ContextVar, and what happens at each layer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsieve.attention import dense_attention
from kvsieve.errors import CacheStateError, InputError, UnsupportedModelError, UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache, SieveLayer
from kvsieve.hf.forward.evict import check_held, evict
from kvsieve.hf.forward.sparse_read import read_token
from kvsieve.hf.inputs import check_mask, refuse_strange, strange
from kvsieve.plans import Plan
from kvsieve.types import ALONE, LayerContext, ModelFacts, Ranks, Selection, Step, When

_log = logging.getLogger(__name__)

_ACTIVE: ContextVar[Session | None] = ContextVar("kvsieve_session", default=None)
# The same for passes that torch compiles: it cannot look into a ContextVar.
_COMPILED: Session | None = None


@dataclass
class Tokens:
    """Tokens that travel through a layer: token_index int [1 or B, L], valid bool [B, L] or None, real ones per row."""

    token_index: Tensor
    valid: Tensor | None
    counts: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.token_index.shape[1]

    def narrow(self, selection: Selection) -> Tokens:
        """Those of a selection [B, K] among them."""
        rows = selection.indices
        token_index = self.token_index.expand(rows.shape[0], -1).gather(1, rows)
        valid = selection.real()
        return Tokens(token_index, valid, selection.lengths or (rows.shape[1],) * rows.shape[0])


@dataclass
class Session:
    """State of the forward pass in progress."""

    plan: Plan
    source: int | None
    cache: SieveCache
    step: Step
    tokens: Tokens
    num_layers: int
    # The pass within which this one was begun.
    outer: Session | None = None
    stopped: bool = False
    selection: Selection | None = None
    narrowed: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    facts: ModelFacts | None = None
    ranks: Ranks = ALONE
    # What enters the layer that runs, [B, L, C]; kept for evictors that need it only.
    hidden: Tensor | None = None

    def attend(self, index: int, layer: SieveLayer, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Store this pass's keys and values, attend over everything stored, then let the plan reduce the layer."""
        tokens, step, store = self.tokens, self.step, layer.store
        if query.shape[2] != tokens.size:
            raise UnsupportedModelError(
                f"layer {index} attends with {query.shape[2]} queries where {tokens.size} tokens were fed: "
                "this architecture is not supported"
            )
        end = step.start + step.num_new
        room = self.cache.room(end, tokens.size)
        key, value = key.detach(), value.detach()
        if self._reads():
            out = self._read(index, layer, query, key, value, scale, room)
        else:
            store.append(key, value, tokens.token_index, tokens.valid, tokens.counts, room)
            out = dense_attention(query, store.keys, store.values, scale=scale, valid=store.valid)
        evictor = self.plan.evict
        if evictor is not None and self._observes(evictor.when):
            shown = self._context(index, layer, query, scale)
            if self.hidden is not None:
                shown.hidden, shown.output = self.hidden.detach(), out.detach()
            evictor.observe(shown)
        if evictor is not None and evictor.when.steps is not None and evictor.window > 1 and step.is_last_chunk:
            query = self._recent(layer, query, evictor.window)
        if step.ends_prompt or self._acts_in_between():
            self._reduce(index, layer, query, scale)
        return out

    def _reads(self) -> bool:
        """Whether this pass's tokens read as those of an answer do."""
        if self.step.phase == "decode":
            return True
        reader = self.plan.read
        return reader is not None and reader.sparse_questions and not self.cache.reduces and self.step.start > 0

    def _read(
        self, index: int, layer: SieveLayer, query: Tensor, key: Tensor, value: Tensor, scale: float, room: int
    ) -> Tensor:
        """Store and read token by token: each chooses by itself among what was stored when it came."""
        tokens, outs = self.tokens, []
        for at in range(tokens.size):
            one = slice(at, at + 1)
            valid = None if tokens.valid is None else tokens.valid[:, one]
            layer.store.append(key[:, :, one], value[:, :, one], tokens.token_index[:, one], valid, reserve=room)
            asked = query[:, :, one]
            outs.append(read_token(self.plan.read, self.cache, layer, index, self.num_layers, asked, scale))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    def _acts_in_between(self) -> bool:
        if self.plan.evict is None or self.step.ends_prompt:
            return False
        when = self.plan.evict.when
        if self.step.phase == "prefill":
            return when.chunks
        return when.steps is not None and (self.cache.decoded + self.step.num_new) % when.steps == 0

    def _observes(self, when: When) -> bool:
        return when.observes and (self.step.phase == "prefill" or when.steps is not None)

    def _recent(self, layer: SieveLayer, query: Tensor, window: int) -> Tensor:
        """The queries [B, Hq, <= window, D] of the turn's last tokens, this pass's among them."""
        before = layer.state.get("recent")
        if self.step.phase == "decode" and before is not None and query.shape[2] < window:
            query = torch.cat([before, query], 2)
        # A copy, so that a whole prompt's queries are not held on to.
        layer.state["recent"] = query[:, :, -window:].clone()
        return query

    def _context(self, index: int, layer: SieveLayer, query: Tensor, scale: float) -> LayerContext:
        store, held, ranks = layer.store, self.cache.held, self.ranks
        ragged = self.plan.evict is not None and self.plan.evict.traits.ragged
        ranks.check_heads(query.shape[1])
        protected, quotas = (None, None) if held is None else held.at(store.index, store.valid)
        return LayerContext(
            layer_idx=index,
            num_layers=self.num_layers,
            step=self.step,
            scale=scale,
            query=query.detach(),
            keys=store.keys,
            values=store.values,
            index=store.index,
            valid=store.valid,
            # Where heads keep different numbers, the fullest may be another process's.
            stored=ranks.most(store.lengths) if ragged else store.lengths,
            state=layer.state,
            shared=self.shared,
            protected=protected,
            quotas=quotas,
            model=self.facts,
            layers=tuple(self.cache.sieve_layers),
            ranks=ranks,
        )

    def _reduce(self, index: int, layer: SieveLayer, query: Tensor, scale: float) -> None:
        plan, record = self.plan, self.cache.record
        if self.step.phase == "prefill" and not self.cache.reduces:
            record.kept[index] = layer.store.entries
            return
        ctx = self._context(index, layer, query, scale)
        if plan.propagate is not None and self.source is not None and self.step.ends_prompt:
            # Up to the source layer all of the turn's tokens are there, in this pass or in earlier chunks.
            deeper = index > self.source
            ctx.offered = self.tokens.size if deeper else self.step.start + self.step.num_new - self.step.turn_start
            ctx.offered_counts = self.tokens.counts if deeper else self.step.turn_lengths
            selection = plan.propagate.select(ctx)
            if selection is not None:
                check_held(plan.propagate, ctx, selection, ctx.offered)
            self.selection = selection if self.source <= index < self.num_layers - 1 else None
            record.report = self.shared.get("report", {})
        if plan.evict is not None:
            evict(plan.evict, ctx, self.cache)
        if self.step.phase == "prefill":
            record.kept[index] = layer.store.entries

    def leave(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Hidden states [B, L, C] as they leave layer `index` -> those that go on, [B, K, C].

        Under chunked prefill the leading chunks wait at the source layer, the first that may drop tokens (StopForward
        ends their pass), and the last chunk brings all of the turn's tokens to the layers behind it.
        """
        tables = kwargs.get("position_embeddings")
        if not isinstance(tables, tuple) or len(tables) != 2 or kwargs.get("position_ids") is None:
            raise UnsupportedModelError(
                "its decoder layers do not take position_ids and position_embeddings as (cos, sin), so token "
                "propagation cannot move positions along; use a plan without propagate="
            )
        self._check_layer_arguments(kwargs)
        cos, sin, positions = *tables, kwargs["position_ids"]
        if index == self.source:
            waiting = self.cache.waiting
            if not self.step.is_last_chunk:
                waiting.append((hidden, cos, sin, positions))
                self.stopped = True
                raise StopForward
            if waiting:
                waiting.append((hidden, cos, sin, positions))
                hidden, cos, sin, positions = (torch.cat(parts, dim=1) for parts in zip(*waiting, strict=True))
                waiting.clear()
                end = self.step.start + self.step.num_new
                token_index = torch.arange(self.step.turn_start, end, device=hidden.device)[None]
                valid = None if self.cache.mask is None else self.cache.mask[:, self.step.turn_start :]
                self.tokens = Tokens(token_index, valid, self.step.turn_lengths)
                self.narrowed = {"position_embeddings": (cos, sin), "position_ids": positions}
        selection, self.selection = self.selection, None
        if selection is not None:
            rows = selection.indices.to(hidden.device)
            hidden, cos, sin = (_gather(part, rows) for part in (hidden, cos, sin))
            positions = positions.expand(len(rows), -1).gather(1, rows)
            self.tokens = self.tokens.narrow(selection)
            self.cache.record.propagated = max(self.tokens.counts)
            self.narrowed = {"position_embeddings": (cos, sin), "position_ids": positions}
        return hidden

    def _check_layer_arguments(self, kwargs: dict[str, Any]) -> None:
        known = ("hidden_states", "position_embeddings", "position_ids")
        for name, value in kwargs.items():
            per_token = isinstance(value, Tensor) and self.step.num_new in value.shape[1:]
            if name not in known and per_token and self.step.num_new > 1:
                raise UnsupportedModelError(
                    f"its decoder layers take a per-token argument {name!r} that token propagation cannot narrow; "
                    "use a plan without propagate="
                )


class StopForward(Exception):
    """Ends a forward pass early on purpose; the driver catches it."""


def current() -> Session | None:
    return _COMPILED if torch.compiler.is_compiling() else _ACTIVE.get()


def open_session(
    plan: Plan,
    source: int | None,
    num_layers: int,
    cache: SieveCache,
    kwargs: dict[str, Any],
    facts: ModelFacts | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Build the facts of the pass that is about to run from the decoder's arguments and make them current."""
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    fed = ids if ids is not None else embeds
    if fed is None:
        raise InputError("the model was called with neither input_ids nor inputs_embeds")
    batch, new = fed.shape[:2]
    if new == 0 or batch == 0:
        raise InputError(f"the prompt is empty: input of shape {tuple(fed.shape)}; pass at least one token")
    if cache.in_flight:
        raise CacheStateError(
            "a forward pass with this cache failed half-way, its layers no longer agree; start again with a new one"
        )
    if cache.batch not in (0, batch):
        raise InputError(
            f"the cache holds {cache.batch} rows and got an input of {batch}; use one cache per batch, or "
            "cache.batch_repeat_interleave to expand it"
        )
    if cache.own_plan is not None:
        plan = cache.own_plan
    elif plan.shortens_prompt:
        if cache.restart is None or (new > 1 and not cache.awaits_prompt):
            how = "every prompt twice" if plan.propagate is not None else "a prompt in steps of its own"
            raise UnsupportedOptionError(
                f"{plan.name!r} reads {how}, which a plain call of the model cannot do: use "
                "sieve.generate(...) or sieve.prefill(...), with the whole conversation"
            )
        plan = cache.restart.plan
    if plan.propagate is None:
        source = None
    if new > 1 and not cache.awaits_prompt and not cache.given_answer:
        cache.begin_turn()
    if plan.probes and cache.awaits_prompt and not cache.rehearsed:
        raise UnsupportedOptionError(
            f"{plan.name!r} feeds tokens of its own before a prompt is complete, which a plain call of the model "
            "cannot do: use sieve.generate(...) or sieve.prefill(...), with the whole conversation"
        )
    start = cache.num_seen
    mask, rows = _checked_mask(kwargs.get("attention_mask"), cache, batch, start, new, fed.device)
    prefill = cache.awaits_prompt
    last = not cache.more_chunks
    valid, counts = None, (new,) * batch
    lengths, turn_lengths = (start + new,) * batch, (start + new - cache.turn_start,) * batch
    if mask is not None:
        lengths, turn_lengths, counts, ends = rows
        valid = None if min(counts) == new else mask[:, start:]
        if prefill and last and not all(ends):
            raise InputError("the prompt is padded on the right; pad on the left: tokenizer.padding_side = 'left'")
    step = Step(
        start=start,
        num_new=new,
        phase="prefill" if prefill else "decode",
        is_last_chunk=last,
        turn=cache.turn,
        turn_start=cache.turn_start,
        lengths=lengths,
        turn_lengths=turn_lengths,
    )
    tokens = Tokens(torch.arange(start, start + new, device=fed.device)[None], valid, counts)
    session = Session(
        plan, source if cache.reduces else None, cache, step, tokens, num_layers, facts=facts, ranks=ranks
    )
    cache.batch = batch
    cache.in_flight = cache.passing = True
    if prefill:
        cache.record.prompt_tokens = max(lengths if cache.restart is None else cache.restart.lengths)
    session.outer = _ACTIVE.get()
    _ACTIVE.set(session)


@contextlib.contextmanager
def closing() -> Iterator[None]:
    """Leave no session open that was begun in here: torch calls no hook when a pass is left by an interrupt."""
    global _COMPILED
    before, compiled = _ACTIVE.get(), _COMPILED
    try:
        yield
    except BaseException:
        session = _ACTIVE.get()
        if session is not None and session is not before:
            session.cache.passing = False
        _ACTIVE.set(before)
        _COMPILED = compiled
        raise


def close_session(finished: bool) -> None:
    """Commit the current pass if it ran through (or was stopped on purpose), and leave its scope in any case."""
    session = _ACTIVE.get()
    if session is None:
        return
    _ACTIVE.set(session.outer)
    session.cache.passing = False
    if finished or session.stopped:
        session.cache.advance(session.step.num_new)
        if session.step.phase == "decode":
            session.cache.decoded += session.step.num_new
        if session._reads():
            session.cache.record.reads.tokens += session.step.num_new
        if session.step.ends_prompt:
            if _log.isEnabledFor(logging.DEBUG):
                entries = list(session.cache.record.kept.values())
                kept = f"{entries[0]} in each of {len(entries)}" if len(set(entries)) == 1 else str(entries)
                _log.debug(
                    "%s: prompt of %s tokens, entries per layer: %s", session.plan.name, max(session.step.lengths), kept
                )
            session.cache.awaits_prompt = False
            session.cache.prompt_lengths = session.step.lengths
        # Last: what is left half-way is refused from then on.
        session.cache.in_flight = False


def _checked_mask(
    mask: Any, cache: SieveCache, batch: int, start: int, new: int, device: torch.device
) -> tuple[Tensor | None, tuple[tuple[int, ...], ...]]:
    """The attention mask of all columns, bool [B, start + new], or None when nothing is padding.

    And per row, how many of all columns, of this turn's and of the new ones are true tokens, and whether the last is.
    """
    if mask is None:
        if cache.mask is not None:
            raise InputError(
                "earlier tokens of this cache are padding, so the pass needs the attention_mask of the whole "
                f"conversation, [{batch}, {start + new}]"
            )
        return None, ()
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise UnsupportedOptionError("attention_mask must be 2-D, [batch, tokens seen and new]; others are refused")
    check_mask(mask, (batch, start + new), f"{start} tokens seen and {new} new ones")
    given = mask.to(device)
    mask = given.bool()
    past = mask[:, :start]
    differs = ~past if cache.mask is None else past != cache.mask
    parts = (mask, mask[:, cache.turn_start :], mask[:, start:], mask[:, -1:], differs, strange(given))
    # One copy from the device for all that the host must know.
    *rows, different, odd = (tuple(part) for part in torch.stack([part.sum(-1) for part in parts]).tolist())
    if any(odd):
        refuse_strange(given)
    changed = any(different)
    if changed:
        for layer in cache.sieve_layers.values():
            if layer.is_initialized:
                layer.store.remask(past)
    if cache.mask is None and not changed and min(rows[0]) == start + new:
        return None, ()
    cache.mask = mask
    return mask, tuple(rows)


def _gather(part: Tensor, rows: Tensor) -> Tensor:
    """part [1 or B, L, C] at rows [B, K] -> [B, K, C]."""
    return part.expand(len(rows), -1, -1).gather(1, rows[..., None].expand(-1, -1, part.shape[-1]))
