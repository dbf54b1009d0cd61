"""8-bit integers per token: symmetric, from -127 to 127, as vectors in LLM.int8() (arXiv 2208.07339).

Each key and each value of a head is one scale, its largest absolute number over 127, and an integer per channel,
rounded to nearest.

Differences from the reference: stored entries instead of multiplied activations; no separate outlier channels
(`outlier` has them).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.codes import CodeFormat
from kvsieve.methods.codecs import BlockCodec
from kvsieve.planning.registry import register_method

_LEVELS = tuple(float(level) for level in range(-127, 128))


@register_method("int8", title="int8", paper="arXiv 2208.07339", phase="storage")
@dataclass(frozen=True, kw_only=True)
class Int8(BlockCodec, heads="own"):
    """Quantize to 8-bit integers with a scale per token."""

    def keys(self, dim: int) -> CodeFormat:
        return CodeFormat(8, "token", dim, zero=False, levels=_LEVELS)

    def values(self, dim: int) -> CodeFormat:
        return self.keys(dim)
