"""Names of models: directories, GGUF files and hub ids, checked without importing torch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsieve.errors import KvsieveWarning, short
from kvsieve.models.fetch import ModelLoadError, ModelNotFoundError, unreadable

_EXPECTED = "expected the directory of a transformers checkpoint, a .gguf file, or a hub id owner/name"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_LONGEST_ID = 96
# Seconds that a hub may take to accept a connection.
_PATIENCE = 3.0


def is_gguf(name: str | None) -> bool:
    """Return True for the name of a GGUF file."""
    return name is not None and name.lower().endswith(".gguf")


def checkpoint_source(name: str) -> tuple[str, dict[str, Any]]:
    """Return the directory or hub id that transformers loads a name from, and more arguments of `from_pretrained`.

    Raises ModelNotFoundError for a path without a readable checkpoint, and ModelLoadError for a damaged GGUF file, or
    if the package that reads it is missing.
    """
    if is_gguf(name):
        return _gguf_source(name)
    try:
        path = Path(os.path.expanduser(name))
        local = path.is_dir()
    except OSError as exc:
        raise ModelNotFoundError(f"{name!r} names no directory: {exc}; {_EXPECTED}") from exc
    looks_like_path = name.startswith((os.sep, "./", "../", "~")) or name.count("/") > 1 or name in ("", ".", "..")
    if looks_like_path and not local:
        raise ModelNotFoundError(f"{name!r} is not a directory; {_EXPECTED}")
    if local:
        if (reason := unreadable(path / "config.json")) and (path / "config.json").is_symlink():
            raise ModelNotFoundError(f"the config.json of {name!r} cannot be read: {reason}; {_EXPECTED}")
        try:
            open(path / "config.json", "rb").close()
        except FileNotFoundError as exc:
            raise ModelNotFoundError(f"{name!r} has no config.json; {_EXPECTED}") from exc
        except OSError as exc:
            raise ModelNotFoundError(
                f"the config.json of {name!r} cannot be read: {exc.strerror}; {_EXPECTED}"
            ) from exc
    return (str(path) if local else name), {"local_files_only": local}


# Forms that checkpoints are packed into.
_PACKED = ("int8", "int4")
# Files of a checkpoint.
_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model")


def check_weights(name: str) -> None:
    """Raise ModelLoadError for a directory with unreadable files, which transformers calls missing or ignores."""
    folder = Path(os.path.expanduser(name))
    for file in sorted(path for kind in _FILES for path in folder.glob(kind)):
        if reason := unreadable(file):
            raise ModelLoadError(f"cannot load {name!r} from its directory: {file.name} cannot be read ({reason})")
    settings = folder / "generation_config.json"
    if settings.is_file():
        try:
            json.loads(settings.read_bytes())
        except ValueError as error:
            raise ModelLoadError(
                f"cannot load {name!r} from its directory: {settings.name} is not JSON ({error}); mend or delete it"
            ) from error


# Arguments of `from_pretrained` with which it returns what `check_complete` checks.
CHECKED: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}


def check_complete(name: str, model: Any, info: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for a checkpoint without all weights of its model: transformers makes random ones.

    info: from `from_pretrained` with `CHECKED`.
    """
    parameters = {key for key, _ in model.named_parameters()}
    missing = sorted(parameters.intersection(info["missing_keys"]))
    if other := sorted(info["mismatched_keys"]):
        key, got, expected = other[0]
        raise ModelLoadError(
            f"cannot load {name!r}: {key} has shape {list(got)}, and config.json expects {list(expected)}; use the "
            "files of one checkpoint"
        )
    if missing:
        raise ModelLoadError(
            f"cannot load {name!r}: the checkpoint has no {missing[0]} ({len(missing)} such): it is not complete, or "
            "of another config.json"
        )


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return how a checkpoint is quantized, by its config from transformers; None for plain weights."""
    for part in (config, config.get_text_config()):
        if found := part.to_dict().get("quantization_config"):
            return dict(found)
    return None


def _gguf_source(name: str) -> tuple[str, dict[str, Any]]:
    path = Path(os.path.expanduser(name)).absolute()
    if reason := unreadable(path):
        raise ModelNotFoundError(f"{name!r} cannot be read: {reason}; change its permissions")
    if not path.is_file():
        raise ModelNotFoundError(f"{name!r} is not a file here; a .gguf file is read from this machine, download it")
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModelLoadError(f"reading {name!r} needs the package {package}; run `pip install 'kvsieve[gguf]'`")
    from kvsieve.models.gguf.file import GgufFile

    GgufFile(path)
    return str(path.parent), {"local_files_only": True, "gguf_file": path.name}


def keeps_blocks(name: str, weights: str | None, device: str) -> bool:
    """Return True if the weights of a model stay in the blocks of its file; warn if only the device prevents it.

    Args:
        name: of the model.
        weights: of `kvsieve.models.load`.
        device: kind of the device.
    """
    if not is_gguf(name) or weights is not None:
        return False
    if device == "cpu":
        return True
    warnings.warn(
        f"weights of {name} are dequantized in memory: {device} has no kernels for blocks; weights='expand' says the "
        "same without this warning",
        KvsieveWarning,
        stacklevel=3,
    )
    return False


def check_weights_form(name: str | None, weights: str | None, device: str, images: bool) -> None:
    """Raise ModelLoadError unless the weights of a model can be loaded in a form.

    Args:
        name: of the model; None for the demo model.
        weights: of `kvsieve.models.load`.
        device: kind of the device.
        images: the parts that read images are wanted.
    """
    stored = is_gguf(name)
    if images and (stored or weights in _PACKED):
        form = "a .gguf file has" if stored else f"weights={weights!r} packs"
        raise ModelLoadError(f"{form} the text part of a model only, got images=True for {name!r}: leave images out")
    if weights in (None, "expand"):
        return
    if weights not in _PACKED:
        raise ModelLoadError(f"weights must be None, 'expand', 'int8' or 'int4', got {short(weights)}")
    if stored:
        raise ModelLoadError(
            f"{name!r} is already quantized: leave weights={weights!r} out to compute with its blocks, or use 'expand'"
        )
    if device != "cpu":
        raise ModelLoadError(
            f"weights={weights!r} is computed with on a CPU, got device {device}: use device='cpu', or leave it out"
        )


def load_error(what: str, options: dict[str, Any], error: Exception) -> ModelLoadError:
    """Return the error to raise when transformers failed to load something.

    Args:
        what: such as "cannot load 'owner/name'".
        options: from `checkpoint_source`.
        error: of transformers.
    """
    from huggingface_hub import errors

    lines = [line.strip() for line in str(error).strip().splitlines()]
    # Some messages have a heading first.
    cause = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or type(error).__name__
    if "gguf_file" in options:
        return ModelLoadError(f"{what} from its GGUF file: {cause}")
    if options["local_files_only"]:
        return ModelLoadError(f"{what} from its directory: {cause}")
    chained: BaseException | None = error
    while chained is not None:
        missing = (errors.RepositoryNotFoundError, errors.EntryNotFoundError, errors.HFValidationError)
        # "Not in the cache" does not say that the hub cannot be reached.
        if isinstance(chained, missing) and not isinstance(chained, errors.LocalEntryNotFoundError):
            return ModelNotFoundError(f"{what}, which the hub does not have: {cause}")
        chained = chained.__cause__ or chained.__context__
    return ModelLoadError(f"{what} from the hub (or it cannot be reached): {cause}")


def check_source(name: str) -> None:
    """Raise at once if a model can be neither here nor on a reachable hub.

    Raises:
        ModelNotFoundError: the name is no local checkpoint, and no hub id.
        ModelLoadError: a hub id without a local copy, and a hub that is switched off or does not answer.
    """
    _, options = checkpoint_source(name)
    if options["local_files_only"]:
        return
    if len(name) > _LONGEST_ID or not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(f"{short(name)} is no directory here and cannot be a hub id; {_EXPECTED}")
    from huggingface_hub import constants

    copies = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
    if any(copies.glob("*/config.json")):
        return
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _why_no_hub(constants.ENDPOINT)
    if reason is not None:
        raise ModelLoadError(
            f"{name!r} is no directory here, has no copy in {constants.HF_HUB_CACHE}, and cannot be fetched from the "
            f"hub: {reason}; name a checkpoint's directory, or leave the model out for the demo model"
        )


def _why_no_hub(endpoint: str) -> str | None:
    """Return why the hub cannot be reached; None if it answers, or behind a proxy."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    if getproxies():
        return None
    url = urlsplit(endpoint)
    try:
        socket.create_connection((url.hostname or "", url.port or {"http": 80}.get(url.scheme, 443)), _PATIENCE).close()
    except OSError as error:
        return f"{url.hostname} does not answer ({error.strerror or error})"
    return None
