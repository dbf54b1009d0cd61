"""KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache (arXiv 2402.02750).

Keys are encoded per channel, with a scale and zero for each channel of a block of tokens; values per token, with one
for each group of channels. A few key channels are much larger than the others in all tokens: they get separate scales.

Differences from the reference: keys and values are encoded together, a block at a time, where the paper encodes values
one by one; the number of exact entries shrinks with the stored ones (`Codec.newest`); blocks of 128 tokens and groups
of 64 channels, where the paper has groups of 32 within a residual of 128 (`block=32`, `group=32`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsieve.core.codes import CodeFormat
from kvsieve.methods.codecs import GroupCodec
from kvsieve.planning.registry import register_method


@register_method("kivi", title="KIVI", paper="arXiv 2402.02750", phase="storage")
@dataclass(frozen=True, kw_only=True)
class KIVI(GroupCodec, heads="own"):
    """Quantize keys per channel and values per token.

    bits: 2, 3, 4 or 8, of keys and values.
    """

    bits: Literal[2, 3, 4, 8] = 4

    def keys(self, dim: int) -> CodeFormat:
        return CodeFormat(self.bits, "channel")

    def values(self, dim: int) -> CodeFormat:
        return CodeFormat(self.bits, "token", min(self.group, dim))
