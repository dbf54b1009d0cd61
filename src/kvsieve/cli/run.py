"""`kvsieve run`: prompts, one or more methods, what each answered and what it cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsieve.cli.output import JsonOption, emit_json, prefill_progress, print_table, show
from kvsieve.cli.prompts import Prompt, given_prompts
from kvsieve.cli.specs import MethodRun, chosen_method, compared_methods
from kvsieve.errors import InputError, PlanError

if TYPE_CHECKING:
    from torch import Tensor

    from kvsieve.hf.generate.generate import Stats

DTYPES = ("bfloat16", "float16", "float32", "auto")
DtypeOption = Annotated[str, typer.Option(help=f"Of the weights: {', '.join(DTYPES)}.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; the best there is if left out.")]
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
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="File with the prompt; - reads stdin.")] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(help='File with a prompt per line, as text or as JSON like {"prompt": "..."}; - reads stdin.'),
    ] = None,
    question: Annotated[str | None, typer.Option(help="Put after the prompt and a blank line.")] = None,
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
    temperature: Annotated[
        float | None, typer.Option(help="Sample tokens, the more evenly the higher it is; greedy if left out, or 0.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this total share.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from so many of the likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling: the same one gives the same answers.")] = None,
    batch: Annotated[int, typer.Option(help="Prompts of --prompts-file that are answered together.")] = 8,
    chunk: Annotated[int, typer.Option(help="Prompt tokens per forward pass.")] = 1024,
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = None,
    decode: DecodeOption = "auto",
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
    prompts = given_prompts(prompt, prompt_file, prompts_file, question, system)
    roles, spans = parse_protect(protect or [], all(each.system for each in prompts))
    check_device(device)
    loaded, tokenizer = load_model(model, dtype, device)
    asked = [encode(tokenizer, each, roles, spans, parse_special) for each in prompts]
    how = {"chunk": chunk, "max_new_tokens": max_new_tokens, "decode": decode, "sampling": sampling, "seed": seed}
    if prompts_file is not None:
        check_lengths(loaded, asked)
        for result in run_batches(loaded, tokenizer, asked, runs, batch, **how):
            extra = prompts[result["index"]].extra
            row = {**result, "stats": result["stats"].to_dict(), **({"extra": extra} if extra else {})}
            print(json.dumps(row, default=str), flush=True)
        return
    results = run_methods(loaded, tokenizer, asked[0], runs, **how)
    if as_json:
        emit_json(report(model, results))
        return
    print_answers(results, "label")
    print_stats(results, "label")


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


def check_loading(dtype: str, decode: str) -> None:
    """Raises PlanError for a --dtype or --decode that there is not."""
    from kvsieve.hf.decode.engine import ENGINES

    for option, value, known in (("--dtype", dtype, DTYPES), ("--decode", decode, ENGINES)):
        if value not in known:
            raise PlanError(f"{option} must be one of {', '.join(known)}, got {value!r}")


def check_device(name: str | None) -> None:
    """Raises InputError."""
    import torch

    if name is None:
        return
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise InputError(f"--device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error


def load_model(name: str | None, dtype: str, device: str | None = None) -> tuple[Any, Any]:
    """The model, on the best device if none is named, and its tokenizer, without transformers' own messages."""
    import torch
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    import kvsieve

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not sys.stderr.isatty():
        disable_progress_bars()
    return kvsieve.models.load(name, dtype="auto" if dtype == "auto" else getattr(torch, dtype), device=device)


@dataclass(frozen=True)
class Asked:
    """A prompt as tokens. ids: int64 [1, N]. protect: spans of tokens that no method may evict."""

    ids: Tensor
    protect: list[tuple[int, int]]


def encode(
    tokenizer: Any,
    prompt: Prompt,
    roles: Sequence[str] = (),
    spans: Sequence[tuple[int, int]] = (),
    parse_special: bool = False,
) -> Asked:
    """A prompt through the chat template where there is one; with roles, the spans of their messages are protected.

    Control tokens that the prompt spells are text, unless parse_special. Raises InputError.
    """
    import torch

    from kvsieve.segments import role_spans
    from kvsieve.turns import plain_ids, render, token_ids

    protect = [*spans]
    if roles:
        protect += role_spans(tokenizer, prompt.messages, roles, parse_special=parse_special)[1]
    if getattr(tokenizer, "chat_template", None):
        ids = token_ids(tokenizer, render(tokenizer, prompt.messages, parse_special=parse_special))
    else:
        plain = f"{prompt.system}\n\n{prompt.text}" if prompt.system else prompt.text
        ids = plain_ids(tokenizer, plain, parse_special)
    return Asked(torch.tensor([ids], dtype=torch.int64), protect)


def check_lengths(model: Any, asked: Sequence[Asked]) -> None:
    """Raises InputError where a prompt of many is longer than the context: none of them is answered then."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max(range(len(asked)), key=lambda index: asked[index].ids.shape[1])
    if context is not None and asked[longest].ids.shape[1] > context:
        raise InputError(
            f"prompt {longest} (counted from 0) has {asked[longest].ids.shape[1]} tokens, the model's context ends at "
            f"{context}; shorten it or leave it out"
        )


def run_methods(model: Any, tokenizer: Any, asked: Asked, runs: list[MethodRun], **how: Any) -> list[dict[str, Any]]:
    """Answers under each method, in order: ``{"method", "label", "parameters", "answer", "stats"}``.

    how: see `run_batches`, which says what is raised.
    """
    results = list(run_batches(model, tokenizer, [asked], runs, 1, warm=True, **how))
    return [{name: part for name, part in each.items() if name != "index"} for each in results]


def run_batches(
    model: Any,
    tokenizer: Any,
    asked: Sequence[Asked],
    runs: list[MethodRun],
    batch: int,
    *,
    chunk: int,
    max_new_tokens: int,
    decode: str = "auto",
    sampling: dict[str, Any] | None = None,
    seed: int | None = None,
    warm: bool = False,
) -> Iterator[dict[str, Any]]:
    """Answers, method by method and `batch` prompts at a time: ``{"index", "method", "label", "parameters", "answer",
    "stats"}``, the statistics those of the batch.

    sampling: options of generate, greedy if left out; seed: set before each method. decode: see `kvsieve.attach`.
    warm: for times that are compared, read a few tokens first.

    Raises UnsupportedModelError or PlanError, before anything runs, when the model cannot run one of them.
    """
    import torch

    import kvsieve
    from kvsieve.hf.model.support import check_model

    runs = [each.for_model(model, tokenizer) for each in runs]
    for each in runs:
        check_model(model, each.plan)
    if warm:
        _warm_up(model, asked[0].ids)
    options = {"chunk": chunk, "max_new_tokens": max_new_tokens, **(sampling or {"do_sample": False})}
    for run in runs:
        if seed is not None:
            torch.manual_seed(seed)
        with kvsieve.attach(model, run.plan.for_tokenizer(tokenizer), decode=decode) as sieve:
            for first in range(0, len(asked), batch):
                rows = asked[first : first + batch]
                told = f", prompts {first} to {first + len(rows) - 1} of {len(asked)}" if len(asked) > 1 else ""
                with prefill_progress(f"{run.label}{told}") as progress:
                    answers, stats = _answer(sieve, tokenizer, rows, progress=progress, **options)
                facts = {"method": run.name, "label": run.label, "parameters": run.parameters}
                for index, answer in enumerate(answers, first):
                    yield {"index": index, **facts, "answer": answer, "stats": stats}


def _warm_up(model: Any, prompt: Tensor) -> None:
    """Without this the first method's time would include what a process does only once."""
    import kvsieve

    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        ids = prompt[:, :_WARM_UP_TOKENS].to(model.device)
        sieve.generate(ids, ids.new_ones(ids.shape), max_new_tokens=2, do_sample=False)


def _answer(sieve: Any, tokenizer: Any, rows: Sequence[Asked], **options: Any) -> tuple[list[str], Stats]:
    """Answers to prompts that are padded on the left to one batch."""
    from kvsieve.turns import stop_ids

    longest = max(each.ids.shape[1] for each in rows)
    filler = tokenizer.pad_token_id or 0
    ids = rows[0].ids.new_full((len(rows), longest), filler)
    # A pad token in a prompt's text is no padding.
    mask = ids.new_zeros(ids.shape)
    for row, each in enumerate(rows):
        ids[row, longest - each.ids.shape[1] :] = each.ids[0]
        mask[row, longest - each.ids.shape[1] :] = 1
    ids, mask = ids.to(sieve.model.device), mask.to(sieve.model.device)
    ends, answers = stop_ids(tokenizer, sieve.model.generation_config.eos_token_id), []
    options |= {"eos_token_id": sorted(ends) or None, "pad_token_id": filler}
    result = sieve.generate(ids, mask, protect=[each.protect for each in rows], **options)
    for made in result.sequences[:, longest:].tolist():
        # Rows that ended earlier are filled up.
        end = next((at for at, token in enumerate(made) if token in ends), len(made))
        answers.append(tokenizer.decode(made[:end], skip_special_tokens=True).strip())
    return answers, result.stats


def report(model: str | None, results: list[dict[str, Any]]) -> dict[str, Any]:
    """JSON-ready."""
    from kvsieve.models.fetch import MODEL_NAME
    from kvsieve.report.environment import environment

    plain = [{**result, "stats": result["stats"].to_dict()} for result in results]
    return {"model": model or MODEL_NAME, "results": plain, "environment": environment()}


def print_answers(results: list[dict[str, Any]], name: str = "method") -> None:
    """name: what methods are called, "label" with their parameters."""
    for result in results:
        mark = {True: "✓ ", False: "✗ "}.get(result.get("correct"), "")
        show(f"{mark}{result[name]}: {result['answer']}")


def print_stats(results: list[dict[str, Any]], name: str = "method") -> None:
    """One row per method, and below the table what did not go as asked."""
    # With spaces a table can break it between two parameters.
    print_table(_HEADERS, [_row(result[name].replace(":", " "), result["stats"]) for result in results])
    for result in results:
        for note in result["stats"].notes:
            show(f"note: {result[name]}: {note}")


def _row(name: str, stats: Stats) -> list[str]:
    least, most = min(stats.kv_entries), max(stats.kv_entries)
    return [
        name,
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
