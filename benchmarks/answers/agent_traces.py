"""Agents that read Python's own library: conversations of many turns with reasoning and tool results; for edits.py.

Everything that tools return is real text: lines of the modules of the Python that runs, and kvsieve's help texts of
Python. Reasoning quotes them. A turn is one answer of the model. As many agents do, the next turn's prompt has the
answer without its reasoning, and all but the last tool results are cleared.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.speed.copying import MODULES
from kvsieve.lab.tasks.haystack import load_haystack, passage
from kvsieve.planning.turns import end_of_turn, render, token_ids

SYSTEM = (
    "You are an agent that explains the source code of Python's standard library. Use the tools to look at the files "
    "before you answer. Call one tool at a time. Answer with facts that you have seen, and name their lines."
)
# Words of the documentation in the system prompt, as agents have notes on their project.
NOTES = 700
CLEARED = "[cleared; call the tool again to see its result]"
# Turns of one request: four calls of tools, and an answer.
TURNS = 5
# Lines of a tool's result, and characters of a line.
LINES, WIDTH = 34, 100


def _tool(name: str, description: str, **arguments: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in arguments.items()}}
    function = {"name": name, "description": description, "parameters": {**schema, "required": [*arguments]}}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("outline", "List the classes and functions of a file with their lines.", path="string"),
    _tool("search", "List the lines of a file that contain a text.", path="string", text="string"),
    _tool("read_lines", "Show lines of a file.", path="string", first="integer", last="integer"),
    _tool("help", "Show a part of Python's documentation.", words="string"),
]


@dataclass(frozen=True)
class Step:
    """A turn.

    Attributes:
        question: the user's message before it; None in the middle of a request.
        reasoning: the answer's first part.
        text: the rest of the answer.
        call: name and arguments of the tool that the answer calls; None for the last answer to a request.
        result: of the tool.
    """

    question: str | None
    reasoning: str
    text: str
    call: tuple[str, dict[str, Any]] | None = None
    result: str | None = None

    def answer(self, reasoning: bool) -> dict[str, Any]:
        """Return the answer as a message."""
        content = f"<think>\n{self.reasoning}\n</think>\n\n{self.text}" if reasoning else self.text
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.call is not None:
            name, arguments = self.call
            message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        return message


def trace(number: int, turns: int) -> list[Step]:
    """Return the turns of a trace, the same ones for the same number and Python."""
    draw = random.Random(f"agent {number}")
    modules = draw.sample(MODULES, len(MODULES))
    steps: list[Step] = []
    for name in modules:
        if len(steps) >= turns:
            break
        found = _source(name)
        functions = [] if found is None else _functions(found)
        if functions:
            path = f"{name.replace('.', '/')}.py"
            steps += _request(draw, path, str(found), *draw.choice(functions))
    if len(steps) < turns:
        raise SystemExit(f"error: the modules of this Python are enough for {len(steps)} turns; {turns} are wanted")
    return steps[:turns]


@functools.cache
def _source(name: str) -> str | None:
    spec = importlib.util.find_spec(name)
    there = spec is not None and spec.origin is not None and spec.has_location
    return Path(str(spec.origin)).read_text() if spec is not None and there else None


@functools.cache
def _functions(source: str) -> list[tuple[str, int, int, str]]:
    """Return functions with a docstring: name, first and last line from 1, and the docstring's first line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            said = (ast.get_docstring(node) or "").split("\n")[0].strip()
            size = (node.end_lineno or node.lineno) - node.lineno
            if len(said) > 20 and size >= 8 and source.count(node.name) >= 3:
                found.append((node.name, node.lineno, node.end_lineno or node.lineno, said))
    return found


def _request(
    draw: random.Random, path: str, source: str, name: str, first: int, last: int, said: str
) -> Iterator[Step]:
    """Yield the turns of one request about a function."""
    lines = source.split("\n")
    last = min(last, first + LINES - 1)
    outline = [
        f"{at}: {line.strip()}" for at, line in enumerate(lines, 1) if line.lstrip().startswith(("def ", "class "))
    ]
    near = next(at for at, line in enumerate(outline) if int(line.split(":")[0]) >= first)
    searched = [f"{at}: {line.strip()}" for at, line in enumerate(lines, 1) if name in line]
    results = (
        ("outline", {"path": path}, outline[max(0, near - LINES // 2) :]),
        ("search", {"path": path, "text": name}, searched),
        ("read_lines", {"path": path, "first": first, "last": last}, lines[first - 1 : last]),
        ("help", {"words": said}, "".join(passage(load_haystack("topics"), draw.random(), 130)).split("\n")),
    )
    question: str | None = (
        f"What does `{name}` in {path} do, how does it do that, and where is it used? Its first line says: {said}"
    )
    seen = [said]
    for tool, arguments, found in results:
        shown = [line[:WIDTH] for line in found[:LINES]]
        yield Step(
            question,
            _reasoning(draw, name, path, seen),
            f"I call {tool} to learn more about `{name}` of {path}.",
            (tool, arguments),
            "\n".join(shown),
        )
        question = None
        seen = [line.strip() for line in shown if len(line.strip()) > 12] or seen
    yield Step(
        None,
        _reasoning(draw, name, path, seen),
        f"`{name}` begins in line {first} of {path}. {said} Its file names it in {len(searched)} lines, first in: "
        f"{searched[0][:WIDTH]}",
    )


def _reasoning(draw: random.Random, name: str, path: str, seen: list[str]) -> str:
    quoted = draw.sample(seen, min(3, len(seen)))
    memory = " ".join("".join(passage(load_haystack("topics"), draw.random(), 40)).split())
    parts = [f"The request is about `{name}` in {path}. I have just seen {len(seen)} lines."]
    parts += [f"This one may matter: {line}" for line in quoted]
    return "\n".join([*parts, f"I also remember this of the documentation: {memory}", "I should not guess."])


@dataclass(frozen=True)
class Turn:
    """The tokens of a turn.

    Attributes:
        prompt: int64 [1, N], everything before the answer.
        known: its first tokens that say again, changed, what the conversation has said before; 0 in the first turn.
        reply: int64 [1, M], the answer with its reasoning, up to its end of turn, which is not part of it.
    """

    prompt: torch.Tensor
    known: int
    reply: torch.Tensor


def turns_of(steps: list[Step], tokenizer: Any, kept: int) -> Iterator[Turn]:
    """Yield the tokens of each turn, in the model's chat template. kept: last tool results that stay, at least 1."""
    end = end_of_turn(tokenizer)
    for at, step in enumerate(steps):
        before = _messages(steps[:at], kept)
        question = [] if step.question is None else [{"role": "user", "content": step.question}]
        text = render(tokenizer, [*before, *question], tools=TOOLS)
        whole = render(tokenizer, [*before, *question, step.answer(reasoning=True)], ask=False, tools=TOOLS)
        if not whole.startswith(text):
            raise SystemExit("error: the model's chat template changes a prompt when its answer is complete")
        ids = token_ids(tokenizer, text)
        reply = token_ids(tokenizer, whole[len(text) :])
        known = 0
        if at:
            # The newest tool result or question is new, and the end of the last answer is not in a cache.
            past = before[:-1] if before[-1]["role"] == "tool" else before
            known = _up_to_last(token_ids(tokenizer, render(tokenizer, past, ask=False, tools=TOOLS)), ids, end)
        yield Turn(torch.tensor([ids]), known, torch.tensor([_without_end(reply, end)]))


def _messages(steps: list[Step], kept: int) -> list[dict[str, Any]]:
    """Return the messages of earlier turns as the next prompt has them."""
    notes = "".join(passage(load_haystack("topics"), 0, NOTES)).strip()
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"{SYSTEM}\n\n{notes}"}]
    results = [at for at, step in enumerate(steps) if step.result is not None]
    shown = set(results[-kept:])
    for at, step in enumerate(steps):
        if step.question is not None:
            messages.append({"role": "user", "content": step.question})
        messages.append(step.answer(reasoning=False))
        if step.result is not None:
            messages.append({"role": "tool", "content": step.result if at in shown else CLEARED})
    return messages


def _up_to_last(past: list[int], ids: list[int], end: int | None) -> int:
    """Return how many first tokens both have, short of the last end of turn."""
    size = next((at for at, pair in enumerate(zip(past, ids, strict=False)) if pair[0] != pair[1]), len(past))
    return size if end is None else max(at for at in range(size) if past[at] == end)


def _without_end(reply: list[int], end: int | None) -> list[int]:
    return reply[: len(reply) - reply[::-1].index(end) - 1] if end in reply else reply
