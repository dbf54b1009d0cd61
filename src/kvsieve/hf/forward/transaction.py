"""Passes over several tokens of an answer: each acts as if alone, and the last ones can be undone.

Recurrent states have no entries to drop: tokens that stay are fed again. An evictor that weighs layers against each
other acts on the first layer after the last one has attended: the pass is split into one per token; see one_by_one.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsieve.core.checks import look
from kvsieve.hf.cache.counts import Reads
from kvsieve.hf.cache.layer import SieveLayer, StoreLayer, WindowLayer
from kvsieve.hf.forward.parts import Given, TokenParts
from kvsieve.hf.forward.session import Session
from kvsieve.hf.forward.tentative import Transaction
from kvsieve.hf.forward.travel import Tokens
from kvsieve.hf.forward.windows import attend_window
from kvsieve.types import AttentionQueries


@dataclass
class AnswerSession(Session):
    """State of a pass over tokens of an answer: several, or those of a tentative pass.

    Layers take all tokens in one call, if a kernel can, up to the next token after which the plan evicts or encodes.

    Attributes:
        parts: the tokens as layers take them.
        counts: reads of each token.
        before: layers of a tentative pass that do more than add entries, as they were before it.
        given: inputs of these layers.
        evicted: layers that had dropped entries in this turn before the pass.
    """

    parts: TokenParts = field(init=False)
    counts: list[Reads] = field(init=False)
    before: dict[int, SieveLayer] = field(default_factory=dict)
    given: dict[int, Given] = field(default_factory=dict)
    evicted: set[int] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.evicted = set(self.cache.turn.record.evicted)
        self.counts = self._new_counts(self.tokens.size)
        self.parts = TokenParts(self, self.tokens, self.counts)

    @functools.cached_property
    def only_appends(self) -> bool:
        return self.only_stores()

    def _new_counts(self, tokens: int) -> list[Reads]:
        return [Reads(executors=self.reads.executors) for _ in range(tokens)]

    def attend(self, index: int, layer: StoreLayer, asked: AttentionQueries, key: Tensor, value: Tensor) -> Tensor:
        self.check_queries(index, asked)
        tentative = self.request.tentative
        if isinstance(layer, WindowLayer):
            out = attend_window(layer, asked, key, value, self.tokens, self.cache.conversation.mask)
            self.lend(index, layer, key, changes=not tentative)
            if not tentative:
                # Otherwise after the decision which tokens stay.
                layer.drop_unseen(at_once=False)
            return out
        assert isinstance(layer, SieveLayer)
        given = asked, key, value, self.hidden
        if tentative and not self.parts.only_append(index, layer):
            self.before[index] = layer.fork(share=True)
            self.given[index] = given
        out = self.parts.attend(index, layer, given)
        # Layers that share its entries find them by these keys; see shared_kv.py.
        self.lend(index, layer, key, changes=False)
        return out

    def finish(self) -> None:
        """Check the tokens' computed values, and count their reads."""
        for part in self.parts.sessions:
            look(part.checks)
        for reads in self.counts:
            self.reads.add(reads)

    def take_back(self, counts: Sequence[int]) -> None:
        """Keep the first tokens of each row, as if the others had never been fed; the pass is over.

        counts: number of tokens to keep, per row. Rows with fewer than others have padding in the remaining columns.
        """
        cache = self.cache
        size = self.tokens.size
        most = max(counts)
        turn = cache.turn
        for reads in self.counts[most:]:
            self.reads.add(reads, -1)
        self.reads.tokens -= size - most
        turn.decoded -= size
        turn.record.evicted = set(self.evicted)
        cache.conversation.take_back(self.step.start, counts, self.tokens.token_index.device)
        drops = [size - count for count in counts]
        for index, layer in enumerate(cache.all_layers):
            if index not in self.before and layer.memory is not None:
                layer.memory.drop_last(drops)
        if self.before:
            self._repeat(counts)
        turn.decoded += most
        cache.advance(most - size)

    def _repeat(self, counts: Sequence[int]) -> None:
        """Restore the layers that did more than add entries, and repeat their part of the tokens that rows keep."""
        most = max(counts)
        tokens = self.tokens.part(slice(0, most))
        if min(counts) < most:
            device = tokens.token_index.device
            valid = torch.arange(most, device=device) < torch.tensor(counts, device=device)[:, None]
            tokens = Tokens(tokens.token_index, valid, tuple(counts))
        parts = TokenParts(self, tokens, self._new_counts(most))
        for index, before in self.before.items():
            layer = self.cache.sieve_layers[index]
            layer.take_over(before)
            if most:
                parts.attend(index, layer, self.given[index])
        for part in parts.sessions:
            look(part.checks)


class PassTransaction(Transaction):
    """A pass over all tokens at once."""

    def __init__(self, session: AnswerSession, before: int | None = None) -> None:
        super().__init__(session.cache, session.tokens.size, before)
        self._session = session

    def _check(self, counts: tuple[int, ...]) -> None:
        """Do nothing: rows are replayed alone."""

    def _take_back(self, counts: tuple[int, ...]) -> None:
        self._session.take_back(counts)
