"""Checks of a pass before it runs: fit to the cache, need of a driver, size of the observation window."""

from __future__ import annotations

import warnings

from torch import Tensor

from kvsieve.errors import CacheStateError, InputError, KvsieveWarning, UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.records import Turn
from kvsieve.hf.forward.request import PassRequest
from kvsieve.planning.plans import Plan
from kvsieve.types import Step

# A plain call with fewer tokens than these, or than the observation window, may not be meant as a prompt.
_FEW = 8


def warn_of_few(plan: Plan, cache: SieveCache, new: int) -> None:
    """Warn, at the second turn that a plain call begins with few tokens, that each such call counts as a prompt."""
    acts = plan.evict is not None or plan.propagate is not None or plan.read is not None
    if not acts or new >= max(plan.queries(new), _FEW):
        return
    cache.few_turns += 1
    if cache.few_turns == 2:
        warnings.warn(
            f"{plan.name} takes each plain call of the model with several tokens for a turn's prompt and acts at its "
            f"end: here twice on few, {new} now. Feed the tokens of an answer one at a time, candidates too, and a "
            "prompt in parts with sieve.begin and sieve.prefill; see docs/options.md",
            KvsieveWarning,
            stacklevel=2,
        )


def check_fits(plan: Plan, cache: SieveCache, fed: Tensor) -> None:
    batch = fed.shape[0]
    known = cache.conversation.batch
    if not all(fed.shape[:2]):
        raise InputError(f"the prompt is empty: input of shape {tuple(fed.shape)}; pass at least one token")
    cache.check_ready()
    if known not in (0, batch):
        raise InputError(
            f"the cache holds {known} rows and got an input of {batch}; use one cache per batch, or "
            "cache.batch_repeat_interleave to expand it"
        )
    _check_ends(plan, cache)


def check_ends_known(cache: SieveCache) -> None:
    """Raise CacheStateError if the padding after a row's end in an answer is unknown."""
    ends = cache.conversation.ends
    if ends is not None and ends.unknown:
        raise CacheStateError(
            "rows of this batch may have ended by stop strings or criteria, and the padding behind them is an end "
            "token, so it is unknown where they ended: generate with a pad_token_id that ends no answer, or ask rows "
            "one by one"
        )


def _check_ends(plan: Plan, cache: SieveCache) -> None:
    """Raise CacheStateError if the padding of rows that ended early cannot be removed."""
    check_ends_known(cache)
    ends = cache.conversation.ends
    if ends is None or not ends.fed:
        return
    why = None
    if plan.when.steps is not None:
        why = f"{plan.name} has evicted for the padding behind them"
    elif plan.scores_entries:
        why = f"{plan.name} has scored entries by the padding behind them"
    elif cache.forgets:
        why = "the model's recurrent or sliding-window layers have read the padding behind them"
    elif any(layer.store.is_encoded for layer in cache.sieve_layers.values()):
        why = "entries were encoded while the padding behind them was read"
    if why is not None:
        raise CacheStateError(
            f"rows {ends.hidden.any(1).nonzero()[:, 0].tolist()} of the batch ended before others, and {why}, so they "
            "would not answer as alone: ask rows one by one, or begin with a new cache and a mask that hides the "
            "padding"
        )


def check_needs_no_driver(plan: Plan, turn: Turn) -> None:
    """Raise UnsupportedOptionError if a plain call's prompt needs more than one pass of the model."""
    does = "feeds tokens of its own before a prompt is complete" if plan.probes else None
    if plan.drafts and turn.acts:
        does = "has another model read a prompt first"
    if does is not None:
        raise UnsupportedOptionError(
            f"{plan.name!r} {does}, which a plain call of the model cannot do: use sieve.generate(...) or "
            "sieve.prefill(...), with the whole conversation"
        )


def check_step(plan: Plan, cache: SieveCache, step: Step, counts: tuple[int, ...]) -> None:
    """Raise InputError if a plan cannot do in a pass what it does for each row alone.

    A pass that ends a prompt contains the plan's observation window: drivers ensure this, callers of `Sieve.begin` may
    not. If an evictor counts an answer's tokens, the mask must hide none.

    Args:
        plan: acts on the pass.
        cache: of the pass.
        step: facts of the pass.
        counts: true tokens of the pass, per row.
    """
    if step.phase == "decode":
        _check_answers(plan, step, counts)
    else:
        _check_looks_back(plan, cache, step, counts)


def check_tentative(cache: SieveCache, request: PassRequest, step: Step, counts: tuple[int, ...]) -> None:
    """Raise CacheStateError or InputError for a pass that could not be undone."""
    if cache.turn.reading:
        raise CacheStateError("a tentative pass is over tokens of an answer, and this turn's prompt is not complete")
    if request.on_layer is not None:
        raise UnsupportedOptionError("what on_layer= has seen of a tentative pass cannot be taken back: leave it out")
    if min(counts) < step.num_new:
        raise InputError("attention_mask hides new tokens of a tentative pass: give 1 for all of them")


def _check_answers(plan: Plan, step: Step, counts: tuple[int, ...]) -> None:
    if plan.when.steps is not None and min(counts) < step.num_new:
        rows = [row for row, count in enumerate(counts) if count < step.num_new]
        raise InputError(
            f"attention_mask hides the token of rows {rows}, and {plan.name} evicts after every so many tokens of all "
            "rows, so they would not keep what they keep alone: give 1 for tokens of an answer, or ask rows one by one"
        )


def _check_looks_back(plan: Plan, cache: SieveCache, step: Step, counts: tuple[int, ...]) -> None:
    if not step.ends_prompt or not cache.turn.acts or step.start == cache.turn.start or _keeps_all(plan, cache, step):
        return
    for count, length in zip(counts, step.turn_lengths, strict=True):
        needed = min(plan.queries(length), length)
        if count >= needed:
            continue
        way_out = f"start again with a new cache, and let sieve.begin leave at least {needed}"
        documents = cache.conversation.parallel
        if documents is not None and step.start == documents.end:
            way_out = f"ask at least {needed} tokens after the documents, or take the join 'full' or another plan"
        raise InputError(
            f"{count} of this prompt's {length} tokens are left to read, and {plan.name} looks back on the last "
            f"{needed}, in one pass: {way_out}"
        )


def _keeps_all(plan: Plan, cache: SieveCache, step: Step) -> bool:
    """Return True if a plan drops nothing of a conversation within its budget."""
    if plan.propagate is not None:
        return False
    evictor = plan.evict
    new_tokens = cache.turn.new_tokens
    return evictor is None or all(evictor.entries(length, new_tokens) >= length for length in step.lengths)
