"""Constraints of a caller on one prompt, under any plan: protected tokens, and parts that the plan must not act on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import InputError, short
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.planning.plans import Plan
from kvsieve.planning.protection import ProtectedTokens
from kvsieve.planning.segments import protected_columns, quota_columns, token_numbers


@dataclass(frozen=True)
class PromptConstraints:
    """Constraints of the caller on one prompt; see Sieve.generate.

    Attributes:
        protect: spans that are never evicted.
        quotas: spans with a number of entries that must stay.
        question_tokens: last tokens hidden from the plan.
        reduce: True if the plan acts on the prompt, False if it must not; None for the default, see `after_join`.
    """

    protect: Any = None
    quotas: Any = None
    question_tokens: int | None = None
    reduce: bool | None = None

    def __post_init__(self) -> None:
        if not (self.reduce is None or isinstance(self.reduce, bool)):
            raise InputError(
                f"reduce is True, or False for a prompt that the plan leaves whole; got {short(self.reduce)}"
            )

    @property
    def acts(self) -> bool:
        """True if the plan acts on the prompt."""
        return self.reduce is not False

    def after_join(self, plan: Plan, cache: SieveCache) -> PromptConstraints:
        """Return them for a prompt that continues a cache.

        A plan with probe passes, which has compressed joined documents before, by default leaves a question on them
        whole: its passes would feed all documents again.
        """
        chosen = self.reduce is not None or self.question_tokens is not None
        if chosen or not (plan.probes and cache.conversation.edits.alone):
            return self
        return dataclasses.replace(self, reduce=False)

    def checked_question(self, seen: int, mask: Tensor | None, length: int) -> int:
        """Return the last tokens of the prompt hidden from the plan; seen: columns before this turn.

        Raises InputError for a question that leaves a row nothing new to reduce.
        """
        question = self.question_tokens
        if question is None:
            return 0
        if not isinstance(question, int) or isinstance(question, bool) or question < 1:
            raise InputError(
                f"question_tokens is the number of tokens at the prompt's end, at least 1; got {short(question)}"
            )
        if not self.acts:
            raise InputError(
                "reduce=False keeps the whole prompt, so question_tokens= has no meaning; leave one of them out"
            )
        new = length - seen if mask is None else int(mask[:, seen:].sum(-1).min())
        if question >= new:
            raise InputError(
                f"question_tokens={question} leaves nothing of a row's {new} new tokens to reduce; give the context "
                "before it, or pass reduce=False to keep the whole turn"
            )
        return question

    def protected_tokens(
        self, plan: Plan, cache: SieveCache, mask: Tensor | None, shape: torch.Size, question: int
    ) -> ProtectedTokens | None:
        """Return the protected tokens of the conversation [B, N], including those of earlier turns, by column as given.

        Raises InputError for a span outside the prompt, for evicted tokens, and for more than the plan's budget allows.
        """
        short_prompt = cache.conversation.short_prompt
        known = cache.conversation.protected if short_prompt is None else short_prompt.protected
        new = self._asked(token_numbers(mask, *shape))
        if new is not None and cache.num_seen and not (plan.shortens_prompt and self.acts):
            _check_stored(cache, new)
        protected = new
        if known is not None:
            known = known.to(torch.device("cpu"))
            protected = known if new is None else known.joined(new)
        if protected is not None:
            self._check_plan(plan, protected, mask, shape, question)
        return protected

    def _asked(self, numbers: Tensor) -> ProtectedTokens | None:
        protected = None
        segments = None
        counts = None
        if self.protect is not None:
            protected = protected_columns(self.protect, numbers)
        if self.quotas is not None:
            segments, counts = quota_columns(self.quotas, numbers)
        if protected is not None and not bool(protected.any()):
            protected = None
        if counts is not None and not counts.shape[1]:
            segments = None
            counts = None
        return None if protected is None and segments is None else ProtectedTokens(protected, segments, counts)

    def _check_plan(
        self, plan: Plan, protected: ProtectedTokens, mask: Tensor | None, shape: torch.Size, question: int
    ) -> None:
        evictor = plan.evict
        if protected.segments is not None and evictor is not None and not evictor.traits.takes_quotas:
            raise InputError(
                f"quotas= needs an evictor that ranks entries by scores, which {type(evictor).__name__} does not; use "
                "protect=, or another method"
            )
        parts = [shape[1] - question] if self.acts else []
        decodes = plan.when.steps is not None
        for width in dict.fromkeys([*parts, *([shape[1]] if decodes else [])]):
            lengths = [width] * shape[0] if mask is None else mask[:, :width].sum(-1).tolist()
            for row, (length, needed) in enumerate(zip(lengths, protected.needed(width), strict=True)):
                where = f" of row {row}" if shape[0] > 1 else ""
                read = length
                if plan.shortens_prompt and plan.propagate is not None and self.acts:
                    read = min(length, plan.propagate.reread_tokens(length))
                if needed > read:
                    raise InputError(
                        f"protect= and quotas= hold {needed} of the {length} tokens{where}, and {plan.name!r} reads "
                        f"only {read} of them again; raise its budget, or hold fewer"
                    )
                if evictor is None:
                    continue
                allowed = evictor.entries(length)
                own = evictor.minimum
                # If nothing is dropped afterwards, at most all entries can be needed.
                if allowed < needed + own and (decodes or allowed < length):
                    raise InputError(
                        f"protect= and quotas= hold {needed} of the {length} tokens{where}; with the {own} that "
                        f"{type(evictor).__name__} needs itself that is over its budget of {allowed} entries: raise "
                        f"budget= to {needed + own}, or hold fewer"
                    )


def _check_stored(cache: SieveCache, new: ProtectedTokens) -> None:
    """Check that protected tokens of earlier turns are still stored in every layer and head."""
    short_prompt = cache.conversation.short_prompt
    if short_prompt is not None:
        counts = new.needed(short_prompt.length)
        read = short_prompt.token_index.cpu()
        if counts != new.reindexed(read).needed(read.shape[1]):
            raise InputError(
                "protect= and quotas= ask for tokens of an earlier turn, which were not read again; ask in the call "
                "that feeds them"
            )
        return
    for index, layer in cache.sieve_layers.items():
        # Layers after a propagator process a prompt once it is complete.
        if not layer.store.is_empty and new.is_missing(cache.num_seen, layer.store.index, layer.store.valid):
            raise InputError(
                f"protect= and quotas= ask for tokens of an earlier turn, which layer {index} no longer holds; ask in "
                "the call that feeds them"
            )
