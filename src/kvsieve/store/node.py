"""Nodes of a store."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsieve.store.held import Held
from kvsieve.store.identity import Identity
from kvsieve.store.radix import Tokens
from kvsieve.store.rules import Reuse


@dataclass(frozen=True)
class NodeInfo:
    """A node, as listed by `PrefixStore.nodes`.

    Attributes:
        key: its name.
        tokens: how many it holds.
        serves: "beginning", "continuation" or "conversation"; docs/chats.md.
        model: name of the model that read it.
        plan: name of the plan.
        owner: whom it is for.
        seconds: what reading its tokens took.
        hits: how often something of it was found since the store was opened.
        memory_bytes: bytes of memory that would be free without it.
        disk_bytes: bytes of its file, 0 without one.
        pinned: True where it is never evicted.
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

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


@dataclass(eq=False)
class Node:
    """A conversation at one moment.

    Attributes:
        key: its name, and its file's.
        identity: what it was read with.
        owner: whom it is for.
        ids: int64 [N], its tokens.
        reuse: what it may serve.
        seconds: what reading its tokens took.
        pinned: never evicted.
        held: what it holds in memory, None where that is on the disk only.
        path: its file, None while it has none.
        file_bytes: size of the file.
        hits: how often something of it was found.
        waits: True until it is written, where it is to be.
        gone: True once it was taken out of the store.
        replaces: nodes whose files are no longer needed once this one is written.
    """

    key: str
    identity: Identity
    owner: str
    ids: Tokens
    reuse: Reuse
    seconds: float
    pinned: bool = False
    held: Held | None = None
    path: Path | None = None
    file_bytes: int = 0
    hits: int = 0
    waits: bool = False
    gone: bool = False
    replaces: list[Node] = field(default_factory=list)

    @property
    def tree(self) -> tuple[str, str]:
        """The tree that it is in."""
        return self.identity.key, self.owner

    @property
    def in_memory(self) -> bool:
        """True where it takes memory of its own."""
        return self.held is not None and not self.held.mapped

    def extra(self) -> dict[str, Any]:
        """Return what its file's header says of it as a node."""
        reuse = dataclasses.asdict(self.reuse)
        return {"owner": self.owner, "seconds": self.seconds, "pinned": self.pinned, "reuse": reuse}

    def info(self, memory_bytes: int) -> NodeInfo:
        """Tell of it. memory_bytes: bytes that would be free without it."""
        model, plan = self.identity.header["model"], self.identity.header["plan"]
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
        )


def reuse_from(data: dict[str, Any]) -> Reuse:
    """Return the inverse of what `Node.extra` says of its reuse. Raises TypeError or KeyError for anything else."""
    turns = data["turns"]
    return Reuse(**{**data, "turns": None if turns is None else tuple(turns)})
