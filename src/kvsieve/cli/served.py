"""`kvsieve eval --server` and `kvsieve bench --server`: scores and times of a server's model over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsieve.cli.loading import check_least
from kvsieve.cli.options import SERVER, option, refuse_unused
from kvsieve.cli.output import NARROW, WIDE, check_writable, emit_json, print_table, progress_bar, say, show
from kvsieve.errors import InputError
from kvsieve.folders import write_whole
from kvsieve.lab.client import parse_extra

if TYPE_CHECKING:
    from kvsieve.lab.client import ServerClient
    from kvsieve.lab.eval.grid import Grid

ServerOption = Annotated[
    str | None,
    option(
        SERVER,
        "URL of an OpenAI-compatible server to measure, key in OPENAI_API_KEY; MODEL is its tokenizer (default: none)",
    ),
]
ExtraOption = Annotated[
    str | None,
    option(SERVER, 'Extra request fields for --server: {"kv": {"method": "snapkv"}} (default: none)'),
]


def check_options(context: typer.Context, server: str | None, allowed: Sequence[str]) -> None:
    """Raise InputError for a given option that does not apply to a server, or without one.

    allowed: options that apply to a server, besides those of both commands.
    """
    if server is None:
        refuse_unused(context, context.params.keys() - {"clients", "extra"}, "only with --server")
        return
    refuse_unused(
        context,
        {*allowed, "server", "clients", "extra", "model", "out", "wide", "as_json"},
        "not with --server, which reads and answers as it was started; give what it takes per request as --extra",
    )
    if not re.match(r"https?://[^/\s]", server):
        raise InputError(f"--server is a URL such as http://127.0.0.1:8000, got {server!r}")
    _numbers("--clients", context.params["clients"])
    parse_extra(context.params["extra"])


def opened(server: str, extra: str | None, model: str | None) -> tuple[ServerClient, Any, str]:
    from kvsieve.lab.client import ServerClient, check_tokenizer_of
    from kvsieve.models import load_tokenizer
    from kvsieve.models.fetch import MODEL_NAME
    from kvsieve.planning.turns import plain_ids

    client = ServerClient(server, extra=parse_extra(extra))
    tokenizer = load_tokenizer(model)
    name = model or MODEL_NAME
    text = " ".join(f"Item {number} costs {number * 37} crowns." for number in range(20))
    check_tokenizer_of(client, plain_ids(tokenizer, text), text, name)
    say(f"{client.url} has {client.model}; tokens are those of {name}")
    return client, tokenizer, name


@dataclass(frozen=True)
class Load:
    """Load on a server: tokens per prompt, concurrent requests as a list in text, tokens and rounds of answers."""

    lengths: list[int]
    clients: str
    new_tokens: int
    rounds: int


def bench_server(server: str, model: str | None, extra: str | None, load: Load, out: Path | None) -> dict[str, Any]:
    """Measure a server; return the JSON-ready report, written to `out` after every number of clients."""
    check_least(2, new_tokens=load.new_tokens)
    check_least(1, rounds=load.rounds)
    check_writable("--out", out)
    counts = _numbers("--clients", load.clients)

    from kvsieve.lab.bench.load import LoadTest, load_test
    from kvsieve.lab.bench.prompts import text_ids
    from kvsieve.report.environment import environment

    client, tokenizer, name = opened(server, extra, model)
    test = LoadTest(client, text_ids(tokenizer), load.new_tokens)
    report = {
        "environment": environment(),
        "server": client.url,
        "server_model": client.model,
        "tokenizer": name,
        "extra": client.extra,
        "new_tokens": load.new_tokens,
        "rounds": load.rounds,
        "start": test.start,
        "lengths": {},
        "notes": test.notes,
    }
    for found in load_test(test, load.lengths, counts, load.rounds, say):
        report["lengths"] = found
        if out is not None:
            _save(report, out)
    return report


def print_load(report: dict[str, Any], as_json: bool, wide: bool = False) -> None:
    """Print a report of `bench_server`: as JSON, or as a table of six columns or all."""
    if as_json:
        emit_json(report)
        return
    headers = ["prompt", "clients", "TTFT s", "TPOT ms", "tokens/s", "again: TTFT s", "of these cached"]
    headers += ["TTFT p95", "TPOT p95"]
    rows = []
    for length, cells in report["lengths"].items():
        for cell in cells:
            ttft = cell["ttft_s"]
            tpot = cell["tpot_s"] or {}
            again = cell.get("again") or {}
            found = again.get("cached_tokens")
            rows.append(
                [
                    length,
                    str(cell["clients"]),
                    f"{ttft['median']:.3f}",
                    f"{tpot['median'] * 1000:.1f}" if tpot else "",
                    f"{cell['tokens_per_s']:.1f}",
                    f"{again['ttft_s']['median']:.3f}" if again else "",
                    "" if found is None else f"{found:.0f}",
                    f"{ttft['p95']:.3f}",
                    f"{tpot['p95'] * 1000:.1f}" if tpot else "",
                ]
            )
    show(f"{report['server_model']} at {report['server']}, {report['new_tokens']} new tokens")
    shown = len(headers) if wide else 6
    print_table(headers[:shown], [row[:shown] for row in rows], width=WIDE if wide else NARROW)
    for note in report["notes"]:
        say(f"note: {note}")


def eval_server(
    grid: Grid, server: str, model: str | None, extra: str | None, clients: str, out: Path, resume: bool, haystack: str
) -> dict[str, Any]:
    if grid.questions != ("visible",):
        raise InputError("--question: a server reads a prompt in one piece, so a question is asked visibly only")
    from kvsieve.lab.eval.served import LEFT_OUT, score_server
    from kvsieve.lab.tasks.public import data_digests
    from kvsieve.report.environment import environment

    counts = _numbers("--clients", clients)
    if len(counts) > 1:
        raise InputError(f"--clients of eval is one number of requests at once, got {clients!r}; name one")
    count = counts[0]
    client, tokenizer, name = opened(server, extra, model)
    say(f"note: {LEFT_OUT}")
    run = {
        "environment": environment(),
        "server": client.url,
        "server_model": client.model,
        "tokenizer": name,
        "extra": client.extra,
        "seed": grid.seed,
        "haystack": haystack,
        "tasks": {task.name: task.title for task in grid.tasks},
        "data": data_digests(grid.tasks),
    }
    with progress_bar() as progress:
        return score_server(grid, client, tokenizer, out, run, clients=count, resume=resume, progress=progress)


def print_scores(report: dict[str, Any], out: Path, as_json: bool) -> None:
    if as_json:
        emit_json({"run": report["run"], "left_out": report["left_out"], "means": report["means"]})
        return
    headers = ["task", "tokens", "samples", "score", "±"]
    rows = [
        [
            mean["task"],
            str(mean["length"]),
            str(mean["samples"]),
            f"{100 * mean['score']:.1f}",
            f"{50 * (mean['high'] - mean['low']):.1f}",
        ]
        for mean in report["means"]
    ]
    print_table(headers, rows)
    show(f"answers are in {out / 'server.json'}")


def _save(report: dict[str, Any], out: Path) -> None:
    try:
        write_whole(out, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"--out {str(out)!r} cannot be written: {error.strerror}") from error


def _numbers(option: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise InputError(f"{option} is a number of requests at once, or a list such as 1,8; got {text!r}")
    return found
