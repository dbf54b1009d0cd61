"""Random rotation and codebooks for the normal distribution: QuaRot (arXiv 2404.00456), TurboQuant (arXiv 2504.19874).

A random rotation spreads outliers over all channels: the channels of a rotated vector are nearly independent and
normally distributed with equal variance. So one scale per vector suffices, and the best scalar codebook is known in
advance: Lloyd's and Max's for the normal distribution. Queries are rotated instead of stored keys, and the weighted sum
of values is rotated back once.

Differences from QuaRot: the rotation is applied to post-RoPE keys and to values in attention instead of being folded
into the weights; levels are the codebook's instead of integers of a range. From TurboQuant: the scale is fitted to the
codes, the best of five, instead of the vector's norm: for a value by least squares; for a key such that the key's
product with itself is preserved, which replaces a second stage that makes products unbiased, with half of its effect.
The codebook is that of the normal distribution, the limit for a rotated vector; all channels have the same number of
bits. From both: the mean of each key channel over the first entries encoded is subtracted, and attention adds its exact
part, since some models' keys have a large constant part, which would use up levels. Key channels are then divided by
the root of their standard deviation, and queries multiplied by it: as if scales of queries and keys were equal, the
error of a product hardly depends on which of the two is large. For keys that an evictor quantizes (`rest=`) the queries
are known: a channel is divided by the root of its deviation over its size in the prompt's last 32 queries, by mean
squares plus all channels' mean, and the codes of a key are chosen one after the other by the errors of products with
these queries, as in QuantEase (arXiv 2309.01885) for weights (`core/shaping.py`). The first entry stays exact
(`sinks`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from kvsieve.core.codebooks import gaussian_levels, level_scale
from kvsieve.core.codes import CodeFormat
from kvsieve.lazy import Tensor
from kvsieve.methods.codecs import BlockCodec
from kvsieve.planning.registry import register_method


@register_method("rotated", title="QuaRot, TurboQuant", paper="arXiv 2404.00456, 2504.19874", phase="storage")
@dataclass(frozen=True, kw_only=True)
class Rotated(BlockCodec, heads="own"):
    """Rotate at random, then quantize to the best levels for normally distributed numbers.

    bits: 2, 3 or 4.
    key_bits: of keys, 2, 3 or 4; None for `bits`.
    """

    bits: Literal[2, 3, 4] = 4
    key_bits: Literal[2, 3, 4] | None = None

    def keys(self, dim: int) -> CodeFormat:
        return dataclasses.replace(_format(self.key_bits or self.bits, dim), centered=True, balanced=True)

    def values(self, dim: int) -> CodeFormat:
        return _format(self.bits, dim)

    def fit(self, form: CodeFormat, x: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
        return level_scale(form, x, dim, products=form.centered), None


def _format(bits: int, dim: int) -> CodeFormat:
    return CodeFormat(bits, "token", dim, zero=False, levels=gaussian_levels(bits), rotated=True)
