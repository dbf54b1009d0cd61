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


# Keys of sizes, none of which is larger than the largest dimension of a tensor.
_SIZES = (
    *("embedding_length", "feed_forward_length", "vocab_size", "attention.head_count", "attention.head_count_kv"),
    *("attention.key_length", "attention.value_length", "rope.dimension_count"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length"),
)


def read_settings(file: GgufFile) -> dict[str, Any]:
    """Return a configuration's settings, under the names of transformers, corrected (`corrections`).

    Raises:
        ModelLoadError: transformers does not map the architecture, or the file lacks a key or has one that cannot be
            honoured.
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    _check_sizes(file)
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


def _check_sizes(file: GgufFile) -> None:
    """Raise ModelLoadError for sizes that the file has no tensors for, before transformers makes a model of them."""
    largest = max((max(tensor.shape) for tensor in file.tensors.values()), default=0)
    blocks = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    positions = file.tensors.get("position_embd.weight")
    most = dict.fromkeys(_SIZES, largest) | {"block_count": blocks}
    if positions is not None:
        most["context_length"] = positions.shape[0]
    for name, size in most.items():
        key = f"{file.architecture}.{name}"
        found = file.get(key, 0)
        sizes = found if isinstance(found, list) else [found]
        if not all(isinstance(number, int) and 0 <= number <= size for number in sizes):
            raise ModelLoadError(
                f"cannot load {file.path}: its {key} is {short(found)}, expected at most {size}, which its tensors have"
            )


def make_config(settings: dict[str, Any], file: GgufFile) -> PreTrainedConfig:
    """Return the configuration of a file's settings. Raises ModelLoadError for settings that transformers refuses."""
    from transformers import AutoConfig

    settings = dict(settings)
    kind = settings.pop("model_type", None)
    try:
        return AutoConfig.for_model(kind, **settings)
    except Exception as error:
        raise ModelLoadError(f"cannot load {file.path}: no configuration of type {short(kind)}: {error}") from error


def expanded_config(file: GgufFile) -> PreTrainedConfig | None:
    """Return the configuration to expand a file with; None if transformers reads its architecture."""
    try:
        from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    except ImportError:  # before 5.24
        GGUF_CONFIG_ARCHS = {}
    return None if file.architecture in GGUF_CONFIG_ARCHS else make_config(read_settings(file), file)
