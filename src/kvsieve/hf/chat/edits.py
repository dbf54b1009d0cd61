"""Messages of a chat after an edit."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvsieve.errors import InputError, short
from kvsieve.planning.turns import Message

# Tags of reasoning in an answer; an answer may begin within it.
_REASONING = re.compile(r"^(?:\s*<think>)?(?:(?!<think>).)*?</think>\s*", re.S)
# Text in place of a tool result.
CLEARED = "[cleared]"


def first_turn(messages: Sequence[Message]) -> int:
    """Return the index of the first message after the system prompt."""
    return 1 if messages and messages[0]["role"] == "system" else 0


def place_of(messages: Sequence[Message], turn: int) -> int:
    """Return the index of a turn's message. Raises InputError for another turn."""
    first = first_turn(messages)
    count = (len(messages) - first) // 2
    if type(turn) is not int or not -count <= turn < count:
        raise InputError(f"the chat has {count} turns, numbered from 0 (-1 for the last); got {short(turn)}")
    return first + 2 * (turn % count)


def without_turn(messages: Sequence[Message], turn: int) -> tuple[Message, ...]:
    """Return messages without a turn: a message and its answer."""
    at = place_of(messages, turn)
    left = (*messages[:at], *messages[at + 2 :])
    if len(left) <= first_turn(left):
        raise InputError("this is the chat's only turn; start a new chat instead")
    return left


def with_message(messages: Sequence[Message], turn: int, text: str) -> tuple[Message, ...]:
    """Return messages with another text of a turn's message; its answer stays."""
    at = place_of(messages, turn)
    return (*messages[:at], {**messages[at], "content": text}, *messages[at + 1 :])


def stripped(messages: Sequence[Message], reasoning: bool, tools_before: int | None) -> tuple[Message, ...]:
    """Return messages without reasoning or old tool results; see Chat.strip. Raises InputError."""
    if tools_before is not None and (type(tools_before) is not int or tools_before < 0):
        raise InputError(f"tools_before is the number of last turns that keep tool results, got {short(tools_before)}")
    end = 0 if tools_before is None else len(messages) - 2 * tools_before
    return tuple(_shorter(message, reasoning, results=place < end) for place, message in enumerate(messages))


def _shorter(message: Message, reasoning: bool, results: bool) -> Message:
    """Return a message without the reasoning of an answer, or without the result of a tool."""
    text = message["content"]
    if reasoning and message["role"] == "assistant":
        text = _REASONING.sub("", text, count=1)
    if results and message["role"] == "tool" and len(text) > len(CLEARED):
        text = CLEARED
    return {**message, "content": text}
