"""An architecture family with its tiny configuration, and parts of configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsieve.cli.models_table import why_not_in

# initializer_range and tie_word_embeddings keep greedy tokens distinct: at the usual 0.02 a model this narrow gives
# nearly flat logits, and an output layer tied to the embedding makes it repeat its last token. The default
# implementation of mixtures of experts does not support float64.
BASE: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 127,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "experts_implementation": "eager",
}


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        name: the transformers `model_type`, or `model_type:variant`.
        title: well-known models.
        config: values on top of BASE; of the text part if the model has others.
        parts: other parts of a composite model, such as `vision_config`, and the ids of their tokens.
        since: first release of transformers that has it, such as "5.19"; "" if all supported ones do.
        broken: a release with broken code for it, such as "5.24.0"; "" if none is known.
    """

    name: str
    title: str
    config: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)
    since: str = ""
    broken: str = ""

    @property
    def model_type(self) -> str:
        return self.name.partition(":")[0]

    def why_not_in(self, version: str) -> str | None:
        """Return why a release of transformers, such as "5.23.0", cannot run it, as a clause, or None."""
        return why_not_in(version, self.since, self.broken)


HEAD: dict[str, Any] = {"head_dim": 16}
LOCAL: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SPARSE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
}
ROUTED |= {"n_group": 1, "topk_group": 1}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LATENT |= {"num_key_value_heads": 4}
MLP_TYPES: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
INDEXED: dict[str, Any] = {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 2}
DELTA: dict[str, Any] = {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_num_value_heads": 2}
DELTA |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2}
KIMI_DELTA: dict[str, Any] = {"q_lora_rank": None, "num_experts": 4, "linear_head_dim": 16, "linear_num_heads": 2}
KIMI_DELTA |= {"layer_types": ["linear_attention", "full_attention"] * 2}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
# Small enough to change every score. Eager, because SDPA in transformers 5.16 leaves the softcap out without a word.
SOFTCAP: dict[str, Any] = {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "attn_implementation": "eager"}
SHARED_KV: dict[str, Any] = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128,
}
GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}
