"""The cache for transformers: logical lengths outside, physically small stores inside."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from kvsieve.cache.tensors import storage_bytes
from kvsieve.errors import CacheStateError, UnsupportedOptionError
from kvsieve.hf.cache.copies import Forked
from kvsieve.hf.cache.crop import Undecided, take_back, why_not_candidates
from kvsieve.hf.cache.embedded import EmbeddedPrompt
from kvsieve.hf.cache.layer import SieveLayer
from kvsieve.hf.cache.layers import kind_of, new_layer
from kvsieve.hf.cache.owner import Owner
from kvsieve.hf.cache.records import Conversation, Turn
from kvsieve.hf.cache.snapshot import Snapshot
from kvsieve.hf.cache.states import CacheLayer
from kvsieve.hf.compat import Cache
from kvsieve.hf.kinds import describe_kinds, layer_kinds
from kvsieve.report.display import html_table, mebibytes, span


class SieveCache(Forked, Cache):
    """A batch of conversations under one plan, on one model. Made by ``Sieve.new_cache()``.

    Lengths are logical (tokens seen), so kept tokens keep their absolute positions and a later turn continues at the
    right place.

    Attributes:
        owner: the model and the plan.
        conversation: state of the conversations.
        updated: index of the layer that has staged keys and values last.
        producers: indices of the layers with entries shared by others.
        status: "ready"; "running" while a pass runs; "broken" after a pass or call that failed half-way.
        few_turns: turns that a plain call of the model has begun with few tokens.
        moment: a number that changes with every change of the cache.
        candidates: True if passes over several tokens after a prompt are candidates for its answer; see `crop`.
        undecided: the last pass, if `crop` can undo it; None for others.
        embedded: the prompt in progress, if it holds images; None for text.
    """

    _instead = "save it with sieve.save(cache, path), which sieve.load reads"

    def __init__(self, config: Any, owner: Owner) -> None:
        states = getattr(config, "number_of_conv_states", 1)
        Cache.__init__(self, layers=[new_layer(kind, states) for kind in layer_kinds(config)])
        self.owner = owner
        self.updated = 0
        self.producers = frozenset(layer.source for layer in self.all_layers if layer.source is not None)
        self.conversation = Conversation()
        self.status: Literal["ready", "running", "broken"] = "ready"
        self.few_turns = 0
        self.moment = 0
        self.candidates = False
        self.undecided: Undecided | None = None
        self.embedded: EmbeddedPrompt | None = None
        self.snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()

    @property
    def turn(self) -> Turn:
        """The turn in progress, or the last one."""
        return self.conversation.turn

    @property
    def num_seen(self) -> int:
        """Columns fed so far, padding included."""
        return self.conversation.num_seen

    @property
    def all_layers(self) -> list[CacheLayer]:
        """The layers."""
        return self.layers  # type: ignore[return-value]

    @property
    def sieve_layers(self) -> dict[int, SieveLayer]:
        """Layers with entries that the plan may drop, by index."""
        return {index: layer for index, layer in enumerate(self.layers) if isinstance(layer, SieveLayer)}

    @property
    def forgets(self) -> bool:
        """True if some layer cannot be read again: recurrent state, or a window that has moved on."""
        return any(layer.has_state or layer.window is not None for layer in self.all_layers)

    @property
    def has_state(self) -> bool:
        """True if some layer has recurrent state."""
        return any(layer.has_state for layer in self.all_layers)

    def touch(self) -> None:
        """Record a change of the cache: earlier passes can no longer be undone."""
        self.moment += 1
        self.undecided = None

    def begin_turn(self, prompt_end: int | None = None, new_tokens: int = 0, acts: bool = True) -> None:
        """Let the next pass start a prompt; see Turn."""
        self.touch()
        self.conversation.begin_turn(prompt_end, new_tokens, acts)
        for layer in self.sieve_layers.values():
            layer.view = None

    def advance(self, count: int) -> None:
        """Commit a finished pass of `count` columns."""
        self.conversation.num_seen += count
        for layer in self.sieve_layers.values():
            layer.num_seen = self.num_seen

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_seen

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._check_running()
        self.updated = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        self._check_running()
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        self._check_running()
        return super().update_recurrent_state(*args, **kwargs)

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        # Asked of all layers together, which under propagation have not read equally much, it is about earlier passes.
        return self.num_seen > 0 if layer_idx is None else super().has_previous_state(layer_idx, *args, **kwargs)

    def _check_running(self) -> None:
        if self.status != "running":
            raise CacheStateError(
                "the model runs without the plan that this cache belongs to: use it only inside `with "
                "kvsieve.attach(model, plan)`, on that model"
            )

    @property
    def is_croppable(self) -> bool:
        return why_not_candidates(self.owner.plan, self.all_layers, self.num_seen) is None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns fed: those of an answer, in all rows.

        Args:
            tokens_to_remove: a negative number or 0; or, if positive, the number of columns to leave.

        Raises:
            UnsupportedOptionError: the plan, or the model's recurrent layers, have acted on them.
            InputError: fewer columns were fed.
        """
        count = -tokens_to_remove if tokens_to_remove <= 0 else max(self.num_seen - tokens_to_remove, 0)
        if self.undecided is not None and count <= self.undecided.size:
            self.undecided.accept(self.undecided.size - count)
        elif count:
            self.check_ready()
            take_back(self.owner.plan, self.conversation, self.all_layers, count)
            self.touch()
            self.advance(-count)

    def activate_past_recording(self) -> None:
        """Treat passes over several tokens after a prompt as candidates of its answer, which `crop` removes."""
        reason = why_not_candidates(self.owner.plan, self.all_layers, self.num_seen)
        if reason is not None:
            raise UnsupportedOptionError(f"candidates cannot be taken back: {reason}")
        self.candidates = True

    def reset(self) -> None:
        self.touch()
        super().reset()
        self.conversation = Conversation()
        self.status = "ready"

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.touch()
        self.turn.reordered = True
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.conversation.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.touch()
        super().batch_select_indices(indices)
        self.conversation.reorder(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.touch()
        super().batch_repeat_interleave(repeats)
        self.conversation.reorder(torch.arange(self.conversation.batch).repeat_interleave(repeats))

    def fork(self, *, share: bool = False) -> SieveCache:
        """Return an independent copy: for several questions on one context, or several answers to one.

        Args:
            share: share keys and values until one of the two writes to them; only valid if every layer of the copy is
                evicted before anything is appended to either.

        Raises:
            CacheStateError: in the middle of a prompt.
        """
        if self.status != "ready" or self.turn.deferred:
            raise CacheStateError("the cache is in the middle of a prompt and cannot be forked; finish it first")
        self.touch()
        return self.with_layers([layer.fork(share) for layer in self.all_layers])

    def with_layers(self, layers: list[Any]) -> SieveCache:
        """Copy the conversation's record, with other layers."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.conversation = self.conversation.copy()
        other.snapshots = weakref.WeakSet()
        other.undecided = None
        other.embedded = None
        other.layers = layers
        return other

    def check_ready(self) -> None:
        """Raise CacheStateError if layers are inconsistent, or if a call was interrupted."""
        if self.status != "ready":
            raise CacheStateError(
                "a call with this cache failed half-way, so it holds what its caller does not know of: roll it back to "
                "a snapshot, or start again with a new one"
            )

    def check_copyable(self, purpose: str) -> None:
        """Raise CacheStateError in the middle of a prompt, which cannot be `purpose` ("saved")."""
        if self.status != "ready" or self.conversation.half_read:
            raise CacheStateError(f"the cache is in the middle of a prompt and cannot be {purpose}; finish it first")

    def snapshot(self) -> Snapshot:
        """Return a state for `rollback`, any number of times. Entries are shared, not copied: it is cheap.

        The memory of later evictions is freed only with the snapshot.

        Raises:
            CacheStateError: in the middle of a prompt.
        """
        self.check_copyable("kept so")
        self.touch()
        taken = Snapshot(
            weakref.ref(self),
            self.owner,
            self.conversation.copy(),
            [layer.fork(share=True) for layer in self.all_layers],
        )
        self.snapshots.add(taken)
        return taken

    def rollback(self, snapshot: Snapshot) -> None:
        """Restore this cache to the state of a snapshot, also after a failed pass.

        Raises:
            CacheStateError: the snapshot is of another cache; a fork is another.
        """
        if snapshot.cache() is not self:
            raise CacheStateError("the snapshot was taken of another cache; roll that one back, or fork it")
        # Later entries are written after those of the snapshot, or into a copy if another snapshot has entries there.
        self.touch()
        seen = snapshot.conversation.num_seen
        later = any(other.conversation.num_seen > seen for other in self.snapshots)
        self.owner, self.conversation, self.status = snapshot.owner, snapshot.conversation.copy(), "ready"
        self.layers = [layer.fork(share=not later) for layer in snapshot.layers]

    def become(self, other: SieveCache) -> None:
        """Take over the content of another cache of the same plan and model, which becomes unusable."""
        self.touch()
        self.owner = other.owner
        self.conversation = other.conversation
        self.status = other.status
        self.layers = other.layers

    def entries(self) -> list[int]:
        """Entries stored per layer and KV head, of the fullest row; the mean over heads, 0 without any."""
        return [0 if layer.memory is None else layer.memory.entries for layer in self.all_layers]

    def nbytes(self) -> int:
        """Bytes of all tensors in the cache.

        Includes keys, values, indices, masks, recurrent states, spare room, and the state of methods and readers
        (scores, queries, views, page tables).
        """
        return storage_bytes(self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.conversation.tensors()
        for layer in self.all_layers:
            yield from layer.all_tensors()

    def __repr__(self) -> str:
        seen = f"{self.num_seen} tokens seen" + (f" in {self.conversation.batch} rows" * (self.conversation.batch > 1))
        entries = [layer.memory.entries for layer in self.all_layers if layer.memory is not None]
        where = f"each of {len(entries)} layers" if len(entries) == len(self.layers) else ""
        where = where or f"{len(entries)} of {len(self.layers)} layers"
        return f"<SieveCache {seen}, {span(entries, ' to ')} entries in {where}, {mebibytes(self.nbytes())}>"

    def _repr_html_(self) -> str:
        rows = [("tokens seen", f"{self.num_seen} in {self.conversation.batch} rows")]
        rows.append(("layers", describe_kinds(tuple(kind_of(layer) for layer in self.all_layers))))
        rows.append(("entries per layer and head", span(self.entries())))
        return html_table(f"SieveCache under {self.owner.plan.name}", [*rows, ("memory", mebibytes(self.nbytes()))])

    def memory_report(self) -> dict[str, Any]:
        """Return the tokens seen, entries stored per layer and KV head, and the bytes of all tensors."""
        return {"tokens_seen": self.num_seen, "entries": self.entries(), "bytes": self.nbytes()}
