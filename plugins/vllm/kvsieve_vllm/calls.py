"""Calls of a kernel of paged attention in a step, and what is done behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvsieve_vllm.rounds import Segment


@dataclass(frozen=True)
class PagedCall:
    """One call of a kernel.

    Attributes:
        rows: of the batch, as a slice or int64 indices.
        starts: int32 [n + 1], where requests begin among these rows.
        lengths: int32 [n], entries of each.
        longest: most rows of a request, and most entries.
        table: int32 [n, width], pages of each; None for a sparse call, whose pages every layer chooses.
        schedule: made by the kernel's builder for this call.
    """

    rows: slice | Tensor
    starts: Tensor
    lengths: Tensor
    longest: tuple[int, int]
    table: Tensor | None
    schedule: Any


@dataclass(frozen=True)
class SparseCall:
    """Generated tokens that read some pages; each KV head of each request is a request of its own to the kernel.

    Attributes:
        call: of these requests.
        table: int32 [n, width], pages that each could read.
        sizes: int32 [n], entries in them.
        counts: int32 [n], pages to read.
        channels: int64 [n]; see PagedReader.question.
        most: the largest of the counts.
    """

    call: PagedCall
    table: Tensor
    sizes: Tensor
    counts: Tensor
    channels: Tensor | None
    most: int


@dataclass(frozen=True)
class PromptCall:
    """Many tokens of one request, to which kvsieve's own kernel attends.

    Attributes:
        segment: the tokens.
        pages: int64, all pages of the request.
        stored: entries in them, the tokens' own included.
    """

    segment: Segment
    pages: Tensor
    stored: int


@dataclass(frozen=True)
class Packing:
    """Entries to be packed.

    Attributes:
        pages: int64, all pages of the request.
        stored: entries in them.
        kept: pages that the chosen entries fill.
    """

    pages: Tensor
    stored: int
    kept: int


@dataclass(frozen=True)
class SegmentEnd:
    """Work of an evictor behind a segment.

    Attributes:
        segment: the request's tokens.
        block: the request's first block, which no other has at the same time; -1 where nothing is remembered.
        earlier: queries of the tokens before it were kept, and are looked at with its own.
        later: queries of its last tokens are to be kept.
        packing: entries to be packed; None for none.
    """

    segment: Segment
    block: int
    earlier: bool
    later: bool
    packing: Packing | None


@dataclass(frozen=True)
class Round:
    """Calls between two moments at which entries are packed.

    Attributes:
        rows: of the batch.
        whole: all rows but those of `prompts`, each attending to everything; None for none, or where no layer wants it.
        sparse: rows that read sparsely; None for none.
        rest: the other rows; None for none.
        prompts: long segments, for each of which there is a kernel of our own.
        ends: work behind some segments.
    """

    rows: slice | Tensor
    whole: PagedCall | None
    sparse: SparseCall | None
    rest: PagedCall | None
    prompts: list[PromptCall]
    ends: list[SegmentEnd]


@dataclass
class PlannedStep:
    """Metadata of a step that a plan adds: rounds; None where the step is as without one."""

    rounds: list[Round] | None = None
