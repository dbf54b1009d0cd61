"""Splitting of text before byte pairs are merged, by the name that a GGUF file gives it.

A file holds only the name (`tokenizer.ggml.pre`). Patterns are those of the models' own tokenizer.json; each splits
the pieces that the one before it left.
"""

from __future__ import annotations

from typing import NamedTuple


class Splitting(NamedTuple):
    """Rule by which a vocabulary's text is split.

    Args:
        patterns: regular expressions; matches become pieces, and so does the text between them.
        whole: take a piece that is in the vocabulary as it is, without merging. Default False.
        begins: begin prompts with the first token unless the file says otherwise. Default False.
        composed: compose characters first (NFC). Default False.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False
    composed: bool = False


_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_WORD = rf"{_LEAD}\p{{L}}+"
_OTHER_PATH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_OTHER}|{_SPACE}"
_QWEN2 = rf"{_SHORT}|{_WORD}|\p{{N}}|{_OTHER}|{_SPACE}"
_QWEN35 = rf"{_SHORT}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
_SEED = rf"{_SHORT}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_OTHER_PATH}|{_SPACE}"
_GPT4O = rf"{_LEAD}{_UPPER}*{_LOWER}+{_SHORT}?|{_LEAD}{_UPPER}+{_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}|{_OTHER_PATH}|{_SPACE}"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_SPACE}",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

# Names that files have, and how their text is split.
_NAMED: dict[str, Splitting] = {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Splitting(
        (_LLAMA3,), whole=True, begins=True
    ),
    "smaug-bpe dbrx chatglm-bpe glm4": Splitting((_LLAMA3,)),
    "qwen2": Splitting((_QWEN2,), composed=True),
    "deepseek-r1-qwen megrez kormo f2llmv2 stablelm2": Splitting((_QWEN2,)),
    "qwen35": Splitting((_QWEN35,), composed=True),
    "seed-coder": Splitting((_SEED,)),
    "tekken": Splitting((_TEKKEN,), whole=True, begins=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Splitting((_GPT4O,), whole=True),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum trillion exaone4 jais": Splitting((_GPT2,)),
    "olmo mpt": Splitting((_GPT2,), composed=True),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Splitting((r"\p{N}", _GPT2)),
    "falcon default": Splitting(_FALCON),
    "bloom poro-chat gpt3-finnish": Splitting((_BLOOM,)),
    "viking": Splitting((_BLOOM, r"\p{N}")),
    "deepseek-llm": Splitting(_DEEPSEEK_LLM),
    "deepseek-coder": Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": Splitting(_DEEPSEEK_V3),
}
SPLITTINGS = {name: splitting for names, splitting in _NAMED.items() for name in names.split()}
