"""Products of stored entries with the queries of the tokens after them."""

from __future__ import annotations

from kvsieve.core.scoring import score_dtype
from kvsieve.lazy import Tensor, torch
from kvsieve.lazy import functional as F

# Queries with prefix sums made at once.
_BLOCK = 1024


def later_logits(
    query: Tensor, keys: Tensor, positions: Tensor, real: Tensor | None, window: int
) -> tuple[Tensor, int]:
    """Sum the products of entries with the queries of a pass that are at most `window` positions after them.

    The sum of a key's products is its product with the sum of the queries, a difference of two prefix sums.

    Args:
        query: [B, Hq, L, D], of the last L of the N entries.
        keys: [B, H, N, D].
        positions: int64 [B, N], of the entries; padding repeats the position before it.
        real: bool [B, N], False for padding; None without padding.
        window: positions after an entry.

    Returns:
        Sums of the last n entries, float32 at least [B, Hq, n], and N - n: the entries before them get none.
    """
    size = keys.shape[2]
    new = query.shape[2]
    dtype = score_dtype(query.dtype)
    before = size
    found = torch.zeros(0)
    for start in range(size - new, size, _BLOCK):
        end = min(start + _BLOCK, size)
        queries = query[:, :, start - size + new : end - size + new].to(dtype)
        places = positions[:, start:end].contiguous()
        first = max(start - window, 0)
        if real is not None:
            queries = queries.masked_fill(~real[:, None, start:end, None], 0)
            near = real[:, :end] & (positions[:, :end] > places[:, :1] - window - 1)
            first = int(near.any(0).to(torch.uint8).argmax())
        if start == size - new:
            before = first
            found = keys.new_zeros(*query.shape[:2], size - before, dtype=dtype)
        at = positions[:, first:end].contiguous()
        part = keys[:, :, first:end].to(dtype)
        if end - start == 1:
            sees = (at < places) & (places <= at + window)
            # A product for each group, without a copy of the query for each key.
            logits = queries.unflatten(1, (part.shape[1], -1))[:, :, :, 0] @ part.transpose(2, 3)
            sums = logits.flatten(1, 2) * sees[:, None]
        else:
            prefix = F.pad(queries.cumsum(2), (0, 0, 1, 0))
            below = _taken(prefix, torch.searchsorted(places, at, right=True))
            above = _taken(prefix, torch.searchsorted(places, at + window, right=True))
            sums = _products(above - below, part)
        found[:, :, first - before : end - before] += sums
    return found, before


def _taken(prefix: Tensor, at: Tensor) -> Tensor:
    """Return prefix sums [B, Hq, T, D] at int64 [B, n]."""
    return prefix.gather(2, at[:, None, :, None].expand(-1, prefix.shape[1], -1, prefix.shape[3]))


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the products of keys [B, H, n, D] with queries [B, Hq, n, D], [B, Hq, n]."""
    return torch.einsum("bhgnd,bhnd->bhgn", queries.unflatten(1, (keys.shape[1], -1)), keys).flatten(1, 2)
