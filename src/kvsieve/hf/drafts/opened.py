"""Drafts for the rows of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvsieve.devices import cpu_computes_bfloat16
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.drafts.drafter import Drafter, RowDrafts
from kvsieve.hf.drafts.length import DraftLength
from kvsieve.hf.drafts.lookup import LookupDrafter
from kvsieve.hf.drafts.model import model_drafter
from kvsieve.hf.drafts.views import check_view_of, checked_view, view_drafter
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.drafts import Draft

# Time that a pass over several tokens takes longer, in passes over one token: in any case, and for each token after the
# first. On a CPU (benchmarks/speed/tentative.py), in bfloat16 at 4,096 tokens of a model of 0.5B parameters, and where
# it has no products in that, which then take longer than reading weights, in one call and layer by layer; where layers
# take tokens alone; and on an H100, also with a codec.
_TOGETHER = 0.06, 0.07
_ALONE = 0.06, 0.2
_IN_FLOAT32 = 0.0, 0.16
_BY_LAYER = 0.3, 0.22
_ON_GPU = 0.5, 0.01
_ON_GPU_ENCODED = 0.4, 0.05
# Recurrent layers take a further pass over the tokens that stay if some do not.
_AGAIN = 0.0, 0.25
_ONE_BY_ONE = 0.0, 1.0


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
    first, slope = pass_cost(model, cache)
    found = []
    for index, row in enumerate(rows):
        drafter = _drafter(draft, model, cache, index)
        length = DraftLength(draft.tokens, slope, drafter.cost, first, adapt=draft.adapt)
        found.append(RowDrafts(drafter, length, row))
    return found


def check_draft(draft: Draft, model: AttachedModel, cache: SieveCache | None = None, rows: int = 1) -> None:
    """Raise for a source that cannot draft for a model under its plan; a draft model is loaded.

    Args:
        draft: the source.
        model: attached under the plan.
        cache: to continue, which may allow no view; None for a new one.
        rows: answers that are decoded together.

    Raises:
        PlanError: a draft model's tokens cannot be mapped, or a plan gives no view.
        UnsupportedModelError, UnsupportedOptionError: it does not run on the model.
        ModelNotFoundError, ModelLoadError: a draft model that cannot be loaded.
    """
    if draft.model is not None:
        model_drafter(draft.model, model)
    if draft.view is not None:
        view = checked_view(draft.view, model)
        check_view_of(model.new_cache() if cache is None else cache, view, rows)


def pass_cost(model: AttachedModel, cache: SieveCache) -> tuple[float, float]:
    """Return the further time of a pass over several tokens, in any case and per token, in passes over one token."""
    plan = model.plan
    if model.feeds_one_by_one(cache):
        return _ONE_BY_ONE
    if cache.has_state:
        return _AGAIN
    if model.model.device.type != "cpu":
        return _ON_GPU if plan.codec is None else _ON_GPU_ENCODED
    if model.model.dtype != torch.bfloat16 or not cpu_computes_bfloat16():
        does_more = plan.read is not None or plan.codec is not None or plan.when.steps is not None
        return _BY_LAYER if does_more else _IN_FLOAT32
    first, slope = _TOGETHER if plan.when.steps is None else _ALONE
    return first, slope if plan.read is not None else slope * _by_entries(model, cache)


def _by_entries(model: AttachedModel, cache: SieveCache) -> float:
    """Return the time of a further token with this cache, over that with 4,096 tokens of a model of 0.5B parameters.

    A pass reads entries once, but every token is multiplied with them, as with weights.
    """
    entries = sum(layer.store.entries for layer in cache.sieve_layers.values())
    share = 2 * model.config.hidden_size * entries / model.model.num_parameters()
    return (0.56 + 1.53 * share) / (1 + 0.31 * share)


def _drafter(draft: Draft, model: AttachedModel, cache: SieveCache, row: int) -> Drafter:
    if draft.model is not None:
        return model_drafter(draft.model, model)
    if draft.view is not None:
        return view_drafter(model, cache, checked_view(draft.view, model), row)
    return LookupDrafter(draft.ngram, model.tokenizer)
