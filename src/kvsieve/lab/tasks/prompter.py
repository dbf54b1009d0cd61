"""Conversion of samples to token ids: chat template, end of the context, stop tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsieve.detokenize import text_of
from kvsieve.errors import InputError
from kvsieve.lab.tasks.samples import Sample
from kvsieve.planning.turns import escaped, render, stop_ids, token_ids


@dataclass(frozen=True)
class Encoded:
    """A sample as token ids.

    Attributes:
        context: int64 [1, N]; with `question`, the prompt of the first turn. The split is between tokens, so both ways
            of asking feed the same ids.
        question: int64 [1, N].
        followups: additions of each later turn to the conversation, including the right answer to the turn before; with
            independent turns, each turn's own question.
    """

    context: Tensor
    question: Tensor
    followups: tuple[Tensor, ...] = ()

    @property
    def prompt(self) -> Tensor:
        return torch.cat([self.context, self.question], 1)


class Prompter:
    """Renders samples for one model. Control tokens spelled in a sample's text are treated as text."""

    def __init__(self, tokenizer: Any, stops: Any = None) -> None:
        """stops: the model's end tokens (an id, a list or None); the template's end of turn is added."""
        self.tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        # A template writes its own; plain text gets the tokenizer's special tokens.
        starts = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        self.bos = tokenizer.bos_token if starts and not self.has_template else ""
        self.stops = stop_ids(tokenizer, stops)

    def encode(self, sample: Sample) -> Encoded:
        """Tokenize a sample. Raises InputError if the chat template changes the context or rewrites earlier turns."""
        context, question = self._split(sample, 0)
        if sample.independent:
            others = [self._split(sample, turn)[1] for turn in range(1, len(sample.turns))]
            return Encoded(self._ids(context), self._ids(question), tuple(map(self._ids, others)))
        known = context + question
        followups = []
        for turn in range(1, len(sample.turns)):
            whole = self._render(self._messages(sample, turn)) + self._lead(sample.turns[turn].prefix)
            # The conversation has the prefix of the previous answer as the start of the right answer.
            if not whole.startswith(known):
                raise InputError("the model's chat template rewrites earlier turns, so a conversation cannot go on")
            followups.append(self._ids(whole[len(known) :]))
            known = whole
        return Encoded(self._ids(context), self._ids(question), tuple(followups))

    def count(self, sample: Sample) -> int:
        return sum(len(token_ids(self.tokenizer, part)) for part in self._split(sample, 0))

    def answer(self, tokens: list[int]) -> tuple[str, int]:
        """Return the text up to the end of the turn, and its number of tokens including the end."""
        for used, token in enumerate(tokens):
            if token in self.stops:
                return self.decode(tokens[:used]), used + 1
        return self.decode(tokens), len(tokens)

    def decode(self, tokens: list[int]) -> str:
        return text_of(self.tokenizer, tokens).strip()

    def _split(self, sample: Sample, turn: int) -> tuple[str, str]:
        """Return the rendered prompt of a turn asked first, split after the context."""
        question = sample.turns[turn]
        text = self._render(self._first(sample, turn))
        context = escaped(self.tokenizer, sample.context)
        at = text.find(context)
        if at < 0:
            raise InputError("the model's chat template changes the text of a message, so the context cannot be found")
        at += len(context)
        return text[:at], text[at:] + self._lead(question.prefix)

    def _first(self, sample: Sample, turn: int) -> list[dict[str, str]]:
        user = {"role": "user", "content": f"{sample.context}\n\n{sample.turns[turn].question}"}
        return [{"role": "system", "content": sample.system}, user] if sample.system else [user]

    def _messages(self, sample: Sample, last: int) -> list[dict[str, str]]:
        messages = self._first(sample, 0)
        for before, turn in zip(sample.turns[:last], sample.turns[1 : last + 1], strict=True):
            messages.append({"role": "assistant", "content": before.reply})
            messages.append({"role": "user", "content": turn.question})
        return messages

    def _lead(self, prefix: str) -> str:
        """Return the prefix; a template's generation prompt ends a line or a header, so no space precedes it."""
        prefix = escaped(self.tokenizer, prefix)
        return prefix if self.has_template or not prefix else f" {prefix}"

    def _render(self, messages: list[dict[str, str]]) -> str:
        if not self.has_template:
            layout = {"system": "{}\n\n", "user": "{}\nAnswer:", "assistant": " {}\n\n"}
            texts = ((message["role"], escaped(self.tokenizer, message["content"])) for message in messages)
            return self.bos + "".join(layout[role].replace("{}", text) for role, text in texts)
        return render(self.tokenizer, messages)

    def _ids(self, text: str) -> Tensor:
        return torch.tensor([token_ids(self.tokenizer, text)], dtype=torch.int64)
