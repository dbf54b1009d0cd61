"""Documents of a request, joined at the beginning of its first user message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvsieve.errors import InputError
from kvsieve.hf.join.documents import JoinReader, JoinTexts
from kvsieve.hf.join.join import Joining, why_not_joined
from kvsieve.hf.sieve import Sieve
from kvsieve.planning.joins import JOIN, ParallelJoin, checked_spans, join_of
from kvsieve.serve.schema import KVOptions
from kvsieve.serve.ticket import Order, PromptDocuments

# Between two documents, and before the message's own text.
_BREAK = "\n\n"


def checked_documents(kv: KVOptions | None, most: int, has_images: bool) -> list[str]:
    """Return the documents of a request, each with the blank line after it.

    Args:
        kv: options of the request.
        most: documents that a request may have.
        has_images: the messages have images.

    Raises:
        InputError: too many, blank ones, or other members that documents exclude.
        PlanError: an unknown join.
    """
    if kv is None or kv.documents is None:
        if kv is not None and kv.join is not None:
            raise InputError("kv.join: there are no documents to join; give kv.documents, or leave it out")
        return []
    join_of(_join(kv))
    if len(kv.documents) > most:
        raise InputError(f"kv.documents: at most {most} are taken here, got {len(kv.documents)}")
    for number, text in enumerate(kv.documents):
        if not text.strip():
            raise InputError(f"kv.documents: number {number} is blank; leave it out")
    others: dict[str, object] = {"kv.session": kv.session, "kv.protect": kv.protect}
    others |= {"kv.question": kv.question or None, "kv.edits": kv.edits or None}
    named = [name for name, value in others.items() if value is not None] + ["images"] * has_images
    if named:
        raise InputError(f"kv.documents: documents are joined without {named[0]}; leave one of them out")
    return [text + _BREAK for text in kv.documents]


def with_documents(messages: Sequence[dict[str, Any]], documents: Sequence[str]) -> list[dict[str, Any]]:
    """Return template messages with documents at the beginning of the first user message.

    Later turns of a conversation then find the documents of earlier ones, after the same tokens.

    Raises InputError if there is no such message, or if it has no text.
    """
    out = list(messages)
    place = next((place for place in range(len(out)) if out[place]["role"] == "user"), None)
    if place is None:
        raise InputError("kv.documents: no message is the user's, before whose text documents stand; add one")
    content = out[place]["content"]
    text = "".join(documents)
    if isinstance(content, str):
        changed: Any = text + content
    else:
        changed = [{**content[0], "text": text + content[0]["text"]}, *content[1:]]
    out[place] = {**out[place], "content": changed}
    return out


def split_prompt(
    text: str, documents: Sequence[str], kv: KVOptions, ids: Callable[[str, bool], list[int]]
) -> tuple[PromptDocuments, list[int]]:
    """Return the documents in a rendered prompt, and all of its token ids.

    Each document is tokenized alone, so its tokens are the same in any place.

    Args:
        text: the prompt.
        documents: as rendered, in order.
        kv: options of the request.
        ids: returns the token ids of a text, given whether it follows other text.

    Raises:
        InputError: the template changes the documents, or one has no tokens.
    """
    start = text.find("".join(documents))
    if start < 0:
        raise InputError(
            "kv.documents: the model's template changes their text, such as white space at their beginning; begin the "
            "first document with a word"
        )
    end = start + sum(map(len, documents))
    before = tuple(ids(text[:start], False))
    texts = tuple(tuple(ids(document, True)) for document in documents)
    if not all(texts):
        raise InputError(f"kv.documents: number {texts.index(())} has no tokens; leave it out")
    found = PromptDocuments(before, texts, _join(kv))
    return found, [*before, *(token for one in texts for token in one), *ids(text[end:], True)]


def check_joined(sieve: Sieve, order: Order) -> None:
    """Raise InputError or PlanError for documents that cannot be joined under an order's plan."""
    documents = order.documents
    if documents is None:
        return
    plan = sieve.plan
    kind = join_of(documents.join)
    texts = JoinTexts(torch.tensor(documents.before), tuple(map(torch.tensor, documents.texts)))
    reader = JoinReader(sieve, None, None, ends=not plan.query_aware)
    join = Joining(sieve, kind, texts, None, checked_spans(kind, texts.sizes, texts.start), reader, None)
    if join.in_order and not plan.shortens_prompt:
        return
    way_out = "send them in the message" if plan.shortens_prompt else "take kv.join 'full'"
    reason = why_not_joined(sieve, kind, texts.start)
    length = len(order.ids)
    left = length - documents.end
    parallel = isinstance(kind, ParallelJoin) and not reader.ends
    drops = plan.evict is not None and plan.evict.entries(length, order.max_tokens) < length
    if reason is None and parallel and drops and left < plan.queries(length):
        reason = f"{left} tokens follow them, and {plan.name} looks back on the last {plan.queries(length)}"
        way_out = f"ask more, {way_out}"
    if reason is not None:
        raise InputError(f"kv.documents: they cannot be joined: {reason}; {way_out}, or take another method")


def _join(kv: KVOptions) -> str:
    return kv.join or JOIN
