"""Identity of a saved cache: its model, tokenizer and plan."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import CacheFileError
from kvsieve.hf.persist.cache_file import as_bytes
from kvsieve.hf.runtime import AttachedModel
from kvsieve.models.quantized import matrices_of
from kvsieve.planning.profiles import Fingerprint
from kvsieve.text import first_few

# Facts about rotation and windows that weights do not determine.
_POSITIONS = ("rope_parameters", "layer_types", "sliding_window", "no_rope_layers", "attention_chunk_size")
# Evenly spaced elements of each weight tensor that are hashed.
_SAMPLE = 64


def as_json(value: Any, what: str, error: type[Exception]) -> Any:
    """Return a value after a round trip through JSON; raise `error` if JSON cannot represent it."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as problem:
        raise error(f"{what} cannot be written as JSON: {problem}") from None


def model_identity(model: AttachedModel) -> dict[str, Any]:
    """Return a JSON-ready description that distinguishes a model from others."""
    positions = {name: getattr(model.config, name, None) for name in _POSITIONS}
    return {
        "id": str(getattr(model.model.config, "_name_or_path", "") or ""),
        "revision": getattr(model.model.config, "_commit_hash", None),
        "class": type(model.model).__name__,
        "shape": dataclasses.asdict(Fingerprint.of(model.model)),
        "positions": as_json(positions, "the model's configuration", CacheFileError),
        "dtype": str(model.model.dtype).removeprefix("torch."),
        "adapters": list(model.adapters),
        "weights": _weights(model),
    }


def _weights(model: AttachedModel) -> str:
    """Hash a few elements of every weight of the decoder, independently of names and order."""
    found = []
    for weight in model.decoder.parameters():
        found += [_digest(tensor, tuple(weight.shape)) for tensor in _tensors(weight.detach())]
    for matrix in matrices_of(model.decoder):
        numbers = matrix.numbers
        if numbers is None:
            found.append(_digest(matrix.data, (matrix.kind, matrix.width, matrix.inner)))
        else:
            # The same as expanded.
            found.append(_digest(numbers, tuple(numbers.shape), model.model.dtype))
    return hashlib.sha256(b"".join(sorted(found))).hexdigest()


def _digest(tensor: Tensor, about: tuple[Any, ...], dtype: torch.dtype | None = None) -> bytes:
    # An odd step, so that not all elements are of one column.
    part = tensor.flatten()[:: max(1, tensor.numel() // _SAMPLE) | 1][:_SAMPLE]
    return hashlib.sha256(repr(about).encode() + as_bytes(part.to(dtype or part.dtype))).digest()


def _tensors(weight: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors of a weight; none if it is loaded for each call."""
    if hasattr(weight, "__tensor_flatten__") and not hasattr(weight, "to_local"):
        for name in weight.__tensor_flatten__()[0]:
            yield from _tensors(getattr(weight, name))
    elif not weight.is_meta:
        yield weight


def vocabulary_hash(tokenizer: Any) -> str:
    """Hash the vocabulary."""
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def check_model(path: Any, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise CacheFileError unless a file was made with this model; see model_identity."""
    both = f"{path} was made with {_named(saved)}, this model is {_named(current)}"
    shapes = [Fingerprint(**identity["shape"]) for identity in (saved, current)]
    differ = shapes[0].differences(shapes[1])
    if differ or saved["class"] != current["class"]:
        found = ", ".join([*([] if saved["class"] == current["class"] else ["class"]), *differ])
        raise CacheFileError(f"{both}; they differ in {found}. Its file: {shapes[0]}; here: {shapes[1]}")
    found = _differences(saved["positions"], current["positions"])
    if found:
        raise CacheFileError(f"{both}; their configurations differ: {found}")
    if saved["dtype"] != current["dtype"]:
        raise CacheFileError(
            f"{path} was made with {_named(saved)} in {saved['dtype']}, this model is in {current['dtype']}; load the "
            f"model in {saved['dtype']}"
        )
    adapters = [identity.get("adapters", []) for identity in (saved, current)]
    if adapters[0] != adapters[1]:
        before, now = (", ".join(map(repr, names)) or "no adapter" for names in adapters)
        raise CacheFileError(f"{path} was made under {before}, and {now} acts here: switch to what it was made under")
    if saved["weights"] != current["weights"]:
        raise CacheFileError(
            f"{both}, of the same shape, but with other weights; load the checkpoint that the cache was made with"
        )


def _named(model: dict[str, Any]) -> str:
    revision = f" at {model['revision'][:12]}" if model["revision"] else ""
    return f"{model['id'] or 'a model without a name'}{revision} ({model['class']})"


def check_plan(path: Any, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise CacheFileError unless a file was made under this plan; both as Plan.to_dict gives them."""
    names = [form["name"] for form in (saved, current)]
    # Names of plans and profiles do not matter.
    for form in (saved, current):
        form.pop("name")
        form.get("profile", {}).pop("name", None)
    found = _differences(saved, current)
    if found:
        raise CacheFileError(
            f"{path} was made under the plan {names[0]!r}, and this one, {names[1]!r}, differs: {found}; attach the "
            "plan it was made under"
        )


def _differences(saved: Any, current: Any) -> str:
    """Return the first few places where two JSON values differ, with the values in the file and here."""
    return first_few(list(_differing(saved, current, "")))


def _differing(saved: Any, current: Any, where: str) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(current, dict):
        for name in sorted(saved.keys() | current.keys()):
            yield from _differing(saved.get(name), current.get(name), f"{where}.{name}" if where else name)
    elif saved != current:
        yield f"{where} is {_short(saved)} in the file and {_short(current)} here"


def _short(value: Any) -> str:
    if isinstance(value, dict) and "type" in value:
        return str(value["type"])
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
