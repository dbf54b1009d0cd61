"""Train a toy of one geometry on key recall, from random weights.

    python -m benchmarks.toys.train GEOMETRY --out DIR [--early 3] [--seed 0] [--minutes 15] [--results FOLDER]

Run in the repository's root. DIR/GEOMETRY gets the model, in transformers' format, and curve.json: every 20 steps the
loss, the share of answer tokens that are right, and the seconds so far. FOLDER/toys_GEOMETRY.json is the same file;
FOLDER is benchmarks/results otherwise. With --early 3 answers are also read off behind layer 3 while training, so that
the toy finds them by then; its name is GEOMETRY_early.

The task grows in stages, and the next begins once the answers of the present one are mostly right; then the learning
rate falls to nothing in the last steps. Hidden matrices are trained by Muon, everything else by AdamW. Everything is
drawn from the seed and one thread computes, so a run repeats itself bit by bit on the same processor and versions.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.toys.geometries import GEOMETRIES, build
from benchmarks.toys.task import Task
from kvsieve.report.environment import environment, write_result

STAGES = (
    Task(length=32, records=3, questions=2, symbols=16),
    Task(length=32, records=3, questions=2, symbols=32),
    Task(length=32, records=3, questions=2),
    Task(length=64, records=5, questions=4),
    Task(length=128, records=12, questions=8),
    Task(length=256, records=24, questions=16),
    Task(length=256, records=24, questions=4),
)
RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Recipe:
    """How a toy is trained.

    Attributes:
        stages: the task as it grows; the last is the one that counts.
        tokens: of a batch.
        muon: learning rate of hidden matrices.
        adamw: learning rate of everything else.
        warmup: steps over which both rise.
        pass_mark: share of answer tokens that must be right, averaged over about five steps, to pass a stage.
        final_mark: the same for the last stage.
        settle: steps at the end, over which both rates fall to nothing.
        limit_s: CPU seconds after which training stops where it is.
        most_steps: steps after which it does.
        early: a layer behind which answers are read off as well, their loss added; None for the last one only.
    """

    stages: Sequence[Task] = STAGES
    tokens: int = 2048
    muon: float = 0.01
    adamw: float = 0.002
    warmup: int = 50
    pass_mark: float = 0.95
    final_mark: float = 0.97
    settle: int = 100
    limit_s: float = 900.0
    most_steps: int = 100_000
    early: int | None = None


@dataclass
class Run:
    """What a training left: `curve` has a row for every 20 steps, `learned` says whether the last stage was passed."""

    curve: list[dict[str, Any]] = field(default_factory=list)
    learned: bool = False
    steps: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0


class Rates:
    """Both optimisers, whose learning rates move together."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        hidden, rest = [], []
        for name, weight in model.named_parameters():
            matrix = weight.ndim == 2 and "embed" not in name and "lm_head" not in name
            (hidden if matrix else rest).append(weight)
        muon = torch.optim.Muon(hidden, lr=recipe.muon, weight_decay=0.01)
        adamw = torch.optim.AdamW(rest, lr=recipe.adamw, betas=(0.9, 0.95), weight_decay=0.01)
        self.pairs = [(muon, recipe.muon), (adamw, recipe.adamw)]

    def step(self, factor: float) -> None:
        """Make one step at this share of the learning rates, and forget the gradients."""
        for optimiser, rate in self.pairs:
            for group in optimiser.param_groups:
                group["lr"] = factor * rate
            optimiser.step()
            optimiser.zero_grad()


def answer_logits(model: PreTrainedModel, ids: Tensor, task: Task, early: int | None = None) -> list[Tensor]:
    """Logits of all tokens of answers, [B, questions x value, V]: the model's, then those behind layer `early`."""
    seen: list[Tensor] = []
    handle = None
    if early is not None:
        handle = model.model.layers[early].register_forward_hook(lambda layer, given, states: seen.append(states))
    states = [model.model(ids, use_cache=False).last_hidden_state]
    if handle is not None:
        handle.remove()
    states += [model.model.norm(each) for each in seen]
    return [model.lm_head(each[:, task.answers.flatten() - 1]) for each in states]


def train(model: PreTrainedModel, recipe: Recipe, seed: int) -> Run:
    """Train the model in place; the same seed draws the same batches."""
    generator = torch.Generator().manual_seed(seed)
    rates, run = Rates(model, recipe), Run()
    stage, right, left = 0, 0.0, recipe.settle
    cpu, wall = time.process_time(), time.perf_counter()
    model.train()
    while left and run.steps < recipe.most_steps and run.cpu_s < recipe.limit_s:
        task = recipe.stages[stage]
        ids = task.sample(max(1, recipe.tokens // task.length), generator)
        expected = ids[:, task.answers.flatten()]
        exits = answer_logits(model, ids, task, recipe.early)
        losses = [F.cross_entropy(logits.flatten(0, 1), expected.flatten()) for logits in exits]
        sum(losses[1:], losses[0]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        left -= run.learned
        rates.step(min(1.0, (run.steps + 1) / recipe.warmup) * left / recipe.settle)
        right += 0.2 * ((exits[0].argmax(-1) == expected).float().mean().item() - right)
        run.steps += 1
        run.cpu_s, run.wall_s = time.process_time() - cpu, time.perf_counter() - wall
        row = {"step": run.steps, "stage": stage, "loss": round(losses[0].item(), 4), "accuracy": round(right, 4)}
        if run.steps % 20 == 0:
            run.curve.append(row | {"cpu_s": round(run.cpu_s, 1), "wall_s": round(run.wall_s, 1)})
            print(" ".join(f"{name} {value}" for name, value in run.curve[-1].items()), flush=True)
        if stage + 1 < len(recipe.stages) and right >= recipe.pass_mark:
            stage, right = stage + 1, 0.0
        elif stage + 1 == len(recipe.stages) and right >= recipe.final_mark:
            run.learned = True
    model.eval()
    return run


@torch.no_grad()
def accuracy(model: PreTrainedModel, task: Task, rows: int, seed: int) -> dict[str, float]:
    """Shares of held-out answers, and of their tokens, that are right, each token after the right ones before it."""
    ids = task.sample(rows, torch.Generator().manual_seed(seed))
    places = task.answers.flatten()
    right = torch.cat([answer_logits(model, part, task)[0].argmax(-1) == part[:, places] for part in ids.split(32)])
    answers = right.view(rows, task.questions, task.value).all(-1)
    return {"answers": round(answers.float().mean().item(), 4), "tokens": round(right.float().mean().item(), 4)}


def report(model: PreTrainedModel, geometry: str, recipe: Recipe, run: Run, seed: int) -> dict[str, Any]:
    """Everything about a training, JSON-ready."""
    task = recipe.stages[-1].one_question()
    return {
        "environment": environment(model),
        "load_average": os.getloadavg()[0],
        "geometry": geometry,
        "model_type": model.config.model_type,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "seed": seed,
        "recipe": asdict(recipe),
        "learned": run.learned,
        "steps": run.steps,
        "cpu_s": round(run.cpu_s, 1),
        "wall_s": round(run.wall_s, 1),
        "held_out": {"task": asdict(task), "rows": 512, **accuracy(model, task, 512, seed + 1)},
        "curve": run.curve,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("geometry", choices=sorted(GEOMETRIES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--early", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=15.0, help="most CPU time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    if not hasattr(torch.optim, "Muon"):
        sys.exit(f"error: torch {torch.__version__} has no Muon optimiser; training toys needs torch 2.9 or later")
    torch.set_num_threads(1)
    recipe = Recipe(limit_s=60 * given.minutes, early=given.early)
    name = given.geometry if given.early is None else f"{given.geometry}_early"
    model = build(given.geometry, given.seed)
    run = train(model, recipe, given.seed)
    found = report(model, name, recipe, run, given.seed)
    folder = given.out / name
    model.save_pretrained(folder)
    for file in (folder / "curve.json", given.results / f"toys_{name}.json"):
        write_result(file, found)
    verdict = "learned" if run.learned else "NOT learned"
    spent = f"{run.steps} steps, {run.cpu_s:.0f} s of CPU time, {run.wall_s:.0f} s in all"
    print(f"{name}: {verdict} in {spent}; right answers, held out: {found['held_out']['answers']:.1%}")


if __name__ == "__main__":
    main()
