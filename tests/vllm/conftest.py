"""Engines of vLLM on a tiny random model in float32, within this process; `make test-vllm` runs them.

They guard upgrades: what the plugin relies on in vLLM is private to it in part. Without vLLM all are skipped.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# Before vLLM is imported. A process of its own per engine would cost seconds, and show nothing of itself.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")

from engines_of_vllm import BLOCK


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> str:
    """A random model whose attention is sharp enough that dropped entries show."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, initializer_range=0.12,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def engine(checkpoint):
    """Make engines with a plan, one after another, None for none; of another `model` where one is given."""
    pytest.importorskip("vllm")

    @contextlib.contextmanager
    def make(plan: str | None, *, self_test: bool = False, **options: Any) -> Iterator[Any]:
        from vllm import LLM
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        given = {} if plan is None else {"kvsieve": {"plan": plan, "self_test": self_test}}
        options = {
            "model": checkpoint, "max_model_len": 1024, "max_num_seqs": 6, "max_num_batched_tokens": 1024,
            "block_size": BLOCK, "enforce_eager": True, "seed": 0, "skip_tokenizer_init": True,
            "num_gpu_blocks_override": 200, **options,
        }  # fmt: skip
        llm = LLM(dtype="float32", additional_config=given, disable_log_stats=False, **options)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()
            gc.collect()

    return make


@pytest.fixture
def caplog_vllm(caplog):
    """What is logged under vLLM's logger, which does not hand on to the root."""
    import logging

    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
