"""One step of an engine, cut where eviction acts: what is attended to, packed, and attended to again.

A step usually is one round. A request that was preempted comes back with the tokens that it had generated, and prompt
and answer may be read in one piece: then the prompt's part is the first round, blocks are packed, and the rest, which
must see what stayed as it did before, is the second. Where answers are read sparsely, each of their tokens is a round.
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
    """Part of a request's tokens, between two moments at which entries are packed.

    Attributes:
        request: the request's tokens of the step.
        start: tokens processed before it.
        end: tokens processed after it.
        packs: entries are packed behind it.
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
    """Cut a step into rounds; a request has at most one segment in each.

    Args:
        requests: in the order of the batch.
        retention: what is kept; None where nothing is evicted.
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
    """Return the rows as one slice where they lie side by side, else as a list."""
    if all(one.stop == other.start for one, other in itertools.pairwise(rows)):
        return slice(rows[0].start, rows[-1].stop)
    return [row for each in rows for row in range(each.start, each.stop)]
