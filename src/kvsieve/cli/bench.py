"""`kvsieve bench`: what methods cost beside plain transformers, and how far that is from the machine's limit."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsieve.cli.estimate import parse_contexts
from kvsieve.cli.loading import DecodeOption, DeviceOption, DtypeOption, check_device, check_loading, load_model
from kvsieve.cli.output import JsonOption, emit_json, print_table, say, show
from kvsieve.cli.served import ExtraOption, Load, ServerOption, bench_server, check_options, print_load
from kvsieve.cli.specs import (
    CodecsOption,
    MethodRun,
    PrefillsOption,
    RestsOption,
    compared_methods,
    make_run,
    measured,
    parse_codecs,
    parse_prefills,
    parse_rests,
    spec,
    with_codecs,
)
from kvsieve.errors import InputError, UnsupportedModelError
from kvsieve.report.tables import markdown_table
from kvsieve.specs import split_specs
from kvsieve.text import markdown_text

if TYPE_CHECKING:
    from kvsieve.bench.compare import Limits
    from kvsieve.bench.contenders import Contender, PeerMethod
    from kvsieve.bench.peer_process import Peer

PEER_BUDGET = "10%"
LENGTHS = "2048,4096,7500"
CONTEXT = "context"


def bench_command(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Hub id, directory of a checkpoint or .gguf file; the demo model if left out.")
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Beside transformers and full: snapkv:budget=10%,fastkv:tsp_layer=14:budget=10%.")
    ] = "snapkv:budget=10%,fastkv:budget=10%",
    codec: CodecsOption = None,
    rest: RestsOption = None,
    prefill: PrefillsOption = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Prompt tokens: 7500, 8k (8192), context (all that the model takes), or a list; "
            f"{LENGTHS} if left out, of these what fits."
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(help="Rows, of n, 7/8 n, 3/4 n ... tokens: read as one padded batch and one by one.")
    ] = 1,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated per prompt.")] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds that count, after one that does not.")] = 5,
    chunk: Annotated[int | None, typer.Option(help="Prompt tokens per forward pass; all at once if left out.")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    decode: DecodeOption = "auto",
    peer_python: Annotated[
        str | None, typer.Option(help="Interpreter with kvpress: measured beside, in a process of its own.")
    ] = None,
    peer_methods: Annotated[
        str, typer.Option(help=f"Of kvpress, beside its full KV: snapkv,adakv:budget=20% ({PEER_BUDGET} if not said).")
    ] = "snapkv",
    out: Annotated[
        Path | None, typer.Option(help="JSON file for the report, written after every length (--json prints it).")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Directory for pictures; needs matplotlib.")] = None,
    show: Annotated[Path | None, typer.Option(help="A saved report: print it, draw it, measure nothing.")] = None,
    server: ServerOption = None,
    clients: Annotated[str, typer.Option(help="With --server: requests at once, a number or a list.")] = "1,8",
    extra: ExtraOption = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Time and memory per method beside plain transformers, in one run, with the machine's limit."""
    check_options(context, server, ("lengths", "new_tokens", "rounds"))
    if server is not None:
        load = Load(parse_contexts(lengths or LENGTHS, "--lengths"), clients, new_tokens, rounds)
        print_load(bench_server(server, model, extra, load, out), as_json)
        return
    if plots is not None:
        from kvsieve.report.plot_style import require_matplotlib

        require_matplotlib()
    if show is not None:
        _print(read_report(show), plots, markdown, as_json)
        return
    check_loading(dtype, decode)
    for option, value, least in (
        ("--batch", batch, 1),
        ("--rounds", rounds, 1),
        ("--new-tokens", new_tokens, 2),
        ("--chunk", 1 if chunk is None else chunk, 1),
    ):
        if value < least:
            raise InputError(f"{option} must be at least {least}, got {value}")
    asked = [part.strip() for part in (LENGTHS if lengths is None else lengths).split(",")]
    numbers = [part for part in asked if part != CONTEXT]
    sizes = parse_contexts(",".join(numbers), "--lengths") if numbers else []
    named = [make_run("full")]
    named += with_codecs(
        compared_methods(methods, None), parse_codecs(codec), parse_rests(rest), parse_prefills(prefill)
    )
    presses = parse_peer_methods(peer_methods) if peer_python is not None else []
    python = find_python(peer_python) if peer_python is not None else None
    check_device(device)
    loaded, tokenizer = load_model(model, dtype, device)
    from kvsieve.bench.prompts import lengths_of

    sizes = lengths_of(loaded, sizes, new_tokens, whole=CONTEXT in asked, fitting=lengths is None)
    runs = {run.full_label: run for run in (measured(each).for_model(loaded, tokenizer) for each in named)}
    settings = {
        "batch": batch,
        "new_tokens": new_tokens,
        "rounds": rounds,
        "chunk": chunk,
        "decode": decode,
    }
    from kvsieve.bench.peer_process import Peer

    if python is None:
        report = run_bench(model, loaded, tokenizer, runs, [], sizes, settings, out)
    else:
        say(f"starting {python}")
        with Peer(python, loaded) as peer:
            report = run_bench(model, loaded, tokenizer, runs, _peers(peer, presses), sizes, settings, out)
    _print(report, plots, markdown, as_json)


def parse_peer_methods(text: str) -> list[tuple[str, Any, dict[str, Any]]]:
    """kvpress methods as (name, Budget, further arguments of the press). Raises InputError or PlanError."""
    from kvsieve.bench.peer import PRESSES
    from kvsieve.budget import Budget

    found = []
    for name, options in split_specs(text):
        if name not in PRESSES or name == "full":
            known = ", ".join(each for each in PRESSES if each != "full")
            raise InputError(f"--peer-methods knows {known}, got {name!r}; full is always measured")
        found.append((name, Budget.parse(options.pop("budget", PEER_BUDGET)), options))
    return found


def find_python(name: str) -> str:
    """The interpreter's path. Raises InputError."""
    found = shutil.which(os.path.expanduser(name))
    if found is None:
        raise InputError(f"--peer-python {name!r} is no interpreter; expected one with kvpress, e.g. peer/bin/python")
    return found


def run_bench(
    name: str | None,
    model: Any,
    tokenizer: Any,
    runs: dict[str, MethodRun],
    peers: list[PeerMethod],
    lengths: list[int],
    settings: dict[str, Any],
    out: Path | None,
) -> dict[str, Any]:
    """The report, JSON-ready; written to `out` after every length."""
    from kvsieve.bench import compare, prompts
    from kvsieve.bench.contenders import BASELINE, KvsieveMethod, Transformers
    from kvsieve.bench.roofline import measure_rates
    from kvsieve.hf.model.support import check_model
    from kvsieve.models.fetch import MODEL_NAME
    from kvsieve.report.environment import environment, write_result

    contenders: list[Contender] = [Transformers(model, settings["chunk"])]
    for label, run in runs.items():
        check_model(model, run.plan)
        contenders.append(KvsieveMethod(model, run.plan, label, settings["chunk"], settings["decode"]))
    contenders += peers
    say("measuring the machine")
    limits, unknown = _limits(model)
    report: dict[str, Any] = {
        "environment": environment(model),
        "model": name or MODEL_NAME,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "cpu": _cpu(model),
        **settings,
        "baseline": BASELINE,
        "contenders": {each.name: each.describe() for each in contenders},
        "plans": {label: run.plan.to_dict() for label, run in runs.items()},
        "parameters": {label: run.parameters for label, run in runs.items()},
        "rates": None if limits is None else limits.rates.to_dict(),
        "limits_unknown": unknown,
        "lengths": {},
    }
    text = prompts.text_ids(tokenizer)
    for length in lengths:
        report["lengths"][str(length)] = compare.run_length(
            contenders,
            prompts.make_rows(text, length, settings["batch"]),
            settings["new_tokens"],
            settings["rounds"],
            model=model,
            limits=limits,
            filler=tokenizer.pad_token_id or 0,
            tell=lambda part, length=length: say(f"{length} tokens: {part}"),  # type: ignore[misc]
        )
        if limits is not None:
            # A machine shared with others may have been slower before than it is after.
            limits = replace(limits, rates=limits.rates.best(measure_rates(model)))
            report["rates"] = limits.rates.to_dict()
            for entry in report["lengths"].values():
                compare.limit(entry, limits)
        if out is not None:
            write_result(out, report)
    return report


def _peers(peer: Peer, presses: list[tuple[str, Any, dict[str, Any]]]) -> list[PeerMethod]:
    from kvsieve.bench.contenders import PeerMethod, peer_name

    found = [PeerMethod(peer, "full", None, {}, peer_name("full"))]
    for method, budget, options in presses:
        given = {"budget": str(budget), **options}
        found.append(PeerMethod(peer, method, budget, options, peer_name(spec(method, given))))
    return found


def _cpu(model: Any) -> dict[str, str] | None:
    """Tell the kind of CPU and how attention is computed on it; None for a model elsewhere."""
    from kvsieve.attention.choice import cpu_paths
    from kvsieve.devices import cpu_kind

    return None if model.device.type != "cpu" else {"kind": cpu_kind(), "attention": str(cpu_paths(model.dtype))}


def _limits(model: Any) -> tuple[Limits | None, str | None]:
    """Inputs of the limits, or the reason why they are not known."""
    from kvsieve.bench.compare import Limits, element_bytes
    from kvsieve.bench.geometry import geometry
    from kvsieve.bench.roofline import measure_rates

    try:
        found = geometry(model.config)
    except UnsupportedModelError as error:
        return None, str(error)
    return Limits(found, measure_rates(model), element_bytes(model)), None


def read_report(path: Path) -> dict[str, Any]:
    """A saved report. Raises InputError."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--show cannot read {str(path)!r}: {error}") from error
    if not isinstance(report, dict) or not {"lengths", "batch", "contenders"} <= set(report):
        raise InputError(f"--show expects a report that `kvsieve bench --out` wrote, got {str(path)!r}")
    return report


def _print(report: dict[str, Any], plots: Path | None, markdown: bool, as_json: bool) -> None:
    from kvsieve.bench.tables import closing, notes, tables

    if plots is not None:
        from kvsieve.bench.plots import draw

        for file in draw(report, plots):
            say(f"drew {file}")
    for note in notes(report):
        say(f"note: {note}")
    if as_json:
        emit_json(report)
        return
    if report["rates"] is not None:
        bandwidth, matmul = report["rates"]["bandwidth_gb_per_s"], report["rates"]["matmul_tflops"]
        show(f"{report['model']}, {report['dtype']}, {report['device']}, {report['new_tokens']} new tokens")
        show(f"matrix-vector {bandwidth:.1f} GB/s, matmul {matmul:.3g} TFLOP/s, measured in this run")
    if report.get("cpu") is not None:
        show(f"{report['cpu']['kind']}: {report['cpu']['attention']}")
    for title, headers, rows in tables(report):
        if markdown:
            show(f"\n{markdown_text(title)}\n\n{markdown_table(headers, rows)}")
        else:
            show(f"\n{title}")
            print_table(headers, rows)
    show("")
    for line in closing(report):
        show(f"- {line}" if markdown else line)
