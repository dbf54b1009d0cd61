"""Half-quadratic zero points: HQQ, Half-Quadratic Quantization of Large Machine Learning Models (Mobius Labs, 2023).

A range's extremes need not be the best ends for its codes. HQQ minimises a norm of the errors that tolerates outliers,
sum |x - decoded| ** p with p = 0.7, over the zero, alternating two steps: errors e are shrunk to their outliers,
sign(e) max(|e| - |e| ** (p - 1) / beta, 0), then the zero becomes the mean of x - e - code * scale, with new codes;
beta grows by 1% each time.

Differences from the reference: errors are measured in steps of the group's scale, so that beta = 10 does not depend on
the numbers' size; each group keeps the zero of its least error, where the reference stops all groups together; it
encodes weights, here keys per channel and values per token, as in `kivi`, with the same differences.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.codes import CodeFormat, fit_range
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import check_int
from kvsieve.methods.kivi import KIVI
from kvsieve.planning.registry import register_method

_P = 0.7
_BETA = 10.0
_GROWTH = 1.01


@register_method("hqq", title="HQQ", paper="mobiusml.github.io/hqq_blog", phase="storage")
@dataclass(frozen=True, kw_only=True)
class HQQ(KIVI, heads="own"):
    """Quantize like kivi, with the zero points of least error; outliers count little.

    rounds: of finding the zeros.
    """

    rounds: int = 8

    def __post_init__(self) -> None:
        check_int(self, "rounds", self.rounds, 1, most=100)
        super().__post_init__()

    def fit(self, form: CodeFormat, x: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
        scale, best = fit_range(form, x, dim)
        assert best is not None
        # In steps of the scale: a number is its code plus the zero.
        step = torch.where(scale > 0, scale, torch.ones_like(scale))
        steps = x / step
        zero = best / step
        best = zero
        least = torch.full_like(best, float("inf"))
        beta = _BETA
        top = (1 << form.bits) - 1
        for _ in range(self.rounds + 1):
            codes = (steps - zero).round_().clamp_(0, top)
            error = steps - codes - zero
            size = error.abs()
            found = size.pow(_P).sum(dim, keepdim=True)
            best = torch.where(found < least, zero, best)
            least = torch.minimum(found, least)
            outside = error.sign() * (size - size.clamp_min(1e-6).pow(_P - 1) / beta).clamp_min_(0)
            zero = (steps - outside - codes).mean(dim, keepdim=True)
            beta *= _GROWTH
        return scale, best * step
