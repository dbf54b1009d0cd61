"""Layers of the cache that transformers sees, which hold keys and values: all of them, or those of a window."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Self, cast

import torch
from torch import Tensor

from kvsieve.attention import Window
from kvsieve.cache import DenseStore, LayerMemory, encode
from kvsieve.cache.contract import window_room
from kvsieve.cache.tensors import tensors_in
from kvsieve.errors import CacheStateError, UnsupportedOptionError
from kvsieve.hf.cache.any_layer import AnyLayer
from kvsieve.hf.compat import CacheLayerMixin
from kvsieve.planning.roles import Codec
from kvsieve.types import Selection


class StoreLayer(CacheLayerMixin, AnyLayer):
    """Entries of one layer in a store of ours.

    `update` only stages new keys and values and returns them untouched; the attention function takes them, stores
    them and attends. What `update` was given must be what attention receives, or the model is refused.

    Attributes:
        store: the entries.
        num_seen: tokens seen, whatever was evicted.
        staged: what `update` was given, until attention takes it.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self) -> None:
        self.store: LayerMemory = DenseStore()
        self.num_seen = 0
        self.staged: tuple[Tensor, Tensor] | None = None

    @property
    def memory(self) -> LayerMemory:
        return self.store

    @property
    def is_initialized(self) -> bool:
        return not self.store.is_empty

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """[B, H, stored, D], a view; None before the first pass."""
        return None if self.store.is_empty else self.store.keys

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """[B, H, stored, D], a view; None before the first pass."""
        return None if self.store.is_empty else self.store.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store allocates on first use."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.staged is not None:
            raise CacheStateError(
                "keys and values were staged but never reached kvsieve's attention function: use this cache only "
                "inside `with kvsieve.attach(model, plan)`, on that model"
            )
        self.staged = key_states, value_states
        return key_states, value_states

    def take(self, key: Tensor, value: Tensor, who: str) -> tuple[Tensor, Tensor, int]:
        """Hand over what `update` staged; `key` and `value` are what the attention function of `who` was given.

        Returns:
            Keys, values, and how often the model has repeated all their heads, one set after another.
        """
        staged = self.take_staged(who)
        repeats = _repeats(staged[0], key)
        if repeats != _repeats(staged[1], value) or not repeats:
            raise CacheStateError(
                f"{who} transforms keys or values between the cache and its attention; kvsieve cannot store what it "
                "attends to: this architecture is not supported"
            )
        return *staged, repeats

    def take_staged(self, who: str) -> tuple[Tensor, Tensor]:
        """Hand over what `update` staged for the attention of `who`."""
        staged = self.staged
        self.staged = None
        if staged is None:
            raise CacheStateError(f"{who} attends without having stored keys and values through the cache")
        return staged

    def all_tensors(self) -> Iterator[Tensor]:
        yield from super().all_tensors()
        yield from tensors_in((self.staged,))

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

    def fork(self, share: bool = False) -> Self:
        other = super().fork(share)
        other.store = self.store.share() if share else self.store.clone()
        other.staged = None
        return other

    def take_over(self, other: Self) -> None:
        """Become what a copy is that was made earlier and is used up."""
        vars(self).update(vars(other))

    def offload(self) -> None:
        raise UnsupportedOptionError("offloading is not supported by a SieveCache: leave cache_implementation unset")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.reorder(beam_idx)

    def reorder(self, rows: Tensor) -> None:
        super().reorder(rows)
        if not self.store.is_empty:
            self.store.reorder(rows)


def _repeats(staged: Tensor, given: Tensor) -> int:
    """Tell how often `given` repeats all heads of `staged`, 0 where it is something else."""
    if given is staged:
        return 1
    repeats, rest = divmod(given.shape[1], staged.shape[1])
    same = not rest and repeats > 1 and given.shape == (len(staged), repeats * staged.shape[1], *staged.shape[2:])
    return repeats if same and torch.equal(given, staged.repeat(1, repeats, 1, 1)) else 0


class SieveLayer(StoreLayer):
    """All entries of one layer, less those that the plan drops.

    Attributes:
        state: what methods remember of the layer.
    """

    is_growing = True
    saved = ("state", "view", "num_seen")

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {}
        self.view = None

    def encode(self, codec: Codec, *, ends_prompt: bool) -> None:
        """Encode the entries that have left the newest ones; ends_prompt: in blocks that need not be full."""
        self.store, self.view = encode(self.store, self.view, codec, ends_prompt=ends_prompt)

    def may_encode(self, codec: Codec, tokens: int) -> bool:
        """Tell whether entries may be encoded while up to `tokens` further tokens are stored."""
        store = self.store
        if store.is_encoded:
            return store.may_settle(tokens)
        stored = max(store.lengths, default=0)
        return any(length >= codec.newest(length) + codec.block for length in range(stored + 1, stored + tokens + 1))

    def view_only(self, selection: Selection) -> None:
        """Let the turn's answer read what is selected, and what is stored from now on; nothing is dropped."""
        if self.store.is_ragged:
            raise CacheStateError("views of entries that heads keep in different numbers are not supported")
        real = selection.real()
        real = real[:, None] if real is not None and real.ndim == 2 else real
        self.view = self.store.view(selection.indices, real)

    def all_tensors(self) -> Iterator[Tensor]:
        yield from super().all_tensors()
        yield from tensors_in(self.state)
        if self.view is not None:
            yield from tensors_in((self.view.slots, self.view.real))

    def fork(self, share: bool = False) -> Self:
        other = super().fork(share)
        other.state = copy.deepcopy(self.state)
        return other

    def reorder(self, rows: Tensor) -> None:
        super().reorder(rows)
        for name, part in self.state.items():
            if isinstance(part, Tensor):
                self.state[name] = part.index_select(0, rows.to(part.device))
        if self.view is not None:
            self.view = self.view.rows(rows)


class WindowLayer(StoreLayer):
    """DenseEntries that tokens to come can still see, of a layer that looks back no further than a window or chunk.

    The store's index holds positions here (padding not counted), by which the window goes: tokens that were dropped on
    the way to this layer leave holes.

    Attributes:
        holes: True once positions next to each other may lie further apart than one, as dropped tokens make them.
    """

    is_sliding = True
    saved = ("window", "holes", "num_seen")
    window: Window

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window
        self.holes = False

    def reset(self) -> None:
        self.__init__(self.window)  # type: ignore[misc]

    def get_max_length(self) -> int:
        return self.window.span

    @property
    def room(self) -> int:
        """Tokens stored before what has left the window is dropped, while decoding."""
        return window_room(self.window.span)

    def make_way(self, tokens: int) -> None:
        if self.store.size + tokens >= self.window.span + self.room:
            self.drop_unseen(at_once=True)

    def drop_unseen(self, *, at_once: bool) -> None:
        store = cast(DenseStore, self.store)
        span = self.window.span
        if store.size < span or (not at_once and store.size < span + self.room):
            return
        if store.valid is None and not self.holes and not self.window.chunked:
            first = store.size - span + 1
        else:
            position = store.index[:, 0].long()
            if store.valid is not None:
                # Tokens that were taken back have positions to come.
                position = position.masked_fill(~store.valid[:, 0], -1)
            seen = self.window.sees(position.amax(1, keepdim=True) + 1, position)
            if store.valid is not None:
                seen &= store.valid[:, 0]
            # Of the row that sees the most.
            first = int(seen.any(0).to(torch.uint8).argmax()) if bool(seen.any()) else store.size
        store.drop_first(first, self.room)
