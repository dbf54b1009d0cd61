"""`kvsieve store`: maintenance of a prefix cache; and `--store` of other commands."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kvsieve.cli.options import CACHE, examples, expanded, option
from kvsieve.cli.output import JsonOption, check_folder, check_writable, emit_json, print_table, say, show
from kvsieve.errors import CacheFileError, InputError
from kvsieve.report.display import mebibytes

if TYPE_CHECKING:
    from kvsieve.planning.plans import Plan
    from kvsieve.store import PrefixStore

store_app = typer.Typer(
    help="Prefix cache on disk: list, verify, delete, export and import its entries (docs/chats.md).",
    epilog=examples("store ls prefixes", "store verify prefixes"),
)
StoreOption = Annotated[
    str | None,
    option(
        CACHE,
        "Prefix-cache directory: reuse stored prompt prefixes, add new ones (default: none)",
        metavar="DIR",
        callback=expanded,
    ),
]
Place = Annotated[str, typer.Argument(metavar="DIR", help="Prefix-cache directory", callback=expanded)]


def check_store(path: str | None, protect: list[str] | None = None) -> None:
    """Raise InputError for a --store that is a file, or that would store tokens protected from it."""
    check_folder("--store", path)
    if path is not None and protect:
        raise InputError("--protect keeps tokens that others may not want kept, so it goes without --store")


def check_existing(path: str, keys: list[str] | None = None) -> None:
    """Raise InputError for a missing directory or an invalid key, before heavy imports."""
    if not os.path.isdir(path):
        raise InputError(f"there is no store at {path!r}; name the directory of one")
    for key in keys or ():
        if not re.fullmatch("[0-9a-f]+", key):
            raise InputError(f"a key is of the digits 0 to 9 and a to f, as `kvsieve store ls` lists them, got {key!r}")


def check_stored_plans(path: str | None, plans: Iterable[Plan]) -> None:
    if path is not None:
        from kvsieve.hf.reuse import check_plans

        check_plans(plans)


@store_app.callback(invoke_without_command=True)
def _show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@contextlib.contextmanager
def opened_store(path: str | None) -> Iterator[PrefixStore | None]:
    if path is None:
        yield None
        return
    from kvsieve.store import PrefixStore

    with PrefixStore(path) as store:
        yield store
        if not store.flush():
            say(f"warning: not all of the store could be written to {path!r}; see the log")


@store_app.command("ls", epilog=examples("store ls prefixes", "store ls prefixes --json"))
def ls_command(path: Place, as_json: JsonOption = False) -> None:
    """List the entries of a prefix cache, longest first; safe while another process uses it."""
    check_existing(path)
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
            ", ".join(node.approximate) or "exact",
            node.plan,
            node.owner or "-",
            f"{node.seconds:.1f}",
            mebibytes(node.disk_bytes),
        ]
        for node in nodes
    ]
    print_table(["key", "tokens", "serves", "entries", "plan", "owner", "saves s", "size"], rows)
    show(f"{len(nodes)} nodes, {mebibytes(sum(node.disk_bytes for node in nodes))}")


@store_app.command("rm", epilog=examples("store rm prefixes 3f2a91", "store rm prefixes --all"))
def rm_command(
    path: Place,
    keys: Annotated[list[str] | None, typer.Argument(help="Keys, or their first digits (default: none)")] = None,
    owner: Annotated[str | None, typer.Option(help="Owner: delete all of its entries (default: none)")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete all entries")] = False,
) -> None:
    """Delete entries of a prefix cache."""
    if (bool(keys) + (owner is not None) + everything) != 1:
        raise InputError("name nodes by their keys, or give one of --owner NAME and --all")
    check_existing(path, keys)
    from kvsieve.store import PrefixStore

    with PrefixStore(path) as store:
        chosen = [node.key for node in store.nodes()] if everything else keys or []
        show(f"{store.remove(*chosen, owner=owner)} nodes deleted")


@store_app.command("verify", epilog=examples("store verify prefixes", "store verify /srv/kvsieve/prefixes"))
def verify_command(path: Place) -> None:
    """Verify all checksums; move damaged files to DIR/damaged and exit with 1."""
    check_existing(path)
    from kvsieve.store import PrefixStore

    with PrefixStore(path) as store:
        count = len(store.nodes())
        store.verify()
        damaged = store.stats().damaged
    if damaged:
        raise CacheFileError(f"{damaged} damaged files were moved to {path}/damaged; the others are fine")
    show(f"{count} nodes, all fine")


@store_app.command("export", epilog=examples("store export prefixes all.tar", "store export prefixes one.tar 3f2a91"))
def export_command(
    path: Place,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Tar file to write", callback=expanded)],
    keys: Annotated[list[str] | None, typer.Argument(help="Keys, or their first digits (default: all)")] = None,
) -> None:
    """Export entries of a prefix cache to a tar file."""
    check_existing(path, keys)
    check_writable("FILE", file)
    if os.path.exists(file):
        raise InputError(f"{file!r} is there already; name another file")
    from kvsieve.store import PrefixStore

    with PrefixStore(path, read_only=True) as store:
        show(f"{store.export(file, *(keys or []))} nodes written to {file}")


@store_app.command("import", epilog=examples("store import prefixes all.tar", "store import prefixes one.tar"))
def import_command(
    path: Place,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Tar file of `kvsieve store export`", callback=expanded)],
) -> None:
    """Import the entries of an exported tar file."""
    check_folder("DIR", path)
    if not os.path.isfile(file):
        raise InputError(f"there is no file {file!r}; name one that `kvsieve store export` wrote")
    from kvsieve.store import PrefixStore

    with PrefixStore(path) as store:
        new = store.import_(file)
        if not store.flush():
            raise CacheFileError(f"the store at {path!r} could not be written; is the disk full?")
    show(f"{new} new nodes")
