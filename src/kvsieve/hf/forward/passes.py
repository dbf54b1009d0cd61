"""Begin and end of passes: their facts, and their scope in the current context."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from kvsieve.core.checks import look
from kvsieve.errors import InputError, UnsupportedModelError, UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.checks import check_fits, check_needs_no_driver, check_step, check_tentative, warn_of_few
from kvsieve.hf.forward.compact import columns_of, has_holes
from kvsieve.hf.forward.fed_ids import ids_so_far
from kvsieve.hf.forward.own_generate import note_cache
from kvsieve.hf.forward.padding import checked_mask
from kvsieve.hf.forward.request import CANDIDATES, PLAIN, ModelContext, PassRequest
from kvsieve.hf.forward.rows import RowsCache, RowsSession
from kvsieve.hf.forward.session import Session
from kvsieve.hf.forward.transaction import AnswerSession, PassTransaction
from kvsieve.hf.forward.travel import Tokens
from kvsieve.kernels.cpu import cores
from kvsieve.planning.plans import Plan
from kvsieve.types import Step

_log = logging.getLogger(__name__)

_ACTIVE: ContextVar[Session | None] = ContextVar("kvsieve_session", default=None)


def current() -> Session | None:
    """Return the pass in progress in this context."""
    return _ACTIVE.get()


@contextlib.contextmanager
def activate(session: Session) -> Iterator[None]:
    """Make `session` the current one."""
    token = _ACTIVE.set(session)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


@contextlib.contextmanager
def closing() -> Iterator[None]:
    """Close all sessions begun in this block: torch calls no hook if an interrupt ends a pass."""
    before = _ACTIVE.get()
    try:
        yield
    except BaseException:
        session = _ACTIVE.get()
        if session is not None and session is not before:
            session.cache.status = "broken"
        _ACTIVE.set(before)
        cores.end(all_parts=True)
        raise


def open_session(
    model: ModelContext, plan: Plan, cache: SieveCache, call: Mapping[str, Any], request: PassRequest = PLAIN
) -> Session:
    """Compute the facts of the pass that is about to run, and make it current.

    Args:
        model: facts about the attached model.
        plan: the attached plan.
        cache: of the pass.
        call: the decoder's arguments: input_ids or inputs_embeds, and attention_mask; see fed_ids.py for token_ids.
        request: of a driver.

    Raises:
        InputError: an empty input, or one that does not fit the cache.
        CacheStateError: an earlier pass on the cache failed half-way.
        UnsupportedOptionError: the plan needs a driver, and this is a plain call of the model.
    """
    ids = call.get("input_ids")
    fed = ids if ids is not None else call.get("inputs_embeds")
    if fed is None:
        raise InputError("the model was called with neither input_ids nor inputs_embeds")
    batch, new = fed.shape[:2]
    check_fits(plan, cache, fed)
    conversation = cache.conversation
    plan = _plan_of_pass(plan, cache, new, request)
    cache.touch()
    if cache.candidates and request == PLAIN and not cache.turn.reading:
        request = CANDIDATES
    begins = request.phase is None and not cache.turn.reading and (new > 1 or _lacks_records(plan, cache))
    with _turn_kept(cache) if begins else contextlib.nullcontext():
        if begins:
            cache.begin_turn()
            warn_of_few(plan, cache, new)
        if request.phase == "prefill":
            cache.turn.reading = True
        turn = cache.turn
        prefill = turn.reading and request.phase != "decode"
        if prefill and turn.prompt_end is None:
            check_needs_no_driver(plan, turn)
        step, tokens, order = _facts_of(cache, call, fed, request, prefill=prefill)
        check_step(plan, cache, step, tokens.counts)
    if request.tentative:
        check_tentative(cache, request, step, tokens.counts)
    source = (
        None if plan.propagate is None or not turn.acts else plan.propagate.first_layer(model.num_layers, model.layers)
    )
    kind = AnswerSession if not prefill and (new > 1 or request.tentative) else Session
    fed_ids = ids_so_far(plan, cache, call, request)
    session = kind(plan, source, cache, step, tokens, model, request, outer=_ACTIVE.get(), order=order, ids=fed_ids)
    conversation.batch = batch
    if prefill:
        short = conversation.short_prompt
        turn.record.prompt_tokens = max(step.lengths if short is None else short.lengths)
    note_cache(cache)
    cache.status = "running"
    _ACTIVE.set(session)
    return session


def _facts_of(
    cache: SieveCache, call: Mapping[str, Any], fed: Tensor, request: PassRequest, *, prefill: bool
) -> tuple[Step, Tokens, Tensor | None]:
    """Return the facts of a pass over `fed`, its tokens, and their order if it differs from that of the columns."""
    batch, new = fed.shape[:2]
    turn = cache.turn
    start = cache.num_seen
    mask, rows = checked_mask(call.get("attention_mask"), cache, batch, new, fed.device)
    padded = False
    holed = False
    counts = (new,) * batch
    lengths = (start + new,) * batch
    turn_lengths = (start + new - turn.start,) * batch
    if mask is not None:
        lengths, turn_lengths, counts, ends, gaps = rows
        padded = min(counts) < new
        holed = any(gaps)
        if prefill and request.last_chunk and not all(ends):
            raise InputError("the prompt is padded on the right; pad on the left: tokenizer.padding_side = 'left'")
        if padded and cache.has_state and has_holes(mask):
            raise InputError(
                "a row has padding behind its tokens, as rows of different length have on a later turn, and the "
                "model's recurrent layers cannot skip it: feed rows of equal length, or one cache per row"
            )
    step = Step(
        start=start,
        num_new=new,
        phase="prefill" if prefill else "decode",
        is_last_chunk=request.last_chunk,
        turn=turn.number,
        turn_start=turn.start,
        lengths=lengths,
        turn_lengths=turn_lengths,
        mask=mask,
    )
    columns, valid = columns_of(mask if padded else None, start, (new,), fed.device, holed=holed)
    return step, Tokens(columns, valid, counts), columns - start if holed else None


def open_rows(model: ModelContext, caches: Sequence[SieveCache], ids: Sequence[Tensor]) -> RowsSession:
    """Begin a pass over the next tokens of several caches, each under its plan; see `open_session`.

    Rows of several tokens are tentative.

    Args:
        model: facts about the attached model.
        caches: of one row each, with complete prompts.
        ids: int64 [1, L], the next tokens of each.
    """
    outer = _ACTIVE.get()
    rows = []
    try:
        for cache, one in zip(caches, ids, strict=True):
            request = PassRequest(tentative=True) if one.shape[1] > 1 else PLAIN
            rows.append(open_session(model, cache.owner.plan, cache, {"input_ids": one}, request))
        together = RowsCache(caches)
    except BaseException:
        for row in rows:
            cancel_session(row)
        _ACTIVE.set(outer)
        raise
    widths = [row.tokens.size for row in rows]
    session = RowsSession(
        *(Plan(), None, caches[0], rows[0].step, rows[0].tokens, model, PLAIN, outer),
        rows=rows,
        together=together,
        widths=widths if max(widths) > 1 else None,
    )
    _ACTIVE.set(session)
    return session


def close_session(session: Session, *, finished: bool) -> None:
    """Commit the current pass if it completed (or was stopped on purpose), and leave its scope in any case."""
    if _ACTIVE.get() is not session:
        return
    rows = session.rows if isinstance(session, RowsSession) else [session]
    # Until everything is committed: an interrupt may come at any point.
    for row in rows:
        row.cache.status = "broken"
    _ACTIVE.set(session.outer)
    if isinstance(session, RowsSession) and session.together is not None and finished:
        session.together.give_states_back()
    for row in rows:
        _commit(row, finished=finished)


def _commit(session: Session, *, finished: bool) -> None:
    """Commit a pass if it completed, or was stopped on purpose."""
    cache = session.cache
    turn = session.cache.turn
    step = session.step
    if not (finished or session.stopped):
        return
    look(session.checks)
    if finished and step.phase == "prefill":
        _check_states(cache)
    cache.advance(step.num_new)
    cache.conversation.ids = session.ids
    if isinstance(session, AnswerSession):
        session.finish()
    if step.phase == "decode":
        turn.decoded += step.num_new
    if session.reads_as_answer:
        turn.record.reads.tokens += step.num_new
    if isinstance(session, AnswerSession) and session.request is CANDIDATES:
        cache.undecided = PassTransaction(session)
    if step.ends_prompt:
        if _log.isEnabledFor(logging.DEBUG):
            entries = list(turn.record.kept.values())
            text = f"{entries[0]} in each of {len(entries)}" if len(set(entries)) == 1 else str(entries)
            _log.debug("%s: prompt of %s tokens, entries per layer: %s", session.plan.name, max(step.lengths), text)
        turn.reading = False
        turn.drafted = None
        cache.conversation.prompt_lengths = step.lengths
        if turn.acts:
            cache.conversation.acted += ((turn.start, cache.num_seen),)
    cache.status = "ready"


def _check_states(cache: SieveCache) -> None:
    """Raise UnsupportedModelError if a pass left a recurrent layer without state, which then is kept elsewhere."""
    for index, layer in enumerate(cache.all_layers):
        if layer.has_state and next(layer.state_tensors(), None) is None:
            raise UnsupportedModelError(
                f"layer {index} is recurrent and keeps its state outside the cache, where it cannot be copied: this "
                "architecture is not supported"
            )


def cancel_session(session: Session) -> None:
    """Leave the scope of a pass that never reached the decoder; its cache is unchanged."""
    if _ACTIVE.get() is session:
        _ACTIVE.set(session.outer)
    for one in session.rows if isinstance(session, RowsSession) else [session]:
        one.cache.status = "ready"


@contextlib.contextmanager
def _turn_kept(cache: SieveCache) -> Iterator[None]:
    """Leave a cache in the turn that it is in if a pass that begins another is refused."""
    turn = cache.turn
    views = {index: layer.view for index, layer in cache.sieve_layers.items()}
    try:
        yield
    except BaseException:
        cache.conversation.turn = turn
        for index, view in views.items():
            cache.sieve_layers[index].view = view
        raise


def _lacks_records(plan: Plan, cache: SieveCache) -> bool:
    """Return True if a plan would act on an answer by records of its prompt, and has none; see Turn.rearranged."""
    return cache.turn.rearranged and (plan.when.steps is not None or plan.is_view)


def _plan_of_pass(plan: Plan, cache: SieveCache, new: int, request: PassRequest) -> Plan:
    """Return the plan that acts on a pass of `new` tokens. Raises UnsupportedOptionError where a driver is needed."""
    if request.plan is not None:
        return request.plan
    if not plan.shortens_prompt:
        return plan
    short = cache.conversation.short_prompt
    if short is None or (new > 1 and request.phase is None and not cache.turn.reading):
        how = "every prompt twice" if plan.propagate is not None else "a prompt in steps of its own"
        raise UnsupportedOptionError(
            f"{plan.name!r} reads {how}, which a plain call of the model cannot do: use "
            "sieve.generate(...) or sieve.prefill(...), with the whole conversation"
        )
    return short.plan
