"""Conversion of a SmolLM2 GGUF file to a transformers checkpoint.

transformers' own reader needs accelerate, takes three times as long and drops the tokenizer's splitting into single
digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvsieve.lazy import Tensor, torch
from kvsieve.models.fetch import ModelLoadError

_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert(gguf_file: Path, out: Path) -> None:
    """Write the file's weights, configuration and tokenizer into the directory `out`. Raises ModelLoadError."""
    try:
        import gguf
    except ImportError as exc:
        raise ModelLoadError(
            "converting the demo model needs the package gguf, which is missing; run `pip install 'kvsieve[demo]'`"
        ) from exc
    from safetensors.torch import save

    reader = gguf.GGUFReader(gguf_file)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    for key, want in {"general.architecture": "llama", "tokenizer.ggml.pre": "smollm"}.items():
        if fields.get(key) != want:
            got = fields.get(key, "nothing")
            raise ModelLoadError(f"{gguf_file} has {key} = {got}, expected {want}: only SmolLM2 GGUF files can be read")
    state = dict(_weight(tensor, fields) for tensor in reader.tensors)
    # save_file would make the file unreadable for other users of a shared cache with any umask.
    (out / "model.safetensors").write_bytes(save(state, metadata={"format": "pt"}))
    _write_config(fields, "lm_head.weight" not in state, out)
    _write_tokenizer(fields, out)


def _weight(tensor: Any, fields: dict[str, Any]) -> tuple[str, Tensor]:
    import gguf

    weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
    name = _TOP_TENSORS.get(tensor.name)
    if name is None:
        _, layer, kind, _ = tensor.name.split(".")
        name = f"model.layers.{layer}.{_TENSORS[kind]}.weight"
        if kind in ("attn_q", "attn_k"):
            # GGUF interleaves the halves of each head's rotary pairs; transformers stores them one after the other.
            n = fields["llama.attention.head_count" if kind == "attn_q" else "llama.attention.head_count_kv"]
            weight = weight.unflatten(0, (n, -1, 2)).transpose(1, 2).flatten(0, 2)
    return name, weight.to(torch.bfloat16).contiguous()


def _special_tokens(fields: dict[str, Any]) -> dict[str, int]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    texts = {"bos_token_id": "<|im_start|>", "eos_token_id": "<|im_end|>", "pad_token_id": "<|endoftext|>"}
    return {name: tokens.index(text) for name, text in texts.items()}


def _write_config(fields: dict[str, Any], tied: bool, out: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    special: dict[str, Any] = dict(_special_tokens(fields))
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        **special,
    ).save_pretrained(out)
    GenerationConfig(**special).save_pretrained(out)


def _write_tokenizer(fields: dict[str, Any], out: Path) -> None:
    import gguf
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = tokenizers.decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = gguf.TokenType.CONTROL
    bpe.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == control])
    special = _special_tokens(fields)
    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[special["bos_token_id"]],
        eos_token=tokens[special["eos_token_id"]],
        pad_token=tokens[special["pad_token_id"]],
        unk_token=tokens[special["pad_token_id"]],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
        chat_template=fields["tokenizer.chat_template"],
    ).save_pretrained(out)
