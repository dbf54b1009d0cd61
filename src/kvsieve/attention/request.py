"""A request for attention: queries, stored entries, and which of these the queries see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvsieve.cache.packed import PackedStore
from kvsieve.core.blocks import BlockGrid
from kvsieve.core.kv_rows import DeviceLength
from kvsieve.types import AttentionQueries


@dataclass(frozen=True)
class Foreseen:
    """Facts of this machine that attention of one token depends on, which a compiled pass cannot ask for.

    Attributes:
        threads: CPU threads.
        thin: products are faster than torch's kernel.
    """

    threads: int
    thin: bool


@dataclass
class DenseEntries:
    """Entries of equal number per head.

    Attributes:
        keys: [B, H, N, D].
        values: [B, H, N, Dv].
        valid: bool [B, H or 1, N], False for padding, visible only to its own query; None when all are real.
        length: how many of the N there are, known on the device only, in a recorded pass; None: all.
        foreseen: facts of this machine that a pass asks before it is compiled; None: not asked yet.
        log_weight: float32 [B, H, N], added to the logits of entries, after a cap; 0 for padding. None: all weigh 1.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor | None = None
    length: DeviceLength | None = None
    foreseen: Foreseen | None = None
    log_weight: Tensor | None = None


@dataclass
class FlatEntries:
    """Entries in different numbers per head, in one buffer.

    Attributes:
        keys: [B, T, D], all heads' entries.
        values: [B, T, Dv].
        bias: [B, H, T] in the keys' dtype, 0 for a head's own entries and the dtype's least number for the others.
        foreseen: as in DenseEntries.
        used: slots in use; the last L * H are those of the L tokens, token by token. None: L is 1.
        padded: some of the tokens may be padding.
        log_weight: float32 [B, T], as in DenseEntries.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    foreseen: Foreseen | None = None
    used: int | None = None
    padded: bool = False
    log_weight: Tensor | None = None

    def shown(self, new: int) -> Tensor:
        """Return the slots that each of `new` tokens sees: bool [B, H, L, T]."""
        own = (self.bias == 0)[:, :, None]
        if new == 1:
            return own
        assert self.used is not None
        heads, slots = self.bias.shape[1:]
        device = own.device
        ends = self.used - heads * torch.arange(new - 1, -1, -1, device=device)
        at = torch.arange(slots, device=device)
        own = own & (at < ends[:, None])
        if self.padded:
            # Padding sees itself.
            own = own | (at == ends[:, None] - heads + torch.arange(heads, device=device)[:, None, None])
        return own


@dataclass
class EncodedEntries:
    """Entries with the older ones encoded.

    Attributes:
        store: of the layer, the token's own entry included.
        length: exact entries that there are, known on the device only; None: all.
    """

    store: PackedStore
    length: DeviceLength | None = None


@dataclass
class Shown:
    """Entries that a mask shows: bool, broadcastable to [B, Hq, L, N], four dimensions."""

    mask: Tensor


@dataclass
class ScaledPart:
    """Entries of which a part's log-sum-exp of logits is scaled before it is merged with that of the others.

    Attributes:
        mask: as in `Shown`.
        part: bool [B, H or 1, N], the entries of the part.
        factor: of the part's log-sum-exp.
    """

    mask: Tensor
    part: Tensor
    factor: float


@dataclass
class ChosenBlocks:
    """Blocks of keys that the queries of a prompt attend to.

    Attributes:
        chosen: bool [B, H or Hq, query blocks, key blocks], a set for each KV head or for each query head; of blocks
            before the diagonal, which is always computed.
        grid: the blocks.
        shared: query blocks in a row with the same set, which see all of their own blocks.
    """

    chosen: Tensor
    grid: BlockGrid
    shared: int = 1


@dataclass(frozen=True)
class Window:
    """Stretch of the tokens before that a token sees.

    Attributes:
        span: positions of a window, its own among them, or of a chunk.
        chunked: True for chunks, which begin at multiples of `span`.
    """

    span: int
    chunked: bool = False

    def sees(self, asking: Tensor, stored: Tensor) -> Tensor:
        """Return which stored positions a token sees, bool of the shape that both have together."""
        near = asking // self.span == stored // self.span if self.chunked else stored > asking - self.span
        return near & (stored <= asking)


@dataclass
class Near:
    """Entries that a window shows by their positions: int [B, N], ascending in each row among its real ones."""

    window: Window
    positions: Tensor


Stored = TypeVar("Stored")
Seen = TypeVar("Seen")


@dataclass
class AttentionRequest(Generic[Stored, Seen]):
    """Attention of the last L stored tokens; an executor of `attention.table` computes it.

    Attributes:
        asked: the queries, [B, Hq, L, D]; [X, G, D] over `KVRows`.
        stored: entries of the layer, or a tuple of parts of them, which are seen as one.
        sees: `Near`, `Shown`, `ScaledPart`, `ChosenBlocks`, or of KV rows a `Choice`; None: the last L of N see all
            before them.
    """

    asked: AttentionQueries
    stored: Stored
    sees: Seen = None  # type: ignore[assignment]


def why_not_learned(request: AttentionRequest[DenseEntries, Any]) -> str | None:
    """Refuse a gradient, which kernels, and products into given buffers, do not have."""
    parts = (request.asked.query, request.stored.keys, request.stored.values)
    return "a gradient is wanted" if torch.is_grad_enabled() and any(part.requires_grad for part in parts) else None


def why_not_padded(request: AttentionRequest[DenseEntries, Any]) -> str | None:
    """Refuse entries that are not real."""
    return None if request.stored.valid is None else "some entries are padding"


def why_not_weighted(request: AttentionRequest[Any, Any]) -> str | None:
    """Refuse entries with weights, which most kernels do not add."""
    return None if request.stored.log_weight is None else "entries have weights"


def float_mask(log_weight: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the term that torch's kernels add to logits: weights, and the dtype's minimum for hidden entries.

    Args:
        log_weight: broadcastable to the logits.
        mask: bool, broadcastable with it, False for hidden entries; None for none.
        dtype: of the queries.
    """
    weights = log_weight.to(dtype)
    return weights if mask is None else torch.where(mask, weights, torch.finfo(dtype).min)


def why_not_plain(request: AttentionRequest[Any, Any]) -> str | None:
    """Refuse a cap and sinks, which torch's kernels do not support."""
    return None if request.asked.is_plain else "logits are capped, or there are sinks"


def each_of(*questions: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """Return a question that refuses for the first reason of several."""
    return lambda request: next((reason for ask in questions if (reason := ask(request)) is not None), None)


class Executor(NamedTuple):
    """A way to compute attention.

    Attributes:
        name: in statistics.
        why_not: reason why it does not compute a request; None where it does.
        run: compute it: [B, Hq, L, Dv], or [X, G, Dv] for KV rows.
    """

    name: str
    why_not: Callable[[Any], str | None]
    run: Callable[[Any], Tensor]
