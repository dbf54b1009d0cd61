"""Checks of role combinations."""

from __future__ import annotations

from kvsieve.errors import PlanError
from kvsieve.planning.roles.codec import Codec
from kvsieve.planning.roles.evictor import ChunkedEvictor, Evictor
from kvsieve.planning.roles.prefill import SparsePrefill
from kvsieve.planning.roles.probing import ProbingEvictor
from kvsieve.planning.roles.propagator import Propagator
from kvsieve.planning.roles.reader import Reader
from kvsieve.planning.roles.sizes import byte_budgets


def check_together(
    propagate: Propagator | None,
    evict: Evictor | None,
    read: Reader | None,
    codec: Codec | None,
    rest: Codec | None,
    prefill: SparsePrefill | None,
) -> None:
    """Raise PlanError for roles of one plan that cannot be combined."""
    _check_prefill(prefill, evict)
    if evict is not None and evict.when.observes and type(evict).observe is Evictor.observe:
        raise PlanError(
            f"{type(evict).__name__} has When(observes=True) and no method observe(ctx) of its own; add one"
        )
    if isinstance(evict, ChunkedEvictor) and "tokens" in evict.traits.needs:
        raise PlanError(
            f"{type(evict).__name__} compresses a prompt chunk by chunk, and its chunks have no token ids: leave "
            '"tokens" out of its needs'
        )
    if propagate is not None and evict is not None:
        _check_propagated(propagate, evict)
    encodes = codec or rest
    if encodes is not None and evict is not None and evict.stored_heads(1, 2) > 1:
        raise PlanError(
            f"{type(evict).__name__} stores entries for each query head, and {type(encodes).__name__} encodes "
            f"those of KV heads; leave per_query_head out, or {'codec=' if codec is not None else 'rest='}"
        )
    if evict is not None and evict.traits.writes:
        _check_writes(evict, encodes)
    shortens = evict if isinstance(evict, ChunkedEvictor) else propagate
    if read is not None and shortens is not None and (shortens is evict or (propagate and propagate.two_pass)):
        raise PlanError(
            f"{type(shortens).__name__} reads a short prompt again, in full, and is not combined with read=; leave it "
            "None"
        )
    if read is not None and evict is not None and (read.shares or read.shares_heads):
        _check_shared(read, evict)
    if read is not None and read.observes and codec is not None:
        raise PlanError(
            f"{type(read).__name__} chooses by scores of entries, which {type(codec).__name__} does not keep; leave "
            "codec= out"
        )
    if rest is not None:
        _check_rest(evict, type(rest).__name__)


def _check_shared(read: Reader, evict: Evictor) -> None:
    """Raise PlanError for an evictor before which layers cannot share the choice of a reader."""
    if read.shares_heads:
        raise PlanError(
            f"{type(read).__name__} reads the same tokens in all heads, and {type(evict).__name__} may keep others in "
            "each; leave evict= out"
        )
    reason = None
    if evict.traits.ragged:
        reason = "keeps different numbers of entries per head, in every layer others"
    elif evict.when.steps is not None:
        reason = "drops entries while decoding, in one layer after another"
    if reason is not None:
        raise PlanError(
            f"{type(evict).__name__} {reason}: layers cannot share what {type(read).__name__} chooses; leave share= "
            "out, or take an evictor that acts at the end of prompts and keeps as many entries in all heads"
        )


def _check_writes(evict: Evictor, encodes: Codec | None) -> None:
    """Raise PlanError unless keys, values and weights that an evictor writes can be stored."""
    reason = None
    if encodes is not None:
        reason = f"{type(encodes).__name__} encodes the entries of tokens; leave codec= and rest= out"
    elif evict.traits.is_view:
        reason = "a view changes no entries; use it without the view"
    elif isinstance(evict, ChunkedEvictor):
        reason = "entries that move to other positions with every chunk cannot be written; use another base"
    if reason is not None:
        raise PlanError(f"{type(evict).__name__} writes keys, values or weights of entries, and {reason}")


def _check_prefill(prefill: SparsePrefill | None, evict: Evictor | None) -> None:
    """Raise PlanError for an evictor with its own passes over a prompt, which would not be sparse."""
    if prefill is not None and isinstance(evict, ChunkedEvictor):
        raise PlanError(
            f"{type(evict).__name__} reads a prompt in passes of its own, in full, and is not combined with prefill=; "
            "leave it out"
        )
    if prefill is not None and (prefill.block < 1 or prefill.queries % prefill.block):
        raise PlanError(
            f"{type(prefill).__name__} has blocks of {prefill.queries} queries and {prefill.block} keys; the number of "
            "queries must be a multiple of that of keys"
        )


def _check_propagated(propagate: Propagator, evict: Evictor) -> None:
    names = type(evict).__name__, type(propagate).__name__
    if evict.when.chunks:
        raise PlanError(
            f"{names[0]} acts on every chunk of a prompt, {names[1]} on the whole of it: they cannot be combined"
        )
    if isinstance(evict, (ProbingEvictor, ChunkedEvictor)):
        raise PlanError(
            f"{names[0]} needs passes of its own over the prompt, of which {names[1]} drops tokens: they cannot be "
            "combined"
        )
    if evict.traits.is_view and propagate.two_pass:
        raise PlanError(
            f"{names[1]} keeps a short prompt in place of the one given, so {names[0]} could not keep everything for "
            "later turns: they cannot be combined"
        )


def _check_rest(evict: Evictor | None, name: str) -> None:
    """Raise PlanError unless the evictor evicts entries that can be kept quantized."""
    if evict is None:
        raise PlanError(
            f"rest={name} keeps in few bits what an evictor would drop, and this plan has none; give evict=, or codec= "
            "to encode all entries"
        )
    reason = None
    if evict.traits.is_view:
        reason = "drops nothing"
    elif isinstance(evict, ChunkedEvictor) or evict.when.chunks:
        reason = "drops entries while a prompt is read"
    elif evict.when.steps is not None:
        reason = "drops entries while decoding; leave every= out"
    elif evict.traits.recuts:
        reason = "drops entries of a layer bit by bit, as layers behind it are read"
    elif evict.when.observes:
        reason = "remembers what it has seen of each entry by where it is stored"
    if reason is not None:
        raise PlanError(
            f"{type(evict).__name__} {reason}: rest={name} takes an evictor that acts at the end of prompts, such as "
            "SnapKV"
        )
    if any(True for _ in byte_budgets(evict)):
        raise PlanError(
            f"a budget in bytes is the size of a whole cache, to which rest={name} adds what depends on the prompt; "
            "give a share or a number of entries"
        )
