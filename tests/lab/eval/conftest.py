"""Tokenizers for the evaluation's tests; no model is loaded."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvsieve.models import ModelLoadError, cache_dir, demo, fetch, load_demo


@pytest.fixture(scope="session")
def demo_tokenizer():
    target = cache_dir() / f"{fetch.MODEL_NAME}-{fetch.GGUF_SHA256[:12]}-v{demo.CHECKPOINT_VERSION}"
    if demo.checkpoint_problem(target) is None:
        return AutoTokenizer.from_pretrained(target, local_files_only=True)
    try:
        return load_demo()[1]
    except ModelLoadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def toy_tokenizer():
    """Makes tokenizers of one token per byte, with eos "<eos>" and the special tokens "<bos>" and "<turn>"."""

    def make(template: str | None = None, add_bos: bool = False) -> PreTrainedTokenizerFast:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        bytewise = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
        bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bytewise.decoder = decoders.ByteLevel()
        bytewise.add_special_tokens([AddedToken(each, special=True) for each in ("<eos>", "<bos>", "<turn>")])
        if add_bos:
            bos = bytewise.token_to_id("<bos>")
            bytewise.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", bos)])
        named = {"eos_token": "<eos>", "bos_token": "<bos>"}
        return PreTrainedTokenizerFast(tokenizer_object=bytewise, chat_template=template, **named)

    return make
