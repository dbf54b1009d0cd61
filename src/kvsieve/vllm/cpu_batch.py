"""Metadata of a step for vLLM's CPU attention: which rows of the batch attend to which pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvsieve.errors import CacheStateError
from kvsieve.vllm.blocks import RetainedSpec
from kvsieve.vllm.options import EngineOptions
from kvsieve.vllm.pages import PageReader, page_budget, reads_layer
from kvsieve.vllm.retention import BlockRetention
from kvsieve.vllm.rounds import ScheduledTokens, Segment, joined, rounds_of


@dataclass(frozen=True)
class PagedCall:
    """One call of vLLM's kernel.

    Attributes:
        rows: of the batch, as a slice or int64 indices.
        starts: int32 [n + 1], where requests begin among these rows.
        lengths: int32 [n], entries of each.
        table: int32 [n, width], pages of each; empty for a sparse call, whose pages every layer chooses.
        schedule: of the kernel's threads.
    """

    rows: slice | Tensor
    starts: Tensor
    lengths: Tensor
    table: Tensor
    schedule: Tensor


@dataclass(frozen=True)
class SparseCall:
    """Generated tokens that read some pages; each KV head of each request is a request of its own to the kernel.

    Attributes:
        call: of these requests.
        table: int32 [n, width], pages that each could read.
        sizes: int32 [n], entries in them.
        counts: int32 [n], pages to read.
        channels: int64 [n]; see pages.question_of.
        most: the largest of the counts.
    """

    call: PagedCall
    table: Tensor
    sizes: Tensor
    counts: Tensor
    channels: Tensor | None
    most: int


@dataclass(frozen=True)
class Packing:
    """Entries to be packed behind a segment.

    Attributes:
        segment: the request's tokens before it.
        pages: int64, all pages of the request.
        stored: entries in them.
        kept: pages that the chosen entries fill.
    """

    segment: Segment
    pages: Tensor
    stored: int
    kept: int


@dataclass(frozen=True)
class Round:
    """Calls between two moments at which entries are packed.

    Attributes:
        rows: of the batch.
        whole: all rows, each attending to everything; None where no layer wants it.
        sparse: rows that read sparsely; None for none.
        rest: the other rows; None for none.
        packings: what is packed then.
        seen: parts of prompts whose end is still to come, by their first page.
    """

    rows: slice | Tensor
    whole: PagedCall | None
    sparse: SparseCall | None
    rest: PagedCall | None
    packings: list[Packing] = field(default_factory=list)
    seen: list[tuple[int, Segment]] = field(default_factory=list)


@dataclass
class SieveCPUMetadata(CPUAttentionMetadata):
    """vLLM's metadata, and rounds where a step is not as without a plan."""

    rounds: list[Round] | None = None


class SieveCPUBuilder(CPUAttentionMetadataBuilder):
    """Makes the metadata of a step; one that needs no more than vLLM's is left as it is."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        options = EngineOptions.given(vllm_config.additional_config)
        assert options is not None
        self._self_test = options.self_test
        everything = isinstance(kv_cache_spec, FullAttentionSpec) and kv_cache_spec.sliding_window is None
        if everything and kv_cache_spec.block_size != vllm_config.cache_config.block_size:
            raise CacheStateError(
                f"vLLM cuts its blocks of {vllm_config.cache_config.block_size} entries into pages of "
                f"{kv_cache_spec.block_size}; kvsieve's plugin takes a block for a page, so give that as block_size="
            )
        self._reader = options.plan.read if everything and isinstance(options.plan.read, PageReader) else None
        self._retention: BlockRetention | None = None
        if isinstance(kv_cache_spec, RetainedSpec):
            self._retention = kv_cache_spec.retention
        layers = vllm_config.model_config.hf_text_config.num_hidden_layers
        self._all_sparse = self._reader is not None and all(
            reads_layer(self._reader, index, layers) for index in range(layers)
        )
        self._init_reorder_batch_threshold(1)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Make the metadata; see AttentionMetadataBuilder."""
        told = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self._reader is None and self._retention is None:
            return told
        return SieveCPUMetadata(**vars(told), rounds=self._rounds(told, common_attn_metadata))

    def _rounds(self, told: Any, common: Any) -> list[Round] | None:
        requests = self._requests(common)
        rounds = rounds_of(requests, self._retention, self._reader is not None)
        made = [self._round(segments, told.block_table) for segments in rounds]
        gaps = any(self._gap(segment) for segments in rounds for segment in segments)
        plain = len(made) == 1 and made[0].sparse is None and not made[0].packings and not made[0].seen
        return None if plain and not gaps else made

    def _requests(self, common: Any) -> list[ScheduledTokens]:
        rows, ends = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        starts = [end - (after - row) for end, row, after in zip(ends, rows, rows[1:], strict=False)]
        if common.rswa_prefix_lens is None:
            raise CacheStateError("vLLM told no prompt lengths, which kvsieve's plugin asks it for")
        prompts = common.rswa_prefix_lens.tolist()
        return [
            ScheduledTokens(number, rows[number], starts[number], ends[number], prompts[number])
            for number in range(common.num_reqs)
            if rows[number + 1] > rows[number]
        ]

    def _gap(self, segment: Segment) -> int:
        """Return how many blocks of the request hold nothing while the segment is attended to."""
        first, end = self._gap_of(segment)
        return end - first

    def _gap_of(self, segment: Segment) -> tuple[int, int]:
        return (0, 0) if self._retention is None else self._retention.gap(segment.request.prompt, segment.start)

    def _round(self, segments: Sequence[Segment], table: Tensor) -> Round:
        sizes = [segment.end - self._gap(segment) * self.block_size for segment in segments]
        pages = self._pages(segments, sizes, table)
        sparse = [number for number, segment in enumerate(segments) if segment.decodes and self._reader is not None]
        made = self._sparse(
            [segments[number] for number in sparse], [sizes[number] for number in sparse], pages[sparse]
        )
        packings, seen = [], []
        for number, segment in enumerate(segments):
            if segment.packs and self._retention is not None:
                own = pages[number, : -(-sizes[number] // self.block_size)].long()
                packings.append(
                    Packing(segment, own, sizes[number], self._retention.kept_blocks(segment.request.prompt))
                )
            elif self._retention is not None and segment.end < segment.request.prompt:
                seen.append((int(pages[number, 0]), segment))
        whole = [] if made is not None and self._all_sparse else list(range(len(segments)))
        rest = [] if made is None else [number for number in range(len(segments)) if number not in set(sparse)]
        calls = [
            self._call([segments[n] for n in numbers], [sizes[n] for n in numbers], pages[numbers]) if numbers else None
            for numbers in (whole, rest)
        ]
        return Round(_rows(segments), calls[0], made, calls[1], packings, seen)

    def _pages(self, segments: Sequence[Segment], sizes: Sequence[int], table: Tensor) -> Tensor:
        """Return int32 [n, width]: the pages that hold something, of each segment's request."""
        numbers = [segment.request.number for segment in segments]
        pages = table if numbers == list(range(len(table))) else table[numbers]
        if not any(self._gap(segment) for segment in segments):
            return pages
        pages = pages.clone()
        for row, (segment, size) in enumerate(zip(segments, sizes, strict=True)):
            first, end = self._gap_of(segment)
            if end > first:
                used = -(-size // self.block_size)
                pages[row, first:used] = pages[row, end : end + used - first].clone()
        return pages

    def _call(self, segments: Sequence[Segment], sizes: Sequence[int], pages: Tensor) -> PagedCall:
        """Make a call in which segments attend to all their pages."""
        starts = torch.tensor([0, *(segment.end - segment.start for segment in segments)], dtype=torch.int32)
        starts, lengths = starts.cumsum(0, dtype=torch.int32), torch.tensor(sizes, dtype=torch.int32)
        schedule = self._schedule(len(segments), self.num_heads, self.num_kv_heads, lengths, starts)
        return PagedCall(_rows(segments), starts, lengths, pages, schedule)

    def _sparse(self, segments: Sequence[Segment], sizes: Sequence[int], pages: Tensor) -> SparseCall | None:
        """Make the call of generated tokens that read sparsely; None where all of them read everything."""
        if self._reader is None or not segments:
            return None
        page, heads = self.block_size, self.num_kv_heads
        budgets = [page_budget(self._reader, segment.end, self.head_dim, page) for segment in segments]
        used = [-(-size // page) for size in sizes]
        if self._self_test:
            counts = used
        else:
            counts = [min(budget.pages, pages_used) for budget, pages_used in zip(budgets, used, strict=True)]
        if counts == used and not self._self_test:
            return None
        read = [(size - 1) % page + 1 + (count - 1) * page for size, count in zip(sizes, counts, strict=True)]
        lengths = torch.tensor(read, dtype=torch.int32).repeat_interleave(heads)
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
        schedule = self._schedule(len(lengths), self.num_heads // heads, 1, lengths, starts)
        channels = [budget.channels for budget in budgets]
        return SparseCall(
            PagedCall(_rows(segments), starts, lengths, pages[:0], schedule),
            pages[:, : max(used)].contiguous(),
            torch.tensor(sizes, dtype=torch.int32),
            torch.tensor(counts, dtype=torch.int32),
            torch.tensor(channels) if any(channels) else None,
            max(counts),
        )

    def _schedule(self, requests: int, heads: int, kv_heads: int, lengths: Tensor, starts: Tensor) -> Tensor:
        schedule: Tensor = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=requests,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.head_dim,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=None,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return schedule


def _rows(segments: Sequence[Segment]) -> slice | Tensor:
    rows = joined([segment.rows for segment in segments])
    return rows if isinstance(rows, slice) else torch.tensor(rows)
