"""Blocks of a request that an evictor keeps, by numbers that the scheduler and the workers work out alike.

Once a prompt of P tokens is complete, each KV head's best entries among the prompt's whole blocks lie in the first r
blocks; the prompt's last, partly filled block stays as it is, and new tokens go on behind it. The blocks in between
hold nothing: a gap. An evictor that acts while decoding, too, widens it. Both sides know P and how many tokens have
been processed, and nothing else is needed to tell where the gap is, so there is no state that a preemption, a
resumption or an abort could leave behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.errors import PlanError
from kvsieve.planning.roles import Evictor

# Tokens of a prompt longer than any: what a share of it is fits every block.
_LONGEST = 1 << 30


@dataclass(frozen=True)
class BlockRetention:
    """An evictor that acts on blocks.

    Attributes:
        evictor: what chooses.
        block: entries of a block.
        self_test: keep every entry.
    """

    evictor: Evictor
    block: int
    self_test: bool = False

    def check(self) -> None:
        """Refuse a budget that no block fits into, as they may be large where states of recurrent layers are.

        Raises:
            PlanError: the block is larger than what is kept of the longest prompt.
        """
        most = self.evictor.entries(_LONGEST)
        if most < self.block:
            raise PlanError(
                f"{type(self.evictor).__name__}: a budget of {most} entries has no room for one of the engine's blocks "
                f"of {self.block}; raise budget= to {self.block} or more, or start vLLM with a smaller block_size"
            )

    @property
    def remembers(self) -> bool:
        """True where the evictor goes on from what it found out about the same request before."""
        again = self.evictor.when.steps is not None
        return self.evictor.traits.remembers and again and not self.self_test

    def kept_blocks(self, prompt: int) -> int:
        """Return r, the whole blocks that a prompt's best entries fill: as many as its budget has room for.

        The last, partly filled block counts towards the budget; at least the evictor's minimum stays, also where that
        block is empty because the evictor acts again.
        """
        if self.self_test:
            return prompt // self.block
        tail = prompt % self.block
        room = (self.evictor.entries(prompt) - tail) // self.block
        least = self.evictor.minimum - (tail if self.evictor.rhythm(prompt) is None else 0)
        return max(room, -(-least // self.block), 1)

    def gap(self, prompt: int, processed: int) -> tuple[int, int]:
        """Return the first block that holds nothing and the first behind it that holds entries again.

        Args:
            prompt: P, tokens of the prompt.
            processed: tokens whose pass is over.

        Returns:
            Indices among the request's blocks; equal where there is no gap.
        """
        if processed < prompt:
            return 0, 0
        kept = self.kept_blocks(prompt)
        end = self._acted(prompt, processed) // self.block
        return (kept, end) if end > kept else (0, 0)

    def moments(self, prompt: int, start: int, end: int) -> list[int]:
        """Return the lengths, above `start` and up to `end`, at which entries are packed.

        Args:
            prompt: P, tokens of the prompt.
            start: tokens processed before a pass.
            end: tokens processed after it.
        """
        asked = []
        at = self._next(prompt, start)
        while at is not None and at <= end:
            asked.append(at)
            at = self._next(prompt, at)
        if self.self_test:
            return [at for at in asked if prompt >= self.block]
        return [at for at in asked if self.gap(prompt, at) != self.gap(prompt, at - 1)]

    def wants_queries(self, prompt: int, processed: int) -> bool:
        """Tell whether the queries of the last tokens that were processed are looked at when the evictor acts next."""
        at = self._next(prompt, processed)
        return processed > 0 and at is not None and at - processed < self.evictor.window

    def stored(self, prompt: int, processed: int) -> int:
        """Return the entries of a KV head that lie in blocks once so many tokens were processed."""
        first, end = self.gap(prompt, processed)
        return processed - (end - first) * self.block

    def _acted(self, prompt: int, processed: int) -> int:
        """Return the length at which the evictor acted last, of a prompt that was read."""
        again = self.evictor.rhythm(prompt)
        return prompt if again is None else max(prompt, processed - (processed - again[1]) % again[0])

    def _next(self, prompt: int, processed: int) -> int | None:
        """Return the length at which the evictor acts next."""
        if processed < prompt:
            return prompt
        again = None if self.self_test else self.evictor.rhythm(prompt)
        return None if again is None else processed + again[0] - (processed - again[1]) % again[0]
