"""Documents of a join: their tokens, and the prefill of each of them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import InputError, short
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.inputs import row_of_ids
from kvsieve.hf.model.context import context_of
from kvsieve.hf.prompt.chunks import shared_end
from kvsieve.hf.prompt.options import Progress
from kvsieve.hf.reuse import StoredPrefixes
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.joins import AskedJoin, Join

# Token ids of a text: int64 [1, N] or [N], or a list.
Ids = Tensor | Sequence[int]


@dataclass(frozen=True)
class JoinTexts:
    """Tokens of the documents of a join, and those before the first one.

    Attributes:
        before: int64 [S].
        texts: int64 [N], one per document, in order.
    """

    before: Tensor
    texts: tuple[Tensor, ...]

    @property
    def start(self) -> int:
        """Tokens before the first document."""
        return len(self.before)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return tuple(map(len, self.texts))

    @property
    def places(self) -> tuple[int, ...]:
        """Column of each document's first token."""
        return tuple(accumulate(self.sizes[:-1], initial=self.start))

    @property
    def ids(self) -> Tensor:
        """int64 [1, N], everything in order."""
        return torch.cat([self.before, *self.texts])[None]

    def until(self, seen: int) -> list[int]:
        """Return the sizes of the documents up to the column `seen`."""
        ends = zip(self.places, self.sizes, strict=True)
        return [min(place + size, seen) - place for place, size in ends if place < seen]

    def alone(self, seen: int) -> list[tuple[Tensor, list[int]]]:
        """Return every document once: the tokens of its prefill alone, int64 [1, N], and its places before `seen`."""
        found: dict[tuple[int, ...], tuple[Tensor, list[int]]] = {}
        for text, place in zip(self.texts, self.places, strict=True):
            if place < seen:
                prompt = torch.cat([self.before, text])[None]
                found.setdefault(tuple(text.tolist()), (prompt, []))[1].append(place)
        return list(found.values())


def checked_documents(model: AttachedModel, documents: Any, before: Any) -> JoinTexts:
    """Return the tokens of a join. Raises InputError for other than token ids, or more than the model's context."""
    if not isinstance(documents, (list, tuple)) or not documents:
        raise InputError(f"documents is a list of at least one document's token ids, got {short(documents)}")
    vocabulary = model.config.vocab_size
    texts = tuple(row_of_ids(text, vocabulary, f"document {number}") for number, text in enumerate(documents))
    start = torch.empty(0, dtype=torch.int64) if before is None else row_of_ids(before, vocabulary, "before")
    found = JoinTexts(start, texts)
    context = context_of(model.config)
    total = found.start + sum(found.sizes)
    if context is not None and total > context:
        raise InputError(
            f"the documents have {total} tokens together, the model's context ends at {context}; join fewer or shorter "
            "ones"
        )
    return found


def checked_question(model: AttachedModel, kind: Join, question: Any, before: int) -> Tensor | None:
    """Return the tokens of a question after `before` others, int64 [1, N], if a join chooses by it, else None.

    Raises InputError for other than token ids, more than the model's context, and for None where the join needs it.
    """
    if not isinstance(kind, AskedJoin):
        return None
    if question is None:
        raise InputError(
            f"the join {kind.spec!r} chooses tokens by the question; give its token ids as question=, or take another "
            "join"
        )
    ids = row_of_ids(question, model.config.vocab_size, "question")[None]
    context = context_of(model.config)
    if context is not None and before + ids.shape[1] > context:
        raise InputError(
            f"the documents have {before} tokens together and the question {ids.shape[1]}, the model's context ends at "
            f"{context}; join fewer or shorter ones"
        )
    return ids


@dataclass
class JoinReader:
    """Prefills texts, each in a cache of its own.

    Attributes:
        sieve: the attached model.
        stored: store to find prefixes in and to add texts to, or None.
        chunk: tokens per forward pass, None for all at once.
        ends: True if a text is a prompt, at the end of which the plan acts; False if the prompt continues.
        beginning: prefix of all texts, prefilled, if there is no store to find it in.
    """

    sieve: Any
    stored: StoredPrefixes | None
    chunk: int | None
    ends: bool
    beginning: SieveCache | None = None

    def prefill_beginning(self, before: Tensor, shortest: int) -> None:
        """Prefill the tokens before all texts once, as far as these then have the entries of a prefill in one piece.

        Args:
            before: int64 [S].
            shortest: tokens of the shortest text, those included.
        """
        plan = self.sieve.plan
        end = shared_end(plan, min(len(before), shortest - max(plan.queries(shortest), 1)), self.chunk)
        if self.stored is None and end > 0:
            self.beginning = self.sieve.begin(before[None, :end], chunk=self.chunk)

    def prefill(self, ids: Tensor, done: Callable[[int], None] | None) -> tuple[SieveCache, int]:
        """Return a cache with a text, int64 [1, N], and the number of its tokens that came from the store.

        done: called with the number of its tokens that are prefilled.
        """
        cache: SieveCache = self.sieve.new_cache() if self.beginning is None else self.beginning.fork()

        def columns(start: int) -> Progress | None:
            return None if done is None else lambda new, _: done(start + new)

        options = {"chunk": self.chunk, "progress": columns(cache.num_seen)}
        if self.stored is not None:
            return cache, self.stored.prefill(self.sieve, ids, cache, options, ends=self.ends).found
        if self.ends:
            self.sieve.prefill(ids, torch.ones_like(ids), cache=cache, **options)
        else:
            self.sieve.begin(ids, cache=cache, **options)
        return cache, 0
