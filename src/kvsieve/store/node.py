"""Nodes of a store."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsieve.store.content import StoredCache
from kvsieve.store.identity import Identity
from kvsieve.store.radix import Tokens
from kvsieve.store.rules import Reuse

# Identity, owner and rules of the nodes of a tree.
Place = tuple[str, str, tuple[str, ...]]


@dataclass(frozen=True)
class NodeInfo:
    """A node, as listed by `PrefixStore.nodes`.

    Attributes:
        key: its name.
        tokens: number of its tokens.
        serves: "beginning", "continuation" or "conversation"; docs/chats.md.
        model: name of the model that computed it.
        plan: name of the plan.
        owner: only requests of this owner may use it.
        seconds: prefill time of its tokens.
        hits: hits since the store was opened.
        memory_bytes: bytes of memory freed by removing it.
        disk_bytes: bytes of its file, 0 without one.
        pinned: True if it is never evicted.
        approximate: rules by which its entries are approximate; see `PrefixStore.find`.
    """

    key: str
    tokens: int
    serves: str
    model: str
    plan: str
    owner: str
    seconds: float
    hits: int
    memory_bytes: int
    disk_bytes: int
    pinned: bool
    approximate: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


@dataclass(eq=False)
class Node:
    """A conversation at one moment.

    Attributes:
        key: its name, and its file's.
        identity: weights, tokenizer and plan.
        owner: only requests of this owner may use it.
        ids: int64 [N], its tokens.
        reuse: requests that it may serve.
        seconds: prefill time of its tokens.
        pinned: never evicted.
        approximate: rules by which its entries are approximate, as its conversation has them.
        content: its cache in memory; None if only on disk.
        path: its file, or None.
        file_bytes: size of the file.
        hits: hits since the store was opened.
        waits: True until it is written, if it is to be.
        is_removed: True once removed from the store.
        replaces: nodes with files that become redundant once this one is written.
    """

    key: str
    identity: Identity
    owner: str
    ids: Tokens
    reuse: Reuse
    seconds: float
    pinned: bool = False
    approximate: tuple[str, ...] = ()
    content: StoredCache | None = None
    path: Path | None = None
    file_bytes: int = 0
    hits: int = 0
    waits: bool = False
    is_removed: bool = False
    replaces: list[Node] = field(default_factory=list)

    @property
    def tree(self) -> Place:
        """Key of its tree."""
        return self.identity.key, self.owner, self.approximate

    @property
    def in_memory(self) -> bool:
        """True if it takes memory of its own."""
        return self.content is not None and not self.content.mapped

    def extra(self) -> dict[str, Any]:
        """Return its entries in the file's header."""
        reuse = dataclasses.asdict(self.reuse)
        about = {"owner": self.owner, "seconds": self.seconds, "pinned": self.pinned, "reuse": reuse}
        return {**about, "approximate": list(self.approximate)}

    def info(self, memory_bytes: int) -> NodeInfo:
        """Return its NodeInfo. memory_bytes: bytes freed by removing it."""
        model = self.identity.header["model"]
        plan = self.identity.header["plan"]
        size = self.file_bytes if self.path is not None else 0
        return NodeInfo(
            self.key,
            len(self.ids),
            self.reuse.serves,
            str(model["id"] or model["class"]),
            str(plan["name"]),
            self.owner,
            self.seconds,
            self.hits,
            memory_bytes,
            size,
            self.pinned,
            self.approximate,
        )


def reuse_from(data: dict[str, Any]) -> Reuse:
    """Return the Reuse in the output of `Node.extra`. Raises TypeError or KeyError for other data."""
    turns = data["turns"]
    return Reuse(**{**data, "turns": None if turns is None else tuple(turns)})
