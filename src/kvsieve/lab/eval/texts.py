"""Texts of the prompts of a results directory, so that samples on different texts are never mixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsieve.lab.tasks.haystack import load_haystack, text_digest
from kvsieve.lab.tasks.public import is_public
from kvsieve.lab.tasks.rows import PREFIX

# Results without digests took the help texts of the Python that ran them; this one's are those that kvsieve ships.
SHIPPED = "3.11.7"


def texts_of(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of texts or files by task, also for generated tasks of results without digests.

    Args:
        run: contents of run.json or server.json: `tasks`, `haystack`, and `data`, `environments` if present.
    """
    unrecorded = _unrecorded(run)
    generated = {name: unrecorded for name in run.get("tasks", {}) if not is_public(name)}
    return {**generated, **run.get("data", {})}


def other_text(known: Mapping[str, Any], run: Mapping[str, Any]) -> str | None:
    """Return a clause with the first task that has different texts in the two runs, or None."""
    before = texts_of(known)
    for task, digest in run.get("data", {}).items():
        found = before.get(task, digest)
        if found != digest:
            option = "--data" if is_public(task) else "--task" if task.startswith(PREFIX) else "--haystack"
            return f"results of {task} on another text ({found}) than {option} has ({digest})"
    return None


def _unrecorded(run: Mapping[str, Any]) -> str:
    """Return the implied digest of a run without digests, or words for an unknown text."""
    haystack = run.get("haystack")
    pythons = sorted({str(environment.get("python", "?")) for environment in run.get("environments", [])})
    if haystack == "noise" or (haystack == "topics" and pythons == [SHIPPED]):
        return text_digest(load_haystack(haystack))
    if haystack == "topics":
        return f"help texts of Python {', '.join(pythons) or '?'}"
    return f"no digest of {haystack!r} recorded"
