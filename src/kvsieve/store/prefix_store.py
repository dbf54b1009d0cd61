"""A store of prompts that were read, which finds the longest beginning of a new one that need not be read again."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from kvsieve.errors import InputError, short
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.runtime import AttachedModel
from kvsieve.quantities import parse_bytes
from kvsieve.store.directory import name_of
from kvsieve.store.held import beginning, hold, revived
from kvsieve.store.identity import Identities
from kvsieve.store.lineage import Lineage
from kvsieve.store.node import Node, NodeInfo
from kvsieve.store.radix import Tokens
from kvsieve.store.rules import Request, reuse_of, why_not
from kvsieve.store.stats import StoreStats
from kvsieve.store.tiers import Tiers


@dataclass(frozen=True)
class Found:
    """The beginning of a prompt that a store has.

    Attributes:
        cache: to go on with, the caller's own.
        tokens: how many of the prompt's first tokens it has read.
        seconds: what reading them took.
        from_disk: True where it was read back from a file.
    """

    cache: SieveCache
    tokens: int
    seconds: float
    from_disk: bool


class PrefixStore:
    """Prefix cache: prefills a common prompt prefix once; docs/chats.md.

    Safe to be used by several threads.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        memory: str | int = "4GiB",
        disk: str | int | None = "20GiB",
        *,
        read_only: bool = False,
    ) -> None:
        """Open a store.

        Args:
            path: directory that holds it across restarts, made where there is none; None for memory alone.
            memory: bytes of RAM for nodes, as a number or like "4GiB".
            disk: bytes of the directory; None for no limit.
            read_only: use what the directory holds beside another process that writes to it; what is added stays in
                memory.

        Raises:
            InputError: a size that is none, a directory that cannot be used, or one that another process writes to.
        """
        self._lock = threading.RLock()
        self._identities, self._lineage = Identities(), Lineage()
        self._counts: Counter[str] = Counter()
        limits = _size("memory", memory), None if disk is None else _size("disk", disk)
        self._tiers = Tiers(path, *limits, read_only, self._lock)

    def find(
        self,
        sieve: AttachedModel,
        token_ids: Sequence[int],
        owner: str = "",
        *,
        also: Sequence[str] = (),
        turns: Sequence[int] | None = None,
        leave: int = 1,
        chunk: int | None = None,
    ) -> Found | None:
        """Return the longest stored prefix of a prompt, ready to continue, or None.

        Pass `found.cache` to `sieve.generate`, `prefill` or `begin` with the whole prompt.

        Args:
            sieve: the attached model, whose weights, tokenizer and plan must be those it was read with.
            token_ids: the whole prompt.
            owner: whose nodes are looked at.
            also: other owners whose nodes may be used.
            turns: token counts at which prompts end, this one included, if the conversation is to be as though it were
                read anew turn by turn. None: go on with whatever conversation this is, as a chat does.
            leave: tokens that must be left to read; 0 for a prompt that is only read.
            chunk: tokens per pass that the prompt is read with. With `turns`, plans whose entries depend on where
                passes end (sparse prompts, evictors of chunks, codecs without an evictor) find what was read so.
        """
        ids = _tokens(token_ids)
        request = Request.of(sieve, len(ids), leave, turns, chunk)
        identity = self._identities.of(sieve)
        with self._lock:
            self._counts["tokens_asked"] += len(ids)
            while True:
                node, tokens = self._tiers.best(identity.key, (owner, *also), ids, request)
                if node is None:
                    self._counts["misses"] += 1
                    return None
                held = self._tiers.held(node)
                if held is not None:
                    break
            self._tiers.found(node)
            self._counts.update(hits=1, tokens_reused=tokens, disk_hits=held.mapped)
        if tokens == node.reuse.tokens:
            cache = revived(held, sieve)
        else:
            cache = beginning(held, sieve, tokens, finished=tokens == len(ids))
        self._lineage.note(cache, node, tokens)
        return Found(cache, tokens, node.seconds * tokens / len(node.ids), held.mapped)

    def add(
        self,
        sieve: AttachedModel,
        token_ids: Sequence[int],
        cache: SieveCache,
        seconds: float,
        owner: str = "",
        *,
        pin: bool = False,
        turns: Sequence[int] | None = None,
        chunk: int | None = None,
    ) -> NodeInfo | None:
        """Keep a conversation as it is now: between turns, or between two passes over a prompt.

        What it holds is copied, but for what the store has of it already.

        Args:
            sieve: the attached model, as for `find`.
            token_ids: the conversation's tokens, in order; what the cache has not read yet may follow.
            cache: of the sieve.
            seconds: what reading all of the tokens takes; of those that were found, `Found.seconds`.
            owner: for whom it is kept.
            pin: never evict it.
            turns: token counts at which the conversation's prompts ended; None for what the cache knows. Where the plan
                has acted elsewhere, no `find` with `turns` is served.
            chunk: tokens per pass that it was read with, for `find` with `chunk`.

        Returns:
            The node; None where nothing of it can be reused (stats count that as refused): plans that read the whole
            conversation again in every turn, images, rows of a batch, tokens protected by their caller.

        Raises:
            InputError: fewer tokens than the cache has read.
            CacheStateError: a cache of another plan or model, or one that a failed pass has left broken.
        """
        sieve.check_cache(cache)
        if cache.status != "ready":
            cache.check_copyable("stored")
        ids = _tokens(token_ids)
        seen = cache.num_seen
        if len(ids) < seen or not seen:
            raise InputError(
                f"the cache has read {seen} tokens and token_ids has {len(ids)}; pass the whole conversation, as it "
                "was fed"
            )
        if why_not(sieve, cache) is not None:
            with self._lock:
                self._counts["refused"] += 1
            return None
        reuse = reuse_of(sieve, cache, turns, length=len(ids), chunk=chunk)
        ids, identity = ids[:seen].copy(), self._identities.of(sieve)
        with self._lock:
            node = Node("", identity, owner, ids, reuse, max(float(seconds), 0.0), pin)
            node.key = name_of(node)
            if node.key not in self._tiers:
                known = self._lineage.stretches(cache, node)
                alike = known or self._tiers.alike(node)
                node.held = hold(cache, sieve.model.device, alike, certain=bool(known))
                self._lineage.note(cache, node, seen)
            node = self._tiers.add(node)
            self._counts["added"] += 1
            return node.info(self._tiers.own_bytes(node))

    def add_prompt(
        self,
        sieve: AttachedModel,
        token_ids: Sequence[int],
        cache: SieveCache,
        seconds: float,
        owner: str = "",
        *,
        chunk: int | None = None,
    ) -> NodeInfo | None:
        """Do as `add`, but store nothing that no `find` with `turns` for a longer prompt returns."""
        servable = cache.num_seen > 0 and why_not(sieve, cache) is None
        if servable and not reuse_of(sieve, cache, length=len(_tokens(token_ids)), chunk=chunk).serves_anew:
            return None
        return self.add(sieve, token_ids, cache, seconds, owner, chunk=chunk)

    def pin(self, key: str, pinned: bool = True) -> None:
        """Keep a node from being evicted, or no longer. Raises InputError for a key that is none."""
        with self._lock:
            node = self._node(key)
            if node.pinned != pinned:
                self._tiers.pin(node, pinned)

    def remove(self, *keys: str, owner: str | None = None) -> int:
        """Take nodes out of the store and off the disk, by key or all of an owner; return how many.

        Raises InputError for a key that is none.
        """
        with self._lock:
            chosen = [self._node(key) for key in keys]
            if owner is not None:
                chosen += [node for node in self._tiers if node.owner == owner and node not in chosen]
            for node in chosen:
                self._tiers.remove(node)
            return len(chosen)

    def nodes(self) -> list[NodeInfo]:
        """List all nodes, the longest first."""
        with self._lock:
            found = [node.info(self._tiers.own_bytes(node)) for node in self._tiers]
        return sorted(found, key=lambda each: (-each.tokens, each.key))

    def stats(self) -> StoreStats:
        """Count the store's entries, hits and evictions."""
        with self._lock:
            return StoreStats(**{**self._counts, **self._tiers.counts()})

    def flush(self) -> bool:
        """Wait until all nodes are on the disk; False where some could not be written."""
        return self._tiers.flush()

    def close(self) -> None:
        """Write all unwritten nodes to disk, and release the directory."""
        self._tiers.close()

    def verify(self) -> list[str]:
        """Verify the checksums of all files, move damaged ones to ``damaged/`` and return their keys."""
        return self._tiers.verify()

    def export(self, path: str | os.PathLike[str], *keys: str) -> int:
        """Write nodes, all or those named, to one tar file that `import_` reads; return how many.

        Raises InputError for a file that is there already, CacheFileError for one that cannot be written.
        """
        with self._lock:
            chosen = [self._node(key) for key in keys] if keys else list(self._tiers)
            return self._tiers.export(path, chosen)

    def import_(self, path: str | os.PathLike[str]) -> int:
        """Take in the nodes of a file that `export` wrote, each verified; return how many were new.

        Raises CacheFileError for a file that is none.
        """
        return self._tiers.import_(path)

    def _node(self, key: str) -> Node:
        found = [node for node in self._tiers if node.key.startswith(key)] if key else []
        if len(found) != 1:
            raise InputError(f"{len(found) or 'no'} nodes of the store have a key that begins with {short(key)}")
        return found[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _tokens(token_ids: Sequence[int]) -> Tokens:
    ids = np.asarray(token_ids)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"token_ids are the token ids of one conversation, in order; got {short(token_ids)}")
    return ids.astype(np.int64)


def _size(name: str, value: str | int) -> int:
    if isinstance(value, str):
        return parse_bytes(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{name}= is a number of bytes, or a size like '4GiB'; got {short(value)}")
    return value
