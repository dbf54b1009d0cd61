"""One step of an engine, split at evictions: attention, packing, and attention again.

A step usually is one round. A preempted request returns with its generated tokens, so prompt and answer may be
processed together: then the prompt's part is the first round, blocks are packed, and the rest, which must see the kept
entries only, is the second. Under a reader, each token of such an answer is a round.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvsieve_vllm.retention import BlockRetention


@dataclass(frozen=True)
class ScheduledTokens:
    """Tokens of one request in a step.

    Attributes:
        number: of the request in the batch.
        row: of the first token in the batch.
        start: tokens processed before the step.
        end: tokens processed after it.
        prompt: tokens of the prompt.
    """

    number: int
    row: int
    start: int
    end: int
    prompt: int


@dataclass(frozen=True)
class Segment:
    """Part of a request's tokens, between two moments of packing.

    Attributes:
        request: the request's tokens of the step.
        start: tokens processed before it.
        end: tokens processed after it.
        packs: entries are packed after it.
    """

    request: ScheduledTokens
    start: int
    end: int
    packs: bool

    @property
    def rows(self) -> slice:
        """Rows of the batch."""
        first = self.request.row + self.start - self.request.start
        return slice(first, first + self.end - self.start)

    @property
    def decodes(self) -> bool:
        """True for one generated token."""
        return self.end - self.start == 1 and self.start >= self.request.prompt


def rounds_of(
    requests: Sequence[ScheduledTokens], retention: BlockRetention | None, singly: bool = False
) -> list[list[Segment]]:
    """Split a step into rounds; a request has at most one segment in each.

    Args:
        requests: in the order of the batch.
        retention: the evictor on blocks; None without one.
        singly: each generated token is a segment of its own.
    """
    rounds: list[list[Segment]] = [[]]
    for request in requests:
        start = request.start
        end = request.end
        prompt = request.prompt
        cuts = [] if retention is None else retention.moments(prompt, start, end)
        ends = {*cuts, end}
        if singly and end > prompt:
            ends |= {at for at in range(max(start + 1, prompt), end)}
        for number, (first, last) in enumerate(itertools.pairwise([start, *sorted(ends)])):
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(Segment(request, first, last, last in cuts))
    return rounds


def joined(rows: Sequence[slice]) -> slice | list[int]:
    """Return the rows as one slice if they are contiguous, else as a list."""
    if all(one.stop == other.start for one, other in itertools.pairwise(rows)):
        return slice(rows[0].start, rows[-1].stop)
    return [row for part in rows for row in range(part.start, part.stop)]
