"""Tasks of public benchmarks, by name, from the user's files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvsieve.errors import InputError
from kvsieve.lab.tasks import infinitebench, leval, longbench, nolima, ruler_files
from kvsieve.lab.tasks.base import Generated
from kvsieve.lab.tasks.document_task import DocumentTask
from kvsieve.lab.tasks.haystack import text_digest
from kvsieve.lab.tasks.samples import Task
from kvsieve.lab.tasks.scbench import SUBSETS, SCBench

_LOADERS: dict[str, Callable[[str, str | Path], Task]] = {
    "leval_": leval.leval,
    "longbench_": longbench.longbench,
    "infinitebench_": infinitebench.infinitebench,
    "rulerfile_": ruler_files.ruler_file,
    "nolima": nolima.NoLiMa,
}


def is_public(name: str) -> bool:
    return name.startswith(("scbench", *_LOADERS))


def recorded(task: str, answers: Sequence[str]) -> list[str]:
    """Return right answers for results: for a public benchmark as a digest, so that its data is not published."""
    if not is_public(task):
        return list(answers)
    return [hashlib.sha256(json.dumps(list(answers)).encode()).hexdigest()[:16]]


def public_task(name: str, data: str | Path | None, scbench_mode: str = "multi-turn") -> Task:
    """Return a public benchmark's task with its file read and checked.

    Args:
        name: as on the command line, for example "leval_quality".
        data: its file, or a directory that contains it; None for SCBench from the hub.
        scbench_mode: "multi-turn" or "shared".

    Raises:
        InputError: a missing file, or one in another format.
    """
    if name.startswith("scbench"):
        return SCBench(name, data, scbench_mode)
    if data is None:
        raise InputError(f"{name} is read from a file: give its directory as --data, see docs/evaluation.md")
    return next(reader for prefix, reader in _LOADERS.items() if name.startswith(prefix))(name, data)


def data_digests(tasks: Iterable[Task]) -> dict[str, str]:
    """Return by task a digest of its files, or of its haystack's text."""
    found = {}
    for task in tasks:
        if isinstance(task, Generated):
            found[task.name] = text_digest(task.text)
        if isinstance(task, DocumentTask | nolima.NoLiMa | SCBench) and task.files:
            digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in task.files]
            found[task.name] = hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
    return found


def public_tasks() -> list[tuple[str, str]]:
    files = {
        "L-Eval": leval.NAMES,
        "LongBench": longbench.NAMES,
        "InfiniteBench": infinitebench.NAMES,
        "RULER's own files": ruler_files.NAMES,
        "NoLiMa": nolima.NAMES,
    }
    rows = [(name, f"{benchmark}, from --data") for benchmark, names in files.items() for name in names]
    return rows + [(name, "SCBench, from the hub or --data") for name in SUBSETS]
