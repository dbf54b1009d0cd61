"""KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache (arXiv 2402.02750).

Keys are encoded per channel, each channel's scale and zero spanning a block of tokens; values per token, each group of
channels with its own. A few key channels are much larger than the others, in all tokens: they get scales of their own.

Differences from the reference: keys and values leave the exact entries together, a block at a time, where the paper
lets values go one by one; the exact entries shrink with what is stored (`Codec.newest`); blocks of 128 tokens, where
the paper has groups of 32 within a residual of 128: `block=32` is its setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsieve.core.codes import CodeFormat
from kvsieve.methods.base import check_int
from kvsieve.registry import register_method
from kvsieve.roles import Codec


@register_method(
    "kivi",
    title="KIVI",
    paper="arXiv 2402.02750",
    phase="storage",
    query_aware=False,
    summary="Keys in few bits per channel, values per token.",
)
@dataclass(frozen=True, kw_only=True)
class KIVI(Codec, heads="own"):
    """Encode keys per channel and values per token, as whole numbers between each group's least and largest.

    bits: 2, 3, 4 or 8, of keys and values alike.
    group: channels of a value that share a scale; smaller where a head has fewer.
    block: tokens that share a channel's scale, encoded together.
    tail: newest entries that stay exact, at most.
    sinks: first entries that stay exact.
    """

    bits: Literal[2, 3, 4, 8] = 4
    group: int = 64
    block: int = 128
    tail: int = 128
    sinks: int = 0

    def __post_init__(self) -> None:
        for name, least in (("group", 8), ("block", 8), ("tail", 1), ("sinks", 0)):
            check_int(self, name, getattr(self, name), least)

    def keys(self, dim: int) -> CodeFormat:
        return CodeFormat(self.bits, "channel")

    def values(self, dim: int) -> CodeFormat:
        return CodeFormat(self.bits, "token", min(self.group, dim))
