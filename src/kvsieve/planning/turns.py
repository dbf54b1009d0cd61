"""Turns of a conversation as text and tokens: output of the chat template, and ends of answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvsieve.detokenize import special_ids
from kvsieve.errors import InputError
from kvsieve.planning.forms import ParsedArguments, forms, shows

Message = dict[str, str]

_MARK = "kvsieve-mark-of-the-answer"
# Brackets around the number of a control token that is text, from Unicode's private use area.
_OPEN = "\ue000"
_CLOSE = "\ue001"


def check_characters(name: str, text: str) -> None:
    """Raise InputError for a text with surrogates, which no tokenizer can read."""
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
    options: Mapping[str, Any] | None = None,
) -> str:
    """Render a chat with the tokenizer's template, for `token_ids`.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the chat, in any form; kvsieve.planning.forms converts it to the template's.
        ask: write the header of an answer. Default True.
        parse_special: treat control tokens spelled in messages as such. Default False: they are text, and are replaced
            by stand-ins here.
        tools: functions that the model may call, in the template's form. Default None: none.
        options: further variables of the template, such as enable_thinking. Default None: none.

    Raises:
        InputError: the template refuses the chat.
    """
    if not parse_special:
        messages = [_all_escaped(tokenizer, dict(message)) for message in messages]
        tools = None if tools is None else [_all_escaped(tokenizer, dict(tool)) for tool in tools]
        options = None if options is None else _all_escaped(tokenizer, dict(options))
    more: dict[str, Any] = dict(options or {})
    if tools is not None:
        more["tools"] = list(tools)
    texts: list[str] = []
    failed: list[Exception] = []
    for form in forms(messages):
        try:
            text = str(tokenizer.apply_chat_template(form, add_generation_prompt=ask, tokenize=False, **more))
        except Exception as error:  # templates may raise anything, for example if they have no system role
            failed.append(error)
            continue
        if shows(text, form):
            return text
        texts.append(text)
    if texts:
        # Some omit or rewrite a user's text; callers that depend on it check.
        return texts[0]
    raise InputError(f"the model's chat template refuses the prompt: {failed[0]}") from failed[0]


def _all_escaped(tokenizer: Any, part: Any) -> Any:
    """Escape all texts of a message or a tool, including names of an object's members."""
    if isinstance(part, str):
        return escaped(tokenizer, part)
    if isinstance(part, ParsedArguments):
        values = {escaped(tokenizer, name): _all_escaped(tokenizer, value) for name, value in part.items()}
        return ParsedArguments(values, escaped(tokenizer, part.text))
    if isinstance(part, Mapping):
        return {_all_escaped(tokenizer, name): _all_escaped(tokenizer, value) for name, value in part.items()}
    return [_all_escaped(tokenizer, item) for item in part] if isinstance(part, list) else part


def escaped(tokenizer: Any, text: str) -> str:
    """Replace the control tokens spelled in a text by stand-ins, which `token_ids` reads as text."""
    names = [_OPEN, *_controls(tokenizer)]
    return _any_of(names).sub(lambda match: f"{_OPEN}{names.index(match[0])}{_CLOSE}", text)


def token_ids(tokenizer: Any, text: str, follows: bool = False) -> list[int]:
    """Tokenize a piece of a rendered chat with the template's special tokens.

    Args:
        tokenizer: any tokenizer.
        text: the piece.
        follows: other text precedes it, so it gets no space that the tokenizer writes before any text. Default False.

    Raises:
        InputError: a message has a control token that the tokenizer cannot write as text.
    """
    lead = _ids(tokenizer, "\n") if follows and text else []
    if lead and _ids(tokenizer, "\nx") != [*lead, *_ids(tokenizer, "x")]:
        ids = token_ids(tokenizer, f"\n{text}")
        if ids[: len(lead)] == lead:
            return ids[len(lead) :]
    if _OPEN not in text:
        return _ids(tokenizer, text)
    controls = _controls(tokenizer)
    names = [_OPEN, *controls]
    # Only text between two control tokens of the template with a stand-in is encoded separately.
    parts = re.split(f"({_any_of(list(controls)).pattern})", text) if controls else [text]
    ids = []
    plain = ""
    for place, part in enumerate(parts):
        if _OPEN not in part:
            plain += part
            continue
        opens, after = (parts[at] if 0 <= at < len(parts) else None for at in (place - 1, place + 1))
        # Some control tokens absorb adjacent white space.
        if opens is not None and controls[opens].rstrip:
            part = part.lstrip()
        if after is not None and controls[after].lstrip:
            part = part.rstrip()
        part = re.sub(f"{_OPEN}(\\d+){_CLOSE}", lambda match: names[int(match[1])], part)
        ids += [*_ids(tokenizer, plain), *_as_text(tokenizer, part, opens)]
        plain = ""
    return ids + _ids(tokenizer, plain)


def prompt_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], parse_special: bool = False) -> list[int]:
    """Tokenize a chat up to the answer by the chat template or, without one, as plain text.

    Args:
        tokenizer: any tokenizer.
        messages: the chat.
        parse_special: see `render`.
    """
    if getattr(tokenizer, "chat_template", None):
        return token_ids(tokenizer, render(tokenizer, messages, parse_special=parse_special))
    return plain_ids(tokenizer, "\n\n".join(str(message["content"]) for message in messages), parse_special)


def plain_ids(tokenizer: Any, text: str, parse_special: bool = False) -> list[int]:
    """Tokenize a text without chat template, with the tokenizer's own start and end tokens.

    Args:
        tokenizer: any tokenizer.
        text: the text.
        parse_special: treat control tokens that it spells as such. Default False: they are text.
    """
    check_characters("the text", text)
    hidden = text if parse_special else escaped(tokenizer, text)
    if _OPEN not in hidden or parse_special:
        return list(tokenizer(text, verbose=False)["input_ids"])
    before, after = added_ids(tokenizer)
    return [*before, *token_ids(tokenizer, hidden), *after]


def added_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer adds before and after any text."""
    whole = list(tokenizer("x")["input_ids"])
    bare = _ids(tokenizer, "x")
    at = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return whole[:at], whole[at + len(bare) :]


def _ids(tokenizer: Any, text: str, **how: Any) -> list[int]:
    check_characters("the text", text)
    return list(tokenizer(text, add_special_tokens=False, verbose=False, **how)["input_ids"]) if text else []


def _as_text(tokenizer: Any, text: str, lead: str | None) -> list[int]:
    """Tokenize a text that spells control tokens, without any of them. lead: the control token before it."""
    controls = _controls(tokenizer)
    forbidden = special_ids(tokenizer) - {tokenizer.unk_token_id}
    ids = _ids(tokenizer, text, split_special_tokens=True)
    # Some tokenizers encode the start of a text differently than text after a control token.
    alike = lead is None or _ids(tokenizer, f"{lead}x") == [*_ids(tokenizer, lead), *_ids(tokenizer, "x")]
    if alike and not forbidden.intersection(ids):
        return ids
    # The same for vocabularies with control tokens as plain words: split inside, no piece spells one.
    ids = []
    begin = 0
    spelled = re.finditer(f"(?={_any_of(list(controls)).pattern})", text) if controls else ()
    cuts = [match.start() + 1 for match in spelled]
    for end in [*cuts, len(text)]:
        before = _ids(tokenizer, lead or "")
        ids += _ids(tokenizer, (lead or "") + text[begin:end])[len(before) :]
        begin = end
        lead = lead or next(iter(controls), None)
    if found := forbidden.intersection(ids):
        names = ", ".join(sorted(map(repr, tokenizer.convert_ids_to_tokens(sorted(found)))))
        raise InputError(f"a message spells {names}, which this model's tokenizer cannot write as text; leave it out")
    return ids


def _controls(tokenizer: Any) -> dict[str, Any]:
    """Return the tokenizer's special tokens by their text."""
    return {token.content: token for token in tokenizer.added_tokens_decoder.values() if token.special}


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    # The longest of several with the same start is found, as in tokenizers.
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the special token that the template writes after an answer, regardless of the model's config."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    tail = render(tokenizer, chat, ask=False).rpartition(_MARK)[2]
    special = special_ids(tokenizer)
    return next((token for token in token_ids(tokenizer, tail) if token in special), None)


def stop_ids(tokenizer: Any, *stops: Any) -> frozenset[int]:
    """Return the tokens that end an answer: the tokenizer's, the template's end of turn, and `stops` (ids or lists)."""
    listed = [stop if isinstance(stop, (list, tuple)) else [stop] for stop in stops]
    ends = {tokenizer.eos_token_id, end_of_turn(tokenizer), *(one for group in listed for one in group)}
    return frozenset(end for end in ends if end is not None)


class Turns:
    """Computes the token ids that each turn adds to a conversation, without tokenizing fed text again.

    A user message may be given in parts: `before` has the parts already fed, and with ``open_end=True`` another part
    follows.

    Raises:
        InputError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "the tokenizer has no chat template, so it is not known how the model tells turns apart: use an "
                "instruct model, set tokenizer.chat_template, or write the text yourself with sieve.generate(ids, "
                "cache=cache)"
            )
        self.tokenizer = tokenizer

    def added(
        self,
        messages: Sequence[Message],
        text: str,
        *,
        tool: bool = False,
        before: str | None = None,
        open_end: bool = False,
    ) -> list[int]:
        """Return the token ids that a user message adds to a conversation, including the header of the answer.

        After an answer, the ids begin with its end of turn.

        Args:
            messages: the conversation before.
            text: the message, or its next part.
            tool: the message is the result of a tool call. Default False.
            before: the message's text fed so far, which `text` continues. Default None: `text` begins the message.
            open_end: the message is incomplete, so its end is not written. Default False.

        Raises:
            InputError: the template refuses the conversation, rewrites fed text, or leaves out tool results.
        """
        said = [*messages]
        mark = _unique(text, before or "", *(message["content"] for message in said))
        content = text if before is None else f"{mark}{text}"
        start = before is not None
        if not start and said and said[-1]["role"] == "assistant":
            said[-1] = {"role": "assistant", "content": mark}
            start = True
        end = f"{mark}-end"
        question = {"role": "tool" if tool else "user", "content": f"{content}{end}" if open_end else content}
        # A template may write the result itself as JSON.
        if tool and end not in render(self.tokenizer, [*said, {**question, "content": end}]):
            raise InputError("the model's chat template leaves out tool results; send them with role='user'")
        whole = render(self.tokenizer, [*said, question])
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
        return token_ids(self.tokenizer, rest, follows=True)

    def _check_known(self, known: str, said: list[Message], before: str | None) -> None:
        """Check that the text before the mark was fed: up to the last question, or to an open message's text."""
        fed = said if before is not None else said[:-1]
        if not fed or (fed == said[:1] and fed[0]["role"] == "system"):
            return
        # Templates may write the header of a complete answer differently; fed tokens do not change.
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
