"""Passes over several tokens of an answer: each acts as if alone, and the last ones can be undone.

Recurrent states have no entries to drop, and an evictor that weighs layers against each other acts on the first layer
after the last one has attended: then the pass is split into one per token; see one_by_one.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsieve.attention import Reading
from kvsieve.core.checks import look
from kvsieve.hf.cache.counts import Reads
from kvsieve.hf.cache.layer import SieveLayer, StoreLayer, WindowLayer
from kvsieve.hf.forward.session import Session
from kvsieve.hf.forward.sparse_read import attend_read, reading_of
from kvsieve.hf.forward.tentative import Transaction
from kvsieve.hf.forward.travel import Tokens
from kvsieve.hf.forward.windows import attend_window
from kvsieve.types import AttentionQueries

# Inputs of a layer: queries, keys, values, and its hidden states if an evictor needs them.
Given = tuple[AttentionQueries, Tensor, Tensor, Tensor | None]


@dataclass
class AnswerSession(Session):
    """State of a pass over tokens of an answer: several, or those of a tentative pass.

    Layers that only add entries attend with all of them in one call. In the others every token is stored, attends, is
    observed, evicts and is encoded after the previous one.

    Attributes:
        steps: a session for each token.
        before: layers of a tentative pass that do more than add entries, as they were before it.
        given: inputs of these layers.
        evicted: layers that had dropped entries in this turn before the pass.
    """

    steps: list[Session] = field(init=False)
    before: dict[int, SieveLayer] = field(default_factory=dict)
    given: dict[int, Given] = field(default_factory=dict)
    evicted: set[int] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.evicted = set(self.cache.turn.record.evicted)
        tokens = self.tokens
        self.steps = [
            self.step_at(at, tokens.part(slice(at, at + 1)), tokens.part(slice(0, at + 1)).counts)
            for at in range(tokens.size)
        ]

    def step_at(self, at: int, token: Tokens, real: Sequence[int]) -> Session:
        """Return a session for a token of the pass; real: tokens of each row up to this one."""
        step = self.step
        mask = self.cache.conversation.mask
        since = [count - new for count, new in zip(real, self.tokens.counts, strict=True)]
        if mask is not None and self.order is None:
            mask = mask[:, : step.start + at + 1]
        alone = dataclasses.replace(
            step,
            start=step.start + at,
            num_new=1,
            lengths=tuple(length + count for length, count in zip(step.lengths, since, strict=True)),
            turn_lengths=tuple(length + count for length, count in zip(step.turn_lengths, since, strict=True)),
            mask=mask,
        )
        session = Session(self.plan, None, self.cache, alone, token, self.model, self.request, ahead=at)
        session.reads = Reads(executors=self.reads.executors)
        return session

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
        appends = self._appends(layer)
        if tentative and not appends:
            self.before[index] = layer.fork(share=True)
            self.given[index] = asked, key, value, self.hidden
        if appends and self._reads_alike(index, layer):
            out = self._attend_at_once(index, layer, asked, key, value)
        else:
            out = torch.cat(self._one_by_one(index, layer, (asked, key, value, self.hidden), self.steps), 2)
        # Layers that share its entries find them by these keys; see shared_kv.py.
        self.lend(index, layer, key, changes=False)
        return out

    def _appends(self, layer: SieveLayer) -> bool:
        """True if these tokens only add their entries to a layer."""
        if self.when.steps is not None or self.request.on_layer is not None:
            return False
        return self.plan.codec is None or not layer.may_encode(self.plan.codec, self.tokens.size)

    def _reads_alike(self, index: int, layer: SieveLayer) -> bool:
        """True if all tokens attend in the same way: densely, or reading the same KV rows whole."""
        if self.plan.read is None and layer.view is None:
            return True
        if self.tokens.valid is not None:
            # KV rows of rows with padding do not grow.
            return False
        first, last = (self._reading(index, layer, coming) for coming in (1, self.tokens.size))
        return first is last

    def _reading(self, index: int, layer: SieveLayer, coming: int = 0) -> Reading | None:
        return reading_of(self.plan.read, self.cache, layer, index, self.model.num_layers, coming)

    def _attend_at_once(
        self, index: int, layer: SieveLayer, asked: AttentionQueries, key: Tensor, value: Tensor
    ) -> Tensor:
        tokens = self.tokens
        store = layer.store
        room = self.cache.turn.room(self.end, tokens.size)
        if self.plan.codec is not None:
            room = min(room, self.plan.codec.block)
        store.append(key.detach(), value.detach(), tokens.token_index, tokens.valid, tokens.counts, room)
        return asked.output(self.read_all(index, layer, asked.stored))

    def read_all(self, index: int, layer: SieveLayer, asked: AttentionQueries) -> Tensor:
        """Let every token attend to the entries up to its own, in one call."""
        reads = [step.reads for step in self.steps]
        return attend_read(self._reading(index, layer), layer.store, index, asked, self.reads, reads)

    @staticmethod
    def _one_by_one(index: int, layer: SieveLayer, given: Given, steps: Sequence[Session]) -> list[Tensor]:
        """Process the first of a layer's tokens one after another; return their outputs."""
        asked, key, value, hidden = given
        outs = []
        for at, step in enumerate(steps):
            one = slice(at, at + 1)
            step.hidden = None if hidden is None else hidden[:, one]
            outs.append(step.attend(index, layer, asked.part(one), key[:, :, one], value[:, :, one]))
            lent = step.lent.get(index)
            if lent is not None and lent[0] is layer:
                # Layers that share its entries must not see those of later tokens.
                step.lent[index] = layer.fork(share=True), lent[1]
        return outs

    def finish(self) -> None:
        """Check the tokens' computed values, and count their reads."""
        for step in self.steps:
            look(step.checks)
            self.reads.add(step.reads)

    def take_back(self, counts: Sequence[int]) -> None:
        """Keep the first tokens of each row, as if the others had never been fed; the pass is over.

        counts: number of tokens to keep, per row. Rows with fewer than others have padding in the remaining columns.
        """
        cache = self.cache
        size = self.tokens.size
        most = max(counts)
        conversation = cache.conversation
        turn = cache.turn
        for step in self.steps[most:]:
            self.reads.add(step.reads, -1)
        self.reads.tokens -= size - most
        turn.decoded -= size
        turn.record.evicted = set(self.evicted)
        conversation.take_back(self.step.start, counts, self.tokens.token_index.device)
        drops = [size - count for count in counts]
        for index, layer in enumerate(cache.all_layers):
            if index not in self.before and layer.memory is not None:
                layer.memory.drop_last(drops)
        steps = [self._replayed(at, counts) for at in range(most)]
        for index, before in self.before.items():
            layer = cache.sieve_layers[index]
            layer.take_over(before)
            self._one_by_one(index, layer, self.given[index], steps)
        for step in steps:
            look(step.checks)
        turn.decoded += most
        cache.advance(most - size)

    def _replayed(self, at: int, counts: Sequence[int]) -> Session:
        """Return a session to store a token again, in the rows that keep it."""
        token = self.tokens.part(slice(at, at + 1))
        stays = [at < count for count in counts]
        if not all(stays):
            valid = torch.tensor(stays, device=token.token_index.device)[:, None]
            token = Tokens(token.token_index, valid, tuple(map(int, stays)))
        return self.step_at(at, token, [min(at + 1, count) for count in counts])


class PassTransaction(Transaction):
    """A pass over all tokens at once."""

    def __init__(self, session: AnswerSession, before: int | None = None) -> None:
        super().__init__(session.cache, session.tokens.size, before)
        self._session = session

    def _check(self, counts: tuple[int, ...]) -> None:
        """Do nothing: rows are replayed alone."""

    def _take_back(self, counts: tuple[int, ...]) -> None:
        self._session.take_back(counts)
