"""The result of one plan on one sample, and its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvsieve.hf.cache.records import TurnRecord
from kvsieve.hf.drafts.drafter import DraftCounts
from kvsieve.lab.eval.cells import MethodSetting
from kvsieve.lab.eval.grid import Unit
from kvsieve.lab.eval.rows import Row
from kvsieve.lab.tasks.public import recorded
from kvsieve.lab.tasks.samples import Sample

# Answer tokens of full KV at which distributions are compared.
_COMPARED = 32


@dataclass
class Outcome:
    """Result of one plan on one sample. Metrics as in docs/evaluation.md; drafts: None for none."""

    answers: list[str]
    metrics: dict[str, float]
    record: TurnRecord
    applied: bool
    notes: list[str]
    kl: float = 0.0
    kl_last: float = 0.0
    top1: float = 1.0
    drafts: DraftCounts | None = None


def sample_row(unit: Unit, sample: Sample, setting: MethodSetting, outcome: Outcome) -> Row:
    """Return the row of one sample under one setting, JSON-ready; the fields are in docs/evaluation.md."""
    record = outcome.record
    entries = sum(record.kept.values()) / max(len(record.kept), 1)
    deep = record.prompt_tokens if record.propagated is None else record.propagated
    row = {
        "task": unit.task.name,
        "length": unit.length,
        "question": unit.question,
        "sample": unit.index,
        "method": setting.method,
        "label": setting.label,
        "budget": setting.budget,
        "score": outcome.metrics["score"],
        "metrics": outcome.metrics,
        "answers": outcome.answers,
        "expected": [recorded(unit.task.name, turn.answers) for turn in sample.turns],
        "prompt_tokens": record.prompt_tokens,
        "kv_entries": round(entries, 3),
        "kv_share": round(entries / record.prompt_tokens, 6),
        "deep_tokens": deep,
        "applied": outcome.applied,
        "kl": round(outcome.kl, 6),
        "top1": round(outcome.top1, 6),
        "kl_last": round(outcome.kl_last, 6),
        "meta": dict(sample.meta),
        "notes": outcome.notes,
    }
    return row if outcome.drafts is None else {**row, "drafts": asdict(outcome.drafts)}


def compared_places(length: int, spread: bool) -> list[int]:
    """Return the tokens of an answer at which distributions are compared: the first ones, or spread evenly."""
    if not spread or length <= _COMPARED:
        return list(range(min(length, _COMPARED)))
    return [i * (length - 1) // (_COMPARED - 1) for i in range(_COMPARED)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
