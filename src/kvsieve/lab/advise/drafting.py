"""Drafts by lookup for a recommended plan: answers with and without them, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from kvsieve.hf.attach import attach
from kvsieve.hf.drafts.drafter import DraftCounts
from kvsieve.hf.generate.stats import Stats
from kvsieve.lab.advise.material import Drawn
from kvsieve.lab.advise.measure import Step
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.eval.reading import DocumentReader
from kvsieve.planning.plans import Plan

LOOKUP = "lookup"
# Prompts, and the longest answer to each.
PROMPTS = 5
ANSWER = 128
# Drafts pay below this ratio.
_PAYS = 0.95


@dataclass(frozen=True)
class DraftGain:
    """Drafts by lookup beside one token per pass, on the same prompts.

    Attributes:
        prompts: answers compared.
        tokens_per_pass: with drafts.
        tpot_ratio: time per token with drafts over that without, median over prompts.
    """

    prompts: int
    tokens_per_pass: float
    tpot_ratio: float

    @property
    def pays(self) -> bool:
        """True if drafts make answers clearly faster."""
        return self.tpot_ratio < _PAYS


def measure_drafts(
    evaluator: Evaluator, plan: Plan, drawn: Sequence[Drawn], question: str, step: Step
) -> DraftGain | None:
    """Answer prompts with and without drafts; None if no answer has a second token.

    Args:
        evaluator: of the model.
        plan: fully specified.
        drawn: the prompts.
        question: "visible" or "hidden".
        step: called before each answer.

    Raises:
        PlanError: the plan allows no drafts.
    """
    counts = DraftCounts()
    ratios = []
    for number, draw in enumerate(drawn):
        encoded = evaluator.prompter.encode(draw.sample)
        ids = encoded.prompt.to(evaluator.model.device)
        hidden = encoded.question.shape[1] if question == "hidden" else None
        reader = DocumentReader(evaluator.model, evaluator.chunk, room=ANSWER)
        if hidden is None:
            reader.open([plan], ids)
        found = {}
        # The first run of a pair may be the slower one.
        for draft in (None, LOOKUP) if number % 2 else (LOOKUP, None):
            step("drafts")
            found[draft] = _answer(evaluator, plan, reader, ids, hidden, draft)
        drafted = found[LOOKUP]
        plain = found[None]
        if drafted.drafts is not None and drafted.tpot_s and plain.tpot_s:
            counts.add(drafted.drafts)
            ratios.append(drafted.tpot_s / plain.tpot_s)
    if not ratios:
        return None
    return DraftGain(len(ratios), counts.tokens_per_pass, median(ratios))


def _answer(
    evaluator: Evaluator, plan: Plan, reader: DocumentReader, ids: torch.Tensor, hidden: int | None, draft: str | None
) -> Stats:
    with attach(evaluator.model, plan, tokenizer=evaluator.prompter.tokenizer) as sieve:
        result = sieve.generate(
            ids,
            torch.ones_like(ids),
            cache=reader.begin(sieve, ids),
            chunk=evaluator.chunk,
            question_tokens=hidden,
            max_new_tokens=ANSWER,
            do_sample=False,
            eos_token_id=sorted(evaluator.prompter.stops) or None,
            draft=draft or "none",
        )
    return result.stats
