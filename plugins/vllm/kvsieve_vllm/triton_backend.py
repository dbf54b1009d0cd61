"""vLLM's backend for GPUs in Triton, TRITON_ATTN, under a plan.

Chosen among vLLM's CUDA backends because its kernel reads any paged cache by strides and a block table, so that a KV
head of a page can be a page of its own; it is available with every Triton; and its cache has the CPU layout. Only steps
that pack or keep queries synchronize with the device, and without an evictor a step of generated tokens can be replayed
from a CUDA graph.

Not measured, and not run on a GPU: tests run it on CPU tensors, with Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import triton_attn
from vllm.v1.kv_cache_interface import KVCacheLayout

from kvsieve_vllm.attention import PlannedAttention, PlannedBackend, planner_for
from kvsieve_vllm.calls import PagedCall, PlannedStep
from kvsieve_vllm.graphs import ReplayedSteps, install
from kvsieve_vllm.options import EngineOptions


class SieveTritonBackend(PlannedBackend, triton_attn.TritonAttentionBackend):
    """vLLM's Triton backend under a plan."""

    @staticmethod
    def get_impl_cls() -> type[SieveTritonAttention]:
        """Return the class of the attention."""
        return SieveTritonAttention

    @staticmethod
    def get_builder_cls() -> type[SieveTritonBuilder]:
        """Return the class of the metadata builder."""
        return SieveTritonBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layout with contiguous heads of pages, usable as pages of their own."""
        return (KVCacheLayout.LBHNC,)


@dataclass
class SieveTritonMetadata(PlannedStep, triton_attn.TritonAttentionMetadata):
    """vLLM's metadata, and a plan's."""


@dataclass(frozen=True)
class SplitSoftmax:
    """Buffers for splitting long requests among programs, for few requests with one token each.

    Attributes:
        most: most requests to split.
        parts: of a request.
        outputs: float32 [rows, query heads, parts, dim padded], sums of values.
        greatest: float32 [rows, query heads, parts], maximum logits.
        sums: float32 [rows, query heads, parts], sums of exponentials.
    """

    most: int
    parts: int
    outputs: Tensor
    greatest: Tensor
    sums: Tensor


class SieveTritonBuilder(triton_attn.TritonAttentionMetadataBuilder):
    """Builds the metadata of a step; vLLM's alone if no more is needed."""

    # How many rounds a step has is decided anew in every step; see get_cudagraph_support.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # The window that makes vLLM pass prompt lengths hides nothing, so the kernel may ignore it.
        self.rswa_window = None
        parts = triton_attn.NUM_PAR_SOFTMAX_SEGMENTS
        heads = self.num_heads_q
        # On some GPUs vLLM makes four times the parts of fewer rows; this division holds as many requests everywhere.
        self._split = SplitSoftmax(
            self.seq_threshold_3D,
            parts,
            self.softmax_segm_output.view(-1, heads, parts, self.softmax_segm_output.shape[-1]),
            self.softmax_segm_max.view(-1, heads, parts),
            self.softmax_segm_expsum.view(-1, heads, parts),
        )
        self._planner = planner_for(self, heads, self._moved, self._schedule)
        self._replayed: ReplayedSteps | None = None
        if self._planner is not None and self.decode_cudagraph_enabled:
            install()
            most = min(
                vllm_config.scheduler_config.max_num_seqs, max(vllm_config.compilation_config.cudagraph_capture_sizes)
            )
            longest = vllm_config.model_config.max_model_len
            self._replayed = ReplayedSteps(self._planner, most, longest)
        self._init_reorder_batch_threshold(1)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return support for replaying steps in which all requests generate, unless the plan evicts."""
        options = EngineOptions.given(vllm_config.additional_config)
        reads = options is not None and options.plan.evict is None
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if reads else cls._cudagraph_support

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Return the metadata of a dummy step with one token per request."""
        metadata = self.build(0, common_attn_metadata)
        if self._replayed is not None:
            metadata.rounds = [self._replayed.round(common_attn_metadata, captured=True)]
        # As vLLM does, since graphs of long requests take long to capture.
        metadata.seq_lens.fill_(1)
        return metadata

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return the metadata; see AttentionMetadataBuilder."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self._planner is None:
            return metadata
        replayed = None if self._replayed is None else self._replayed.round(common_attn_metadata)
        rounds = self._planner.rounds(common_attn_metadata) if replayed is None else [replayed]
        return SieveTritonMetadata(**vars(metadata), rounds=rounds)

    def _moved(self, tensor: Tensor) -> Tensor:
        moved: Tensor = async_tensor_h2d(tensor, self.device)
        return moved

    def _schedule(self, heads: int, kv_heads: int, lengths: Tensor, starts: Tensor) -> SplitSoftmax:
        """Return the buffers, for as many rows of so many query heads as fit."""
        split = self._split
        times = self.num_heads_q // heads
        return SplitSoftmax(split.most * times, split.parts, split.outputs, split.greatest, split.sums)


class SieveTritonAttention(PlannedAttention, triton_attn.TritonAttentionImpl):
    """A layer's attention with vLLM's Triton kernel."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return False: outputs combine several calls."""
        return False

    def _attend_pages(
        self, layer: Any, query: Tensor, cache: Tensor, output: Tensor, call: PagedCall, table: Tensor
    ) -> None:
        keys, values = cache.transpose(1, 2).split(self.head_size, dim=-1)
        split: SplitSoftmax = call.schedule
        triton_attn.unified_attention(
            q=query,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=call.starts,
            max_seqlen_q=call.longest[0],
            seqused_k=call.lengths,
            max_seqlen_k=call.longest[1],
            softmax_scale=self.scale,
            causal=True,
            window_size=self.sliding_window,
            block_table=table,
            softcap=self.logits_soft_cap,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=split.most,
            num_par_softmax_segments=split.parts,
            softmax_segm_output=split.outputs,
            softmax_segm_max=split.greatest,
            softmax_segm_expsum=split.sums,
            use_td=self.use_td,
        )

    def _read_entries(self, layer: Any, cache: Tensor, pages: Tensor, size: int) -> tuple[Tensor, Tensor]:
        keys, values = cache[pages].transpose(0, 1).flatten(1, 2)[:, :size].split(self.head_size, dim=-1)
        return keys, values

    def _write_entries(self, layer: Any, cache: Tensor, pages: Tensor, keys: Tensor, values: Tensor) -> None:
        entries = torch.cat([keys, values], -1)
        cache[pages] = entries.unflatten(1, (len(pages), cache.shape[2])).transpose(0, 1)
