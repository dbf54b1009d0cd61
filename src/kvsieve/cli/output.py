"""What the commands print: JSON and results on stdout, everything else as single lines on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from kvsieve.errors import KvsieveWarning

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]


def emit_json(data: Any) -> None:
    print(json.dumps(data, indent=2, default=str))


def say(text: str) -> None:
    """Progress for people."""
    print(text, file=sys.stderr, flush=True)


def one_line(message: object) -> str:
    return " ".join(str(message).split()) or "no message"


@contextlib.contextmanager
def printed_warnings(everything: bool = False) -> Iterator[None]:
    """Show kvsieve's warnings as one line each; other libraries' are noise here, unless `everything` is asked for."""
    seen: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        text = one_line(message)
        ours = issubclass(category, KvsieveWarning) or text.startswith("kvsieve")
        if (ours or everything) and text not in seen:
            seen.add(text)
            say(f"warning: {text.removeprefix('kvsieve: ')}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def prefill_progress(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar over the prompt's tokens on stderr; None where nobody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens read")
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def print_table(headers: list[str], rows: list[list[str]], *, left: int = 1) -> None:
    """A table on stdout; all columns but the first `left` are numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def markdown_table(headers: list[str], rows: list[list[str]]) -> str:
    """The same as Markdown; a cell's own bars are escaped."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(one_cell.replace("|", "\\|") for one_cell in line) + " |" for line in lines)
