"""Rule of reuse of stored conversations.

The law: an answer after a prefix hit equals the answer after a full prefill of the same tokens under the same plan,
with prompts and chunks that end at the same places. A request for approximate prefixes may get those of the rules that
it names, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvsieve.errors import InputError, short
from kvsieve.hf import reuse
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.states import CacheLayer
from kvsieve.hf.prompt.chunks import keeps_to_chunks, shared_end
from kvsieve.hf.reuse import acts_at_end, may_cut
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan

Serves = Literal["beginning", "continuation", "conversation"]


@dataclass(frozen=True)
class Reuse:
    """A node's part of the rule.

    Attributes:
        serves: "beginning": any prompt with a common prefix. "continuation": any prompt that begins with all of its
            tokens. "conversation": the next turn after the answer to a prompt reduced by its question, and callers that
            state the ends of their prompts.
        tokens: number of its tokens.
        cut: number of first tokens that may be reused alone; 0 for all or none.
        turns: token counts at which its prompts ended, or None if unknown.
        half_read: True in the middle of a prompt.
        answered: True if tokens follow the last prompt that ended.
        acts: True if the plan drops, encodes or chooses entries at the end of a prompt.
        as_prompt: True if a new prefill with only the ends of prompts known leaves the same content.
        chunk: tokens per prefill chunk, if the content depends on that; else None.
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
        """True if it may serve a request that is one new prompt."""
        return self.cut > 0 or (self.as_prompt and (self.turns == () or not self.acts))

    def takes(self, common: int, length: int, request: Request) -> int:
        """Return the number of its tokens that a request may reuse.

        Args:
            common: length of the common prefix.
            length: tokens of the request.
            request: its other facts.
        """
        ends = [end for end in request.turns or () if self.acts]
        if common == self.tokens and self._goes_on(length, request, ends):
            return self.tokens
        # A cut is the beginning of a prompt that continues.
        end = min([length, *ends])
        limit = length if request.finishes else end - request.need
        return max(min(common, self.cut, limit), 0)

    def _goes_on(self, length: int, request: Request, ends: list[int]) -> bool:
        """Return True if a request that begins with all of its tokens may continue from its end."""
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
        # The next prompt has already begun: its last pass must contain the observation window.
        return self.tokens <= min([length, *(end for end in ends if end > self.tokens)]) - request.need


@dataclass(frozen=True)
class Request:
    """A prompt to prefill.

    Attributes:
        leave: tokens left to prefill.
        need: tokens left to prefill if the hit ends inside a prompt: the plan's observation window fits into the last
            pass.
        turns: token counts at which prompts would end in a full prefill; None if the caller does not say.
        finishes: True if a prompt's beginning counts as the prompt, under a plan that does nothing at its end.
        chunk: tokens per pass, under a plan that depends on chunks; else None.
        approximate: rules of approximate nodes that may serve it beside exact ones; () for none.
    """

    leave: int
    need: int
    turns: tuple[int, ...] | None
    finishes: bool
    chunk: int | None = None
    approximate: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        model: AttachedModel,
        length: int,
        leave: int,
        turns: Sequence[int] | None,
        chunk: int | None = None,
        approximate: Sequence[str] = (),
    ) -> Request:
        """Return the request of a prompt of `length` tokens under a model's plan. Raises InputError."""
        plan = model.plan
        need = max(leave, 1, plan.queries(length), 2 if model.new_cache().has_state else 1)
        ends = None if turns is None else tuple(turns)
        if ends == ():
            # The prompt has further tokens than these.
            need = leave
        finishes = leave == 0 and not acts_at_end(plan)
        return cls(leave, need, ends, finishes, chunk if keeps_to_chunks(plan) else None, checked_rules(approximate))


def checked_rules(approximate: Sequence[str]) -> tuple[str, ...]:
    """Return rules sorted, each once. Raises InputError for another value."""
    if not isinstance(approximate, (tuple, list)) or not all(isinstance(rule, str) for rule in approximate):
        raise InputError(
            f"approximate= is a tuple of rules such as ('edit:window=32',), got {short(approximate)}; see "
            "cache.conversation.approximate"
        )
    return tuple(sorted({*approximate}))


def tells_answers_apart(plan: Plan) -> bool:
    """Return True if tokens of an answer leave different content than tokens of the next prompt.

    Reasons: sparse attention in only one of the two, encoding in blocks, eviction or observation per token, or entries
    that are missing for the next prompt's propagator.
    """
    if plan.read is not None or plan.is_view or plan.codec is not None:
        return True
    if plan.prefill is not None or plan.propagate is not None:
        return True
    return plan.when.observes or plan.when.steps is not None


def why_not(model: AttachedModel, cache: SieveCache) -> str | None:
    """Return the reason, one clause, why a plan's conversations on a model cannot be reused, or None."""
    conversation = cache.conversation
    if (reason := reuse.why_not(model)) is not None:
        return reason
    if conversation.multi_axis_positions:
        return "it holds images, which token ids do not tell"
    if conversation.parallel is not None:
        return "its documents are at the same positions"
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
    """Return the uses of a cache, between two passes.

    Args:
        model: the attached model.
        cache: of it, not empty.
        turns: token counts at which its prompts ended; None for those the cache recorded.
        length: known tokens of the conversation, including an answer's unprocessed last one.
        chunk: tokens per prefill chunk; None for whole prompts.
    """
    conversation = cache.conversation
    plan = model.plan
    seen = cache.num_seen
    half = conversation.half_read
    first = conversation.half_read and cache.turn.number == 0
    acts = acts_at_end(plan)
    plain = is_plain(cache)
    ends = tuple(end for _, end in conversation.acted)
    last = conversation.prompt_lengths[0] if conversation.prompt_lengths else 0
    answered = bool(last) and (cache.turn.start if half else max(seen, min(length, seen + 1))) > last
    # Unknown in files of earlier versions.
    lost = bool(last) and not ends and acts and not plain
    known = None if lost else ends if turns is None else tuple(turns)
    as_prompt = not lost and (not acts or known == ends) and _as_prompts(plan, cache)
    cut = seen if plain and may_cut(plan) else 0
    if plan.read is not None or plan.is_view:
        # Tokens of an answer did not attend to all earlier ones.
        cut = min(cut, seen if first else ends[0] if conversation.acted and conversation.acted[0][0] == 0 else 0)
    by_chunks = keeps_to_chunks(plan)
    if half and by_chunks:
        as_prompt = as_prompt and first and seen == shared_end(plan, seen, chunk)
    if cut:
        serves: Serves = "beginning"
    else:
        begun = first and not plan.when.chunks
        chosen = plan.prefill is not None or (plan.drops and plan.query_aware)
        serves = "conversation" if chosen and not begun else "continuation"
    return Reuse(serves, seen, cut, known, half, answered, acts, as_prompt, chunk if by_chunks else None)


def _as_prompts(plan: Plan, cache: SieveCache) -> bool:
    """Return True if prefilling everything as prompts that end where the plan acted would leave the same content."""
    apart = tells_answers_apart(plan)
    before = 0
    for start, end in cache.conversation.acted:
        # Tokens between are an answer's, or of a prompt with reduce=False.
        if start > before and (apart or end - start < min(plan.queries(end - before), end - before)):
            return False
        before = end
    return not apart or before == (cache.turn.start if cache.conversation.half_read else cache.num_seen)


def is_plain(cache: SieveCache) -> bool:
    """Return True if a cache stores every token exactly in every layer, without state about all of them."""
    return (
        not cache.turn.deferred
        and not cache.has_state
        and all(
            layer.memory is None or (holds_all(layer, cache.num_seen) and not vars(layer)["state"])
            for layer in cache.all_layers
        )
    )


def holds_all(layer: CacheLayer, seen: int) -> bool:
    """Return True if a layer stores all tokens seen, exactly and in order."""
    store = layer.memory if layer.is_growing else None
    if store is None or store.is_ragged or store.is_encoded or store.is_empty:
        return False
    return store.size == seen and store.valid is None and store.lengths == (seen,)
