"""Entries that must stay stored, protected ones and quotas of prompt parts, and the check that they do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsieve.errors import InputError
from kvsieve.types import Quotas


@dataclass(frozen=True)
class ProtectedTokens:
    """Tokens of a conversation that must stay stored, by token index; tokens from W are free.

    Attributes:
        protected: bool [B, W], tokens that must stay; None for none.
        segments: int32 [B, W], the part with a quota of each token, from 1; 0 for none. None: no quotas.
        counts: int64 [B, S], entries of each part that must stay.
    """

    protected: Tensor | None = None
    segments: Tensor | None = None
    counts: Tensor | None = None

    def at(self, index: Tensor, valid: Tensor | None) -> tuple[Tensor | None, Quotas | None]:
        """Look up stored entries.

        Args:
            index: int [B, H, N], token index of each entry.
            valid: bool [B, H or 1, N], False for padding and filler; None if there is none.

        Returns:
            Protected entries, bool [B, H, N], and their quotas; each may be None.
        """
        protected = _looked_up(self.protected, index, valid)
        quotas = None
        if self.segments is not None and self.counts is not None:
            segment = _looked_up(self.segments, index, valid)
            assert segment is not None
            quotas = Quotas(segment, self.counts.to(index.device))
        return protected, quotas

    def needed(self, among: int | Tensor) -> list[int]:
        """Count the entries per row that must stay.

        Args:
            among: count only the first so many tokens, or those where a bool [B, W] is True.
        """
        protected, segments, counts = (None if part is None else part.cpu() for part in self._parts())
        if segments is None or counts is None:
            assert protected is not None
            return _part(protected, among).sum(-1).tolist()
        protected = torch.zeros_like(segments, dtype=torch.bool) if protected is None else protected
        protected = _part(_wider(protected, segments.shape[1]), among)
        segments = _part(segments, among)
        total = protected.sum(-1)
        for part, count in enumerate(counts.T, 1):
            inside = segments == part
            quota = torch.minimum(count, inside.sum(-1))
            total = total + (quota - (inside & protected).sum(-1)).clamp_min(0)
        return total.tolist()

    def is_missing(self, width: int, index: Tensor, valid: Tensor | None) -> bool:
        """Return whether a layer lacks, in some head, entries that must stay.

        Args:
            width: tokens of each row that the layer has seen, padding included.
            index: see `at`.
            valid: see `at`.
        """
        protected, quotas = self.at(index, valid)
        if protected is not None and self.protected is not None:
            total = self.protected[:, :width].sum(-1, keepdim=True).to(index.device)
            if bool((protected.sum(-1) < total).any()):
                return True
        if quotas is None or self.segments is None:
            return False
        parts = quotas.counts.shape[1]
        to_come = _sizes(self.segments[:, None, width:], parts).to(index.device)
        return bool((_sizes(quotas.segment, parts) + to_come < quotas.counts[:, None]).any())

    def joined(self, other: ProtectedTokens) -> ProtectedTokens:
        """Add the protected tokens of a later turn.

        Args:
            other: covers at least as many tokens as this one.

        Raises:
            InputError: quotas of the two overlap.
        """
        protected = _both(self.protected, other.protected, torch.logical_or)
        if self.segments is None or other.segments is None:
            divided = self if other.segments is None else other
            return ProtectedTokens(protected, _both(self.segments, other.segments, torch.add), divided.counts)
        assert self.counts is not None and other.counts is not None
        old = _wider(self.segments, other.segments.shape[1])
        if bool(((old > 0) & (other.segments > 0)).any()):
            raise InputError("quotas: a span overlaps one of an earlier turn; make them disjoint")
        shifted = other.segments + (other.segments > 0).int() * self.counts.shape[1]
        return ProtectedTokens(protected, old + shifted, torch.cat([self.counts, other.counts], 1))

    def reindexed(self, token_index: Tensor) -> ProtectedTokens:
        """Return the protection for a prompt made of the tokens at `token_index`, int64 [B, K], -1 for filler."""
        parts = (_looked_up(part, token_index[:, None], None) for part in (self.protected, self.segments))
        protected, segments = (None if part is None else part[:, 0] for part in parts)
        return dataclasses.replace(self, protected=protected, segments=segments)

    def rows(self, rows: Tensor) -> ProtectedTokens:
        """Return the protection with row ``rows[i]`` as row i."""
        return ProtectedTokens(
            *(None if part is None else part.index_select(0, rows.to(part.device)) for part in self._parts())
        )

    def to(self, device: torch.device) -> ProtectedTokens:
        return ProtectedTokens(*(None if part is None else part.to(device) for part in self._parts()))

    def tensors(self) -> list[Tensor]:
        return [part for part in self._parts() if part is not None]

    def _parts(self) -> tuple[Tensor | None, ...]:
        return self.protected, self.segments, self.counts


def lost(protected: Tensor | None, quotas: Quotas | None, indices: Tensor, real: Tensor | None) -> str | None:
    """Describe the entries that a selection drops although they must stay, as a clause, or None.

    Args:
        protected: bool [B, H, M], of the entries to select from; None for none.
        quotas: of the same entries; None for none.
        indices: int64 [B, X, K], X a multiple of H.
        real: bool [B, X, K], False for filler; None for none.
    """
    if protected is not None:
        after = _chosen(protected, indices, real).sum(-1)
        before = protected.sum(-1).repeat_interleave(indices.shape[1] // protected.shape[1], 1)
        missing = int((before - after).max())
        if missing > 0:
            return f"it drops {missing} protected entries of a head: it does not honour protect="
    if quotas is not None:
        parts = quotas.counts.shape[1]
        before = _sizes(quotas.segment, parts).repeat_interleave(indices.shape[1] // quotas.segment.shape[1], 1)
        left = _sizes(_chosen(quotas.segment, indices, real), parts)
        short = torch.minimum(before, quotas.counts[:, None]) - left
        if int(short.max()) > 0:
            return f"it leaves a quota {int(short.max())} entries short in a head: it does not honour quotas="
    return None


def _sizes(segment: Tensor, parts: int) -> Tensor:
    """Return the number of entries of each part, int64 [B, H, S]."""
    flat = torch.zeros(*segment.shape[:2], parts + 1, dtype=torch.int64, device=segment.device)
    return flat.scatter_add_(2, segment.long(), torch.ones_like(segment, dtype=torch.int64))[..., 1:]


def _chosen(part: Tensor, indices: Tensor, real: Tensor | None) -> Tensor:
    picked = part.repeat_interleave(indices.shape[1] // part.shape[1], 1).gather(2, indices)
    return picked if real is None else picked.masked_fill(~real, 0)


def _looked_up(part: Tensor | None, index: Tensor, valid: Tensor | None) -> Tensor | None:
    """Return values of `part` [B, W] at token indices `index` [B, H, N]; 0 for filler, padding and later tokens."""
    if part is None:
        return None
    width = part.shape[1]
    at = index.long().clamp(0, width - 1)
    found = part.to(index.device)[:, None].expand(-1, index.shape[1], -1).gather(2, at)
    outside = (index < 0) | (index >= width)
    return found.masked_fill(outside if valid is None else outside | ~valid, 0)


def _part(part: Tensor, among: int | Tensor) -> Tensor:
    return part[:, :among] if isinstance(among, int) else part * among.cpu()


def _wider(part: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(part, (0, width - part.shape[1]))


def _both(one: Tensor | None, other: Tensor | None, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return join(_wider(one, other.shape[1]), other)
