"""`kvsieve eval`: tasks x lengths x methods x budgets, into a results directory."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsieve.cli.drafts import DraftOption, parse_draft
from kvsieve.cli.loading import (
    DeviceOption,
    DtypeOption,
    WeightsOption,
    check_device,
    check_least,
    check_loading,
    check_model_name,
    load_model,
)
from kvsieve.cli.options import (
    GENERATION,
    MEASUREMENT,
    METHOD,
    OUTPUT,
    SERVER,
    TASKS,
    GeneratedSeedOption,
    ModelArgument,
    WholeChunkOption,
    expanded,
    option,
    options_given,
    refuse_option,
)
from kvsieve.cli.output import JsonOption, check_folder, emit_json, progress_bar, show
from kvsieve.cli.report import aggregated, print_means
from kvsieve.cli.served import ExtraOption, ServerOption, check_options, eval_server, print_scores
from kvsieve.cli.specs import (
    CodecsOption,
    PrefillsOption,
    RestsOption,
    ask_back,
    check_budget_used,
    method_specs,
    parse_parts,
)
from kvsieve.errors import InputError
from kvsieve.lab.eval.cells import on_model, settings
from kvsieve.lab.eval.grid import Grid
from kvsieve.planning.named import crossed
from kvsieve.planning.quantities import parse_lengths

if TYPE_CHECKING:
    from kvsieve.lab.eval.evaluator import Evaluator
    from kvsieve.lab.tasks.document_task import DocumentTask
    from kvsieve.lab.tasks.samples import Task
    from kvsieve.planning.drafts import Draft

# Options of the questions, not of how a model runs.
_OF_SAMPLES = (
    "grid_file",
    "tasks",
    "task",
    "score",
    "lengths",
    "samples",
    "question",
    "resume",
    "seed",
    "haystack",
    "data",
    "scbench_mode",
)
# Options that a file may set.
_IN_FILE: tuple[str, ...] = ("tasks", "lengths", "samples", "question", "seed", "haystack", "scbench_mode")
_IN_FILE += ("methods", "budgets", "codec", "rest", "prefill", "cost_samples")


def _take_file(context: typer.Context, file: Path | None) -> Path | None:
    """Let a file set options that the command line does not. Raises InputError."""
    if file is None:
        return None
    try:
        values = tomllib.loads(Path(os.path.expanduser(file)).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"--grid '{file}' cannot be read: {error}; expected TOML such as methods = [\"snapkv\"]"
        ) from error
    unknown = sorted(values.keys() - set(_IN_FILE))
    if unknown:
        raise InputError(f"--grid '{file}' sets {', '.join(unknown)}; it may set {', '.join(_IN_FILE)}")
    context.default_map = {
        name: ",".join(map(str, value)) if isinstance(value, list) else str(value) for name, value in values.items()
    }
    return file


def eval_command(
    context: typer.Context,
    model: ModelArgument = None,
    grid_file: Annotated[
        Path | None,
        option(
            TASKS,
            "TOML file that sets tasks, lengths, methods and so on; options given override it (default: none)",
            "--grid",
            callback=_take_file,
            is_eager=True,
        ),
    ] = None,
    tasks: Annotated[str, option(TASKS, "Task names, ruler or all (`kvsieve tasks`)")] = "needle,ruler,kv",
    task: Annotated[
        Path | None, option(TASKS, "Your own task: .jsonl rows of context, question and answer(s) (default: none)")
    ] = None,
    score: Annotated[
        str | None, option(TASKS, "Score of --task: contains, exact, f1, rouge or module:function (default: contains)")
    ] = None,
    lengths: Annotated[str, option(TASKS, "Prompt lengths in tokens, question and template included")] = "2048",
    samples: Annotated[int, option(TASKS, "Samples per task, length and question mode")] = 25,
    question: Annotated[str, option(TASKS, "Question mode: visible or hidden to the eviction, or both")] = "visible",
    haystack: Annotated[
        str, option(TASKS, "Filler text: topics (Python 3.11's help texts), noise, or a folder of texts")
    ] = "topics",
    data: Annotated[
        str | None, option(TASKS, "Directory or file of a public benchmark, docs/evaluation.md (default: none)")
    ] = None,
    scbench_mode: Annotated[str, option(TASKS, "Mode of scbench_... tasks: multi-turn or shared")] = "multi-turn",
    seed: GeneratedSeedOption = 0,
    methods: Annotated[
        str, option(METHOD, "Methods, such as snapkv,fastkv:tsp_rate=0.3; full is always added")
    ] = "snapkv",
    budgets: Annotated[str, option(METHOD, "KV entries kept per layer and head: 5%,10%, 512, 2k or 64MiB")] = "10%,20%",
    codec: CodecsOption = None,
    rest: RestsOption = None,
    prefill: PrefillsOption = None,
    cost_samples: Annotated[int, option(MEASUREMENT, "Runs per method that measure only time and memory")] = 3,
    batch: Annotated[int, option(GENERATION, "Batch size, at most")] = 8,
    chunk: WholeChunkOption = None,
    draft: DraftOption = None,
    dtype: DtypeOption = "auto",
    weights: WeightsOption = None,
    device: DeviceOption = None,
    server: ServerOption = None,
    clients: Annotated[str, option(SERVER, "Concurrent requests to --server")] = "4",
    extra: ExtraOption = None,
    out: Annotated[Path, option(OUTPUT, "Results directory", callback=expanded)] = ...,  # type: ignore[assignment]
    resume: Annotated[bool, option(OUTPUT, "Continue or extend the results in --out", "--resume")] = False,
    as_json: JsonOption = False,
) -> None:
    """Score methods on long-context tasks, with time and memory; `kvsieve report` plots the results."""
    check_options(context, server, _OF_SAMPLES)
    check_loading(dtype, device)
    questions = _checked(samples, cost_samples, batch, chunk, question)
    sizes = parse_lengths(lengths, "--lengths")
    specs = method_specs(methods)
    shares = budgets_of(budgets)
    check_budget_used("--budgets", budgets if _is_given(context, "budgets") else None, specs)
    parts = parse_parts(codec, rest, prefill)
    own = _own_task(context, task, score)
    alone = bool(own) and not _is_given(context, "tasks")
    names = [] if alone else names_of(tasks)
    _check_used(context, names, own)
    grid_tasks = [*own, *([] if alone else _tasks(names, haystack, data, scbench_mode))]
    check_folder("--out", out)
    check_model_name(model, weights)
    drafts = parse_draft(draft)
    grid = Grid(
        tasks=grid_tasks,
        lengths=sizes,
        questions=questions,
        samples=samples,
        settings=settings(crossed(specs, *parts), shares),
        seed=seed,
        cost_samples=cost_samples,
    )
    grid.check(None)
    if server is not None:
        return print_scores(eval_server(grid, server, model, extra, clients, out, resume, haystack), out, as_json)
    check_device(device)

    from kvsieve.hf.model.context import context_of
    from kvsieve.hf.model.support import check_model
    from kvsieve.lab.eval.cells import warn_unlike
    from kvsieve.lab.eval.evaluator import Evaluator
    from kvsieve.lab.eval.runner import run_grid
    from kvsieve.lab.eval.store import writing

    run = _identity(context, grid, drafts)
    # Opened before the model is loaded, so that an unwritable directory fails fast.
    with writing(out, run, resume=resume) as writer:
        loaded, tokenizer = load_model(model, dtype, device, weights)
        grid = replace(grid, settings=on_model(grid.settings, loaded, tokenizer))
        warn_unlike(grid.settings)
        for setting in grid.settings:
            check_model(loaded, setting.plan)
        writer.settle([setting.described() for setting in grid.settings], loaded)
        evaluator = Evaluator(loaded, tokenizer, batch=batch, chunk=chunk, draft=drafts)
        if alone:
            grid = _whole_rows(context, grid, own[0], evaluator)
        grid.check(context_of(loaded.config))
        with progress_bar() as progress:
            run_grid(grid, evaluator, writer, progress)
    _print_results(out, as_json)


def _identity(context: typer.Context, grid: Grid, draft: Draft | None) -> dict[str, Any]:
    """Return what a run that continues these results has to agree in; see `lab.eval.store`."""
    from kvsieve.devices import auto_dtype
    from kvsieve.lab.tasks.public import data_digests
    from kvsieve.models.fetch import MODEL_NAME

    given = context.params
    return {
        "model": given["model"] or MODEL_NAME,
        "dtype": auto_dtype(given["device"]).name if given["dtype"] == "auto" else given["dtype"],
        "weights": given["weights"],
        "seed": given["seed"],
        "haystack": given["haystack"],
        "draft": None if draft is None else str(draft),
        "tasks": {task.name: task.title for task in grid.tasks},
        "data": data_digests(grid.tasks),
    }


def _print_results(out: Path, as_json: bool) -> None:
    from kvsieve.lab.eval.results import load
    from kvsieve.lab.eval.rows import packed_name

    results = load(out)
    if as_json:
        return emit_json(aggregated(results))
    print_means(results)
    show(f"results are in {out}; `kvsieve report {out}` makes tables and pictures of them")
    show(f"each sample: pandas.read_json({str(packed_name(out / 'samples.jsonl'))!r}, lines=True)")


def _checked(samples: int, cost_samples: int, batch: int, chunk: int | None, question: str) -> tuple[str, ...]:
    """Check the numbers and return the question modes. Raises InputError."""
    check_least(1, samples=samples, batch=batch, chunk=chunk)
    check_least(0, cost_samples=cost_samples)
    if question not in ("visible", "hidden", "both"):
        raise InputError(f"--question must be visible, hidden or both, got {question!r}")
    return ("visible", "hidden") if question == "both" else (question,)


def _is_given(context: typer.Context, name: str) -> bool:
    return name in options_given(context)


def _check_used(context: typer.Context, names: Sequence[str], own: Sequence[object]) -> None:
    """Raise InputError for an option of tasks that are not among those named."""
    from kvsieve.lab.tasks.public import is_public

    if not any(name.startswith("scbench") for name in names):
        refuse_option(context, "scbench_mode", "only with a task scbench_... in --tasks")
    if not any(map(is_public, names)):
        refuse_option(context, "data", "files of a public benchmark, but --tasks names none, such as leval_quality")
    if all(map(is_public, names)) and (names or own):
        refuse_option(context, "haystack", "only with generated tasks in --tasks, such as needle")


def _own_task(context: typer.Context, task: Path | None, score: str | None) -> list[DocumentTask]:
    from kvsieve.lab.tasks.rows import rows_task

    if task is None and score is not None:
        raise InputError("--score is of the rows of --task; give --task FILE.jsonl too")
    if task is not None and _is_given(context, "server") and not _is_given(context, "lengths"):
        raise InputError("--task with --server needs --lengths, the tokens of the longest prompt")
    return [] if task is None else [rows_task(task, score or "contains")]


def _whole_rows(context: typer.Context, grid: Grid, task: DocumentTask, evaluator: Evaluator) -> Grid:
    """Return the grid for a file of rows: all rows, uncut, unless --samples or --lengths is given."""
    from kvsieve.lab.eval.own import whole_length

    if not _is_given(context, "samples"):
        grid = replace(grid, samples=len(task))
    if not _is_given(context, "lengths"):
        grid = replace(grid, lengths=[whole_length(task, evaluator.model, evaluator.prompter.count)])
    return grid


def tasks_command(as_json: JsonOption = False) -> None:
    """List the tasks of `kvsieve eval`."""
    from kvsieve.cli.output import print_table
    from kvsieve.lab.tasks import all_tasks
    from kvsieve.lab.tasks.public import public_tasks

    rows = [(task.name, task.title, " or ".join(task.modes)) for task in all_tasks().values()]
    rows += [(name, title, "visible or hidden") for name, title in public_tasks()]
    if as_json:
        emit_json([dict(zip(("name", "title", "question"), row, strict=True)) for row in rows])
        return
    print_table(["task", "what it is", "question"], [list(row) for row in rows], left=3)


def _tasks(names: list[str], haystack: str, data: str | None, scbench_mode: str) -> list[Task]:
    from kvsieve.lab.tasks import chosen_tasks
    from kvsieve.lab.tasks.public import is_public, public_task

    public = [name for name in names if is_public(name)]
    built_in = [name for name in names if name not in public]
    tasks: list[Task] = chosen_tasks(built_in, haystack) if built_in or not public else []
    return [*tasks, *(public_task(name, data, scbench_mode) for name in public)]


def budgets_of(text: str) -> list[str]:
    """Return the budgets of a list like ``10%,20%``; see `specs.ask_back`. Raises PlanError."""
    budgets = names_of(text)
    for budget in budgets:
        ask_back(budget)
    return budgets


def names_of(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
