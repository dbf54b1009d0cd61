"""A smaller model as drafter, also one with another tokenizer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from kvsieve.errors import PlanError, UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.drafts.draft_passes import DraftPasses, PlainDraftPasses, greedy, shared_length
from kvsieve.hf.drafts.drafter import Drafter
from kvsieve.hf.drafts.translation import Translation
from kvsieve.hf.model.context import context_of
from kvsieve.hf.prompt.draft import ends_of, load_draft, prefilled, same_tokens
from kvsieve.hf.runtime import AttachedModel
from kvsieve.models.quantized import weight_bytes
from kvsieve.planning.roles import Loaded

# Tokens per forward pass over a prompt.
_CHUNK = 1024
# The cache of each draft model's last drafter, and the tokens in it, for a drafter that continues the conversation.
_LAST: weakref.WeakKeyDictionary[AttachedModel, tuple[SieveCache, list[int]]] = weakref.WeakKeyDictionary()


class DraftedConversation:
    """A conversation in a draft model's cache.

    Attributes:
        model: the draft, under an empty plan.
        cache: of the conversation.
        fed: tokens in the cache, drafted ones included.
    """

    def __init__(self, model: AttachedModel, cache: SieveCache, fed: Sequence[int] = ()) -> None:
        self.model = model
        self.cache = cache
        self.fed = list(fed)
        self._passes = (PlainDraftPasses if rewrites(cache) else DraftPasses)(model, cache)

    @property
    def is_complete(self) -> bool:
        """True unless a pass failed."""
        return self.cache.status == "ready" and self.cache.num_seen == len(self.fed)

    def follow(self, tokens: Sequence[int]) -> Tensor:
        """Make `tokens` the content of the cache, and return the logits [V] after them."""
        same = min(shared_length(self.fed, tokens), len(tokens) - 1)
        if not self.fed:
            logits = prefilled(self.model, self.cache, tokens, _CHUNK).logits
            assert logits is not None
            self.fed = list(tokens)
            return logits[0, -1]
        if same < len(self.fed):
            self._passes.take_back(len(self.fed) - same)
        self.fed = list(tokens)
        return self._passes.feed(tokens[same:])

    def draft(self, logits: Tensor, most: int, vocabulary: int) -> list[int]:
        """Return up to `most` further tokens; logits: of `follow`."""
        tokens, fed = greedy(self._passes, logits, most, ends_of(self.model), vocabulary)
        self.fed += tokens[:fed]
        return tokens


class ModelDrafter(Drafter):
    """Drafts with a smaller model that prefills the whole conversation, under an empty plan.

    Args:
        draft: the smaller model.
        model: verifies.
        translation: between the tokens of the two; None if they are the same.
    """

    free = False

    def __init__(self, draft: AttachedModel, model: AttachedModel, translation: Translation | None = None) -> None:
        # A token takes as long as its weights take to read.
        self.cost = weight_bytes(draft.model) / weight_bytes(model.model)
        self._draft = draft
        self._vocabulary = model.config.vocab_size
        self._translation = translation
        self._tokens: list[int] = []
        self._conversation: DraftedConversation | None = None
        self._note: str | None = None

    @property
    def note(self) -> str | None:
        return self._note

    def extend(self, tokens: Sequence[int]) -> None:
        if self._translation is None:
            self._tokens += tokens
        else:
            self._tokens = self._translation.extend(tokens)

    def propose(self, most: int) -> list[int]:
        context = context_of(self._draft.config)
        room = most if context is None else context - len(self._tokens)
        if room < 1:
            self._note = (
                f"drafting ended at {len(self._tokens)} tokens, as the draft counts them: its context is {context}"
            )
            self.close()
            return []
        if self._conversation is None:
            self._conversation = _begun(self._draft, self._tokens)
        logits = self._conversation.follow(self._tokens)
        if self._translation is None:
            return self._conversation.draft(logits, min(most, room), self._vocabulary)
        drafted = self._conversation.draft(logits, min(most, room), len(logits))
        ended = bool(drafted) and drafted[-1] in ends_of(self._draft)
        return self._translation.back(drafted[:-1] if ended else drafted, ended=ended)[:most]

    def close(self) -> None:
        conversation = self._conversation
        self._conversation = None
        if conversation is not None and conversation.is_complete:
            _LAST[self._draft] = conversation.cache, conversation.fed


def _begun(draft: AttachedModel, tokens: Sequence[int]) -> DraftedConversation:
    """Return the draft's last conversation if `tokens` continue it, else a new one."""
    cache, fed = _LAST.pop(draft, (None, []))
    if cache is not None and rewrites(cache) and 2 * shared_length(fed, tokens) > len(fed):
        return DraftedConversation(draft, cache, fed)
    return DraftedConversation(draft, draft.new_cache())


def rewrites(cache: SieveCache) -> bool:
    """Return True if any token of a draft's cache can be taken back, not only those drafted last."""
    return len(cache.sieve_layers) == len(cache.layers)


def model_drafter(given: str | Loaded, model: AttachedModel) -> ModelDrafter:
    """Return a drafter of one row by another model, which stays attached until the block of `model` ends.

    Args:
        given: the draft model.
        model: verifies.

    Raises:
        PlanError: the draft is the model itself, or their vocabularies cannot be mapped.
        UnsupportedOptionError: the draft's layers cannot take back text that another tokenizer splits anew.
        ModelNotFoundError, ModelLoadError: it cannot be loaded.
    """
    loaded = load_draft(given, model.model)
    translation = _translation(loaded, model)
    draft = model.open_draft(loaded.model)
    if translation is not None and not rewrites(draft.new_cache()):
        raise UnsupportedOptionError(
            f"the draft {loaded!r} has another tokenizer and layers with windows or recurrent states, which cannot "
            "take text back: use a draft with the model's tokenizer, or draft='lookup'"
        )
    return ModelDrafter(draft, model, translation)


def _translation(loaded: Loaded, model: AttachedModel) -> Translation | None:
    """Return the mapping between the draft's tokens and the model's, None if they are the same. Raises PlanError."""
    own = model.tokenizer
    sizes = [part.get_input_embeddings().num_embeddings for part in (loaded.model, model.model)]
    if loaded.tokenizer is None or own is None:
        if sizes[0] == sizes[1]:
            return None
        lacks = "attach(model, plan, tokenizer=tokenizer)" if own is None else "draft=(model, tokenizer)"
        raise PlanError(
            f"the draft knows {sizes[0]} tokens and the model {sizes[1]}, so their tokenizers differ, and only one of "
            f"them is known: give the other by {lacks}, or use draft='lookup'"
        )
    if same_tokens(own, loaded.tokenizer):
        return None
    ends = ends_of(model)
    return Translation(own, loaded.tokenizer, min(ends) if ends else None)
