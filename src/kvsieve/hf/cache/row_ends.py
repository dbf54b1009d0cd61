"""Rows of a batch that ended early, and the padding appended by generate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowEnds:
    """Padding after the ends of a batch's answers, in columns of the caller's conversation.

    Generate feeds the last token of an ended row, and padding after it, until all rows end. Alone, the row would get
    that token with its next prompt. So a later turn hides the column where it was fed, and feeds it in place of the
    last column of padding, which was not fed.

    Attributes:
        hidden: bool [B, columns], True for columns that are not tokens.
        moved: int64 [B, columns], tokens fed in place of padding, -1 elsewhere.
        fed: True if hidden columns were fed to the model.
        unknown: True if padding cannot be distinguished from an end token.
    """

    hidden: Tensor
    moved: Tensor
    fed: bool = True
    unknown: bool = False

    def rows(self, rows: Tensor) -> RowEnds | None:
        """Return a copy with row ``rows[i]`` as row i; None if none of these ended before others."""
        at = rows.to(self.hidden.device)
        hidden = self.hidden.index_select(0, at)
        if not self.unknown and not bool(hidden.any()):
            return None
        return dataclasses.replace(self, hidden=hidden, moved=self.moved.index_select(0, at))

    def then(self, seen: int, padding: Tensor, unknown: bool) -> RowEnds:
        """Return the state after a further answer.

        Args:
            seen: columns before the answer.
            padding: bool [B, N] of the answer's columns.
            unknown: see RowEnds.
        """
        hidden = torch.cat([_fitted(self.hidden, seen, False).to(padding.device), padding], 1)
        return RowEnds(hidden, _fitted(self.moved, hidden.shape[1], -1), True, unknown or self.unknown)

    def begin_turn(self, ids: Tensor, seen: int) -> RowEnds:
        """Return the state for a turn with ids [B, N] after `seen` columns: last tokens are fed with it."""
        hidden = self.hidden
        last = self.hidden.shape[1] - 1
        if last != seen or not bool(hidden[:, last].any()):
            return self
        rows = hidden[:, last].nonzero()[:, 0]
        padding = hidden[rows].flip(1).cumprod(1).sum(1)
        end = last - padding
        hidden = hidden.clone()
        moved = self.moved.clone()
        hidden[rows, end], hidden[rows, last] = True, False
        moved[rows, last] = ids.to(moved.device)[rows, end]
        return dataclasses.replace(self, hidden=hidden, moved=moved)

    def corrected(self, mask: Tensor) -> Tensor:
        """Return a mask [B, columns] of the caller's with 0 for columns that are no tokens and 1 for tokens moved."""
        hidden = _fitted(self.hidden, mask.shape[1], False).to(mask.device)
        moved = _fitted(self.moved, mask.shape[1], -1).to(mask.device) >= 0
        return mask.masked_fill(hidden, 0).masked_fill(moved, 1)

    def as_read(self, ids: Tensor) -> Tensor:
        """Return the caller's ids [B, columns] with the tokens fed in place of padding."""
        moved = _fitted(self.moved, ids.shape[1], -1).to(ids.device)
        return torch.where(moved < 0, ids, moved)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor."""
        yield from (self.hidden, self.moved)


def _fitted(part: Tensor, columns: int, filler: int) -> Tensor:
    """Return the first columns of [B, N], with filler where it has fewer."""
    return torch.nn.functional.pad(part[:, :columns], (0, max(columns - part.shape[1], 0)), value=filler)
