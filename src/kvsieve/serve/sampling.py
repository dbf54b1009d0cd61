"""Choosing the next token of an answer."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvsieve.serve.ticket import ChosenToken, Sampling, TokenLikelihood


class Sampler:
    """Chooses the tokens of one answer; transformers' processors, in the order in which ``generate`` has them.

    Args:
        rules: how.
        ids: int64 [N], the prompt.
        answer: number of the answer, by which those to one prompt differ.
    """

    def __init__(self, rules: Sampling, ids: Tensor, answer: int = 0) -> None:
        self.rules, self.ids, self.start = rules, ids, len(ids)
        self._bias = torch.tensor([each[1] for each in rules.bias], device=ids.device)
        self._biased = torch.tensor([each[0] for each in rules.bias], dtype=torch.int64, device=ids.device)
        self._processors = LogitsProcessorList()
        if rules.repetition_penalty != 1:
            self._processors.append(RepetitionPenaltyLogitsProcessor(rules.repetition_penalty))
        self._generator: torch.Generator | None = None
        if rules.temperature > 0:
            if rules.temperature != 1:
                self._processors.append(TemperatureLogitsWarper(rules.temperature))
            if rules.top_k:
                self._processors.append(TopKLogitsWarper(rules.top_k))
            if rules.top_p < 1:
                self._processors.append(TopPLogitsWarper(rules.top_p))
            if rules.min_p:
                self._processors.append(MinPLogitsWarper(rules.min_p))
            self._generator = torch.Generator(ids.device)
            seed = self._generator.seed() if rules.seed is None else rules.seed
            # In 64 bits, so that neighbouring seeds and answers share no draws.
            self._generator.manual_seed((seed * 1000003 + answer) % 2**63)

    def choose(self, logits: Tensor) -> ChosenToken:
        """Choose by logits [V]."""
        scores = logits.float()
        told = None if self.rules.logprobs is None else torch.log_softmax(scores, -1)
        if len(self._biased):
            scores = scores.index_add(0, self._biased, self._bias)
        rules = self.rules
        if (rules.presence_penalty or rules.frequency_penalty) and len(self.ids) > self.start:
            made, counts = self.ids[self.start :].unique(return_counts=True)
            taken = rules.presence_penalty + rules.frequency_penalty * counts
            scores = scores.index_add(0, made, -taken.to(scores.dtype))
        if self._processors:
            scores = self._processors(self.ids[None], scores[None].clone())[0]  # type: ignore[arg-type]
        if self._generator is None:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        if self._processors or rules.presence_penalty or rules.frequency_penalty:
            self.ids = torch.cat([self.ids, self.ids.new_tensor([token])])
        if told is None:
            return ChosenToken(TokenLikelihood(token, 0.0))
        top = told.topk(rules.logprobs or 0)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return ChosenToken(TokenLikelihood(token, float(told[token])), tuple(TokenLikelihood(*each) for each in pairs))
