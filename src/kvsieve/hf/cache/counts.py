"""Counts of a turn: what its tokens have read, and how the passes over them were run."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Reads:
    """Counts of what tokens after a prompt have read, in all layers, heads and rows together.

    Attributes:
        tokens: how many read, per row.
        entries: entries attended to, exactly.
        entry_bytes: their bytes.
        estimate_bytes: bytes read to choose them.
        upkeep_bytes: bytes read to make and renew what they are chosen by.
        sparse: reads that took less than everything.
        whole_bytes: bytes that reading all entries would have taken.
        not_compiled: why the last sparse read was torch's operations; None where it was one compiled call.
        executors: what computed attention, by layer, when it first did.
    """

    tokens: int = 0
    entries: int = 0
    entry_bytes: int = 0
    estimate_bytes: int = 0
    sparse: int = 0
    upkeep_bytes: int = 0
    whole_bytes: int = 0
    not_compiled: str | None = None
    executors: dict[int, str] = field(default_factory=dict)

    @property
    def all_bytes(self) -> int:
        """All bytes read."""
        return self.entry_bytes + self.estimate_bytes + self.upkeep_bytes

    def add(self, other: Reads, times: int = 1) -> None:
        """Count what another has counted; -1 times to count it no more."""
        if other.sparse or other.not_compiled is not None:
            self.not_compiled = other.not_compiled
        for name, value in vars(other).items():
            if isinstance(value, int):
                vars(self)[name] += times * value

    def read(self, entries: int, entry: int, among: int | None = None) -> None:
        """Count `entries` of `entry` bytes each, chosen among so many; None where they are all there are."""
        self.entries += entries
        self.entry_bytes += entries * entry
        self.whole_bytes += (entries if among is None else among) * entry

    def estimate(self, count: int, upkeep: int) -> None:
        """Count the bytes that a reader has read to choose, and those to make and renew what it chooses by."""
        self.sparse += 1
        self.estimate_bytes += count
        self.upkeep_bytes += upkeep


@dataclass
class Passes:
    """Counts of how the passes after a prompt were run.

    Attributes:
        fixed: passes of fixed shapes, recorded.
        eager: passes run as transformers does.
        reason: why the last eager one was.
        captures: how often a pass was recorded.
        capture_s: seconds of that.
    """

    fixed: int = 0
    eager: int = 0
    reason: str | None = None
    captures: int = 0
    capture_s: float = 0.0


@dataclass
class PromptBlocks:
    """Counts of attention to a turn's prompt; blocks are counted under a plan that reads prompts sparsely.

    Attributes:
        computed: pairs of a block of queries and one of keys that were computed, of all layers, heads and rows.
        causal: pairs there were.
        recall: sum, over sampled queries, of the part of their attention that the computed blocks hold.
        sampled: sampled queries.
        executors: what computed attention, by layer, when it first did.
    """

    computed: int = 0
    causal: int = 0
    recall: float = 0.0
    sampled: int = 0
    executors: dict[int, str] = field(default_factory=dict)

    def add_computed(self, pairs: Tensor) -> None:
        self.computed += int(pairs)

    def add_recall(self, recall: Tensor) -> None:
        self.recall += float(recall)
