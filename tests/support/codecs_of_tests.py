"""Codecs for tests: one that loses nothing of small whole numbers, and one of any two formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvsieve.core.codes import CodeFormat
from kvsieve.planning.roles import Codec


@dataclass(frozen=True, kw_only=True)
class Whole(Codec, heads="own"):
    """8 bits of a scale of 1: whole numbers up to 2,048 that differ by at most 255 within a group."""

    axis: Literal["channel", "token"] = "channel"
    block: int = 8
    tail: int = 4
    sinks: int = 0

    def keys(self, dim: int) -> CodeFormat:
        return CodeFormat(8, self.axis, dim)

    def values(self, dim: int) -> CodeFormat:
        return CodeFormat(8, "token", dim)

    def fit(self, form: CodeFormat, x: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
        low = x.amin(dim, keepdim=True)
        return torch.ones_like(low), low


@dataclass(frozen=True, kw_only=True)
class Formats(Codec, heads="own"):
    """Keys in one format, values in another."""

    of_keys: CodeFormat
    of_values: CodeFormat
    block: int = 16
    tail: int = 5

    def keys(self, dim: int) -> CodeFormat:
        return self.of_keys

    def values(self, dim: int) -> CodeFormat:
        return self.of_values
