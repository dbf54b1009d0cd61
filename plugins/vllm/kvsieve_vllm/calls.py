"""Calls of a paged attention kernel in a step, and the work after them."""

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
        starts: int32 [n + 1], first row of each request.
        lengths: int32 [n], entries of each.
        longest: most rows of a request, and most entries.
        table: int32 [n, width], pages of each; None for a sparse call, with pages chosen per layer.
        schedule: the kernel's metadata for this call.
    """

    rows: slice | Tensor
    starts: Tensor
    lengths: Tensor
    longest: tuple[int, int]
    table: Tensor | None
    schedule: Any


@dataclass(frozen=True)
class SparseCall:
    """Generated tokens that attend to some pages; each KV head of each request is a request of its own for the kernel.

    Attributes:
        call: of these requests.
        table: int32 [n, width], candidate pages of each.
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
    """Many tokens of one request, for kvsieve's own kernel.

    Attributes:
        segment: the tokens.
        pages: int64, all pages of the request.
        stored: entries in them, including the tokens' own.
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
        kept: pages filled by the chosen entries.
    """

    pages: Tensor
    stored: int
    kept: int


@dataclass(frozen=True)
class SegmentEnd:
    """Work of an evictor after a segment.

    Attributes:
        segment: the request's tokens.
        block: the request's first block, unique at any time; -1 if nothing is remembered.
        earlier: queries of earlier tokens were kept, for use with its own.
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
    """Calls between two moments of packing.

    Attributes:
        rows: of the batch.
        whole: all rows except those of `prompts`, each with dense attention; None for none, or if no layer needs it.
        sparse: rows that attend sparsely; None for none.
        rest: the other rows; None for none.
        prompts: long segments for kvsieve's own kernel.
        ends: work after some segments.
    """

    rows: slice | Tensor
    whole: PagedCall | None
    sparse: SparseCall | None
    rest: PagedCall | None
    prompts: list[PromptCall]
    ends: list[SegmentEnd]


@dataclass
class PlannedStep:
    """Metadata of a step under a plan: rounds; None for a step without changes."""

    rounds: list[Round] | None = None
