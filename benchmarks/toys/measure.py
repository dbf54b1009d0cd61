"""What eviction, sparse reading and token propagation cost the toys on key recall.

    python -m benchmarks.toys.measure DIR [--geometries hybrid,sinks,latent] [--roles evict,read,propagate]
        [--prompts 64] [--results FOLDER]

DIR is what benchmarks.toys.train wrote. Run in the repository's root; FOLDER is benchmarks/results otherwise. Every
prompt holds 24 records and asks for one of them; the answer, four tokens, is generated greedily. Visible: the plan sees
the question at the prompt's end, so the first token is that of full KV and the others read what is left. Hidden: the
plan reduces the context before the question is read. A method that refuses a geometry is recorded with its own words.
Where a model has recurrent layers, their state after a propagated prompt is compared with the state after the whole
prompt.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

import kvsieve
from benchmarks.toys.task import Task
from benchmarks.toys.train import RESULTS, STAGES
from kvsieve.errors import KvsieveError
from kvsieve.methods import TSP, GemFilter, PyramidInfer
from kvsieve.planning.named import plan_without_floor
from kvsieve.report.environment import environment, write_result

ROLES = ("evict", "read", "propagate")
SHARES = (0.1, 0.25, 0.5)
RATES = (0.9, 0.7)  # PyramidInfer's, per layer
GEMFILTER = 0.25
# Prompts are 256 tokens, so windows and blocks are shorter than the papers'. The kernel spans a record and a half.
WINDOW, KERNEL = 4, 7
LOCAL: dict[str, Any] = {"window": WINDOW, "kernel": KERNEL}
EVICTORS: dict[str, dict[str, Any]] = {
    "streamingllm": {},
    "knorm": {},
    "keydiff": {},
    "lagkv": {"sinks": 4, "lag": 16},
    "expectedattention": {"n_future": 16},
    "h2o": {},
    "tova": {},
    "snapkv": LOCAL,
    "adakv": LOCAL,
    "pyramidkv": LOCAL,
    "cake": LOCAL,
}
READERS: dict[str, dict[str, Any]] = {
    "exacttopk": {},
    "quest": {"page": 4},
    "sparq": {},
    "hsa": {},
    "rocketkv": LOCAL,
}


@dataclass(frozen=True)
class Cell:
    """One plan and how its prompts are read.

    Attributes:
        role: "full", "evict", "read" or "propagate".
        method: the registered name, or the propagator's.
        share: of the prompt that stays stored, is read per token, or travels on; None for full KV.
        layer: the propagator's, None where it has none.
        hidden: the plan does not see the question.
    """

    role: str
    method: str
    share: float | None = None
    layer: int | None = None
    hidden: bool = False

    def plan(self, tokens: int) -> kvsieve.Plan:
        """Make the plan for prompts of so many tokens."""
        share = self.share
        if self.role == "full":
            return plan_without_floor("full")
        if self.role == "evict":
            return plan_without_floor(self.method, budget=share, **EVICTORS[self.method])
        if self.role == "read":
            return plan_without_floor(self.method, budget=round(share * tokens), **READERS[self.method])
        if self.method == "fastkv":
            return plan_without_floor("fastkv", budget=share, tsp_layer=self.layer, tsp_rate=share, **LOCAL)
        if self.method == "asl":
            return plan_without_floor("asl", budget=share, observed=2, first=1, **LOCAL)
        propagate = {
            "tsp": lambda: TSP(rate=share, layer=self.layer, **LOCAL),
            "gemfilter": lambda: GemFilter(budget=share, layer=self.layer, kernel=KERNEL),
            "pyramidinfer": lambda: PyramidInfer(rate=share, min_context=16),
        }
        return kvsieve.Plan(propagate=propagate[self.method](), name=self.method)


def cells(sources: Sequence[int]) -> Iterator[Cell]:
    """Every cell. Tokens are chosen after each layer of `sources`, and FastKV chooses after the last of them.

    "tsp" is FastKV's propagation alone: what arrives at a layer is stored whole.
    """
    for hidden, shares in ((False, SHARES), (True, SHARES[-1:])):
        yield Cell("full", "full", hidden=hidden)
        for method in EVICTORS:
            for share in shares:
                yield Cell("evict", method, share, hidden=hidden)
    for method in READERS:
        for share in SHARES:
            yield Cell("read", method, share)
    for layer in sources:
        for share in SHARES:
            yield Cell("propagate", "tsp", share, layer)
        yield Cell("propagate", "tsp", SHARES[-1], layer, hidden=True)
        yield Cell("propagate", "gemfilter", GEMFILTER, layer)
    for share in SHARES:
        yield Cell("propagate", "fastkv", share, sources[-1])
        yield Cell("propagate", "asl", share)
    for rate in RATES:
        yield Cell("propagate", "pyramidinfer", rate)


def sources(model: PreTrainedModel) -> list[int]:
    """Layers but the last that attend to all tokens, by which some can be chosen."""
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [index for index, kind in enumerate(kinds[:-1]) if kind == "full_attention"]


def measure(model: PreTrainedModel, cell: Cell, ids: Tensor, task: Task) -> dict[str, Any]:
    """Answer every prompt under the cell's plan: shares of answers and of their tokens that are right, or a refusal."""
    prompts, expected = ids[:, : -task.value], ids[:, -task.value :]
    try:
        with kvsieve.attach(model, cell.plan(prompts.shape[1])) as sieve, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = sieve.generate(
                prompts,
                max_new_tokens=task.value,
                do_sample=False,
                question_tokens=2 if cell.hidden else None,
            )
    except KvsieveError as error:
        return asdict(cell) | {"refused": f"{type(error).__name__}: {error}"}
    right = result.sequences[:, prompts.shape[1] :] == expected
    stats = result.stats
    return asdict(cell) | {
        "answers": round(right.all(1).float().mean().item(), 4),
        "first_token": round(right[:, 0].float().mean().item(), 4),
        "later_tokens": round(right[:, 1:].float().mean().item(), 4),
        "kv_entries": stats.kv_entries,
        "kv_bytes": stats.kv_bytes,
        "deep_tokens": stats.deep_tokens,
        "entries_read": None if stats.traffic is None else round(stats.traffic.entries, 1),
        "applied": stats.applied,
        "notes": stats.notes,
    }


def recurrent_states(model: PreTrainedModel, plan: kvsieve.Plan, prompts: Tensor) -> dict[int, Tensor]:
    """Read the prompts under the plan; states of the layers that have one, by layer."""
    with kvsieve.attach(model, plan) as sieve, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = sieve.prefill(prompts)
    # Each of these models' recurrent layers has one state.
    return {
        index: layer.recurrent_states[0]
        for index, layer in enumerate(cache.layers)
        if isinstance(layer, LinearAttentionLayer)
    }


def state_change(model: PreTrainedModel, cell: Cell, prompts: Tensor) -> dict[str, float]:
    """Per recurrent layer, the distance of its state from full KV's, relative to that state's norm; mean over rows."""
    whole = recurrent_states(model, plan_without_floor("full"), prompts)
    ours = recurrent_states(model, cell.plan(prompts.shape[1]), prompts)
    return {
        str(index): round(
            ((ours[index] - state).flatten(1).norm(dim=1) / state.flatten(1).norm(dim=1)).mean().item(), 4
        )
        for index, state in whole.items()
    }


def unattached(model: PreTrainedModel, ids: Tensor, task: Task) -> float:
    """Share of answers that transformers generates without kvsieve which are right."""
    prompts = ids[:, : -task.value]
    answers = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=task.value, do_sample=False
    )
    return round((answers == ids).all(1).float().mean().item(), 4)


@torch.no_grad()
def table(model: PreTrainedModel, task: Task, prompts: int, seed: int, roles: Sequence[str] = ROLES) -> dict[str, Any]:
    """Measure every cell of these roles, and full KV, on the same prompts."""
    ids = task.sample(prompts, torch.Generator().manual_seed(seed))
    rows = []
    for cell in cells(sources(model)):
        if cell.role not in ("full", *roles):
            continue
        row = measure(model, cell, ids, task)
        recurrent = "linear_attention" in (getattr(model.config, "layer_types", None) or ())
        if recurrent and cell.role == "propagate" and not cell.hidden and "refused" not in row:
            row["state_change"] = state_change(model, cell, ids[:16, : -task.value])
        rows.append(row)
        print(line(row), flush=True)
    return {"transformers": unattached(model, ids, task), "rows": rows}


def line(row: dict[str, Any]) -> str:
    """One row, for the terminal."""
    layer = "" if row["layer"] is None else f" layer {row['layer']}"
    share = "" if row["share"] is None else f" {row['share']:.0%}"
    name = f"{row['method']}{layer}{share}{' hidden' if row['hidden'] else ''}"
    found = row.get("refused") or f"answers {row['answers']:.1%} later tokens {row['later_tokens']:.1%}"
    return f"{name:<32} {found}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("toys", type=Path)
    parser.add_argument("--geometries", default="hybrid,sinks,latent")
    parser.add_argument("--roles", default=",".join(ROLES))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    task = STAGES[-1].one_question()
    for geometry in given.geometries.split(","):
        print(f"{geometry}:")
        model = AutoModelForCausalLM.from_pretrained(given.toys / geometry, dtype=torch.float32).eval()
        began = time.process_time()
        found = table(model, task, given.prompts, given.seed, given.roles.split(","))
        stamp = {"environment": environment(model), "load_average": os.getloadavg()[0], "geometry": geometry}
        spent = {"task": asdict(task), "prompts": given.prompts, "cpu_s": round(time.process_time() - began, 1)}
        target = given.results / f"toys_{geometry}_methods.json"
        write_result(target, stamp | spent | found)


if __name__ == "__main__":
    main()
