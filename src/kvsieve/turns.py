"""Turns of a conversation as text and tokens: what the chat template writes, and what ends an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvsieve.errors import InputError
from kvsieve.forms import CallArguments, forms, shows

Message = dict[str, str]

_MARK = "kvsieve-mark-of-the-answer"
# What stands for a control token that is text, between them its number; they are private to Unicode's users.
_OPEN, _CLOSE = "\ue000", "\ue001"


def check_characters(name: str, text: str) -> None:
    """Raise InputError for a text with halves of characters (surrogates), which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} holds half a character at position {error.start} ({text[error.start]!r}, a surrogate), which no "
            "tokenizer can read: decode the text as it was encoded, or leave such characters out with "
            "text.encode(errors='ignore').decode()"
        ) from None


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    ask: bool = True,
    parse_special: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Render a chat with the tokenizer's template, for `token_ids`.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the chat, in any form; a template that takes another one gets that (kvsieve.forms).
        ask: write what precedes an answer. Default True.
        parse_special: read control tokens that a message's text spells as what they spell. Default False: they are
            text, and stand-ins take their place here.
        tools: functions that the model may call, as its template takes them. Default None: none.

    Raises:
        InputError: the template refuses the chat.
    """
    if not parse_special:
        messages = [_all_escaped(tokenizer, dict(each)) for each in messages]
        tools = None if tools is None else [_all_escaped(tokenizer, dict(each)) for each in tools]
    more: dict[str, Any] = {} if tools is None else {"tools": list(tools)}
    made: list[str] = []
    failed: list[Exception] = []
    for form in forms(messages):
        try:
            text = str(tokenizer.apply_chat_template(form, add_generation_prompt=ask, tokenize=False, **more))
        except Exception as error:  # templates raise what they like, for example when they know no system role
            failed.append(error)
            continue
        if shows(text, form):
            return text
        made.append(text)
    if made:
        # Some leave out or rewrite what a user says; whoever needs it finds that out.
        return made[0]
    raise InputError(f"the model's chat template refuses the prompt: {failed[0]}") from failed[0]


def _all_escaped(tokenizer: Any, part: Any) -> Any:
    """Escape all texts of a message or a tool, names of an object's members included."""
    if isinstance(part, str):
        return escaped(tokenizer, part)
    if isinstance(part, CallArguments):
        values = {escaped(tokenizer, name): _all_escaped(tokenizer, each) for name, each in part.items()}
        return CallArguments(values, escaped(tokenizer, part.text))
    if isinstance(part, Mapping):
        return {_all_escaped(tokenizer, name): _all_escaped(tokenizer, each) for name, each in part.items()}
    return [_all_escaped(tokenizer, each) for each in part] if isinstance(part, list) else part


def escaped(tokenizer: Any, text: str) -> str:
    """Replace the control tokens that a text spells by stand-ins, which `token_ids` takes for text."""
    names = [_OPEN, *_controls(tokenizer)]
    return _any_of(names).sub(lambda match: f"{_OPEN}{names.index(match[0])}{_CLOSE}", text)


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Tokenize a piece of a rendered chat, in which the template has written the special tokens already.

    Raises:
        InputError: a message has a control token that the tokenizer cannot write as text.
    """
    if _OPEN not in text:
        return _ids(tokenizer, text)
    controls = _controls(tokenizer)
    names = [_OPEN, *controls]
    # Only what lies between two control tokens of the template and holds a stand-in is encoded apart.
    parts = re.split(f"({_any_of(list(controls)).pattern})", text) if controls else [text]
    ids, plain = [], ""
    for place, part in enumerate(parts):
        if _OPEN not in part:
            plain += part
            continue
        lead, after = (parts[at] if 0 <= at < len(parts) else None for at in (place - 1, place + 1))
        # Some control tokens take the white space beside them with them.
        if lead is not None and controls[lead].rstrip:
            part = part.lstrip()
        if after is not None and controls[after].lstrip:
            part = part.rstrip()
        part = re.sub(f"{_OPEN}(\\d+){_CLOSE}", lambda match: names[int(match[1])], part)
        ids += [*_ids(tokenizer, plain), *_as_text(tokenizer, part, lead)]
        plain = ""
    return ids + _ids(tokenizer, plain)


def prompt_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], parse_special: bool = False) -> list[int]:
    """Tokenize a chat up to the answer: by the chat template, or, without one, as plain text.

    Args:
        tokenizer: any tokenizer.
        messages: the chat.
        parse_special: see `render`.
    """
    if getattr(tokenizer, "chat_template", None):
        return token_ids(tokenizer, render(tokenizer, messages, parse_special=parse_special))
    return plain_ids(tokenizer, "\n\n".join(str(each["content"]) for each in messages), parse_special)


def plain_ids(tokenizer: Any, text: str, parse_special: bool = False) -> list[int]:
    """Tokenize a text without chat template, with what the tokenizer puts before and behind any text.

    Args:
        tokenizer: any tokenizer.
        text: the text.
        parse_special: read control tokens that it spells as what they spell. Default False: they are text.
    """
    check_characters("the text", text)
    hidden = text if parse_special else escaped(tokenizer, text)
    if _OPEN not in hidden or parse_special:
        return list(tokenizer(text, verbose=False)["input_ids"])
    whole, bare = list(tokenizer("x")["input_ids"]), _ids(tokenizer, "x")
    at = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return [*whole[:at], *token_ids(tokenizer, hidden), *whole[at + len(bare) :]]


def _ids(tokenizer: Any, text: str, **how: Any) -> list[int]:
    check_characters("the text", text)
    return list(tokenizer(text, add_special_tokens=False, verbose=False, **how)["input_ids"]) if text else []


def _as_text(tokenizer: Any, text: str, lead: str | None) -> list[int]:
    """Ids of a text that spells control tokens, none of them among the ids. lead: the control token before it."""
    controls = _controls(tokenizer)
    forbidden = special_ids(tokenizer) - {tokenizer.unk_token_id}
    ids = _ids(tokenizer, text, split_special_tokens=True)
    # Some tokenizers write a text's beginning in another way than what follows a control token.
    alike = lead is None or _ids(tokenizer, f"{lead}x") == [*_ids(tokenizer, lead), *_ids(tokenizer, "x")]
    if alike and not forbidden.intersection(ids):
        return ids
    # So do some vocabularies in which control tokens are words as others are: cut within them, nothing spells one.
    ids, begin = [], 0
    spelled = re.finditer(f"(?={_any_of(list(controls)).pattern})", text) if controls else ()
    cuts = [match.start() + 1 for match in spelled]
    for end in [*cuts, len(text)]:
        before = _ids(tokenizer, lead or "")
        ids += _ids(tokenizer, (lead or "") + text[begin:end])[len(before) :]
        begin, lead = end, lead or next(iter(controls), None)
    if found := forbidden.intersection(ids):
        names = ", ".join(sorted(map(repr, tokenizer.convert_ids_to_tokens(sorted(found)))))
        raise InputError(f"a message spells {names}, which this model's tokenizer cannot write as text; leave it out")
    return ids


def _controls(tokenizer: Any) -> dict[str, Any]:
    """The tokenizer's special tokens by their text."""
    return {token.content: token for token in tokenizer.added_tokens_decoder.values() if token.special}


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    # The longest is found where several begin alike, as tokenizers do.
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the template writes behind an answer, whatever the model's config calls its end."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    tail = render(tokenizer, chat, ask=False).rpartition(_MARK)[2]
    special = special_ids(tokenizer)
    return next((token for token in token_ids(tokenizer, tail) if token in special), None)


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of the tokenizer's special tokens, added ones included."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token for token, text in added if text.special)}


def stop_ids(tokenizer: Any, *stops: Any) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's, the template's end of turn, and `stops` (ids, lists of ids, None)."""
    listed = [each if isinstance(each, (list, tuple)) else [each] for each in stops]
    ends = {tokenizer.eos_token_id, end_of_turn(tokenizer), *(one for each in listed for one in each)}
    return frozenset(end for end in ends if end is not None)


class Turns:
    """Token ids that each turn adds to a conversation: nothing is written twice, no answer is read as text again.

    A user message may be given in parts: parts of it that were fed already are named by `before`, and with
    ``open_end=True`` a further part follows.

    Raises:
        InputError: the tokenizer has no chat template.
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
        """Token ids that a user message adds to a conversation, what precedes the answer included.

        Where an answer comes before, the ids begin with what the template writes behind it, its end of turn included.

        Args:
            messages: all that was said before.
            text: the message, or its next part.
            before: the message's text so far, fed already; `text` goes on with it. Default None: `text` begins the
                message.
            open_end: the message is not complete, so only its text and what precedes it are written. Default False.

        Raises:
            InputError: the template refuses the conversation, or rewrites what was fed.
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
        """Check that what precedes the mark was fed: up to the last question, or to an open message's text."""
        fed = said if before is not None else said[:-1]
        if not fed or (fed == said[:1] and fed[0]["role"] == "system"):
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
