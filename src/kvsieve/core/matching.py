"""Fewer entries with the attention of many: their scores, fitted weights and fitted values.

Attention over a part of the entries is its mass (the sum of exponentials) and the mean of its values. Fewer entries
that have nearly both for every query can replace the part. Both are fitted to reference queries, per KV head, over
all query heads of its group.

Source: Fast KV Compaction via Attention Matching (arXiv 2602.16284).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvsieve.core.scoring import score_dtype
from kvsieve.core.selection import entries_at
from kvsieve.core.softmax import cap, sinks_of
from kvsieve.lazy import Tensor, torch
from kvsieve.types import AttentionQueries

# Weights lie within [e^-3, e^3].
LARGEST = 3.0

# Logits of one block of queries, [B, Hq, T', N] in float32, stay under about 128 MiB.
_BLOCK_ELEMENTS = 1 << 25
_ROUNDS = 300
_POWERS = 16


@dataclass(frozen=True)
class MatchedPart:
    """Entries of a layer, and the reference queries.

    Attributes:
        asked: queries [B, Hq, T, D], post-RoPE.
        keys: [B, H, N, D], post-RoPE.
        values: [B, H, N, Dv].
        real: bool [B, T], False for filler among the queries; None if all are real.
        valid: bool [B, H or 1, N], False for padding and filler; None if there is none.
        log_weight: float32 [B, H, N], logarithms of the entries' weights; None: all weigh 1.
        step: queries of a block, per query head.
    """

    asked: AttentionQueries
    keys: Tensor
    values: Tensor
    real: Tensor | None = None
    valid: Tensor | None = None
    log_weight: Tensor | None = None
    step: int = 0

    def __post_init__(self) -> None:
        if not self.step:
            per_query = self.asked.query.shape[0] * self.asked.query.shape[1] * self.keys.shape[2]
            object.__setattr__(self, "step", max(1, _BLOCK_ELEMENTS // max(1, per_query)))

    @property
    def dtype(self) -> torch.dtype:
        return score_dtype(self.keys.dtype)

    def at(self, slots: Tensor, real: Tensor | None) -> MatchedPart:
        """Return the entries at slots int64 [B, H, K]; real: bool [B, K], False for filler, None without."""
        keys, values = entries_at(self.keys, slots), entries_at(self.values, slots)
        weight = None if self.log_weight is None else self.log_weight.gather(2, slots)
        valid = None if real is None else real[:, None]
        return replace(self, keys=keys, values=values, valid=valid, log_weight=weight)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield logits [B, H, Q, N] of blocks of queries, and bool [B, 1, Q, 1], False for filler; None without.

        Query heads of a group follow each other. Hidden entries have -inf.
        """
        grouped = self.asked.query.unflatten(1, (self.keys.shape[1], -1))
        keys = self.keys.to(self.dtype).transpose(-1, -2)
        for start in range(0, grouped.shape[3], self.step):
            part = grouped[:, :, :, start : start + self.step]
            logits = cap((part.to(self.dtype) * self.asked.scale).flatten(2, 3) @ keys, self.asked)
            if self.log_weight is not None:
                logits = logits + self.log_weight[:, :, None]
            if self.valid is not None:
                logits = logits.masked_fill(~self.valid[:, :, None], float("-inf"))
            asks = None if self.real is None else self.real[:, start : start + self.step]
            yield logits, None if asks is None else asks.repeat(1, grouped.shape[2])[:, None, :, None]


@dataclass(frozen=True)
class Attended:
    """Attention of the reference queries to a part.

    Attributes:
        scores: [B, H, N], root mean squares of the entries' attention weights.
        blocks: per block of queries, the largest logit and the logarithm of the mass, [B, H, Q, 1], and the output
            [B, H, Q, Dv].
    """

    scores: Tensor
    blocks: list[tuple[Tensor, Tensor, Tensor]]


def attended(part: MatchedPart) -> Attended:
    """Return the attention of the queries to the part alone. Sinks lower the scores, and change nothing else."""
    values = part.values.to(part.dtype)
    batch, heads, length = part.keys.shape[:3]
    groups = part.asked.query.shape[1] // heads
    squares = torch.zeros(batch, heads, length, dtype=part.dtype, device=part.keys.device)
    blocks = []
    for logits, asks in part.blocks():
        mass = logits.logsumexp(-1, keepdim=True)
        weights = (logits - mass).exp()
        blocks.append((logits.amax(-1, keepdim=True), mass, weights @ values))
        sinks = sinks_of(part.asked, heads, groups, 1)
        if sinks is not None:
            sinks = sinks.to(part.dtype).expand(-1, -1, logits.shape[2] // groups).reshape(heads, -1, 1)
            weights = weights * (mass - torch.logaddexp(mass, sinks)).exp()
        squares += (weights if asks is None else weights * asks).square().sum(2)
    count: Tensor | int = part.asked.query.shape[2] * groups
    if part.real is not None:
        count = (part.real.sum(1) * groups).clamp_min(1)[:, None, None]
    return Attended((squares / count).sqrt(), blocks)


def fitted_weights(few: MatchedPart, whole: Attended, fixed: Tensor | None = None) -> Tensor:
    """Return logarithms of weights [B, H, K] with which few entries have about the mass of the whole part.

    They minimize the squared error of the mass, in units of the largest exponential of each query.

    Args:
        few: the chosen entries; the stored weights are included in the result.
        whole: attention to all entries.
        fixed: bool [B, H, K], entries with unchanged weights; None for none.
    """
    square, wanted = _zeros(few, few.keys.shape[2]), _zeros(few, 1)
    for (logits, asks), (peak, mass, _) in zip(few.blocks(), whole.blocks, strict=True):
        columns = (logits - peak).exp()
        columns = columns if asks is None else columns * asks
        square += columns.transpose(2, 3) @ columns
        wanted += columns.transpose(2, 3) @ (mass - peak).exp()
    high = torch.full_like(wanted[..., 0], LARGEST)
    high = high if fixed is None else high.masked_fill(fixed, 0)
    found = bounded_least_squares(square, wanted[..., 0], (-high).exp(), high.exp()).log().float()
    for rest in (fixed, None if few.valid is None else ~few.valid):
        found = found if rest is None else found.masked_fill(rest, 0)
    return found if few.log_weight is None else found + few.log_weight


def fitted_values(few: MatchedPart, whole: Attended, ridge: float, fixed: Tensor | None = None) -> Tensor:
    """Return values [B, H, K, Dv] with which few entries have about the output of the whole part, by least squares.

    Args:
        few: the chosen entries, with their new weights.
        whole: attention to all entries.
        ridge: pull towards the own values, in units of the mean diagonal; the larger, the stronger.
        fixed: bool [B, H, K], entries with unchanged values; None for none.
    """
    own = few.values.to(few.dtype)
    square, rest = _zeros(few, few.keys.shape[2]), _zeros(few, own.shape[3])
    for (logits, asks), (_, _, output) in zip(few.blocks(), whole.blocks, strict=True):
        mixed = logits.softmax(-1)
        missed = output - mixed @ own
        mixed = mixed if asks is None else mixed * asks
        mixed = mixed if fixed is None else mixed.masked_fill(fixed[:, :, None], 0)
        square += mixed.transpose(2, 3) @ mixed
        rest += mixed.transpose(2, 3) @ missed
    diagonal = square.diagonal(dim1=2, dim2=3)
    free = diagonal > 0
    mean = diagonal.sum(-1, keepdim=True) / free.sum(-1, keepdim=True).clamp_min(1)
    diagonal += (ridge * mean).where(free, torch.ones_like(diagonal))
    # A pseudoinverse takes long, and a factor exists where the ridge is not lost in rounding.
    if ridge < torch.finfo(square.dtype).eps ** 0.5:
        found = torch.linalg.pinv(square, hermitian=True) @ rest
    else:
        found = torch.cholesky_solve(rest, torch.linalg.cholesky_ex(square).L)
    return (own + found.to(own.dtype)).to(few.values.dtype)


def bounded_least_squares(square: Tensor, wanted: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return w [..., K] within `low` and `high` that minimizes w' square w - 2 wanted' w.

    Accelerated projected gradients, restarted where the direction turns, in columns of equal norm.

    Args:
        square: [..., K, K], columns' products with each other.
        wanted: [..., K], their products with the target.
        low: [..., K], positive.
        high: [..., K].
    """
    norm = square.diagonal(dim1=-2, dim2=-1).sqrt()
    norm = norm.where(norm > 0, torch.ones_like(norm))
    square = square / norm[..., None] / norm[..., None, :]
    wanted, low, high = wanted / norm, low * norm, high * norm
    step = 1 / _largest(square)
    weights = norm.clamp(low, high)
    ahead = weights
    pace = torch.ones_like(step)
    for _ in range(_ROUNDS):
        moved = (ahead - step * ((square @ ahead[..., None])[..., 0] - wanted)).clamp(low, high)
        turns = ((ahead - moved) * (moved - weights)).sum(-1, keepdim=True) > 0
        pace = torch.where(turns, torch.ones_like(pace), pace)
        following = (1 + (1 + 4 * pace * pace).sqrt()) / 2
        ahead = moved + (pace - 1) / following * (moved - weights)
        weights, pace = moved, following
    return weights / norm


def _largest(square: Tensor) -> Tensor:
    """Return an upper bound [..., 1] of the largest eigenvalue, close to it where all numbers are positive."""
    positive = square.abs()
    vector = torch.ones_like(square[..., :1])
    for _ in range(_POWERS):
        vector = positive @ vector
        # Small shares are lifted, so that the quotients stay bounded.
        vector = (vector / vector.amax(-2, keepdim=True).clamp_min(torch.finfo(vector.dtype).tiny)).clamp_min(1e-6)
    return (positive @ vector / vector).amax(-2).clamp_min(torch.finfo(vector.dtype).tiny)


def _zeros(part: MatchedPart, columns: int) -> Tensor:
    """Return zeros [B, H, K, columns] for sums: in double precision, where the device has it."""
    precise = torch.float32 if part.keys.device.type == "mps" else torch.float64
    return torch.zeros(*part.keys.shape[:3], columns, dtype=precise, device=part.keys.device)
