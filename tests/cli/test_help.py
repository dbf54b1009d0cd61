"""The help of every command: as stored in tests/data/help at 80 columns, in the field's words, with two examples."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import typer.main

from kvsieve.cli.main import app
from marker_words import Block, markers

FOLDER = Path(__file__).parents[1] / "data" / "help"
# typer draws the panels, and draws them anew now and then: the texts are those of this release.
TYPER = "0.29"
RENEW = "RENEW_HELP=1 pytest tests/cli/test_help.py"


def commands() -> Iterator[tuple[str, typer.main.TyperCommand]]:
    """Every command by its words, the groups among them; "" is `kvsieve` itself."""
    root = typer.main.get_command(app)
    yield "", root
    for name, command in root.commands.items():
        yield name, command
        for inner, one in getattr(command, "commands", {}).items():
            yield f"{name} {inner}", one


COMMANDS = dict(commands())


def lines_of(command) -> list[str]:
    """The examples of a command, without its name."""
    first, *found = (command.epilog or "").split("\n\n")
    assert first == "Examples:"
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_help_at_80_columns_is_as_stored(name, cli):
    if not metadata.version("typer").startswith(f"{TYPER}."):
        pytest.skip(f"the stored texts are drawn by typer {TYPER}")
    code, out, err = cli(*name.split(), "--help")
    text = "".join(f"{line.rstrip()}\n" for line in out.strip().splitlines())
    file = FOLDER / f"{name.replace(' ', '-') or 'kvsieve'}.txt"
    if os.environ.get("RENEW_HELP"):
        file.write_text(text)
    assert code == 0 and err == "" and max(map(len, text.splitlines())) <= 80
    stored = file.read_text() if file.exists() else ""
    assert text == stored, f"where the new text is meant, renew it: {RENEW}"


def test_no_text_is_stored_of_a_command_that_is_gone():
    assert {file.stem for file in FOLDER.iterdir()} == {name.replace(" ", "-") or "kvsieve" for name in COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_in_the_fields_words(name):
    command = COMMANDS[name]
    texts = {parameter.name: parameter.help or "" for parameter in command.params}
    assert markers([Block(" ".join([inspect.cleandoc(command.help or ""), *texts.values()]), 0, True)], name) == []
    for parameter in command.params:
        if parameter.name in ("install_completion", "show_completion"):
            continue  # typer's own
        text = texts[parameter.name]
        assert text[:1].isupper() and not text.endswith("."), (parameter.name, text)
        # typer prints a default that there is; of others the text says what happens without the option.
        if parameter.default is None and not parameter.required and not getattr(parameter, "is_flag", False):
            assert "(default" in text, (parameter.name, text)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name])
def test_options_are_grouped_where_there_are_many(name):
    options = [each for each in COMMANDS[name].params if isinstance(each, typer.main.TyperOption)]
    if len(options) > 3:
        assert [each.name for each in options if not each.rich_help_panel] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_two_examples_that_parse(name):
    found = lines_of(COMMANDS[name])
    assert len(found) == 2
    for line in found:
        program, *words = shlex.split(line)
        at = next(count for count in (2, 1) if " ".join(words[:count]) in COMMANDS)
        called = " ".join(words[:at])
        assert program == "kvsieve" and called.startswith(name)
        COMMANDS[called].make_context(called, words[at:])
