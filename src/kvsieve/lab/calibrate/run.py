"""A calibration from start to end: prefill prompts, measure parts, derive parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvsieve.hf.model.context import context_of
from kvsieve.lab.calibrate.duration import forecast
from kvsieve.lab.calibrate.options import Options
from kvsieve.lab.calibrate.parameters import method_parameters
from kvsieve.lab.calibrate.parts import Parts, Progress
from kvsieve.lab.calibrate.prompts import Material, Prompt
from kvsieve.lab.tasks.prompter import Prompter
from kvsieve.planning.profiles import Fingerprint, Profile
from kvsieve.report.environment import environment


def calibrate(
    model: Any,
    tokenizer: Any,
    material: Material | None = None,
    *,
    name: str = "",
    options: Options | None = None,
    progress: Progress | None = None,
    announce: Callable[[float], None] | None = None,
) -> Profile:
    """Calibrate a causal language model of transformers.

    The same arguments give the same profile, except for times and other machines' rounding.

    Args:
        model: the model, loaded.
        tokenizer: its tokenizer.
        material: the prompts (default: 4 generated ones of 2048 tokens).
        name: of the model, in messages.
        options: parts to measure, and their settings.
        progress: called with (steps done, steps in all, next step).
        announce: called before the first step with the forecast of seconds, see `forecast`.

    Raises:
        InputError: lengths do not suit the model or the text; also the errors of `attach` for an unsupported model.
    """
    material = material or Material()
    material.check(context_of(model.config))
    prompter = Prompter(tokenizer, model.generation_config.eos_token_id)
    prompts, held_out = material.prompts_for(prompter)
    about = {**material.described(), "dtype": str(model.dtype).removeprefix("torch.")}
    options = options or Options()
    if announce is not None:
        announce(forecast(model, prompts, options))
    return measure(model, prompts, held_out, prompter.stops, options, name, about, progress)


def measure(
    model: Any,
    prompts: Sequence[Prompt],
    held_out: Prompt,
    stops: Collection[int] = (),
    options: Options | None = None,
    name: str = "",
    about: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Calibrate from token ids. held_out: a prompt to check filters on. stops: tokens that end an answer."""
    run = Parts(model, options or Options(), Fingerprint.of(model, name), progress)
    began = time.perf_counter()
    run.everything(prompts, held_out, stops)
    if progress is not None:
        progress(run.total, run.total, "done")
    tokens = sum(prompt.ids.shape[1] for prompt in prompts)
    text = {**(about or {}), "tokens": tokens, "seconds": round(time.perf_counter() - began, 1)}
    return Profile(
        fingerprint=run.fingerprint,
        parameters=method_parameters(run.measured, run.pooled, run.options.tsp_rate),
        **run.arrays,
        measured=run.measured,
        text=text,
        environment=environment(model),
    )
