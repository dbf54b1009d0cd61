"""Which texts the prompts of a results directory were made of, so that samples on different texts are never mixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsieve.lab.tasks.haystack import load_haystack, text_digest
from kvsieve.lab.tasks.public import is_public
from kvsieve.lab.tasks.rows import PREFIX

# Results without digests took the help texts of the Python that ran them; this one's are those that kvsieve ships.
SHIPPED = "3.11.7"


def texts_of(run: Mapping[str, Any]) -> dict[str, str]:
    """Return by task the digest of its text or files, also for generated tasks of results that record none.

    Args:
        run: contents of run.json or server.json: `tasks`, `haystack`, and `data`, `environments` where it has them.
    """
    unrecorded = _unrecorded(run)
    generated = {name: unrecorded for name in run.get("tasks", {}) if not is_public(name)}
    return {**generated, **run.get("data", {})}


def other_text(held: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """Return which task of both runs has another text in the second, in a clause; None where all agree."""
    before = texts_of(held)
    for task, digest in given.get("data", {}).items():
        found = before.get(task, digest)
        if found != digest:
            option = "--data" if is_public(task) else "--task" if task.startswith(PREFIX) else "--haystack"
            return f"results of {task} on another text ({found}) than {option} has ({digest})"
    return None


def _unrecorded(run: Mapping[str, Any]) -> str:
    """The digest that a run without digests would have, or words for a text that is not known."""
    haystack = run.get("haystack")
    pythons = sorted({str(each.get("python", "?")) for each in run.get("environments", [])})
    if haystack == "noise" or (haystack == "topics" and pythons == [SHIPPED]):
        return text_digest(load_haystack(haystack))
    if haystack == "topics":
        return f"help texts of Python {', '.join(pythons) or '?'}"
    return f"no digest of {haystack!r} recorded"
