"""The parts in which layers take several tokens of an answer, so that these act as if each had a pass of its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsieve.hf.cache.counts import Reads
from kvsieve.hf.cache.layer import SieveLayer
from kvsieve.hf.forward.evict import drops_nothing
from kvsieve.hf.forward.session import Session
from kvsieve.hf.forward.sparse_read import attend_read, reading_of
from kvsieve.hf.forward.travel import Tokens
from kvsieve.types import AttentionQueries

# Inputs of a layer: queries, keys, values, and its hidden states if an evictor needs them.
Given = tuple[AttentionQueries, Tensor, Tensor, Tensor | None]


@dataclass
class PartSession(Session):
    """Session of consecutive tokens of a pass, which a layer stores and attends with in one call.

    Attributes:
        counts: reads of each token.
    """

    counts: Sequence[Reads] = ()

    @property
    def columns(self) -> slice:
        """Columns of the tokens in the pass."""
        return slice(self.ahead, self.ahead + self.tokens.size)

    def read(self, index: int, layer: SieveLayer, asked: AttentionQueries) -> Tensor:
        """Attend with the tokens, which are stored, to the entries up to their own."""
        # A layer that reads another layer's entries chooses for itself.
        sharing = self.sharing(index) if index in self.cache.sieve_layers else None
        reading = reading_of(self.plan.read, self.cache, layer, index, self.model.num_layers)
        documents = self.cache.conversation.parallel
        return attend_read(reading, layer.store, index, asked, self.counts[0], self.counts, sharing, documents)

    def _read(
        self, index: int, layer: SieveLayer, asked: AttentionQueries, key: Tensor, value: Tensor, room: int
    ) -> Tensor:
        tokens = self.tokens
        layer.store.append(key, value, tokens.token_index, tokens.valid, tokens.counts, room)
        return asked.output(self.read(index, layer, asked.stored))


class TokenParts:
    """Tokens of a pass over an answer, which every layer takes in parts.

    A part ends after a token behind which the plan evicts from the layer or encodes its entries. Its tokens are stored
    and attend in one call.

    Args:
        whole: the pass.
        tokens: its tokens, or the first of them, without those that some rows do not keep.
        counts: reads of each of the tokens.

    Attributes:
        taken: sessions of each layer's parts.
    """

    def __init__(self, whole: Session, tokens: Tokens, counts: Sequence[Reads]) -> None:
        self.taken: dict[int, list[PartSession]] = {}
        self._whole = whole
        self._tokens = tokens
        self._counts = counts
        self._sessions: dict[tuple[int, int], PartSession] = {}
        self._mask = whole.cache.conversation.mask
        # Real tokens of each row up to each column.
        columns = torch.arange(1, tokens.size + 1).expand(len(tokens.counts), -1)
        self._real: list[list[int]] = (columns if tokens.valid is None else tokens.valid.cumsum(1)).tolist()

    @property
    def sessions(self) -> list[PartSession]:
        """Sessions of all parts, of any layer."""
        return list(self._sessions.values())

    def attend(self, index: int, layer: SieveLayer, given: Given) -> Tensor:
        """Process a layer's tokens part by part; return their outputs."""
        asked, key, value, hidden = given
        parts = self.taken[index] = []
        outs: list[Tensor] = []
        first = 0
        while first < self._tokens.size:
            part = self._session(first, self._end(index, layer, first))
            at = part.columns
            part.hidden = None if hidden is None else hidden[:, at]
            outs.append(part.attend(index, layer, asked.part(at), key[:, :, at], value[:, :, at]))
            parts.append(part)
            first = at.stop
            lent = part.lent.get(index)
            if lent is not None and lent[0] is layer and first < self._tokens.size:
                # Layers that share its entries must not see those of later tokens.
                part.lent[index] = layer.fork(share=True), lent[1]
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    def only_append(self, index: int, layer: SieveLayer) -> bool:
        """Return True if the tokens only add their entries to a layer."""
        if self._whole.plan.scores_entries:
            return False
        evictor = self._whole.plan.evict
        when = self._whole.when
        if evictor is not None and when.steps is not None and (when.observes or evictor.window > 1):
            return False
        return self._acts_after(index, layer, 0) is None

    def _end(self, index: int, layer: SieveLayer, first: int) -> int:
        """Return the end of the part that begins with token `first`."""
        size = self._tokens.size
        padded = self._tokens.valid is not None and self._whole.when.steps is not None
        alone = padded or self._whole.plan.scores_entries or not self._read_alike(index, layer, size - first)
        last = first if alone else self._acts_after(index, layer, first)
        return size if last is None else last + 1

    def _read_alike(self, index: int, layer: SieveLayer, tokens: int) -> bool:
        """Return True if all of the next tokens attend densely, or by reading the same KV rows as a whole."""
        if self._whole.plan.read is None and layer.view is None:
            return True
        if self._tokens.valid is not None:
            # KV rows of rows with padding do not grow.
            return False
        where = self._whole.plan.read, self._whole.cache, layer, index, self._whole.model.num_layers
        return reading_of(*where, coming=1) is reading_of(*where, coming=tokens)

    def _acts_after(self, index: int, layer: SieveLayer, first: int) -> int | None:
        """Return the first token, from `first` on, after which a layer's entries are dropped or encoded; None if none.

        The layer has the entries before that token.
        """
        if self._whole.request.on_layer is not None:
            return first
        codec = self._whole.plan.codec
        if codec is not None and not layer.may_encode(codec, self._tokens.size - first):
            codec = None
        if codec is None and self._whole.when.steps is None:
            return None
        for at in range(first, self._tokens.size):
            stored = at + 1 - first
            if codec is not None and layer.may_encode(codec, stored):
                return at
            if self._due[at] and not self._drops_nothing(index, layer, stored):
                return at
        return None

    def _drops_nothing(self, index: int, layer: SieveLayer, new: int) -> bool:
        """Return True if the evictor reports that it would drop nothing of a layer with `new` further tokens."""
        whole = self._whole
        lengths = tuple(length + new for length in layer.store.lengths)
        return drops_nothing(whole.plan, whole.step, (index, whole.model.num_layers), layer, lengths)

    @functools.cached_property
    def _due(self) -> list[bool]:
        """True for tokens after which an evictor that acts while decoding acts in some row."""
        whole = self._whole
        ends = range(1, self._tokens.size + 1)
        decoded = whole.cache.turn.decoded
        padded = self._mask is not None
        return [any(whole.due_after(decoded + end, self._lengths(end)[0], padded)) for end in ends]

    def _lengths(self, end: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens seen by each row before column `end`: of the conversation, and of the turn."""
        left = [new - row[end - 1] for row, new in zip(self._real, self._whole.tokens.counts, strict=True)]
        lengths, turn_lengths = (
            tuple(length - count for length, count in zip(part, left, strict=True))
            for part in (self._whole.step.lengths, self._whole.step.turn_lengths)
        )
        return lengths, turn_lengths

    def _session(self, first: int, last: int) -> PartSession:
        """Return the session of tokens [first, last)."""
        known = self._sessions.get((first, last))
        if known is not None:
            return known
        whole = self._whole
        mask = self._mask
        if mask is not None and whole.order is None:
            mask = mask[:, : whole.step.start + last]
        lengths, turn_lengths = self._lengths(last)
        step = dataclasses.replace(
            whole.step,
            start=whole.step.start + first,
            num_new=last - first,
            lengths=lengths,
            turn_lengths=turn_lengths,
            mask=mask,
        )
        tokens = self._tokens.part(slice(first, last))
        facts = whole.plan, None, whole.cache, step, tokens, whole.model, whole.request
        session = PartSession(
            *facts, ids=whole.ids, ahead=first, counts=self._counts[first:last], choices=whole.choices
        )
        self._sessions[first, last] = session
        return session
