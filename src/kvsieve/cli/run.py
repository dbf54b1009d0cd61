"""`kvsieve run`: prompts, one or more methods, what each answered and what it cost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsieve.cli.answers import Generation, check_lengths, encode, run_batches, run_methods
from kvsieve.cli.kept import check_kept, found_json, print_found, print_map, write_page
from kvsieve.cli.loading import DecodeOption, DeviceOption, DtypeOption, check_device, check_loading, load_model
from kvsieve.cli.output import JsonOption, emit_json, print_table, show
from kvsieve.cli.prompts import given_prompts
from kvsieve.cli.specs import (
    BudgetOption,
    CodecsOption,
    PrefillsOption,
    RestsOption,
    chosen_method,
    compared_methods,
    parse_codecs,
    parse_prefills,
    parse_rests,
    with_codecs,
)
from kvsieve.cli.store import StoreOption
from kvsieve.display import span
from kvsieve.errors import InputError

if TYPE_CHECKING:
    from kvsieve.hf.generate.stats import Stats

_HEADERS = [
    "method",
    "prompt tokens",
    "deep tokens",
    "KV asked",
    "KV kept",
    "KV held MiB",
    "TTFT s",
    "TPOT ms",
    "peak MiB",
    "ran",
]


def run_command(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, directory of a checkpoint or .gguf file; the demo model if left out.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="File with the prompt; - reads stdin.")] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(help='File with a prompt per line, as text or as JSON like {"prompt": "..."}; - reads stdin.'),
    ] = None,
    question: Annotated[str | None, typer.Option(help="Put after the prompt and a blank line.")] = None,
    method: Annotated[
        str, typer.Option(help="snapkv, or with parameters snapkv:kernel=21; see `kvsieve methods`.")
    ] = "fastkv",
    budget: BudgetOption = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the method; repeatable.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Parameters that `kvsieve calibrate` found: a file, or a shipped profile's name.")
    ] = None,
    codec: CodecsOption = None,
    rest: RestsOption = None,
    prefill: PrefillsOption = None,
    compare: Annotated[
        str, typer.Option(help="Methods to run before it: full,snapkv or snapkv:kernel=21:window=16,full.")
    ] = "",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    protect: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE|A:B", help="Never evict: system, user, or tokens A to B of the prompt; repeatable."),
    ] = None,
    store: StoreOption = None,
    parse_special: Annotated[
        bool, typer.Option("--parse-special", help="Control tokens written in the prompt are no text.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 64,
    temperature: Annotated[
        float | None, typer.Option(help="Sample tokens, the more evenly the higher it is; greedy if left out, or 0.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this total share.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from so many of the likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling: the same one gives the same answers.")] = None,
    batch: Annotated[int, typer.Option(help="Prompts of --prompts-file that are answered together.")] = 8,
    chunk: Annotated[int, typer.Option(help="Prompt tokens per forward pass.")] = 1024,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    decode: DecodeOption = "auto",
    show_kept: Annotated[
        str | None,
        typer.Option(
            "--show", metavar="FILE.html|-", help="What --method has kept of the prompt: a page, or - for the terminal."
        ),
    ] = None,
    find: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Where a text of the prompt is still held; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt under a method, and compare it with others.

    The answers to --prompts-file are lines of JSON on stdout, one per prompt and method.
    """
    # Everything that can be wrong with the input is looked at before the model is loaded, which takes a while.
    check_loading(dtype, decode)
    for option, value in (("--max-new-tokens", max_new_tokens), ("--chunk", chunk), ("--batch", batch)):
        if value < 1:
            raise InputError(f"{option} must be at least 1, got {value}")
    sampling = parse_sampling(temperature, top_p, top_k, seed)
    runs = [*compared_methods(compare, budget, profile), chosen_method(method, budget, settings or [], profile)]
    runs = with_codecs(runs, parse_codecs(codec), parse_rests(rest), parse_prefills(prefill))
    prompts = given_prompts(prompt, prompt_file, prompts_file, question, system)
    roles, spans = parse_protect(protect or [], all(each.system for each in prompts))
    texts = check_kept(show_kept, find, prompts_file, as_json)
    if store is not None and protect:
        raise InputError("--protect keeps tokens that others may not want kept, so it goes without --store")
    check_device(device)
    loaded, tokenizer = load_model(model, dtype, device)
    asked = [encode(tokenizer, each, roles, spans, parse_special) for each in prompts]
    how = Generation(
        chunk, max_new_tokens, decode, sampling, seed, kept=show_kept is not None or bool(texts), store=store
    )
    if prompts_file is not None:
        check_lengths(loaded, asked)
        for result in run_batches(loaded, tokenizer, asked, runs, batch, how):
            extra = prompts[result["index"]].extra
            row = {**result, "stats": result["stats"].to_dict(), **({"extra": extra} if extra else {})}
            print(json.dumps(row, default=str), flush=True)
        return
    results = run_methods(loaded, tokenizer, asked[0], runs, how)
    kept = [result.pop("kept", None) for result in results]
    if show_kept is not None and show_kept != "-":
        write_page(kept[-1], show_kept, texts)
    if as_json:
        for result, each in zip(results, kept, strict=True):
            result |= found_json(each, texts)
        emit_json(report(model, results))
        return
    print_answers(results, "label")
    print_stats(results, "label")
    print_found([result["label"] for result in results], kept, texts)
    if show_kept == "-":
        print_map(kept[-1])


def parse_sampling(
    temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None
) -> dict[str, Any]:
    """Options of generate: greedy unless something asks for sampling. Raises InputError."""
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise InputError(f"--temperature must be 0 (greedy) or a positive number, got {temperature:g}")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"--top-p must be a share above 0 and at most 1, got {top_p:g}")
    if top_k is not None and top_k < 1:
        raise InputError(f"--top-k must be at least 1, got {top_k}")
    if seed is not None and not 0 <= seed < 2**63:
        raise InputError(f"--seed must be a whole number from 0 to 2**63 - 1, got {seed}")
    samples = temperature != 0 and any(each is not None for each in (temperature, top_p, top_k))
    if samples:
        # Without 0 and 1 generate would take what the model's own configuration says.
        return {"do_sample": True, "temperature": temperature or 1.0, "top_p": top_p or 1.0, "top_k": top_k or 0}
    for option, value in (("--top-p", top_p), ("--top-k", top_k), ("--seed", seed)):
        if value is not None:
            raise InputError(f"{option} is for sampling, and answers are greedy here; add --temperature 1, or leave it")
    return {"do_sample": False}


def parse_protect(given: list[str], system: bool) -> tuple[list[str], list[tuple[int, int]]]:
    """Roles and token spans that --protect names. Raises InputError."""
    roles: list[str] = []
    spans: list[tuple[int, int]] = []
    for each in given:
        start, colon, end = each.partition(":")
        if colon and start.strip().isdecimal() and end.strip().isdecimal():
            spans.append((int(start), int(end)))
        elif each in ("system", "user"):
            roles.append(each)
        else:
            raise InputError(f"--protect is system, user or a span of tokens such as 0:40, got {each!r}")
    if "system" in roles and not system:
        raise InputError("--protect system needs a system prompt: give one with --system")
    return roles, spans


def report(model: str | None, results: list[dict[str, Any]]) -> dict[str, Any]:
    """JSON-ready."""
    from kvsieve.models.fetch import MODEL_NAME
    from kvsieve.report.environment import environment

    plain = [{**result, "stats": result["stats"].to_dict()} for result in results]
    return {"model": model or MODEL_NAME, "results": plain, "environment": environment()}


def print_answers(results: list[dict[str, Any]], name: str = "method") -> None:
    """name: what methods are called, "label" with their parameters."""
    for result in results:
        mark = {True: "✓ ", False: "✗ ", None: ""}[result.get("correct")]
        show(f"{mark}{result[name]}: {result['answer']}")


def print_stats(results: list[dict[str, Any]], name: str = "method") -> None:
    """One row per method, and below the table what did not go as asked."""
    # With spaces a table can break it between two parameters.
    print_table(_HEADERS, [_row(result[name].replace(":", " "), result["stats"]) for result in results])
    for result in results:
        for note in result["stats"].notes:
            show(f"note: {result[name]}: {note}")


def _row(name: str, stats: Stats) -> list[str]:
    return [
        name,
        str(stats.prompt_tokens),
        str(stats.deep_tokens),
        "all" if stats.kv_asked is None else str(stats.kv_asked),
        span(stats.kv_entries),
        _mebibytes(stats.kv_bytes),
        f"{stats.ttft_s:.2f}",
        "-" if stats.tpot_s is None else f"{1000 * stats.tpot_s:.1f}",
        "-" if stats.peak_bytes is None else f"{stats.peak_bytes / 2**20:.0f}",
        "yes" if stats.applied else "no",
    ]


def _mebibytes(count: int) -> str:
    value = count / 2**20
    return f"{value:.1f}" if value >= 0.1 else f"{value:.3f}"
