"""Key recall: records of a key and its value among filler, then questions for some of the keys.

    BOS f f K V V V V f K V V V V f f f K V V V V ...   ? K V V V V   ? K V V V V

Keys and the tokens of values are drawn afresh for every sequence, each once in it, so nothing can be learned by heart:
an answer is copied, token by token, from where its key stood. Filler is of an alphabet of its own and repeats itself.
The other records are the distractors: a state of fixed size would have to hold all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

BOS, QUESTION = 1, 2  # 0 is padding
FILLER = range(3, 32)
FIRST_SYMBOL = FILLER.stop
VOCABULARY = 160


@dataclass(frozen=True)
class Task:
    """The shape of a sequence.

    Attributes:
        length: tokens of the whole sequence, questions and answers included.
        records: keys with their values.
        questions: keys that are asked for, each once.
        value: tokens of a value.
        symbols: symbols that keys and values are made of.
    """

    length: int = 256
    records: int = 24
    questions: int = 8
    value: int = 4
    symbols: int = VOCABULARY - FIRST_SYMBOL

    def __post_init__(self) -> None:
        if self.filler < 0 or self.records * (1 + self.value) > self.symbols or self.questions > self.records:
            raise ValueError(
                f"{self} does not fit: {self.filler} tokens are left for filler, no symbol "
                "stands twice, and no key is asked for twice; make it longer, or take fewer records or questions"
            )

    @property
    def context(self) -> int:
        """Tokens before the first question."""
        return self.length - self.questions * (2 + self.value)

    @property
    def filler(self) -> int:
        """Tokens of the context that belong to no record."""
        return self.context - 1 - self.records * (1 + self.value)

    @property
    def answers(self) -> Tensor:
        """Places of the answers' tokens, int64 [questions, value]."""
        first = self.context + 2 + torch.arange(self.questions) * (2 + self.value)
        return first[:, None] + torch.arange(self.value)

    def one_question(self) -> Task:
        """Make the task of the same length with a single question, at the end."""
        return replace(self, questions=1)

    def sample(self, rows: int, generator: torch.Generator) -> Tensor:
        """Draw sequences, int64 [rows, length]; `answers` says where the answers stand."""
        size = 1 + self.value
        symbols = torch.rand(rows, self.symbols, generator=generator).argsort(1) + FIRST_SYMBOL
        records = symbols[:, : self.records * size].view(rows, self.records, size)
        # A record begins behind those before it, and behind as many tokens of filler as a sorted draw says.
        before = torch.randint(0, self.filler + 1, (rows, self.records), generator=generator).sort(1).values
        starts = 1 + before + torch.arange(self.records) * size
        context = torch.randint(FILLER.start, FILLER.stop, (rows, self.context), generator=generator)
        context[:, 0] = BOS
        context.scatter_(1, (starts[:, :, None] + torch.arange(size)).flatten(1), records.flatten(1))
        asked = torch.rand(rows, self.records, generator=generator).argsort(1)[:, : self.questions]
        chosen = records.gather(1, asked[:, :, None].expand(-1, -1, size))
        marks = torch.full((rows, self.questions, 1), QUESTION)
        return torch.cat([context, torch.cat([marks, chosen], 2).flatten(1)], 1)
