"""Prompts of `kvsieve run`: one from the command line or a file, or many from a file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsieve.errors import InputError
from kvsieve.planning.turns import check_characters

# Byte order mark that some Windows editors write.
BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class TextPrompt:
    """A prompt.

    Attributes:
        text: of the user, with the question.
        system: the system prompt.
        extra: other fields of its line of JSON.
        documents: texts before it that are prefilled alone.
    """

    text: str
    system: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    documents: tuple[str, ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        user = {"role": "user", "content": self.text}
        return [{"role": "system", "content": self.system}, user] if self.system else [user]


def given_prompts(
    text: str | None,
    file: str | None,
    many: str | None,
    question: str | None,
    system: str | None,
    documents: Sequence[str] = (),
) -> list[TextPrompt]:
    """Return the prompts of exactly one of --prompt, --prompt-file, --prompts-file and --documents.

    documents: texts. Raises InputError.
    """
    sources = {"--prompt": text, "--prompt-file": file, "--prompts-file": many, "--documents": documents or None}
    named = [option for option, value in sources.items() if value is not None]
    if len(named) != 1:
        got = " and ".join(named) or "none"
        raise InputError(
            f"give one of --prompt TEXT, --prompt-file FILE, --prompts-file FILE and --documents FILES, got {got}"
        )
    if question is not None and not question.strip():
        raise InputError("--question is empty; write the question, or leave it out")
    check_system(system)
    if documents:
        check_characters("--question", question or "")
        return [TextPrompt(question or "", system, documents=tuple(documents))]
    if many is not None:
        return read_prompts(many, question, system)
    if file is not None:
        return [TextPrompt(read_prompt(file, question), system)]
    assert text is not None
    if not text.strip():
        raise InputError("the prompt is empty: --prompt has no text; write some there")
    return [TextPrompt(_asked(text, question, "--prompt"), system)]


def check_system(system: str | None) -> None:
    if system is not None and not system.strip():
        raise InputError("--system is empty; leave it out, or write a system prompt")


def read_prompt(name: str, question: str | None) -> str:
    """Return the file's text and the question. Raises InputError for an unreadable or empty file."""
    return _asked(read_text(name, "prompt file"), question, f"the prompt file {name!r}")


def read_prompts(name: str, question: str | None, system: str | None) -> list[TextPrompt]:
    """Return a prompt per line that is not blank: its text, or a JSON object with it as "prompt".

    An object may have its own "system" and "question"; other fields become the result's "extra". The first line
    determines the format of all; files named .jsonl have objects. Raises InputError.
    """
    lines = [
        (number, line) for number, line in enumerate(read_text(name, "prompt file").split("\n"), 1) if line.strip()
    ]
    if not (isinstance(_json(lines[0][1]), dict) or name.lower().endswith(".jsonl")):
        return [TextPrompt(_asked(line.rstrip("\r"), question, f"{name!r}, line {n}"), system) for n, line in lines]
    return [_from_json(_json(line), question, system, f"{name!r}, line {number}") for number, line in lines]


def _from_json(row: Any, question: str | None, system: str | None, where: str) -> TextPrompt:
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
        raise InputError(f'{where}: expected a JSON object like {{"prompt": "some text"}}')
    known = {"prompt": row["prompt"], "system": row.get("system", system), "question": row.get("question", question)}
    for part in ("system", "question"):
        if known[part] is not None and not isinstance(known[part], str):
            raise InputError(f"{where}: {part!r} must be a text")
    extra = {key: value for key, value in row.items() if key not in known}
    return TextPrompt(_asked(known["prompt"], known["question"], where), known["system"], extra)


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _asked(text: str, question: str | None, where: str) -> str:
    whole = f"{text.rstrip()}\n\n{question}" if question else text
    check_characters(where, whole)
    return whole


def read_text(name: str, kind: str) -> str:
    """Return the text of a file in UTF-8, - for stdin. Raises InputError; kind: description for messages."""
    try:
        text = sys.stdin.read() if name == "-" else Path(os.path.expanduser(name)).read_text(encoding="utf-8")
        text = text.removeprefix(BYTE_ORDER_MARK)
    except OSError as error:
        raise InputError(f"cannot read the {kind} {name!r}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        other = "; `kvsieve ask` reads PDF and DOCX" if name.lower().endswith((".pdf", ".docx")) else ""
        raise InputError(
            f"the {kind} {name!r} is not UTF-8 text (byte {error.start}); save it as that{other}"
        ) from error
    if not text.strip():
        what = "prompt" if kind == "prompt file" else kind
        raise InputError(f"the {what} is empty: {'stdin' if name == '-' else repr(name)} has no text; write some there")
    return text
