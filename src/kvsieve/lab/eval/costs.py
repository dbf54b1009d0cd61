"""Costs of each setting: one prompt and method at a time, in rotated order."""

from __future__ import annotations

from dataclasses import asdict

from torch import Tensor

from kvsieve.hf.attach import attach
from kvsieve.hf.generate.result import GenerateResult
from kvsieve.lab.eval.cells import MethodSetting
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.eval.grid import Grid
from kvsieve.lab.eval.store import ResultsWriter, Row
from kvsieve.lab.tasks.haystack import load_haystack
from kvsieve.lab.tasks.needle import Needle
from kvsieve.lab.traffic import read_bytes

NEW_TOKENS = 32
WARM_UP = 64
BINS = 64


def measure_costs(grid: Grid, evaluator: Evaluator, writer: ResultsWriter) -> None:
    """Measure missing cost rows: every setting `grid.cost_samples` times at every length.

    Prompts are needle prompts; `NEW_TOKENS` tokens are generated in any case. For settings added later, full KV is
    measured again, so that ratios are taken within one run.
    """
    needle = Needle(load_haystack("topics"))
    full = grid.settings[0]
    for length in grid.lengths:
        missing = [
            setting
            for setting in grid.settings
            if any(
                (length, setting.label, setting.budget, r) not in writer.costs.done for r in range(grid.cost_samples)
            )
        ]
        if not missing:
            continue
        measured = missing if full in missing else [full, *missing]
        prompts = [
            evaluator.prompter.encode(needle.sample(r, length, grid.seed, evaluator.prompter.count)).prompt
            for r in range(grid.cost_samples)
        ]
        measure_one(evaluator, full, prompts[0][:, :WARM_UP])
        for repeat, ids in enumerate(prompts):
            turned = repeat % len(measured)
            rows = []
            for setting in measured[turned:] + measured[:turned]:
                row = {"length": length, "repeat": repeat, "seed": grid.seed, "env": writer.env}
                rows.append(row | measure_one(evaluator, setting, ids))
            # A repeat is written as a whole, so that its ratios belong to one run.
            writer.costs.add(sorted(rows, key=lambda row: row["label"] != full.label))


def measure_one(evaluator: Evaluator, setting: MethodSetting, ids: Tensor) -> Row:
    """Measure one prompt [1, N] under one setting, prefilled and answered alone."""
    ids = ids.to(evaluator.model.device)
    with attach(evaluator.model, setting.plan, tokenizer=evaluator.prompter.tokenizer) as sieve:
        result = sieve.generate(
            ids,
            ids.new_ones(ids.shape),
            chunk=evaluator.chunk,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            measure=True,
            draft=evaluator.draft or "none",
        )
    stats = result.stats
    row = {
        "method": setting.method,
        "label": setting.label,
        "budget": setting.budget,
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "ttft_s": stats.ttft_s,
        "tpot_s": stats.tpot_s,
        "token_s": [round(seconds, 6) for seconds in result.token_s],
        "kv_bytes": stats.kv_bytes,
        "kv_read_bytes": read_bytes(stats, result.cache),
        "peak_bytes": stats.peak_bytes,
        "deep_tokens": stats.deep_tokens,
        "kv_entries": stats.kv_entries,
        "kept": kept_map(result),
    }
    return row if stats.drafts is None else {**row, "drafts": asdict(stats.drafts)}


def kept_map(result: GenerateResult) -> list[list[float]]:
    """Return [layers][BINS]: share of the prompt's tokens still stored, mean over KV heads, by position."""
    shares = result.kept.map(BINS, tokens=result.stats.prompt_tokens, stored=True)
    return [[round(share, 4) for share in row] for row in shares.tolist()]
