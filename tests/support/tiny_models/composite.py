"""Multimodal models as published: a text decoder, an image tower, and their connection."""

from __future__ import annotations

from typing import Any

from tiny_models.family import (
    DELTA,
    HEAD,
    INDEXED,
    LATENT,
    LOCAL,
    LOCAL_EXPERTS,
    MLP_TYPES,
    ROUTED,
    SHARED_KV,
    SPARSE,
    Family,
)

# Random prompts of the tests use ids below 120: the others are image and video tokens.
_IMAGE_ID: dict[str, Any] = {"image_token_id": 120}
_IMAGE_INDEX: dict[str, Any] = {"image_token_index": 120}
_VIDEO_IDS: dict[str, Any] = _IMAGE_ID | {"video_token_id": 121}
_QWEN_IDS: dict[str, Any] = _VIDEO_IDS | {"vision_start_token_id": 122, "vision_end_token_id": 123}
_GLM_IDS: dict[str, Any] = _VIDEO_IDS | {"image_start_token_id": 122, "image_end_token_id": 123}
_GLM_IDS |= {"video_start_token_id": 124, "video_end_token_id": 125}

_TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_TOWER |= {"image_size": 32, "patch_size": 8}
_SIGLIP: dict[str, Any] = _TOWER | {"model_type": "siglip_vision_model"}
_PIXTRAL: dict[str, Any] = _IMAGE_INDEX | {"vision_config": _TOWER | {"model_type": "pixtral"}}
_QWEN_TOWER: dict[str, Any] = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "patch_size": 8}
_QWEN_TOWER |= {"out_hidden_size": 64, "num_position_embeddings": 16, "image_size": 32}
_DEEPSTACK: dict[str, Any] = _QWEN_TOWER | {"deepstack_visual_indexes": [0]}
_MUSE_TOWER: dict[str, Any] = _TOWER | {"pos_emb_height": 4, "pos_emb_width": 4, "max_position_embeddings": 16}


def _axes(*section: int) -> dict[str, Any]:
    """Return a config of rotary positions on several axes; section: frequencies per axis."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}}


COMPOSITE: tuple[Family, ...] = (
    # The decoder attends to everything in every layer.
    Family("llava", "LLaVA 1.5", {"model_type": "llama"}, _IMAGE_INDEX | {"vision_config": _TOWER}),
    Family("llava_onevision", "LLaVA-OneVision", {"model_type": "qwen2"}, _IMAGE_INDEX | {"vision_config": _SIGLIP}),
    Family(
        "internvl",
        "InternVL 3",
        {"model_type": "qwen2"},
        _IMAGE_ID | {"vision_config": _TOWER | {"image_size": [32, 32], "patch_size": [8, 8]}},
    ),
    Family("smolvlm", "SmolVLM", {"model_type": "llama"}, _IMAGE_ID | {"vision_config": _TOWER}),
    Family(
        "aria",
        "Aria",
        {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        _IMAGE_INDEX
        | {"vision_config": _TOWER | {"model_type": "idefics3_vision"}, "projector_patch_to_query_dict": {16: 4}},
    ),
    Family("mistral3", "Mistral Small 3", HEAD | {"model_type": "mistral", "sliding_window": None}, _PIXTRAL),
    Family("mistral3:ministral", "Ministral 3 with vision", HEAD | {"model_type": "ministral3"}, _PIXTRAL),
    # The same, with positions on several axes.
    Family(
        "qwen2_vl",
        "Qwen2-VL",
        _axes(2, 3, 3),
        _QWEN_IDS | {"vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}},
    ),
    Family("qwen2_5_vl", "Qwen2.5-VL", _axes(2, 3, 3), _QWEN_IDS | {"vision_config": _QWEN_TOWER}),
    Family("qwen3_vl", "Qwen3-VL", HEAD | _axes(2, 3, 3), _QWEN_IDS | {"vision_config": _DEEPSTACK}),
    Family("qwen3_vl_moe", "Qwen3-VL-MoE", HEAD | SPARSE | _axes(2, 3, 3), _QWEN_IDS | {"vision_config": _DEEPSTACK}),
    Family("glm4v", "GLM-4.1V", _axes(2, 3, 3), _GLM_IDS | {"vision_config": _QWEN_TOWER}),
    Family(
        "glm4v_moe", "GLM-4.5V, GLM-4.6V", HEAD | ROUTED | _axes(1, 1, 2), _GLM_IDS | {"vision_config": _QWEN_TOWER}
    ),
    Family(
        "ernie4_5_vl_moe",
        "ERNIE 4.5 VL",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [32, 32], "moe_num_shared_experts": 1}
        | _axes(2, 2, 4),
        _GLM_IDS | {"vision_config": _QWEN_TOWER},
    ),
    Family(
        "hunyuan_vl",
        "Hunyuan VL, HunyuanOCR",
        HEAD | _axes(2, 2, 2, 2),
        _IMAGE_ID | {"vision_config": _TOWER | {"out_hidden_size": 64, "text_hidden_size": 64}},
    ),
    # Sliding windows alternate with full attention, layers share keys and values, chunked attention.
    Family(
        "gemma3",
        "Gemma 3 4B to 27B",
        LOCAL | {"query_pre_attn_scalar": 16},
        _IMAGE_INDEX | {"vision_config": _SIGLIP, "mm_tokens_per_image": 4},
    ),
    Family(
        "gemma4",
        "Gemma 4 E2B, E4B",
        LOCAL | SHARED_KV | {"global_head_dim": 32},
        _VIDEO_IDS
        | {"vision_config": _TOWER | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}},
    ),
    Family(
        "gemma4_unified",
        "Gemma 4 12B",
        LOCAL | {"global_head_dim": 32},
        _VIDEO_IDS
        | {"vision_config": {"mm_embed_dim": 64, "mm_posemb_size": 16, "output_proj_dims": 64, "patch_size": 8}},
    ),
    Family(
        "cohere2_vision",
        "Command A Vision",
        LOCAL | {"logit_scale": 1.0},
        _IMAGE_ID | {"vision_config": _SIGLIP, "alignment_intermediate_size": 32},
    ),
    Family("step3p7", "Step 3.7", LOCAL | ROUTED | {"share_expert_dim": 32}, _IMAGE_ID | {"vision_config": _TOWER}),
    Family(
        "muse_glimmer",
        "Muse Glimmer",
        LOCAL,
        _VIDEO_IDS | {"vision_config": _MUSE_TOWER, "out_hidden_size": 64, "projector_hidden_size": 32},
    ),
    Family(
        "muse_spark",
        "Muse Spark",
        LOCAL | LOCAL_EXPERTS | {"moe_intermediate_size": 32, "moe_hidden_size": 32},
        _VIDEO_IDS
        | {"vision_config": _MUSE_TOWER, "out_hidden_size": 64, "projector_hidden_size": 32, "audio_token_id": 122}
        | {"audio_config": {"hidden_sizes": [8] * 4, "depths": [1] * 4, "out_hidden_size": 64}},
        since="5.20",
    ),
    Family(
        "llama4",
        "Llama 4",
        HEAD
        | LOCAL_EXPERTS
        | {"intermediate_size_mlp": 96, "attention_chunk_size": 16, "no_rope_layers": [1, 0, 1, 0]},
        _IMAGE_INDEX
        | {
            "vision_config": _TOWER
            | {"intermediate_size": 128, "vision_output_dim": 64}
            | {"projector_input_dim": 32, "projector_output_dim": 32}
        },
        broken="5.24.0",
    ),
    # Linear attention or convolutions alternate with full attention.
    Family("qwen3_5", "Qwen3.5, Qwen3.6", HEAD | DELTA, _QWEN_IDS | {"vision_config": _QWEN_TOWER}),
    Family(
        "qwen3_5_moe",
        "Qwen3.5-MoE, Qwen3.6-MoE",
        # Recurrent states are float32: at the usual range their rounding grows beyond what the laws allow.
        HEAD | SPARSE | DELTA | {"shared_expert_intermediate_size": 32, "initializer_range": 0.1},
        _QWEN_IDS | {"vision_config": _QWEN_TOWER},
    ),
    Family(
        "lfm2_vl",
        "LFM2-VL",
        {"layer_types": ["conv", "full_attention"] * 2},
        _IMAGE_ID
        | {"vision_config": _TOWER | {"model_type": "siglip2_vision_model", "num_patches": 16}}
        | {"projector_hidden_size": 32},
    ),
    Family(
        "lfm3_vl",
        "LFM3-VL",
        LOCAL | {"layer_types": ["conv", "full_attention", "sliding_attention", "full_attention"]},
        _QWEN_IDS | {"vision_config": _TOWER | {"num_key_value_heads": 2}, "projector_hidden_size": 32},
        since="5.23",
    ),
    # Latent attention, and sparse attention.
    Family("mistral3:latent", "Mistral Small 4", LATENT | ROUTED | {"model_type": "mistral4"}, _PIXTRAL),
    Family(
        "kimi_k25",
        "Kimi K2.5",
        LATENT | ROUTED | {"first_k_dense_replace": 1},
        _QWEN_IDS | {"vision_config": _TOWER | {"pos_emb_height": 4, "pos_emb_width": 4}, "projection_hidden_size": 32},
    ),
    Family("mistral_large4", "Mistral Large 4", LATENT | ROUTED | MLP_TYPES | INDEXED, _PIXTRAL, since="5.22"),
    Family(
        "glm5_next",
        "GLM-5 Next",
        LATENT
        | ROUTED
        | MLP_TYPES
        | INDEXED
        | {"qk_rope_head_dim": 0, "linear_head_dim": 16, "linear_num_heads": 2}
        | {"layer_types": ["linear_attention", "full_attention"] * 2},
        _GLM_IDS | {"vision_config": _QWEN_TOWER | {"projection_intermediate_size": 32}},
        since="5.17",
    ),
    Family(
        "minimax_m3_vl",
        "MiniMax-M3",
        HEAD
        | LOCAL_EXPERTS
        | {"rotary_dim": 16, "dense_intermediate_size": 96, "shared_intermediate_size": 32}
        | {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": 2}
        | {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
        _IMAGE_INDEX | {"vision_config": _TOWER, "video_token_index": 121, "projector_hidden_size": 64},
    ),
)
