"""Random rotation and codebooks for the normal distribution: QuaRot (arXiv 2404.00456), TurboQuant (arXiv 2504.19874).

A random rotation spreads what is large over all channels: the channels of a turned vector are nearly independent, and
distributed normally with the same variance. So one scale per vector is enough, and the best scalar codebook is known
beforehand: Lloyd's and Max's for the normal distribution. Queries are turned instead of stored keys, and the weighted
sum of values is turned back once.

Differences from QuaRot: the rotation is applied to post-RoPE keys and to values in attention instead of being folded
into the weights; levels are those of the codebook instead of a range's whole numbers. From TurboQuant: the scale is
fitted to the codes chosen, the best of five, instead of the vector's norm: a value's by least squares; a key's keeps
the key's product with itself, which takes the place of a second stage that makes products unbiased, and does half of
it. The codebook is that of the normal distribution, the limit of a turned vector's; there is one number of bits for
all channels. From both: the mean of each key channel over the first entries encoded is taken off before and added when
they are read, since some models' keys have a large constant part, which would take the levels of what differs between
tokens; attention over them is exact in that part. Key channels are then divided by the root of their standard
deviation, and queries multiplied by it: as if scales of queries and keys had been made even, the error of a product
hardly depends on which of the two is large. Of keys that an evictor sets aside (`rest=`) that is no guess: a
channel is divided by the root of its deviation over its size in the prompt's last 32 queries, by mean squares, to which
all channels' mean is added, and the codes of a key are chosen one after the other by what products with these queries
miss, as QuantEase (arXiv 2309.01885) chooses those of weights (`core/shaping.py`). The first entry stays exact
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
from kvsieve.registry import register_method


@register_method(
    "rotated",
    title="QuaRot, TurboQuant",
    paper="arXiv 2404.00456, 2504.19874",
    phase="storage",
    query_aware=False,
    summary="Rotate at random, then quantize to the best levels for normally distributed numbers.",
)
@dataclass(frozen=True, kw_only=True)
class Rotated(BlockCodec, heads="own"):
    """Encode keys and values per token, turned by a random rotation, by the best scalar codebook.

    bits: 2, 3 or 4.
    key_bits: of keys, 2, 3 or 4; None for as many as of values.
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
