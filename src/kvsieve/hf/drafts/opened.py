"""Drafts for the rows of a cache."""

from __future__ import annotations

from collections.abc import Sequence

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.drafts.drafter import Drafter, RowDrafts
from kvsieve.hf.drafts.length import DraftLength
from kvsieve.hf.drafts.lookup import LookupDrafter
from kvsieve.hf.drafts.model import model_drafter
from kvsieve.hf.drafts.views import checked_view, view_drafter
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.drafts import Draft

# Time of each token of a pass after the first, in passes over one token: on a CPU, where layers take it alone, and on a
# GPU.
_TOGETHER = 0.09
_ALONE = 0.2
_ON_GPU = 0.03
# The same for recurrent layers, with the further pass over the tokens that stay if some do not.
_AGAIN = 0.25


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
        UnsupportedOptionError: the source cannot draft for this cache; see also `check_draft`.
    """
    slope = pass_slope(model, cache)
    found = []
    for index, row in enumerate(rows):
        drafter = _drafter(draft, model, cache, index)
        found.append(RowDrafts(drafter, DraftLength(draft.tokens, slope, drafter.cost, adapt=draft.adapt), row))
    return found


def check_draft(draft: Draft, model: AttachedModel) -> None:
    """Raise for a source that cannot draft for a model under its plan; a draft model is loaded.

    Raises:
        PlanError: a draft model's tokens cannot be mapped, or a plan gives no view.
        UnsupportedModelError, UnsupportedOptionError: it does not run on the model.
        ModelNotFoundError, ModelLoadError: a draft model that cannot be loaded.
    """
    if draft.model is not None:
        model_drafter(draft.model, model)
    if draft.view is not None:
        checked_view(draft.view, model)


def pass_slope(model: AttachedModel, cache: SieveCache) -> float:
    """Return the time of each further token of a pass, in passes over one token."""
    plan = model.plan
    if model.feeds_one_by_one(cache):
        return 1.0
    if cache.has_state:
        return _AGAIN
    if model.model.device.type != "cpu":
        return _ON_GPU
    acts = plan.evict is not None and plan.evict.when.steps is not None
    return _ALONE if acts else _TOGETHER


def _drafter(draft: Draft, model: AttachedModel, cache: SieveCache, row: int) -> Drafter:
    if draft.model is not None:
        return model_drafter(draft.model, model)
    if draft.view is not None:
        return view_drafter(model, cache, checked_view(draft.view, model), row)
    return LookupDrafter(draft.ngram)
