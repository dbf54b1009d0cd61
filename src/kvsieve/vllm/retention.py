"""Blocks of a request that an evictor keeps, by numbers that the scheduler and the workers work out alike.

Once a prompt of P tokens is complete, each KV head's best entries among the prompt's whole blocks lie in the first r
blocks; the prompt's last, partly filled block stays as it is, and new tokens go on behind it. The blocks in between
hold nothing: a gap. Both sides know P and how many tokens have been processed, and nothing else is needed to tell where
the gap is, so there is no state that a preemption, a resumption or an abort could leave behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.roles import Evictor
from kvsieve.vllm.carried import every


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

    def kept_blocks(self, prompt: int) -> int:
        """Return r, the whole blocks that a prompt's best entries fill: as many as its budget has room for.

        The last, partly filled block counts towards the budget; at least the evictor's minimum stays.
        """
        if self.self_test:
            return prompt // self.block
        tail = prompt % self.block
        room = (self.evictor.entries(prompt) - tail) // self.block
        least = -(-(self.evictor.minimum - tail) // self.block)
        return max(room, least, 1)

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
        again = every(self.evictor)
        acted = prompt if again is None else prompt + (processed - prompt) // again * again
        end = acted // self.block
        return (kept, end) if end > kept else (0, 0)

    def moments(self, prompt: int, start: int, end: int) -> list[int]:
        """Return the lengths, above `start` and up to `end`, at which entries are packed.

        Args:
            prompt: P, tokens of the prompt.
            start: tokens processed before a pass.
            end: tokens processed after it.
        """
        again = every(self.evictor)
        asked = [prompt] if start < prompt <= end else []
        if again is not None:
            first = prompt + (max(start - prompt, 0) // again + 1) * again
            asked += range(first, end + 1, again)
        if self.self_test:
            return [at for at in asked if at == prompt and prompt >= self.block]
        return [at for at in asked if self.gap(prompt, at) != self.gap(prompt, at - 1)]

    def stored(self, prompt: int, processed: int) -> int:
        """Return the entries of a KV head that lie in blocks once so many tokens were processed."""
        first, end = self.gap(prompt, processed)
        return processed - (end - first) * self.block
