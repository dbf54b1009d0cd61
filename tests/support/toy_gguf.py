"""A tiny Llama as a GGUF file, tokenizer included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOKENS = ["<unk>", "<s>", "</s>", *(f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(4 * 26 - 8)), *"abcd", "Ġ"]


def write_gguf(model: Any, file: Path) -> None:
    """Write a Llama of transformers in float32, with a tokenizer of byte pairs of `len(TOKENS)` tokens."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in model.state_dict().items():
        writer.add_tensor(_renamed(name), _as_ggml(name, weight, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(name: str) -> str:
    if name in _TENSORS:
        return _TENSORS[name]
    _, _, layer, *middle, _ = name.split(".")
    return f"blk.{layer}.{_OF_LAYER['.'.join(middle)]}.weight"


def _as_ggml(name: str, weight: Any, config: Any) -> Any:
    """GGUF has the halves of each head's rotary pairs interleaved."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name:
            weight = weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
    return weight.contiguous()
