"""Drafts for the rows of a cache."""

from __future__ import annotations

from collections.abc import Sequence

from kvsieve.errors import UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.drafts.drafter import Drafter, RowDrafts
from kvsieve.hf.drafts.length import DraftLength
from kvsieve.hf.drafts.lookup import LookupDrafter
from kvsieve.hf.forward.one_by_one import goes_one_by_one
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.drafts import Draft

# Time of each token of a pass after the first, in passes over one token: on a CPU, where layers take it alone, and on a
# GPU.
_TOGETHER = 0.09
_ALONE = 0.2
_ON_GPU = 0.03


def open_drafts(
    draft: Draft, model: AttachedModel, cache: SieveCache, rows: Sequence[Sequence[int]]
) -> list[RowDrafts]:
    """Return drafts for the rows of a cache, to be closed after the answer.

    Args:
        draft: the source.
        model: attached under the plan that decodes the cache.
        cache: of the conversations.
        rows: tokens of each row so far, as they were given, the last one not yet fed included; without padding.

    Raises:
        UnsupportedOptionError: the source cannot draft for this model and plan.
    """
    length = pass_slope(model, cache)
    return [RowDrafts(_drafter(draft), DraftLength(draft.tokens, length, adapt=draft.adapt), row) for row in rows]


def pass_slope(model: AttachedModel, cache: SieveCache) -> float:
    """Return the time of each further token of a pass, in passes over one token."""
    plan = model.plan
    if goes_one_by_one(cache, plan):
        return 1.0
    if model.model.device.type != "cpu":
        return _ON_GPU
    acts = plan.evict is not None and plan.evict.when.steps is not None
    return _ALONE if plan.read is not None or acts else _TOGETHER


def _drafter(draft: Draft) -> Drafter:
    if draft.kind == "lookup":
        return LookupDrafter(draft.ngram)
    raise UnsupportedOptionError(f"draft={str(draft)!r} is not supported; use 'lookup'")
