"""`kvsieve bench`: costs of methods relative to plain transformers and to the machine's limit."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsieve.cli.bench_report import print_report, read_report
from kvsieve.cli.drafts import parse_draft
from kvsieve.cli.loading import (
    DecodeOption,
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
    MEASUREMENT,
    METHOD,
    OUTPUT,
    SERVER,
    TOKENS,
    MarkdownOption,
    ModelArgument,
    WholeChunkOption,
    expanded,
    option,
    refuse_option,
    refuse_unused,
)
from kvsieve.cli.output import JsonOption, WideOption, check_folder, check_writable, say
from kvsieve.cli.served import ExtraOption, Load, ServerOption, bench_server, check_options, print_load
from kvsieve.cli.specs import (
    CodecsOption,
    MethodRun,
    PrefillsOption,
    RestsOption,
    compared_specs,
    make_run,
    make_runs,
    measured,
    parse_parts,
    spec,
)
from kvsieve.errors import InputError, UnsupportedModelError
from kvsieve.planning.quantities import parse_lengths
from kvsieve.planning.specs import split_specs

if TYPE_CHECKING:
    from kvsieve.lab.bench.compare import Limits
    from kvsieve.lab.bench.contenders import Contender, PeerMethod
    from kvsieve.lab.bench.peer_process import Peer

PEER_BUDGET = "10%"
LENGTHS = "2048,4096,7500"
CONTEXT = "context"
PEER = "Peer"


def bench_command(
    context: typer.Context,
    model: ModelArgument = None,
    methods: Annotated[
        str, option(METHOD, "Methods beside transformers and full: snapkv:budget=10%,fastkv:tsp_layer=14")
    ] = "snapkv:budget=10%,fastkv:budget=10%",
    codec: CodecsOption = None,
    rest: RestsOption = None,
    prefill: PrefillsOption = None,
    lengths: Annotated[
        str | None,
        option(
            MEASUREMENT,
            f"Prompt lengths in tokens: 7500, 8k, or context for the longest (default: {LENGTHS}, as far as they fit)",
        ),
    ] = None,
    batch: Annotated[int, option(MEASUREMENT, "Batch size; rows differ in length to exercise padding")] = 1,
    new_tokens: Annotated[int, option(MEASUREMENT, "Generated tokens per prompt", **TOKENS)] = 32,
    rounds: Annotated[int, option(MEASUREMENT, "Measured rounds, after one warm-up")] = 5,
    chunk: WholeChunkOption = None,
    draft: Annotated[
        str | None,
        option(
            MEASUREMENT, "Draft to measure each method with, too: lookup, self:PLAN ... (default: none)", metavar="SPEC"
        ),
    ] = None,
    decode: DecodeOption = "auto",
    dtype: DtypeOption = "auto",
    weights: WeightsOption = None,
    device: DeviceOption = None,
    peer_python: Annotated[
        str | None, option(PEER, "Python interpreter with kvpress, measured in its own process (default: none)")
    ] = None,
    peer_methods: Annotated[
        str, option(PEER, f"Presses of kvpress beside its full KV: snapkv,adakv:budget=20% (budget {PEER_BUDGET})")
    ] = "snapkv",
    server: ServerOption = None,
    clients: Annotated[str, option(SERVER, "Concurrent requests to --server: a number or a list")] = "1,8",
    extra: ExtraOption = None,
    out: Annotated[
        Path | None, option(OUTPUT, "JSON report, written after every round (default: none)", callback=expanded)
    ] = None,
    plots: Annotated[
        Path | None, option(OUTPUT, "Directory for plots; needs matplotlib (default: none)", callback=expanded)
    ] = None,
    show: Annotated[
        Path | None,
        option(OUTPUT, "Saved report to print and plot, without measuring (default: none)", callback=expanded),
    ] = None,
    markdown: MarkdownOption = False,
    wide: WideOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure time and memory of methods beside plain transformers, and the machine's limit, in one run."""
    check_options(context, server, ("lengths", "new_tokens", "rounds"))
    if as_json:
        refuse_option(context, "markdown", "not with --json, which prints JSON alone")
    check_folder("--plots", plots)
    if server is not None:
        load = Load(parse_lengths(lengths or LENGTHS, "--lengths"), clients, new_tokens, rounds)
        check_model_name(model)
        print_load(bench_server(server, model, extra, load, out), as_json, wide)
        return
    if plots is not None:
        from kvsieve.report.plot_style import require_matplotlib

        require_matplotlib()
    if show is not None:
        shown = ("model", "show", "plots", "markdown", "wide", "as_json")
        refuse_unused(context, shown, "not with --show, which measures nothing; leave one of them out")
        print_report(read_report(show), plots, markdown, as_json, wide)
        return
    if peer_python is None:
        refuse_option(context, "peer_methods", "only with --peer-python")
    check_loading(dtype, device, decode)
    check_writable("--out", out, makes_folders=True)
    check_least(1, batch=batch, rounds=rounds, chunk=chunk)
    check_least(2, new_tokens=new_tokens)
    texts = [part.strip() for part in (LENGTHS if lengths is None else lengths).split(",")]
    numbers = [part for part in texts if part != CONTEXT]
    sizes = parse_lengths(",".join(numbers), "--lengths") if numbers else []
    specs = compared_specs(methods, None)
    parts = parse_parts(codec, rest, prefill)
    presses = parse_peer_methods(peer_methods) if peer_python is not None else []
    python = find_python(peer_python) if peer_python is not None else None
    check_model_name(model, weights)
    drafts = parse_draft(draft)
    named = [make_run("full"), *make_runs(specs, *parts)]
    check_device(device)
    loaded, tokenizer = load_model(model, dtype, device, weights)
    from kvsieve.lab.bench.prompts import lengths_of

    sizes = lengths_of(loaded, sizes, new_tokens, whole=CONTEXT in texts, fitting=lengths is None)
    runs = {run.full_label: run for run in (measured(run).for_model(loaded, tokenizer) for run in named)}
    settings = {
        "batch": batch,
        "new_tokens": new_tokens,
        "rounds": rounds,
        "chunk": chunk,
        "decode": decode,
        "draft": drafts,
    }
    from kvsieve.lab.bench.peer_process import Peer

    if python is None:
        report = run_bench(model, loaded, tokenizer, runs, [], sizes, settings, out)
    else:
        say(f"starting {python}")
        with Peer(python, loaded) as peer:
            report = run_bench(model, loaded, tokenizer, runs, _peers(peer, presses), sizes, settings, out)
    print_report(report, plots, markdown, as_json, wide)


def parse_peer_methods(text: str) -> list[tuple[str, Any, dict[str, Any]]]:
    """Return kvpress methods as (name, Budget, further arguments of the press). Raises InputError or PlanError."""
    from kvsieve.lab.bench.peer import PRESSES
    from kvsieve.planning.budget import Budget

    found = []
    for name, options in split_specs(text):
        if name not in PRESSES or name == "full":
            known = ", ".join(press for press in PRESSES if press != "full")
            raise InputError(f"--peer-methods knows {known}, got {name!r}; full is always measured")
        found.append((name, Budget.parse(options.pop("budget", PEER_BUDGET)), options))
    return found


def find_python(name: str) -> str:
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
    """Return the JSON-ready report; it is written to `out` after every round."""
    from kvsieve.lab.bench import compare, prompts
    from kvsieve.lab.bench.contenders import BASELINE
    from kvsieve.lab.bench.roofline import measure_rates
    from kvsieve.models.fetch import MODEL_NAME
    from kvsieve.report.environment import environment

    contenders = [*_contenders(model, tokenizer, runs, settings), *peers]
    say("measuring the machine")
    limits, unknown = _limits(model)
    report: dict[str, Any] = {
        "environment": environment(model),
        "model": name or MODEL_NAME,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "cpu": _cpu(model),
        **settings,
        "draft": None if settings["draft"] is None else str(settings["draft"]),
        "baseline": BASELINE,
        "contenders": {contender.name: contender.describe() for contender in contenders},
        "plans": {label: run.plan.to_dict() for label, run in runs.items()},
        "parameters": {label: run.parameters for label, run in runs.items()},
        "rates": None if limits is None else limits.rates.to_dict(),
        "limits_unknown": unknown,
        "lengths": {},
    }
    for length in lengths:
        for entry in compare.run_length(
            contenders,
            prompts.make_rows(prompts.text_ids(tokenizer), length, settings["batch"]),
            settings["new_tokens"],
            settings["rounds"],
            model=model,
            limits=limits,
            filler=tokenizer.pad_token_id or 0,
            progress=lambda part, length=length: say(f"{length} tokens: {part}"),  # type: ignore[misc]
        ):
            report["lengths"][str(length)] = entry
            _keep(report, out)
        if limits is not None:
            # A shared machine may have been slower before than after.
            limits = replace(limits, rates=limits.rates.best(measure_rates(model)))
            report["rates"] = limits.rates.to_dict()
            for entry in report["lengths"].values():
                compare.limit(entry, limits)
        _keep(report, out)
    return report


def _contenders(model: Any, tokenizer: Any, runs: dict[str, MethodRun], settings: dict[str, Any]) -> list[Contender]:
    """Return plain transformers and the methods, each also with drafts if there is one. Raises PlanError."""
    from kvsieve.hf.model.support import check_model
    from kvsieve.lab.bench.contenders import KvsieveMethod, Transformers

    found: list[Contender] = [Transformers(model, settings["chunk"])]
    draft = settings["draft"]
    for label, run in runs.items():
        check_model(model, run.plan)
        method = KvsieveMethod(model, run.plan, label, settings["chunk"], settings["decode"])
        found.append(method)
        if draft is not None:
            found.append(replace(method, name=f"{label} draft={draft}", draft=draft, tokenizer=tokenizer))
    return found


def _keep(report: dict[str, Any], out: Path | None) -> None:
    """Write a report, if there is a file for it."""
    from kvsieve.report.environment import write_result

    if out is not None:
        write_result(out, report)


def _peers(peer: Peer, presses: list[tuple[str, Any, dict[str, Any]]]) -> list[PeerMethod]:
    from kvsieve.lab.bench.contenders import PeerMethod, peer_name

    found = [PeerMethod(peer, "full", None, {}, peer_name("full"))]
    for method, budget, options in presses:
        parameters = {"budget": str(budget), **options}
        found.append(PeerMethod(peer, method, budget, options, peer_name(spec(method, parameters))))
    return found


def _cpu(model: Any) -> dict[str, str] | None:
    from kvsieve.attention.choice import cpu_paths
    from kvsieve.devices import cpu_kind

    return None if model.device.type != "cpu" else {"kind": cpu_kind(), "attention": str(cpu_paths(model.dtype))}


def _limits(model: Any) -> tuple[Limits | None, str | None]:
    """Return inputs of the limits, or why they are unknown."""
    from kvsieve.lab.bench.compare import Limits, element_bytes
    from kvsieve.lab.bench.geometry import geometry
    from kvsieve.lab.bench.roofline import measure_rates

    try:
        found = geometry(model.config)
    except UnsupportedModelError as error:
        return None, str(error)
    return Limits(found, measure_rates(model), element_bytes(model)), None
