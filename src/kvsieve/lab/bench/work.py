"""Work of a prefill, counted while it runs: tokens and entries of every layer, KV bytes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from kvsieve.cache.tensors import storage_bytes, tensors_in
from kvsieve.hf.cache.layer import StoreLayer
from kvsieve.hf.compat import DynamicLayer, LinearAttentionLayer, decoder_of, layers_of, take_cache
from kvsieve.lab.bench.geometry import Geometry, pairs
from kvsieve.lab.bench.spending import Spending


class Work:
    """Counts work from `start` to `stop`, by hooks on the decoder and its layers.

    Padding counts: it is computed as well.

    Attributes:
        tokens: per layer, of one row, in all passes over the prompt.
        flops: of the whole batch, by the formulas of `bench.estimate`: linear layers per token, attention per pair of
            query and key, recurrences, the output layer for one token.
        kv_peak_bytes: keys, values and states of all layers at their maximum, when a layer has all entries it attends
            to and has not evicted.
        kv_final_bytes: those at the end of the prompt.
        kv_layer_bytes: keys and values of all the prompt's tokens in the widest layer.
    """

    def __init__(
        self, model: Any, geometry: Geometry, length: int, rows: int, spending: Spending | None = None
    ) -> None:
        self._decoder: nn.Module = decoder_of(model)
        self._geometry = geometry
        self._element = torch.empty((), dtype=model.dtype).element_size()
        self._rows = rows
        # Notified at the end of the prompt; it continues until closed.
        self._spending = spending
        self._cache: Any = None
        self._handles: list[Any] = []
        self._before = 0
        self.tokens = [0] * len(geometry.layers)
        self.flops = 2.0 * geometry.head_parameters * rows
        self.kv_peak_bytes = self.kv_final_bytes = 0
        self.kv_layer_bytes = length * max(layer.kv_elements for layer in geometry.layers) * rows * self._element

    def start(self) -> None:
        hooks = [self._decoder.register_forward_pre_hook(self._opened, with_kwargs=True)]
        for index, layer in enumerate(layers_of(self._decoder)):  # type: ignore[arg-type]
            hooks.append(layer.register_forward_pre_hook(functools.partial(self._entered, index), with_kwargs=True))
            # A pass may be stopped on purpose inside a layer, and then no output follows.
            left = functools.partial(self._left, index)
            hooks.append(layer.register_forward_hook(left, with_kwargs=True, always_call=True))
        self._handles = hooks

    def stop(self) -> None:
        if self._handles:
            if self._spending is not None:
                self._spending.answer()
            self.kv_final_bytes = sum(_held(layer) for layer in self._cache.layers)
            self.close()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._cache = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer_tokens": self.tokens,
            "prefill_flops": self.flops,
            "kv_peak_bytes": self.kv_peak_bytes,
            "kv_final_bytes": self.kv_final_bytes,
            "kv_bound_bytes": self.kv_final_bytes + self.kv_layer_bytes,
        }

    def _opened(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._cache = take_cache(dict(kwargs))
        self.flops += 2 * self._geometry.outside_parameters * self._rows * _fed(args, kwargs).shape[1]

    def _entered(self, index: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        layer = self._geometry.layers[index]
        new = _fed(args, kwargs).shape[1]
        stored = _entries(self._cache.layers[layer.reads])
        # A layer that reads another's entries comes after it.
        self._before = stored if layer.reads == index else max(0, stored - new)
        self.tokens[index] += new
        self.flops += layer.pair_flops * pairs(self._before, new, layer.sees) * self._rows

    def _left(self, index: int, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = self._geometry.layers[index]
        new = _fed(args, kwargs).shape[1]
        if output is not None:
            self.flops += (2 * layer.linear_parameters + layer.state_flops) * new * self._rows
        layer_bytes = [_held(part) for part in self._cache.layers]
        met = (self._before + new) * layer.kv_elements * self._rows * self._element
        if layer.kind.grows:
            layer_bytes[index] = max(layer_bytes[index], met)
        self.kv_peak_bytes = max(self.kv_peak_bytes, sum(layer_bytes))


def _fed(args: Any, kwargs: dict[str, Any]) -> Any:
    if args:
        return args[0]
    return next(
        kwargs[name] for name in ("hidden_states", "input_ids", "inputs_embeds") if kwargs.get(name) is not None
    )


def _entries(layer: Any) -> int:
    if isinstance(layer, StoreLayer):
        return 0 if layer.store.is_empty else layer.store.entries
    return 0 if not isinstance(layer, DynamicLayer) or layer.keys is None else layer.keys.shape[-2]


def _held(layer: Any) -> int:
    """Return the bytes of keys and values, including spare room, and of recurrent state."""
    total = 0
    if isinstance(layer, StoreLayer):
        total = 0 if layer.store.is_empty else layer.store.entry_bytes()
    elif isinstance(layer, DynamicLayer):
        total = storage_bytes(tensors_in((layer.keys, layer.values)))
    if isinstance(layer, LinearAttentionLayer):
        total += storage_bytes(tensors_in((layer.conv_states, layer.recurrent_states)))
    return total
