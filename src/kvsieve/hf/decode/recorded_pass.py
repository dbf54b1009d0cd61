"""A decode pass with constant shapes and addresses: the decoder's own forward over stores of fixed capacity.

Numbers that grow from token to token (slots of entries, lengths) are on the device, and advanced by the pass itself. So
it can be recorded once and replayed for every token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvsieve.attention import Reading, SharedChoices
from kvsieve.core.kv_rows import DeviceLength
from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.counts import Reads
from kvsieve.hf.cache.layer import StoreLayer
from kvsieve.hf.compat import CACHE, Cache
from kvsieve.hf.decode.recorded_layer import DeviceCounters, RecordedLayer
from kvsieve.hf.decode.recorders import Refused
from kvsieve.hf.forward import passes as forward
from kvsieve.hf.forward.session import Session
from kvsieve.hf.forward.sparse_read import reading_of
from kvsieve.hf.forward.transaction import AnswerSession
from kvsieve.types import AttentionQueries


class RecordedCache(Cache):
    """The decoder's cache during such a pass. It refuses to report lengths, which would be recorded."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise UnsupportedModelError("the decoder asks the cache how many tokens there were, beside its position_ids")

    updated = 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        # Used for masks; causal layers need none.
        return query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.updated = layer_idx
        return super().update(key_states, value_states, layer_idx)


class RecordedPass(Session):
    """One decode pass on `cache`, to be replayed. forward: the decoder's; inputs: its tensors, static."""

    def __init__(
        self,
        session: Session,
        forward: Callable[..., Any],
        inputs: dict[str, Tensor],
        options: dict[str, Any],
    ) -> None:
        super().__init__(
            session.plan, None, session.cache, session.step, session.tokens, session.model, session.request
        )
        self.forward = forward
        self.inputs = inputs
        for layer in session.cache.sieve_layers.values():
            # May give the store other buffers.
            layer.store.prepare_slots(session.cache.num_seen)
        counters = DeviceCounters(session.tokens.token_index.device)
        self.layers = [
            RecordedLayer(layer, index, self.reading(session.cache, index), counters, session.tokens.size)
            for index, layer in session.cache.sieve_layers.items()
        ]
        self._counters = counters
        self.values, self._steps = (
            torch.tensor(part, device=counters.device) for part in (counters.starts, counters.steps)
        )
        self._lengths: dict[int, DeviceLength] = {}
        self.cache = RecordedCache(layers=list(self.layers))  # type: ignore[assignment]
        self.options = options
        self._given = {**options, "attention_mask": None, CACHE: self.cache}
        self.start_over(session.cache)

    def reading(self, cache: SieveCache, index: int) -> Reading | None:
        return reading_of(self.plan.read, cache, cache.sieve_layers[index], index, self.model.num_layers, coming=1)

    def attend(self, index: int, layer: StoreLayer, asked: AttentionQueries, key: Tensor, value: Tensor) -> Tensor:
        assert isinstance(layer, RecordedLayer)
        return layer.attend(asked, key, value, self)

    def length(self, at: slice) -> DeviceLength:
        """Return the length at `at` among the numbers; shared by all layers of a pass with equal ones."""
        if at.start not in self._lengths:
            self._lengths[at.start] = DeviceLength(self.values[at.start])
        return self._lengths[at.start]

    def prepare(self, cache: SieveCache) -> str | None:
        """Make room in readers' metadata; or return why the pass cannot be run yet.

        A layer's KV rows are first read eagerly: that builds their metadata, and measures the cost of reading.
        """
        readings = [recorded.reading for recorded in self.layers]
        settled = all(reading is None or reading.is_settled(readings) for reading in readings)
        if not settled or not all(recorded.knows(recorded.store) for recorded in self.layers):
            return "a first pass of the reader is run eagerly"
        for recorded in self.layers:
            recorded.make_room()
        return None

    def accumulators(self) -> list[Tensor]:
        """Return the tensors that an additional run of the pass would change."""
        return [
            part for recorded in self.layers for metadata in recorded.metadata() for part in metadata.accumulators()
        ]

    def fits(self, cache: SieveCache) -> bool:
        """Return True if the pass can be run on the cache's current entries; corrects the numbers if necessary."""
        pairs = list(zip(self.layers, cache.sieve_layers.items(), strict=True))
        if not all(recorded.fits(layer, self.reading(cache, index)) for recorded, (index, layer) in pairs):
            return False
        where = self.passes * self.tokens.size + self._seen, *(slot + self.passes * step for slot, step in self._slots)
        now = cache.num_seen, *(layer.store.next_slot for _, (_, layer) in pairs)
        if where == now and all(recorded.is_current(layer.store) for recorded, (_, layer) in pairs):
            return True
        counters = DeviceCounters(self._counters.device)
        laid_out = [(recorded.places, recorded.count(layer, counters)) for recorded, (_, layer) in pairs]
        if counters.steps != self._counters.steps or any(before != now for before, now in laid_out):
            return False
        self._counters = counters
        self.start_over(cache)
        return True

    def start_over(self, cache: SieveCache) -> None:
        """Reset the numbers for the next token."""
        self.passes = 0
        self._seen = cache.num_seen
        self.values.copy_(torch.tensor(self._counters.starts))
        layers = list(cache.sieve_layers.values())
        self._slots = [(layer.store.next_slot, layer.store.stride * self.tokens.size) for layer in layers]
        for recorded, layer in zip(self.layers, layers, strict=True):
            recorded.follow(layer.store, self._seen)

    def finish(self, cache: SieveCache, counts: Sequence[Reads]) -> None:
        """Do the host's part after a run: count, and encode entries that are no longer among the newest.

        counts: reads of each token.
        """
        self.passes += 1
        for recorded, layer in zip(self.layers, cache.sieve_layers.values(), strict=True):
            for reads in counts:
                recorded.advance_host_lengths(layer, reads)
            if self.plan.codec is not None:
                layer.encode(self.plan.codec, ends_prompt=False)

    def run(self) -> Tensor:
        """Return hidden states [B, L, C] of the tokens in `inputs`, whose entries get stored; the numbers advance."""
        self._lengths = {}
        self.choices = SharedChoices()
        out = self.forward(**self.inputs, **self._given)
        self.values.add_(self._steps)
        self._lengths = {}
        self.choices = SharedChoices()
        return out.last_hidden_state

    def activate(self) -> contextlib.AbstractContextManager[None]:
        """Make this the pass in progress for the decoder's attention."""
        return forward.activate(self)


def check_several(session: AnswerSession) -> None:
    """Raise Refused for a pass over several tokens, or one that may be undone, of which layers do more than append."""
    layers = session.cache.sieve_layers
    if session.order is not None:
        raise Refused("tokens of a pass stand apart in their rows")
    if session.plan.read is not None or any(layer.view is not None for layer in layers.values()):
        raise Refused("each of several tokens chooses what it reads")
    if any(layer.store.is_ragged for layer in layers.values()):
        raise Refused("several tokens, and heads that keep different numbers of entries")
    if not all(session.parts.only_append(index, layer) for index, layer in layers.items()):
        raise Refused("entries are dropped or encoded within a pass of several tokens")


def check_plan(session: Session) -> None:
    """Raise Refused for a plan with work on this token that cannot be recorded."""
    evictor = session.plan.evict
    reader = session.plan.read
    if session.cache.conversation.parallel is not None:
        raise Refused("documents in parallel are attended to in two parts")
    for layer in session.cache.sieve_layers.values():
        if layer.store.is_encoded and (reader is not None or layer.view is not None):
            raise Refused("encoded entries are decoded one by one as they are chosen")
    if evictor is not None and evictor.when.steps is not None:
        name = type(evictor).__name__
        if evictor.when.observes:
            raise Refused(f"{name} observes every token")
        if evictor.window > 1:
            raise Refused(f"{name} keeps the queries of the last tokens")
        if session.acts_in_between and not _is_noop(session):
            raise Refused(f"{name} acts on this token")
    if reader is not None and not reader.traits.static_shapes:
        raise Refused(f"{type(reader).__name__} does not choose with fixed shapes")


def _is_noop(session: Session) -> bool:
    """Return True if the plan's evictor acts on this token without dropping anything."""
    evictor = session.plan.evict
    return evictor is not None and all(
        evictor.is_noop(index, session.model.num_layers, tuple(n + 1 for n in layer.store.lengths), layer.state)
        for index, layer in session.cache.sieve_layers.items()
    )
