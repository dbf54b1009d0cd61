"""Drafts of an answer that is known, some of them wrong."""

from __future__ import annotations

from kvsieve.hf.drafts import opened
from kvsieve.hf.drafts.drafter import Drafter


class Oracle(Drafter):
    """Proposes what follows in one of the known sequences, with every third token of a proposal changed.

    Args:
        sequences: lists of tokens, prompts included, without padding.
    """

    def __init__(self, sequences):
        self.sequences = sequences
        self.tokens = []
        self.proposals = 0

    def extend(self, tokens):
        self.tokens += tokens

    def propose(self, most):
        size = len(self.tokens)
        known = next((row for row in self.sequences if row[:size] == self.tokens), [])
        self.proposals += 1
        out = known[size : size + most]
        if self.proposals % 2:
            out[2:3] = [(token + 1) % 100 for token in out[2:3]]
        return out


def let_drafts_know(monkeypatch, sequences):
    """Make drafts those of an oracle; the text of draft= then says only how many."""
    monkeypatch.setattr(opened, "_drafter", lambda *_: Oracle(sequences))
