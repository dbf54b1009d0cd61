"""`kvsieve store`: what a store of prompts holds, and `--store` of other commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kvsieve.cli.output import JsonOption, emit_json, print_table, say, show
from kvsieve.display import mebibytes
from kvsieve.errors import CacheFileError, InputError

if TYPE_CHECKING:
    from kvsieve.store import PrefixStore

store_app = typer.Typer(help="Look after a store of prompts that were read (docs/chats.md).", no_args_is_help=True)
StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="DIR", help="Take beginnings of prompts from this store, and leave them to it."),
]
Place = Annotated[str, typer.Argument(metavar="DIR", help="Directory of the store.")]


@contextlib.contextmanager
def opened_store(path: str | None) -> Iterator[PrefixStore | None]:
    """The store of --store, written and closed in the end; None without one."""
    if path is None:
        yield None
        return
    from kvsieve.store import PrefixStore

    with PrefixStore(path) as store:
        yield store
        if not store.flush():
            say(f"warning: not all of the store could be written to {path!r}; see the log")


@store_app.command("ls")
def ls_command(path: Place, as_json: JsonOption = False) -> None:
    """List what a store holds, the longest prompts first; also while another process uses it."""
    from kvsieve.store import PrefixStore

    with PrefixStore(path, read_only=True) as store:
        nodes = store.nodes()
    if as_json:
        emit_json([node.to_dict() for node in nodes])
        return
    rows = [
        [
            node.key[:12],
            str(node.tokens),
            node.serves + " (pinned)" * node.pinned,
            node.plan,
            node.owner or "-",
            f"{node.seconds:.1f}",
            mebibytes(node.disk_bytes),
        ]
        for node in nodes
    ]
    print_table(["key", "tokens", "serves", "plan", "owner", "saves s", "size"], rows)
    show(f"{len(nodes)} nodes, {mebibytes(sum(node.disk_bytes for node in nodes))}")


@store_app.command("rm")
def rm_command(
    path: Place,
    keys: Annotated[list[str] | None, typer.Argument(help="Nodes, by the beginning of their keys.")] = None,
    owner: Annotated[str | None, typer.Option(help="All of this owner's.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All there are.")] = False,
) -> None:
    """Delete nodes of a store."""
    from kvsieve.store import PrefixStore

    if (bool(keys) + (owner is not None) + everything) != 1:
        raise InputError("name nodes by their keys, or give one of --owner NAME and --all")
    with PrefixStore(path) as store:
        chosen = [node.key for node in store.nodes()] if everything else keys or []
        show(f"{store.remove(*chosen, owner=owner)} nodes deleted")


@store_app.command("verify")
def verify_command(path: Place) -> None:
    """Verify the checksums of all files; damaged ones are set aside, and the exit code is 1."""
    from kvsieve.store import PrefixStore

    with PrefixStore(path) as store:
        count = len(store.nodes())
        store.verify()
        damaged = store.stats().damaged
    if damaged:
        raise CacheFileError(f"{damaged} damaged files were set aside in {path}/damaged; the others are fine")
    show(f"{count} nodes, all fine")


@store_app.command("export")
def export_command(
    path: Place,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Tar file to write.")],
    keys: Annotated[
        list[str] | None, typer.Argument(help="Nodes, by the beginning of their keys; all if none.")
    ] = None,
) -> None:
    """Write nodes of a store to one file, to take them elsewhere."""
    from kvsieve.store import PrefixStore

    with PrefixStore(path, read_only=True) as store:
        show(f"{store.export(file, *(keys or []))} nodes written to {file}")


@store_app.command("import")
def import_command(
    path: Place, file: Annotated[str, typer.Argument(metavar="FILE", help="What `kvsieve store export` wrote.")]
) -> None:
    """Take the nodes of an exported file into a store."""
    from kvsieve.store import PrefixStore

    with PrefixStore(path) as store:
        new = store.import_(file)
        if not store.flush():
            raise CacheFileError(f"the store at {path!r} could not be written; is the disk full?")
    show(f"{new} new nodes")
