"""Parts of other packages' objects that kernels read."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Terms(Protocol):
    """The part of `types.AttentionTerms` that a kernel reads."""

    @property
    def softcap(self) -> float | None: ...

    @property
    def sinks(self) -> Tensor | None: ...


class Length(Protocol):
    """The part of `core.kv_rows.DeviceLength` that a kernel reads."""

    @property
    def count(self) -> Tensor: ...


class StoredRows(Protocol):
    """The part of `core.kv_rows.KVRows` that a kernel reads."""

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
