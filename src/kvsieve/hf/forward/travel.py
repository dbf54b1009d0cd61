"""The tokens that pass through the layers, and the per-token arguments of layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsieve.cache.tensors import tensors_in
from kvsieve.errors import UnsupportedModelError
from kvsieve.types import Selection

# Arguments of a decoder layer that are rebuilt from the travelling tokens.
_MASKS = "attention_mask"


@dataclass
class Tokens:
    """The tokens that travel through a layer.

    Attributes:
        token_index: int [1 or B, L], their columns in the conversation.
        valid: bool [B, L], False for padding; None without padding.
        counts: real ones per row.
        narrowed: True once some were dropped.
    """

    token_index: Tensor
    valid: Tensor | None
    counts: tuple[int, ...]
    narrowed: bool = False
    _positions: Tensor | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return self.token_index.shape[1]

    def positions(self, mask: Tensor | None) -> Tensor:
        """Return positions, padding not counted, int [1 or B, L]; mask: bool [B, columns], None without padding."""
        if mask is None:
            return self.token_index
        if self._positions is None:
            index = self.token_index.long().expand(len(mask), -1)
            self._positions = (mask.cumsum(-1) - 1).clamp_min(0).gather(1, index)
        return self._positions

    def columns(self) -> Tensor:
        """Columns of the real ones, int32 [1 or B, L], -1 for padding and filler."""
        found = self.token_index.to(torch.int32)
        return found if self.valid is None else found.masked_fill(~self.valid, -1)

    def part(self, columns: slice) -> Tokens:
        """Return those of a slice of the columns, if none was dropped."""
        token_index = self.token_index[:, columns]
        counts = (token_index.shape[1],) * len(self.counts)
        if self.valid is None:
            return Tokens(token_index, None, counts)
        valid = self.valid[:, columns]
        real = tuple(valid.sum(-1).tolist())
        return Tokens(token_index, None if real == counts else valid, real)

    def mask_states(self, given: dict[str, Any], names: Collection[str]) -> None:
        """Add a mask of them to the arguments of a recurrent layer with parameters `names`."""
        name = next(name for name in ("mamba_attention_mask", "attention_mask") if name in names)
        mask = None if self.valid is None else self.valid.long()
        if isinstance(given.get(name), dict):
            # One for each part of the layer, of which attention needs none.
            states = ("conv", "linear_attention")
            given[name] = {part: mask if part in states else argument for part, argument in given[name].items()}
        else:
            given[name] = mask

    def narrow(self, selection: Selection) -> Tokens:
        """Keep those of a selection [B, K] among them."""
        rows = selection.indices
        token_index = self.token_index.expand(rows.shape[0], -1).gather(1, rows)
        counts = selection.lengths or (rows.shape[1],) * rows.shape[0]
        return Tokens(token_index, selection.real(), counts, narrowed=True)


@dataclass
class Arguments:
    """Per-token arguments of decoder layers besides hidden states: rotary tables, position ids and the like.

    They are recognized by tensor identity: outputs of modules outside the layers in this pass, and inputs of the source
    layer.

    Attributes:
        size: tokens of the pass.
        noted: tensors [1 or B, L, ...], or integers [A, 1 or B, L] of several axes, in the order of creation.
        rows: int64 [B, K], tokens that continue from the current layer, None for all.
        offered: number of candidates.
        now: by the id of a noted one, its replacement in deeper layers.
    """

    size: int
    noted: list[Tensor] = field(default_factory=list)
    now: dict[int, Tensor] = field(default_factory=dict)
    rows: Tensor | None = None
    offered: int = 0

    def note(self, made: Any) -> None:
        """Record the per-token tensors in a module's output, or a layer's input."""
        for part in tensors_in(made):
            if self._per_token(part) and all(part is not tensor for tensor in self.noted):
                self.noted.append(part)

    def note_given(self, given: Mapping[str, Any]) -> None:
        """Record those of a layer's arguments, by name."""
        self.note([value for name, value in given.items() if not name.endswith(_MASKS)])

    def join(self, chunks: Iterable[tuple[Tensor, ...]], whole: Callable[[list[Tensor]], Tensor]) -> None:
        """Pass all chunks' tensors to deeper layers; each chunk has as many as are noted, in the same order."""
        chunks = [*chunks, tuple(self.noted)]
        if len({len(chunk) for chunk in chunks}) > 1:
            raise UnsupportedModelError(
                "its decoder makes other arguments for its layers in each chunk, which token propagation cannot move "
                "along; read the prompt without chunk=, or use a plan without propagate="
            )
        parts = zip(*chunks, strict=True)
        for own, tensors in zip(self.noted, parts, strict=True):
            if self._has_axes(own):
                self.now[id(own)] = whole([part.movedim(0, 2) for part in tensors]).movedim(2, 0)
            else:
                self.now[id(own)] = whole(list(tensors))

    def narrow(self, rows: Tensor, offered: int) -> None:
        """Keep the tokens at `rows`, int64 [B, K], of `offered` candidates."""
        self.rows = rows
        self.offered = offered
        for own in self.noted:
            part = self.now.get(id(own), own)
            if self._has_axes(own):
                self.now[id(own)] = gather(part.movedim(0, 2), rows).movedim(2, 0)
            else:
                self.now[id(own)] = gather(part, rows)

    def deeper(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a deeper layer's arguments for the travelling tokens.

        Raises:
            UnsupportedModelError: one of them is per token and unknown.
        """
        return {name: value if name.endswith(_MASKS) else self._moved(name, value) for name, value in given.items()}

    def moved(self, made: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a layer's outputs besides hidden states, for the tokens that continue from it."""
        out = []
        for part in made:
            if isinstance(part, Tensor) and id(part) in self.now:
                part = self.now[id(part)]
            elif isinstance(part, Tensor) and self.rows is not None and part.ndim > 1 and part.shape[1] == self.offered:
                part = gather(part, self.rows)
            out.append(part)
        return tuple(out)

    def _moved(self, name: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)) and any(isinstance(part, Tensor) for part in value):
            return type(value)(self._moved(name, part) for part in value)
        if not isinstance(value, Tensor):
            return value
        if id(value) in self.now:
            return self.now[id(value)]
        if value.ndim > 1 and any(value is tensor for tensor in self.now.values()):
            return value
        if self.size > 1 and self.size in value.shape[1:]:
            raise UnsupportedModelError(
                f"its decoder layers take a per-token argument {name!r} that token propagation cannot narrow; "
                "use a plan without propagate="
            )
        return value

    def _per_token(self, part: Tensor) -> bool:
        return self._has_axes(part) or (part.ndim >= 2 and part.shape[1] == self.size)

    def _has_axes(self, part: Tensor) -> bool:
        """Return True for position ids [A, 1 or B, L] of several axes, and their rotary tables [A, 1 or B, L, R]."""
        numbers = part.ndim == 3 and not (part.is_floating_point() or part.is_complex())
        tables = part.ndim == 4 and part.is_floating_point() and part.shape[0] in (3, 4)
        return (numbers or tables) and part.shape[2] == self.size and part.shape[1] != self.size


def gather(part: Tensor, rows: Tensor) -> Tensor:
    """Gather part [1 or B, L, ...] at rows [B, K]: [B, K, ...]."""
    shape = part.shape[2:]
    index = rows.to(part.device).view(*rows.shape, *(1 for _ in shape)).expand(*rows.shape, *shape)
    return part.expand(len(rows), *part.shape[1:]).gather(1, index)


def joined(parts: list[Tensor]) -> Tensor:
    """Concatenate chunks [1 or B, L, ...]."""
    batch = max(len(part) for part in parts)
    return torch.cat([part.expand(batch, *part.shape[1:]) for part in parts], dim=1)
