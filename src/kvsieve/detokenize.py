"""Tokens become text: answers as they come, and the bytes of single tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# What stands for bytes that are no character, or not a whole one yet.
_PART = "\ufffd"
# How SentencePiece writes a byte, and the space before a word.
_BYTE, _SPACE = re.compile(r"<0x([0-9A-F]{2})>"), "\u2581"
# Last tokens of a prompt that are looked at for what stands before an answer.
_BEFORE = 8


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens, special ones left out and every space where the tokens have it."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Detokenizer:
    """Turns an answer's tokens into pieces of text, none of which ends within a character.

    Joined, the pieces are the text of all tokens together: a token is never decoded by itself, because some tokenizers
    write characters with several tokens, and spaces only between them.

    Attributes:
        text: pieces so far.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        """Begin an answer.

        Args:
            tokenizer: any tokenizer of transformers.
            before: tokens that the answer goes on with, so that it begins with a space where its first word has one.
                Default none: the answer is a text of its own.
        """
        self.tokenizer, self.text = tokenizer, ""
        # Tokens from `start` on are decoded again, those up to `done` only to see what the later ones add.
        self._ids = self._context(before)
        self._start, self._done = 0, len(self._ids)

    def add(self, ids: Iterable[int]) -> str:
        """Take in the next tokens, and return the text that they complete."""
        self._ids += ids
        return self._next(last=False)

    def end(self) -> str:
        """Return what is left of the text: parts of a character that nothing completes."""
        return self._next(last=True)

    def _next(self, last: bool) -> str:
        before = text_of(self.tokenizer, self._ids[self._start : self._done])
        piece = text_of(self.tokenizer, self._ids[self._start :])[len(before) :]
        if not piece or (piece.endswith(_PART) and not last):
            return ""
        self._start, self._done = self._done, len(self._ids)
        self.text += piece
        return piece

    def _context(self, before: Sequence[int]) -> list[int]:
        """Return the fewest last tokens that are a text which begins with a whole character."""
        for count in range(1, min(_BEFORE, len(before)) + 1):
            text = text_of(self.tokenizer, before[-count:])
            if text.strip() and not text.startswith(_PART):
                return list(before[-count:])
        return []


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """Return the function that gives a token's own bytes, of which some are only a part of a character.

    Args:
        tokenizer: byte-level, of SentencePiece, with or without bytes as tokens, or any other; then it is the token's
            text by itself.
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
    """Text of a tokenizer's tokens by their names; empty where it takes none that it does not have."""
    try:
        return str(tokenizer.convert_tokens_to_string(list(pieces)))
    except Exception:
        return ""


def _bytes_of_letters() -> dict[str, int]:
    """Byte by the letter that stands for it in byte-level vocabularies: itself, or one behind all of Latin-1."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}
