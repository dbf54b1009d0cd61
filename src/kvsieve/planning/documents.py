"""Prompts with documents before the user's text, each tokenized alone, so that its tokens are the same in any place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsieve.errors import InputError
from kvsieve.planning.turns import added_ids, check_characters, escaped, render, token_ids

_MARK = "kvsieve-mark-of-the-documents"


@dataclass(frozen=True)
class DocumentPrompt:
    """Token ids of a chat with documents before the text of its last message.

    Attributes:
        before: up to the first document.
        documents: of each, the blank line after it included.
        question: after them, up to the answer.
    """

    before: list[int]
    documents: list[list[int]]
    question: list[int]

    @property
    def ids(self) -> list[int]:
        """All in order."""
        return [*self.before, *(token for document in self.documents for token in document), *self.question]


def document_prompt(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], documents: Sequence[str], parse_special: bool = False
) -> DocumentPrompt:
    """Tokenize a chat and documents that precede the text of its last message.

    Args:
        tokenizer: any; without a chat template texts follow each other.
        messages: the chat.
        documents: texts, at least one.
        parse_special: see `render`.

    Raises:
        InputError: the template refuses the chat, or changes the beginning of a message.
    """
    last = str(messages[-1]["content"])
    for text in (*documents, last):
        check_characters("a document or the question", text)
    mark = _MARK
    while mark in last:
        mark += "x"
    plain = not getattr(tokenizer, "chat_template", None)
    if plain:
        texts = [str(message["content"]) for message in messages[:-1]]
        whole = "".join(f"{text}\n\n" for text in texts) + mark + last
        whole = whole if parse_special else escaped(tokenizer, whole)
    else:
        marked = [*messages[:-1], {**messages[-1], "content": mark + last}]
        whole = render(tokenizer, marked, parse_special=parse_special)
    before, found, rest = whole.partition(mark)
    if not found:
        raise InputError("the model's chat template changes the beginning of a message; give the documents as a prompt")
    first, end = added_ids(tokenizer) if plain else ([], [])
    said = [f"{text.strip()}\n\n" for text in documents]
    return DocumentPrompt(
        [*first, *token_ids(tokenizer, before)],
        [token_ids(tokenizer, text if parse_special else escaped(tokenizer, text), follows=True) for text in said],
        [*token_ids(tokenizer, rest, follows=True), *end],
    )
