"""Merge of results directories: a subject per model, machine or run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsieve.errors import InputError
from kvsieve.lab.eval.results import Results
from kvsieve.lab.eval.rows import SAMPLE_KEY, Row
from kvsieve.lab.eval.texts import texts_of
from kvsieve.report.labels import distinct

# Facts that must be equal for samples of two directories to be the same.
_RUN = ("dtype", "seed", "haystack")
_OUTCOME = ("score", "answers", "kv_entries")


@dataclass(frozen=True)
class Subject:
    """Results of one model under one set of conditions.

    Attributes:
        name: the model's, and the difference to other subjects of the same model.
        model: the model's name without the path or the hub's user.
        machine: accelerator or processor of its rows.
        results: rows of all its directories, with renumbered environments.
        folders: the directories.
    """

    name: str
    model: str
    machine: str
    results: Results
    folders: tuple[Path, ...]


def subjects(directories: Sequence[Results]) -> list[Subject]:
    """Merge directories of the same model, dtype, seed, haystack and machine, and name the resulting subjects.

    Raises InputError if merged directories contradict each other: different text or sample under one number, a sample
    with two outcomes, a label with two sets of parameters.
    """
    if not directories:
        raise InputError("no results directory is given; name at least one")
    apart: dict[tuple[Any, ...], list[Results]] = {}
    for directory in directories:
        apart.setdefault(_identity(directory), []).append(directory)
    return [_subject(_name(identity, list(apart)), identity, parts) for identity, parts in apart.items()]


def _identity(results: Results) -> tuple[Any, ...]:
    model = Path(str(results.run["model"]).rstrip("/")).name
    return model, machine_of(results), *(results.run[name] for name in _RUN)


def machine_of(results: Results) -> str:
    """Return the accelerators or processors of a directory's rows."""
    environments = results.run["environments"]
    used = {row.get("env") for row in [*results.samples, *results.costs]}
    stamps = [stamp for number, stamp in enumerate(environments) if number in used] or environments
    names = (stamp.get("processor") if stamp.get("device") in (None, "cpu") else stamp["device"] for stamp in stamps)
    return ", ".join(distinct(str(name or "unknown machine") for name in names)) or "unknown machine"


def _name(identity: tuple[Any, ...], others: Sequence[tuple[Any, ...]]) -> str:
    """Return the model, and the conditions in which its subjects differ."""
    same = [other for other in others if other[0] == identity[0]]
    parts = []
    for place, what in enumerate(("", *_RUN), 1):
        if len({other[place] for other in same}) > 1:
            parts.append(f"{what} {identity[place]}".strip())
    return ", ".join([identity[0], *parts])


def _subject(name: str, identity: tuple[Any, ...], parts: Sequence[Results]) -> Subject:
    folders = tuple(part.folder for part in parts)
    return Subject(name, identity[0], identity[1], parts[0] if len(parts) == 1 else _merged(parts), folders)


def _merged(parts: Sequence[Results]) -> Results:
    settings = _settings(parts)
    samples: dict[tuple[Any, ...], Row] = {}
    origin: dict[tuple[Any, ...], Path] = {}
    questions: dict[tuple[Any, ...], tuple[Any, Path]] = {}
    costs: list[Row] = []
    environments: list[Row] = []
    texts: dict[str, str] = {}
    for part in parts:
        _check_texts(texts, parts[0], part)
        before = len(environments)
        environments += part.run["environments"]
        for row in part.samples:
            key = tuple(row[name] for name in SAMPLE_KEY)
            question = questions.setdefault(key[:4], (row.get("expected"), part.folder))
            if question[0] != row.get("expected"):
                raise _contradiction(row, "another question", question[1], part.folder)
            known = samples.setdefault(key, _moved(row, before))
            if any(known.get(name) != row.get(name) for name in _OUTCOME):
                raise _contradiction(row, f"another outcome under {row['label']!r}", origin[key], part.folder)
            origin.setdefault(key, part.folder)
        costs += [_moved(row, before) for row in part.costs]
    run = {**parts[0].run, "environments": environments, "seconds": sum(part.run["seconds"] for part in parts),
           "tasks": {name: title for part in reversed(parts) for name, title in part.run["tasks"].items()},
           "settings": settings, "data": texts}  # fmt: skip
    # A copy of a directory repeats the same measured times.
    measured = {repr({**row, "env": environments[row["env"]]}): row for row in reversed(costs)}
    return Results(parts[0].folder, run, list(samples.values()), list(measured.values())[::-1])


def _moved(row: Row, before: int) -> Row:
    return {**row, "env": row["env"] + before} if isinstance(row.get("env"), int) else row


def _check_texts(texts: dict[str, str], first: Results, part: Results) -> None:
    """Add a directory's digests to those by task. Raises InputError for a task with a different text."""
    for task, digest in texts_of(part.run).items():
        if texts.setdefault(task, digest) != digest:
            raise InputError(
                f"'{first.folder}' and '{part.folder}' contradict each other: {task} is on another text in the second "
                f"({digest}) than before ({texts[task]}); give one of them, or evaluate one of them anew"
            )


def _contradiction(row: Row, what: str, first: Path, second: Path) -> InputError:
    return InputError(
        f"'{first}' and '{second}' contradict each other: sample {row['sample']} of {row['task']} at {row['length']} "
        f"tokens, question {row['question']}, has {what} in the second; give one of them, or evaluate one of them anew"
    )


def _settings(parts: Sequence[Results]) -> list[Row]:
    """Return the settings of all. Raises InputError for a label with different parameters in another directory."""
    known: dict[tuple[str, str | None], tuple[Row, Path]] = {}
    for part in parts:
        for row in part.run.get("settings", []):
            first, folder = known.setdefault((row["label"], row["budget"]), (row, part.folder))
            before = first["parameters"]
            after = row["parameters"]
            for name in before.keys() & after.keys():
                if before[name] != after[name]:
                    raise InputError(
                        f"'{folder}' and '{part.folder}' contradict each other: {row['label']!r} at {row['budget']} "
                        f"has {name} {before[name]!r} in the first and {after[name]!r} in the second; give one of them"
                    )
    return [row for row, _ in known.values()]
