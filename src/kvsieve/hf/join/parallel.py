"""Documents at the same positions in one cache."""

from __future__ import annotations

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.records import ParallelDocuments
from kvsieve.hf.join.documents import JoinTexts
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.joins import ParallelJoin


def why_not_parallel(model: AttachedModel) -> str | None:
    """Return a clause why a model under its plan cannot attend to documents at the same positions, or None."""
    plan = model.plan
    if model.facts.tables.depend:
        return "the model's rotary tables depend on the length of the whole, which documents alone do not have"
    if plan.read is not None or plan.is_view:
        return f"{plan.name} attends to chosen entries, and the join merges attention to all of them"
    if plan.evict is not None and "rotary" in plan.evict.traits.needs:
        return f"{plan.name} rotates keys by their columns, and documents share positions"
    return None


def record_parallel(cache: SieveCache, texts: JoinTexts, join: ParallelJoin) -> None:
    """Let text after the documents of a cache begin after the longest, and merge attention to them as a join does."""
    size = sum(texts.sizes)
    cache.conversation.position_shift = max(texts.sizes) - size
    cache.conversation.parallel = ParallelDocuments(texts.start, texts.start + size, join.factor)
