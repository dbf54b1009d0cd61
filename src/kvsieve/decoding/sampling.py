"""Sampling of an answer's next token."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from kvsieve.decoding.asked import ChosenToken, Sampling, TokenLikelihood
from kvsieve.hf.generate.config import processors_of
from kvsieve.hf.generate.grammar import GrammarProcessor, Matcher


def processors_for(
    model: Any,
    ids: Tensor,
    rules: Sampling,
    limit: int,
    ends: Collection[int],
    matcher: Matcher | None = None,
) -> LogitsProcessorList:
    """Return new logits processors for an answer, because some remember its tokens.

    They are those of ``model.generate``: from the checkpoint's generation_config, overridden by the arguments.

    Args:
        model: of transformers.
        ids: int64 [N], the prompt.
        rules: of sampling.
        limit: most tokens of the answer.
        ends: tokens that end it.
        matcher: of its grammar; None for none.
    """
    config = copy.deepcopy(model.generation_config)
    config.do_sample = rules.temperature > 0
    config.temperature = rules.temperature or None
    for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
        value = getattr(rules, name)
        if value is not None:
            setattr(config, name, value)
    # All tokens have a probability of at least 0.
    config.min_p = config.min_p or None
    config.max_new_tokens = limit
    config.eos_token_id = sorted(ends) or None
    if config.eos_token_id is None:
        # It raises the probability of the end token, which cannot end this answer.
        config.exponential_decay_length_penalty = None
    return processors_of(model, config, ids[None], [] if matcher is None else [GrammarProcessor([matcher])])


class Sampler:
    """Samples the tokens of one answer.

    Args:
        rules: of sampling.
        ids: int64 [N], the prompt.
        processors: of the answer's logits, after logit_bias and the penalties that transformers does not have; None
            for none.
        answer: number of the answer, which distinguishes those to one prompt.
    """

    def __init__(
        self, rules: Sampling, ids: Tensor, processors: LogitsProcessorList | None = None, answer: int = 0
    ) -> None:
        self.rules = rules
        self.ids = ids
        self.start = len(ids)
        self._bias = torch.tensor([pair[1] for pair in rules.bias], device=ids.device)
        self._biased = torch.tensor([pair[0] for pair in rules.bias], dtype=torch.int64, device=ids.device)
        self._processors = processors
        self._generator: torch.Generator | None = None
        if rules.temperature > 0:
            self._generator = torch.Generator(ids.device)
            seed = self._generator.seed() if rules.seed is None else rules.seed
            # In 64 bits, so that neighbouring seeds and answers share no draws.
            self._generator.manual_seed((seed * 1000003 + answer) % 2**63)

    def choose(self, logits: Tensor) -> ChosenToken:
        """Sample by logits [V]."""
        scores = logits.float()
        log_probs = None if self.rules.logprobs is None else torch.log_softmax(scores, -1)
        if len(self._biased):
            scores = scores.index_add(0, self._biased, self._bias)
        rules = self.rules
        if (rules.presence_penalty or rules.frequency_penalty) and len(self.ids) > self.start:
            tokens, counts = self.ids[self.start :].unique(return_counts=True)
            taken = rules.presence_penalty + rules.frequency_penalty * counts
            scores = scores.index_add(0, tokens, -taken.to(scores.dtype))
        if self._processors:
            scores = self._processors(self.ids[None], scores[None].clone())[0]  # type: ignore[arg-type]
        if self._generator is None:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        if self._processors or rules.presence_penalty or rules.frequency_penalty:
            self.ids = torch.cat([self.ids, self.ids.new_tensor([token])])
        if log_probs is None:
            return ChosenToken(TokenLikelihood(token, 0.0))
        top = log_probs.topk(rules.logprobs or 0)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return ChosenToken(
            TokenLikelihood(token, float(log_probs[token])), tuple(TokenLikelihood(*pair) for pair in pairs)
        )
