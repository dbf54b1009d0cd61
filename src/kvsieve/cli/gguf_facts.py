"""Rows of `kvsieve doctor` about a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsieve.report.display import bytes_text

if TYPE_CHECKING:
    from kvsieve.models.gguf.file import GgufFile, GgufTensor

_TEXTS = {
    "digits": "In 1999, 12345.67 of 1,000,000 were \u00bd or x\u00b2",
    "spaces": "  two   spaces\t\ttabs \n\n\n lines \r\n end  ",
    "code": "def f(x: int) -> str:\n    return {'a': [x ** 2]}  # ok != wrong\n",
    "contractions": "They're sure I'LL say don't, it's y'all's",
    "letters": "na\u00efve \u00dcbergr\u00f6\u00dfe \u041f\u0440\u0438\u0432\u0435\u0442 HTMLParser e\u0301",
    "CJK": "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694",
    "emoji": "\U0001f642 \U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467",
}
_CONTROLS = 40


def file_facts(name: str, original: str | None = None) -> dict[str, str]:
    """Return what a GGUF file says about its model, by the names of rows.

    Args:
        name: of the file.
        original: directory or hub id of the model that it was made from. Default: looked for beside the file and in the
            hub's cache.

    Raises:
        ModelLoadError: the file cannot be loaded, or the original has no tokenizer.
    """
    from kvsieve.models import load_tokenizer
    from kvsieve.models.gguf.config import expanded_config
    from kvsieve.models.gguf.file import GgufFile
    from kvsieve.models.gguf.tokenizer import end_tokens

    file = GgufFile(name)
    config = expanded_config(file)
    tokenizer = load_tokenizer(name)
    pre = file.get("tokenizer.ggml.pre")
    words = tokenizer.convert_ids_to_tokens(end_tokens(file, tokenizer))
    template = tokenizer.chat_template
    named = f": {', '.join(template)}" if isinstance(template, dict) else ""
    return {
        "architecture": f"{file.architecture}, {file.get('general.name', 'without a name')}",
        "context": f"{file.get(f'{file.architecture}.context_length', 'unknown')} tokens",
        **dict(_weights(file)),
        "rotary positions": "as transformers reads them" if config is None else _rotation(config.rope_parameters),
        "tokenizer": f"{file.get('tokenizer.ggml.model')}, {len(tokenizer)} tokens"
        + (f", split as {pre}" if pre is not None else ""),
        "chat template": f"yes{named}" if template else "no",
        "end tokens": ", ".join(words) or "none",
        "original tokenizer": _comparison(file, tokenizer, original),
    }


def _weights(file: GgufFile) -> Iterator[tuple[str, str]]:
    from kvsieve.kernels.cpu import quantized

    groups: dict[tuple[str, str], list[GgufTensor]] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) == 1:
            how = "vectors, in the model's dtype"
        elif len(tensor.shape) == 2 and tensor.kind in quantized.FORMATS:
            loaded = quantized.built().loaded is not None
            how = f"read in blocks by {'the C kernel' if loaded else 'plain torch, slowly'}"
        else:
            how = "dequantized when loaded"
        groups.setdefault((tensor.kind, how), []).append(tensor)
    sizes = {group: sum(tensor.nbytes for tensor in tensors) for group, tensors in groups.items()}
    for kind, how in sorted(groups, key=lambda group: -sizes[group]):
        row = "weights" if how.startswith("read") else "others"
        count = len(groups[kind, how])
        yield f"{row} in {kind}", f"{bytes_text(sizes[kind, how])} in {count} tensor{'s' * (count > 1)}, {how}"


def _rotation(parameters: Any) -> str:
    """Describe rotary positions; of models with several kinds of layers, those of the first that differ."""
    if not parameters:
        return "none"
    if "rope_type" not in parameters:
        return "; ".join(f"{layers}: {_rotation(found)}" for layers, found in parameters.items())
    numbers = {name: value for name, value in parameters.items() if isinstance(value, int | float)}
    return ", ".join([parameters["rope_type"], *(f"{name} {value:.10g}" for name, value in numbers.items())])


def _comparison(file: GgufFile, tokenizer: Any, original: str | None) -> str:
    from kvsieve.models import load_tokenizer

    repository = _repository(file)
    if original is None:
        original = _beside(file) or _cached(repository)
    if original is None:
        place = f", and {repository} is not in the hub's cache" if repository else ""
        return f"not compared: no checkpoint is beside the file{place}; name one as the second argument"
    other = load_tokenizer(original)
    special = {token.content for token in tokenizer.added_tokens_decoder.values()}
    texts = {**_TEXTS, "added tokens": " x".join(sorted(special)[:_CONTROLS])}
    differing = [
        name
        for name, text in texts.items()
        if tokenizer(text, add_special_tokens=False).input_ids != other(text, add_special_tokens=False).input_ids
    ]
    if tokenizer("x").input_ids != other("x").input_ids:
        differing.append("tokens added to a prompt")
    return f"differs from {original} in: {', '.join(differing)}" if differing else f"same as {original} on a test text"


def _beside(file: GgufFile) -> str | None:
    folder = file.path.parent
    return str(folder) if (folder / "tokenizer.json").is_file() and (folder / "config.json").is_file() else None


def _cached(repository: str | None) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    if repository is None:
        return None
    found = try_to_load_from_cache(repository, "tokenizer.json")
    return str(Path(found).parent) if isinstance(found, str) else None


def _repository(file: GgufFile) -> str | None:
    """Return the hub id of the model that a file was made from; None if it does not say."""
    for key in ("general.source.repo_url", "general.source.url", "general.base_model.0.repo_url"):
        owner, _, name = str(file.get(key, "")).partition("huggingface.co/")[2].rstrip("/").partition("/")
        if owner and name and "/" not in name:
            return f"{owner}/{name}"
    return None
