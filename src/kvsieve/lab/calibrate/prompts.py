"""Prompts for calibration: generated ones with facts to find, or windows of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import InputError
from kvsieve.lab.calibrate.options import ANSWER
from kvsieve.lab.tasks import chosen_tasks
from kvsieve.lab.tasks.prompter import Prompter
from kvsieve.planning.turns import escaped, token_ids

# Facts to find in prose, by a question at the end: one number of several, two long answers, four short ones.
TASKS = ("ruler_niah_multikey_1", "passkey64", "ruler_niah_single_3", "ruler_niah_multivalue")
CONTINUATION = 32

# Evaluation draws its samples with small seeds; a model should not be calibrated on its test data.
_SEED = 10**6


@dataclass(frozen=True)
class Prompt:
    """A prompt and its answer.

    ids: int64 [1, N]. answer: int64 [1, T], 2 or more; None for the model's own under full KV. name: of its task.
    """

    ids: Tensor
    answer: Tensor | None = None
    name: str = "text"

    def __post_init__(self) -> None:
        if self.answer is not None and self.answer.shape[1] < 2:
            raise InputError(f"an answer needs at least 2 tokens, got {self.answer.shape[1]}: the first says nothing")


def built_in_prompts(prompter: Prompter, lengths: Sequence[int], count: int, seed: int = 0) -> list[Prompt]:
    """Return `count` prompts of each of `lengths` tokens, cycling through tasks. InputError for a length too short."""
    tasks = chosen_tasks(TASKS)
    prompts = []
    for length in lengths:
        for index in range(count):
            # Needles are at depths 0.3, 0.4 ...: any method would find sinks and recent tokens.
            sample = tasks[index % len(tasks)].sample(index + 3, length, _SEED + seed, prompter.count)
            prompts.append(Prompt(prompter.encode(sample).prompt, name=TASKS[index % len(tasks)]))
    return prompts


def text_prompts(prompter: Prompter, text: str, lengths: Sequence[int], count: int) -> list[Prompt]:
    """Return `count` windows of each of `lengths` tokens, evenly spread over the text; the last 32 are the answer.

    Raises InputError for a text or length too short.
    """
    tokens = token_ids(prompter.tokenizer, escaped(prompter.tokenizer, text))
    start = token_ids(prompter.tokenizer, prompter.bos or "")
    prompts = []
    for length in lengths:
        inside = length - len(start)
        if inside < 2 * CONTINUATION:
            raise InputError(f"a window of {length} tokens is too short; at least {2 * CONTINUATION + 1} are needed")
        if len(tokens) < inside:
            raise InputError(f"the text has {len(tokens)} tokens, windows of {length} are wanted; give a longer one")
        for index in range(count):
            first = (len(tokens) - inside) * index // max(count - 1, 1)
            ids = torch.tensor([start + tokens[first : first + inside]])
            prompts.append(Prompt(ids[:, :-CONTINUATION], ids[:, -CONTINUATION:]))
    return prompts


@dataclass(frozen=True)
class Material:
    """Prompts to calibrate on.

    Attributes:
        text: use windows of it instead of generated prompts.
        source: the text's name, for the profile.
        lengths: tokens per prompt.
        prompts: how many of each length.
        seed: of the generated prompts.
    """

    text: str | None = None
    source: str = "text"
    lengths: Sequence[int] = (2048,)
    prompts: int = 4
    seed: int = 0

    def check(self, context: int | None) -> None:
        """Raise InputError for no prompts, or prompts longer than the model's context."""
        if self.prompts < 1 or not self.lengths:
            raise InputError(
                f"a calibration needs at least 1 prompt of 1 length, got {self.prompts} of {list(self.lengths)}"
            )
        if context is not None and max(self.lengths) + ANSWER > context:
            raise InputError(
                f"prompts of {max(self.lengths)} tokens and answers of {ANSWER} are longer than the model's context of "
                f"{context}; choose smaller lengths"
            )

    def prompts_for(self, prompter: Prompter) -> tuple[list[Prompt], Prompt]:
        """Return the prompts, and one more of the first length that nothing is fitted to. Raises InputError."""
        first = self.lengths[:1]
        if self.text is None:
            prompts = built_in_prompts(prompter, self.lengths, self.prompts, self.seed)
            return prompts, built_in_prompts(prompter, first, self.prompts + 1, self.seed)[-1]
        prompts = text_prompts(prompter, self.text, self.lengths, self.prompts)
        return prompts, text_prompts(prompter, self.text, first, 2 * self.prompts + 2)[1]

    def described(self) -> dict[str, Any]:
        """Return a JSON-ready description for the profile, without the text itself."""
        return {
            "source": f"generated: {', '.join(TASKS)}" if self.text is None else self.source,
            "lengths": list(self.lengths),
            "prompts": self.prompts,
            "seed": self.seed,
        }
