"""The cache transformers sees: logical lengths outward, physically small stores inward."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvsieve.cache import DenseStore, RaggedStore, View
from kvsieve.cache.base import storage_bytes, tensors_in
from kvsieve.display import mebibytes
from kvsieve.errors import CacheStateError, UnsupportedOptionError
from kvsieve.hf.compat import Cache, CacheLayerMixin, DynamicSlidingWindowLayer, plain_cache_layers

if TYPE_CHECKING:
    from kvsieve.hf.prompt.read import Restart
    from kvsieve.plans import Plan
    from kvsieve.protection import ProtectedTokens
    from kvsieve.types import Selection


class SieveLayer(CacheLayerMixin):
    """One full-attention layer's entries.

    `update` only stages new keys and values and returns them untouched; the attention function takes them, stores
    them and attends. What `update` was given must be what attention receives, or the model is refused.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self) -> None:
        self.store: DenseStore | RaggedStore = DenseStore()
        self.state: dict[str, Any] = {}
        # What this turn's answer reads, where that is less than what is stored.
        self.view: View | None = None
        self.num_seen = 0
        self._staged: tuple[Tensor, Tensor] | None = None

    @property
    def is_initialized(self) -> bool:
        return not self.store.is_empty

    @property
    def keys(self) -> Tensor | None:
        """[B, H, stored, D], a view; None before the first pass."""
        return None if self.store.is_empty else self.store.keys

    @property
    def values(self) -> Tensor | None:
        """[B, H, stored, D], a view; None before the first pass."""
        return None if self.store.is_empty else self.store.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store allocates on first use."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._staged is not None:
            raise CacheStateError(
                "keys and values were staged but never reached kvsieve's attention function: use this cache only "
                "inside `with kvsieve.attach(model, plan)`, on that model"
            )
        self._staged = key_states, value_states
        return key_states, value_states

    def take(self, key: Tensor, value: Tensor, who: str) -> tuple[Tensor, Tensor]:
        """Hand over what `update` staged; `key` and `value` are what the attention function of `who` was given."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise CacheStateError(f"{who} attends without having stored keys and values through the cache")
        if staged[0] is not key or staged[1] is not value:
            raise CacheStateError(
                f"{who} transforms keys or values between the cache and its attention (latent attention does); "
                "kvsieve cannot store what it attends to: this architecture is not supported"
            )
        return staged

    def look_through(self, selection: Selection) -> None:
        """Let the turn's answer read what is selected, and what is stored from now on; nothing is dropped."""
        if self.store.is_ragged:
            raise CacheStateError("views of entries that heads keep in different numbers are not supported")
        real = selection.real()
        real = real[:, None] if real is not None and real.ndim == 2 else real
        self.view = View(selection.indices, real, self.store.size)

    def all_tensors(self) -> Iterator[Tensor]:
        """Every tensor held: the store's, what methods remember of the layer, and what is staged."""
        yield from self.store.all_tensors()
        yield from tensors_in((self.state, self._staged))
        if self.view is not None:
            yield from tensors_in((self.view.slots, self.view.real))

    def get_seq_length(self) -> int:
        """Logical: tokens seen, whatever was evicted."""
        return self.num_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Physical: entries stored, the new ones included."""
        return (0 if self.store.is_empty else self.store.size) + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def fork(self, share: bool = False) -> SieveLayer:
        """A copy; see SieveCache.fork."""
        other = copy.copy(self)
        other.store = self.store.share() if share else self.store.clone()
        other.state = copy.deepcopy(self.state)
        return other

    def offload(self) -> None:
        raise UnsupportedOptionError("offloading is not supported by a SieveCache: leave cache_implementation unset")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if not self.store.is_empty:
            self.store.reorder(beam_idx)
        for name, part in self.state.items():
            if isinstance(part, Tensor):
                self.state[name] = part.index_select(0, beam_idx.to(part.device))
        if self.view is not None:
            self.view = self.view.rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if not self.store.is_empty:
            self.reorder_cache(torch.arange(self.store.keys.shape[0]).repeat_interleave(repeats))


@dataclass
class Reads:
    """What tokens after a prompt have read, in all layers, heads and rows together.

    tokens: how many, per row. entries, entry_bytes: entries attended to, exactly. looked_bytes: bytes read to choose.
    upkeep_bytes: bytes read to make and renew what is looked at. sparse: reads that took less than everything.
    whole_bytes: what reading all entries would have come to.
    """

    tokens: int = 0
    entries: int = 0
    entry_bytes: int = 0
    looked_bytes: int = 0
    sparse: int = 0
    upkeep_bytes: int = 0
    whole_bytes: int = 0

    @property
    def all_bytes(self) -> int:
        """All that was read."""
        return self.entry_bytes + self.looked_bytes + self.upkeep_bytes

    def read(self, entries: int, entry: int, among: int | None = None) -> None:
        """Count `entries` of `entry` bytes each, chosen among so many; None where they are all there are."""
        self.entries += entries
        self.entry_bytes += entries * entry
        self.whole_bytes += (entries if among is None else among) * entry

    def looked(self, count: int, upkeep: int) -> None:
        """Count the bytes that a reader has looked at to choose, and those that it has read to remember."""
        self.sparse += 1
        self.looked_bytes += count
        self.upkeep_bytes += upkeep


@dataclass
class Passes:
    """How the passes after a prompt were run: `fixed` ones with fixed shapes, the others eagerly, as transformers does.

    reason: why the last eager one was. captures: how often a pass was recorded or compiled, capture_s: seconds of it.
    """

    fixed: int = 0
    eager: int = 0
    reason: str | None = None
    captures: int = 0
    capture_s: float = 0.0


@dataclass
class TurnRecord:
    """What really happened to the prompt of the current turn.

    kept: entries stored per layer once the prompt was complete. asked: the budget's entries, None without an evictor;
    raised_to: the evictor's minimum where that is more. evicted: layers that dropped entries.
    propagated: tokens that reached the deepest layer, None if all did. report: what the propagator told of its choice.
    reduced: False when the plan was told not to act on the prompt. question: its last tokens, which were read after the
    plan had acted, and kept whole; `asked`, `raised_to`, `evicted` and `propagated` are about those before them.
    reads: what its answer's tokens have read. passes: how they were run.
    """

    prompt_tokens: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    asked: int | None = None
    raised_to: int | None = None
    evicted: set[int] = field(default_factory=set)
    propagated: int | None = None
    report: dict[str, Any] = field(default_factory=dict)
    reduced: bool = True
    question: int = 0
    reads: Reads = field(default_factory=Reads)
    passes: Passes = field(default_factory=Passes)


@dataclass(frozen=True, eq=False, repr=False)
class Snapshot:
    """A conversation at one moment; see SieveCache.snapshot. Shares the buffers that the cache had then.

    fields: what the cache knew. layers: per layer, a SieveLayer or transformers' own.
    """

    cache: weakref.ref[SieveCache]
    fields: dict[str, Any]
    layers: list[Any]


@dataclass(frozen=True, eq=False)
class Owner:
    """Whom a cache belongs to: a model, told by its decoder, and the plan that reads it.

    adopted: another plan has read a part of it; see ``Sieve.adopt``.
    """

    decoder: weakref.ref[nn.Module]
    plan: Plan
    adopted: bool = False

    def why_not(self, decoder: nn.Module, plan: Plan) -> str | None:
        """One clause saying why a cache is not for this model and plan; None if it is."""
        if self.decoder() is not decoder:
            return "was made for another model, whose keys and values mean nothing here: use one cache per model"
        if self.plan is plan or self.plan == plan:
            return None
        other = f"{self.plan.name!r}" if self.plan.name != plan.name else f"{plan.name!r} with other parameters"
        return (
            f"was made under {other}, and this is {plan.name!r}: attach the plan it was made under, start with a new "
            "cache, or sieve.adopt(cache) to go on under this plan with what the other one has left"
        )


class SieveCache(Cache):
    """A conversation's entries under one plan, on one model: its `owner`. Made by ``Sieve.new_cache()``.

    Length questions are answered logically (tokens seen), so kept tokens keep their absolute positions and a later
    turn continues at the right place. Sliding-window layers are left to transformers.
    """

    def __init__(self, config: Any, owner: Owner) -> None:
        layers = [
            layer if isinstance(layer, DynamicSlidingWindowLayer) else SieveLayer()
            for layer in plain_cache_layers(config)
        ]
        super().__init__(layers=layers)
        self.owner = owner
        # A pass over this cache runs under a plan.
        self.passing = False
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self._start_afresh()

    def _start_afresh(self) -> None:
        self.num_seen = 0
        self.batch = 0
        # Attention mask of all columns fed so far, bool [B, num_seen]; None while nothing was padding.
        self.mask: Tensor | None = None
        self.turn = -1
        self.turn_start = 0
        self.awaits_prompt = False
        self.more_chunks = False
        self.prompt_end = 0
        self.new_tokens = 0
        self.in_flight = False
        # Tokens generated since the prompt was complete, and the prompt's true tokens per row.
        self.decoded = 0
        self.prompt_lengths: tuple[int, ...] = ()
        # Rows have been put in another order since the turn's prompt began, as beams are.
        self.reordered = False
        self.record = TurnRecord()
        # What the prompt was before it was read again, under a plan that restarts.
        self.restart: Restart | None = None
        # Passes of several tokens are an answer that is given rather than generated, no prompt.
        self.given_answer = False
        # A driver reads this turn's prompt for a plan that rehearses; and the plan of passes of its own.
        self.rehearsed = False
        self.own_plan: Plan | None = None
        # What the caller wants kept, whatever the plan drops; and whether the plan acts on this turn's prompt.
        self.held: ProtectedTokens | None = None
        self.reduces = True
        # (hidden, cos, sin, position_ids) of the chunks that wait for deferred propagation.
        self.waiting: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.begin_turn()

    def begin_turn(self, prompt_end: int = 0, new_tokens: int = 0, reduce: bool = True) -> None:
        """The next pass starts a prompt. prompt_end: columns once it is complete; new_tokens: expected after it.

        reduce: False for a prompt that the plan leaves whole.
        """
        self.turn += 1
        self.turn_start = self.num_seen
        self.awaits_prompt = True
        self.rehearsed = False
        self.prompt_end, self.new_tokens = prompt_end, new_tokens
        self.decoded = 0
        self.reordered = False
        self.record = TurnRecord(reduced=reduce)
        self.reduces = reduce
        self.given_answer = False
        self.waiting.clear()
        for layer in self.sieve_layers.values():
            layer.view = None

    def begin_question(self, tokens: int) -> None:
        """The next pass goes on with the turn's prompt, whose last `tokens` the plan leaves whole."""
        self.awaits_prompt = True
        self.reduces = False
        self.record.question = tokens

    def room(self, end: int, size: int) -> int:
        """Entries to leave room for when a buffer of `size` entries is allocated with `end` columns fed."""
        return max(self.prompt_end - end, 0) + min(self.new_tokens, max(64, size // 8))

    def advance(self, count: int) -> None:
        """Commit a finished pass of `count` columns."""
        self.num_seen += count
        for layer in self.sieve_layers.values():
            layer.num_seen = self.num_seen

    @property
    def sieve_layers(self) -> dict[int, SieveLayer]:
        """Layers whose entries kvsieve stores, by index."""
        return {index: layer for index, layer in enumerate(self.layers) if isinstance(layer, SieveLayer)}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_seen

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.passing:
            raise CacheStateError(
                "the model runs without the plan that this cache belongs to: use it only inside `with "
                "kvsieve.attach(model, plan)`, on that model"
            )
        return super().update(*args, **kwargs)

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedOptionError(
            "a SieveCache cannot be cropped: assisted and speculative decoding are not supported; call generate "
            "without assistant_model, prompt_lookup_num_tokens or assistant_early_exit"
        )

    def activate_past_recording(self) -> None:
        self.crop()

    def reset(self) -> None:
        super().reset()
        self._start_afresh()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.reordered = True
        super().reorder_cache(beam_idx)
        self._reorder_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._reorder_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._reorder_rows(torch.arange(self.batch).repeat_interleave(repeats))

    def _reorder_rows(self, rows: Tensor) -> None:
        self.batch = len(rows)
        if self.prompt_lengths:
            self.prompt_lengths = tuple(self.prompt_lengths[row] for row in rows.tolist())
        if self.mask is not None:
            self.mask = self.mask.index_select(0, rows.to(self.mask.device))
        if self.restart is not None:
            self.restart = self.restart.rows(rows)
        if self.held is not None:
            self.held = self.held.rows(rows)
        self.waiting = [
            tuple(part.index_select(0, rows.to(part.device)) if len(part) > 1 else part for part in chunk)  # type: ignore[misc]
            for chunk in self.waiting
        ]

    def fork(self, *, share: bool = False) -> SieveCache:
        """A copy that goes its own way: for several questions on one context, or several answers to one.

        share: keys and values are shared with this cache until one of the two writes to them; only right where every
        layer of the copy is evicted before anything is appended to either.

        Raises CacheStateError while a prompt is half-read.
        """
        if self.in_flight or self.waiting or self.more_chunks:
            raise CacheStateError("the cache is in the middle of a prompt and cannot be forked; finish it first")
        other = copy.copy(self)
        other.record = copy.deepcopy(self.record)
        other.waiting = []
        other._snapshots = weakref.WeakSet()
        other.layers = [
            layer.fork(share) if isinstance(layer, SieveLayer) else copy.deepcopy(layer) for layer in self.layers
        ]
        return other

    def snapshot(self) -> Snapshot:
        """What `rollback` brings back, any number of times. Costs next to nothing: entries are shared, not copied.

        The memory of what is evicted later is returned only once the snapshot is gone. Raises CacheStateError while a
        prompt is half-read.
        """
        half_read = self.awaits_prompt and self.num_seen > self.turn_start
        if self.in_flight or self.waiting or self.more_chunks or half_read:
            raise CacheStateError("the cache is in the middle of a prompt and cannot be kept so; finish it first")
        fields = {name: part for name, part in vars(self).items() if name not in ("layers", "waiting", "_snapshots")}
        fields["record"] = copy.deepcopy(self.record)
        taken = Snapshot(weakref.ref(self), fields, [_same(layer) for layer in self.layers])
        self._snapshots.add(taken)
        return taken

    def rollback(self, snapshot: Snapshot) -> None:
        """Make this cache what it was when `snapshot` was taken of it, also after a pass that failed.

        Raises CacheStateError for a snapshot of another cache; a fork is another.
        """
        if snapshot.cache() is not self:
            raise CacheStateError("the snapshot was taken of another cache; roll that one back, or fork it")
        # What follows is written behind the entries of the snapshot: where a later one has its own, into a copy.
        seen = snapshot.fields["num_seen"]
        later = any(other.fields["num_seen"] > seen for other in self._snapshots)
        vars(self).update(snapshot.fields)
        self.record = copy.deepcopy(self.record)
        self.waiting = []
        self.layers = [_same(layer, own=later) for layer in snapshot.layers]

    def told(self) -> tuple[int, Tensor | None]:
        """Columns of the conversation as its caller knows it, and their mask [B, columns], None without padding."""
        return (self.num_seen, self.mask) if self.restart is None else self.restart.told(self.num_seen)

    def entries(self) -> list[int]:
        """Entries stored per layer and KV head now, of the fullest row; the mean where heads differ."""
        return [
            layer.store.entries
            if isinstance(layer, SieveLayer)
            else (layer.keys.shape[-2] if layer.is_initialized else 0)
            for layer in self.layers
        ]

    def nbytes(self) -> int:
        """Bytes of all tensors held: keys, values, indices and masks, room for further entries included, and what
        methods and readers remember: scores, queries, views, page tables."""
        return storage_bytes(self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        yield from tensors_in((self.mask, self.waiting))
        for facts in (self.restart, self.held):
            yield from () if facts is None else facts.tensors()
        for layer in self.layers:
            if isinstance(layer, SieveLayer):
                yield from layer.all_tensors()
            elif layer.is_initialized:
                yield from (layer.keys, layer.values)

    def __repr__(self) -> str:
        seen = f"{self.num_seen} tokens seen" + (f" in {self.batch} rows" if self.batch > 1 else "")
        entries = self.entries()
        least, most = min(entries, default=0), max(entries, default=0)
        held = str(most) if least == most else f"{least} to {most}"
        return f"<SieveCache {seen}, {held} entries in each of {len(entries)} layers, {mebibytes(self.nbytes())}>"

    def memory_report(self) -> dict[str, Any]:
        """Tokens seen, entries stored per layer and KV head, and the bytes of all tensors held."""
        return {"tokens_seen": self.num_seen, "entries": self.entries(), "bytes": self.nbytes()}


def _same(layer: Any, own: bool = False) -> Any:
    """A copy of a layer on the same entries; transformers' own replace theirs and never write to them."""
    if not isinstance(layer, SieveLayer):
        return copy.copy(layer)
    other = layer.fork(share=not own)
    other._staged = None
    return other
