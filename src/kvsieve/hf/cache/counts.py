"""Counts of a turn: reads of its tokens, and execution of its passes."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Reads:
    """Counts of reads by tokens after a prompt, over all layers, heads and rows.

    Attributes:
        tokens: tokens counted, per row.
        entries: entries attended to, exactly.
        entry_bytes: their bytes.
        estimate_bytes: bytes read to choose them.
        upkeep_bytes: bytes read to build and update the metadata.
        sparse: reads of a part of the entries.
        whole_bytes: bytes of dense attention.
        not_compiled: reason why the last sparse read used torch's operations; None for one compiled call.
        executors: first executor of attention, by layer.
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
        """Add another's counts, `times` times; -1 to subtract."""
        if other.sparse or other.not_compiled is not None:
            self.not_compiled = other.not_compiled
        for name, value in vars(other).items():
            if isinstance(value, int):
                vars(self)[name] += times * value

    def read(self, entries: int, entry: int, among: int | None = None) -> None:
        """Count `entries` of `entry` bytes each, chosen among `among`; None for all."""
        self.entries += entries
        self.entry_bytes += entries * entry
        self.whole_bytes += (entries if among is None else among) * entry

    def estimate(self, count: int, upkeep: int) -> None:
        """Count the bytes read by a reader to choose, and to build and update its metadata."""
        self.sparse += 1
        self.estimate_bytes += count
        self.upkeep_bytes += upkeep


@dataclass
class Passes:
    """Counts of passes after a prompt.

    Attributes:
        fixed: passes of fixed shapes, recorded.
        eager: passes run as transformers does.
        reason: of the last eager one.
        captures: number of recordings.
        capture_s: seconds of recording.
    """

    fixed: int = 0
    eager: int = 0
    reason: str | None = None
    captures: int = 0
    capture_s: float = 0.0


@dataclass
class PromptBlocks:
    """Counts of attention to a turn's prompt; blocks are counted under sparse prefill.

    Attributes:
        computed: computed pairs of a query block and a key block, of all layers, heads and rows.
        causal: all causal pairs.
        recall: sum, over sampled queries, of the share of attention in the computed blocks.
        sampled: sampled queries.
        executors: first executor of attention, by layer.
    """

    computed: int = 0
    causal: int = 0
    recall: float = 0.0
    sampled: int = 0
    executors: dict[int, str] = field(default_factory=dict)

    def add(self, other: PromptBlocks) -> None:
        """Add the counts of another pass over the prompt."""
        self.computed += other.computed
        self.causal += other.causal
        self.recall += other.recall
        self.sampled += other.sampled

    def add_computed(self, pairs: Tensor) -> None:
        self.computed += int(pairs)

    def add_recall(self, recall: Tensor) -> None:
        self.recall += float(recall)
