"""Generated tokens in CUDA graphs: a step's numbers in tensors with fixed addresses.

A graph replays the captured launches, with the same shapes and addresses; decisions on the host in between are lost. So
every step refills tensors for lengths, counts and pages, as wide as the longest request needs, and every layer attends
sparsely even if a short request reads all its pages. vLLM's own tensors of a step, including the block table and the
lengths, already have fixed addresses.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from kvsieve_vllm.batch import StepPlanner, lengths_of
from kvsieve_vllm.calls import PagedCall, Round, SparseCall
from kvsieve_vllm.options import EngineOptions


class ReplayedSteps:
    """Builds rounds of generated tokens in fixed tensors.

    Args:
        planner: of the layers, with a plan that reads and does not evict; its schedule must not depend on values of
            tensors.
        requests: most requests of a step.
        longest: most tokens of a request.
    """

    def __init__(self, planner: StepPlanner, requests: int, longest: int) -> None:
        facts = planner.facts
        moved = planner.moved
        assert facts.reading is not None and facts.retention is None
        self._facts = facts
        self._reading = facts.reading
        self._moved = moved
        self._schedule = planner.schedule
        self._requests = requests
        self._longest = longest
        # Requests up to the budget read all pages, and budgets grow with lengths: the minimum of each number of pages.
        reads = [self._reading.read(length, length) for length in (*range(1, longest, facts.page), longest)]
        self._most = max(2, *(part.pages for part in reads))
        self._by_channels = any(part.channels < self._reading.dim for part in reads)
        self._counts = moved(torch.ones(requests, dtype=torch.int32))
        self._lengths = moved(torch.ones(requests * facts.kv_heads, dtype=torch.int32))
        self._starts = moved(torch.arange(requests * facts.kv_heads + 1, dtype=torch.int32))
        self._channels = moved(torch.zeros(requests, dtype=torch.int64))

    def round(self, common: Any, captured: bool = False) -> Round | None:
        """Fill the tensors for a step; None if not all rows are generated tokens, or there are too many.

        Args:
            common: vLLM's CommonAttentionMetadata.
            captured: a dummy step, for a graph capture.
        """
        number = common.num_reqs
        if number > self._requests or common.num_actual_tokens != number or common.max_query_len != 1:
            return None
        ends, prompts = lengths_of(common)
        # Rows after the requests pad to the graph's size, with length 0.
        if not captured and any(0 < end <= prompt for end, prompt in zip(ends, prompts, strict=True)):
            return None
        self._fill(ends)
        facts = self._facts
        rows = slice(0, number)
        heads = self._facts.kv_heads
        table = common.block_table_tensor
        sizes = common.seq_lens
        lengths = self._lengths[: number * heads]
        starts = self._starts[: number * heads + 1]
        sparse = SparseCall(
            PagedCall(
                rows, starts, lengths, (1, self._most * facts.page), None,
                self._schedule(facts.heads // heads, 1, lengths, starts),
            ),
            table,
            sizes,
            self._counts[:number],
            self._channels[:number] if self._by_channels else None,
            self._most,
        )  # fmt: skip
        whole = None
        if not self._reading.everywhere:
            schedule = self._schedule(facts.heads, heads, sizes, common.query_start_loc)
            whole = PagedCall(rows, common.query_start_loc, sizes, (1, self._longest), table, schedule)
        return Round(rows, whole, sparse, None, [], [])

    def _fill(self, ends: list[int]) -> None:
        """Fill the tensors that depend on the requests' lengths; absent requests read one entry of page 0."""
        read = [self._reading.read(end, end) for end in ends]
        for into, numbers in (
            (self._counts, [part.pages for part in read]),
            (self._lengths, [part.entries for part in read for _ in range(self._facts.kv_heads)]),
            (self._channels, [part.channels for part in read]),
        ):
            into[: len(numbers)].copy_(self._moved(torch.tensor(numbers, dtype=into.dtype)))


@functools.cache
def install() -> None:
    """Keep steps that end a prompt with one token out of the graphs of generated tokens; once per process.

    vLLM takes such a step for one in which all requests generate.
    """
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    runner._determine_batch_execution_and_padding = _prompts_aside(runner._determine_batch_execution_and_padding)


def _prompts_aside(determine: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(determine)
    def determined(self: Any, *args: Any, **options: Any) -> Any:
        free = options.get("force_uniform_decode") is None
        if free and EngineOptions.given(self.vllm_config.additional_config) is not None:
            number = options["num_reqs"]
            batch = self.input_batch
            if (batch.num_computed_tokens_cpu[:number] < batch.num_prompt_tokens[:number]).any():
                options["force_uniform_decode"] = False
        return determine(self, *args, **options)

    return determined
