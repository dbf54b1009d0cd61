"""Blocks of a request that an evictor keeps, computed identically by scheduler and workers.

Once a prompt of P tokens is complete, each KV head's best entries among the prompt's full blocks are packed into the
first r blocks; the prompt's last, partly filled block is unchanged, and new tokens follow it. The blocks in between are
empty: a gap. Eviction while decoding widens it. The gap depends only on P and the number of processed tokens, known to
both sides, so there is no state that a preemption, a resumption or an abort could leave stale.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.errors import PlanError
from kvsieve.planning.roles import Evictor

# Tokens of a prompt longer than any real one: any share of it exceeds a block.
_LONGEST = 1 << 30


@dataclass(frozen=True)
class BlockRetention:
    """An evictor that acts on blocks.

    Attributes:
        evictor: chooses the entries.
        block: entries of a block.
        self_test: keep every entry.
    """

    evictor: Evictor
    block: int
    self_test: bool = False

    def check(self) -> None:
        """Refuse a budget smaller than a block; blocks may be large in models with recurrent layers.

        Raises:
            PlanError: the block is larger than the entries kept of the longest prompt.
        """
        most = self.evictor.entries(_LONGEST)
        if most < self.block:
            raise PlanError(
                f"{type(self.evictor).__name__}: a budget of {most} entries has no room for one of the engine's blocks "
                f"of {self.block}; raise budget= to {self.block} or more, or start vLLM with a smaller block_size"
            )

    @property
    def remembers(self) -> bool:
        """True if the evictor uses its earlier state of the same request."""
        again = self.evictor.when.steps is not None
        return self.evictor.traits.remembers and again and not self.self_test

    def kept_blocks(self, prompt: int) -> int:
        """Return r, the number of full blocks for a prompt's best entries within the budget.

        The last, partly filled block counts towards the budget; at least the evictor's minimum stays, even if that
        block is empty because the evictor acts again.
        """
        if self.self_test:
            return prompt // self.block
        tail = prompt % self.block
        room = (self.evictor.entries(prompt) - tail) // self.block
        least = self.evictor.minimum - (tail if self.evictor.rhythm(prompt) is None else 0)
        return max(room, -(-least // self.block), 1)

    def gap(self, prompt: int, processed: int) -> tuple[int, int]:
        """Return the first empty block and the first non-empty one after it.

        Args:
            prompt: P, tokens of the prompt.
            processed: tokens of finished passes.

        Returns:
            Indices among the request's blocks; equal without a gap.
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
        lengths = []
        at = self._next(prompt, start)
        while at is not None and at <= end:
            lengths.append(at)
            at = self._next(prompt, at)
        if self.self_test:
            return [at for at in lengths if prompt >= self.block]
        return [at for at in lengths if self.gap(prompt, at) != self.gap(prompt, at - 1)]

    def wants_queries(self, prompt: int, processed: int) -> bool:
        """Return True if the evictor needs the queries of the last processed tokens when it acts next."""
        at = self._next(prompt, processed)
        return processed > 0 and at is not None and at - processed < self.evictor.window

    def stored(self, prompt: int, processed: int) -> int:
        """Return the entries of a KV head in blocks after so many processed tokens."""
        first, end = self.gap(prompt, processed)
        return processed - (end - first) * self.block

    def _acted(self, prompt: int, processed: int) -> int:
        """Return the length at which the evictor last acted on a complete prompt."""
        again = self.evictor.rhythm(prompt)
        return prompt if again is None else max(prompt, processed - (processed - again[1]) % again[0])

    def _next(self, prompt: int, processed: int) -> int | None:
        """Return the length of the next eviction."""
        if processed < prompt:
            return prompt
        again = None if self.self_test else self.evictor.rhythm(prompt)
        return None if again is None else processed + again[0] - (processed - again[1]) % again[0]
