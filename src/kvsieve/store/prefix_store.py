"""Prefix cache: finds the longest stored prefix of a new prompt."""

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
from kvsieve.planning.quantities import parse_bytes
from kvsieve.store.content import beginning, copied_content, revived
from kvsieve.store.directory import name_of
from kvsieve.store.identity import Identities
from kvsieve.store.lineage import Lineage
from kvsieve.store.node import Node, NodeInfo
from kvsieve.store.radix import Tokens
from kvsieve.store.rules import Request, reuse_of, why_not
from kvsieve.store.stats import StoreStats
from kvsieve.store.tiers import Tiers


@dataclass(frozen=True)
class Found:
    """A stored prefix of a prompt.

    Attributes:
        cache: to continue with; the caller owns it.
        tokens: number of the prompt's first tokens in it.
        seconds: their prefill time.
        from_disk: True if it was loaded from a file.
        approximate: rules by which its entries are approximate; () if they are those of a prefill.
    """

    cache: SieveCache
    tokens: int
    seconds: float
    from_disk: bool
    approximate: tuple[str, ...] = ()


class PrefixStore:
    """Prefix cache: prefills a common prompt prefix once; docs/chats.md. Thread-safe."""

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
            path: directory that persists it, created if missing; None for memory alone.
            memory: bytes of RAM for nodes, as a number or like "4GiB".
            disk: bytes of the directory; None for no limit.
            read_only: use the directory while another process writes to it; new nodes stay in memory.

        Raises:
            InputError: an invalid size, an unusable directory, or one that another process writes to.
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
        approximate: Sequence[str] = (),
    ) -> Found | None:
        """Return the longest stored prefix of a prompt, ready to continue, or None.

        Pass `found.cache` to `sieve.generate`, `prefill` or `begin` with the whole prompt.

        Args:
            sieve: the attached model. Entries match only if weights, tokenizer and plan are identical.
            token_ids: the whole prompt.
            owner: owner of the nodes to search.
            also: further owners with nodes that may be used.
            turns: token counts at which prompts end, this one included, for the results of a new prefill turn by turn;
                () for the beginning of a prompt. None: continue any conversation, as a chat does.
            leave: tokens left to prefill; 0 for a prompt without an answer.
            chunk: tokens per prefill chunk. Plans with entries that depend on chunk ends (sparse prompts, chunked
                evictors, codecs without an evictor) match only nodes of the same chunk when `turns` are given.
            approximate: rules such as "edit:window=32", as `cache.conversation.approximate` has them: approximate nodes
                of exactly these may be returned beside exact ones. Default (): exact nodes only.

        Raises:
            InputError: tokens or rules of another form.
        """
        ids = _tokens(token_ids)
        request = Request.of(sieve, len(ids), leave, turns, chunk, approximate)
        identity = self._identities.of(sieve)
        with self._lock:
            self._counts["tokens_asked"] += len(ids)
            while True:
                node, tokens = self._tiers.best(identity.key, (owner, *also), ids, request)
                if node is None:
                    self._counts["misses"] += 1
                    return None
                content = self._tiers.content(node)
                if content is not None:
                    break
            self._tiers.found(node)
            rules = node.approximate
            self._counts.update(hits=1, tokens_reused=tokens, disk_hits=content.mapped, approximate_hits=bool(rules))
        if tokens == node.reuse.tokens:
            cache = revived(content, sieve)
        else:
            cache = beginning(content, sieve, tokens, finished=request.finishes and tokens == len(ids))
            cache.conversation.note_approximate(rules)
        self._lineage.note(cache, node, tokens)
        return Found(cache, tokens, node.seconds * tokens / len(node.ids), content.mapped, rules)

    def covered(
        self,
        sieve: AttachedModel,
        token_ids: Sequence[int],
        owner: str = "",
        *,
        turns: Sequence[int] | None = None,
        chunk: int | None = None,
        approximate: Sequence[str] = (),
    ) -> int:
        """Return the number of tokens that `find` would return, without loading or counting them."""
        ids = _tokens(token_ids)
        request = Request.of(sieve, len(ids), 1, turns, chunk, approximate)
        identity = self._identities.of(sieve)
        with self._lock:
            return self._tiers.best(identity.key, (owner,), ids, request)[1]

    def longest(self, sieve: AttachedModel, owner: str = "") -> Tokens | None:
        """Return the tokens, int64 [N], of an owner's longest conversation under a sieve, or None."""
        key = self._identities.of(sieve).key
        with self._lock:
            nodes = [node for node in self._tiers if (node.identity.key, node.owner) == (key, owner)]
        return max((node.ids for node in nodes if not node.reuse.half_read), key=len, default=None)

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
        """Store a conversation in its current state: between turns, or between two prefill chunks.

        The content is copied, except parts that the store already has. Approximate entries serve only a `find` that
        names their rules.

        Args:
            sieve: the attached model, as for `find`.
            token_ids: the conversation's tokens, in order; tokens that the cache has not processed may follow.
            cache: of the sieve.
            seconds: prefill time of all the tokens; `Found.seconds` for reused ones.
            owner: only requests of this owner may use it.
            pin: never evict it.
            turns: token counts at which the conversation's prompts ended; None for those the cache recorded. If the
                plan acted elsewhere, the node serves no `find` with `turns`.
            chunk: tokens per chunk of its prefill, for `find` with `chunk`.

        Returns:
            The node; None if nothing of it can be reused (counted as refused): plans that prefill the whole
            conversation in every turn, images, rows of a batch, tokens protected by their caller.

        Raises:
            InputError: fewer tokens than the cache has processed.
            CacheStateError: a cache of another plan or model, or one broken by a failed pass.
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
        ids = ids[:seen].copy()
        identity = self._identities.of(sieve)
        with self._lock:
            node = Node("", identity, owner, ids, reuse, max(float(seconds), 0.0), pin, cache.conversation.approximate)
            node.key = name_of(node)
            if node.key not in self._tiers:
                known = self._lineage.stretches(cache, node)
                alike = known or self._tiers.alike(node)
                node.content = copied_content(cache, sieve.model.device, alike, certain=bool(known))
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
        """Do as `add`, but store only nodes that a `find` with `turns` for a longer prompt can return."""
        servable = cache.num_seen > 0 and why_not(sieve, cache) is None
        if servable and not reuse_of(sieve, cache, length=len(_tokens(token_ids)), chunk=chunk).serves_anew:
            return None
        return self.add(sieve, token_ids, cache, seconds, owner, chunk=chunk)

    def pin(self, key: str, pinned: bool = True) -> None:
        """Protect a node from eviction, or undo that. Raises InputError for an unknown key."""
        with self._lock:
            node = self._node(key)
            if node.pinned != pinned:
                self._tiers.pin(node, pinned)

    def remove(self, *keys: str, owner: str | None = None) -> int:
        """Delete nodes from memory and disk, by key or all of an owner; return their number.

        Raises InputError for an unknown key.
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
        return sorted(found, key=lambda node: (-node.tokens, node.key))

    def stats(self) -> StoreStats:
        """Count the store's entries, hits and evictions."""
        with self._lock:
            return StoreStats(**{**self._counts, **self._tiers.counts()})

    def flush(self) -> bool:
        """Wait until all nodes are on disk; return False if some could not be written."""
        return self._tiers.flush()

    def close(self) -> None:
        """Write all unwritten nodes to disk, and release the directory."""
        self._tiers.close()

    def verify(self) -> list[str]:
        """Verify the checksums of all files, move damaged ones to ``damaged/`` and return their keys."""
        return self._tiers.verify()

    def export(self, path: str | os.PathLike[str], *keys: str) -> int:
        """Write all or the named nodes to one tar file for `import_`; return their number.

        Raises InputError if the file exists, CacheFileError if it cannot be written.
        """
        with self._lock:
            chosen = [self._node(key) for key in keys] if keys else list(self._tiers)
            return self._tiers.export(path, chosen)

    def import_(self, path: str | os.PathLike[str]) -> int:
        """Add the nodes of an `export` file, each verified; return the number of new ones.

        Raises CacheFileError for an invalid file.
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
