"""Nodes as files of one directory, with one writing process."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from kvsieve.errors import CacheFileError, InputError, MissingFileError
from kvsieve.folders import UNFINISHED
from kvsieve.hf.persist.cache_file import opened
from kvsieve.hf.persist.saved import checked_tensors, understood, write_cache
from kvsieve.store.content import StoredCache, Whole, mapped
from kvsieve.store.identity import Identity, node_key
from kvsieve.store.node import Node, reuse_from

_log = logging.getLogger(__name__)
_SUFFIX = ".kv"
_LOCK = "lock"
_ASIDE = "damaged"


class Directory:
    """Files of nodes, each a saved cache. A writing process holds the directory's lock."""

    def __init__(self, path: str | os.PathLike[str], read_only: bool) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self.damaged = 0
        self._lock: BinaryIO | None = None
        if not os.fspath(path):
            raise InputError("the directory of a store has an empty name; write . for the current one")
        if read_only:
            if not self.path.is_dir():
                raise InputError(f"there is no store at {os.fspath(path)!r}; name the directory of one")
            return
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._locked()
        except InputError:
            raise
        # A name with a null character is a ValueError.
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise InputError(
                f"cannot use {os.fspath(path)!r} as the directory of a store: {reason}; name one that can be written to"
            ) from error
        for left in self.path.glob(f".*{UNFINISHED}"):
            with contextlib.suppress(OSError):
                left.unlink()

    def _locked(self) -> BinaryIO:
        file = open(self.path / _LOCK, "a+b", opener=lambda path, flags: os.open(path, flags, 0o600))  # noqa: SIM115
        try:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except BlockingIOError:
            file.seek(0)
            who = file.read(20).decode(errors="replace").strip() or "another one"
            file.close()
            raise InputError(
                f"the store at {os.fspath(self.path)!r} is in use by process {who}, and only one may write to it: end "
                "that one, name another directory, or open it to read only (read_only=True)"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        return file

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def nodes(self) -> Iterator[Node]:
        """Yield the directory's nodes, least recently used first; unreadable files are moved to ``damaged/``."""
        files = []
        for path in filter(_is_node, self.path.glob(f"*{_SUFFIX}")):
            with contextlib.suppress(OSError):
                files.append((path.stat().st_mtime, path))
        for _, path in sorted(files):
            node = self.node(path)
            if node is not None:
                yield node

    def node(self, path: Path) -> Node | None:
        """Return the node of a file without its content, or None if the file is missing or damaged."""
        try:
            with opened(path) as (header, file), understood(path):
                ids = file.get_tensor(header["ids"]["tensor"])[0].numpy().astype(np.int64)
                stored = header["extra"]["store"]
                identity = Identity.of(header)
                reuse = reuse_from(stored["reuse"])
                # Files of earlier versions are exact.
                rules = tuple(stored.get("approximate", ()))
                facts = identity, stored["owner"], ids, reuse, stored["seconds"], stored["pinned"], rules
                node = Node(path.stem, *facts)
                node.path, node.file_bytes = path, path.stat().st_size
                if len(ids) != reuse.tokens or path.stem != name_of(node):
                    raise CacheFileError(f"{path} is not the node that its name says; it was renamed or changed")
                return node
        except (MissingFileError, FileNotFoundError):
            return None
        except CacheFileError as error:
            self.quarantine(path, error)
            return None

    def read(self, node: Node) -> StoredCache | None:
        """Return a node's content, memory-mapped from its file, or None if the file is missing or damaged."""
        assert node.path is not None
        try:
            with opened(node.path) as (header, file), understood(node.path):
                tensors = checked_tensors(node.path, header, file, lambda part: part)
                if node.key != name_of(node) or Identity.of(header).key != node.identity.key:
                    raise CacheFileError(f"{node.path} is another node than it was")
                del tensors[header["ids"]["tensor"]]
                return mapped({name: header[name] for name in ("cache", "layers")}, tensors)
        except MissingFileError:
            return None
        except CacheFileError as error:
            self.quarantine(node.path, error)
            return None

    def write(self, node: Node, content: StoredCache) -> tuple[Path, int]:
        """Write a node's file atomically and return it with its size. Raises CacheFileError."""
        import torch

        path = self.path / f"{node.key}{_SUFFIX}"
        ids = torch.from_numpy(node.ids)[None]
        tensor = {"tensor": "ids", "host": False, "dtype": "I64", "shape": list(ids.shape)}
        header: dict[str, Any] = {
            **node.identity.header,
            **content.facts,
            "ids": tensor,
            "extra": {"store": node.extra()},
        }
        write_cache(path, header, ChainMap({"ids": ids}, cast("dict[str, Any]", Whole(content))))
        return path, path.stat().st_size

    def used(self, node: Node) -> None:
        """Record a hit in the file's time, so that recency survives a restart."""
        if node.path is not None and not self.read_only:
            with contextlib.suppress(OSError):
                os.utime(node.path)

    def delete(self, path: Path) -> None:
        """Delete a node's file, if it exists."""
        if not self.read_only:
            with contextlib.suppress(OSError):
                path.unlink()

    def quarantine(self, path: Path, why: Exception) -> None:
        """Move a damaged file to ``damaged/`` for inspection."""
        self.damaged += 1
        _log.warning("a node of the store is set aside: %s", why)
        if not self.read_only:
            with contextlib.suppress(OSError):
                (self.path / _ASIDE).mkdir(mode=0o700, exist_ok=True)
                os.replace(path, self.path / _ASIDE / path.name)


def _is_node(path: Path) -> bool:
    """Return whether a file has a node's name; others, such as saved chats, may be in the same directory."""
    return re.fullmatch("[0-9a-f]{32}", path.stem) is not None


def name_of(node: Node) -> str:
    reuse = node.reuse
    place = "half" if reuse.half_read else "answered" if reuse.answered else "end"
    chunk = "" if reuse.chunk is None else f" by {reuse.chunk}"
    rules = "".join(f" {rule}" for rule in node.approximate)
    return node_key(node.identity, node.owner, node.ids, f"{place} {reuse.turns}{chunk}{rules}")
