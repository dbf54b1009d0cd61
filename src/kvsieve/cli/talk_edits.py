"""Edits of a chat by commands of `kvsieve chat`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvsieve.errors import InputError

if TYPE_CHECKING:
    from kvsieve.hf.chat.chat import Chat

# Commands with their help.
EDITS = {
    "/remove N": "remove turn N, as /stats numbers them",
    "/replace N TEXT": "replace the message of turn N by TEXT; its answer stays",
    "/strip": "remove the reasoning of all answers",
    "/strip N": "the same, and tool results before the last N turns",
}


def edited(chat: Chat, name: str, rest: str, opening: Callable[[int], str]) -> tuple[str, int | None]:
    """Edit a chat by a command; return a line on the effect, and the index of a removed turn.

    Args:
        chat: between turns.
        name: of the command, "/remove".
        rest: its arguments.
        opening: returns the text that stays before the replaced message of a turn, "" for none.

    Raises:
        InputError: a missing or unknown turn, or no text; and see the chat's methods.
    """
    number, _, text = rest.partition(" ")
    removed = None
    if name == "/strip":
        if rest and not rest.isdecimal():
            raise InputError(f"/strip takes nothing, or a number of last turns that keep tool results, got {rest!r}")
        change = chat.strip(tools_before=int(rest) if rest else None)
        done = "stripped"
    else:
        turn = _turn(chat, name, number)
        if name == "/replace" and not text.strip():
            raise InputError("/replace needs a turn's number and the new message: /replace 2 TEXT")
        if name == "/remove":
            change, removed = chat.remove(turn), turn
        else:
            change = chat.replace(turn, opening(turn) + text)
        done = f"turn {number} {'replaced' if removed is None else 'removed'}"
    line = f"{done}: {change.reused} tokens reused, {change.moved} of them approximate, {change.reread} prefilled"
    return line, removed


def _turn(chat: Chat, name: str, number: str) -> int:
    """Return the index of a turn. Raises InputError."""
    turns = len(chat.turns)
    if not turns:
        raise InputError("the chat has no turn yet")
    if not number.isdecimal() or not 1 <= int(number) <= turns:
        raise InputError(f"{name} needs the number of a turn, 1 to {turns} as /stats lists them, got {number!r}")
    return int(number) - 1
