"""The executors of attention in order, the faster ones first: every pass asks this table.

An executor that does not know a fact of a request (a cap, sinks, padding, a length that the device alone knows ...)
refuses it and says why. `reference` comes last for all kinds of requests and takes everything.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from kvsieve.attention.choice import LONG
from kvsieve.attention.dense import FEW, TOKEN, TOKEN_KERNEL, prompt_rows
from kvsieve.attention.latent import Latents, latent_rows
from kvsieve.attention.masked import SCALED, SHOWN
from kvsieve.attention.packed import ENCODED
from kvsieve.attention.prompt import chosen_rows
from kvsieve.attention.ragged import FLAT, FLAT_FEW, FLAT_KERNEL
from kvsieve.attention.reading import ReadRows, read_rows
from kvsieve.attention.reference import REFERENCE
from kvsieve.attention.request import (
    AttentionRequest,
    ChosenBlocks,
    DenseEntries,
    EncodedEntries,
    Executor,
    FlatEntries,
    Near,
    ScaledPart,
    Shown,
)
from kvsieve.attention.sparse import KV_ROWS
from kvsieve.attention.windowed import near_rows
from kvsieve.core.kv_rows import Choice, KVRows


def attend(request: AttentionRequest[Any, Any]) -> Tensor:
    """Let the first executor that takes it compute a request: [B, Hq, L, Dv], or [X, G, Dv] for KV rows."""
    return _chosen(request).run(request)


def token_kernel(request: AttentionRequest[Any, Any]) -> Literal["token", "few"] | None:
    """Return the C kernel that computes a request for the last tokens, if other C code may call it, too."""
    run = _chosen(request).run
    if run in (FEW.run, FLAT_FEW.run):
        # A cap and sinks are for its own interface.
        return "few" if request.asked.is_plain else None
    return "token" if run in (TOKEN_KERNEL.run, FLAT_KERNEL.run) else None


def next_border(entries: int) -> int:
    """Return the number of entries from which on tokens may have another executor: a power of two, at least LONG."""
    return max(LONG, 1 << entries.bit_length())


def _chosen(request: AttentionRequest[Any, Any]) -> Executor:
    """Return the first executor that takes a request."""
    for executor in executors(request):
        if executor.why_not(request) is None:
            return executor
    raise AssertionError("the reference takes everything")


def executors(request: AttentionRequest[Any, Any]) -> tuple[Executor, ...]:
    """Return the executors for requests of this kind, in order."""
    if request.sees is None and type(request.stored) is DenseEntries and request.asked.query.shape[2] == 1:
        return _TOKEN
    return _TABLE.get((type(request.stored), type(request.sees)), (REFERENCE,))


def explain(request: AttentionRequest[Any, Any]) -> str:
    """Return the name of the executor that computes a request, and why those before it do not."""
    refused: list[str] = []
    for executor in executors(request):
        reason = executor.why_not(request)
        if reason is None:
            return f"{executor.name} ({'; '.join(refused)})" if refused else executor.name
        refused.append(f"{executor.name}: {reason}")
    raise AssertionError("the reference takes everything")


_NONE: type = type(None)
_DENSE: tuple[type, type] = (DenseEntries, _NONE)
_TOKEN = (*TOKEN, REFERENCE)
_TABLE: dict[tuple[type, type], tuple[Executor, ...]] = {
    kind: (*rows, REFERENCE)
    for kind, rows in {
        _DENSE: prompt_rows(attend),
        (DenseEntries, ChosenBlocks): chosen_rows(attend),
        (DenseEntries, Near): near_rows(attend),
        (DenseEntries, Shown): SHOWN,
        (DenseEntries, ScaledPart): SCALED,
        (FlatEntries, _NONE): FLAT,
        (EncodedEntries, _NONE): ENCODED,
        (Latents, _NONE): latent_rows(attend),
        (KVRows, Choice): KV_ROWS,
        (KVRows, _NONE): KV_ROWS,
        (ReadRows, _NONE): read_rows(attend),
    }.items()
}
