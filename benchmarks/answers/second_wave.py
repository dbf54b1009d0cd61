"""Methods of a grid in padded batches, by several processes on one device: scores without distances to full KV.

    python -m benchmarks.answers.second_wave MODEL --out DIR [--workers 8] [--minutes 6] [--data LEVAL] [--name NAME]
    python -m benchmarks.answers.second_wave MODEL --out DIR --workers 1 --device cpu     # continues; hours on a CPU
    kvsieve report DIR

MODEL is a checkpoint's directory, a GGUF file or a hub id. A cell is a method at a budget on the samples of one task in
one question mode: one batch, so that every method decodes its answers together. Cells go to whichever process is free,
the first tasks of every grid first. Rows have the form of `kvsieve eval`, without KL: full KV has cells of its own.
Entries kept are those of the batch's longest row. A method that fails twice is left out, and failures.json says
why. The run stops at --minutes and continues with the same command; cells that are done are not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import queue
import time
import tomllib
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kvsieve
from kvsieve.cli.specs import method_specs
from kvsieve.folders import write_whole
from kvsieve.hf.attach import attach
from kvsieve.hf.generate.acted import what_ran
from kvsieve.lab.eval.cells import MethodSetting, settings
from kvsieve.lab.eval.grid import Grid, Unit
from kvsieve.lab.eval.outcome import Outcome, mean, sample_row
from kvsieve.lab.eval.store import writing
from kvsieve.lab.tasks import chosen_tasks
from kvsieve.lab.tasks.prompter import Encoded, Prompter
from kvsieve.lab.tasks.public import data_digests, is_public, public_task
from kvsieve.lab.tasks.samples import Sample, Task

GRIDS = Path(__file__).parent / "grids"
DEFAULT = f"{GRIDS / 'second_wave.toml'},{GRIDS / 'second_wave_long.toml'}"
# Seconds that cells in progress may take after the time is up.
GRACE = 40
# Failures after which a method is not run any more.
MOST_FAILURES = 2


@dataclass(frozen=True)
class Cell:
    """Samples of one task under one setting, by their places in the grids."""

    grid: int
    task: str
    length: int
    question: str
    samples: tuple[int, ...]
    setting: int


@dataclass(frozen=True)
class Given:
    """Options that processes get."""

    model: str
    grids: tuple[str, ...]
    data: str | None
    device: str | None
    decode: str
    dtype: str


def listed_grids(given: Given) -> list[Grid]:
    """Return the grids of the files, without methods that are not registered and tasks without their data."""
    found = []
    known = kvsieve.list_methods()
    for file in given.grids:
        values = tomllib.loads(Path(file).read_text())
        specs = method_specs(",".join(spec for spec in values["methods"] if spec.partition(":")[0] in known))
        public = [name for name in values["tasks"] if is_public(name)]
        tasks: list[Task] = chosen_tasks([name for name in values["tasks"] if name not in public])
        if given.data is not None:
            tasks += [public_task(name, given.data) for name in public]
        modes = ("visible", "hidden") if values["question"] == "both" else (values["question"],)
        length = values["lengths"]
        made = settings(specs, values["budgets"])
        found.append(Grid(tasks, [length], modes, values["samples"], made, values.get("seed", 0), 0))
    return found


def cells_of(grids: Sequence[Grid], rows: int) -> Iterator[Cell]:
    """Yield the cells of the first `rows` samples of every task, the first tasks of all grids first; then the next."""
    most = max(grid.samples for grid in grids)
    for begin in range(0, most, rows):
        for place in range(max(len(grid.tasks) for grid in grids)):
            for number, grid in enumerate(grids):
                end = min(begin + rows, grid.samples)
                if place < len(grid.tasks) and begin < end:
                    task = grid.tasks[place]
                    for question in grid.questions:
                        if question in task.modes:
                            for at in range(len(grid.settings)):
                                indices = tuple(range(begin, end))
                                yield Cell(number, task.name, grid.lengths[0], question, indices, at)


class Worker:
    """One process: a model, and the samples of the tasks that it has seen."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.grids = listed_grids(given)
        dtype = "auto" if given.dtype == "auto" else getattr(torch, given.dtype)
        self.model, self.tokenizer = kvsieve.models.load(given.model, dtype=dtype, device=given.device)
        self.prompter = Prompter(self.tokenizer, self.model.generation_config.eos_token_id)
        self._samples: dict[tuple[str, int, int], tuple[Sample, Encoded]] = {}
        self._settings: dict[tuple[int, int], MethodSetting] = {}

    def setting(self, grid: int, at: int) -> MethodSetting:
        """Return a setting with the model's parameters."""
        if (grid, at) not in self._settings:
            self._settings[grid, at] = self.grids[grid].settings[at].for_model(self.model, self.tokenizer)
        return self._settings[grid, at]

    def sample(self, grid: int, name: str, length: int, index: int) -> tuple[Sample, Encoded]:
        key = (name, length, index)
        if key not in self._samples:
            if not any(known[:2] == key[:2] for known in self._samples):
                self._samples.clear()
            task = next(task for task in self.grids[grid].tasks if task.name == name)
            sample = task.sample(index, length, self.grids[grid].seed, self.prompter.count)
            self._samples[key] = sample, self.prompter.encode(sample)
        return self._samples[key]

    def run(self, cell: Cell) -> list[dict[str, Any]]:
        """Return the rows of a cell; of a batch that fails, one sample at a time."""
        try:
            return self._run(cell, cell.samples)
        except Exception:
            if len(cell.samples) == 1:
                raise
            return [row for index in cell.samples for row in self._run(cell, (index,))]

    def _run(self, cell: Cell, indices: Sequence[int]) -> list[dict[str, Any]]:
        began = time.perf_counter()
        setting = self.setting(cell.grid, cell.setting)
        found = [self.sample(cell.grid, cell.task, cell.length, index) for index in indices]
        turns = [sample.turns[0] for sample, _ in found]
        limit = max(turn.max_new_tokens for turn in turns)
        options = {"max_new_tokens": limit, "do_sample": False, "eos_token_id": sorted(self.prompter.stops)}
        contexts, mask = self._padded([encoded.context[0] for _, encoded in found])
        asked, asked_mask = self._padded([encoded.question[0] for _, encoded in found])
        record = None
        with attach(self.model, setting.plan, decode=self.given.decode, tokenizer=self.tokenizer) as sieve:
            if cell.question == "hidden":
                cache = sieve.prefill(contexts, mask)
                record = cache.turn.record
                acted = what_ran(setting.plan, cache)
                ids, whole = torch.cat([contexts, asked], 1), torch.cat([mask, asked_mask], 1)
                result = sieve.generate(ids, whole, cache=cache, reduce=False, **options)
            else:
                ids, whole = self._padded([encoded.prompt[0] for _, encoded in found])
                result = sieve.generate(ids, whole, **options)
        record = record or result.cache.turn.record
        applied, notes = acted if cell.question == "hidden" else what_ran(setting.plan, result.cache)
        seconds = (time.perf_counter() - began) / len(found)
        traffic = result.stats.traffic
        rows = []
        for index, (sample, _), turn, tokens in zip(
            indices, found, turns, result.sequences[:, ids.shape[1] :].tolist(), strict=True
        ):
            text, _ = self.prompter.answer(tokens[: turn.max_new_tokens])
            outcome = Outcome([text], turn.score(text, turn.answers), record, applied, notes)
            task = next(task for task in self.grids[cell.grid].tasks if task.name == cell.task)
            row = sample_row(Unit(task, cell.length, cell.question, index), sample, setting, outcome)
            # Nothing was compared with full KV.
            row = {name: value for name, value in row.items() if name not in ("kl", "top1", "kl_last")}
            read = None if traffic is None else round(traffic.entries / record.prompt_tokens, 6)
            more = {"kv_read_share": read, "seconds": round(seconds, 3), "batch": len(found)}
            rows.append({**row, **more, "seed": self.grids[cell.grid].seed})
        return rows

    def _padded(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows of tokens, padded on the left, and their mask."""
        size = max(len(part) for part in parts)
        ids = torch.full((len(parts), size), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for row, part in enumerate(parts):
            ids[row, size - len(part) :] = part
            mask[row, size - len(part) :] = 1
        return ids.to(self.model.device), mask.to(self.model.device)


def work(number: int, given: Given, cells: Any, results: Any) -> None:
    """Run cells from a queue until it yields None; the body of a process."""
    torch.set_num_threads(1 if given.device != "cpu" else max(torch.get_num_threads(), 1))
    warnings.simplefilter("ignore")
    worker = Worker(given)
    results.put((number, "ready", None, described(worker)))
    while (cell := cells.get()) is not None:
        try:
            with torch.no_grad():
                results.put((number, "rows", cell, worker.run(cell)))
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:500]}"
            results.put((number, "failed", cell, (reason, traceback.format_exc()[-2000:])))
            if worker.model.device.type == "cuda":
                torch.cuda.empty_cache()


def described(worker: Worker) -> dict[tuple[int, int], Any]:
    """Return every setting as results have it, or the reason why the model cannot have it."""
    found: dict[tuple[int, int], Any] = {}
    for grid, values in enumerate(worker.grids):
        for at in range(len(values.settings)):
            try:
                found[grid, at] = worker.setting(grid, at).described()
            except Exception as error:
                found[grid, at] = f"{type(error).__name__}: {str(error)[:500]}"
    return found


class Run:
    """The process that hands out cells and writes rows."""

    def __init__(self, writer: Any, grids: Sequence[Grid], cells: Iterator[Cell], folder: Path) -> None:
        self.writer, self.grids, self.left, self.folder = writer, grids, cells, folder
        self.names: dict[tuple[int, int], Any] = {}
        self.failures: list[dict[str, Any]] = []
        self.failed: Counter[tuple[int, int]] = Counter()
        self.done = self.skipped = 0

    def next_cell(self) -> Cell | None:
        """Return the next cell that has rows missing and a setting that works."""
        for cell in self.left:
            named = self.names[cell.grid, cell.setting]
            if isinstance(named, str) or self.failed[cell.grid, cell.setting] >= MOST_FAILURES:
                continue
            key = (named["label"], named["budget"])
            place = (cell.task, cell.length, cell.question)
            missing = tuple(each for each in cell.samples if (*place, each, *key) not in self.writer.samples.done)
            if missing:
                return dataclasses.replace(cell, samples=missing)
            self.skipped += 1
        return None

    def take(self, kind: str, cell: Cell | None, content: Any) -> None:
        """Take a message of a process."""
        if kind == "ready" and not self.names:
            self.names = content
            self.writer.settle([each for each in content.values() if not isinstance(each, str)])
            for (grid, at), each in content.items():
                if isinstance(each, str):
                    self.note(self.grids[grid].settings[at], None, (each, ""))
        elif kind == "rows":
            self.writer.samples.add([{**row, "env": self.writer.env} for row in content])
            self.done += 1
        elif kind == "failed" and cell is not None:
            self.failed[cell.grid, cell.setting] += 1
            self.note(self.grids[cell.grid].settings[cell.setting], cell, content)

    def note(self, setting: MethodSetting, cell: Cell | None, reason: tuple[str, str]) -> None:
        place = None if cell is None else f"{cell.task}, {cell.question}"
        row = {"method": setting.label, "budget": setting.budget, "cell": place, "reason": reason[0]}
        print(f"failed: {row}", flush=True)
        self.failures.append({**row, "trace": reason[1]})
        write_whole(self.folder / "failures.json", json.dumps(self.failures, indent=1) + "\n")


def hand_out(run: Run, given: Given, workers: int, until: float) -> None:
    """Start the processes, and give each the next cell when it is free, up to a time."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    queues = [context.Queue() for _ in range(workers)]
    processes = [
        context.Process(target=work, args=(number, given, each, results), daemon=True)
        for number, each in enumerate(queues)
    ]
    for process in processes:
        process.start()
    busy: dict[int, Cell | None] = dict.fromkeys(range(workers))
    waiting: list[int] = []
    began = time.monotonic()
    while busy and time.monotonic() < until + GRACE:
        try:
            number, kind, cell, content = results.get(timeout=1)
        except queue.Empty:
            for number in [each for each in busy if not processes[each].is_alive()]:
                run.take("failed", busy.pop(number), ("the process died", ""))
            continue
        run.take(kind, cell, content)
        waiting.append(number)
        # The first process that is ready has named the settings.
        while run.names and waiting:
            number = waiting.pop()
            following = run.next_cell() if time.monotonic() < until else None
            queues[number].put(following)
            if following is None:
                busy.pop(number)
            else:
                busy[number] = following
        run.writer.save(time.monotonic() - began)
    for process in processes:
        process.join(timeout=2)
        if process.is_alive():
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="checkpoint")
    parser.add_argument("--grids", default=DEFAULT, help="TOML files as of kvsieve eval --grid, with commas")
    parser.add_argument("--data", help="directory of L-Eval (default: none, and its tasks are left out)")
    parser.add_argument("--workers", type=int, default=8, help="processes (default: 8)")
    parser.add_argument("--rows", type=int, default=10, help="samples decoded together (default: 10)")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no cell after so many (default: no limit)")
    parser.add_argument("--device", help="of the models (default: cuda if there is one)")
    parser.add_argument("--dtype", default="auto", help="of the weights (default: auto)")
    parser.add_argument("--decode", default="eager", help="engine of kvsieve.attach (default: eager)")
    parser.add_argument("--name", help="of the model in the results (default: MODEL)")
    parser.add_argument("--out", type=Path, required=True, help="results directory; one that exists is continued")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    files = tuple(arguments.grids.split(","))
    given = Given(arguments.model, files, arguments.data, arguments.device, arguments.decode, arguments.dtype)
    grids = listed_grids(given)
    tasks = {task.name: task for grid in grids for task in grid.tasks}
    identity = {
        "model": arguments.name or Path(arguments.model).name,
        "dtype": arguments.dtype,
        "weights": None,
        "seed": 0,
        "haystack": "topics",
        "draft": None,
        "tasks": {name: task.title for name, task in tasks.items()},
        "data": data_digests(tasks.values()),
    }
    with writing(arguments.out, identity, resume=(arguments.out / "run.json").exists()) as writer:
        # The files of the weights, which no process of this one has loaded.
        writer.settle([], arguments.model)
        run = Run(writer, grids, cells_of(grids, arguments.rows), arguments.out)
        hand_out(run, given, arguments.workers, until)
    print(f"{run.done} cells run, {run.skipped} done before, {len(run.failures)} failures")
    if run.done or run.skipped:
        print(table(arguments.out))


def table(folder: Path) -> str:
    """Return the mean score and the number of samples by method, budget and question mode."""
    from kvsieve.lab.eval.results import load

    found: dict[tuple[Any, ...], list[float]] = {}
    for row in load(folder).samples:
        key = (row["label"], row["budget"] or "", row["question"], row["length"])
        found.setdefault(key, []).append(row["score"])
    lines = [f"{' '.join(map(str, key))}: {100 * mean(scores):.1f} of {len(scores)}" for key, scores in found.items()]
    return "\n".join(["mean scores:", *lines])


if __name__ == "__main__":
    main()
