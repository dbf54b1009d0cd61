"""Embedding of a prompt with images, before the passes over it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvsieve.errors import InputError, KvsieveError, UnsupportedOptionError
from kvsieve.hf.cache.embedded import EmbeddedPrompt
from kvsieve.hf.forward.embedding import ending_before_decoder
from kvsieve.hf.runtime import AttachedModel


def embed_prompt(model: AttachedModel, ids: Tensor, inputs: Mapping[str, Tensor]) -> EmbeddedPrompt:
    """Embed a prompt with images; passes over any part of its tokens then read `SieveCache.embedded`.

    Args:
        model: an attached composite model.
        ids: int64 [1, N], with placeholder tokens for the images.
        inputs: further output of the model's processor, such as pixel_values.

    Raises:
        InputError: the images do not fit the placeholders.
        UnsupportedOptionError: the model's decoder needs the images in a way that kvsieve does not support.
    """
    if not model.is_composite:
        raise UnsupportedOptionError(f"{type(model.model).__name__} reads text alone: leave the images out")
    own = model.model
    placed = {
        name: part.to(own.device, own.dtype) if part.is_floating_point() else part.to(own.device)
        for name, part in inputs.items()
    }
    with ending_before_decoder() as arguments, torch.no_grad():
        try:
            own(input_ids=ids.to(own.device), **placed)
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            if isinstance(error, (KvsieveError, torch.OutOfMemoryError)):
                raise
            raise InputError(f"the model refuses the images of the prompt: {error}") from error
    return EmbeddedPrompt.of(arguments, ids.shape[1])
