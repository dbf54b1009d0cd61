"""Codecs: encodings of stored entries."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from kvsieve.planning.roles.base import Role

if TYPE_CHECKING:
    from torch import Tensor

    from kvsieve.core.codes import CodeFormat

# Last queries of a prompt for which evicted keys are encoded.
ASKED = 32


class Codec(Role, heads="own"):
    """Encodes stored entries in few bits once they are no longer among the newest.

    An entry is encoded once, in a block of up to `block` entries of its KV head; attention decodes blocks on the fly.
    The newest entries stay exact: `tail` of them, or 1/32 of those stored if that is fewer, plus entries after a prompt
    that do not yet fill a block. Subclasses are dataclasses with these as fields and may change the defaults.
    """

    @property
    def tail(self) -> int:
        """Newest entries that stay exact, at most."""
        return 64

    @property
    def sinks(self) -> int:
        """First entries that stay exact."""
        return 0

    @property
    def block(self) -> int:
        """Entries encoded together, per KV head."""
        return 128

    @abstractmethod
    def keys(self, dim: int) -> CodeFormat:
        """Return the format of keys of `dim` channels."""

    @abstractmethod
    def values(self, dim: int) -> CodeFormat:
        """Return the format of values of `dim` channels."""

    def fit(self, form: CodeFormat, x: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
        """Return scale and zero of numbers along a dimension, which keeps size 1.

        Args:
            form: the format of keys or of values.
            x: float32 [N, T, D], or [N, T, groups, group] for axis "token".
            dim: the dimension that shares a scale.
        """
        from kvsieve.core.codes import fit_range

        return fit_range(form, x, dim)

    def newest(self, stored: int) -> int:
        """Return the number of newest entries that stay exact out of `stored`."""
        return min(self.tail, max(stored // 32, 1))
