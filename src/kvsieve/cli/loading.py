"""Loading a model for a command: the options that say how, and their checks."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from kvsieve.cli.output import say
from kvsieve.errors import InputError, PlanError

DTYPES = ("auto", "bfloat16", "float16", "float32", "checkpoint")
DtypeOption = Annotated[
    str, typer.Option(help=f"Of the weights: {', '.join(DTYPES)}. auto is what the device is fastest in.")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; the best there is if left out.")]
DecodeOption = Annotated[
    str,
    typer.Option(help="How tokens are generated: auto (docs/performance.md), eager, fused, graph, compile."),
]


def check_dtype(dtype: str) -> None:
    """Raises PlanError for a --dtype that there is not."""
    if dtype not in DTYPES:
        raise PlanError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


def check_loading(dtype: str, decode: str) -> None:
    """Raises PlanError for a --dtype or --decode that there is not."""
    from kvsieve.hf.decode.engine import check_engine

    check_dtype(dtype)
    check_engine(decode, "--decode")


def check_device(name: str | None) -> None:
    """Raises InputError."""
    import torch

    if name is None:
        return
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise InputError(f"--device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error


def load_model(name: str | None, dtype: str, device: str | None = None) -> tuple[Any, Any]:
    """The model, on the best device if none is named, and its tokenizer, without transformers' own messages.

    Tells what the dtype "auto" came to, and warns where a CPU has no compiled kernels.
    """
    loaded = _loaded(name, dtype, device)
    if loaded[0].device.type == "cpu":
        from kvsieve.kernels.cpu.build import library

        # Of those kernels that most models take, the ones that are compiled in the least time.
        library("layers")
    return loaded


def _loaded(name: str | None, dtype: str, device: str | None) -> tuple[Any, Any]:
    import torch
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    import kvsieve
    from kvsieve.devices import auto_dtype

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not sys.stderr.isatty():
        disable_progress_bars()
    if dtype == "checkpoint":
        return kvsieve.models.load(name, "checkpoint", device=device)
    if dtype != "auto":
        return kvsieve.models.load(name, getattr(torch, dtype), device=device)
    choice = auto_dtype(device)
    loaded = kvsieve.models.load(name, choice.dtype, device=device)
    say(f"dtype {choice.name}: {choice.reason}; --dtype overrides")
    return loaded
