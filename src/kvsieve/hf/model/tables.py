"""Rotary tables that depend on the length of the sequence: longrope's two sets of factors, dynamic NTK's base.

Such a module makes the tables of a pass by the largest position in it, so a chunked prompt would get the tables of
several lengths. Model names are not used: the tables of a short and of a long sequence are compared.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvsieve.hf.compat import decoder_of, text_config
from kvsieve.hf.model.context import context_of

# Lowest and highest length by which tables of one cache's keys were made.
Lengths = tuple[int, int]
_SHORT = 2


class RotaryTables:
    """The tables of one model. module: computes them; None if the model has none of its own."""

    def __init__(self, model: Any) -> None:
        self.config = text_config(model)
        self.module = getattr(decoder_of(model), "rotary_emb", None)
        self._device = model.device
        self._known: dict[int, bytes] = {}
        self._depend: bool | None = None

    @property
    def depend(self) -> bool:
        """True if tables depend on the length of the whole sequence."""
        if self._depend is None:
            longest = context_of(self.config)
            self._depend = False
            if self.module is not None and longest is not None and self._device.type != "meta":
                # Modules that are called in another way have tables of their own kind.
                with contextlib.suppress(Exception):
                    self._depend = self._key(_SHORT) != self._key(longest)
        return self._depend

    def same(self, used: Lengths | None, length: int) -> bool:
        """Return True if a cache's keys have the tables of a sequence of `length`. used: None for no keys."""
        return used is None or not self.depend or len({self._key(number) for number in (*used, length)}) == 1

    def notes(self, used: Lengths | None, reread: int) -> list[str]:
        """Return notes on the effects of a turn's tables.

        Args:
            used: lengths of the tables of a cache's keys; None for no keys.
            reread: tokens that were prefilled again.
        """
        notes = []
        if reread:
            notes.append(
                f"{reread} tokens were read again: the model's rotary tables depend on the length of the whole, and "
                "those that the cache was read by hold for another length"
            )
        if used is not None and not self.same((used[0], used[0]), used[1]):
            notes.append(
                f"the model's rotary tables depend on the length of the whole: the cache was read by those of "
                f"{used[0]} to {used[1]} tokens, as transformers' generate reads an answer; a later turn reads the "
                "conversation again"
            )
        return notes

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of the module by name."""
        assert self.module is not None
        return {**dict(zip(inspect.signature(self.module.forward).parameters, args, strict=False)), **kwargs}

    def at_lengths(self, call: dict[str, Any], lengths: Sequence[int]) -> Any:
        """Return the tables of a call in sequences of these lengths, one per row or one for all."""
        positions: Tensor = call["position_ids"]
        if len({self._key(length) for length in lengths}) == 1:
            return self._at(call, positions, max(lengths))
        rows = [
            self._at(call, row, length)
            for row, length in zip(positions.expand(len(lengths), -1).split(1), lengths, strict=True)
        ]
        return tuple(map(torch.cat, zip(*rows, strict=True))) if isinstance(rows[0], tuple) else torch.cat(rows)

    def _at(self, call: dict[str, Any], positions: Tensor, length: int) -> Any:
        assert self.module is not None
        begin = {**call, "position_ids": torch.zeros_like(positions[..., :1])}
        # The last position of the whole sequence says how long it is; its own table is cut off.
        last = torch.full_like(positions[..., :1], length - 1)
        # Its hooks are not to run again.
        make = self.module.forward
        # Dynamic tables stay as long as the longest sequence was, until one comes that needs no scaling.
        make(**begin)
        found = make(**{**call, "position_ids": torch.cat([positions, last], -1)})
        make(**begin)
        return tuple(part[..., :-1, :] for part in found) if isinstance(found, tuple) else found[..., :-1, :]

    def _key(self, length: int) -> bytes:
        """Return the tables of position 1 in a sequence of `length`, by which two lengths are compared."""
        if length not in self._known:
            assert self.module is not None
            call: dict[str, Any] = {"x": torch.zeros(1, 1, 1, device=self._device)}
            types = [None]
            if "layer_type" in inspect.signature(self.module.forward).parameters:
                types = sorted(set(self.config.layer_types))
            found = []
            for layer_type in types:
                typed = call if layer_type is None else {**call, "layer_type": layer_type}
                at = torch.ones(1, 1, dtype=torch.int64, device=self._device)
                tables = self._at(typed, at, length)
                found += [*tables] if isinstance(tables, tuple) else [torch.view_as_real(tables)]
            if len(self._known) > 256:
                self._known.clear()
            self._known[length] = b"".join(part.float().cpu().numpy().tobytes() for part in found)
        return self._known[length]
