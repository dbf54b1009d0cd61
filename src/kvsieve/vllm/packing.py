"""Evictors on blocks: which entries of a request stay, in order, for the blocks that it keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsieve.errors import CacheStateError
from kvsieve.roles import Evictor
from kvsieve.types import AttentionTerms, LayerContext, Step


@dataclass(frozen=True)
class LayerFacts:
    """Facts of a layer's attention that evictors ask for.

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


def choose_entries(
    evictor: Evictor, layer: LayerFacts, query: Tensor, keys: Tensor, values: Tensor, kept: int, tail: int
) -> Tensor:
    """Choose the entries of each KV head that fill the blocks which stay.

    Args:
        evictor: ranks the entries.
        layer: the layer's facts.
        query: [L, query heads, D], those of the last L tokens.
        keys: [H, N, D], all that is stored.
        values: [H, N, Dv].
        kept: entries to choose.
        tail: last entries, which stay where they are and are not among those chosen.

    Returns:
        int64 [H, kept], ascending.

    Raises:
        CacheStateError: the evictor chose another number of entries.
    """
    heads, size = keys.shape[:2]
    index = torch.arange(size, dtype=torch.int32, device=keys.device).expand(1, heads, size)
    new = len(query)
    step = Step(size - new, new, "prefill", True, 0, 0, (size,), (size,))
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
        protected=index >= size - tail if tail else None,
        terms=None if layer.softcap is None else AttentionTerms(layer.softcap),
    )
    selection = evictor.select(ctx, (kept + tail,))
    if isinstance(selection, dict) or selection is None or selection.indices.shape != (1, heads, kept + tail):
        got = None if selection is None or isinstance(selection, dict) else tuple(selection.indices.shape)
        raise CacheStateError(
            f"{type(evictor).__name__} was to choose {kept + tail} entries of {size} for {heads} KV heads and gave "
            f"{got}; this is an error of kvsieve, please report it"
        )
    return selection.indices[0, :, :kept]


class ObservedQueries:
    """Queries of a prompt's end that were read before its last chunk, by request.

    A request is known by the block that it begins with, which no other holds at the same time. What is left of one
    that never came to its end is forgotten when the next begins there.

    Args:
        window: queries that an evictor looks at.
        most: requests at a time.
    """

    def __init__(self, window: int, most: int) -> None:
        self.window = window
        self._most = most
        self._held: dict[int, tuple[int, Tensor]] = {}

    def see(self, block: int, start: int, query: Tensor, prompt: int) -> None:
        """Keep what a chunk's last queries add for the prompt's end, if its last chunk will be too short.

        Args:
            block: the request's first block.
            start: tokens processed before the chunk.
            query: [L, query heads, D], the chunk's.
            prompt: tokens of the prompt.
        """
        end = start + len(query)
        before = self._before(block, start, len(query))
        if prompt - end >= self.window or end >= prompt:
            return
        while len(self._held) >= 2 * self._most:
            self._held.pop(next(iter(self._held)))
        self._held[block] = end, torch.cat([*before, query])[-self.window :].clone()

    def last(self, block: int, start: int, query: Tensor) -> Tensor:
        """Return the queries of a prompt's end, at most `window` and at least the chunk's; arguments as in `see`."""
        before = self._before(block, start, len(query))
        return torch.cat([*before, query]) if before else query

    def _before(self, block: int, start: int, new: int) -> list[Tensor]:
        """Take out what was kept of the tokens before a chunk; nothing where it is long enough, or the first."""
        end, held = self._held.pop(block, (start, None))
        if not start or new >= self.window or held is None:
            return []
        if end != start:
            raise CacheStateError(
                f"queries of {end} tokens are kept for a request that has read {start}; this is an error of kvsieve, "
                "please report it"
            )
        return [held]
