"""Prompts for engines of vLLM, and their answers compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

BLOCK = 32


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of one request, and the log-probability of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 400, (length,), generator=generator).tolist() for length in lengths]


def answers(llm: Any, prompts: list[list[int]], tokens: int = 24) -> list[Answer]:
    """Answer all prompts at once."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    done = [output.outputs[0] for output in outputs]
    return [
        Answer(
            tuple(each.token_ids),
            tuple(found[token].logprob for token, found in zip(each.token_ids, each.logprobs, strict=True)),
        )
        for each in done
    ]


def assert_alike(got: list[Answer], expected: list[Answer], within: float = 2e-3) -> None:
    """The same tokens, with almost the same probabilities."""
    for one, other in zip(got, expected, strict=True):
        assert one.tokens == other.tokens
        assert max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)) < within


def differ(got: list[Answer], expected: list[Answer], by: float = 1e-2) -> bool:
    """Tell whether a plan has changed something."""
    pairs = zip(got, expected, strict=True)
    return any(one.tokens != other.tokens or abs(one.logprobs[-1] - other.logprobs[-1]) > by for one, other in pairs)


def metric(llm: Any, name: str) -> float:
    """Return a counter of vLLM's."""
    (found,) = (each.value for each in llm.get_metrics() if each.name == f"vllm:{name}")
    return found
