"""Outliers: KVQuant's dense and sparse parts (arXiv 2401.18079), GEAR's outliers (arXiv 2403.05527).

A few extreme numbers widen the range of codes. The numbers of a block farthest from the mean of their group, in
standard deviations, are excluded from the range and stored separately: position, and difference from the code.

Differences from KVQuant: levels are evenly spaced instead of fitted on calibration data; keys are encoded after RoPE;
outliers are chosen per block when it is encoded, instead of a share of each vector by calibrated thresholds. From GEAR:
there is no low-rank part; outliers are chosen per block and not per vector. Keys per channel and values per token are
as in `kivi`, with the same differences.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.codes import CodeFormat
from kvsieve.errors import PlanError, UnsupportedModelError, short
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.kivi import KIVI
from kvsieve.planning.registry import register_method

# Positions in a block have 16 bits.
_PLACES = 1 << 16


@register_method("outlier", title="KVQuant, GEAR", paper="arXiv 2401.18079, 2403.05527", phase="storage")
@dataclass(frozen=True, kw_only=True)
class Outlier(KIVI, heads="own"):
    """Quantize like kivi, and store outliers separately.

    share: numbers of a block that are outliers; 32 bits each.
    """

    share: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.share <= 0.5:
            raise PlanError(
                f"{type(self).__name__}: share must be a number above 0 and of at most 0.5, e.g. 0.01, got "
                f"{short(self.share)}"
            )
        super().__post_init__()

    def keys(self, dim: int) -> CodeFormat:
        return CodeFormat(self.bits, "channel", apart=self._apart(dim))

    def values(self, dim: int) -> CodeFormat:
        return CodeFormat(self.bits, "token", min(self.group, dim), apart=self._apart(dim))

    def _apart(self, dim: int) -> int:
        if self.block * dim > _PLACES:
            raise UnsupportedModelError(
                f"its heads have {dim} channels, and a block of {self.block} entries of them more than {_PLACES} "
                f"numbers, too many for places of 16 bits; set block={_PLACES // dim}"
            )
        return max(1, round(self.share * self.block * dim))

    def fit(self, form: CodeFormat, x: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
        mean = x.mean(dim, keepdim=True)
        spread = (x - mean).square().mean(dim, keepdim=True).sqrt()
        far = (x - mean).abs() / spread.clamp_min(torch.finfo(torch.float32).tiny)
        # The mean stays inside, so that every group has a range.
        most = far.flatten(1).topk(form.apart).values[:, -1].clamp_min(1.0).view(-1, *[1] * (x.ndim - 1))
        outside = far > most
        low = x.masked_fill(outside, float("inf")).amin(dim, keepdim=True)
        high = x.masked_fill(outside, float("-inf")).amax(dim, keepdim=True)
        return (high - low) / ((1 << form.bits) - 1), low
