"""Export and import of a store's nodes as one file."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvsieve.errors import CacheFileError, InputError
from kvsieve.folders import replacing
from kvsieve.store.content import StoredCache
from kvsieve.store.directory import Directory
from kvsieve.store.node import Node


def export(path: str | os.PathLike[str], nodes: Sequence[tuple[Node, StoredCache]]) -> int:
    """Write nodes to a tar file of saved caches; see PrefixStore.export."""
    target = Path(path)
    if target.exists():
        raise InputError(f"{os.fspath(path)!r} is there already; name another file")
    try:
        with (
            tempfile.TemporaryDirectory(dir=target.parent) as folder,
            replacing(target) as out,
            tarfile.open(fileobj=out, mode="w") as tar,
        ):
            directory = Directory(folder, read_only=True)
            for node, content in nodes:
                file, _ = directory.write(node, content)
                tar.add(file, file.name)
                file.unlink()
    except OSError as error:
        raise CacheFileError(f"{os.fspath(path)!r} cannot be written: {error.strerror or error}") from error
    return len(nodes)


def read_nodes(path: str | os.PathLike[str]) -> Iterator[Node]:
    """Yield the nodes of an `export` file with their content, each verified.

    Raises:
        CacheFileError: an invalid file, or a damaged node.
    """
    try:
        with tarfile.open(path) as tar, tempfile.TemporaryDirectory() as folder:
            directory = Directory(folder, read_only=True)
            for member in tar:
                file = tar.extractfile(member)
                name = Path(member.name).name
                if file is None or name != member.name:
                    raise CacheFileError(f"{os.fspath(path)!r} holds {member.name!r}, which is no node of a store")
                place = Path(folder) / name
                with open(place, "wb") as out:
                    while part := file.read(1 << 20):
                        out.write(part)
                node = directory.node(place)
                content = None if node is None else directory.read(node)
                if node is None or content is None:
                    raise CacheFileError(f"{os.fspath(path)!r} holds a damaged node, {name}; use another copy")
                place.unlink()
                node.content = content.own()
                node.path = None
                node.file_bytes = 0
                yield node
    except (OSError, tarfile.TarError) as error:
        raise CacheFileError(f"{os.fspath(path)!r} cannot be read as an exported store: {error}") from error
