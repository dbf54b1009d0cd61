"""Protocols: the attributes of other packages' objects that kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvsieve.lazy import Tensor


class Queries(Protocol):
    """The part of `types.AttentionQueries` that a kernel reads."""

    @property
    def query(self) -> Tensor: ...

    @property
    def scale(self) -> float: ...

    @property
    def softcap(self) -> float | None: ...

    @property
    def sinks(self) -> Tensor | None: ...


class Length(Protocol):
    """Attributes of `core.kv_rows.DeviceLength`."""

    @property
    def count(self) -> Tensor: ...


class StoredRows(Protocol):
    """Attributes of `core.kv_rows.KVRows`."""

    @property
    def keys(self) -> Tensor: ...

    @property
    def values(self) -> Tensor: ...

    @property
    def body(self) -> Tensor | None: ...

    @property
    def tail(self) -> Tensor: ...

    @property
    def stride(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def length(self) -> Length | None: ...


class PromptGrid(Protocol):
    """Attributes of `core.blocks.BlockGrid`."""

    @property
    def length(self) -> int: ...

    @property
    def queries(self) -> int: ...

    @property
    def block(self) -> int: ...

    @property
    def pad(self) -> int: ...

    @property
    def query_blocks(self) -> int: ...


@dataclass(frozen=True)
class PackedBlocks:
    """Encoded keys or values of P blocks of T entries: the parts of `core.codes.Codes` and its format.

    Attributes:
        packed: uint8 [P, T, bytes].
        scale: float16 [P, 1, D], or [P, T, D / group].
        zero: the same shape, or None.
        levels: float32, the number of each code; None: the code itself.
        bits: per code.
        dim: channels.
        group: channels that share a scale; 0 for a scale per channel.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    levels: Tensor | None
    bits: int
    dim: int
    group: int
