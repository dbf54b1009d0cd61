"""The text of each token, merged into pieces that end between characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvsieve.detokenize import special_ids

# A character has at most so many bytes, and a token at least one.
_MOST = 4


@dataclass(frozen=True)
class Piece:
    """Text of a token, or of several that encode one character.

    Attributes:
        start: first token.
        end: end of the tokens, exclusive.
        text: the text.
        control: True for a control token, such as the end of a turn.
    """

    start: int
    end: int
    text: str
    control: bool = False


def text_pieces(tokenizer: Any, ids: Sequence[int]) -> tuple[Piece, ...]:
    """Return the text of each token; the pieces cover every token once, in order."""
    special = special_ids(tokenizer)
    found = []
    begin = 0
    for at, token in enumerate(ids):
        if token in special:
            found += _decoded(tokenizer, ids, begin, at)
            found.append(Piece(at, at + 1, _text(tokenizer, [token]), control=True))
            begin = at + 1
    return (*found, *_decoded(tokenizer, ids, begin, len(ids)))


def _decoded(tokenizer: Any, ids: Sequence[int], begin: int, end: int) -> list[Piece]:
    """Return pieces of the tokens from `begin` to `end`, none of them a control token."""
    # The previous piece is decoded too: some tokenizers drop a space at the beginning of a text.
    pieces = []
    before = begin
    start = begin
    known = ""
    for at in range(begin, end):
        piece = _text(tokenizer, ids[before : at + 1])[len(known) :]
        within = not piece or piece.endswith("\ufffd")
        if within and at + 1 < end and at + 1 - start < _MOST:
            continue
        pieces.append(Piece(start, at + 1, piece))
        before = start
        start = at + 1
        known = _text(tokenizer, ids[before:start])
    return pieces


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
