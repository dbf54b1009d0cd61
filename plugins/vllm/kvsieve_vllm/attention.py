"""Attention of a layer on vLLM's pages under a plan: the common part of the CPU and GPU backends.

Both subclass a backend of vLLM's own, with a cache [pages, KV heads, entries of a page, keys and values]. A backend
adds the kernel call and the layout of a page.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvsieve.attention import AttentionRequest, DenseEntries, attend
from kvsieve.errors import CacheStateError, UnsupportedModelError
from kvsieve.types import AttentionQueries
from kvsieve_vllm.batch import GroupFacts, StepPlanner
from kvsieve_vllm.blocks import RetainedSpec, spec_for
from kvsieve_vllm.calls import PagedCall, PlannedStep, PromptCall, SegmentEnd, SparseCall
from kvsieve_vllm.options import EngineOptions
from kvsieve_vllm.packing import EvictorStates, LayerFacts, ObservedQueries, Offered, choose_entries
from kvsieve_vllm.pages import PageBounds, choose_pages
from kvsieve_vllm.reading import PageReading


class PlannedBackend:
    """Base of backends under a plan, before vLLM's own.

    Attributes:
        options: of the engine that is being built in this process.
    """

    options: ClassVar[EngineOptions | None] = None

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the spec of a layer's cache: under an evictor, with a manager that frees blocks."""
        options = PlannedBackend.options
        assert options is not None
        return spec_for(spec, options.plan, options.self_test)


def planner_for(
    builder: Any,
    heads: int,
    moved: Callable[[Tensor], Tensor],
    schedule: Callable[[int, int, Tensor, Tensor], Any],
    long: int | None = None,
) -> StepPlanner | None:
    """Return the planner of a group's steps; None if a plan changes nothing in its layers.

    Args:
        builder: vLLM's AttentionMetadataBuilder of the group.
        heads: query heads of this process.
        moved: see StepPlanner.
        schedule: see StepPlanner.
        long: see GroupFacts.
    """
    spec = builder.kv_cache_spec
    config = builder.vllm_config
    options = EngineOptions.given(config.additional_config)
    assert options is not None
    if not isinstance(spec, FullAttentionSpec) or spec.sliding_window is not None:
        return None
    page = config.cache_config.block_size
    if spec.block_size != page:
        raise CacheStateError(
            f"vLLM cuts its blocks of {page} entries into pages of {spec.block_size}; kvsieve's plugin takes a block "
            "for a page, so give that as block_size="
        )
    layers = config.model_config.hf_text_config.num_hidden_layers
    reading = PageReading.of(options, page, spec.head_size, layers)
    if reading is not None:
        # With recurrent states, blocks are larger than at the start of the engine.
        reading.check()
    retention = spec.retention if isinstance(spec, RetainedSpec) else None
    if retention is not None:
        retention.check()
    if reading is None and retention is None:
        return None
    facts = GroupFacts(page, heads, spec.num_kv_heads, reading, retention, long)
    return StepPlanner(facts, moved, schedule)


class PlannedAttention(AttentionImpl):
    """Base of a layer's attention under a plan, before vLLM's own; sliding-window layers are unchanged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        options = EngineOptions.given(config.additional_config)
        assert options is not None
        PlannedBackend.options = options
        self._options = options
        if self.attn_type == AttentionType.DECODER and self.sliding_window in (-1, (-1, -1)):
            self._refuse(options)
        self._layers = config.model_config.hf_text_config.num_hidden_layers
        self._facts: LayerFacts | None = None
        self._bounds: PageBounds | None = None
        # Of a layer that reads sparsely.
        self._reading: PageReading | None = None
        evict = options.plan.evict
        most = config.scheduler_config.max_num_seqs
        self._queries = ObservedQueries(evict.window if evict is not None else 0, most)
        self._states = EvictorStates(most)

    @abstractmethod
    def _attend_pages(
        self, layer: Any, query: Tensor, cache: Tensor, output: Tensor, call: PagedCall, table: Tensor
    ) -> None:
        """Call the kernel: requests attend to the pages in `table` of [pages, KV heads, page, 2 * dim], causally.

        query and output: [rows, query heads, dim], those of `call` alone.
        """

    @abstractmethod
    def _read_entries(self, layer: Any, cache: Tensor, pages: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Read keys and values [KV heads, size, dim] of the first `size` entries of int64 `pages`, in order."""

    @abstractmethod
    def _write_entries(self, layer: Any, cache: Tensor, pages: Tensor, keys: Tensor, values: Tensor) -> None:
        """Fill int64 `pages` with keys and values [KV heads, len(pages) * page, dim]."""

    def _refuse(self, options: EngineOptions) -> None:
        """Refuse unsupported properties of the layer."""
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
        """Attend without a plan, or round by round; see AttentionImpl.forward."""
        if not isinstance(attn_metadata, PlannedStep):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        if self._facts is None:
            self._know(layer, kv_cache)
        metadata: Any = attn_metadata
        slots = metadata.slot_mapping
        if attn_metadata.rounds is None:
            self._look(key, kv_cache, slots, slice(0, metadata.num_actual_tokens))
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        for part in attn_metadata.rounds:
            self._look(key, kv_cache, slots, part.rows)
            new = (query, key, value)
            read = {}
            for prompt in part.prompts:
                read[prompt.segment.request.number] = self._attend_prompt(layer, new, kv_cache, output, prompt)
            call = part.whole
            if part.sparse is not None and self._reading is not None:
                self._read_sparsely(layer, query, kv_cache, output, part.sparse)
                call = part.rest
            if call is not None:
                assert call.table is not None
                self._attend(layer, query, kv_cache, output, call, call.table)
            for end in part.ends:
                self._end(layer, query, kv_cache, end, read.get(end.segment.request.number))
        return output

    def _know(self, layer: Any, kv_cache: Tensor) -> None:
        index, (_, _, size, wide) = extract_layer_index(layer.layer_name), kv_cache.shape
        self._facts = LayerFacts(index, self._layers, self.scale, self.logits_soft_cap or None)
        reading = PageReading.of(self._options, size, wide // 2, self._layers)
        self._reading = reading if reading is not None and index in reading.layers else None

    def _look(self, key: Tensor, kv_cache: Tensor, slots: Tensor, rows: slice | Tensor) -> None:
        """Add the keys of stored rows to their pages' bounds."""
        reading = self._reading
        if reading is None:
            return
        pages, heads, size, wide = kv_cache.shape
        if self._bounds is None or len(self._bounds.table) != pages * reading.parts:
            if kv_cache.is_cuda and torch.cuda.is_current_stream_capturing():
                raise CacheStateError(
                    "vLLM captured a CUDA graph without a warm-up; it would empty what is known of pages"
                )
            means = reading.reader.means
            self._bounds = PageBounds(pages, heads, wide // 2, size, key, parts=reading.parts, means=means)
        self._bounds.update(key[rows], slots[rows])

    def _attend_prompt(
        self, layer: Any, new: tuple[Tensor, Tensor, Tensor], kv_cache: Tensor, output: Tensor, prompt: PromptCall
    ) -> tuple[Tensor, Tensor]:
        """Attend with many tokens of a request, and return its keys and values [KV heads, stored, dim].

        new: the batch's queries, keys and values, [rows, heads, dim].
        """
        rows = prompt.segment.rows
        query, key, value = (part[rows].transpose(0, 1) for part in new)
        if prompt.stored > key.shape[1]:
            key, value = self._read_entries(layer, kv_cache, prompt.pages, prompt.stored)
        into = output[rows]
        asked = AttentionQueries(query[None], self.scale, self.logits_soft_cap or None)
        out = attend(AttentionRequest(asked, DenseEntries(key[None], value[None])))
        into.copy_(out[0].transpose(0, 1).reshape(into.shape))
        return key, value

    def _attend(self, layer: Any, query: Tensor, cache: Tensor, output: Tensor, call: PagedCall, table: Tensor) -> None:
        """Attend with the rows of a call; cache: vLLM's, or a view with one KV head per page."""
        queries = query[call.rows]
        shape = (-1, self.num_heads // self.num_kv_heads * cache.shape[1], queries.shape[-1])
        into = output[call.rows] if isinstance(call.rows, slice) else torch.empty_like(queries)
        self._attend_pages(layer, queries.reshape(shape), cache, into.view(shape), call, table)
        if not isinstance(call.rows, slice):
            output[call.rows] = into.view(len(into), *output.shape[1:])

    def _read_sparsely(self, layer: Any, query: Tensor, kv_cache: Tensor, output: Tensor, sparse: SparseCall) -> None:
        """Attend to the pages chosen by each KV head; each head of each page is a page of its own."""
        bounds = self._bounds
        assert bounds is not None and self._reading is not None
        pages, heads, size, wide = kv_cache.shape
        queries = query[sparse.call.rows].reshape(-1, heads, self.num_heads // heads, wide // 2)
        question = self._reading.reader.question(queries, self.scale, bounds.page, sparse.channels)
        chosen = choose_pages(
            bounds.table, question, sparse.table, sparse.sizes, sparse.counts, sparse.most, size, bounds.parts
        ).flatten(0, 1)
        self._attend(layer, query, kv_cache.view(pages * heads, 1, size, wide), output, sparse.call, chosen)

    def _end(
        self, layer: Any, query: Tensor, kv_cache: Tensor, end: SegmentEnd, read: tuple[Tensor, Tensor] | None
    ) -> None:
        """Keep the observation window for later, and pack the selected entries into the request's first pages.

        read: the request's keys and values, if already gathered.
        """
        segment = end.segment
        queries = query[segment.rows]
        if end.earlier:
            queries = self._queries.joined(end.block, segment.start, queries)
        if end.later:
            self._queries.hold(end.block, segment.end, queries)
        ends_prompt = segment.start < segment.request.prompt
        state = self._states.of(end.block, ends_prompt) if end.block >= 0 else {}
        packing = end.packing
        if packing is None:
            return
        evict = self._options.plan.evict
        size = kv_cache.shape[2]
        assert self._facts is not None and evict is not None
        keys, values = read or self._read_entries(layer, kv_cache, packing.pages, packing.stored)
        kept = packing.kept * size
        tail = packing.stored % size
        if self._options.self_test:
            chosen = torch.arange(kept - 1, -1, -1, device=keys.device).expand(len(keys), -1)
        else:
            chosen = choose_entries(evict, self._facts, Offered(queries, keys, values, state, ends_prompt), kept, tail)
        keys, values = (part.gather(1, chosen[..., None].expand(-1, -1, part.shape[2])) for part in (keys, values))
        into = packing.pages[: packing.kept]
        self._write_entries(layer, kv_cache, into, keys, values)
        if self._bounds is not None:
            self._bounds.replace(into, keys)
