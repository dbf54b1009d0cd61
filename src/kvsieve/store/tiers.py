"""The tiers of a store: memory, and a directory with write-back."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator

from kvsieve.store.content import StoredCache, Stretch
from kvsieve.store.directory import Directory
from kvsieve.store.forest import Forest
from kvsieve.store.node import Node
from kvsieve.store.radix import Tokens
from kvsieve.store.replacement import Replacement
from kvsieve.store.rules import Request
from kvsieve.store.stats import Ledger
from kvsieve.store.writer import Writer

# Bytes beyond the budget that unwritten nodes may take at least.
_MAY_WAIT = 256 << 20


class Tiers:
    """Nodes, their tiers, and eviction from both.

    All methods but `flush`, `close`, `verify` and `import_` are called with the store's lock taken.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, memory: int, disk: int | None, read_only: bool, lock: threading.RLock
    ) -> None:
        """See PrefixStore. lock: the store's."""
        self._memory = memory
        self._disk = disk
        self._lock = lock
        self._trees = Forest()
        self._nodes: dict[str, Node] = {}
        self._ledger, self._counts = Ledger(), Counter[str]()
        self._file_bytes = 0
        self._leaves_memory = Replacement(self._trees.saves, self.own_bytes)
        self._leaves_disk = Replacement(self._trees.saves, lambda node: node.file_bytes)
        self._directory = None if path is None else Directory(path, read_only)
        self._writer: Writer | None = None
        if self._directory is not None:
            for node in self._directory.nodes():
                self._put(node)
            if not read_only:
                self._writer = Writer(self._write)
                self._fit_disk()

    def __iter__(self) -> Iterator[Node]:
        return iter([*self._nodes.values()])

    def __contains__(self, key: str) -> bool:
        return key in self._nodes

    def best(self, key: str, owners: tuple[str, ...], ids: Tokens, request: Request) -> tuple[Node | None, int]:
        """Return the node with most tokens that a request may reuse, and their number; see Forest."""
        return self._trees.best(key, owners, ids, request)

    def alike(self, node: Node) -> tuple[Stretch, ...]:
        """Return the entries in memory of the node with the longest common prefix."""
        for other, common in self._trees.along(node):
            if other.in_memory and other.content is not None and other.content.stretches:
                return other.content.begins(min(common, other.reuse.tokens))
        return ()

    def add(self, node: Node) -> Node:
        """Add a node, or return the equal one that exists, with its content in memory again."""
        known = self._nodes.get(node.key)
        if known is not None:
            known.pinned = known.pinned or node.pinned
            self._touch(known)
            return known
        assert node.content is not None
        self._ledger.add(node.content.places().items())
        node.waits = self._writer is not None
        self._put(node)
        for shorter in self._trees.replaced_by(node):
            node.replaces += [shorter, *shorter.replaces]
            shorter.replaces.clear()
            self._counts["replaced"] += 1
            self._drop(shorter)
        if self._writer is not None:
            self._writer.put(node)
        self._fit_memory()
        return node

    def content(self, node: Node) -> StoredCache | None:
        """Return a node's content, loaded from its file if necessary; drop the node and return None if it is lost."""
        if node.content is None:
            assert self._directory is not None
            node.content = self._directory.read(node)
            if node.content is None:
                self._drop(node)
        return node.content

    def found(self, node: Node) -> None:
        """Record a hit of a node."""
        node.hits += 1
        self._touch(node)
        if self._directory is not None:
            self._directory.used(node)

    def own_bytes(self, node: Node) -> int:
        """Return the bytes of memory freed by removing a node."""
        return self._ledger.own(node.content.places().items()) if node.content is not None and node.in_memory else 0

    def pin(self, node: Node, pinned: bool) -> None:
        """Protect a node from eviction, or undo that, and write that to its file."""
        node.pinned = pinned
        self._touch(node)
        if self._writer is not None and self.content(node) is not None and not node.waits:
            node.waits = True
            self._leaves_memory.change(node)
            self._writer.put(node)

    def remove(self, node: Node) -> None:
        """Delete a node from memory and disk."""
        self._drop(node)
        for entry in (node, *node.replaces):
            if entry.path is not None and self._directory is not None:
                self._directory.delete(entry.path)
        node.replaces.clear()

    def counts(self) -> dict[str, int]:
        """Counts for StoreStats."""
        state = {
            "nodes": len(self._nodes),
            "memory_nodes": sum(node.in_memory for node in self),
            "disk_nodes": sum(node.path is not None for node in self),
            "memory_bytes": self._ledger.bytes,
            "disk_bytes": self._file_bytes,
            "damaged": 0 if self._directory is None else self._directory.damaged,
        }
        if self._writer is not None:
            state |= {"written": self._writer.written, "write_errors": self._writer.errors}
            state["waiting"] = sum(node.waits for node in self)
        return {**self._counts, **state}

    def flush(self) -> bool:
        """Write all unwritten nodes; return False if some cannot be written."""
        return self._writer is None or self._writer.flush()

    def close(self) -> None:
        """Write waiting nodes, and release the directory."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._directory is not None:
            self._directory.close()

    def verify(self) -> list[str]:
        """Verify every file; damaged ones are moved to ``damaged/`` and their keys returned."""
        damaged = []
        for node in [*self]:
            with self._lock:
                if self._directory is None or node.path is None or node.is_removed:
                    continue
                before = self._directory.damaged
                if self._directory.read(node) is None:
                    if self._directory.damaged > before:
                        damaged.append(node.key)
                    self._no_file(node)
        return damaged

    def _put(self, node: Node) -> None:
        self._nodes[node.key] = node
        self._trees.add(node)
        if node.path is not None:
            self._file_bytes += node.file_bytes
        self._touch(node)
        self._changes_near(node)

    def _touch(self, node: Node) -> None:
        """Record that a node is new, was hit, or became evictable in a tier."""
        for leaves, here in ((self._leaves_memory, node.in_memory), (self._leaves_disk, node.path is not None)):
            if here and not node.pinned and not node.is_removed:
                leaves.touch(node)
            else:
                leaves.remove(node)

    def _changes_near(self, node: Node) -> None:
        """Record changed worths and bytes of the nodes near one that was added or removed."""
        for other in self._trees.near(node):
            self._leaves_memory.change(other)
            self._leaves_disk.change(other)

    def _drop(self, node: Node) -> None:
        """Remove a node from the trees and from memory."""
        if node.is_removed:
            return
        node.is_removed = True
        del self._nodes[node.key]
        self._trees.remove(node)
        if node.path is not None:
            self._file_bytes -= node.file_bytes
        self._leaves_disk.remove(node)
        self._forget(node)

    def _forget(self, node: Node) -> None:
        if node.content is not None and node.in_memory:
            self._ledger.remove(node.content.places().items())
        node.content = None
        self._leaves_memory.remove(node)
        self._changes_near(node)

    def _no_file(self, node: Node) -> None:
        """Record that a node lost its file; without memory of its own it is dropped."""
        node.path = None
        self._file_bytes -= node.file_bytes
        self._leaves_disk.remove(node)
        if not node.in_memory:
            self._drop(node)

    def _fit_memory(self) -> None:
        """Evict nodes from memory until the others fit; unwritten ones only beyond the write-back limit."""
        while (over := self._ledger.bytes - self._memory) > 0:
            node = self._leaves_memory.next()
            if node is None and over > max(self._memory, _MAY_WAIT):
                node = self._leaves_memory.next(waiting=True)
            if node is None:
                return
            self._counts["evictions"] += 1
            if node.path is not None:
                self._forget(node)
                continue
            self._drop(node)
            for other in node.replaces:
                # Never written, so the nodes that it was to replace stay.
                if other.path is not None:
                    other.is_removed = False
                    self._put(other)
            node.replaces.clear()

    def _fit_disk(self, coming: int = 0) -> None:
        """Delete files until the others and `coming` bytes fit."""
        while self._disk is not None and self._directory is not None and self._file_bytes + coming > self._disk:
            node = self._leaves_disk.next() or self._leaves_disk.next(waiting=True)
            if node is None:
                return
            self._counts["disk_evictions"] += 1
            assert node.path is not None
            self._directory.delete(node.path)
            self._no_file(node)

    def _write(self, node: Node) -> None:
        """Write a waiting node; called by the writer's thread, without the lock."""
        assert self._directory is not None
        with self._lock:
            content = node.content
            size = 0 if content is None else sum(part.numel() * part.element_size() for part in content.all_tensors())
            too_large = self._disk is not None and size > self._disk and not node.pinned
            if content is None or node.is_removed or too_large:
                self._is_written(node)
                return
            self._fit_disk(size)
        path, file_bytes = self._directory.write(node, content)
        with self._lock:
            if node.is_removed:
                # Removed, or replaced, while it was written.
                node.waits = False
                self._directory.delete(path)
                return
            self._file_bytes += file_bytes - (0 if node.path is None else node.file_bytes)
            node.path = path
            node.file_bytes = file_bytes
            for other in node.replaces:
                if other.path is not None:
                    self._directory.delete(other.path)
            node.replaces.clear()
            self._is_written(node)

    def _is_written(self, node: Node) -> None:
        node.waits = False
        self._leaves_memory.change(node)
        if node.path is not None and not node.pinned:
            self._leaves_disk.touch(node)
        self._fit_memory()

    def export(self, path: str | os.PathLike[str], nodes: list[Node]) -> int:
        from kvsieve.store.transfer import export

        return export(path, [(node, content) for node in nodes if (content := self.content(node)) is not None])

    def import_(self, path: str | os.PathLike[str]) -> int:
        from kvsieve.store.transfer import read_nodes

        new = 0
        for node in read_nodes(path):
            with self._lock:
                if node.key not in self:
                    self.add(node)
                    new += 1
        return new
