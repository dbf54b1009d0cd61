"""Loading a model for a command: the options that say how, and their checks."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from kvsieve.errors import InputError, PlanError

DTYPES = ("bfloat16", "float16", "float32", "auto")
DtypeOption = Annotated[str, typer.Option(help=f"Of the weights: {', '.join(DTYPES)}.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; the best there is if left out.")]
DecodeOption = Annotated[
    str, typer.Option(help="How tokens are generated: auto (graph on CUDA, else eager), eager, packed, graph, compile.")
]


def check_loading(dtype: str, decode: str) -> None:
    """Raises PlanError for a --dtype or --decode that there is not."""
    from kvsieve.hf.decode.engine import ENGINES

    for option, value, known in (("--dtype", dtype, DTYPES), ("--decode", decode, ENGINES)):
        if value not in known:
            raise PlanError(f"{option} must be one of {', '.join(known)}, got {value!r}")


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
    """The model, on the best device if none is named, and its tokenizer, without transformers' own messages."""
    import torch
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    import kvsieve

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not sys.stderr.isatty():
        disable_progress_bars()
    return kvsieve.models.load(name, dtype="auto" if dtype == "auto" else getattr(torch, dtype), device=device)
