"""8-bit floats: e4m3 (FP8 Formats for Deep Learning, arXiv 2209.05433), with a scale per KV head and block.

Numbers are rounded to the nearest of the format's, scaled such that the largest of a block becomes +-448.

Differences from the reference: codes are the numbers' ranks instead of their bit patterns, with the same decoded
values; ties round down; -0 is 0. The scale of a block is stored once per channel, which costs an eighth of a bit per
number of a block of 128 and needs no special layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.codebooks import float8_levels
from kvsieve.core.codes import CodeFormat, fit_range
from kvsieve.lazy import Tensor
from kvsieve.methods.codecs import BlockCodec
from kvsieve.planning.registry import register_method


@register_method("fp8", title="fp8", paper="arXiv 2209.05433", phase="storage")
@dataclass(frozen=True, kw_only=True)
class FP8(BlockCodec, heads="own"):
    """Quantize to 8-bit floats with a scale per head and block."""

    def keys(self, dim: int) -> CodeFormat:
        return CodeFormat(8, "channel", zero=False, levels=float8_levels())

    def values(self, dim: int) -> CodeFormat:
        return self.keys(dim)

    def fit(self, form: CodeFormat, x: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
        scale, _ = fit_range(form, x, dim)
        return scale.amax(-1, keepdim=True).expand_as(scale), None
