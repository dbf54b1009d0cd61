"""Division of a step into calls of a paged attention kernel, and into moments of packing.

Independent of vLLM's kernels. Numbers come from the host, and are copied to the device without synchronization, except
for requests that a later step must recognize.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import CacheStateError
from kvsieve_vllm.calls import Packing, PagedCall, PromptCall, Round, SegmentEnd, SparseCall
from kvsieve_vllm.reading import PageReading
from kvsieve_vllm.retention import BlockRetention
from kvsieve_vllm.rounds import ScheduledTokens, Segment, joined, rounds_of


@dataclass(frozen=True)
class GroupFacts:
    """Layers with equal blocks, and a plan's roles in them.

    Attributes:
        page: entries of a page.
        heads: query heads of this process.
        kv_heads: KV heads of this process.
        reading: of pages while decoding; None for dense attention.
        retention: of prompts under an evictor; None without one.
        long: fewest rows of a request for kvsieve's own kernel; None: vLLM's is used for all.
    """

    page: int
    heads: int
    kv_heads: int
    reading: PageReading | None
    retention: BlockRetention | None
    long: int | None = None


class StepPlanner:
    """Divides steps into rounds.

    Args:
        facts: of the layers.
        moved: copies a tensor to their device.
        schedule: returns the kernel's metadata for a call, given query heads, KV heads, and the lengths and starts of
            its requests on the host.

    Attributes:
        facts, moved, schedule: as given.
    """

    def __init__(
        self,
        facts: GroupFacts,
        moved: Callable[[Tensor], Tensor],
        schedule: Callable[[int, int, Tensor, Tensor], Any],
    ) -> None:
        self.facts = facts
        self.moved = moved
        self.schedule = schedule

    def rounds(self, common: Any) -> list[Round] | None:
        """Return a step's rounds; None if vLLM's own backend does the same.

        Args:
            common: vLLM's CommonAttentionMetadata.
        """
        rounds = rounds_of(_requests(common), self.facts.retention, self.facts.reading is not None)
        result = [self._round(segments, common.block_table_tensor) for segments in rounds]
        gaps = any(self._gap(segment)[1] for segments in rounds for segment in segments)
        plain = len(result) == 1 and result[0].sparse is None and not result[0].prompts and not result[0].ends
        return None if plain and not gaps else result

    def _gap(self, segment: Segment) -> tuple[int, int]:
        """Return the request's empty blocks during the segment's attention."""
        keeps = self.facts.retention
        return (0, 0) if keeps is None else keeps.gap(segment.request.prompt, segment.start)

    def _round(self, segments: Sequence[Segment], table: Tensor) -> Round:
        gaps = [self._gap(segment) for segment in segments]
        sizes = [
            segment.end - (end - first) * self.facts.page for segment, (first, end) in zip(segments, gaps, strict=True)
        ]
        pages = self._pages(segments, sizes, gaps, table)
        read = [number for number, segment in enumerate(segments) if segment.decodes]
        sparse = self._sparse(segments, sizes, pages, read)
        prompts = self._prompts(segments, sizes, pages)
        apart = {prompt.segment.request.number for prompt in prompts}
        whole = [number for number, segment in enumerate(segments) if segment.request.number not in apart]
        rest = [number for number in whole if sparse is not None and number not in set(read)]
        everywhere = sparse is not None and self.facts.reading is not None and self.facts.reading.everywhere
        return Round(
            self._rows(segments),
            None if everywhere else self._call(segments, sizes, pages, whole),
            sparse,
            self._call(segments, sizes, pages, rest),
            prompts,
            self._ends(segments, sizes, pages),
        )

    def _prompts(self, segments: Sequence[Segment], sizes: Sequence[int], pages: Tensor) -> list[PromptCall]:
        long = self.facts.long
        return [
            PromptCall(segment, self._own(pages, number, sizes[number]), sizes[number])
            for number, segment in enumerate(segments)
            if long is not None and segment.end - segment.start >= long
        ]

    def _own(self, pages: Tensor, number: int, size: int) -> Tensor:
        """Return int64 numbers of the pages with a request's entries."""
        return pages[number, : -(-size // self.facts.page)].long()

    def _pages(
        self, segments: Sequence[Segment], sizes: Sequence[int], gaps: Sequence[tuple[int, int]], table: Tensor
    ) -> Tensor:
        """Return int32 [n, width]: the non-empty pages of each segment's request."""
        pages = self._pick(table, [segment.request.number for segment in segments])
        if not any(end for _, end in gaps):
            return pages
        used = [-(-size // self.facts.page) for size in sizes]
        index = torch.arange(max(used)).repeat(len(gaps), 1)
        for row, (first, end) in enumerate(gaps):
            index[row, first : used[row]] += end - first
        return pages.gather(1, self.moved(index.clamp_(max=pages.shape[1] - 1)))

    def _pick(self, table: Tensor, numbers: Sequence[int]) -> Tensor:
        """Return rows of a table by ascending numbers."""
        first = numbers[0]
        last = numbers[-1]
        if last - first == len(numbers) - 1:
            return table[first : last + 1]
        return table.index_select(0, self.moved(torch.tensor(numbers)))

    def _call(
        self, segments: Sequence[Segment], sizes: Sequence[int], pages: Tensor, numbers: Sequence[int]
    ) -> PagedCall | None:
        """Return a call in which these segments attend to all their pages; None for none."""
        if not numbers:
            return None
        segments = [segments[number] for number in numbers]
        sizes = [sizes[number] for number in numbers]
        pages = self._pick(pages, numbers)
        rows = [segment.end - segment.start for segment in segments]
        starts = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lengths = torch.tensor(sizes, dtype=torch.int32)
        schedule = self.schedule(self.facts.heads, self.facts.kv_heads, lengths, starts)
        longest = max(rows), max(sizes)
        return PagedCall(
            self._rows(segments), self.moved(starts), self.moved(lengths), longest, pages.contiguous(), schedule
        )

    def _sparse(
        self, segments: Sequence[Segment], sizes: Sequence[int], pages: Tensor, read: Sequence[int]
    ) -> SparseCall | None:
        """Return the call of the segments that attend sparsely; None if they attend to everything."""
        facts = self.facts
        reading = self.facts.reading
        if reading is None or not read:
            return None
        page = facts.page
        heads = facts.kv_heads
        segments = [segments[number] for number in read]
        sizes = [sizes[number] for number in read]
        reads = [reading.read(segment.end, size) for segment, size in zip(segments, sizes, strict=True)]
        used = [-(-size // page) for size in sizes]
        counts = [part.pages for part in reads]
        if counts == used and not reading.self_test:
            return None
        entries = [part.entries for part in reads]
        channels = [part.channels for part in reads]
        lengths = torch.tensor(entries, dtype=torch.int32).repeat_interleave(heads)
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
        schedule = self.schedule(facts.heads // heads, 1, lengths, starts)
        return SparseCall(
            PagedCall(self._rows(segments), self.moved(starts), self.moved(lengths), (1, max(entries)), None, schedule),
            self._pick(pages, read)[:, : max(used)].contiguous(),
            self.moved(torch.tensor(sizes, dtype=torch.int32)),
            self.moved(torch.tensor(counts, dtype=torch.int32)),
            self.moved(torch.tensor(channels)) if min(channels) < reading.dim else None,
            max(counts),
        )

    def _ends(self, segments: Sequence[Segment], sizes: Sequence[int], pages: Tensor) -> list[SegmentEnd]:
        keeps = self.facts.retention
        if keeps is None:
            return []
        ends = []
        blocks = None
        for number, segment in enumerate(segments):
            prompt = segment.request.prompt
            earlier, later = (keeps.wants_queries(prompt, at) for at in (segment.start, segment.end))
            known = earlier or later or (keeps.remembers and segment.end >= prompt)
            if not known and not segment.packs:
                continue
            if known and blocks is None:
                # Waits for the device: for the last step, if steps are scheduled asynchronously.
                blocks = pages[:, 0].tolist()
            packing = None
            if segment.packs:
                own = self._own(pages, number, sizes[number])
                packing = Packing(own, sizes[number], keeps.kept_blocks(prompt))
            ends.append(SegmentEnd(segment, blocks[number] if known and blocks else -1, earlier, later, packing))
        return ends

    def _rows(self, segments: Sequence[Segment]) -> slice | Tensor:
        rows = joined([segment.rows for segment in segments])
        return rows if isinstance(rows, slice) else self.moved(torch.tensor(rows))


def lengths_of(common: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of each request after a step, and of its prompt, without a device synchronization."""
    if common.rswa_prefix_lens is None or common.seq_lens_cpu_upper_bound is None:
        raise CacheStateError("vLLM gave no lengths of prompts or requests, which kvsieve's plugin asks it for")
    # Exact, as there is no speculative decoding.
    return common.seq_lens_cpu_upper_bound.tolist(), common.rswa_prefix_lens.tolist()


def _requests(common: Any) -> list[ScheduledTokens]:
    rows, (ends, prompts) = common.query_start_loc_cpu.tolist(), lengths_of(common)
    new = [end - start for start, end in itertools.pairwise(rows)]
    return [
        ScheduledTokens(number, rows[number], ends[number] - new[number], ends[number], prompts[number])
        for number in range(common.num_reqs)
        if new[number]
    ]
