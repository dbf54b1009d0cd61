"""A prompt with images, embedded for the passes over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvsieve.cache.tensors import tensors_in
from kvsieve.errors import UnsupportedOptionError
from kvsieve.hf.compat import CACHE_NAMES

# Arguments that every pass has of its own.
_OF_A_PASS = frozenset(("input_ids", "attention_mask", "cache_position", "use_cache", *CACHE_NAMES))
# Features that layers add to the image tokens, one tensor per layer, and the mask of these tokens.
_ADDED = "deepstack_visual_embeds"
_ADDED_TO = "visual_pos_masks"


@dataclass(frozen=True, eq=False)
class EmbeddedPrompt:
    """The decoder's arguments for a whole prompt of one row; a pass takes the part of its tokens.

    Attributes:
        tokens: of the prompt.
        columns: arguments with a value per token, each with the dimension of the tokens.
        added: features [M, C] that the first layers add to the M image tokens.
        image_tokens: bool [1, N], tokens that these are added to; None without them.
    """

    tokens: int
    columns: Mapping[str, tuple[Tensor, int]]
    added: tuple[Tensor, ...]
    image_tokens: Tensor | None

    @classmethod
    def of(cls, arguments: Mapping[str, Any], tokens: int) -> EmbeddedPrompt:
        """Return the prompt of a decoder's arguments for all of its tokens.

        Raises UnsupportedOptionError for arguments that no pass over a part of the tokens can be given.
        """
        if any(mask.ndim > 2 for mask in tensors_in(arguments.get("attention_mask"))):
            raise UnsupportedOptionError(
                "the model lets an image's tokens see each other both ways, and kvsieve supports causal attention "
                "only: leave the images out"
            )
        columns = {}
        for name, value in arguments.items():
            if name in _OF_A_PASS or name == _ADDED or not any(True for _ in tensors_in(value)):
                continue
            axis = -1 if name == "position_ids" else 1
            if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[axis] != tokens:
                raise UnsupportedOptionError(
                    f"the model's decoder is given {name} along with images, which kvsieve does not support: leave the "
                    "images out"
                )
            columns[name] = value, axis
        if "inputs_embeds" not in columns:
            raise UnsupportedOptionError(
                "the model embeds images in a way that kvsieve does not support: leave them out"
            )
        added = tuple(tensors_in(arguments.get(_ADDED)))
        return cls(tokens, columns, added, columns[_ADDED_TO][0] if added else None)

    def part(self, start: int, count: int) -> dict[str, Any]:
        """Return the arguments of `count` tokens from `start` on."""
        if start + count > self.tokens:
            raise UnsupportedOptionError(
                "the plan reads more than the tokens of the prompt, which holds images: take another method, or leave "
                "the images out"
            )
        found: dict[str, Any] = {name: part.narrow(axis, start, count) for name, (part, axis) in self.columns.items()}
        if self.image_tokens is not None:
            first = int(self.image_tokens[0, :start].sum())
            length = int(self.image_tokens[0, start : start + count].sum())
            found[_ADDED] = [features[first : first + length] for features in self.added]
        return found

    def shift_after(self, end: int) -> int:
        """Return the position of a text token after the first `end` tokens, less its index."""
        positions, axis = self.columns.get("position_ids", (None, 0))
        return 0 if positions is None else int(positions.narrow(axis, 0, end).max()) + 1 - end
