"""A decoding pass whose shapes and addresses stay the same: the decoder's own forward over stores of fixed capacity.

What grows from token to token (where an entry goes, how many there are) is read from numbers on the device, which the
pass itself moves on. So it can be recorded once and run again for every token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsieve import kernels
from kvsieve.attention import ragged_attention
from kvsieve.attention.blocked import single_query_attention
from kvsieve.attention.choice import faster_for_token
from kvsieve.cache import LayerStore
from kvsieve.cache.row_groups import Group
from kvsieve.core.kv_rows import DeviceLength, IncrementalMetadata
from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.layer import SieveLayer, StoreLayer
from kvsieve.hf.cache.records import Reads
from kvsieve.hf.compat import Cache
from kvsieve.hf.forward import passes as forward
from kvsieve.hf.forward.request import Asked
from kvsieve.hf.forward.session import Session
from kvsieve.hf.forward.sparse_read import Reading, count_all, reading_of


class DeviceCounters:
    """DeviceCounters on the device that grow by a fixed amount with every pass, side by side; equal ones are one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[tuple[int, int, int], int] = {}
        self.starts: list[int] = []
        self.steps: list[int] = []

    def run(self, start: int, count: int, step: int) -> slice:
        """Where start, start + 1 ... lie, `count` of them that grow by `step`."""
        at = self._known.setdefault((start, count, step), len(self.starts))
        if at == len(self.starts):
            self.starts += range(start, start + count)
            self.steps += [step] * count
        return slice(at, at + count)


class RecordedLayer(SieveLayer):
    """One layer, as a recorded pass knows it. reading: as in `read_token`; None where everything is read.

    slots, lengths: where in the pass's numbers the new entry's slots lie, and the lengths of what is read: of each
    group of KV rows, or of the store. All tensors are those the store had when the pass was made.
    """

    def __init__(self, layer: SieveLayer, reading: Reading | None, counters: DeviceCounters) -> None:
        super().__init__()
        self.store, self.view, self.reading = layer.store, layer.view, reading
        self.tensors = layer.store.tensors
        # Asked here because torch.compile cannot.
        self.threads = torch.get_num_threads()
        keys = self.tensors[0]
        self.thin = keys is not None and faster_for_token(keys, keys.shape[-2])
        self.remembered = self._remembered()
        self.places = self.count(layer, counters)
        self.slots, *self.lengths = self.places

    def count(self, layer: SieveLayer, counters: DeviceCounters) -> tuple[slice, ...]:
        """Where numbers for what `layer` stores now are put: its slots' and its lengths'."""
        store, stride = layer.store, layer.store.stride
        slots = counters.run(store.size, stride, stride)
        if self.reading is not None:
            grouped = self.reading.grouped
            sizes = [grouped.entries(store, group) for group in grouped.groups]
        else:
            sizes = [] if store.is_ragged else [store.size]
        return slots, *(counters.run(size + 1, 1, 1) for size in sizes)

    def fits(self, layer: SieveLayer, reading: Reading | None) -> bool:
        """Tell that the layer still has the same buffers, with room for an entry, and is read in the same way."""
        store = layer.store
        if any(ours is not its for ours, its in zip(self.tensors, store.tensors, strict=True)):
            return False
        if layer.view is not self.view or store.size + store.stride > store.capacity:
            return False
        if reading is None or self.reading is None:
            return reading is self.reading
        if reading.grouped is not self.reading.grouped or reading.whole != self.reading.whole or not self.knows(store):
            return False
        return all(ours is its for ours, its in zip(self.remembered, self._remembered(), strict=True))

    def knows(self, store: LayerStore) -> bool:
        """Tell that a reader knows all entries of the KV rows that it chooses from, and what choosing costs."""
        if self.reading is None:
            return True
        grouped = self.reading.grouped
        return all(
            group.cost is not None and all(each.size == grouped.entries(store, group) for each in group.state.values())
            for group in self._chosen_from()
        )

    def make_room(self) -> None:
        """Have room, in what a reader remembers, for as many entries as the store has."""
        if self.reading is not None:
            grouped = self.reading.grouped
            for group in grouped.groups:
                group.flat(self.store.capacity)
            for group in self._chosen_from():
                for each in group.state.values():
                    each.make_room(grouped.most(self.store, group))
        self.remembered = self._remembered()

    def metadata(self) -> list[IncrementalMetadata]:
        """Return what a reader remembers of the KV rows that it chooses from."""
        return [each for group in self._chosen_from() for each in group.state.values()]

    def _chosen_from(self) -> list[Group]:
        if self.reading is None:
            return []
        pairs = zip(self.reading.grouped.groups, self.reading.whole, strict=True)
        return [group for group, whole in pairs if not whole]

    def _remembered(self) -> list[Tensor]:
        return [part for each in self.metadata() for part in each.tensors()]

    def attend(self, asked: Asked, key: Tensor, value: Tensor, made: RecordedPass) -> Tensor:
        store = self.store
        store.put(key, value, made.values[self.slots])
        lengths = [made.length(at) for at in self.lengths]
        if self.reading is not None:
            return self.reading.attend(store, asked, lengths)[0]
        keys, values, _, valid = self.tensors[:4]
        assert keys is not None and values is not None
        if store.is_ragged:
            assert valid is not None
            return ragged_attention(
                asked.query, keys, values, valid, scale=asked.scale, threads=self.threads, terms=asked.terms
            )
        return self._dense(asked, keys, values, lengths[0], valid)

    def _dense(self, asked: Asked, keys: Tensor, values: Tensor, length: DeviceLength, valid: Tensor | None) -> Tensor:
        """Attention of one token over the first `length` of all slots; see dense_attention."""
        query, scale, terms = asked.query, asked.scale, asked.terms
        if kernels.usable(query, keys, values):
            return kernels.decode_attention(
                query, keys, values, scale=scale, length=length.count, valid=valid, terms=terms
            )
        batch, query_heads, _, dim = query.shape
        heads, size = keys.shape[1:3]
        mask = length.real(size)[None, None, None]
        if valid is not None:
            mask = mask & valid[:, :, None]
        packed = query.reshape(batch, heads, query_heads // heads, dim)
        if self.thin or terms is not None:
            out = single_query_attention(packed, keys, values, mask, scale=scale, terms=terms)
        else:
            out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(batch, query_heads, 1, values.shape[-1])

    def advance_host_lengths(self, layer: SieveLayer, reads: Reads) -> None:
        """Count what a pass has done to `layer` and what it has read."""
        layer.store.advance_host_length()
        if self.reading is None:
            count_all(layer.store, reads)
            return
        self.reading.count(layer.store, reads)
        for each in self.metadata():
            each.size += 1


class RecordedCache(Cache):
    """The cache that the decoder sees during such a pass. Lengths that it asks for would be recorded: refused."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise UnsupportedModelError("the decoder asks the cache how many tokens there were, beside its position_ids")

    updated = 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        # Asked for masks, of which causal layers need none.
        return query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.updated = layer_idx
        return super().update(key_states, value_states, layer_idx)


class RecordedPass(Session):
    """One decoding pass on `cache`, to be run again and again. forward: the decoder's; inputs: its tensors, static."""

    def __init__(
        self,
        session: Session,
        forward: Callable[..., Any],
        inputs: dict[str, Tensor],
        options: dict[str, Any],
        *,
        compiled: bool,
    ) -> None:
        super().__init__(
            session.plan, None, session.cache, session.step, session.tokens, session.model, session.request
        )
        self.forward, self.inputs, self.compiled = forward, inputs, compiled
        for layer in session.cache.sieve_layers.values():
            layer.store.prepare_slots(session.cache.num_seen)
        counters = DeviceCounters(session.tokens.token_index.device)
        self.layers = [
            RecordedLayer(layer, self.reading(session.cache, index), counters)
            for index, layer in session.cache.sieve_layers.items()
        ]
        self._counters = counters
        self.values, self._steps = (
            torch.tensor(part, device=counters.device) for part in (counters.starts, counters.steps)
        )
        self._lengths: dict[int, DeviceLength] = {}
        self.cache = RecordedCache(layers=list(self.layers))  # type: ignore[assignment]
        self.options = options
        self._given = {**options, "attention_mask": None, "past_key_values": self.cache}
        self.start_over(session.cache)

    def reading(self, cache: SieveCache, index: int) -> Reading | None:
        return reading_of(self.plan.read, cache, cache.sieve_layers[index], index, self.model.num_layers, coming=1)

    def attend(self, index: int, layer: StoreLayer, asked: Asked, key: Tensor, value: Tensor) -> Tensor:
        assert isinstance(layer, RecordedLayer)
        return layer.attend(asked, key, value, self)

    def length(self, at: slice) -> DeviceLength:
        """The length at `at` among the numbers; one for all layers of a pass that share it."""
        if at.start not in self._lengths:
            self._lengths[at.start] = DeviceLength(self.values[at.start])
        return self._lengths[at.start]

    def prepare(self, cache: SieveCache) -> str | None:
        """Make room in what readers remember; or say why the pass cannot be run yet.

        A layer's KV rows are first read eagerly: that builds what is remembered of them, and tells what reading costs.
        """
        if not all(ours.knows(ours.store) for ours in self.layers):
            return "a first pass of the reader is run eagerly"
        for ours in self.layers:
            ours.make_room()
        return None

    def accumulators(self) -> list[Tensor]:
        """Return what running the pass once more than its token needs would change."""
        return [part for ours in self.layers for each in ours.metadata() for part in each.accumulators()]

    def fits(self, cache: SieveCache) -> bool:
        """Tell that the pass can be run on what `cache` stores now; brings the numbers in line where they are not."""
        pairs = list(zip(self.layers, cache.sieve_layers.items(), strict=True))
        if not all(ours.fits(layer, self.reading(cache, index)) for ours, (index, layer) in pairs):
            return False
        where = self.passes + self._seen, *(size + self.passes * step for size, step in self._sizes)
        if where == (cache.num_seen, *(layer.store.size for _, (_, layer) in pairs)):
            return True
        counters = DeviceCounters(self._counters.device)
        laid_out = [(ours.places, ours.count(layer, counters)) for ours, (_, layer) in pairs]
        if counters.steps != self._counters.steps or any(before != now for before, now in laid_out):
            return False
        self._counters = counters
        self.start_over(cache)
        return True

    def start_over(self, cache: SieveCache) -> None:
        """Make the numbers what they must be for the next token, whatever has been run before."""
        self.passes, self._seen = 0, cache.num_seen
        self.values.copy_(torch.tensor(self._counters.starts))
        layers = list(cache.sieve_layers.values())
        self._sizes = [(layer.store.size, layer.store.stride) for layer in layers]
        for ours, layer in zip(self.layers, layers, strict=True):
            ours.store = layer.store
            layer.store.prepare_slots(self._seen)

    def advance_host_lengths(self, cache: SieveCache) -> None:
        """Do the host's part of a pass that has been run."""
        self.passes += 1
        for ours, layer in zip(self.layers, cache.sieve_layers.values(), strict=True):
            ours.advance_host_lengths(layer, cache.turn.record.reads)

    def run(self) -> Tensor:
        """Hidden states [B, 1, C] of the tokens in `inputs`, whose entries are stored; the numbers have moved on."""
        self._lengths = {}
        out = self.forward(**self.inputs, **self._given)
        self.values.add_(self._steps)
        self._lengths = {}
        return out.last_hidden_state

    def activate(self) -> contextlib.AbstractContextManager[None]:
        """Make this what the decoder's attention finds as the pass in progress."""
        return forward.activate(self, compiled=self.compiled)
