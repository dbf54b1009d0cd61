"""Layers of the cache with keys and values: all of them, or those of a window."""

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
    """Entries of one layer in a kvsieve store.

    `update` only stages new keys and values and returns them unchanged; the attention function stores them and attends.
    Attention must receive the inputs of `update`, or the model is refused.

    Attributes:
        store: the entries.
        num_seen: tokens seen, including evicted ones.
        staged: inputs of `update`, until attention takes them.
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
        """Do nothing: the store allocates on first use."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.staged is not None:
            raise CacheStateError(
                "keys and values were staged but never reached kvsieve's attention function: use this cache only "
                "inside `with kvsieve.attach(model, plan)`, on that model"
            )
        self.staged = key_states, value_states
        return key_states, value_states

    def take(self, key: Tensor, value: Tensor, who: str) -> tuple[Tensor, Tensor, int]:
        """Return and clear the staged entries; `key` and `value` are the inputs of the attention function of `who`.

        Returns:
            Keys, values, and the number of times the model has repeated all their heads, one set after another.
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
        """Return and clear the staged entries for the attention of `who`."""
        staged = self.staged
        self.staged = None
        if staged is None:
            raise CacheStateError(f"{who} attends without having stored keys and values through the cache")
        return staged

    def all_tensors(self) -> Iterator[Tensor]:
        yield from super().all_tensors()
        yield from tensors_in((self.staged,))

    def get_seq_length(self) -> int:
        """Logical: tokens seen, including evicted ones."""
        return self.num_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Physical: entries stored, including the new ones."""
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
        """Take over the content of an earlier copy, which becomes unusable."""
        vars(self).update(vars(other))

    def offload(self) -> None:
        raise UnsupportedOptionError("offloading is not supported by a SieveCache: leave cache_implementation unset")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.reorder(beam_idx)

    def reorder(self, rows: Tensor) -> None:
        super().reorder(rows)
        if not self.store.is_empty:
            self.store.reorder(rows)


def _repeats(staged: Tensor, repeated: Tensor) -> int:
    """Return the number of times `repeated` repeats all heads of `staged`, 0 if it is something else."""
    if repeated is staged:
        return 1
    repeats, rest = divmod(repeated.shape[1], staged.shape[1])
    same = not rest and repeats > 1 and repeated.shape == (len(staged), repeats * staged.shape[1], *staged.shape[2:])
    return repeats if same and torch.equal(repeated, staged.repeat(1, repeats, 1, 1)) else 0


class SieveLayer(StoreLayer):
    """All entries of one layer, except those that the plan drops. state: methods' state of the layer."""

    is_growing = True
    saved = ("state", "view", "num_seen")

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {}
        self.view = None

    def encode(self, codec: Codec, *, ends_prompt: bool) -> None:
        """Encode the entries that are no longer among the newest; ends_prompt: blocks need not be full."""
        self.store, self.view = encode(self.store, self.view, codec, ends_prompt=ends_prompt)

    def may_encode(self, codec: Codec, tokens: int) -> bool:
        """Return True if entries may be encoded while up to `tokens` further tokens are stored."""
        store = self.store
        if store.is_encoded:
            return store.may_quantize(tokens)
        stored = max(store.lengths, default=0)
        return any(length >= codec.newest(length) + codec.block for length in range(stored + 1, stored + tokens + 1))

    def view_only(self, selection: Selection) -> None:
        """Restrict the turn's answer to the selection and later entries; nothing is dropped."""
        if self.store.is_ragged:
            raise CacheStateError("views of entries that heads keep in different numbers are not supported")
        self.view = self.store.view(selection.indices, selection.real_of_heads())

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
    """Entries that future tokens can still see, of a layer with a window or chunk.

    The store's index has positions here (padding not counted), which define the window: tokens dropped before this
    layer leave holes.

    Attributes:
        holes: True if neighbouring positions may differ by more than one, after tokens were dropped.
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
        """Tokens stored before entries outside the window are dropped, while decoding."""
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
                # Removed tokens have future positions.
                position = position.masked_fill(~store.valid[:, 0], -1)
            seen = self.window.sees(position.amax(1, keepdim=True) + 1, position)
            if store.valid is not None:
                seen &= store.valid[:, 0]
            # For the row that sees the most.
            first = int(seen.any(0).to(torch.uint8).argmax()) if bool(seen.any()) else store.size
        store.drop_first(first, self.room)
