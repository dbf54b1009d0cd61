"""The length to measure at and a forecast of the total time, from timed passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvsieve.hf.attach import attach
from kvsieve.lab.advise import drafting
from kvsieve.lab.advise.options import AdviceOptions
from kvsieve.lab.eval.cells import MethodSetting
from kvsieve.lab.eval.costs import NEW_TOKENS
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.tasks.haystack import load_haystack
from kvsieve.lab.tasks.needle import Needle
from kvsieve.planning.plans import Plan

# Limits on one prefill and on the whole measurement for the default length, in seconds.
_READING = 30.0
_ALL = 1800.0
_LEAST = 1024
_PILOT = 512
_WARM_UP = 16
# Tokens of an answer, on average, and the cost of a batch of answers relative to one.
_ANSWER = 45
_BATCHED = 1.5
# Plans measured again on the held-out part, with full KV.
_AGAIN = 2


@dataclass(frozen=True)
class Pace:
    """Seconds to prefill one token, and to generate one."""

    read: float
    step: float


def pace(evaluator: Evaluator, context: int) -> Pace:
    """Time a short prompt, of at most `context` tokens, and a few generated tokens, after a warm-up."""
    needle = Needle(load_haystack("topics"))
    ids = evaluator.prompter.encode(needle.sample(0, min(_PILOT, context), 0, evaluator.prompter.count)).prompt
    ids = ids.to(evaluator.model.device)

    def run(tokens: int, new: int) -> float:
        with attach(evaluator.model, Plan(name="full")) as sieve:
            part = ids[:, :tokens]
            return _seconds(
                evaluator,
                lambda: sieve.generate(
                    part, torch.ones_like(part), max_new_tokens=new, min_new_tokens=new, do_sample=False
                ),
            )

    run(_WARM_UP, 2)
    reading = run(ids.shape[1], 1)
    more = run(ids.shape[1], 5)
    return Pace(reading / ids.shape[1], max((more - reading) / 4, reading / ids.shape[1]))


def chosen_length(
    options: AdviceOptions, settings: Sequence[MethodSetting], samples: int, found: Pace, batch: int
) -> int:
    """Return the length of the prompts: as requested, or the longest with a bearable measuring time."""
    if options.measure_at is not None:
        return options.measure_at
    length = min(_LEAST, options.context)
    while length < options.context:
        longer = min(2 * length, options.context)
        if longer * found.read > _READING or forecast(options, settings, samples, longer, found, batch) > _ALL:
            break
        length = longer
    return length


def forecast(
    options: AdviceOptions, settings: Sequence[MethodSetting], samples: int, length: int, found: Pace, batch: int
) -> float:
    """Return the seconds that the measurement may take, within a factor of about two. samples: of one part."""
    plans = [one.plan for one in settings]
    alone = sum(3 if plan.probes else 1 for plan in plans if not plan.acts_once)
    readings = alone + len({plan.propagate for plan in plans if plan.acts_once})
    answers = _BATCHED * (1 + math.ceil(len(plans) / batch)) * _ANSWER * found.step
    seconds = samples * (readings * length * found.read + answers)
    seconds += samples * (_AGAIN * length * found.read + 2 * _BATCHED * _ANSWER * found.step)
    if options.cost_samples:
        seconds += drafting.PROMPTS * (length * found.read + 2 * drafting.ANSWER * found.step)
    return seconds + options.cost_samples * len(plans) * (length * found.read + NEW_TOKENS * found.step)


def _seconds(evaluator: Evaluator, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if evaluator.model.device.type == "cuda":
        torch.cuda.synchronize(evaluator.model.device)
    return time.perf_counter() - began
