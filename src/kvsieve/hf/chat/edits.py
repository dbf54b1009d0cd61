"""Messages of a chat after an edit."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvsieve.errors import InputError, short
from kvsieve.planning.turns import Message

# Tags of reasoning in an answer; an answer may begin within it.
_REASONING = re.compile(r"^(?:\s*<think>)?(?:(?!<think>).)*?</think>\s*", re.S)


def first_turn(messages: Sequence[Message]) -> int:
    """Return the index of the first user message."""
    return 1 if messages and messages[0]["role"] == "system" else 0


def place_of(messages: Sequence[Message], turn: int) -> int:
    """Return the index of a turn's user message. Raises InputError for another turn."""
    first = first_turn(messages)
    count = (len(messages) - first) // 2
    if type(turn) is not int or not -count <= turn < count:
        raise InputError(f"the chat has {count} turns, numbered from 0 (-1 for the last); got {short(turn)}")
    return first + 2 * (turn % count)


def without_turn(messages: Sequence[Message], turn: int) -> tuple[Message, ...]:
    """Return messages without a turn: a user message and its answer."""
    at = place_of(messages, turn)
    left = (*messages[:at], *messages[at + 2 :])
    if len(left) <= first_turn(left):
        raise InputError("this is the chat's only turn; start a new chat instead")
    return left


def with_message(messages: Sequence[Message], turn: int, text: str) -> tuple[Message, ...]:
    """Return messages with another text of a turn's user; its answer stays."""
    at = place_of(messages, turn)
    return (*messages[:at], {"role": "user", "content": text}, *messages[at + 1 :])


def without_reasoning(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages with answers that begin after their reasoning."""
    return tuple(
        {**message, "content": _REASONING.sub("", message["content"], count=1)}
        if message["role"] == "assistant"
        else message
        for message in messages
    )
