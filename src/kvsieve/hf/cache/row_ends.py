"""Rows of a batch that ended early, and the padding that generate appended to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowEnds:
    """Padding behind the ends of a batch's answers, in columns of the conversation as its caller knows it.

    Generate feeds the last token of a row that has ended, and padding behind it, as long as another row goes on. Alone,
    the row would read that token with its next prompt. So a later turn hides the column where it was fed, and reads it
    in place of the last column of padding, which was not fed.

    Attributes:
        hidden: bool [B, columns], True for columns that are no tokens.
        moved: int64 [B, columns], tokens that are read in place of padding, -1 elsewhere.
        fed: True where hidden columns were fed to the model.
        unknown: True if padding cannot be distinguished from an end token.
    """

    hidden: Tensor
    moved: Tensor
    fed: bool = True
    unknown: bool = False

    def rows(self, rows: Tensor) -> RowEnds | None:
        """Copy it with row ``rows[i]`` as row i; None where none of these has ended before others."""
        at = rows.to(self.hidden.device)
        hidden = self.hidden.index_select(0, at)
        if not self.unknown and not bool(hidden.any()):
            return None
        return dataclasses.replace(self, hidden=hidden, moved=self.moved.index_select(0, at))

    def then(self, seen: int, padding: Tensor, unknown: bool) -> RowEnds:
        """Return what a further answer makes of it.

        Args:
            seen: columns before the answer.
            padding: bool [B, N] of the answer's columns.
            unknown: see RowEnds.
        """
        hidden = torch.cat([_fitted(self.hidden, seen, False).to(padding.device), padding], 1)
        return RowEnds(hidden, _fitted(self.moved, hidden.shape[1], -1), True, unknown or self.unknown)

    def begin_turn(self, ids: Tensor, seen: int) -> RowEnds:
        """Return what holds for a turn that reads ids [B, N] behind `seen` columns: last tokens are read with it."""
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
        """Return ids [B, columns] of the caller's with the tokens that are read in place of padding."""
        moved = _fitted(self.moved, ids.shape[1], -1).to(ids.device)
        return torch.where(moved < 0, ids, moved)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor held."""
        yield from (self.hidden, self.moved)


def _fitted(part: Tensor, columns: int, filler: int) -> Tensor:
    """Return the first columns of [B, N], with filler where it has fewer."""
    return torch.nn.functional.pad(part[:, :columns], (0, max(columns - part.shape[1], 0)), value=filler)
