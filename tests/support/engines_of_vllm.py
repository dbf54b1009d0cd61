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


def core(llm: Any) -> Any:
    """Return the engine's core, with its scheduler."""
    return llm.llm_engine.engine_core.engine_core


def free_blocks(llm: Any) -> int:
    """Return the number of blocks that no request has."""
    return core(llm).scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def stepped(llm: Any, prompts: list[list[int]], tokens: int, every: int) -> tuple[list[tuple[int, ...]], int]:
    """Answer step by step, and preempt one request after every so many steps, at most 25 times."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for number, ids in enumerate(prompts):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
    scheduler, done, step, preempted = core(llm).scheduler, {}, 0, 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = tuple(output.outputs[0].token_ids)
        step += 1
        if step % every == 0 and scheduler.running and preempted < 25:
            request = scheduler.running.pop(step // every % len(scheduler.running))
            scheduler._preempt_request(request, 0.0)
            preempted += 1
    return [done[number] for number in sorted(done)], preempted


def answers_on_transformers(
    checkpoint: str, plan: str, prompts: list[list[int]], tokens: int, entries: list[int]
) -> list[tuple[int, ...]]:
    """Answer with kvsieve on transformers; `entries` are those that each layer must hold in the end."""
    from transformers import AutoModelForCausalLM

    import kvsieve

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    # vLLM does not stop at it either.
    model.generation_config.eos_token_id = None
    found = []
    for ids in prompts:
        with kvsieve.attach(model, kvsieve.plan(plan)) as sieve:
            out = sieve.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)
            assert out.stats.kv_entries == entries
            found.append(tuple(out.sequences[0, len(ids) :].tolist()))
    return found
