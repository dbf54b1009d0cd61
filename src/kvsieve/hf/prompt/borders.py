"""Borders between the passes over a prompt, counted in tokens: a mask may hide some between others."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.hf.forward.compact import has_holes


def ends_in_columns(
    mask: Tensor | None, total: int, ends: Callable[[int], list[int]], window: int, *, exact: bool
) -> list[int]:
    """Return the ends of passes, in columns of a turn's prompt.

    Args:
        mask: bool [B, total], False for padding; None without padding.
        total: columns.
        ends: returns the ends of passes over so many tokens.
        window: last tokens of each row in the last pass.
        exact: raise if rows would have other borders than each alone.

    Raises:
        UnsupportedOptionError: rows hide tokens at different places, and `exact`.
    """
    whole = ends(total)
    # A single pass needs no look at the mask, for which the host would wait: fewer tokens are no more passes.
    if mask is None or len(whole) == 1 or not has_holes(mask):
        return whole
    rows = [row.nonzero()[:, 0].tolist() for row in mask.cpu()]
    longest = max(map(len, rows))
    found = []
    latest = min(row[max(len(row) - max(window, 1), 0)] for row in rows if row)
    for end in ends(longest)[:-1]:
        left = longest - end
        # After the border every row has so many tokens, or all of its own.
        border = min(row[len(row) - left] for row in rows if len(row) >= left)
        if exact and any(sum(column >= border for column in row) != min(left, len(row)) for row in rows):
            raise UnsupportedOptionError(
                "attention_mask hides tokens of rows at different places, and the plan acts on every chunk, which "
                "would end elsewhere than for each row alone: leave chunk= out, or read one row at a time"
            )
        found.append(min(border, latest))
    return [*dict.fromkeys(border for border in found if border), total]


def question_columns(mask: Tensor | None, tokens: int) -> int:
    """Return the number of last columns with the last `tokens` tokens of every row of a mask [B, N].

    Raises:
        InputError: rows hide tokens of their questions at different places.
    """
    if mask is None or not tokens:
        return tokens
    columns = ((mask.bool().flip(1).cumsum(1) < tokens).sum(1) + 1).tolist()
    if min(columns) < max(columns):
        raise InputError(
            f"question_tokens={tokens} are the last {min(columns)} columns of one row and the last {max(columns)} of "
            "another, for attention_mask hides tokens there: leave hidden tokens out of questions"
        )
    return int(columns[0])
