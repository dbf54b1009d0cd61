"""Generated tasks, which need no download: kvsieve's and those of installed packages."""

from __future__ import annotations

from collections.abc import Sequence

from kvsieve.errors import InputError
from kvsieve.lab.tasks.agents import Agents
from kvsieve.lab.tasks.chains import Chains
from kvsieve.lab.tasks.codetests import CodeTests
from kvsieve.lab.tasks.documents import Documents
from kvsieve.lab.tasks.haystack import load_haystack
from kvsieve.lab.tasks.installed import installed_tasks
from kvsieve.lab.tasks.instructions import Instructions
from kvsieve.lab.tasks.leakage import Leakage
from kvsieve.lab.tasks.longanswer import LongAnswer
from kvsieve.lab.tasks.needle import Needle, PassKey
from kvsieve.lab.tasks.pairs import KeyValue, MultiQuestion
from kvsieve.lab.tasks.public import public_tasks
from kvsieve.lab.tasks.reasoning import Derivation
from kvsieve.lab.tasks.ruler import CommonWords, FrequentWords, Niah, VariableTracking
from kvsieve.lab.tasks.samples import Task
from kvsieve.lab.tasks.shots import Arithmetic, ManyShot
from kvsieve.lab.tasks.toolcalls import ToolCalls
from kvsieve.planning.suggestions import did_you_mean


def _ruler(text: str) -> list[Task]:
    return [
        Niah(text, "ruler_niah_single_1", "RULER: single needle 1 (noise)", haystack="noise"),
        Niah(text, "ruler_niah_single_2", "RULER: single needle 2 (text)"),
        Niah(text, "ruler_niah_single_3", "RULER: single needle 3 (UUID)", value_kind="uuids"),
        Niah(text, "ruler_niah_multikey_1", "RULER: multi-key 1 (4 keys)", keys=4),
        Niah(text, "ruler_niah_multikey_2", "RULER: multi-key 2 (all needles)", haystack="needles"),
        Niah(
            text,
            "ruler_niah_multikey_3",
            "RULER: multi-key 3 (UUIDs)",
            haystack="needles",
            key_kind="uuids",
            value_kind="uuids",
        ),
        Niah(text, "ruler_niah_multivalue", "RULER: multi-value (4 values)", values=4),
        Niah(text, "ruler_niah_multiquery", "RULER: multi-query (4 queries)", queries=4),
        VariableTracking(text, "ruler_vt", "RULER: variable tracking"),
        CommonWords(text, "ruler_cwe", "RULER: common words"),
        FrequentWords(text, "ruler_fwe", "RULER: frequent words"),
        Documents(text, "ruler_qa_1", "RULER: QA 1 (one document)"),
        Documents(text, "ruler_qa_2", "RULER: QA 2 (two documents)", hops=2),
    ]


def all_tasks(haystack: str = "topics") -> dict[str, Task]:
    """Return every generated task by name, over this haystack. Raises InputError, see `load_haystack`."""
    text = load_haystack(haystack)
    tasks: list[Task] = [
        Needle(text),
        PassKey(text),
        *_ruler(text),
        KeyValue(text),
        MultiQuestion(text, "multiturn", "Multi-turn (4 questions)"),
        MultiQuestion(text, "shared", "Shared context (4 questions)", modes=("hidden",), independent=True),
        ManyShot(text),
        Arithmetic(text),
        Instructions(text, "instructions", "Instructions before the text"),
        Instructions(text, "system", "Instructions in the system prompt", where="system"),
        LongAnswer(text),
        Chains(text),
        Derivation(text),
        Derivation(text, "reasoning_4k", "Step-by-step answer of 4K tokens", steps=160),
        CodeTests(text),
        ToolCalls(text),
        Agents(text),
        Leakage(text),
    ]
    tasks += installed_tasks(text, {task.name for task in tasks})
    return {task.name: task for task in tasks}


GROUPS = {"ruler": "ruler_", "all": ""}


def chosen_tasks(names: Sequence[str], haystack: str = "topics") -> list[Task]:
    """Return the tasks of these names; "ruler" stands for its 13, "all" for every one. Raises InputError."""
    known = all_tasks(haystack)
    chosen: dict[str, Task] = {}
    for name in names:
        if name in GROUPS:
            chosen.update({key: task for key, task in known.items() if key.startswith(GROUPS[name])})
        elif name in known:
            chosen[name] = known[name]
        else:
            public = [public_name for public_name, _ in public_tasks()]
            raise InputError(f"unknown task {name!r}{did_you_mean(name, [*GROUPS, *known, *public])}")
    if not chosen:
        raise InputError("no task was named; give --tasks, for example needle,ruler,kv")
    return list(chosen.values())
