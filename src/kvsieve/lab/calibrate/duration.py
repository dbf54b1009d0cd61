"""Forecast of a calibration's duration, from a few timed passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvsieve.lab.calibrate import distances, pooling
from kvsieve.lab.calibrate.options import ANSWER, Options
from kvsieve.lab.calibrate.prompts import Prompt
from kvsieve.lab.calibrate.reading import read
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Fingerprint

# Tokens of the timed passes, which follow a short warm-up.
_PILOT = 1024
_WARM_UP = 16


def forecast(model: Any, prompts: Sequence[Prompt], options: Options) -> float:
    """Return the seconds that `measure` may take, within a factor of about two, from a few passes timed here."""
    layers = Fingerprint.of(model).layers
    found, _ = distances.candidates(model, layers, options.tsp_rate, options.max_layer)
    if not options.every_layer:
        # The number of layers to measure is not known before.
        found = found[-max(1, len(found) // 3) :]
    found = found if "tsp" in options.parts else []
    settings = len(options.kernels) * len(options.windows) * len(options.poolings) * ("pooling" in options.parts)
    plan = Plan(name="full")
    first = prompts[0].ids[:, :_PILOT].to(model.device)
    read(model, plan, first[:, :_WARM_UP])
    per_token = _seconds(model, lambda: read(model, plan, first)) / first.shape[1]
    alone = _seconds(model, lambda: read(model, plan, first[:, :1]))
    # As many answers as form a batch.
    rows = first[:, :ANSWER].expand(pooling.ROWS, -1)
    with torch.no_grad():
        answers = _seconds(model, lambda: model(input_ids=rows))
    seconds = 0.0
    for prompt in prompts:
        length = prompt.ids.shape[1]
        rate = options.tsp_rate.entries(length) / length  # type: ignore[union-attr]
        # Passes over a prompt: prefill, collecting queries, comparing settings, dropping tokens.
        passes = 2.2 + 1.5 * settings / 48 + 1.1 * ("asl" in options.parts) + 1.3 * ("answers" in options.parts)
        passes += 1.2 * ("anchors" in options.parts) + 1.1 * ("q_centres" in options.parts)
        passes += 2.3 * ("head_budgets" in options.parts)
        passes += sum((layer + 1 + rate * (layers - layer - 1)) / layers for layer in found)
        seconds += passes * length * per_token + (settings + len(found)) / pooling.ROWS * answers
        seconds += alone * (ANSWER if prompt.answer is None else 1)
    return seconds + prompts[-1].ids.shape[1] * per_token * ("q_filters" in options.parts)


def _seconds(model: Any, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - began
