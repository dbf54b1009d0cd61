"""Removal of the last columns of a cache, as in transformers' assisted decoding for rejected candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.hf.cache.records import Conversation
from kvsieve.hf.cache.states import CacheLayer
from kvsieve.planning.plans import Plan

_RECURRENT = "the model's recurrent layers do not go back to an earlier state"


class Undecided(Protocol):
    """A pass with last tokens that can be undone."""

    size: int

    def accept(self, count: int) -> None:
        """Leave the cache as if only the first `count` tokens had come."""
        ...


def why_not_candidates(plan: Plan, layers: Sequence[CacheLayer], seen: int) -> str | None:
    """Return a clause why passes over candidates cannot be undone, or None. seen: columns fed."""
    if any(layer.has_state for layer in layers):
        return _RECURRENT
    if not seen and plan.roles:
        return f"the first pass holds candidates beside the prompt, on which {plan.name} acts: read the prompt before"
    if plan.weighs_layers:
        return f"{plan.name} evicts while decoding, by weighing layers against each other"
    return None


def take_back(plan: Plan, conversation: Conversation, layers: Sequence[CacheLayer], count: int) -> None:
    """Remove the last `count` columns, which were only stored; they stay counted.

    Raises:
        InputError: fewer were fed.
        UnsupportedOptionError: the plan or the model acted on them.
    """
    start = conversation.num_seen - count
    if start < 0:
        raise InputError(f"{count} columns are to be taken back, and {conversation.num_seen} were fed")
    prompt = max(count - conversation.turn.decoded, 0)
    why = _why_not(plan, conversation, layers, count, prompt)
    if why is not None:
        raise UnsupportedOptionError(f"the last {count} columns cannot be taken back: {why}")
    for layer in layers:
        if layer.memory is not None:
            layer.memory.drop_last([count] * conversation.batch)
    if conversation.mask is not None:
        conversation.mask = conversation.mask[:, :start]
    conversation.prompt_lengths = tuple(length - prompt for length in conversation.prompt_lengths)
    conversation.turn.decoded -= count - prompt


def _why_not(
    plan: Plan, conversation: Conversation, layers: Sequence[CacheLayer], count: int, prompt: int
) -> str | None:
    """Return a clause why columns cannot be removed, or None; prompt: how many of them are the prompt's."""
    if any(layer.has_state for layer in layers):
        return _RECURRENT
    if conversation.turn.reading or conversation.ends is not None:
        return "a prompt is half-read, or rows have ended before others"
    if prompt and (plan.roles or conversation.turn.start > conversation.num_seen - count):
        return f"{prompt} of them are of the prompt, on which {plan.name} has acted"
    if plan.when.steps is not None:
        return f"{plan.name} acts while decoding; call activate_past_recording() before a pass to be taken back"
    if plan.scores_entries:
        return f"{plan.name} has scored entries by their queries"
    stored = min((layer.memory.droppable for layer in layers if layer.memory is not None), default=count)
    if stored < count:
        return f"only {stored} were stored since entries were encoded or left a window"
    return None
