"""Plans that vLLM's engine supports, and the reasons against others."""

from __future__ import annotations

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import Evictor, PagedReader, Reader

CHUNKED = "vLLM cuts prompts into chunks as its schedule has it, and what is chosen would depend on the other requests"
# Unsupported roles, and the reasons.
_NO_ROLE = {
    "propagate": "token propagation lets tokens stop after a layer; vLLM's models pass all tokens through all layers",
    "prefill": "prompts are read by kernels that attend to every block",
    "codec": "entries lie in vLLM's pages, in its own dtypes; for 8 bits there is kv_cache_dtype='fp8'",
    "rest": "entries lie in vLLM's pages, in its own dtypes, and no page holds encoded ones",
}


def check_carried(plan: Plan) -> None:
    """Refuse a plan that the engine does not support.

    Raises:
        PlanError: with every reason.
    """
    reasons = _reasons(plan)
    if reasons:
        infos = (kvsieve.method_info(name) for name in kvsieve.list_methods())
        carried = [info.name for info in infos if not _reasons(info.make(**info.example))]
        raise PlanError(
            f"vLLM cannot carry the plan {plan.name}: {'; '.join(reasons)}. It carries {', '.join(carried)}; kvsieve's "
            "own server (`kvsieve serve`) carries every plan"
        )


def _reasons(plan: Plan) -> list[str]:
    reasons = [reason for role, reason in _NO_ROLE.items() if role in plan.roles]
    if plan.evict is not None:
        reasons += _evictor_reasons(plan.evict)
    if plan.read is not None:
        reasons += _reader_reasons(plan.read)
    if plan.budgets_in_bytes:
        reasons.append("a budget in bytes has no meaning here; give a share such as budget=20% or entries")
    if not plan.roles:
        reasons.append("it does nothing; leave kvsieve out of the configuration instead")
    return reasons


def _evictor_reasons(evict: Evictor) -> list[str]:
    name = type(evict).__name__
    traits = evict.traits
    if traits.is_view:
        return [f"{name} chooses afresh in every turn what may be read, and vLLM has no turns"]
    if traits.ragged:
        return [f"{name} keeps a different number of entries per head, and a block of vLLM's has all heads' entries"]
    if traits.writes:
        return [f"{name} writes keys, values or weights of entries, and a block of vLLM's keeps those of tokens"]
    if evict.when.observes:
        return [f"{name} learns from pass to pass, and the plugin shows it none"]
    if not traits.fixed_counts:
        return [f"{name} does not say, by the trait fixed_counts, that lengths alone decide how many entries it keeps"]
    reasons = []
    if traits.heads != "own":
        reasons.append(f"{name} may look at all heads of a layer, and a process of vLLM's may have some of them")
    if traits.needs:
        reasons.append(f"{name} needs facts about the model ({', '.join(traits.needs)}), which the plugin has not")
    if evict.skip_layers not in (0, ()):
        reasons.append(f"skip_layers={evict.skip_layers}: a block that is freed is freed in all layers")
    if evict.when.chunks:
        reasons.append(f"chunks=True: {CHUNKED}")
    if evict.stored_heads(1, 2) != 1:
        reasons.append(f"{name} stores entries for each query head: more heads than vLLM's pages have")
    return reasons


def _reader_reasons(read: Reader) -> list[str]:
    if not isinstance(read, PagedReader):
        return [f"{type(read).__name__} chooses single entries, and vLLM reads whole pages"]
    reasons = []
    if read.per_query_head:
        reasons.append("per_query_head=True: a KV head's pages are read once for all its query heads")
    if not read.newest:
        reasons.append("newest=False: the page that is being filled is always read")
    if read.shares:
        reasons.append("share: every layer of vLLM's chooses its own pages")
    if read.sparse_questions:
        reasons.append("sparse_questions=True: prompts are read by kernels that attend to every block")
    return reasons
