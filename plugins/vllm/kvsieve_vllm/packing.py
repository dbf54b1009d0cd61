"""Evictors on blocks: the entries of a request that stay, in order, for its kept blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import CacheStateError
from kvsieve.planning.roles import Evictor
from kvsieve.types import LayerContext, Step


@dataclass(frozen=True)
class LayerFacts:
    """Facts of a layer's attention for evictors.

    Attributes:
        layer_idx: index of the layer.
        num_layers: layers of the model.
        scale: factor of query-key products.
        softcap: of logits; None for none.
    """

    layer_idx: int
    num_layers: int
    scale: float
    softcap: float | None = None


@dataclass(frozen=True)
class Offered:
    """A request's entries in a layer: the candidates of an evictor.

    Attributes:
        query: [L, query heads, D], those of the last L tokens.
        keys: [H, N, D], all stored keys.
        values: [H, N, Dv].
        state: the evictor's, of the request.
        ends_prompt: this pass completes the prompt.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    state: dict[str, Any] = field(default_factory=dict)
    ends_prompt: bool = True


def choose_entries(evictor: Evictor, layer: LayerFacts, offered: Offered, kept: int, tail: int) -> Tensor:
    """Choose the entries of each KV head for the kept blocks.

    Args:
        evictor: ranks the entries.
        layer: the layer's facts.
        offered: the entries.
        kept: entries to choose.
        tail: last entries, which stay in place and are not candidates.

    Returns:
        int64 [H, kept], ascending.

    Raises:
        CacheStateError: the evictor chose another number of entries.
    """
    query = offered.query
    keys = offered.keys
    values = offered.values
    heads, size = keys.shape[:2]
    index = torch.arange(size, dtype=torch.int32, device=keys.device).expand(1, heads, size)
    new = len(query)
    step = Step(size - new, new, "prefill" if offered.ends_prompt else "decode", True, 0, 0, (size,), (size,))
    ctx = LayerContext(
        layer_idx=layer.layer_idx,
        num_layers=layer.num_layers,
        step=step,
        scale=layer.scale,
        query=query.transpose(0, 1)[None],
        keys=keys[None],
        values=values[None],
        index=index,
        valid=None,
        stored=(size,),
        state=offered.state,
        protected=index >= size - tail if tail else None,
        softcap=layer.softcap,
    )
    selection = evictor.select(ctx, (kept + tail,))
    if isinstance(selection, dict) or selection is None or selection.indices.shape != (1, heads, kept + tail):
        got = None if selection is None or isinstance(selection, dict) else tuple(selection.indices.shape)
        raise CacheStateError(
            f"{type(evictor).__name__} was to choose {kept + tail} entries of {size} for {heads} KV heads and gave "
            f"{got}; the trait fixed_counts promises exactly that many, please report it to its author"
        )
    return selection.indices[0, :, :kept]


class ObservedQueries:
    """Queries of requests' last tokens, kept for the evictor.

    A request is identified by its first block, unique at any time. Data of an aborted request are dropped when the next
    one starts there.

    Args:
        window: the evictor's observation window.
        most: requests at a time.
    """

    def __init__(self, window: int, most: int) -> None:
        self._window = window
        self._most = most
        self._held: dict[int, tuple[int, Tensor]] = {}

    def hold(self, block: int, end: int, query: Tensor) -> None:
        """Keep the last queries.

        Args:
            block: the request's first block.
            end: its processed tokens.
            query: [L, query heads, D], those of the last L tokens.
        """
        self._held.pop(block, None)
        while len(self._held) >= 2 * self._most:
            self._held.pop(next(iter(self._held)))
        self._held[block] = end, query[-self._window :].clone()

    def joined(self, block: int, start: int, query: Tensor) -> Tensor:
        """Return the kept queries followed by a segment's own.

        Args:
            block: the request's first block.
            start: tokens processed before the segment.
            query: [L, query heads, D], the segment's.

        Raises:
            CacheStateError: the kept queries are not those before `start`.
        """
        end, earlier = self._held.pop(block, (0, query[:0]))
        if end != start:
            raise CacheStateError(
                f"queries of {end} tokens are kept for a request that has read {start}; this is an error of kvsieve, "
                "please report it"
            )
        return torch.cat([earlier, query])


class EvictorStates:
    """State of an evictor for repeated eviction, per request; identified as in ObservedQueries.

    Args:
        most: requests at a time. The most recently used states of twice as many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[int, dict[str, Any]] = {}

    def of(self, block: int, begins: bool) -> dict[str, Any]:
        """Return a request's state; must be called in every step of it.

        Args:
            block: the request's first block.
            begins: this step completes its prompt; the state of an earlier request is dropped.
        """
        state = self._held.pop(block, {})
        while len(self._held) >= 2 * self._most:
            self._held.pop(next(iter(self._held)))
        self._held[block] = {} if begins else state
        return self._held[block]
