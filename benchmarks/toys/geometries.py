"""Three geometries that have no small checkpoint, as configurations of transformers: about two million parameters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.toys.task import VOCABULARY

SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
# Per geometry: transformers' model_type, and what is laid over SIZE. The state of a delta-net layer is 2 heads of
# 16 x 32, far less than the records hold. Windows of 32 tokens end long before most records. One expert is a dense MLP.
GEOMETRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": (
        "qwen3_5_text",
        {"head_dim": 32, "layer_types": ["linear_attention", "full_attention"] * 3}
        | {"linear_num_key_heads": 2, "linear_key_head_dim": 16}
        | {"linear_num_value_heads": 2, "linear_value_head_dim": 32},
    ),
    "sinks": (
        "gpt_oss",
        {"head_dim": 32, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 3}
        | {"num_local_experts": 1, "num_experts_per_tok": 1, "experts_implementation": "eager"}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "latent": (
        "deepseek_v3",
        {"num_key_value_heads": 6, "q_lora_rank": None, "kv_lora_rank": 64}
        | {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
        | {"first_k_dense_replace": 6, "n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
        | {"num_mtp_layers": 0},
    ),
    "dense": ("llama", {}),
}


def build(geometry: str, seed: int, **overrides: Any) -> PreTrainedModel:
    """Make a model of random weights, float32; the same seed gives the same weights."""
    if geometry not in GEOMETRIES:
        raise ValueError(f"unknown geometry {geometry!r}; known: {', '.join(GEOMETRIES)}")
    kind, own = GEOMETRIES[geometry]
    config = AutoConfig.for_model(kind, **SIZE | own | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
