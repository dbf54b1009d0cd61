"""Tiny tokenizers that write characters as bytes."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
# A word, the same one behind a space, and signs that cleaning up would glue to what stands before them.
WORDS = ["▁", "▁Hello", "▁world", "▁.", "a", "▁a", "ab", "!"]


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3 and Qwen have them: every byte is a letter of its own."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def sentence_piece() -> PreTrainedTokenizerFast:
    """As Llama 2, Mistral and Gemma have them: spaces are letters, and unknown characters are bytes, `<0xF0>`."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocabulary, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=True, **SPECIAL)


def metaspace() -> PreTrainedTokenizerFast:
    """Spaces are letters, and nothing is written as bytes."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Pieces that JSON is written with, besides single bytes.
MERGES = [("t", "r"), ("u", "e"), ("tr", "ue"), ('"', ":"), ("{", '"'), (",", "Ġ"), ("Ċ", "Ġ")]


def byte_chats() -> PreTrainedTokenizerFast:
    """Bytes, a few pieces, and a chat template with control tokens, two of which end answers: 267 in all."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges=MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "bos_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=CHAT, additional_special_tokens=["<|im_start|>"], **special
    )
