"""Conversion of a SmolLM2 GGUF file to a transformers checkpoint.

Loading of any GGUF file (`kvsieve.models.gguf`) needs accelerate, which the demo does without.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from kvsieve.lazy import Tensor, torch
from kvsieve.models.fetch import ModelLoadError
from kvsieve.models.gguf.file import GgufFile, GgufTensor

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
    if importlib.util.find_spec("gguf") is None:
        raise ModelLoadError(
            "converting the demo model needs the package gguf, which is missing; run `pip install 'kvsieve[demo]'`"
        )
    from safetensors.torch import save

    file = GgufFile(gguf_file)
    for key, want in {"general.architecture": "llama", "tokenizer.ggml.pre": "smollm"}.items():
        if file.get(key) != want:
            got = file.get(key, "nothing")
            raise ModelLoadError(f"{gguf_file} has {key} = {got}, expected {want}: only SmolLM2 GGUF files can be read")
    state = dict(_weight(tensor, file) for tensor in file.tensors.values())
    # save_file would make the file unreadable for other users of a shared cache with any umask.
    (out / "model.safetensors").write_bytes(save(state, metadata={"format": "pt"}))
    _write_config(file, "lm_head.weight" not in state, out)
    _write_tokenizer(file, out)


def _weight(tensor: GgufTensor, file: GgufFile) -> tuple[str, Tensor]:
    import gguf

    kind = gguf.GGMLQuantizationType[tensor.kind]
    weight = torch.from_numpy(gguf.dequantize(file.rows(tensor).numpy(), kind))
    name = _TOP_TENSORS.get(tensor.name)
    if name is None:
        _, layer, part, _ = tensor.name.split(".")
        name = f"model.layers.{layer}.{_TENSORS[part]}.weight"
        if part in ("attn_q", "attn_k"):
            # GGUF interleaves the halves of each head's rotary pairs; transformers stores them one after the other.
            n = file.get("llama.attention.head_count" if part == "attn_q" else "llama.attention.head_count_kv")
            weight = weight.unflatten(0, (n, -1, 2)).transpose(1, 2).flatten(0, 2)
    return name, weight.to(torch.bfloat16).contiguous()


def _special_tokens(file: GgufFile) -> dict[str, int]:
    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    texts = {"bos_token_id": "<|im_start|>", "eos_token_id": "<|im_end|>", "pad_token_id": "<|endoftext|>"}
    return {name: tokens.index(text) for name, text in texts.items()}


def _write_config(file: GgufFile, tied: bool, out: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    special: dict[str, Any] = dict(_special_tokens(file))
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=len(file.get("tokenizer.ggml.tokens")),
        hidden_size=file.get("llama.embedding_length"),
        intermediate_size=file.get("llama.feed_forward_length"),
        num_hidden_layers=file.get("llama.block_count"),
        num_attention_heads=file.get("llama.attention.head_count"),
        num_key_value_heads=file.get("llama.attention.head_count_kv"),
        max_position_embeddings=file.get("llama.context_length"),
        rms_norm_eps=file.get("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": file.get("llama.rope.freq_base")},
        tie_word_embeddings=tied,
        **special,
    ).save_pretrained(out)
    GenerationConfig(**special).save_pretrained(out)


def _write_tokenizer(file: GgufFile, out: Path) -> None:
    import gguf
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in file.get("tokenizer.ggml.merges")]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = tokenizers.decoders.ByteLevel()
    kinds = file.get("tokenizer.ggml.token_type")
    control = gguf.TokenType.CONTROL
    bpe.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == control])
    special = _special_tokens(file)
    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[special["bos_token_id"]],
        eos_token=tokens[special["eos_token_id"]],
        pad_token=tokens[special["pad_token_id"]],
        unk_token=tokens[special["pad_token_id"]],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=file.get("llama.context_length"),
        chat_template=file.get("tokenizer.chat_template"),
    ).save_pretrained(out)
