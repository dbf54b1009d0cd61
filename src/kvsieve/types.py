"""Facts handed to methods. Shape legend: B batch, Hq query heads, H KV heads, G = Hq // H, L new tokens,
N stored entries, K kept entries, D head dimension, W observation window."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """Facts of one forward pass, the same for all its layers.

    start: tokens of every row fed before this pass, padding included.
    num_new: tokens fed by this pass (L).
    phase: "prefill" while a turn's prompt is read, "decode" after it.
    is_last_chunk: False only for the leading chunks of a chunked prefill.
    turn: 0 for the first prompt on a cache, 1 for the next ...
    turn_start: value of `start` when this turn's prompt began.
    lengths: true tokens seen so far by each row, this pass included, padding excluded.
    turn_lengths: the same, counting this turn only.
    """

    start: int
    num_new: int
    phase: Literal["prefill", "decode"]
    is_last_chunk: bool
    turn: int
    turn_start: int
    lengths: tuple[int, ...]
    turn_lengths: tuple[int, ...]

    @property
    def ends_prompt(self) -> bool:
        """True in the pass that completes a prompt: the moment post-prompt evictors and propagators act."""
        return self.phase == "prefill" and self.is_last_chunk


@dataclass(frozen=True)
class When:
    """When an evictor acts besides the end of every prompt.

    chunks: also after each earlier chunk of a chunked prefill. steps: also while decoding, whenever this many tokens
    have been generated since it acted last; None for never.
    """

    chunks: bool = False
    steps: int | None = None


END_OF_PROMPT = When()


@dataclass
class LayerContext:
    """What one layer sees right after its attention, with this pass's keys and values already stored.

    query: [B, Hq, L, D], post-RoPE. They belong to the last L of the N stored entries: this pass's queries, or, where
        an evictor acts while decoding, those of its `window` last tokens.
    keys, values: [B, H, N, D], post-RoPE; views of the store, not to be written to.
    index: int32 [B, H, N], column of each entry in the row as it was fed (padding counted), -1 for filler.
    valid: bool [B, H or 1, N], False for padding and filler; None when every entry is real.
    stored: real entries of each row.
    scale: the factor the model multiplies query-key products with.
    state: scratch of this layer that lives as long as the cache; tensors in it have a row per row of the batch.
    offered: tokens of this turn that have come to this layer, the last `offered` stored entries; offered_counts: real
        ones among them per row. What a propagator chooses from.
    shared: scratch of this pass, the same for all layers; what is put under "report" goes into the statistics.
    """

    layer_idx: int
    num_layers: int
    step: Step
    scale: float
    query: Tensor
    keys: Tensor
    values: Tensor
    index: Tensor
    valid: Tensor | None
    stored: tuple[int, ...]
    state: dict[str, Any] = field(default_factory=dict)
    offered: int = 0
    offered_counts: tuple[int, ...] = ()
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Selection:
    """Entries that stay, per KV head (indices [B, H, K]) or per row (indices [B, K]), as slots of what was offered.

    indices: int64, ascending. Rows that keep fewer than K carry filler on the left, as left padding does.
    lengths: real entries of each row, at the right end; None when all K are real in every row.
    """

    indices: Tensor
    lengths: tuple[int, ...] | None = None

    def real(self) -> Tensor | None:
        """bool [B, K]: False for filler; None when there is none."""
        if self.lengths is None:
            return None
        size = self.indices.shape[-1]
        lengths = torch.tensor(self.lengths, device=self.indices.device)
        return torch.arange(size, device=self.indices.device) >= size - lengths[:, None]
