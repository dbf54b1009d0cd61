"""The rule of what may be reused of a conversation that was read.

The law: an answer that goes on from what is found is the answer that would have been given, had the tokens been read
anew under the same plan, with prompts and chunks ending at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvsieve.hf import reuse
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.states import CacheLayer
from kvsieve.hf.prompt.chunks import keeps_to_chunks, shared_end
from kvsieve.hf.reuse import acts_at_end, may_cut
from kvsieve.hf.runtime import AttachedModel
from kvsieve.plans import Plan

Serves = Literal["beginning", "continuation", "conversation"]


@dataclass(frozen=True)
class Reuse:
    """A node's part of the rule.

    Attributes:
        serves: "beginning": any prompt that begins with some of its tokens. "continuation": any that begins with all of
            them. "conversation": what follows the answer to the prompt that the plan has reduced in the light of its
            question, and callers that say where their prompts end.
        tokens: how many it holds.
        cut: how many of its first tokens may be taken alone; 0 where all or none.
        turns: token counts at which its prompts ended, None where that is not known.
        half_read: True in the middle of a prompt.
        answered: True where tokens follow the last prompt that ended.
        acts: True where the plan does something at the end of a prompt: it drops, encodes or chooses what is read.
        as_prompt: True where a reading anew, of which only the ends of prompts are known, leaves what it holds.
        chunk: tokens per pass that it was read with, where what it holds depends on that; else None.
    """

    serves: Serves
    tokens: int
    cut: int
    turns: tuple[int, ...] | None
    half_read: bool
    answered: bool
    acts: bool
    as_prompt: bool
    chunk: int | None

    @property
    def serves_anew(self) -> bool:
        """True where it may serve a request that is one prompt, read anew."""
        return self.cut > 0 or (self.as_prompt and (self.turns == () or not self.acts))

    def takes(self, common: int, length: int, request: Request) -> int:
        """Return how many of its tokens a request may take; 0 for none.

        Args:
            common: tokens that the two begin with alike.
            length: tokens of the request.
            request: what else is known of it.
        """
        ends = [end for end in request.turns or () if self.acts]
        if common == self.tokens and self._goes_on(length, request, ends):
            return self.tokens
        # What is cut off is the beginning of a prompt, which goes on.
        end = min([length, *ends])
        limit = length if request.finishes else end - request.need
        return max(min(common, self.cut, limit), 0)

    def _goes_on(self, length: int, request: Request, ends: list[int]) -> bool:
        """Return True if a request which begins with all of its tokens may go on from where it stands."""
        if request.turns is None:
            if self.serves == "conversation" and not self.answered:
                return False
            return self.tokens <= length - (request.need if self.half_read else request.leave)
        before = tuple(end for end in ends if end <= self.tokens)
        if not self.as_prompt or self.chunk != request.chunk or (self.acts and self.turns != before):
            return False
        prompts = before if self.acts else (length,)
        if not self.half_read and prompts[-1:] == (self.tokens,):
            return self.tokens <= length - request.leave
        # The prompt that follows has begun before: its last pass must hold what the plan looks back on.
        return self.tokens <= min([length, *(end for end in ends if end > self.tokens)]) - request.need


@dataclass(frozen=True)
class Request:
    """A prompt that is to be read, and what is known of it.

    Attributes:
        leave: tokens that must be left to read.
        need: tokens that must be left where what is found is the beginning of a prompt: its last pass holds as many as
            the plan looks back on.
        turns: token counts at which prompts would end if all were read anew; None where the caller does not say.
        finishes: True where a prompt's beginning counts as the prompt, under a plan that does nothing at its end.
        chunk: tokens per pass, under a plan that keeps to chunks; else None.
    """

    leave: int
    need: int
    turns: tuple[int, ...] | None
    finishes: bool
    chunk: int | None = None

    @classmethod
    def of(
        cls, model: AttachedModel, length: int, leave: int, turns: Sequence[int] | None, chunk: int | None = None
    ) -> Request:
        """Make the request of a prompt of `length` tokens under a model's plan."""
        plan = model.plan
        need = max(leave, 1, plan.queries(length), 2 if model.new_cache().has_state else 1)
        given = None if turns is None else tuple(turns)
        return cls(leave, need, given, leave == 0 and not acts_at_end(plan), chunk if keeps_to_chunks(plan) else None)


def tells_answers_apart(plan: Plan) -> bool:
    """Return True if tokens of an answer leave something else than they would as tokens of the next prompt.

    They are read sparsely where prompts are read in full, or the other way round; encoded block by block; reduced or
    observed as they come; or no longer there for the next prompt's propagator to choose.
    """
    if plan.read is not None or plan.is_view or plan.codec is not None:
        return True
    if plan.prefill is not None or plan.propagate is not None:
        return True
    return plan.evict is not None and (plan.evict.when.observes or plan.evict.when.steps is not None)


def why_not(model: AttachedModel, cache: SieveCache) -> str | None:
    """Return why nothing can be reused of what a plan reads on a model, one clause; None where it can."""
    conversation = cache.conversation
    if (reason := reuse.why_not(model)) is not None:
        return reason
    if conversation.multi_axis_positions:
        return "it holds images, which token ids do not tell"
    if cache.owner.adopted:
        return "two plans have read it"
    if conversation.protected is not None:
        return "its caller wants some tokens kept, which others may not"
    if conversation.batch > 1 or conversation.mask is not None:
        return "it has several rows, or padding"
    return None


def reuse_of(
    model: AttachedModel,
    cache: SieveCache,
    turns: Sequence[int] | None = None,
    *,
    length: int = 0,
    chunk: int | None = None,
) -> Reuse:
    """Return what a cache may serve, between two passes.

    Args:
        model: the attached model.
        cache: of it, with something read.
        turns: token counts at which its prompts ended; None for what the cache itself knows.
        length: tokens that are known of the conversation, an answer's last one included, which is never read.
        chunk: tokens per pass that it was read with; None for whole prompts.
    """
    conversation, plan, seen = cache.conversation, model.plan, cache.num_seen
    half, first = conversation.half_read, conversation.half_read and cache.turn.number == 0
    acts, plain, ends = acts_at_end(plan), is_plain(cache), tuple(end for _, end in conversation.acted)
    last = conversation.prompt_lengths[0] if conversation.prompt_lengths else 0
    answered = bool(last) and (cache.turn.start if half else max(seen, min(length, seen + 1))) > last
    # A file that an earlier version saved does not say.
    lost = bool(last) and not ends and acts and not plain
    known = None if lost else ends if turns is None else tuple(turns)
    as_prompt = not lost and (not acts or known == ends) and _as_prompts(plan, cache)
    cut = seen if plain and may_cut(plan) else 0
    if plan.read is not None or plan.is_view:
        # Tokens of an answer have not read all that came before them.
        cut = min(cut, seen if first else ends[0] if conversation.acted and conversation.acted[0][0] == 0 else 0)
    by_chunks = keeps_to_chunks(plan)
    if half and by_chunks:
        as_prompt = as_prompt and first and seen == shared_end(plan, seen, chunk)
    if cut:
        serves: Serves = "beginning"
    else:
        begun = first and not (plan.evict is not None and plan.evict.when.chunks)
        chosen = plan.prefill is not None or (plan.drops and plan.query_aware)
        serves = "conversation" if chosen and not begun else "continuation"
    return Reuse(serves, seen, cut, known, half, answered, acts, as_prompt, chunk if by_chunks else None)


def _as_prompts(plan: Plan, cache: SieveCache) -> bool:
    """Return True if reading all as prompts, which end where the plan has acted, would have left the same."""
    apart, before = tells_answers_apart(plan), 0
    for start, end in cache.conversation.acted:
        # Tokens between are an answer's, or of a prompt with reduce=False.
        if start > before and (apart or end - start < min(plan.queries(end - before), end - before)):
            return False
        before = end
    return not apart or before == (cache.turn.start if cache.conversation.half_read else cache.num_seen)


def is_plain(cache: SieveCache) -> bool:
    """Tell that a cache holds every token in every layer, exactly, and nothing that speaks of all of them."""
    return (
        not cache.turn.deferred
        and not cache.has_state
        and all(
            layer.memory is None or (holds_all(layer, cache.num_seen) and not vars(layer)["state"])
            for layer in cache.all_layers
        )
    )


def holds_all(layer: CacheLayer, seen: int) -> bool:
    """Tell that the entries of a layer are those of all tokens seen, exact and in order."""
    store = layer.memory if layer.is_growing else None
    if store is None or store.is_ragged or store.is_encoded or store.is_empty:
        return False
    return store.size == seen and store.valid is None and store.lengths == (seen,)
