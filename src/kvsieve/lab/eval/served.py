"""Scores of a server on the tasks: the same prompts, token for token, and scoring as in `kvsieve eval`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from kvsieve.errors import InputError
from kvsieve.folders import write_whole
from kvsieve.lab.client import ServerClient
from kvsieve.lab.eval.aggregate import score_interval
from kvsieve.lab.eval.grid import Grid, Unit
from kvsieve.lab.eval.rows import Row, document, groups
from kvsieve.lab.eval.texts import other_text
from kvsieve.lab.tasks.prompter import Prompter
from kvsieve.lab.tasks.public import recorded
from kvsieve.lab.tasks.samples import Sample

FILE = "server.json"
LEFT_OUT = "a server tells no logits of all words and no KV entries: KL, agreement with full KV and costs are left out"


def score_server(
    grid: Grid,
    client: ServerClient,
    tokenizer: Any,
    folder: Path,
    run: Mapping[str, Any],
    *,
    clients: int = 1,
    resume: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Request a server's answers to a grid's samples, and write them with their scores to a folder.

    Args:
        grid: with visible questions; its settings are ignored.
        client: of the server.
        tokenizer: of the server's model.
        folder: directory of server.json, written after every few samples.
        run: further facts of the run.
        clients: concurrent requests.
        resume: continue the folder's results.
        progress: called with (samples done, all samples, next sample).

    Returns:
        The contents of server.json: `run`, `rows`, `means`.

    Raises:
        InputError: a folder with other results, or with results and no `resume`.
        ServerError: the server refuses, or disconnects; finished rows stay.
    """
    file = folder / FILE
    prompter = Prompter(tokenizer)
    rows = _known(file, run, resume)
    done = {(row["task"], row["length"], row["sample"]) for row in rows}
    units = list(grid.units())
    todo = [unit for unit in units if (unit.task.name, unit.length, unit.index) not in done]
    report = {"run": dict(run), "left_out": LEFT_OUT, "rows": rows, "means": means(rows)}

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(clients) as pool:
        for start in range(0, len(todo), clients):
            some = todo[start : start + clients]
            if progress is not None:
                progress(len(rows), len(units), str(some[0]))
            samples = [unit.task.sample(unit.index, unit.length, grid.seed, prompter.count) for unit in some]
            # Tokenizers are used by one thread at a time.
            prompts = [_prompts(prompter, sample) for sample in samples]
            rows.extend(pool.map(partial(_row, client), some, samples, prompts))
            report["means"] = means(rows)
            write_whole(file, json.dumps(report, ensure_ascii=True, indent=1) + "\n")
    if progress is not None:
        progress(len(units), len(units), "done")
    return report


def _prompts(prompter: Prompter, sample: Sample) -> list[list[int]]:
    """Return token ids of the conversation up to each answer, with the expected earlier answers."""
    encoded = prompter.encode(sample)
    out: list[list[int]] = [encoded.prompt[0].tolist()]
    for more in encoded.followups:
        out.append(out[-1] + more[0].tolist())
    return out


def _row(client: ServerClient, unit: Unit, sample: Sample, prompts: Sequence[list[int]]) -> dict[str, Any]:
    turns = list(zip(sample.turns, prompts, strict=True))
    answers = [client.complete(ids, turn.max_new_tokens).text.strip() for turn, ids in turns]
    scores = [turn.score(answer, turn.answers) for turn, answer in zip(sample.turns, answers, strict=True)]
    metrics = {name: statistics.fmean(score[name] for score in scores) for name in scores[0]}
    return {
        "task": unit.task.name,
        "length": unit.length,
        "sample": unit.index,
        "score": metrics["score"],
        "metrics": metrics,
        "answers": answers,
        "expected": [recorded(unit.task.name, turn.answers) for turn in sample.turns],
        "prompt_tokens": len(prompts[0]),
        "meta": dict(sample.meta),
    }


def means(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the mean score of each task at each length, with its 95% interval."""
    return [_mean(task, length, group) for (task, length), group in groups(rows, ("task", "length")).items()]


def _mean(task: str, length: int, rows: Sequence[Row]) -> Row:
    scores = [row["score"] for row in rows]
    low, high = score_interval(scores, [document(row) for row in rows])
    numbers = {"score": round(statistics.fmean(scores), 4), "low": round(low, 4), "high": round(high, 4)}
    return {"task": task, "length": length, "samples": len(scores), **numbers}


def _known(file: Path, run: Mapping[str, Any], resume: bool) -> list[dict[str, Any]]:
    """Return the folder's existing rows."""
    if not file.exists():
        return []
    if not resume:
        raise InputError(f"{file} is there already; go on with --resume, or name another --out")
    try:
        found = json.loads(file.read_text())
        before = found["run"]
        rows = list(found["rows"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{file} cannot be read: {error}; name another --out") from error
    other = other_text({**before, "environments": [before.get("environment", {})]}, run)
    if other is not None:
        raise InputError(f"{file} has {other}; give the same text, or name another --out")
    for name in ("server_model", "tokenizer", "seed", "haystack", "extra"):
        if before.get(name) != run.get(name):
            raise InputError(
                f"{file} is of {name} {before.get(name)!r}, this run is of {run.get(name)!r}; name another --out"
            )
    return rows
