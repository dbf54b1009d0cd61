"""Token propagation: a propagator's choice among the tokens that reached a layer."""

from __future__ import annotations

from kvsieve.core.checks import look
from kvsieve.hf.cache.layer import SieveLayer
from kvsieve.hf.forward.evict import check_protected
from kvsieve.hf.forward.pass_state import PassState
from kvsieve.hf.forward.request import StopForward
from kvsieve.types import LayerContext


def propagate(session: PassState, index: int, layer: SieveLayer, ctx: LayerContext) -> None:
    """Let the propagator choose among the tokens that reached a layer.

    Raises:
        StopForward: the first of two passes has chosen; its entries are not needed any more.
    """
    propagator = session.plan.propagate
    source = session.source
    assert propagator is not None and source is not None
    # Up to the source layer all of the turn's tokens are there, in this pass or in earlier chunks.
    deeper = index > source
    ctx.offered = session.tokens.size if deeper else session.end - session.step.turn_start
    ctx.offered_counts = session.tokens.counts if deeper else session.step.turn_lengths
    selection = propagator.select(ctx)
    if selection is not None:
        check_protected(propagator, ctx, selection, ctx.offered)
    session.cache.turn.record.report = session.shared.get("report", {})
    if not propagator.two_pass:
        session.selection = selection if source <= index < session.model.num_layers - 1 else None
        return
    if selection is not None:
        look(session.checks)
        session.chosen = selection
        session.stopped = True
        raise StopForward
    # Entries that a layer has attended to can be dropped at once.
    layer.reset()
