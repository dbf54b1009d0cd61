"""Configurations of models from the keys of GGUF files, as transformers maps them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsieve.errors import short
from kvsieve.models.fetch import ModelLoadError
from kvsieve.models.gguf.corrections import correct
from kvsieve.models.gguf.file import PLACEHOLDER, GgufFile

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_settings(file: GgufFile) -> dict[str, Any]:
    """Return a configuration's settings, under the names of transformers, corrected (`corrections`).

    Raises:
        ModelLoadError: transformers does not map the architecture, or the file lacks a key or has one that cannot be
            honoured.
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # The reader of transformers takes seconds for a large vocabulary, which no setting depends on but by its length.
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "header.gguf"
        file.write_header(small)
        try:
            settings: dict[str, Any] = load_gguf_checkpoint(str(small), return_tensors=False)["config"]
        except Exception as error:
            raise ModelLoadError(
                f"cannot load {file.path}: transformers makes no configuration of its architecture "
                f"{short(file.architecture)}: {error}; a newer transformers may, also with weights='expand'"
            ) from error
    if settings.get("vocab_size") == len(PLACEHOLDER):
        settings["vocab_size"] = file.count("tokenizer.ggml.tokens")
    return correct(settings, file)


def make_config(settings: dict[str, Any]) -> PreTrainedConfig:
    """Return the configuration of these settings. Raises ModelLoadError for a model type that transformers lacks."""
    from transformers import AutoConfig

    settings = dict(settings)
    kind = settings.pop("model_type", None)
    try:
        return AutoConfig.for_model(kind, **settings)
    except Exception as error:
        raise ModelLoadError(f"cannot make a configuration of type {short(kind)}: {error}") from error


def expanded_config(file: GgufFile) -> PreTrainedConfig | None:
    """Return the configuration to expand a file with; None for the architectures that transformers reads by itself."""
    try:
        from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    except ImportError:  # before 5.24
        GGUF_CONFIG_ARCHS = {}
    return None if file.architecture in GGUF_CONFIG_ARCHS else make_config(read_settings(file))


__all__ = ["expanded_config", "make_config", "read_settings"]
