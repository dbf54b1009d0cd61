"""Tiny models as GGUF files, tokenizer included, in any type of their architecture's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

TOKENS = ["<unk>", "<s>", "</s>", *(f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(4 * 26 - 8)), *"abcd", "Ġ"]
# Architectures by model type, where they have other names in GGUF files.
_NAMES = {"mistral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
# Keys by setting, as converters of llama.cpp write them.
_KEYS = {
    "max_position_embeddings": "context_length",
    "n_positions": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "ffn_hidden_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_kv_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "vocab_size": "vocab_size",
}
# Bytes of a block at which its float16 scales begin, of types that the package gguf does not quantize to.
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}


def write_gguf(model: Any, file: Path, kind: str = "F32") -> None:
    """Write a model of transformers, with a tokenizer of byte pairs of `len(TOKENS)` tokens.

    Args:
        model: of an architecture that transformers reads from GGUF files.
        file: to write.
        kind: type of weights with two dimensions; rows that are no whole number of blocks stay F32. Those of K types
            are random.
    """
    import gguf

    config = model.config
    architecture = _NAMES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in _settings(config).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    for name, weight in _tensors(model, architecture):
        rows, stored = _quantized(weight, kind) if weight.ndim > 1 else (weight, "F32")
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(rows: int, inner: int, kind: str, seed: int = 0) -> np.ndarray:
    """Return random blocks of a K type, uint8 [rows, bytes of a row], whose numbers are about as large as weights."""
    import gguf

    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, inner // size, nbytes), dtype=np.uint8)
    for start in _SCALES[kind]:
        scales = random.uniform(0.0005, 0.002, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, start : start + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def _settings(config: Any) -> dict[str, Any]:
    """Return keys of an architecture and their values."""
    found = {key: getattr(config, name, None) for name, key in _KEYS.items() if getattr(config, name, None) is not None}
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    found |= {"attention.key_length": size, "attention.value_length": size}
    if rotation := getattr(config, "rope_parameters", None):
        rotation = rotation.get("full_attention", rotation)
        found["rope.freq_base"] = float(rotation["rope_theta"])
        found["rope.dimension_count"] = int(size * rotation.get("partial_rotary_factor", 1))
    if config.model_type == "gpt2":
        found["feed_forward_length"] = 4 * config.n_embd
    return found


def _tensors(model: Any, architecture: str) -> list[tuple[str, np.ndarray]]:
    """Return names and weights as converters of llama.cpp write them: what transformers' processors turn back."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    weights = model.state_dict()
    found = []
    for name, own in get_gguf_hf_weights_map(model, processor, architecture).items():
        if own == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        weight = weights[own].float().numpy()
        if name.endswith("_exps"):
            half = weight.shape[1] // 2
            part = {"gate": weight[:, :half], "up": weight[:, half:]}
            found.append((f"{name}.weight", np.ascontiguousarray(part.get(name.split("_")[-2], weight))))
        else:
            found.append((name, np.ascontiguousarray(_turned(processor, name, weight))))
    return found


def _turned(processor: Any, name: str, weight: np.ndarray) -> np.ndarray:
    """Return what a processor makes `weight` of."""

    def back(stored: np.ndarray) -> Any:
        return processor.process(stored, name, parsed_parameters={"tensors": {}}).weights

    if np.array_equal(back(weight), weight):
        return weight
    for stored in (weight + 1, weight.T):
        if back(stored).shape == weight.shape and np.allclose(back(stored), weight, atol=1e-6):
            return stored
    rows = np.broadcast_to(np.arange(float(len(weight))).reshape(-1, *[1] * (weight.ndim - 1)), weight.shape)
    return weight[back(rows).reshape(len(weight), -1)[:, 0].argsort()]


def _quantized(weight: np.ndarray, kind: str) -> tuple[np.ndarray, str]:
    import gguf

    of_type = gguf.GGMLQuantizationType[kind]
    if weight.shape[-1] % gguf.GGML_QUANT_SIZES[of_type][0]:
        return weight, "F32"
    if kind in _SCALES:
        return random_blocks(*weight.shape, kind, seed=len(weight)), kind
    return gguf.quantize(weight, of_type), kind


__all__ = ["TOKENS", "random_blocks", "write_gguf"]
