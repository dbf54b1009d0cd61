"""Compiled calls of a decoder on a CPU: small operations of layers, and products of few tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn

from kvsieve.hf.decode.fused_layers import FusedLayers
from kvsieve.hf.decode.fused_modules import FusedModules
from kvsieve.hf.decode.linears import Linears
from kvsieve.models.quantized import weight_bytes

_log = logging.getLogger(__name__)

# Bytes of weights that fit the processor's cache, and take little time.
_LEAST = 32 << 20


class FusedDecoder:
    """Small operations and products of a decoder; `install` replaces forwards on instances, `remove` brings them back.

    Args:
        decoder: of a model.
        output: the model's output layer.
        narrow: see `Linears`.

    Attributes:
        modules: the norms, gated MLPs and attention that are replaced.
        linear_layers: linear layers, likewise.

    Raises:
        ValueError: there is neither of them, with both reasons.
    """

    def __init__(self, decoder: nn.Module, output: nn.Module | None = None, *, narrow: bool = False) -> None:
        self._linears: Linears | None = None
        self._layers: FusedLayers | None = None
        self._parts: list[FusedModules | Linears | FusedLayers] = []
        self.modules = self.linear_layers = 0
        modules = None
        reasons = []
        try:
            modules = FusedModules(decoder)
            self._parts.append(modules)
            self.modules = modules.count
        except ValueError as reason:
            reasons.append(str(reason))
        try:
            self._linears = linears = Linears(decoder, output, narrow=narrow)
            self._parts.append(linears)
            self.linear_layers = linears.count
        except ValueError as reason:
            reasons.append(str(reason))
        message = "; ".join(reasons)
        if not self._parts:
            raise ValueError(message)
        if modules is not None:
            products = {} if self._linears is None else self._linears.by_layer
            self._layers = FusedLayers(decoder, modules.replaced, products)
            self._parts.append(self._layers)
        if message:
            _log.info("not all is compiled: %s", message)

    @property
    def narrow_bytes(self) -> int:
        """Bytes that copies of weights take now."""
        return 0 if self._linears is None else self._linears.narrow_bytes

    def look(self) -> None:
        """Detect weights that were written since they were copied, in ways that torch does not count."""
        if self._linears is not None:
            self._linears.look()

    def install(self, harmless: Iterable[int] = ()) -> None:
        """Let the modules compute in compiled calls. harmless: see `FusedLayers`."""
        if self._layers is not None:
            self._layers.harmless.update(harmless)
        for part in self._parts:
            part.install()

    def remove(self) -> None:
        """Bring the modules' own forward back."""
        for part in self._parts:
            part.remove()


def by_default(decoder: nn.Module, output: nn.Module | None, *, alone: bool) -> tuple[str, FusedDecoder | None]:
    """Return the engine that "auto" means, and its replacements. alone: heads are not divided, nor layers."""
    if next((parameter.device.type for parameter in decoder.parameters()), "cpu") == "cuda":
        return "graph", None
    if alone and weight_bytes(decoder) >= _LEAST:
        try:
            return "fused", FusedDecoder(decoder, output, narrow=True)
        except ValueError as reason:
            _log.info("nothing is compiled: %s", reason)
    return "eager", None
