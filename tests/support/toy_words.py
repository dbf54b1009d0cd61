"""A tokenizer of a few words for the tiny models."""

from __future__ import annotations

from collections.abc import Mapping

import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

WORDS = ["[PAD]", "[BOS]", "[UNK]", *(f"w{i}" for i in range(124)), "[EOS]"]


def words(seed: int, count: int = 25) -> str:
    """Return a text of so many words that are tokens."""
    made = torch.Generator().manual_seed(seed)
    return " ".join(f"w{each}" for each in torch.randint(0, 80, (count,), generator=made).tolist())


def word_tokenizer(
    chat_template: str | None = None, marks: Mapping[int, str] | None = None, words: Mapping[int, str] | None = None
) -> PreTrainedTokenizerFast:
    """Splits at white space; what is not one of WORDS is unknown.

    marks: control tokens in place of words, by id. words: other words in place of these.
    """
    named = {**dict(enumerate(WORDS)), **(marks or {}), **(words or {})}
    vocabulary = tokenizers.models.WordLevel({word: index for index, word in named.items()}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(vocabulary)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "bos_token": "[BOS]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **special)
    found.add_tokens(list((marks or {}).values()), special_tokens=True)
    return found
