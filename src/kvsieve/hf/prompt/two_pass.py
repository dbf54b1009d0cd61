"""Prompts prefilled twice: the first pass only chooses tokens, the second prefills those as a prompt of their own.

The first pass ends at the layer where the plan's propagator has chosen, and is discarded.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvsieve.hf.cache.counts import PromptBlocks
from kvsieve.hf.prompt.chunks import read_chunks
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan
from kvsieve.planning.protection import ProtectedTokens
from kvsieve.types import Selection


def choose(
    model: AttachedModel, ids: Tensor, mask: Tensor, options: ReadOptions, protected: ProtectedTokens | None
) -> tuple[Selection | None, dict[str, Any], PromptBlocks]:
    """Run the first pass over ids [B, N].

    Returns the tokens chosen among them, the propagator's report, and the counts of the pass.
    """
    scratch = model.new_cache() if options.begun is None else options.begun()
    scratch.conversation.protected = protected
    plan = Plan(propagate=model.plan.propagate, prefill=model.plan.prefill, name=model.plan.name)
    begun = options.begun is not None
    first = ReadOptions(chunk=options.chunk, progress=options.progress, leave_last=False, goes_on=begun)
    result = read_chunks(model, ids, mask, scratch, first, plan=plan)
    assert result is not None
    return result.chosen, result.report, scratch.turn.record.blocks
