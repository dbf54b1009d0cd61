"""Output of the commands: JSON and results on stdout, single lines of progress and errors on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from kvsieve.cli.options import OUTPUT, option
from kvsieve.errors import InputError, KvsieveWarning
from kvsieve.text import printable, shortened

JsonOption = Annotated[bool, option(OUTPUT, "JSON on stdout, and nothing else there", "--json")]
WideOption = Annotated[bool, option(OUTPUT, "All columns, for terminals of more than 80 columns", "--wide")]


def check_writable(option: str, name: str | os.PathLike[str] | None, *, makes_folders: bool = False) -> None:
    """Raise InputError for a file that cannot be written, before anything is computed for it."""
    if name is None:
        return
    target = Path(os.path.expanduser(name)).absolute()
    label = f"{option} {os.fspath(name)!r}"
    while makes_folders and not target.parent.exists():
        target = target.parent
    if target.is_dir():
        raise InputError(f"{label} is a directory; name a file in it")
    if not target.parent.is_dir():
        raise InputError(f"cannot write {label}: there is no directory {str(target.parent)!r}")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise InputError(f"cannot write {label}: no permission to write there")


def check_folder(option: str, name: str | os.PathLike[str] | None) -> None:
    """Raise InputError for a directory that is a file; a missing one is created later."""
    if name is not None and os.path.isfile(os.path.expanduser(name)):
        raise InputError(f"{option} {os.fspath(name)!r} is a file; name a directory")


def saved(option: str, name: str | os.PathLike[str], data: str | bytes) -> bool:
    """Write a file beside results; print why that failed and return False, so that the results are still printed."""
    try:
        Path(os.path.expanduser(name)).write_bytes(data if isinstance(data, bytes) else data.encode())
    except OSError as error:
        say(f"error: cannot write {option} {os.fspath(name)!r}: {error.strerror or error}")
        return False
    return True


def emit_json(data: Any) -> None:
    print(json.dumps(data, indent=2, default=str))


def show(text: str = "", *, end: str = "\n") -> None:
    """Print results on stdout."""
    print(printable(text), end=end, flush=True)


def say(text: str, *, dim: bool = False) -> None:
    """Print progress on stderr."""
    text = printable(text)
    print(f"\x1b[2m{text}\x1b[0m" if dim else text, file=sys.stderr, flush=True)


def wrapped(text: str, indent: str = "") -> str:
    """Wrap the text to the terminal's width, with all lines but the first indented by four more."""
    width = shutil.get_terminal_size((80, 24)).columns
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent="    ", break_on_hyphens=False)


def one_line(message: object) -> str:
    return printable(shortened(" ".join(str(message).split()))) or "no message"


@contextlib.contextmanager
def printed_warnings(everything: bool = False) -> Iterator[None]:
    """Show kvsieve's warnings as one line each, and others only if `everything`."""
    seen: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        text = one_line(message)
        from_kvsieve = issubclass(category, KvsieveWarning) or text.startswith("kvsieve")
        if (from_kvsieve or everything) and text not in seen:
            seen.add(text)
            say(f"warning: {text.removeprefix('kvsieve: ')}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def prefill_progress(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar over the prompt's tokens on stderr; None without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TextColumn("tokens read"), console=console, transient=True) as progress:
        task = progress.add_task(printable(label), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar with the time left on stderr; occasional lines without a terminal."""
    import time

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        began = time.monotonic()
        last = [time.monotonic()]

        def note(done: int, total: int, what: str) -> None:
            now = time.monotonic()
            if now - last[0] > 60 and done:
                last[0] = now
                say(f"{done} of {total} done, about {(now - began) / done * (total - done) / 60:.0f} minutes left")

        yield note
        return
    columns: list[Any] = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()]
    columns += [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()]
    # The last minutes predict the rest better than all: samples differ a lot.
    with Progress(*columns, console=console, speed_estimate_period=300) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda done, total, what: progress.update(task, completed=done, total=total, description=what)


# Columns of a table without a terminal, and with `--wide`.
NARROW = 80
WIDE = 200


def print_table(headers: list[str], rows: list[list[str]], *, left: int = 1, width: int = 120) -> None:
    """Print a table on stdout.

    Args:
        headers: of the columns.
        rows: their cells.
        left: number of text columns, the first ones; the others are numbers.
        width: characters per line if stdout is no terminal.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=width)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for index, header in enumerate(headers):
        table.add_column(Text(printable(header)), justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(table)
