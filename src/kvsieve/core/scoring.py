"""Attention mass received by stored entries, its pooling along the sequence and its reduction over query heads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from kvsieve import kernels
from kvsieve.core.softmax import cap, sinks_of, softmax
from kvsieve.kernels.cpu import mass as compiled
from kvsieve.lazy import Tensor, torch
from kvsieve.lazy import functional as F
from kvsieve.types import AttentionQueries, LayerContext

Pool = Literal["avg", "max"]
Kernel = int | Literal["auto"]
Width = int | tuple[int, ...]
"""Width of a pooling: one for all rows, or one per row."""

# The widest pooling: the work grows with it, and papers take up to 63.
WIDEST = 4095

# "auto": a budget has room for this many pieces of the kernel's width, each at most as long as an answer of 64 digits.
_PIECES = 6
_LEAST = 7
_MOST = 95

# Logits of one block: [B, H, G * W, block] in float32 stay under about 128 MiB.
_BLOCK_ELEMENTS = 1 << 25


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for scores: float32 for half-precision inputs (bfloat16 scores tie often), else the input's."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def window_mass(
    asked: AttentionQueries,
    keys: Tensor,
    *,
    valid: Tensor | None = None,
    block: int | None = None,
    log_weight: Tensor | None = None,
) -> Tensor:
    """Return the softmax attention mass that a window of queries gives to every stored entry, summed over the window.

    The softmax runs over all N entries with the causal mask inside the window. The mass of a query head thus sums to W,
    less the part of sinks.

    Source: SnapKV (arXiv 2404.14469), and the observation windows of FastKV, ASL, PyramidKV, Ada-KV and RocketKV.

    Args:
        asked: queries [B, Hq, W, D], post-RoPE, of the last W of the N entries.
        keys: [B, H, N, D], post-RoPE.
        valid: bool [B, H or 1, N]; padding receives and gives no mass. None: no padding.
        block: entries scored at a time; None chooses it so that no N x N matrix is allocated.
        log_weight: float32 [B, H, N], added to the logits; None: all entries weigh 1.

    Returns:
        [B, Hq, N] in float32 (float64 for float64 inputs).
    """
    query = asked.query
    compiles = block is None and log_weight is None
    if compiles and kernels.usable(query, keys):
        return kernels.window_mass(asked, keys, valid)
    if compiles and compiled.takes(query, keys, asked.scale):
        return compiled.query_mass(asked, keys, _seen(query, keys, valid))
    weights = window_weights(asked, keys, valid=valid, block=block, log_weight=log_weight)
    parts = [part.sum(2) for part in weights]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def mass_of(ctx: LayerContext, start: int, stop: int | None = None) -> Tensor:
    """Mass [B, Hq, M] that queries start ... stop - 1 of a pass give to the M entries up to the last of them.

    ctx: the layer; `start` and `stop` as in a slice of its queries.
    """
    query = ctx.query[:, :, start:stop]
    keys = ctx.keys
    valid = ctx.valid
    log_weight = ctx.log_weight
    if stop is not None:
        seen = keys.shape[2] - ctx.query.shape[2] + stop
        keys = keys[:, :, :seen]
        valid, log_weight = (None if part is None else part[:, :, :seen] for part in (valid, log_weight))
    return window_mass(ctx.asks(query), keys, valid=valid, log_weight=log_weight)


def weights_of(ctx: LayerContext, window: int) -> Iterator[Tensor]:
    """Yield the weights that the last queries of a pass give to entries, see `window_weights`."""
    return window_weights(ctx.asks(ctx.query[:, :, -window:]), ctx.keys, valid=ctx.valid, log_weight=ctx.log_weight)


def _seen(query: Tensor, keys: Tensor, valid: Tensor | None) -> Tensor:
    """Return the entries visible to each query of a window, bool [B or 1, H or 1, W, N]; see `window_mass`."""
    slots = torch.arange(keys.shape[2], device=keys.device)
    window = query.shape[2]
    causal = slots <= slots[-window:, None]
    return causal[None, None] if valid is None else causal & valid[:, :, None] & valid[:, :, -window:, None]


def window_weights(
    asked: AttentionQueries,
    keys: Tensor,
    *,
    valid: Tensor | None = None,
    block: int | None = None,
    log_weight: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield the softmax weights that `window_mass` sums, [B, Hq, W, block], block by block of entries.

    Queries that are padding have weight 0. Arguments as in `window_mass`.
    """
    query = asked.query
    batch, query_heads, window, dim = query.shape
    heads = keys.shape[1]
    length = keys.shape[2]
    groups = query_heads // heads
    dtype = score_dtype(query.dtype)
    packed = (query.to(dtype) * asked.scale).reshape(batch, heads, groups * window, dim)
    if block is None:
        block = max(1024, _BLOCK_ELEMENTS // max(1, batch * query_heads * window))
    # Slot of each packed query row, for the causal corner: rows run over groups first, then over the window.
    corner = length - window
    rows = torch.arange(corner, length, device=keys.device).repeat(groups)[:, None]
    padding = None if valid is None else ~valid[:, :, corner:].repeat(1, 1, groups).unsqueeze(-1)
    sinks = sinks_of(asked, heads, groups, 1)
    sinks = None if sinks is None else sinks.to(dtype).expand(-1, -1, window).reshape(heads, -1, 1)

    def logits(start: int, end: int) -> Tensor:
        part = cap(packed @ keys[:, :, start:end].to(dtype).transpose(-1, -2), asked)
        if log_weight is not None:
            part += log_weight[:, :, None, start:end].to(dtype)
        first = max(start, corner)
        if first < end:
            hidden = torch.arange(first, end, device=keys.device) > rows
            part[..., first - start :].masked_fill_(hidden, float("-inf"))
        if valid is not None:
            part.masked_fill_(~valid[:, :, None, start:end], float("-inf"))
        return part

    def per_query(weights: Tensor) -> Tensor:
        if padding is not None:
            weights.masked_fill_(padding, 0)
        return weights.view(batch, query_heads, window, -1)

    if length <= block:
        yield per_query(softmax(logits(0, length), sinks))
        return
    spans = [(start, min(start + block, length)) for start in range(0, length, block)]
    norm = torch.full((batch, heads, groups * window, 1), float("-inf"), dtype=dtype, device=keys.device)
    for span in spans:
        norm = torch.logaddexp(norm, logits(*span).logsumexp(-1, keepdim=True))
    norm = norm if sinks is None else torch.logaddexp(norm, sinks)
    for span in spans:
        yield per_query((logits(*span) - norm).exp_())


def width(kernel: Kernel, kept: Iterable[int]) -> Width:
    """Return the width of a pooling for each row.

    A narrow kernel breaks up long answers, while a wide one leaves room for few pieces.

    Args:
        kernel: odd, or "auto": a sixth of `kept`, odd, 7 to 95.
        kept: entries that each row keeps, or tokens that are propagated.
    """
    if kernel != "auto":
        return kernel
    widths = tuple(min(max(2 * (count // _PIECES // 2) + 1, _LEAST), _MOST) for count in kept)
    return widths[0] if len(set(widths)) == 1 else widths


def pool(scores: Tensor, kernel: Width, kind: Pool, valid: Tensor | None = None) -> Tensor:
    """Smooth scores along the sequence.

    Args:
        scores: [..., N].
        kernel: width, odd; 1 returns the scores unchanged. A tuple has one per row of [B, ..., N].
        kind: "avg" divides by the kernel everywhere, counting zeros beyond the ends; "max" ignores them.
        valid: bool [B, H or 1, N or more], for scores [B, X, N] that are 0 where it is False. Entries are then
            neighbours across padding, which later turns of a batch insert. None: no padding.

    Returns:
        The shape of `scores`.
    """
    if kernel == 1 or not scores.shape[-1]:
        return scores
    if isinstance(kernel, tuple):
        rows = [slice(row, row + 1) for row in range(len(kernel))]
        masks = [None if valid is None else valid[row] for row in rows]
        parts = zip(rows, kernel, masks, strict=True)
        return torch.cat([pool(scores[row], one, kind, mask) for row, one, mask in parts])
    if valid is not None:
        return _closed_up(scores, valid, lambda part: pool(part, kernel, kind))
    flat = scores.reshape(-1, 1, scores.shape[-1])
    if kind == "avg":
        pooled = F.avg_pool1d(flat, kernel, stride=1, padding=kernel // 2)
    else:
        pooled = F.max_pool1d(flat, kernel, stride=1, padding=kernel // 2)
    return pooled.reshape(scores.shape)


def _closed_up(scores: Tensor, valid: Tensor, smooth: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `smooth` to scores [B, X, N] as if all padding were on the left; it may return fewer heads, [B, Y, N].

    valid: bool [B, H or 1, N or more]; X and Y are multiples of its heads.
    """
    order = valid[..., : scores.shape[-1]].to(torch.uint8).argsort(dim=-1, stable=True)

    def per_line(count: int) -> Tensor:
        return order.repeat_interleave(count // order.shape[1], 1)

    smoothed = smooth(scores.gather(-1, per_line(scores.shape[1])))
    return torch.empty_like(smoothed).scatter_(-1, per_line(smoothed.shape[1]), smoothed)


def group_mean(scores: Tensor, heads: int) -> Tensor:
    """Average over the query heads that share a KV head: [B, Hq, N] -> [B, H, N]."""
    batch, query_heads, length = scores.shape
    return scores.reshape(batch, heads, query_heads // heads, length).mean(2)


def pooled_mass(ctx: LayerContext, window: int, kernel: Width, pooling: Pool, heads: int | None = None) -> Tensor:
    """Return the pooled mass that the last w = min(`window`, L) queries of this pass give to the entries before them.

    heads: average over the query heads of each of this many heads; None for no average.

    Returns:
        [B, Hq, N - w], or [B, heads, N - w].
    """
    window = min(window, ctx.query.shape[2])
    mass = mass_of(ctx, -window)
    mass = mass[..., :-window]
    valid = ctx.valid
    if heads is not None and isinstance(kernel, int) and mass.shape[-1] and kernels.usable(mass):
        by_kernel = functools.partial(kernels.pooled, heads=heads, kernel=kernel, pooling=pooling)
        return by_kernel(mass) if valid is None or kernel == 1 else _closed_up(mass, valid, by_kernel)
    pooled = pool(mass, kernel, pooling, valid)
    return pooled if heads is None else group_mean(pooled, heads)
