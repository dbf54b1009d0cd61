"""The tiers of a store: memory, and a directory that is written behind."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator

from kvsieve.store.directory import Directory
from kvsieve.store.held import Held, Stretch
from kvsieve.store.node import Node
from kvsieve.store.radix import RadixTree, Tokens
from kvsieve.store.replacement import Replacement
from kvsieve.store.stats import Ledger
from kvsieve.store.writer import Writer

# Bytes that nodes may take beyond the budget, if that is more, until they are written.
_MAY_WAIT = 256 << 20
# Of nodes that are compared to find what another one shares with them.
_LOOKED_AT = 64


class Tiers:
    """Nodes, where they lie, and which of them go when there are too many.

    All but `flush`, `close`, `verify` and `import_` are called with the store's lock held.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, memory: int, disk: int | None, read_only: bool, lock: threading.RLock
    ) -> None:
        """See PrefixStore. lock: the store's."""
        self._memory, self._disk, self._lock = memory, disk, lock
        self._trees: defaultdict[tuple[str, str], RadixTree[Node]] = defaultdict(RadixTree)
        self._nodes: dict[str, Node] = {}
        self._ledger, self._counts = Ledger(), Counter[str]()
        self._leaves_memory, self._leaves_disk = Replacement(), Replacement()
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

    def along(self, tree: tuple[str, str], ids: Tokens) -> Iterator[tuple[Node, int]]:
        """Yield nodes of a tree and how many tokens they have in common with `ids`, the most first."""
        return self._trees[tree].along(ids) if tree in self._trees else iter(())

    def alike(self, node: Node) -> tuple[Stretch, ...]:
        """Return entries in memory of the node that has most tokens in common with another one."""
        for other, common in itertools.islice(self.along(node.tree, node.ids), _LOOKED_AT):
            if other.in_memory and other.held is not None and other.held.stretches:
                return other.held.begins(min(common, other.reuse.tokens))
        return ()

    def add(self, node: Node) -> Node:
        """Take in a node, unless it is there: then that one is returned, and holds what it holds again."""
        known = self._nodes.get(node.key)
        if known is not None:
            known.pinned = known.pinned or node.pinned
            self._leaves_memory.touch(known)
            return known
        self._put(node)
        assert node.held is not None
        self._ledger.add(node.held.all_tensors())
        for shorter in self._replaced_by(node):
            node.replaces += [shorter, *shorter.replaces]
            shorter.replaces.clear()
            self._counts["replaced"] += 1
            self._drop(shorter)
        if self._writer is not None:
            node.waits = True
            self._writer.put(node)
        self._fit_memory()
        return node

    def held(self, node: Node) -> Held | None:
        """Return what a node holds, read back from its file if need be; None where that is lost, and so is the node."""
        if node.held is None:
            assert self._directory is not None
            node.held = self._directory.read(node)
            if node.held is None:
                self._drop(node)
        return node.held

    def found(self, node: Node) -> None:
        """Note that something of a node was found."""
        node.hits += 1
        self._leaves_memory.touch(node)
        self._leaves_disk.touch(node)
        if self._directory is not None:
            self._directory.used(node)

    def own_bytes(self, node: Node) -> int:
        """Bytes of memory that would be free without a node."""
        return self._ledger.own(node.held.all_tensors()) if node.held is not None and node.in_memory else 0

    def remove(self, node: Node) -> None:
        """Take a node out of the store, and its file off the disk."""
        self._drop(node)
        for each in (node, *node.replaces):
            if each.path is not None and self._directory is not None:
                self._directory.delete(each.path)
        node.replaces.clear()

    def rewrite(self, node: Node) -> None:
        """Write a node's file again, after what is said of it has changed."""
        if self._writer is not None and self.held(node) is not None and not node.waits:
            node.waits = True
            self._writer.put(node)

    def counts(self) -> dict[str, int]:
        """Counts for StoreStats."""
        on_disk = [node for node in self if node.path is not None]
        told = {
            "nodes": len(self._nodes),
            "memory_nodes": sum(node.in_memory for node in self),
            "disk_nodes": len(on_disk),
            "memory_bytes": self._ledger.bytes,
            "disk_bytes": sum(node.file_bytes for node in on_disk),
            "damaged": 0 if self._directory is None else self._directory.damaged,
        }
        if self._writer is not None:
            told |= {"written": self._writer.written, "write_errors": self._writer.errors}
            told["waiting"] = sum(node.waits for node in self)
        return {**self._counts, **told}

    def flush(self) -> bool:
        """Write all that is not on the disk; False where some of it cannot be."""
        return self._writer is None or self._writer.flush()

    def close(self) -> None:
        """Write what waits, and give the directory back."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._directory is not None:
            self._directory.close()

    def verify(self) -> list[str]:
        """Read every file again; those that are damaged are set aside."""
        damaged = []
        for node in [*self]:
            with self._lock:
                if self._directory is None or node.path is None or node.gone:
                    continue
                before = self._directory.damaged
                if self._directory.read(node) is None:
                    if self._directory.damaged > before:
                        damaged.append(node.key)
                    node.path = None
                    if not node.in_memory:
                        self._drop(node)
        return damaged

    def _put(self, node: Node) -> None:
        self._nodes[node.key] = node
        self._trees[node.tree].add(node.ids, node)
        self._leaves_memory.touch(node)
        self._leaves_disk.touch(node)

    def _drop(self, node: Node) -> None:
        """Take a node out of the trees and out of memory."""
        if node.gone:
            return
        node.gone = True
        del self._nodes[node.key]
        self._trees[node.tree].remove(node.ids, node)
        self._forget(node)

    def _forget(self, node: Node) -> None:
        if node.held is not None and node.in_memory:
            self._ledger.remove(node.held.all_tensors())
        node.held = None

    def _replaced_by(self, node: Node) -> list[Node]:
        """Return the nodes all of whose tokens may be taken from a new one as well."""
        cut = node.reuse.cut
        found = []
        for other, common in self.along(node.tree, node.ids):
            within = other is not node and common == other.reuse.tokens == other.reuse.cut <= cut
            # What is cut off is the beginning of a first prompt; a plan that acts takes the end of one for another.
            same = not other.reuse.acts or (other.reuse.half_read and other.reuse.turns == ())
            if within and same and not other.pinned:
                found.append(other)
        return found

    def _saves(self, node: Node) -> float:
        """Seconds that a node saves beside the others."""
        seconds, tokens = 0.0, 0
        for other, common in itertools.islice(self.along(node.tree, node.ids), _LOOKED_AT):
            takes = common if common == other.reuse.tokens else min(common, other.reuse.cut)
            if other is not node and tokens < takes < node.reuse.tokens:
                seconds, tokens = other.seconds * takes / other.reuse.tokens, takes
        # Where nobody has measured, tokens tell.
        return max(node.seconds - seconds, 0.0) + 1e-6 * (node.reuse.tokens - tokens)

    def _fit_memory(self) -> None:
        """Let nodes leave memory until the others fit; those that wait to be written only if they are too many."""
        while (over := self._ledger.bytes - self._memory) > 0:
            free = [node for node in self if node.in_memory and not node.pinned]
            node = self._leaves_memory.next([each for each in free if not each.waits], self._saves, self.own_bytes)
            if node is None and over > max(self._memory, _MAY_WAIT):
                node = self._leaves_memory.next(free, self._saves, self.own_bytes)
            if node is None:
                return
            self._counts["evictions"] += 1
            if node.path is not None:
                self._forget(node)
                continue
            self._drop(node)
            for other in node.replaces:
                # Never written, so what it was to take the place of stays.
                if other.path is not None:
                    other.gone = False
                    self._put(other)
            node.replaces.clear()

    def _fit_disk(self, coming: int = 0) -> None:
        """Delete files until the others fit, and `coming` bytes more."""
        while self._disk is not None and self._directory is not None:
            files = [node for node in self if node.path is not None]
            if sum(node.file_bytes for node in files) + coming <= self._disk:
                return
            free = [node for node in files if not node.pinned]
            node = self._leaves_disk.next(free, self._saves, lambda each: each.file_bytes)
            if node is None:
                return
            self._counts["disk_evictions"] += 1
            assert node.path is not None
            self._directory.delete(node.path)
            node.path = None
            if not node.in_memory:
                self._drop(node)

    def _write(self, node: Node) -> None:
        """Write a node that waits; called by the writer's thread, without the lock."""
        assert self._directory is not None
        with self._lock:
            held = node.held
            size = 0 if held is None else sum(part.numel() * part.element_size() for part in held.all_tensors())
            too_large = self._disk is not None and size > self._disk and not node.pinned
            if held is None or node.gone or too_large:
                node.waits = False
                self._fit_memory()
                return
            self._fit_disk(size)
        path, node.file_bytes = self._directory.write(node, held)
        with self._lock:
            node.waits = False
            if node.gone:
                # Removed, or replaced, while it was written.
                self._directory.delete(path)
                return
            node.path = path
            for other in node.replaces:
                if other.path is not None:
                    self._directory.delete(other.path)
            node.replaces.clear()
            self._fit_memory()

    def export(self, path: str | os.PathLike[str], nodes: list[Node]) -> int:
        """See PrefixStore.export."""
        from kvsieve.store.transfer import export

        return export(path, [(node, held) for node in nodes if (held := self.held(node)) is not None])

    def import_(self, path: str | os.PathLike[str]) -> int:
        """See PrefixStore.import_."""
        from kvsieve.store.transfer import read_nodes

        new = 0
        for node in read_nodes(path):
            with self._lock:
                if node.key not in self:
                    self.add(node)
                    new += 1
        return new
