"""Families with latent, compressed or linear attention, state spaces, older decoders, and an encoder-decoder."""

from __future__ import annotations

from tiny_models.family import (
    DELTA,
    GPT,
    HEAD,
    INDEXED,
    KIMI_DELTA,
    LATENT,
    LOCAL,
    LOCAL_EXPERTS,
    MAMBA2,
    MLP_TYPES,
    ROUTED,
    SPARSE,
    Family,
)

SPECIAL: tuple[Family, ...] = (
    # Multi-head latent attention, some of it with a learned index of the entries to read.
    Family("deepseek_v2", "DeepSeek-V2", LATENT | ROUTED | {"first_k_dense_replace": 1}),
    Family("deepseek_v3", "DeepSeek-V3, DeepSeek-R1, Kimi K2", LATENT | ROUTED | {"first_k_dense_replace": 1}),
    Family("deepseek_v32", "DeepSeek-V3.2", LATENT | ROUTED | MLP_TYPES | INDEXED),
    Family("glm_moe_dsa", "GLM-5", LATENT | ROUTED | MLP_TYPES | INDEXED),
    Family("glm4_moe_lite", "GLM-4.7-Flash", LATENT | ROUTED | MLP_TYPES),
    Family("axk2", "A.X K2", LATENT | ROUTED | MLP_TYPES | INDEXED),
    Family("axk1", "A.X K1", LATENT | ROUTED | MLP_TYPES),
    Family("minicpm3", "MiniCPM3", LATENT | {"scale_emb": 1, "dim_model_base": 64}),
    Family("youtu", "Youtu-LLM", LATENT),
    Family(
        "longcat_flash",
        "LongCat-Flash",
        LATENT
        | {"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "head_dim": 16}
        | {"moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2},
    ),
    Family("mistral4", "Mistral Small 4, text part", LATENT | ROUTED),
    Family("hy_v4", "Hy4", LATENT | ROUTED | MLP_TYPES | INDEXED, since="5.17"),
    Family(
        "dots3_note_text",
        "dots3 note, text part",
        LATENT
        | ROUTED
        | MLP_TYPES
        | INDEXED
        | {"sliding_window": 16, "head_dim": 32, "layer_types": ["sliding_attention", "indexed_attention"] * 2}
        | {"shared_experts_intermediate_size": 32, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4}
        | {"swa_q_lora_rank": 16, "swa_kv_lora_rank": 24, "swa_head_dim": 32, "swa_qk_nope_head_dim": 16}
        | {"swa_v_head_dim": 16},
        since="5.23",
    ),
    # Latent attention alternates with linear attention.
    Family("kimi_linear", "Kimi Linear", LATENT | ROUTED | MLP_TYPES | KIMI_DELTA, since="5.17"),
    Family(
        "bailing_hybrid",
        "Ling 2.5, Ring 2.5",
        LATENT | ROUTED | MLP_TYPES | KIMI_DELTA | {"head_dim": 16, "num_mtp_layers": 0},
        since="5.20",
    ),
    # Blocks of keys chosen or compressed by the model itself; attention with a learned position bias.
    Family(
        "deepseek_v4",
        "DeepSeek-V4",
        HEAD
        | ROUTED
        | {"q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 16, "sliding_window": 16, "mlp_layer_types": ["moe"] * 4}
        | {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2}
        | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}
        | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 16},
    ),
    Family(
        "minimax_m3_vl_text",
        "MiniMax-M3, text part",
        HEAD
        | LOCAL_EXPERTS
        | {"rotary_dim": 16, "dense_intermediate_size": 96, "shared_intermediate_size": 32}
        | {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": 2}
        | {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    ),
    Family(
        "inkling_text",
        "Inkling, text part",
        HEAD
        | ROUTED
        | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 16}
        | {"local_layer_ids": [0, 2], "rel_extent": 64},
    ),
    Family(
        "qwen4_exp_text",
        "Qwen4-Exp, text part",
        HEAD
        | SPARSE
        | DELTA
        | {"shared_expert_intermediate_size": 32, "hc_lowrank": 16}
        | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
        | {"indexer_budget": 16, "indexer_compress_ratio": 4},
    ),
    # Linear attention, state spaces and convolutions, alone or alternating with full attention.
    Family("qwen3_next", "Qwen3-Next", HEAD | SPARSE | DELTA | {"shared_expert_intermediate_size": 32}),
    Family("qwen3_5_text", "Qwen3.5, text part", HEAD | DELTA),
    Family(
        "qwen3_5_moe_text",
        "Qwen3.5-MoE, text part",
        HEAD | SPARSE | DELTA | {"shared_expert_intermediate_size": 32},
    ),
    Family("olmo_hybrid", "OLMo Hybrid", DELTA),
    Family("minimax", "MiniMax-Text-01", HEAD | LOCAL_EXPERTS | {"block_size": 16}),
    Family("lfm2", "LFM2", {"layer_types": ["conv", "full_attention"] * 2}),
    Family(
        "lfm2_moe",
        "LFM2 MoE",
        SPARSE | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    ),
    Family(
        "lfm3",
        "LFM3",
        LOCAL | {"layer_types": ["conv", "full_attention", "sliding_attention", "full_attention"]},
        since="5.23",
    ),
    Family(
        "zaya",
        "ZAYA1",
        HEAD | {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "router_hidden_size": 32},
    ),
    Family("bamba", "Bamba", MAMBA2 | {"attn_layer_indices": [1, 3]}),
    Family("falcon_h1", "Falcon-H1", MAMBA2 | {"mamba_d_ssm": 128}),
    Family(
        "granitemoehybrid",
        "Granite 4 hybrid",
        MAMBA2
        | LOCAL_EXPERTS
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
        HEAD
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
        "zamba",
        "Zamba",
        {"layers_block_type": ["mamba", "hybrid"] * 2, "num_key_value_heads": 4, "attention_hidden_size": 128}
        | {"attention_head_dim": 32, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
    Family(
        "recurrent_gemma",
        "RecurrentGemma",
        HEAD | {"lru_width": 64, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
    ),
    Family("mamba", "Mamba", {"state_size": 8, "time_step_rank": 4, "intermediate_size": 128}),
    Family("falcon_mamba", "Falcon Mamba", {"state_size": 8, "time_step_rank": 4, "intermediate_size": 128}),
    Family("mamba2", "Mamba-2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16}),
    # Older decoders: learned positions or ALiBi, their own attention code.
    Family("opt", "OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2}),
    Family("gpt2", "GPT-2", GPT),
    Family("gpt_bigcode", "StarCoder, SantaCoder", GPT),
    Family("gptj", "GPT-J", GPT | {"rotary_dim": 16}),
    Family("codegen", "CodeGen", GPT | {"rotary_dim": 16}),
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
