"""Shared parameters of codecs."""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.methods.base import check_int
from kvsieve.planning.roles import Codec


@dataclass(frozen=True, kw_only=True)
class BlockCodec(Codec, heads="own"):
    """Base with parameters for blocks and exact entries.

    block: entries that are encoded together, per KV head. tail: most newest entries that stay exact. sinks: first
    entries that stay exact: in most models the first token's key is an outlier with much attention.
    """

    block: int = 128
    tail: int = 64
    sinks: int = 1

    def __post_init__(self) -> None:
        for name, least in (("block", 8), ("tail", 1), ("sinks", 0)):
            check_int(self, name, getattr(self, name), least)


@dataclass(frozen=True, kw_only=True)
class GroupCodec(BlockCodec, heads="own"):
    """A codec with keys per channel and values per token, in groups of channels.

    group: channels of a value that share a scale; smaller if a head has fewer.
    """

    group: int = 64

    def __post_init__(self) -> None:
        check_int(self, "group", self.group, 8)
        super().__post_init__()
