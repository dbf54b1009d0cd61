"""vLLM's backend for CPUs, CPU_ATTN, under a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from kvsieve.attention.causal import has_kernel
from kvsieve_vllm.attention import PlannedAttention, PlannedBackend, planner_for
from kvsieve_vllm.calls import PagedCall, PlannedStep
from kvsieve_vllm.cpu_pages import MOST, PageLayout, page_layout

# Fewest new tokens of a request for which gathering its stored entries pays off.
LONG = 256


class SieveCPUBackend(PlannedBackend, CPUAttentionBackend):
    """vLLM's CPU backend under a plan."""

    @staticmethod
    def get_impl_cls() -> type[SieveCPUAttention]:
        """Return the class of the attention."""
        return SieveCPUAttention

    @staticmethod
    def get_builder_cls() -> type[SieveCPUBuilder]:
        """Return the class of the metadata builder."""
        return SieveCPUBuilder


@dataclass
class SieveCPUMetadata(PlannedStep, CPUAttentionMetadata):
    """vLLM's metadata, and a plan's."""


class SieveCPUBuilder(CPUAttentionMetadataBuilder):
    """Builds the metadata of a step; vLLM's alone if no more is needed."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._planner = planner_for(self, self.num_heads, lambda tensor: tensor, self._schedule, self._long())
        self._init_reorder_batch_threshold(1)

    def _long(self) -> int | None:
        """Return the fewest rows of a request for which kvsieve's kernel, if available, is faster than vLLM's.

        With AMX vLLM's own kernel is always used.
        """
        dtype = self.kv_cache_spec.dtype
        numbers = self.block_size * self.head_dim
        fits = self.isa != "amx" and dtype == self.dtype and numbers <= MOST and has_kernel(dtype, self.head_dim)
        return LONG if fits else None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return the metadata; see AttentionMetadataBuilder."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self._planner is None:
            return metadata
        return SieveCPUMetadata(**vars(metadata), rounds=self._planner.rounds(common_attn_metadata))

    def _schedule(self, heads: int, kv_heads: int, lengths: Tensor, starts: Tensor) -> Tensor:
        """Divide a call among the kernel's threads."""
        schedule: Tensor = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.head_dim,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=None,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return schedule


class SieveCPUAttention(PlannedAttention, CPUAttentionBackendImpl):
    """A layer's attention with vLLM's CPU kernels."""

    def _attend_pages(
        self, layer: Any, query: Tensor, cache: Tensor, output: Tensor, call: PagedCall, table: Tensor
    ) -> None:
        pages, heads, size, wide = cache.shape
        keys, values = cache.view(pages, heads, 2 * size, wide // 2).chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=output,
            query_start_loc=call.starts,
            seq_lens=call.lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=call.schedule,
            s_aux=None,
            dynamic_causal=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def _read_entries(self, layer: Any, cache: Tensor, pages: Tensor, size: int) -> tuple[Tensor, Tensor]:
        return _layout(layer, cache).read(cache, pages, size)

    def _write_entries(self, layer: Any, cache: Tensor, pages: Tensor, keys: Tensor, values: Tensor) -> None:
        _layout(layer, cache).write(cache, pages, keys, values)


def _layout(layer: Any, cache: Tensor) -> PageLayout:
    return page_layout(layer.isa, cache.shape[2], cache.shape[3] // 2, cache.dtype)
