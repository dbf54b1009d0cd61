"""Tiny random models, one per architecture family of transformers.

The list is the single place that says which families kvsieve knows of: the tests run over it, and
`docs/supported_models.md` and `kvsieve models` are made from it. A family here need not be supported; it must build
from a config alone, at once, with no download. Every model is 64 channels wide, and most have 4 layers, 4 query heads,
2 KV heads and 16 channels per head. Families that mix local and full attention alternate the two, with a window of 16
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# initializer_range and tie_word_embeddings keep greedy tokens apart: at the usual 0.02 a model this narrow gives nearly
# flat logits, and an output layer tied to the embedding makes it repeat its last token. The default implementation of
# mixtures of experts knows no float64.
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
    """One architecture: `name` is the transformers `model_type` or `model_type:variant`; `config` is laid over BASE."""

    name: str
    title: str
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        return self.name.partition(":")[0]


class UnknownFamilyError(KeyError):
    """No family has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"unknown model family {self.name!r}; known: {', '.join(family.name for family in FAMILIES)}"


_HEAD: dict[str, Any] = {"head_dim": 16}
_LOCAL: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_SPARSE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
}
_ROUTED |= {"n_group": 1, "topk_group": 1}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_LATENT |= {"num_key_value_heads": 4}
_MLP_TYPES: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
_INDEXED: dict[str, Any] = {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 2}
_DELTA: dict[str, Any] = {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_num_value_heads": 2}
_DELTA |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
# Small enough to change every score. Eager, because SDPA in transformers 5.16 leaves the softcap out without a word.
_SOFTCAP: dict[str, Any] = {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "attn_implementation": "eager"}
_SHARED_KV: dict[str, Any] = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128,
}
_GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}

FAMILIES: tuple[Family, ...] = (
    # Dense decoders with full attention in every layer.
    Family("llama", "Llama 1/2/3, and everything saved as Llama"),
    Family("mistral", "Mistral 7B v0.2 and later", {"sliding_window": None}),
    Family("ministral3", "Ministral 3", _HEAD),
    Family("qwen2", "Qwen2, Qwen2.5"),
    Family("qwen3", "Qwen3", _HEAD),
    Family("phi", "Phi-1, Phi-1.5, Phi-2"),
    Family("phi3", "Phi-3, Phi-3.5 mini, Phi-4"),
    Family("gemma", "Gemma", _HEAD),
    Family("olmo", "OLMo"),
    Family("olmo2", "OLMo 2"),
    Family("cohere", "Command R", {"logit_scale": 1.0}),
    Family("granite", "Granite 3, Granite 4 dense"),
    Family("smollm3", "SmolLM3"),
    Family("glm", "GLM-4 9B", _HEAD),
    Family("glm4", "GLM-4 0414", _HEAD),
    Family("starcoder2", "StarCoder2"),
    Family("stablelm", "StableLM"),
    Family("seed_oss", "Seed-OSS", _HEAD),
    Family("hunyuan_v1_dense", "Hunyuan dense", _HEAD),
    Family("hyperclovax", "HyperCLOVA X", _HEAD),
    Family("ernie4_5", "ERNIE 4.5 dense", _HEAD),
    Family("arcee", "Arcee AFM", _HEAD),
    Family("apertus", "Apertus"),
    Family("helium", "Helium", _HEAD),
    Family("nemotron", "Nemotron, Minitron", _HEAD),
    Family("bitnet", "BitNet b1.58"),
    Family("nanochat", "nanochat"),
    Family("jais2", "Jais 2", _HEAD),
    Family("persimmon", "Persimmon"),
    Family("gpt_neox", "GPT-NeoX, Pythia"),
    Family("diffllama", "DiffLlama", _HEAD),
    Family("doge", "Doge"),
    # Mixtures of experts with full attention in every layer.
    Family("mixtral", "Mixtral", _LOCAL_EXPERTS),
    Family("qwen2_moe", "Qwen1.5-MoE, Qwen2-MoE", _SPARSE | {"shared_expert_intermediate_size": 32}),
    Family("qwen3_moe", "Qwen3-MoE", _HEAD | _SPARSE),
    Family("olmoe", "OLMoE", _SPARSE),
    Family("flex_olmo", "FlexOlmo", _SPARSE),
    Family("phimoe", "Phi-3.5-MoE", _LOCAL_EXPERTS),
    Family("granitemoe", "Granite 3 MoE", _LOCAL_EXPERTS),
    Family("granitemoeshared", "Granite MoE, shared experts", _LOCAL_EXPERTS | {"shared_intermediate_size": 32}),
    Family("dots1", "dots.llm1", _ROUTED),
    Family("glm4_moe", "GLM-4.5, GLM-4.6", _HEAD | _ROUTED),
    Family("solar_open", "Solar Open", _HEAD | _ROUTED),
    Family(
        "ernie4_5_moe",
        "ERNIE 4.5 MoE",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    ),
    Family("hunyuan_v1_moe", "Hunyuan A13B", _HEAD | {"num_experts": 4, "moe_topk": 2}),
    Family("hy_v3", "Hy3", _HEAD | _SPARSE | _MLP_TYPES | {"num_shared_experts": 1}),
    Family("minimax_m2", "MiniMax-M2", _HEAD | _LOCAL_EXPERTS),
    Family("jetmoe", "JetMoE", _LOCAL_EXPERTS | {"kv_channels": 16}),
    Family("aria_text", "Aria, text part", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    # Sliding windows: everywhere, or taking turns with full attention.
    Family("mistral:sliding", "Mistral 7B v0.1", {"sliding_window": 16}),
    Family("ministral", "Ministral 8B", _LOCAL),
    Family("qwen2:sliding", "Qwen2 with sliding layers", _LOCAL | {"use_sliding_window": True}),
    Family("gemma2", "Gemma 2", _LOCAL | _SOFTCAP),
    Family("gemma3_text", "Gemma 3, text part", _LOCAL | {"query_pre_attn_scalar": 16}),
    Family("vaultgemma", "VaultGemma", _LOCAL | _SOFTCAP),
    Family("olmo3", "OLMo 3", _LOCAL),
    Family("cohere2", "Command R7B, Command A", _LOCAL | {"logit_scale": 1.0}),
    Family("cohere2_moe", "Command A MoE", _LOCAL | _SPARSE | {"logit_scale": 1.0}),
    Family("exaone4", "EXAONE 4", _LOCAL),
    Family("exaone_moe", "K-EXAONE", _LOCAL | _SPARSE | _MLP_TYPES | {"num_shared_experts": 1}),
    Family("cwm", "Code World Model", _LOCAL),
    Family("granite_swa", "Granite with sliding windows", _LOCAL),
    Family("granitemoe_swa", "Granite MoE with sliding windows", _LOCAL | _LOCAL_EXPERTS),
    Family("afmoe", "Trinity", _LOCAL | _SPARSE),
    Family("mellum", "Mellum 2", _LOCAL | _LOCAL_EXPERTS | {"moe_intermediate_size": 32}),
    Family("laguna", "Laguna", _LOCAL | _SPARSE | {"shared_expert_intermediate_size": 32}),
    # Attention sinks, keys wider than values, chunked attention, layers that share a KV cache.
    Family("gpt_oss", "gpt-oss", _LOCAL | _LOCAL_EXPERTS),
    Family("mimo_v2_flash", "MiMo-V2-Flash", _LOCAL | _ROUTED | _MLP_TYPES | {"head_dim": 24, "v_head_dim": 16}),
    Family(
        "llama4_text",
        "Llama 4, text part",
        _HEAD
        | _LOCAL_EXPERTS
        | {"intermediate_size_mlp": 96, "attention_chunk_size": 16, "no_rope_layers": [1, 0, 1, 0]},
    ),
    Family(
        "gemma3n_text",
        "Gemma 3n, text part",
        _LOCAL | _SHARED_KV | {"laurel_rank": 8, "activation_sparsity_pattern": None},
    ),
    Family("gemma4_text", "Gemma 4, text part", _LOCAL | _SHARED_KV | {"global_head_dim": 32}),
    # Multi-head latent attention, some of it with a learned index of the entries to read.
    Family("deepseek_v2", "DeepSeek-V2", _LATENT | _ROUTED | {"first_k_dense_replace": 1}),
    Family("deepseek_v3", "DeepSeek-V3, DeepSeek-R1, Kimi K2", _LATENT | _ROUTED | {"first_k_dense_replace": 1}),
    Family("deepseek_v32", "DeepSeek-V3.2", _LATENT | _ROUTED | _MLP_TYPES | _INDEXED),
    Family("glm_moe_dsa", "GLM-5", _LATENT | _ROUTED | _MLP_TYPES | _INDEXED),
    Family("glm4_moe_lite", "GLM-4.7-Flash", _LATENT | _ROUTED | _MLP_TYPES),
    Family("axk2", "A.X K2", _LATENT | _ROUTED | _MLP_TYPES | _INDEXED),
    Family("axk1", "A.X K1", _LATENT | _ROUTED | _MLP_TYPES),
    Family("minicpm3", "MiniCPM3", _LATENT | {"scale_emb": 1, "dim_model_base": 64}),
    Family("youtu", "Youtu-LLM", _LATENT),
    Family(
        "longcat_flash",
        "LongCat-Flash",
        _LATENT
        | {"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "head_dim": 16}
        | {"moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2},
    ),
    # Blocks of keys chosen or compressed by the model itself; attention with a learned position bias.
    Family(
        "deepseek_v4",
        "DeepSeek-V4",
        _HEAD
        | _ROUTED
        | {"q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 16, "sliding_window": 16, "mlp_layer_types": ["moe"] * 4}
        | {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2}
        | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}
        | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 16},
    ),
    Family(
        "minimax_m3_vl_text",
        "MiniMax-M3, text part",
        _HEAD
        | _LOCAL_EXPERTS
        | {"rotary_dim": 16, "dense_intermediate_size": 96, "shared_intermediate_size": 32}
        | {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": 2}
        | {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    ),
    Family(
        "inkling_text",
        "Inkling, text part",
        _HEAD
        | _ROUTED
        | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 16}
        | {"local_layer_ids": [0, 2], "rel_extent": 64},
    ),
    # Linear attention, state spaces and convolutions, alone or taking turns with full attention.
    Family("qwen3_next", "Qwen3-Next", _HEAD | _SPARSE | _DELTA | {"shared_expert_intermediate_size": 32}),
    Family("qwen3_5_text", "Qwen3.5, text part", _HEAD | _DELTA),
    Family(
        "qwen3_5_moe_text",
        "Qwen3.5-MoE, text part",
        _HEAD | _SPARSE | _DELTA | {"shared_expert_intermediate_size": 32},
    ),
    Family("olmo_hybrid", "OLMo Hybrid", _DELTA),
    Family("minimax", "MiniMax-Text-01", _HEAD | _LOCAL_EXPERTS | {"block_size": 16}),
    Family("lfm2", "LFM2", {"layer_types": ["conv", "full_attention"] * 2}),
    Family(
        "lfm2_moe",
        "LFM2 MoE",
        _SPARSE | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    ),
    Family("bamba", "Bamba", _MAMBA2 | {"attn_layer_indices": [1, 3]}),
    Family("falcon_h1", "Falcon-H1", _MAMBA2 | {"mamba_d_ssm": 128}),
    Family(
        "granitemoehybrid",
        "Granite 4 hybrid",
        _MAMBA2
        | _LOCAL_EXPERTS
        | {"shared_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    Family(
        "jamba",
        "Jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
    Family(
        "nemotron_h",
        "Nemotron-H, Nemotron 3",
        _HEAD
        | {"layers_block_type": ["linear_attention", "full_attention", "mlp", "full_attention"]}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16},
    ),
    Family(
        "zamba2",
        "Zamba2",
        {"layers_block_type": ["linear_attention", "hybrid"] * 2, "chunk_size": 16}
        | {"n_mamba_heads": 8, "mamba_headdim": 16, "mamba_d_state": 16},
    ),
    Family(
        "recurrent_gemma",
        "RecurrentGemma",
        _HEAD | {"lru_width": 64, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
    ),
    Family("mamba", "Mamba", {"state_size": 8, "time_step_rank": 4, "intermediate_size": 128}),
    Family("mamba2", "Mamba-2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16}),
    # Older decoders: learned positions or ALiBi, their own attention code.
    Family("opt", "OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2}),
    Family("gpt2", "GPT-2", _GPT),
    Family("gpt_bigcode", "StarCoder, SantaCoder", _GPT),
    Family("gptj", "GPT-J", _GPT | {"rotary_dim": 16}),
    Family("codegen", "CodeGen", _GPT | {"rotary_dim": 16}),
    Family(
        "gpt_neo",
        "GPT-Neo",
        {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 16},
    ),
    Family("biogpt", "BioGPT"),
    Family("xglm", "XGLM", {"d_model": 64, "ffn_dim": 96, "num_layers": 4, "attention_heads": 4, "init_std": 0.2}),
    Family("gpt_neox_japanese", "GPT-NeoX-Japanese"),
    Family("falcon", "Falcon"),
    Family("bloom", "BLOOM", {"n_layer": 4, "n_head": 4}),
    Family("mpt", "MPT", {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 512}),
    Family(
        "dbrx",
        "DBRX",
        {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 512}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}}
        | {"ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    # Encoder-decoder.
    Family("t5", "T5, Flan-T5", {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 4, "num_heads": 4}),
)


def build(family_name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A tiny random model of the family, on CPU and in eval mode, with SDPA attention where the family has it.

    The same seed gives the same weights (within one transformers release: some change the order of initialisation), and
    the caller's random state is left alone. `overrides` are config values laid over the family's own;
    `attn_implementation` is one of them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    family = next((family for family in FAMILIES if family.name == family_name), None)
    if family is None:
        raise UnknownFamilyError(family_name)
    config = AutoConfig.for_model(family.model_type, **{**BASE, **family.config, **overrides})
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto.from_config(config, dtype=dtype).eval()
