"""Edits of stored conversations, for prompts that do not continue them: reasoning stripped, a message changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsieve.hf.edit.difference import pieces_between
from kvsieve.hf.edit.editor import WINDOW
from kvsieve.hf.edit.layout import Arrangement
from kvsieve.hf.reuse import LEAST, FoundPrompt

# Rule of the entries that edits leave behind, in a conversation's record.
RULE = f"edit:window={WINDOW}"
# Most conversations whose tokens are remembered, and most tokens of them together.
_CONVERSATIONS = 4096
_TOKENS = 1 << 22


@dataclass(frozen=True)
class SessionEdit:
    """An edit that makes a stored conversation the beginning of a prompt.

    Attributes:
        known: int64 [N], tokens of the conversation.
        pieces: spans of them and new tokens, in the order of the prompt; see Editor.rewrite.
        size: tokens of that beginning.
        reused: those with entries of the conversation that are not prefilled again.
        why_not: clause why the prompt is prefilled instead, or None.
        find: returns the conversation from the store, or a beginning of it, or None.
    """

    known: Tensor
    pieces: list[tuple[int, int] | Tensor]
    size: int
    reused: int
    why_not: str | None
    find: Callable[[], FoundPrompt | None]


def edit_between(
    known: Tensor, ids: Sequence[int], find: Callable[[], FoundPrompt | None], why_not: str | None = None
) -> SessionEdit:
    """Return the edit of a conversation for a prompt; the prompt's new end is left to prefill.

    Args:
        known: int64 [N], tokens of the conversation.
        ids: the prompt.
        find: see SessionEdit.
        why_not: see SessionEdit.
    """
    pieces = pieces_between(known, torch.tensor(ids[:-1]))
    while pieces and not _is_worth(pieces[-1]):
        pieces.pop()
    if not pieces:
        return SessionEdit(known, [], 0, 0, why_not, find)
    layout = Arrangement.of(known).rewritten(pieces)
    size = len(layout.ids)
    reused = size - sum(end - start for start, end in layout.runs(WINDOW))
    if 2 * reused < size:
        why_not = why_not or f"it would reuse {reused} of the prompt's first {size} tokens, less than half"
    return SessionEdit(known, pieces, size, reused, why_not, find)


def _is_worth(piece: tuple[int, int] | Tensor) -> bool:
    """Return True for a span at the end of which an edit saves a prefill: all of a shorter one is prefilled again."""
    return not isinstance(piece, Tensor) and (piece[0] == 0 or piece[1] - piece[0] > WINDOW)


class LatestConversations:
    """Tokens of the conversation stored last for each key, bounded in number and tokens; the oldest are forgotten."""

    def __init__(self, most: int = _CONVERSATIONS, tokens: int = _TOKENS) -> None:
        self._known: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._most = most
        self._tokens = tokens
        self._size = 0

    def put(self, key: Hashable, ids: Sequence[int]) -> None:
        self._size -= len(self._known.pop(key, ()))
        self._known[key] = torch.tensor(ids)
        self._size += len(ids)
        while len(self._known) > self._most or self._size > self._tokens:
            self._size -= len(self._known.popitem(last=False)[1])

    def get(self, key: Hashable) -> Tensor | None:
        return self._known.get(key)


def is_worthwhile(edit: SessionEdit, exact: int) -> bool:
    """Return True if an edit reuses enough tokens more than an exact prefix of `exact` tokens."""
    return edit.reused - exact >= LEAST
