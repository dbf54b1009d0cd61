"""Products of few tokens with the weight of a linear layer, or in one call with those of several of one input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvsieve.hf.decode.narrow import NarrowWeights
from kvsieve.kernels.cpu import products as kernel

# Siblings that models give the same input, under the names they have in transformers. A model that does not is served
# all the same: parts are taken for the very same input only.
_TOGETHER = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
# A layer's weight and bias, and where they lie.
_Place = tuple[Tensor, int, Tensor | None, int]
# How often a layer's weight and bias have been written to.
_Version = tuple[int, int]


class Product:
    """Linear layers whose weights are multiplied with in one call.

    What is computed for the first of several is kept for the others, which are called next.

    Args:
        layers: of equal input; if several, with weights that are not of inference mode.
        narrow: float32 weights are read from copies in bfloat16 where these hold the same numbers; see `NarrowWeights`.
    """

    def __init__(self, layers: Sequence[nn.Linear], narrow: bool = False) -> None:
        self.layers = tuple(layers)
        self.narrow = NarrowWeights() if narrow and layers[0].weight.dtype == torch.float32 else None
        self._held = [layer._parameters for layer in layers]
        # Where the weights lay last, and what the kernel is told of them; None where it cannot read them.
        self._known: tuple[list[_Place], kernel.Weights | None] = [], None
        # An input, what tells that it is still the same, the weights' versions, and the parts that nobody has taken.
        self._kept: tuple[Tensor, Any, list[_Version], list[Tensor | None]] | None = None

    @property
    def left_over(self) -> bool:
        """True while some layer has not taken its part of the last product."""
        return self._kept is not None

    def free(self) -> None:
        """Let go of all tensors."""
        self._known, self._kept = ([], None), None
        if self.narrow is not None:
            self.narrow.free()

    def of(self, given: Tensor) -> tuple[Tensor, ...] | None:
        """Products [..., C] of [..., D], of all layers; None where the kernel cannot read the weights as they lie."""
        places, weights = self._known
        if not _lie_so(places, self._held):
            self._known = places, weights = _found(self._held)
            if self.narrow is not None:
                self.narrow.free()
        if weights is None or given.dtype != places[0][0].dtype:
            return None
        if self.narrow is not None:
            weights = self.narrow.told([each[0] for each in places], [each[2] for each in places]) or weights
        return kernel.multiply(given.contiguous(), weights)

    def first(self, given: Tensor) -> Tensor | None:
        """Return the first layer's product, and keep the others'; None as `of` does."""
        parts = self.of(given)
        if parts is None:
            return None
        self._kept = given, _mark(given), [_version(each) for each in self._held], [None, *parts[1:]]
        return parts[0]

    def take(self, given: Tensor, at: int) -> Tensor | None:
        """Return layer `at`'s part of the product that was kept; None where that was of another input, or was taken."""
        kept = self._kept
        if kept is None or kept[0] is not given or not _is_as_marked(given, kept[1]):
            return None
        versions, parts = kept[2:]
        part, parts[at] = parts[at], None
        if all(each is None for each in parts):
            self._kept = None
        held = self._held[at : at + 1]
        same = _lie_so(self._known[0][at : at + 1], held) and versions[at] == _version(held[0])
        return part if same else None


def together(decoder: nn.Module, layers: Collection[nn.Linear]) -> Iterator[tuple[nn.Linear, ...]]:
    """Yield sets of layers that one product computes: siblings under known names that stand nowhere else.

    Args:
        decoder: of a model.
        layers: those that may be among them.
    """
    # A module that is shared comes once, but hangs in several places.
    hung = Counter(id(child) for module in decoder.modules() for child in module._modules.values())
    # Whether memory is written to in place is not known of tensors of inference mode.
    known = {id(layer) for layer in layers if not layer.weight.is_inference()}
    for module in decoder.modules():
        for names in _TOGETHER:
            found = [module._modules.get(name) for name in names]
            ours = [each for each in found if id(each) in known and hung[id(each)] == 1]
            linear = [each for each in ours if isinstance(each, nn.Linear)]
            if len(linear) == len(names) and len({(each.in_features, each.weight.dtype) for each in linear}) == 1:
                yield tuple(linear)


def is_readable(weight: Any, bias: Any) -> bool:
    """Tell whether the kernel reads a layer's weight and bias as they are."""
    if type(weight) is not nn.Parameter or not (bias is None or type(bias) is nn.Parameter):
        return False
    if not weight.is_cpu or weight.dtype not in kernel.MOST_ROWS or not weight.is_contiguous():
        return False
    return bias is None or (bias.is_cpu and bias.dtype == weight.dtype and bias.is_contiguous())


def _found(held: Sequence[Mapping[str, Any]]) -> tuple[list[_Place], kernel.Weights | None]:
    pairs = [(parameters["weight"], parameters["bias"]) for parameters in held]
    if not all(is_readable(*pair) for pair in pairs) or len({(each.dtype, each.shape[1]) for each, _ in pairs}) > 1:
        return [], None
    places = [(weight, weight.data_ptr(), bias, 0 if bias is None else bias.data_ptr()) for weight, bias in pairs]
    with torch.no_grad():
        return places, kernel.Weights([weight for weight, _ in pairs], [bias for _, bias in pairs])


def _lie_so(places: Sequence[_Place], held: Sequence[Mapping[str, Any]]) -> bool:
    """Tell that weights and biases are the same ones in the same memory, whatever is written there."""
    if len(places) != len(held):
        return False
    for (weight, at, bias, bias_at), parameters in zip(places, held, strict=True):
        if parameters["weight"] is not weight or weight.data_ptr() != at or not weight.is_contiguous():
            return False
        if parameters["bias"] is not bias or (bias is not None and bias.data_ptr() != bias_at):
            return False
    return True


def _version(parameters: Mapping[str, Any]) -> _Version:
    weight, bias = parameters["weight"], parameters["bias"]
    return weight._version, 0 if bias is None else bias._version


def _mark(given: Tensor) -> Any:
    """By what to tell later that a tensor was not written to, which is not counted of those of inference mode."""
    return given.clone() if given.is_inference() else given._version


def _is_as_marked(given: Tensor, mark: Any) -> bool:
    return torch.equal(given, mark) if given.is_inference() else given._version == mark


__all__ = ["Product", "is_readable", "together"]
