"""Attention on vLLM's CPU pages under a plan: sparse reading of generated tokens, and eviction behind prompts."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from kvsieve.errors import UnsupportedModelError
from kvsieve.vllm.blocks import spec_for
from kvsieve.vllm.cpu_batch import Packing, PagedCall, SieveCPUBuilder, SieveCPUMetadata, SparseCall
from kvsieve.vllm.cpu_pages import page_layout
from kvsieve.vllm.options import EngineOptions
from kvsieve.vllm.packing import LayerFacts, ObservedQueries, choose_entries
from kvsieve.vllm.pages import PageBounds, PageReader, choose_pages, question_of, reads_layer


class SieveCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend under a plan.

    Attributes:
        options: of the engine that is being built in this process.
    """

    options: ClassVar[EngineOptions | None] = None

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return what a layer's cache is to be: under an evictor, with a manager that frees blocks."""
        assert cls.options is not None
        return spec_for(spec, cls.options.plan, cls.options.self_test)

    @staticmethod
    def get_impl_cls() -> type[SieveCPUAttention]:
        """Return what attends."""
        return SieveCPUAttention

    @staticmethod
    def get_builder_cls() -> type[SieveCPUBuilder]:
        """Return what makes the metadata of a step."""
        return SieveCPUBuilder


class SieveCPUAttention(CPUAttentionBackendImpl):
    """A layer's attention under a plan; layers that do not attend to everything are as without one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        options = EngineOptions.given(config.additional_config)
        assert options is not None
        SieveCPUBackend.options = options
        self._options, self._page = options, config.cache_config.block_size
        self._acts = self.attn_type == AttentionType.DECODER and self.sliding_window == -1
        if self._acts:
            self._refuse(options)
        self._layers = config.model_config.hf_text_config.num_hidden_layers
        self._facts: LayerFacts | None = None
        self._bounds: PageBounds | None = None
        self._reads = False
        evict = options.plan.evict
        self._queries = ObservedQueries(evict.window if evict is not None else 0, config.scheduler_config.max_num_seqs)

    def _refuse(self, options: EngineOptions) -> None:
        """Refuse what only a layer tells of itself."""
        odd = {
            "attention sinks": self.sinks is not None,
            "ALiBi": self.alibi_slopes is not None,
            "entries shared with another layer": self.kv_sharing_target_layer_name is not None,
        }
        found = [name for name, is_so in odd.items() if is_so]
        if found:
            raise UnsupportedModelError(
                f"kvsieve's plan {options.plan.name} does not go with layers of this model, which have "
                f"{' and '.join(found)}; leave the plan out, or use kvsieve's own server, `kvsieve serve`"
            )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **scales: Any,
    ) -> Tensor:
        """Attend as without a plan, or round by round; see CPUAttentionBackendImpl.forward."""
        if not isinstance(attn_metadata, SieveCPUMetadata):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        if self._facts is None:
            self._know(layer)
        if attn_metadata.rounds is None:
            self._look(key, kv_cache, attn_metadata.slot_mapping, slice(0, attn_metadata.num_actual_tokens))
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        for each in attn_metadata.rounds:
            self._look(key, kv_cache, attn_metadata.slot_mapping, each.rows)
            call = each.whole
            if each.sparse is not None and self._reads:
                self._read_sparsely(layer, query, kv_cache, output, each.sparse)
                call = each.rest
            if call is not None:
                keys, values = kv_cache.view(*kv_cache.shape[:2], 2 * self._page, -1).chunk(2, dim=2)
                self._attend(layer, query, keys, values, output, call)
            for block, segment in each.seen:
                self._queries.see(block, segment.start, query[segment.rows], segment.request.prompt)
            for packing in each.packings:
                self._pack(layer, query, kv_cache, packing)
        return output

    def _know(self, layer: Any) -> None:
        index = extract_layer_index(layer.layer_name)
        self._facts = LayerFacts(index, self._layers, self.scale, self.logits_soft_cap or None)
        read = self._options.plan.read
        self._reads = isinstance(read, PageReader) and reads_layer(read, index, self._layers)

    def _look(self, key: Tensor, kv_cache: Tensor, slots: Tensor, rows: slice | Tensor) -> None:
        """Take the keys of some rows, which are stored by now, into their pages' bounds."""
        if not self._reads:
            return
        pages, heads, size, wide = kv_cache.shape
        if self._bounds is None or len(self._bounds.table) != pages:
            self._bounds = PageBounds(pages, heads, wide // 2, size, key)
        self._bounds.update(key[rows], slots[rows])

    def _attend(self, layer: Any, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, call: PagedCall) -> None:
        """Attend to all pages of each request, with queries and outputs [rows, heads, dim]."""
        is_slice = isinstance(call.rows, slice)
        asked = query[call.rows]
        into = output[call.rows] if is_slice else torch.empty_like(asked)
        self._kernel(layer, asked, keys, values, into.view(asked.shape), call, call.table)
        if not is_slice:
            output[call.rows] = into.view(len(into), *output.shape[1:])

    def _read_sparsely(self, layer: Any, query: Tensor, kv_cache: Tensor, output: Tensor, sparse: SparseCall) -> None:
        """Attend to the pages that each KV head chooses, each head of each page being a page of its own."""
        assert self._bounds is not None
        pages, heads, size, wide = kv_cache.shape
        dim, groups, call = wide // 2, self.num_queries_per_kv, sparse.call
        asked = query[call.rows].reshape(-1, heads, groups, dim)
        question = question_of(asked, self.scale, sparse.channels)
        chosen = choose_pages(
            self._bounds.table, question, sparse.table, sparse.sizes, sparse.counts, sparse.most, size
        ).flatten(0, 1)
        keys, values = kv_cache.view(pages * heads, 1, 2 * size, dim).chunk(2, dim=2)
        asked = asked.flatten(0, 1)
        if isinstance(call.rows, slice):
            into = output[call.rows].view(asked.shape)
            self._kernel(layer, asked, keys, values, into, call, chosen)
        else:
            into = torch.empty_like(asked)
            self._kernel(layer, asked, keys, values, into, call, chosen)
            output[call.rows] = into.view(-1, *output.shape[1:])

    def _kernel(
        self, layer: Any, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, call: PagedCall, table: Tensor
    ) -> None:
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

    def _pack(self, layer: Any, query: Tensor, kv_cache: Tensor, packing: Packing) -> None:
        """Put the entries that stay into the request's first pages."""
        assert self._facts is not None and self._options.plan.evict is not None
        evict, segment, size = self._options.plan.evict, packing.segment, self._page
        layout = page_layout(layer.isa, size, kv_cache.shape[3] // 2, kv_cache.dtype)
        keys, values = layout.read(kv_cache, packing.pages, packing.stored)
        kept, tail = packing.kept * size, packing.stored % size
        if self._options.self_test:
            chosen = torch.arange(kept - 1, -1, -1).expand(len(keys), -1)
        else:
            asked = self._queries.last(int(packing.pages[0]), segment.start, query[segment.rows])
            chosen = choose_entries(evict, self._facts, asked, keys, values, kept, tail)
        keys, values = (each.gather(1, chosen[..., None].expand(-1, -1, each.shape[2])) for each in (keys, values))
        into = packing.pages[: packing.kept]
        layout.write(kv_cache, into, keys, values)
        if self._bounds is not None:
            self._bounds.replace(into, keys)
