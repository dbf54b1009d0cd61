"""Plans that vLLM's engine can carry, and the reasons why others cannot be."""

from __future__ import annotations

from kvsieve.errors import PlanError
from kvsieve.methods.adakv import GroupedSnapKV
from kvsieve.methods.hsa import HSA
from kvsieve.methods.keydiff import KeyDiff
from kvsieve.methods.knorm import KNorm
from kvsieve.methods.lagkv import LagKV
from kvsieve.methods.quest import Quest
from kvsieve.methods.rocketkv import RocketEviction
from kvsieve.methods.snapkv import SnapKV
from kvsieve.methods.streaming_llm import StreamingLLM
from kvsieve.plans import Plan
from kvsieve.roles import Evictor, Reader

CHUNKED = "vLLM cuts prompts into chunks as its schedule has it, and what is chosen would depend on the other requests"
# Roles that nothing carries, and why.
_NO_ROLE = {
    "propagate": "token propagation lets tokens stop after a layer; vLLM's models pass all tokens through all layers",
    "prefill": "prompts are read by kernels that attend to every block",
    "codec": "entries lie in vLLM's pages, in its own dtypes; for 8 bits there is kv_cache_dtype='fp8'",
    "rest": "entries lie in vLLM's pages, in its own dtypes, and no page holds encoded ones",
}
_EVICTORS: tuple[type[Evictor], ...] = (SnapKV, GroupedSnapKV, RocketEviction, LagKV, KeyDiff, KNorm, StreamingLLM)


def check_carried(plan: Plan) -> None:
    """Refuse a plan that the engine cannot carry.

    Raises:
        PlanError: with every reason.
    """
    reasons = [reason for role, reason in _NO_ROLE.items() if role in plan.roles]
    if plan.evict is not None:
        reasons += _evictor_reasons(plan.evict)
    if plan.read is not None:
        reasons += _reader_reasons(plan.read)
    if plan.budgets_in_bytes:
        reasons.append("a budget in bytes has no meaning here; give a share such as budget=20% or entries")
    if not plan.roles:
        reasons.append("it does nothing; leave kvsieve out of the configuration instead")
    if reasons:
        raise PlanError(
            f"vLLM cannot carry the plan {plan.name}: {'; '.join(reasons)}. It carries quest, hsa, rocketkv, snapkv, "
            "lagkv, keydiff, knorm and streamingllm; kvsieve's own server (`kvsieve serve`) carries every plan"
        )


def _evictor_reasons(evict: Evictor) -> list[str]:
    name = type(evict).__name__
    if type(evict) not in _EVICTORS:
        if evict.traits.is_view:
            return [f"{name} chooses afresh in every turn what may be read, and vLLM has no turns; use rocketkv"]
        if evict.traits.ragged:
            return [
                f"{name} keeps a different number of entries per head, and a block of vLLM's has all heads' entries"
            ]
        if evict.when.observes:
            return [f"{name} learns from pass to pass, and the plugin remembers nothing of a request"]
        return [f"no act of {name} on vLLM's blocks is known to be right"]
    reasons = []
    if evict.skip_layers not in (0, ()):
        reasons.append(f"skip_layers={evict.skip_layers}: a block that is freed is freed in all layers")
    if evict.when.chunks:
        reasons.append(f"chunks=True: {CHUNKED}")
    if isinstance(evict, SnapKV) and evict.per_query_head:
        reasons.append("per_query_head=True stores more heads than vLLM's pages have")
    return reasons


def _reader_reasons(read: Reader) -> list[str]:
    if not isinstance(read, (Quest, HSA)):
        return [f"{type(read).__name__} chooses single entries, and vLLM reads whole pages; use quest or hsa"]
    reasons = []
    if isinstance(read, Quest) and read.per_query_head:
        reasons.append("per_query_head=True: a KV head's pages are read once for all its query heads")
    if not read.newest:
        reasons.append("newest=False: the page that is being filled is always read")
    if read.sparse_questions:
        reasons.append("sparse_questions=True: prompts are read by kernels that attend to every block")
    return reasons
