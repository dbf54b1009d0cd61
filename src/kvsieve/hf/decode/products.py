"""Products with packed weights: of a linear layer, or of several that read the same input, in one call."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Siblings that models give the same input, under the names they have in transformers. A model that does not is served
# all the same: parts are taken for the very same input only.
_TOGETHER = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
# Where a layer's weight and bias lie, and how often each has been written to; None for no bias.
_State = tuple[tuple[int, int] | None, ...]


class Product:
    """A packed weight: of one linear layer, or of several one after another.

    What is computed for the first of several is kept for the others, which are called next.

    Args:
        layers: of equal input, whose weights are not of inference mode.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = tuple(layers)
        self._held = [layer._parameters for layer in layers]
        self._widths = [layer.out_features for layer in layers]
        self._packed: Any = None
        self._bias: Tensor | None = None
        self._states: list[_State] = []
        # An input, what tells that it is still the same, and the parts that nobody has taken yet.
        self._kept: tuple[Tensor, Any, list[Tensor | None]] | None = None

    @property
    def is_packed(self) -> bool:
        """True from `pack` until `free`."""
        return self._packed is not None

    @property
    def nbytes(self) -> int:
        """Bytes that the packed weight takes now."""
        return sum(layer.weight.nbytes for layer in self.layers) if self.is_packed else 0

    @property
    def left_over(self) -> bool:
        """True while some layer has not taken its part of the last product."""
        return self._kept is not None

    def pack(self) -> None:
        """Pack the weights as they are now."""
        weights = [layer.weight.detach() for layer in self.layers]
        self._states = [_state(each) for each in self._held]
        self._bias = _joined([layer.bias for layer in self.layers], self._widths, weights[0])
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(whole, 1)

    def free(self) -> None:
        """Let go of all memory."""
        self._packed = self._bias = self._kept = None

    def of(self, given: Tensor) -> Tensor:
        """Product [..., C] of [..., D], of all layers side by side; packed again where a weight was written to."""
        for state, parameters in zip(self._states, self._held, strict=True):
            if state != _state(parameters):
                self.pack()
                break
        return multiplied(given, self._packed, self._bias)

    def first(self, given: Tensor) -> Tensor:
        """Return the first layer's product, and keep the others'."""
        parts = self.of(given).split_with_sizes(self._widths, -1)
        if given.numel() > given.shape[-1]:
            # Models may reshape them in any way.
            parts = tuple(part.contiguous() for part in parts)
        self._kept = given, _mark(given), [None, *parts[1:]]
        return parts[0]

    def take(self, given: Tensor, at: int) -> Tensor | None:
        """Return layer `at`'s part of the product that was kept; None where that was of another input, or was taken."""
        kept = self._kept
        if kept is None or kept[0] is not given or not _is_as_marked(given, kept[1]):
            return None
        parts = kept[2]
        part, parts[at] = parts[at], None
        if all(each is None for each in parts):
            self._kept = None
        return part if self._states[at] == _state(self._held[at]) else None


def together(decoder: nn.Module, layers: Collection[nn.Linear]) -> Iterator[tuple[nn.Linear, ...]]:
    """Yield sets of layers that one product computes: siblings under known names that stand nowhere else.

    Args:
        decoder: of a model.
        layers: those that may be among them.
    """
    # A module that is shared comes once, but hangs in several places.
    hung = Counter(id(child) for module in decoder.modules() for child in module._modules.values())
    known = {id(layer) for layer in layers}
    for module in decoder.modules():
        for names in _TOGETHER:
            found = [module._modules.get(name) for name in names]
            ours = [each for each in found if id(each) in known and hung[id(each)] == 1]
            linear = [each for each in ours if isinstance(each, nn.Linear)]
            if len(linear) == len(names) and len({(each.in_features, each.weight.dtype) for each in linear}) == 1:
                yield tuple(linear)


def multiplied(given: Tensor, packed: Any, bias: Tensor | None = None) -> Tensor:
    """Product [..., C] of [..., D] with a packed weight."""
    out: Tensor = _product()(given, packed, bias, "none", [], "")
    return out


@functools.cache
def _product() -> Callable[..., Tensor]:
    return torch.ops.mkldnn._linear_pointwise.default


def _state(parameters: Mapping[str, Any]) -> _State:
    weight, bias = parameters["weight"], parameters["bias"]
    return (weight.data_ptr(), weight._version), None if bias is None else (bias.data_ptr(), bias._version)


def _joined(biases: Sequence[Tensor | None], widths: Sequence[int], like: Tensor) -> Tensor | None:
    """Biases one after another, None where there are none; a layer's own where it is alone."""
    if len(biases) == 1 or all(each is None for each in biases):
        return biases[0]
    parts = zip(biases, widths, strict=True)
    return torch.cat([like.new_zeros(width) if each is None else each.detach() for each, width in parts])


def _mark(given: Tensor) -> Any:
    """By what to tell later that a tensor was not written to, which is not counted of those of inference mode."""
    return given.clone() if given.is_inference() else given._version


def _is_as_marked(given: Tensor, mark: Any) -> bool:
    return torch.equal(given, mark) if given.is_inference() else given._version == mark


__all__ = ["Product", "multiplied", "together"]
