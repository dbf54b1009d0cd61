"""Blocks freed by eviction: a KV cache spec and its manager, in the scheduler's process."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvsieve.errors import CacheStateError
from kvsieve.planning.plans import Plan
from kvsieve_vllm.metrics import COUNTS, install
from kvsieve_vllm.retention import BlockRetention


@dataclass(frozen=True, kw_only=True)
class RetainedSpec(FullAttentionSpec):
    """Layers of full attention with prompts reduced by an evictor.

    Attributes:
        retention: the evictor on blocks.
    """

    retention: BlockRetention | None = None

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Merge the equal specs of a group's layers."""
        return replace(super().merge(specs), retention=specs[0].retention)


class RetainedManager(FullAttentionManager):
    """Frees the blocks of a gap, one step after the workers have packed the kept entries.

    In a model with layers of several kinds it manages the group with full attention; vLLM's own managers have the
    others.
    """

    def cache_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Cache nothing: a prompt's first blocks get entries of the whole prompt."""

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the empty blocks after so many processed tokens; the workers compute the same gap."""
        if num_prompt_tokens is None:
            raise CacheStateError("vLLM gave no prompt length; kvsieve's eviction needs it to free blocks")
        retention = self.kv_cache_spec.retention
        first, end = retention.gap(num_prompt_tokens, processed_computed_tokens)
        before = self.block_pool.get_num_free_blocks()
        self._remove_blocks_in_range(request_id, first, end)
        freed = self.block_pool.get_num_free_blocks() - before
        if freed:
            stored = retention.stored(num_prompt_tokens, processed_computed_tokens)
            COUNTS.add((request_id, processed_computed_tokens), freed, stored)


def spec_for(spec: Any, plan: Plan, self_test: bool) -> Any:
    """Return the spec of a layer under a plan: its own, unless the plan evicts and the layer has full attention."""
    if plan.evict is None or type(spec) is not FullAttentionSpec or spec.sliding_window is not None:
        return spec
    own = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return RetainedSpec(**own, retention=BlockRetention(plan.evict, spec.block_size, self_test))


# Every process of an engine that reads such a spec must know its manager. A manager registered first would otherwise
# keep vLLM from registering its own.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(RetainedSpec, RetainedManager, uniform_type_base_spec=FullAttentionSpec)
install()
