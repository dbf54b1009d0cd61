"""Loading of models for commands: the options for it, and their checks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from kvsieve.cli.options import GENERATION, MODEL, option
from kvsieve.cli.output import say
from kvsieve.errors import InputError, PlanError
from kvsieve.hf.decode.engines import check_engine
from kvsieve.models.source import is_gguf
from kvsieve.planning.suggestions import did_you_mean
from kvsieve.report.display import bytes_text

# Forms of weights: of checkpoints that are no .gguf file, and of all.
_PACKED = ("int8", "int4")
FORMS = ("expand", *_PACKED)
DTYPES = ("auto", "bfloat16", "float16", "float32", "checkpoint")
_MEANT = {"gpu": "cuda", "nvidia": "cuda", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
# Kinds of devices that torch may know of.
_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu", "mtia", "xla")
DtypeOption = Annotated[str, option(MODEL, f"Dtype of the weights: {', '.join(DTYPES)}; auto is the fastest here")]
WeightsOption = Annotated[
    str | None,
    option(MODEL, "Weights: expand to --dtype, or pack a checkpoint to int8 or int4 (default: as stored)"),
]
DeviceOption = Annotated[str | None, option(MODEL, "Device: cpu, cuda, cuda:1 (default: the best one here)")]
DecodeOption = Annotated[str, option(GENERATION, "Decode engine: auto, eager, fused or graph (docs/performance.md)")]


def check_dtype(dtype: str, known: Sequence[str] = DTYPES) -> None:
    if dtype not in known:
        meant = did_you_mean(_MEANT.get(dtype.lower(), dtype), list(known), None)
        raise PlanError(f"--dtype must be one of {', '.join(known)}, got {dtype!r}{meant}")


def check_loading(dtype: str, device: str | None, decode: str = "auto") -> None:
    """Raise PlanError or InputError for an unknown --dtype, --device or --decode, without importing torch."""
    check_dtype(dtype)
    check_engine(decode, "--decode")
    kind, colon, index = ("cpu" if device is None else device).partition(":")
    if kind not in _DEVICES or (colon and not index.isdecimal()):
        meant = did_you_mean(_MEANT.get(kind.lower(), kind.lower()), list(_DEVICES), None)
        raise InputError(f"--device must be cpu, cuda, or one by its number such as cuda:1, got {device!r}{meant}")


def refuse_text(name: str | None, text_option: str | None = None) -> None:
    """Raise InputError for a model that is a file but no checkpoint.

    text_option: the command's option for a text file, which may be meant.
    """
    if name is None or is_gguf(name) or not os.path.isfile(os.path.expanduser(name)):
        return
    meant = f": did you mean {text_option} {name}?" if text_option else "; it is a file and no checkpoint"
    raise InputError(f"{name!r} was taken as the model{meant}")


def check_model_name(name: str | None, weights: str | None = None) -> None:
    """Raise InputError or ModelLoadError for a name that cannot be loaded, without importing torch.

    weights: the form of --weights, which must suit the model.
    """
    refuse_text(name)
    check_form(weights, name)
    if name is not None:
        from kvsieve.models.source import check_source

        check_source(name)


def check_form(weights: str | None, name: str | None) -> None:
    """Raise InputError for an unknown --weights, or one that the model's file does not have."""
    if weights is None:
        return
    if weights not in FORMS:
        blocks = ": a .gguf file stays in blocks without the option" if weights == "blocks" else ""
        meant = blocks or did_you_mean(weights.lower(), list(FORMS), None)
        raise InputError(f"--weights must be one of {', '.join(FORMS)}, got {weights!r}{meant}")
    if is_gguf(name) and weights in _PACKED:
        raise InputError(
            f"--weights {weights} packs a checkpoint, and {name!r} is in blocks already: leave --weights out to use "
            "them, or give --weights expand"
        )


def check_least(least: int, **options: int | None) -> None:
    """Raise InputError for an option, named like its parameter, below `least`; None passes."""
    for name, value in options.items():
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


def check_device(name: str | None) -> None:
    if name is None:
        return
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise InputError(f"--device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error


def load_model(
    name: str | None, dtype: str, device: str | None = None, weights: str | None = None, images: bool = False
) -> tuple[Any, Any]:
    """Load the model, on the best device by default, and its tokenizer, without transformers' own messages.

    Prints the dtype that "auto" selects and the size of weights that stay as stored, and warns if a CPU has no compiled
    kernels.
    images: see `kvsieve.models.load`.
    """
    from kvsieve.models.quantized import matrices_of, weight_bytes

    loaded = _loaded(name, dtype, device, {"weights": weights, "images": images})
    matrices = matrices_of(loaded[0])
    if kinds := sorted({matrix.kind for matrix in matrices}):
        form = "as stored in" if all(matrix.numbers is not None for matrix in matrices) else "in blocks of"
        say(f"weights {bytes_text(weight_bytes(loaded[0]))}, {form} {', '.join(kinds)}")
    if loaded[0].device.type == "cpu":
        from kvsieve.kernels.cpu.build import library

        # The kernels for most models that compile fastest.
        library("layers")
    return loaded


def load_processor(name: str | None, weights: str | None) -> Any | None:
    """Load the processor of a composite model, or return None, and say why one that is there does not load.

    weights: form of the weights; packed ones have no image tower.
    """
    from kvsieve import models

    if name is None or weights in _PACKED:
        return None
    try:
        return models.load_processor(name)
    except models.ModelLoadError as error:
        say(f"images are refused: {error}; pip install 'kvsieve[images]' has the packages for them")
        return None


def _loaded(name: str | None, dtype: str, device: str | None, more: dict[str, Any]) -> tuple[Any, Any]:
    import torch
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    from kvsieve import models
    from kvsieve.devices import auto_dtype

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not sys.stderr.isatty():
        disable_progress_bars()
    if dtype == "checkpoint":
        return models.load(name, "checkpoint", device=device, **more)
    if dtype != "auto":
        return models.load(name, getattr(torch, dtype), device=device, **more)
    choice = auto_dtype(device)
    loaded = models.load(name, choice.dtype, device=device, **more)
    say(f"dtype {choice.name}: {choice.reason}; --dtype overrides")
    return loaded
