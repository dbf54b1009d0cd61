"""What the four papers' experiments share: parts, running them, forecasts and tables.

A part is a grid of settings over tasks, times alone, or rows that a measurement of its own makes. All of them write to
RESULTS/PAPER/MODEL/PART, go on where they stopped, and run sample by sample, so that a run that is stopped early has
something of everything.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any

import kvsieve
from benchmarks.paper.remember import Memory, remembering
from benchmarks.paper.verdicts import SCORES, Case, Verdict, paired, verdict_table
from kvsieve.cli.loading import load_model
from kvsieve.errors import InputError
from kvsieve.lab.eval.cells import MethodSetting, setting
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.eval.grid import Grid
from kvsieve.lab.eval.results import load
from kvsieve.lab.eval.runner import run_grid
from kvsieve.lab.eval.store import writing
from kvsieve.lab.eval.texts import other_text
from kvsieve.lab.tasks import all_tasks
from kvsieve.lab.tasks.public import data_digests
from kvsieve.lab.tasks.samples import Sample
from kvsieve.models.fetch import MODEL_NAME
from kvsieve.planning.plans import Plan
from kvsieve.report.environment import environment, write_result
from kvsieve.report.labels import FULL
from kvsieve.report.tables import markdown_table

RESULTS = Path(__file__).parents[1] / "results" / "paper"
# Metrics of which more is better; of the others, distances, less is.
SHARES = ("score", "exact")
Row = dict[str, Any]
Table = tuple[str, list[str], list[list[str]]]
"""Title, head and rows."""


@dataclass(frozen=True)
class Shape:
    """What of a model the settings depend on. parameters: without embeddings; group: query heads per KV head."""

    layers: int
    hidden: int
    parameters: float
    group: int = 1

    @classmethod
    def of(cls, model: Any) -> Shape:
        config = model.config.get_text_config()
        embeddings = model.get_input_embeddings().weight.numel()
        weights = sum(each.numel() for each in model.parameters())
        group = config.num_attention_heads // config.num_key_value_heads
        return cls(config.num_hidden_layers, config.hidden_size, float(weights - embeddings), group)

    def at(self, share: float) -> int:
        """The layer at a share of the depth that deeper layers still follow."""
        return max(0, min(round(share * self.layers) - 1, self.layers - 2))

    @property
    def half(self) -> int:
        """The papers' choice."""
        return self.layers // 2 - 1


Settings = Callable[[Shape, int], list[MethodSetting]]


@dataclass(frozen=True)
class Part:
    """One experiment.

    Attributes:
        name: on the command line, and of its folder.
        title: for tables.
        tasks: names of tasks.
        settings: of a grid, or of times; full KV is put in front.
        question: "visible" or "hidden".
        chunk: tokens per pass for a length, None for all at once.
        measure: instead of a grid, (model, ids [1, N]) -> a row.
        times: costs alone, on prompts of the needle task.
        least: prompts that are shorter are left out.
        answer: tokens of an answer, for the forecast.
        paper: what the paper has for a label, beside ours.
    """

    name: str
    title: str
    tasks: tuple[str, ...] = ()
    settings: Settings | None = None
    question: str = "visible"
    chunk: Callable[[int], int] | None = None
    measure: Callable[[Any, Any], Row] | None = None
    times: bool = False
    least: int = 0
    answer: int = 14
    paper: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """The experiments of one paper. tables (beside those of each part), verdicts: of one model's folder."""

    name: str
    title: str
    parts: tuple[Part, ...]
    tables: Callable[[Found], list[Table]]
    verdicts: Callable[[Found], list[Verdict]]

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)


def named(label: str, method: str, **given: Any) -> MethodSetting:
    """A setting under a label of its own; parameters that are not given are the method's, but for the pooling's width.

    The papers' models write three digits into a token, those measured here one: a kernel of 7 would cut every number.
    """
    info = kvsieve.planning.registry.method_info(method)
    wide = {"kernel": "auto"} if info.derive is not None and "kernel" in info.parameters else {}
    return _labelled(label, setting(info.name, {**wide, **given}))


def published(label: str, method: str, **given: Any) -> MethodSetting:
    """A setting under a label of its own as papers ran the method; parameters that are not given are its paper's."""
    paper = {"paper": True} if "paper" in kvsieve.planning.registry.method_info(method).parameters else {}
    return _labelled(label, setting(method, {**paper, **given}))


def _labelled(label: str, made: MethodSetting) -> MethodSetting:
    """A setting under another label, with nothing left to the model."""
    return replace(made, label=label, plan=replace(made.plan, name=label, unset=None))


def custom(label: str, plan: Plan, budget: str, **parameters: Any) -> MethodSetting:
    """A setting with a plan that no name makes."""
    return MethodSetting(label, label, budget, parameters, replace(plan, name=label), parameters)


def full() -> MethodSetting:
    return setting(FULL, {})


@dataclass(frozen=True)
class Found:
    """Results of one model: rows of its parts, loaded when they are asked for."""

    study: str
    folder: Path
    cache: dict[str, list[Row]] = field(default_factory=dict, compare=False)

    @cached_property
    def model(self) -> str:
        return self.folder.name

    def rows(self, part: str, length: int | None = None) -> list[Row]:
        """Rows of a grid or of a measurement, of all lengths or of one; none where it has not run."""
        if part not in self.cache:
            folder = self.folder / part
            if (folder / "rows.jsonl").exists():
                self.cache[part] = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
            else:
                self.cache[part] = load(folder).samples if _begun(folder, "samples") else []
        return [row for row in self.cache[part] if length is None or row["length"] == length]

    def costs(self, part: str = "times") -> list[Row]:
        folder = self.folder / part
        return load(folder).costs if _begun(folder, "costs") else []

    def lengths(self, part: str) -> list[int]:
        return sorted({row["length"] for row in (self.rows(part) or self.costs(part))})

    def values(
        self, part: str, label: str, metric: str = "score", length: int | None = None, tasks: Iterable[str] = ()
    ) -> dict[tuple[Any, ...], float]:
        """A metric of each sample under a label, by sample."""
        wanted, out = set(tasks), {}
        for row in self.rows(part, length):
            if row["label"] != label or (wanted and row["task"] not in wanted):
                continue
            value = row["metrics"].get(metric) if metric not in row else row[metric]
            if value is not None:
                out[row["task"], row["length"], row["question"], row["sample"]] = float(value)
        return out

    def acts(self, part: str, label: str, length: int) -> dict[tuple[Any, ...], bool]:
        """Whether a method did something to each sample, by sample."""
        mine = (row for row in self.rows(part, length) if row["label"] == label)
        return {(row["task"], row["length"], row["question"], row["sample"]): acted(row) for row in mine}

    def differ(
        self, part: str, ours: str, theirs: str, metric: str = "score", acting: str | None = None
    ) -> dict[int, Case | None]:
        """Return ours less theirs at each length; of distances, of which less is better, theirs less ours.

        Args:
            part: whose rows.
            ours: a label.
            theirs: another's.
            metric: what is compared.
            acting: a label whose rows say whether the method acted; `ours` if left out.
        """
        cases = {}
        for length in self.lengths(part):
            one, other = (self.values(part, each, metric, length) for each in (ours, theirs))
            first, second = (one, other) if metric in SHARES else (other, one)
            within = SCORES if metric in SHARES else None
            cases[length] = paired(first, second, within, self.acts(part, acting or ours, length))
        return cases

    def differ_each(
        self, part: str, pairs: Mapping[str, tuple[str, str]], metric: str = "score"
    ) -> dict[str, Case | None]:
        """`differ` of several pairs of labels by their names, one case for each and each length."""
        return {
            f"{name}, {length}": case
            for name, (ours, theirs) in pairs.items()
            for length, case in self.differ(part, ours, theirs, metric).items()
        }

    def mean(self, part: str, label: str, metric: str = "score", length: int | None = None) -> float | None:
        values = self.values(part, label, metric, length).values()
        return sum(values) / len(values) if values else None

    def ratios(self, label: str, quantity: str, to: str = FULL) -> dict[int, list[float]]:
        """A cost over that of another label, of each repeat in the same run, by length."""
        costs = self.costs()
        out: dict[int, list[float]] = {length: [] for length in sorted({row["length"] for row in costs})}
        base = {(row["env"], row["repeat"], row["length"]): row[quantity] for row in costs if row["label"] == to}
        for row in costs:
            key = row["env"], row["repeat"], row["length"]
            if row["label"] == label and key in base:
                out[row["length"]].append(row[quantity] / base[key])
        return out


def _begun(folder: Path, what: str) -> bool:
    """Whether a part has rows; one that was stopped before its first has a run.json alone."""
    return any((folder / f"{what}.jsonl{end}").exists() for end in ("", ".gz"))


@cache
def propagates(method: str) -> bool:
    """Tell whether a method leaves tokens out of deeper layers; False for settings that no name makes."""
    if method not in kvsieve.planning.registry.list_methods():
        return False
    info = kvsieve.planning.registry.method_info(method)
    return info.make(**info.example).propagate is not None


def acted(row: Row) -> bool:
    """Tell whether a method did something: a propagator left tokens, an evictor entries, a reader reads fewer."""
    tokens = row["prompt_tokens"]
    if propagates(row["method"]):
        return bool(row["deep_tokens"] < tokens)
    read = int(row["budget"]) if (row["budget"] or "").isdigit() else tokens
    return bool(min(row["kv_entries"], read) < tokens - 0.5)


def parser(study: Study) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=f"{study.title}: its experiments here.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts: " + "; ".join(f"{part.name}: {part.title}" for part in study.parts),
    )
    made.add_argument("--model", help="hub id or directory of a checkpoint; the demo model if left out")
    made.add_argument("--lengths", default="1024", help="prompt tokens, 4096,8192")
    made.add_argument("--samples", type=int, default=2, help="per task and length; 0 shows what there is")
    made.add_argument("--only", default="", help="parts, one or more; all but times if left out")
    made.add_argument("--tasks", default="", help="only these of a part's tasks")
    made.add_argument("--out", type=Path, default=RESULTS)
    made.add_argument("--dtype", default="auto")
    made.add_argument("--minutes", type=float, help="start no further sample after so many; a later run goes on")
    made.add_argument(
        "--shard", default="0/1", help="run a share of the samples: 2/4 is the third of four, each with its --out"
    )
    made.add_argument("--forecast", action="store_true", help="tell what would be read and how long it may take")
    return made


def main(study: Study, arguments: Sequence[str] | None = None) -> None:
    given = parser(study).parse_args(arguments)
    given.lengths = [int(each) for each in given.lengths.split(",")]
    known = [part.name for part in study.parts]
    names = given.only.split(",") if given.only else [part.name for part in study.parts if not part.times]
    if unknown := set(names) - set(known):
        sys.exit(f"error: no part {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    folder = given.out / study.name / (Path(given.model).name if given.model else MODEL_NAME).replace("/", "_")
    if given.samples:
        model, tokenizer = load_model(given.model, given.dtype)
        parts = [study.part(name) for name in names]
        if given.forecast:
            forecast(parts, Shape.of(model), given, model)
            return
        run(parts, model, tokenizer, given, folder)
    show(study, folder)


def show(study: Study, folder: Path) -> None:
    """Print tables and verdicts of what there is, and write them into the model's folder."""
    found = Found(study.name, folder)
    tables = [table for table in [*part_tables(study.parts, found), *study.tables(found)] if table[2]]
    if not tables:
        print("nothing has run yet")
        return
    text = [f"# {study.title}, {found.model}\n"]
    text += [f"**{title}**\n\n{markdown_table(head, rows)}\n" for title, head, rows in tables]
    text.append(verdict_table(study.verdicts(found)))
    (folder / "tables.md").write_text("\n".join(text))
    print("\n".join(text))


def run(parts: Sequence[Part], model: Any, tokenizer: Any, given: argparse.Namespace, folder: Path) -> None:
    """The first sample of every length, task and part first; all parts of one prompt one after another.

    They share what `remembering` keeps, but for times.
    """
    began, known, shape = time.perf_counter(), all_tasks(), Shape.of(model)
    stamp = {"model": folder.name, "dtype": str(model.dtype).removeprefix("torch."), "seed": 0, "haystack": "topics"}
    settings = {
        (part.name, length): _on(part, shape, length, model, tokenizer)
        for part in parts
        for length in given.lengths
        if part.settings is not None and length >= part.least
    }
    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {}
        for part in parts:
            texts = {"data": data_digests(known[name] for name in _tasks(part, given))}
            if part.measure is not None:
                files[part.name] = stack.enter_context(RowsFile(folder / part.name, {**stamp, **texts}, model))
                continue
            described = [each.described() for (name, _), mine in settings.items() if name == part.name for each in mine]
            titles = {name: known[name].title for name in _tasks(part, given)}
            run_of = {**stamp, "tasks": titles, **texts, "settings": described}
            files[part.name] = stack.enter_context(writing(folder / part.name, run_of, resume=True))
            files[part.name].settle([], model)
        units = itertools.product(
            range(given.samples), given.lengths, dict.fromkeys(name for part in parts for name in _units(part, given))
        )
        shard, shards = map(int, given.shard.split("/"))
        for index, length, name in itertools.islice(units, shard, None, shards):
            if given.minutes is not None and time.perf_counter() - began > 60 * given.minutes:
                print(f"stopped after {given.minutes:g} minutes", file=sys.stderr)
                return
            # What other prompts have left would be held for nothing.
            memory = Memory()
            for part in (each for each in parts if length >= each.least and name in _units(each, given)):
                text = f"{part.name}, {name}, {length} tokens, sample {index + 1}"
                print(f"{(time.perf_counter() - began) / 60:.1f} min, {text}", file=sys.stderr, flush=True)
                evaluator = Evaluator(model, tokenizer, chunk=part.chunk(length) if part.chunk else None)
                alone = part.times or part.chunk is not None or model.device.type != "cpu"
                with contextlib.nullcontext() if alone else remembering(model, memory):
                    if part.measure is not None:
                        _measure(part, evaluator, known[name], length, index, files[part.name])
                    elif index == 0 or not part.times:
                        mine = settings[part.name, length]
                        costs, tasks = given.samples * part.times, [] if part.times else [known[name]]
                        grid = Grid(tasks, [length], (part.question,), index + 1, mine, cost_samples=costs, first=index)
                        run_grid(grid, evaluator, files[part.name])
                        files[part.name].lap()


def _measure(part: Part, evaluator: Evaluator, task: Any, length: int, index: int, rows: RowsFile) -> None:
    key = {"task": task.name, "length": length, "sample": index}
    if part.measure is None or rows.has(key):
        return
    sample: Sample = task.sample(index, length, 0, evaluator.prompter.count)
    ids = evaluator.prompter.encode(sample).prompt.to(evaluator.model.device)
    rows.add(key | part.measure(evaluator.model, ids))


def _tasks(part: Part, given: argparse.Namespace) -> list[str]:
    wanted = given.tasks.split(",") if given.tasks else part.tasks
    return [name for name in part.tasks if name in wanted]


def _units(part: Part, given: argparse.Namespace) -> list[str]:
    """What a part runs at a length one after another."""
    return ["times"] if part.times else _tasks(part, given)


def _on(part: Part, shape: Shape, length: int, model: Any, tokenizer: Any) -> list[MethodSetting]:
    """Full KV and the part's settings, with plans that are ready for the model."""
    assert part.settings is not None
    made = [full(), *part.settings(shape, length)]
    return [replace(each, plan=each.plan.for_model(model, tokenizer)) for each in made]


class RowsFile:
    """Rows of a measurement, one line each, and run.json with the environments they were made in."""

    def __init__(self, folder: Path, run: Row, model: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model = model
        self.run_file, self.file = folder / "run.json", folder / "rows.jsonl"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.done = {self._key(json.loads(line)) for line in lines}
        held = json.loads(self.run_file.read_text()) if self.run_file.exists() else {}
        other = other_text({**held, "tasks": {task: "" for task, *_ in self.done}}, run) if held else None
        if other is not None:
            raise InputError(f"'{folder}' has {other}; evaluate it anew in another folder")
        self.run = {"environments": [], **held, **run, "data": {**held.get("data", {}), **run.get("data", {})}}
        self.written = 0

    def __enter__(self) -> RowsFile:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.written:
            self.run["environments"].append({**environment(self.model), "rows": self.written})
            write_result(self.run_file, self.run)

    def _key(self, row: Row) -> tuple[Any, ...]:
        return row["task"], row["length"], row["sample"]

    def has(self, row: Row) -> bool:
        return self._key(row) in self.done

    def add(self, row: Row) -> None:
        with open(self.file, "a") as out:
            out.write(json.dumps(row) + "\n")
        self.done.add(self._key(row))
        self.written += 1


# Seconds of one reading of Qwen2.5-0.5B in full, a N + b N^2, on two cores with bfloat16: 13 s at 4K, 36 s at 8K.
_LINEAR, _SQUARE, _WEIGHTS, _WIDTH = 1.95e-3, 2.98e-7, 358e6, 24 * 896
_TOKEN, _MORE_ROWS = 0.11, 0.15


def reading_seconds(shape: Shape, length: int, layers: float = 1.0) -> float:
    linear = _LINEAR * shape.parameters / _WEIGHTS * length
    return layers * (linear + _SQUARE * shape.layers * shape.hidden / _WIDTH * length**2)


# What is left of reading a layer whose results are remembered: norms, scores, digests.
_REMEMBERED = 0.12


def readings(
    settings: Sequence[MethodSetting], shape: Shape, length: int, alone: bool = False, known: bool = False
) -> Iterator[float]:
    """Seconds of each reading that these settings need together, full KV's first. alone: of every setting for itself.

    Together, they share what `remembering` keeps. known: another part has read this prompt just before.
    """
    shared: set[Any] = set()
    for number, each in enumerate(settings):
        plan = each.plan
        if plan.acts_once and plan.propagate in shared and not alone:
            continue
        if plan.acts_once:
            shared.add(plan.propagate)
        front, behind = _reading(plan, shape, length)
        chunked = plan.evict is not None and plan.evict.when.chunks
        whole = alone or chunked or not (number or known)
        yield (front if whole else _REMEMBERED * front) + behind


def _reading(plan: Plan, shape: Shape, length: int) -> tuple[float, float]:
    """Seconds of the layers that read everything, and of what follows."""
    if plan.propagate is None:
        return reading_seconds(shape, length), 0.0
    front = (plan.propagate.source(shape.layers) + 1) / shape.layers
    rate = getattr(plan.propagate, "rate", None) or getattr(plan.propagate, "budget", None)
    left = rate.entries(length, 1) if isinstance(rate, kvsieve.Budget) else round(length * 0.6)
    behind = 1.0 if plan.propagate.two_pass else 1 - front
    return reading_seconds(shape, length, front), reading_seconds(shape, min(left, length), behind)


def forecast(parts: Sequence[Part], shape: Shape, given: argparse.Namespace, model: Any) -> None:
    """Print how many readings each part takes and how long it may take, were nothing there yet."""
    head, rows = ["part", "prompt tokens", "samples", "settings", "readings", "minutes"], []
    token = _TOKEN * sum(each.numel() for each in model.parameters()) / 494e6
    read: set[tuple[Any, ...]] = set()
    for part in parts:
        for length in (length for length in given.lengths if length >= part.least):
            made, spent, count = [full()], 0.0, 0
            if part.settings is not None:
                made += part.settings(shape, length)
            tasks = _units(part, given)
            for task in tasks:
                alone, key = part.times or part.chunk is not None, (task, part.question, length)
                each = list(readings(made, shape, length, alone, key in read and not alone))
                read.add(key)
                count += len(each)
                spent += sum(each) + (0.0 if part.measure else token * _steps(part, made))
            units = given.samples * len(tasks)
            minutes = given.samples * spent / 60
            cells = (part.name, length, units, len(made), given.samples * count)
            rows.append([*map(str, cells), f"{minutes:.1f}"])
    print(markdown_table(head, rows))
    print(f"\nabout {sum(float(row[-1]) for row in rows):.0f} minutes in all on two cores, nothing beside it")


def _steps(part: Part, settings: Sequence[MethodSetting]) -> float:
    """Steps of one token that all answers take, those of further rows of a batch less."""
    # Answers of plans that evict once are rows of a batch, those of readers are not.
    alone = sum(part.times or each.plan.read is not None or each.plan.is_view for each in settings)
    rows = len(settings) - alone
    return (32 if part.times else part.answer) * (alone - (-rows // 8) + _MORE_ROWS * rows)


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


METRICS = {"exact": "all right", "kl": "KL", "kl_last": "KL, first token"}


def part_tables(parts: Iterable[Part], found: Found) -> Iterator[Table]:
    for part in parts:
        if part.times:
            yield time_table(found, part)
        elif part.settings is not None:
            yield score_table(found, part)
            if len(part.tasks) > 1:
                yield task_table(found, part)


def labels(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["label"] for row in rows))


def _table(part: Part, title: str, head: list[str], rows: dict[str, list[str]]) -> Table:
    """A row for each label, beside it what the paper has."""
    paper = bool(part.paper)
    cells = [[label, *row, *[part.paper.get(label, "")] * paper] for label, row in rows.items()]
    return f"{part.name}{title}", ["setting", *head, *["the paper"] * paper], cells


def score_table(found: Found, part: Part) -> Table:
    """Score of every label at every length, with its distance to full KV."""
    lengths = found.lengths(part.name)
    measured = {name for row in found.rows(part.name) for name in {**row, **row["metrics"]}}
    metrics = {each: what for each, what in METRICS.items() if each in measured}
    head = [text for length in lengths for text in (f"score, {length}", "n", *metrics.values(), "KV")]
    rows: dict[str, list[str]] = {}
    for label in labels(found.rows(part.name)):
        rows[label] = row = []
        for length in lengths:
            row += [number(found.mean(part.name, label, length=length), 3)]
            row += [str(len(found.values(part.name, label, length=length)) or "")]
            row += [number(found.mean(part.name, label, metric, length), 3) for metric in metrics]
            share = found.mean(part.name, label, "kv_share", length)
            row.append("" if share is None else f"{share:.1%}")
    return _table(part, f": {part.title}", head, rows)


def task_table(found: Found, part: Part) -> Table:
    """Score of every label on every task, all lengths together."""
    tasks, rows = list(dict.fromkeys(row["task"] for row in found.rows(part.name))), {}
    for label in labels(found.rows(part.name)):
        scores = [list(found.values(part.name, label, tasks=[task]).values()) for task in tasks]
        rows[label] = [number(sum(each) / len(each)) if each else "" for each in scores]
    return _table(replace(part, paper={}), ", by task", tasks, rows)


def time_table(found: Found, part: Part) -> Table:
    """Times and KV over full KV's, medians of the ratios within a repeat."""
    costs, rows = found.costs(part.name), {}
    lengths = sorted({row["length"] for row in costs})
    head = [f"{what}, {length}" for length in lengths for what in ("TTFT", "TPOT", "KV bytes")]
    for label in labels(costs):
        ratios = [found.ratios(label, quantity) for quantity in ("ttft_s", "tpot_s", "kv_bytes")]
        rows[label] = [f"{median(each[n]):.2f}" if each[n] else "" for n in lengths for each in ratios]
    return _table(part, ", over full KV's", head, rows)


Scores = Mapping[str, tuple[float, float]]
"""A paper's scores on RULER at 8K and 16K, by label."""


def at_lengths(scores: Scores) -> dict[str, str]:
    """A paper's scores as a table has them beside ours."""
    return {name: f"RULER 8K {eight}, 16K {sixteen}" for name, (eight, sixteen) in scores.items()}


def against(scores: Scores, ours: str, *theirs: str) -> str:
    """A paper's scores as a verdict has them."""
    sides = (" and ".join(str(scores[each][at]) for each in theirs) for at in (0, 1))
    both = zip(("8K", "16K"), scores[ours], sides, strict=True)
    return "RULER " + ", ".join(f"{length} {mine} against {other}" for length, mine, other in both)


def column_means(rows: Iterable[Sequence[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]
