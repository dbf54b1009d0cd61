"""`kvsieve run`: one prompt, one or more methods, what each answered and what it cost."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsieve.cli.output import JsonOption, emit_json, prefill_progress, print_table, show
from kvsieve.cli.specs import MethodRun, chosen_method, compared_methods
from kvsieve.errors import InputError, PlanError

if TYPE_CHECKING:
    from torch import Tensor

    from kvsieve.hf.generate import Stats

DTYPES = ("bfloat16", "float16", "float32", "auto")
DtypeOption = Annotated[str, typer.Option(help=f"Of the weights: {', '.join(DTYPES)}.")]
DecodeOption = Annotated[
    str, typer.Option(help="How tokens are generated: auto (graph on CUDA, else eager), eager, packed, graph, compile.")
]
_WARM_UP_TOKENS = 16
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
        str | None, typer.Argument(help="Hub id or directory of a checkpoint; the demo model if left out.")
    ] = None,
    prompt_file: Annotated[str, typer.Option("--prompt-file", help="File with the prompt; - reads stdin.")] = ...,  # type: ignore[assignment]
    question: Annotated[str | None, typer.Option(help="Put after the file's text and a blank line.")] = None,
    method: Annotated[str, typer.Option(help="See `kvsieve methods`.")] = "fastkv",
    budget: Annotated[str | None, typer.Option(help="Entries kept per layer and KV head: 20% or 2048.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the method; repeatable.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Parameters that `kvsieve calibrate` found: a file, or a shipped profile's name.")
    ] = None,
    compare: Annotated[
        str, typer.Option(help="Methods to run before it: full,snapkv or snapkv:kernel=21:window=16,full.")
    ] = "",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    protect: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE|A:B", help="Never evict: system, user, or tokens A to B of the prompt; repeatable."),
    ] = None,
    parse_special: Annotated[
        bool, typer.Option("--parse-special", help="Control tokens written in the prompt are no text.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 64,
    chunk: Annotated[int, typer.Option(help="Prompt tokens per forward pass.")] = 1024,
    dtype: DtypeOption = "bfloat16",
    decode: DecodeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt under a method, and compare it with others."""
    # Everything that can be wrong with the input is looked at before the model is loaded, which takes a while.
    check_loading(dtype, decode)
    for option, value in (("--max-new-tokens", max_new_tokens), ("--chunk", chunk)):
        if value < 1:
            raise InputError(f"{option} must be at least 1, got {value}")
    runs = [*compared_methods(compare, budget, profile), chosen_method(method, budget, settings or [], profile)]
    roles, spans = parse_protect(protect or [], system)
    text = read_prompt(prompt_file, question)
    loaded, tokenizer = load_model(model, dtype)
    prompt = encode(tokenizer, text, system, parse_special)
    if roles:
        from kvsieve.segments import role_spans

        spans += role_spans(tokenizer, messages_of(text, system), roles, parse_special=parse_special)[1]
    results = run_methods(loaded, tokenizer, prompt, runs, chunk, max_new_tokens, spans, decode)
    if as_json:
        emit_json(report(model, results))
        return
    print_answers(results)
    print_stats(results)


def read_prompt(name: str, question: str | None) -> str:
    """The file's text and the question. Raises InputError for a file that cannot be read or holds nothing."""
    try:
        text = sys.stdin.read() if name == "-" else Path(os.path.expanduser(name)).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read the prompt file {name!r}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt file {name!r} is not UTF-8 text (byte {error.start})") from error
    if not text.strip():
        raise InputError(f"the prompt is empty: {'stdin' if name == '-' else repr(name)} has no text; write some there")
    return f"{text.rstrip()}\n\n{question}" if question else text


def parse_protect(given: list[str], system: str | None) -> tuple[list[str], list[tuple[int, int]]]:
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


def check_loading(dtype: str, decode: str) -> None:
    """Raises PlanError for a --dtype or --decode that there is not."""
    from kvsieve.hf.fixed import ENGINES

    for option, value, known in (("--dtype", dtype, DTYPES), ("--decode", decode, ENGINES)):
        if value not in known:
            raise PlanError(f"{option} must be one of {', '.join(known)}, got {value!r}")


def load_model(name: str | None, dtype: str) -> tuple[Any, Any]:
    """The model on the best device and its tokenizer, without transformers' own messages."""
    import torch
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    import kvsieve

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not sys.stderr.isatty():
        disable_progress_bars()
    return kvsieve.models.load(name, dtype="auto" if dtype == "auto" else getattr(torch, dtype))


def encode(tokenizer: Any, text: str, system: str | None = None, parse_special: bool = False) -> Tensor:
    """Token ids [1, N] of the prompt, through the chat template where there is one.

    Control tokens that the prompt spells are text, unless parse_special. Raises InputError.
    """
    import torch

    from kvsieve.turns import plain_ids, render, token_ids

    if getattr(tokenizer, "chat_template", None):
        rendered = render(tokenizer, messages_of(text, system), parse_special=parse_special)
        ids = token_ids(tokenizer, rendered)
    else:
        ids = plain_ids(tokenizer, f"{system}\n\n{text}" if system else text, parse_special)
    return torch.tensor([ids], dtype=torch.int64)


def messages_of(text: str, system: str | None) -> list[dict[str, str]]:
    """The prompt as a chat."""
    user = {"role": "user", "content": text}
    return [{"role": "system", "content": system}, user] if system else [user]


def run_methods(
    model: Any,
    tokenizer: Any,
    prompt: Tensor,
    runs: list[MethodRun],
    chunk: int,
    max_new_tokens: int,
    protect: Sequence[tuple[int, int]] = (),
    decode: str = "auto",
) -> list[dict[str, Any]]:
    """Greedy answers under each method, in order: ``{"method", "parameters", "answer", "stats"}``.

    protect: spans of tokens that no method may evict. decode: see `kvsieve.attach`.

    Raises UnsupportedModelError or PlanError, before anything runs, when the model cannot run one of them.
    """
    from kvsieve.hf.probe import check_model

    for each in runs:
        check_model(model, each.plan)
    _warm_up(model, prompt)
    return [_run_one(model, tokenizer, prompt, each, chunk, max_new_tokens, protect, decode) for each in runs]


def _warm_up(model: Any, prompt: Tensor) -> None:
    """Without this the first method's time would include what a process does only once."""
    import kvsieve

    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        ids = prompt[:, :_WARM_UP_TOKENS].to(model.device)
        sieve.generate(ids, ids.new_ones(ids.shape), max_new_tokens=2, do_sample=False)


def _run_one(
    model: Any,
    tokenizer: Any,
    prompt: Tensor,
    run: MethodRun,
    chunk: int,
    max_new_tokens: int,
    protect: Sequence[tuple[int, int]],
    decode: str,
) -> dict[str, Any]:
    import kvsieve

    ids = prompt.to(model.device)
    plan = run.plan.for_tokenizer(tokenizer)
    with kvsieve.attach(model, plan, decode=decode) as sieve, prefill_progress(run.name) as progress:
        # The mask is given because a pad token in the prompt's text is no padding.
        result = sieve.generate(
            ids,
            ids.new_ones(ids.shape),
            chunk=chunk,
            progress=progress,
            protect=protect,
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    answer = tokenizer.decode(result.sequences[0, ids.shape[1] :], skip_special_tokens=True).strip()
    return {"method": run.name, "parameters": run.parameters, "answer": answer, "stats": result.stats}


def report(model: str | None, results: list[dict[str, Any]]) -> dict[str, Any]:
    """JSON-ready."""
    from kvsieve.bench.environment import environment
    from kvsieve.models.fetch import MODEL_NAME

    plain = [{**result, "stats": result["stats"].to_dict()} for result in results]
    return {"model": model or MODEL_NAME, "results": plain, "environment": environment()}


def print_answers(results: list[dict[str, Any]]) -> None:
    for result in results:
        mark = {True: "✓ ", False: "✗ "}.get(result.get("correct"), "")
        show(f"{mark}{result['method']}: {result['answer']}")


def print_stats(results: list[dict[str, Any]]) -> None:
    """One row per method, and below the table what did not go as asked."""
    print_table(_HEADERS, [_row(result["stats"]) for result in results])
    for result in results:
        for note in result["stats"].notes:
            show(f"note: {result['method']}: {note}")


def _row(stats: Stats) -> list[str]:
    least, most = min(stats.kv_entries), max(stats.kv_entries)
    return [
        stats.method,
        str(stats.prompt_tokens),
        str(stats.deep_tokens),
        "all" if stats.kv_asked is None else str(stats.kv_asked),
        str(most) if least == most else f"{least}–{most}",
        _mebibytes(stats.kv_bytes),
        f"{stats.ttft_s:.2f}",
        "-" if stats.tpot_s is None else f"{1000 * stats.tpot_s:.1f}",
        "-" if stats.peak_bytes is None else f"{stats.peak_bytes / 2**20:.0f}",
        "yes" if stats.applied else "no",
    ]


def _mebibytes(count: int) -> str:
    value = count / 2**20
    return f"{value:.1f}" if value >= 0.1 else f"{value:.3f}"
