"""Checks of ids, masks and their containers, for every entry point of the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import InputError, UnsupportedOptionError, short
from kvsieve.planning.turns import check_characters

_IDS = (torch.int64, torch.int32)
# Other outputs of tokenizers than ids and mask, which decoder-only models do not take.
_UNTOLD = {"token_type_ids", "special_tokens_mask", "offset_mapping", "length"}


def prompt_of(input_ids: Any, attention_mask: Any) -> tuple[Any, Any]:
    """Return ids and mask, also from a tokenizer's output: ``tokenizer(texts, return_tensors="pt")``."""
    if not isinstance(input_ids, Mapping):
        return input_ids, attention_mask
    names = set(input_ids)
    unknown = sorted(map(str, names - {"input_ids", "attention_mask"} - _UNTOLD))
    if "input_ids" not in names or unknown:
        found = f"{', '.join(unknown)}, which is not read" if unknown else "no input_ids"
        raise InputError(f"the prompt is a {type(input_ids).__name__} with {short(found)}; pass input_ids=")
    own = input_ids.get("attention_mask")
    if own is not None and attention_mask is not None:
        raise InputError("attention_mask is given twice, in what the tokenizer returned and beside it; leave one out")
    return input_ids["input_ids"], attention_mask if own is None else own


def check_ids(input_ids: Any, vocabulary: int, *, values: bool = True) -> None:
    """Raise InputError unless these are token ids, int [batch, tokens], of a model with this vocabulary.

    values: False to check only dtype and shape.
    """
    if not isinstance(input_ids, Tensor):
        lists = isinstance(input_ids, (list, tuple))
        how = 'torch.tensor(ids), or tokenizer(text, return_tensors="pt")' if lists else "token ids of your tokenizer"
        raise InputError(f"input_ids must be a tensor [batch, tokens], got {short(input_ids)}; pass {how}")
    if input_ids.ndim != 2:
        raise InputError(
            f"input_ids must be a tensor [batch, tokens], got {tuple(input_ids.shape)}; add a batch dimension"
        )
    if input_ids.shape[0] == 0 or input_ids.shape[1] == 0:
        raise InputError(f"the prompt is empty: input_ids of shape {tuple(input_ids.shape)}; pass at least one token")
    if input_ids.dtype not in _IDS or input_ids.layout != torch.strided or input_ids.is_meta:
        raise InputError(
            f"input_ids must be token ids, a plain int64 tensor, got {input_ids.dtype}, {input_ids.layout} on "
            f"{input_ids.device}; pass what the tokenizer returned, or .long()"
        )
    if values:
        low, high = (int(edge) for edge in torch.stack(torch.aminmax(input_ids)).tolist())
        if low < 0 or high >= vocabulary:
            raise InputError(
                f"input_ids holds the id {low if low < 0 else high}, the model knows 0 to {vocabulary - 1}: encode the "
                "text with the model's own tokenizer"
            )


def row_of_ids(ids: Any, vocabulary: int, name: str) -> Tensor:
    """Return the token ids of one text as int64 [N] on the CPU. Raises InputError for others.

    Args:
        ids: int [1, N] or [N], or a list.
        vocabulary: number of tokens that the model knows.
        name: of the text, for errors.
    """
    if isinstance(ids, (list, tuple)) and ids and all(type(token) is int for token in ids):
        ids = torch.tensor(ids)
    if isinstance(ids, Tensor) and ids.ndim == 1:
        ids = ids[None]
    if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1 or not ids.shape[1]:
        got = f"shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else short(ids)
        raise InputError(f"{name} is the token ids of one text, [1, N] with at least one, got {got}")
    check_ids(ids, vocabulary)
    return ids[0].to("cpu", torch.int64)


def check_mask(mask: Any, shape: tuple[int, ...], what: str = "that of input_ids") -> None:
    """Raise InputError unless `mask` is a tensor of this shape; the last argument describes the shape.

    Values: see `strange`.
    """
    if not isinstance(mask, Tensor):
        raise InputError(f"attention_mask must be a tensor [batch, tokens], got {short(mask)}; torch.tensor(mask)")
    if mask.shape != shape:
        raise InputError(f"attention_mask has shape {tuple(mask.shape)}, expected {shape}, {what}")
    if mask.is_complex() or mask.layout != torch.strided or mask.is_meta:
        raise InputError(
            f"attention_mask must be a plain tensor of 0 and 1, got {mask.dtype}, {mask.layout} on {mask.device}"
        )


def strange(mask: Tensor) -> Tensor:
    """Return bool like `mask`: True for values other than 0 and 1, which would give wrong positions."""
    return (mask != 0) & (mask != 1)


def refuse_strange(mask: Tensor) -> None:
    """Raise InputError for a mask with values other than 0 and 1."""
    odd = mask[strange(mask)]
    if odd.numel():
        raise InputError(
            f"attention_mask holds {odd[0].item()}; it must hold 1 for tokens and 0 for padding, and nothing else"
        )


def check_text(name: str, text: Any) -> None:
    """Raise InputError unless `text` is a non-empty valid text."""
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{name} must be a text of at least a character, got {short(text)}")
    check_characters(name, text)


def check_tokenizer(tokenizer: Any) -> None:
    """Raise InputError for a tokenizer without a vocabulary to identify it by."""
    if tokenizer is not None and not callable(getattr(tokenizer, "get_vocab", None)):
        raise InputError(f"tokenizer must be a tokenizer of transformers, got {short(tokenizer)}")


def check_callable(name: str, value: Any) -> None:
    """Raise InputError for a value that is neither callable nor None."""
    if value is not None and not callable(value):
        raise InputError(f"{name} must be a function, got {short(value)}")


def check_path(path: Any) -> None:
    """Raise InputError unless `path` can name a file."""
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name or "\0" in name or any("\ud800" <= sign <= "\udfff" for sign in name):
        raise InputError(f"path must be the name of a file, got {short(path)}")


def media_tokens(config: Any) -> dict[int, str]:
    """Return the ids of tokens that stand for images and the like, with the names of their attributes in a config."""
    named = {name: value for name, value in vars(config).items() if name.endswith(("_token_id", "_token_index"))}
    kinds = ("image_t", "video_t", "audio_t")
    return {value: name for name, value in named.items() if name.startswith(kinds) and isinstance(value, int)}


def check_no_media(ids: Tensor, config: Any, plan: str) -> None:
    """Raise UnsupportedOptionError for placeholder tokens of images and the like, which only generate embeds.

    Args:
        ids: int64 [B, L].
        config: of a model with other parts than text.
        plan: the plan's name, for the error.
    """
    for value, name in media_tokens(config).items():
        if bool((ids == value).any()):
            raise UnsupportedOptionError(
                f"the prompt holds the token {value} ({name}), in whose place images or the like are to be read, "
                "and these are read in one piece only: use sieve.generate(ids, mask, pixel_values=...) without "
                f"chunk= and question_tokens=, and a plan that reads a prompt once, unlike {plan!r} where it does not"
            )
