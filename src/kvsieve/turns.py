"""A conversation's turns as text and tokens: what the chat template writes, and what ends an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsieve.errors import InputError

Message = dict[str, str]

_MARK = "kvsieve-mark-of-the-answer"


def render(tokenizer: Any, messages: Sequence[Message], ask: bool = True) -> str:
    """The chat as its template writes it; ask: with what precedes an answer. Raises InputError where it refuses."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=ask, tokenize=False))
    except Exception as error:  # templates raise what they like
        raise InputError(f"the model's chat template refuses the prompt: {error}") from error


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a piece of a rendered chat, in which the template has written the special tokens already."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the template writes behind an answer, whatever the model's config calls its end."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    tail = render(tokenizer, chat, ask=False).rpartition(_MARK)[2]
    special = special_ids(tokenizer)
    return next((token for token in token_ids(tokenizer, tail) if token in special), None)


def special_ids(tokenizer: Any) -> set[int]:
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token for token, text in added if text.special)}


def stop_ids(tokenizer: Any, *stops: Any) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's, the template's end of turn, and `stops` (ids, lists of ids, None)."""
    listed = [each if isinstance(each, (list, tuple)) else [each] for each in stops]
    ends = {tokenizer.eos_token_id, end_of_turn(tokenizer), *(one for each in listed for one in each)}
    return frozenset(end for end in ends if end is not None)


class Turns:
    """What each turn adds to a conversation as fed: nothing is written twice, no answer is read as text again.

    A user message may be given in parts: parts of it that were fed already are named by `before`, and with
    ``open_end=True`` a further part follows.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Raises InputError for a tokenizer without chat template."""
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "the tokenizer has no chat template, so it is not known how the model tells turns apart: use an "
                "instruct model, set tokenizer.chat_template, or write the text yourself with sieve.generate(ids, "
                "cache=cache)"
            )
        self.tokenizer = tokenizer

    def added(
        self, messages: Sequence[Message], text: str, *, before: str | None = None, open_end: bool = False
    ) -> list[int]:
        """Token ids that the user message `text` adds behind `messages`, what precedes the answer included.

        messages: all that was said before. before: the message's text so far, fed already; `text` goes on with it.
        open_end: the message is not complete, so only its text and what precedes it are written.

        Where an answer comes before, the ids begin with what the template writes behind it, its end of turn included.
        Raises InputError where the template refuses the conversation, or rewrites what was fed.
        """
        said = [*messages]
        mark = _unique(text, before or "", *(message["content"] for message in said))
        content = text if before is None else f"{mark}{text}"
        start = before is not None
        if not start and said and said[-1]["role"] == "assistant":
            said[-1] = {"role": "assistant", "content": mark}
            start = True
        end = f"{mark}-end"
        asked = {"role": "user", "content": f"{content}{end}" if open_end else content}
        whole = render(self.tokenizer, [*said, asked])
        if open_end:
            whole, found, _ = whole.rpartition(end)
            if not found:
                raise InputError("the model's chat template changes the text of a message; ask without reading ahead")
        if not start:
            return token_ids(self.tokenizer, whole)
        known, found, rest = whole.partition(mark)
        if not found:
            raise InputError("the model's chat template leaves out what was said before, so the chat cannot go on")
        self._check_known(known, said, before)
        return token_ids(self.tokenizer, rest)

    def _check_known(self, known: str, said: list[Message], before: str | None) -> None:
        """What comes before the mark must be what was fed: up to the last question, or to an open message's text."""
        fed = said if before is not None else said[:-1]
        if not fed or fed == said[:1] and fed[0]["role"] == "system":
            return
        # Templates may write an answer's own header in another way once it is given; what was fed stays as it was.
        if not known.startswith(render(self.tokenizer, fed, ask=False)):
            raise InputError(
                "the model's chat template rewrites earlier turns when a new one comes (some move the system prompt "
                "to the last message), so a conversation cannot go on; start one without system="
            )


def _unique(*texts: str) -> str:
    mark = _MARK
    while any(mark in text for text in texts):
        mark += "x"
    return mark
