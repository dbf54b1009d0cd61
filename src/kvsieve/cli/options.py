"""Options that several commands share, the panels that group options in `--help`, and the examples at its end."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from kvsieve.errors import InputError, KvsieveError, short
from kvsieve.planning.quantities import is_tokens, parse_bytes, parse_tokens

# Panels that options are grouped in.
PROMPT = "Prompt"
METHOD = "Method"
GENERATION = "Generation"
MODEL = "Model"
TASKS = "Tasks"
MEASUREMENT = "Measurement"
SERVER = "Server"
LIMITS = "Limits"
CACHE = "Prefix cache"
OUTPUT = "Output"


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """Return a typer option that `--help` prints in a panel.

    Args:
        panel: title of the panel.
        text: help: starts with a noun, and ends with the default if typer does not print it.
        names: of the option (default: the parameter's).
        more: further arguments of `typer.Option`.
    """
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def tokens(value: object) -> int:
    """Parse a number of tokens: 8192 or 8k. Raises typer.BadParameter."""
    text = str(value)
    if not is_tokens(text):
        raise typer.BadParameter(f"expected tokens such as 7500 or 8k, got {short(text)}")
    return parse_tokens(text, "it")


def memory(value: object) -> int:
    """Parse a number of bytes: 2GiB or 300MB. Raises typer.BadParameter."""
    try:
        return parse_bytes(str(value))
    except KvsieveError as error:
        raise typer.BadParameter(str(error)) from error


def expanded(path: Any) -> Any:
    """Return a path, paths or None with ~ expanded, which shells leave as it is in ``--option=~/path``."""
    if isinstance(path, (list, tuple)):
        return [expanded(part) for part in path]
    return None if path is None else type(path)(os.path.expanduser(path))


def options_given(context: typer.Context) -> set[str]:
    """Return the parameters that were given, on the command line or in a file, by their names in Python."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    explicit = ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")
    return {name for name, source in sources.items() if source is not None and source.name in explicit}


def refuse_unused(context: typer.Context, used: Iterable[str], why: str) -> None:
    """Raise InputError for a given option that has no effect.

    Args:
        context: of the command.
        used: parameters that have one, by their names in Python.
        why: the others have none, and what to do.
    """
    if unused := sorted(options_given(context) - {*used}):
        raise InputError(f"{', '.join('--' + name.replace('_', '-') for name in unused)}: {why}")


def refuse_option(context: typer.Context, name: str, why: str) -> None:
    """Raise InputError if one option is given, by its name in Python, that has no effect; see `refuse_unused`."""
    refuse_unused(context, context.params.keys() - {name}, why)


TOKENS: dict[str, Any] = {"parser": tokens, "metavar": "TOKENS"}
MEMORY: dict[str, Any] = {"parser": memory, "metavar": "SIZE"}


def examples(*commands: str) -> str:
    # typer joins lines and keeps paragraphs.
    return "\n\n".join(["Examples:", *(f"kvsieve {command}" for command in commands)])


ModelArgument = Annotated[
    str | None, typer.Argument(help="Hub id, checkpoint directory or .gguf file (default: the demo model)")
]
SettingsOption = Annotated[
    list[str] | None,
    option(
        METHOD,
        "Parameter of the method; repeatable (default: as `kvsieve methods` lists)",
        "--set",
        metavar="NAME=VALUE",
    ),
]
ProfileOption = Annotated[
    str | None, option(METHOD, "Profile of `kvsieve calibrate`: file or shipped name (default: the model's own)")
]
ProtectOption = Annotated[
    list[str] | None,
    option(
        METHOD, "Tokens never to evict: system, user, or a span A:B; repeatable (default: none)", metavar="ROLE|A:B"
    ),
]
TemperatureOption = Annotated[float | None, option(GENERATION, "Sampling temperature (default 0: greedy)")]
SeedOption = Annotated[int | None, option(GENERATION, "Random seed for sampling (default: a new one)")]
SystemOption = Annotated[str | None, option(PROMPT, "System prompt (default: the chat template's, if any)")]
MaxNewTokensOption = Annotated[int, option(GENERATION, "Longest answer, in tokens", **TOKENS)]
ChunkOption = Annotated[int, option(GENERATION, "Prefill chunk, in tokens", **TOKENS)]
WholeChunkOption = Annotated[
    int | None, option(GENERATION, "Prefill chunk, in tokens (default: the whole prompt)", **TOKENS)
]
GeneratedSeedOption = Annotated[int, option(TASKS, "Random seed of the generated prompts")]
MarkdownOption = Annotated[bool, option(OUTPUT, "Markdown instead of text", "--markdown")]
