"""Five usual tasks, from README to the command to type: words to look for, links to follow, at most two."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer

from doc_pages import commands, sections
from kvsieve.cli.main import app

ROOT = Path(__file__).parent.parent
# Lines of text that a reader looks through after the last click.
MOST_LINES = 45


@dataclass(frozen=True)
class Task:
    """A task: the words in README that it is found by, the links from there, and the command with its options."""

    words: str
    clicks: tuple[str, ...]
    command: str
    options: dict[str, Any] = field(default_factory=dict)


TASKS = {
    "which method for a chat about one document": Task(
        "| a conversation about one document | `rocketkv-mt`", (), "chat", {"method": "rocketkv-mt"}
    ),
    "keep the system prompt": Task(
        "| keep the system prompt |",
        ("docs/options.md#tokens-that-must-stay-protect-quotas",),
        "run",
        {"protect": ["system"]},
    ),
    "stay below 2 GB": Task(
        "| stay below 2 GB of memory |", ("docs/performance.md#peak-memory",), "run", {"memory": 2 << 30}
    ),
    "4-bit weights": Task("| run 4-bit weights |", ("docs/weights.md",), "chat", {"model": "model-q4_k_m.gguf"}),
    "behind nginx": Task(
        "| serve behind nginx |",
        ("docs/serving.md#behind-nginx",),
        "serve",
        {"allow_host": ["llm.example.org"]},
    ),
}


def walk(task: Task) -> str:
    """The text at the end of a task's links: README, or the section that the last link leads to."""
    page, text = ROOT / "README.md", (ROOT / "README.md").read_text()
    seen = next(line for line in text.splitlines() if line.startswith(task.words))
    for link in task.clicks:
        assert f"]({link})" in seen, f"{page.name}: no link {link} beside {task.words!r}"
        path, _, place = link.partition("#")
        page = (page.parent / path).resolve()
        seen = text = sections(page.read_text())[place]
    return text


@pytest.mark.parametrize("name", TASKS)
def test_a_usual_task_is_found_in_two_clicks(name):
    task = TASKS[name]
    assert len(task.clicks) <= 2
    text = walk(task)
    if task.clicks:
        text = "\n".join(text.splitlines()[:MOST_LINES])
    command = typer.main.get_command(app).commands[task.command]
    found = [arguments for word, *arguments in commands(text) if word == task.command]
    parsed = [command.make_context(task.command, arguments).params for arguments in found]
    assert any(all(each.get(key) == value for key, value in task.options.items()) for each in parsed), parsed
