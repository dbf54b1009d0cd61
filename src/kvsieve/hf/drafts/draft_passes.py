"""Passes over the end of one conversation whose newest tokens are drafts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.forward.tentative import Transaction
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan

# Tokens of a conversation that are fed in one pass.
_PIECE = 256
# A draft ends before the token that makes all of it less likely than this, by its own probabilities.
LEAST = 0.3


class DraftPasses:
    """A cache of one row with drafted tokens at its end, to be taken back, newest first.

    Args:
        model: runs the passes.
        cache: of the conversation.
        plan: acts on them; None for the model's own.
    """

    def __init__(self, model: AttachedModel, cache: SieveCache, plan: Plan | None = None) -> None:
        self.model = model
        self.cache = cache
        self.plan = plan
        self._drafted: list[Transaction] = []

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Feed tokens that stay, as those drafted before do, and return the logits [V] after the last one."""
        self._drafted.clear()
        pieces = [tokens[start : start + _PIECE] for start in range(0, len(tokens), _PIECE)]
        for piece in pieces[:-1]:
            self.run(piece, PassRequest(self.plan, "decode"))
        return self.run(pieces[-1], PassRequest(self.plan, "decode"))[0]

    def draft(self, token: int) -> Tensor:
        """Feed a token that may be taken back, and return the logits [V] after it."""
        logits, transaction = self.run([token], PassRequest(self.plan, tentative=True))
        assert transaction is not None
        self._drafted.append(transaction)
        return logits

    def take_back(self, count: int) -> None:
        """Remove the last `count` drafted tokens, as if they had never been fed."""
        for _ in range(count):
            self._drafted.pop().accept(0)

    def run(self, tokens: Sequence[int], request: PassRequest) -> tuple[Tensor, Transaction | None]:
        """Run a pass over tokens; return the logits [V] after the last one, and the pass's transaction."""
        ids = torch.tensor([list(tokens)])
        mask = self.cache.conversation.mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(1, len(tokens))], 1)
        result = self.model.feed(self.cache, ids, mask, request, logits=1)
        assert result.logits is not None
        return result.logits[0, -1], result.transaction


class PlainDraftPasses(DraftPasses):
    """Passes under an empty plan, of a model whose layers store all tokens: any of them can be taken back."""

    def draft(self, token: int) -> Tensor:
        return self.run([token], PassRequest(phase="decode"))[0]

    def take_back(self, count: int) -> None:
        self.cache.crop(-count)


def greedy(
    passes: DraftPasses, logits: Tensor, most: int, ends: Collection[int], vocabulary: int
) -> tuple[list[int], int]:
    """Draft the most probable tokens, one after another.

    Args:
        passes: with the conversation.
        logits: [V] after its last token.
        most: tokens to draft, at least one.
        ends: tokens that end an answer, and the draft.
        vocabulary: tokens the verifying model knows; others are not drafted.

    Returns:
        The drafted tokens, and the number of them that were fed.
    """
    tokens: list[int] = []
    likelihood = 1.0
    while True:
        best, token = logits.float().log_softmax(-1).max(-1)
        likelihood *= float(best.exp())
        # The first one costs no pass.
        if (tokens and likelihood < LEAST) or int(token) >= vocabulary:
            return tokens, len(tokens)
        tokens.append(int(token))
        if len(tokens) == most or tokens[-1] in ends:
            return tokens, len(tokens) - 1
        logits = passes.draft(tokens[-1])


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading tokens that two sequences share."""
    size = min(len(one), len(other))
    start = 0
    while start < size and one[start : start + _PIECE] == other[start : start + _PIECE]:
        start += _PIECE
    return next((at for at in range(start, size) if one[at] != other[at]), size)
