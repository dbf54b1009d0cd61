"""Decoding of tokens: streamed text, and the bytes of single tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

# Replacement for bytes of an invalid or incomplete character.
_PART = "\ufffd"
# SentencePiece's notation of a byte, and of the space before a word.
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
# Last tokens of a prompt examined for the context of an answer.
_BEFORE = 8


def text_of(tokenizer: Any, ids: Sequence[int], hidden: Collection[int] | None = None) -> str:
    """Return the text of tokens, with all spaces unchanged.

    Args:
        tokenizer: any tokenizer of transformers.
        ids: the tokens.
        hidden: tokens without text. Default None: the special ones.
    """
    shown = list(ids) if hidden is None else [token for token in ids if token not in hidden]
    return str(tokenizer.decode(shown, skip_special_tokens=hidden is None, clean_up_tokenization_spaces=False))


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of the tokenizer's special tokens, including added ones."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token for token, text in added if text.special)}


class Detokenizer:
    """Converts an answer's tokens to pieces of text that end at character boundaries.

    Joined, the pieces are the text of all tokens together. A token is never decoded alone, because some tokenizers
    write characters with several tokens, and spaces only between them.

    Attributes:
        text: pieces so far.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = (), shown: Collection[int] = ()) -> None:
        """Begin an answer.

        Args:
            tokenizer: any tokenizer of transformers.
            before: tokens that the answer continues, so that it may begin with a space. Default none: the answer is a
                separate text.
            shown: special tokens that are part of the text. Default none.
        """
        self.tokenizer = tokenizer
        self._hidden = special_ids(tokenizer).difference(shown) if shown else None
        self.text = ""
        # Tokens from `start` are decoded again; those up to `done` are context for the later ones.
        self._ids = self._context(before)
        self._start = 0
        self._done = len(self._ids)

    def add(self, ids: Iterable[int]) -> str:
        """Add tokens, and return the text that they complete."""
        self._ids += ids
        return self._next(last=False)

    def end(self) -> str:
        """Return the remaining text: incomplete characters."""
        return self._next(last=True)

    def _next(self, last: bool) -> str:
        before = text_of(self.tokenizer, self._ids[self._start : self._done], self._hidden)
        piece = text_of(self.tokenizer, self._ids[self._start :], self._hidden)[len(before) :]
        if not piece or (piece.endswith(_PART) and not last):
            return ""
        self._start = self._done
        self._done = len(self._ids)
        self.text += piece
        return piece

    def _context(self, before: Sequence[int]) -> list[int]:
        """Return the fewest last tokens that form a text starting with a complete character."""
        for count in range(1, min(_BEFORE, len(before)) + 1):
            text = text_of(self.tokenizer, before[-count:])
            if text.strip() and not text.startswith(_PART):
                return list(before[-count:])
        return []


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """Return the function from a token to its bytes, which may be part of a character.

    Args:
        tokenizer: byte-level, of SentencePiece, with or without byte tokens, or any other, with which it decodes single
            tokens.
    """
    byte_of = _bytes_of_letters() if _joined(tokenizer, "a", "\u0120", "b") == "a b" else None
    with_bytes = _joined(tokenizer, "<0x41>") == "A"
    with_spaces = _joined(tokenizer, "a", f"{_SPACE}b") == "a b"
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}

    def found(token: int) -> bytes:
        if token in added:
            return bytes((added[token].replace(_SPACE, " ") if with_spaces else added[token]).encode())
        piece = tokenizer.convert_ids_to_tokens(token)
        if isinstance(piece, bytes):
            return piece
        # A model may have more outputs than its tokenizer has tokens.
        if not piece:
            return b""
        if byte_of is not None and all(letter in byte_of for letter in piece):
            return bytes(byte_of[letter] for letter in piece)
        if with_bytes and (match := _BYTE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        if with_spaces:
            return bytes(piece.replace(_SPACE, " ").encode())
        return text_of(tokenizer, [token]).encode()

    return found


def _joined(tokenizer: Any, *pieces: str) -> str:
    """Return the text of a tokenizer's tokens by name; empty if one is missing."""
    try:
        return str(tokenizer.convert_tokens_to_string(list(pieces)))
    except Exception:
        return ""


def _bytes_of_letters() -> dict[str, int]:
    """Return the byte for each letter of byte-level vocabularies: itself, or one beyond Latin-1."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}
