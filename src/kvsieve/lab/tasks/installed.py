"""Tasks of other packages, by entry points of the group `kvsieve.tasks`."""

from __future__ import annotations

from collections.abc import Collection
from importlib import metadata

from kvsieve.errors import short
from kvsieve.lab.tasks.public import is_public
from kvsieve.lab.tasks.samples import Task
from kvsieve.planning.loading import warn_left_out

# An entry point names a class or function that takes the haystack's text and returns the task of that name.
ENTRY_POINTS = "kvsieve.tasks"


def installed_tasks(text: str, taken: Collection[str]) -> list[Task]:
    """Return the tasks of other packages; unusable ones are skipped with a KvsieveWarning.

    Args:
        text: the haystack's.
        taken: names of other tasks.
    """
    found = []
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            task = point.load()(text)
        except Exception as error:
            warn_left_out("task", point, f"{point.value} raises {type(error).__name__}: {error}")
            continue
        why = _problem(task, point, taken)
        if why is None:
            found.append(task)
        else:
            warn_left_out("task", point, why)
    return found


def _problem(task: object, point: metadata.EntryPoint, taken: Collection[str]) -> str | None:
    """Return why a task cannot be used, as a clause, or None."""
    if not isinstance(task, Task):
        return f"{point.value} returns {short(task)}, expected a task with name, title, modes, sample() and document()"
    if task.name != point.name:
        return f"{point.value} returns a task named {short(task.name)}"
    return "kvsieve has a task of that name" if task.name in taken or is_public(task.name) else None
