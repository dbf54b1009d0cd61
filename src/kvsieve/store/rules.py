"""The rule of what may be reused of a conversation that was read.

The law: an answer that goes on from what is found is the answer that would have been given, had the tokens been read
anew under the same plan, with prompts and chunks ending at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvsieve.cache import DenseStore
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.latent import LatentLayer
from kvsieve.hf.cache.layer import SieveLayer
from kvsieve.hf.cache.states import CacheLayer, EmptyLayer
from kvsieve.hf.runtime import AttachedModel

Serves = Literal["beginning", "continuation", "conversation"]


@dataclass(frozen=True)
class Reuse:
    """A node's part of the rule.

    Attributes:
        serves: "beginning": any prompt that begins with some of its tokens. "continuation": any that begins with all of
            them. "conversation": what goes on behind the answer to the prompt that the plan has reduced in the light of
            its question, and callers that say where their prompts end.
        tokens: how many it holds.
        cut: how many of its first tokens may be taken alone; 0 where all or none.
        turns: token counts at which its prompts ended, None where that is not known.
        half_read: True in the middle of a prompt.
        answered: True where tokens follow the last prompt that ended.
        acts: True where the plan drops something at the end of a prompt, or reads prompts sparsely.
        own_answers: True where tokens of an answer were read otherwise than a prompt is: by a reader, by an evictor
            that acts while decoding, or in full where prompts are read sparsely.
    """

    serves: Serves
    tokens: int
    cut: int
    turns: tuple[int, ...] | None
    half_read: bool
    answered: bool
    acts: bool
    own_answers: bool

    def takes(self, common: int, length: int, request: Request) -> int:
        """Tell how many of its tokens a request may take; 0 for none.

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
        """Tell that a request which begins with all of its tokens may go on from where it stands."""
        if request.turns is not None and self.own_answers:
            return False
        if request.turns is not None and self.acts:
            if self.turns != tuple(end for end in ends if end <= self.tokens):
                return False
        elif self.serves == "conversation" and not self.answered:
            return False
        if not self.half_read:
            return self.tokens <= length - request.leave
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
    """

    leave: int
    need: int
    turns: tuple[int, ...] | None
    finishes: bool

    @classmethod
    def of(cls, model: AttachedModel, length: int, leave: int, turns: Sequence[int] | None) -> Request:
        """Make the request of a prompt of `length` tokens under a model's plan."""
        need = max(leave, 1, model.plan.queries(length), 2 if model.new_cache().has_state else 1)
        given = None if turns is None else tuple(turns)
        return cls(leave, need, given, leave == 0 and not model.plan.drops and model.plan.prefill is None)


def why_not(model: AttachedModel, cache: SieveCache) -> str | None:
    """Return why nothing can be reused of what a plan reads on a model, one clause; None where it can."""
    conversation = cache.conversation
    if model.plan.shortens_prompt:
        return f"{model.plan.name} reads the whole conversation again in every turn"
    if model.context.ranks.size > 1:
        return "heads are divided among several processes"
    if conversation.multi_axis_positions:
        return "it holds images, which token ids do not tell"
    if cache.owner.adopted:
        return "two plans have read it"
    if conversation.protected is not None:
        return "its caller wants some tokens kept, which others may not"
    if conversation.batch > 1 or conversation.mask is not None:
        return "it has several rows, or padding"
    if cache.has_state and not model.continues:
        return "the model reads prompts in one piece only"
    return None


def reuse_of(model: AttachedModel, cache: SieveCache, turns: Sequence[int] | None = None) -> Reuse:
    """Tell what a cache may serve, between two passes.

    Args:
        model: the attached model.
        cache: of it, with something read.
        turns: token counts at which its prompts ended; None for what the cache itself knows.
    """
    conversation, plan, seen = cache.conversation, model.plan, cache.num_seen
    half, turn = conversation.half_read, cache.turn
    last = conversation.prompt_lengths[0] if conversation.prompt_lengths else 0
    known = None if turns is None else tuple(turns)
    if known is None and turn.number == 0:
        known = () if half else (last,)
    answered = bool(last) and (turn.start if half else seen) > last
    # What a sparse prompt's tokens have attended to depends on where its passes and its end lay.
    sparse = plan.prefill is not None
    acts, cut = plan.drops or sparse, seen if is_plain(cache) and not sparse else 0
    if plan.read is not None or plan.is_view:
        # Tokens of an answer have not read all that came before them.
        cut = min(cut, seen if half and turn.number == 0 else known[0] if known else 0)
    if cut:
        serves: Serves = "beginning"
    else:
        begun = half and turn.number == 0 and not (plan.evict is not None and plan.evict.when.chunks)
        serves = "conversation" if (sparse or (plan.drops and plan.query_aware)) and not begun else "continuation"
    steps = plan.evict is not None and plan.evict.when.steps is not None
    own = answered and (plan.read is not None or plan.is_view or steps or sparse)
    return Reuse(serves, seen, cut, known, half, answered, acts, own)


def is_plain(cache: SieveCache) -> bool:
    """Tell that a cache holds every token in every layer, exactly, and nothing that speaks of all of them."""
    return not cache.turn.deferred and all(
        isinstance(layer, EmptyLayer)
        or (type(layer) in (SieveLayer, LatentLayer) and holds_all(layer, cache.num_seen) and not vars(layer)["state"])
        for layer in cache.all_layers
    )


def holds_all(layer: CacheLayer, seen: int) -> bool:
    """Tell that the entries of a layer are those of all tokens seen, exact and in order."""
    store = layer.store if isinstance(layer, SieveLayer) else None
    if not isinstance(store, DenseStore) or store.is_empty:
        return False
    return store.size == seen and store.valid is None and store.lengths == (seen,)
