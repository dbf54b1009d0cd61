"""Models over the weights of GGUF files, or with these dequantized."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvsieve.models.fetch import ModelLoadError
from kvsieve.models.gguf.config import expanded_config, make_config, read_settings
from kvsieve.models.gguf.file import GgufFile
from kvsieve.models.gguf.filling import Filling
from kvsieve.models.gguf.tokenizer import generation_of, tokenizer_of
from kvsieve.models.quantized import include_blocks
from kvsieve.models.source import CHECKED, check_complete, load_error


def load_blocks(path: str | os.PathLike[str], dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model over the mapped weights of a GGUF file, on the CPU, in eval mode.

    Weights of linear layers and embeddings stay in their blocks. Others are dequantized, one at a time.

    Args:
        path: of the file.
        dtype: of activations and of weights that are not in blocks: float32 or bfloat16.

    Raises:
        ModelLoadError: a damaged file, an architecture that transformers does not map, or tensors that do not fit it.
    """
    import accelerate
    from transformers import AutoModelForCausalLM

    file = GgufFile(path)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ModelLoadError(
            f"weights in blocks are computed with in float32 or bfloat16, got {dtype} for {file.path}: use one of "
            "these, or load it with weights='expand'"
        )
    tokenizer = tokenizer_of(file)
    settings = read_settings(file)
    config = make_config(settings, file)
    config.name_or_path = os.fspath(file.path)
    try:
        with accelerate.init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:
        raise ModelLoadError(f"cannot load {file.path}: transformers makes no model of its keys: {error}") from error
    filling = Filling(file, model, settings, dtype)
    filling.run()
    filling.tell()
    model.generation_config = generation_of(file, tokenizer)
    include_blocks(model, f"copy {file.path}, or load it with weights='expand'", [file.path])
    return model.eval(), tokenizer


def load_expanded(
    path: str | os.PathLike[str], dtype: torch.dtype | str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a GGUF file as transformers does, with dequantized weights of this dtype, in eval mode.

    Raises ModelLoadError for what `load_blocks` or transformers does not load.
    """
    from transformers import AutoModelForCausalLM

    file = GgufFile(path)
    tokenizer = tokenizer_of(file)
    options: dict[str, Any] = {"local_files_only": True, "gguf_file": file.path.name, **_dequantizing()}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.path.parent, config=expanded_config(file), dtype=dtype, **CHECKED, **options
        )
    except ModelLoadError:
        raise
    except Exception as error:
        raise load_error(f"cannot load {os.fspath(path)!r}", options, error) from error
    model, info = loaded
    check_complete(os.fspath(path), model, info)
    # Not only its folder, where other models can be.
    model.config.name_or_path = model.name_or_path = os.fspath(file.path)
    model.generation_config = generation_of(file, tokenizer)
    return model.eval(), tokenizer


def _dequantizing() -> dict[str, Any]:
    """Return arguments of `from_pretrained` with which a GGUF file becomes a model like others."""
    try:
        from transformers import GgufConfig
    except ImportError:
        # A transformers that knows no other way.
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
