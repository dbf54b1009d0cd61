"""Facts about a model for some methods: its output projections, and its rotation of keys by position.

Model names are not used. A layer's rotation is found by giving its attention one hidden state at several positions and
stopping it when it stores the keys: they are equal, or rotating them back must make them equal.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvsieve.errors import PlanError, UnsupportedModelError
from kvsieve.hf.compat import CACHE_NAMES, decoder_of, layers_of, text_config
from kvsieve.hf.model.tables import RotaryTables
from kvsieve.hf.model.weights import is_linear, plain_weight, weight_by_images

_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj")
_POSITIONS = (0, 1, 6, 41, 160)
_MOVED = 23


class Facts:
    """The facts of one model: a `kvsieve.types.ModelFacts`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = text_config(model)
        self.decoder = decoder_of(model)
        self.layers = layers_of(self.decoder) or ()
        self.tables = RotaryTables(model)
        # Per layer: the function that applies its rotary tables, None without tables, or the reason why it is unknown.
        self._rotations: dict[int, Callable[..., Any] | str | None] = {}
        # Positions and their tables, by what else these depend on; None unless they are kept.
        self._kept: dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]] | None = None

    def why_missing(self, needs: Iterable[str], layers: Iterable[int]) -> str | None:
        """Return a clause on which of `needs` (see roles.Traits) are unavailable in `layers`, or None."""
        layers = list(layers)
        for need in needs:
            if need in ("hidden", "tokens"):
                # Seen while the model runs.
                continue
            if need == "uncapped":
                cap = getattr(self.config, "attn_logit_softcapping", None)
                if cap is not None:
                    return f"the plan's estimate of logits does not hold where they are capped, here at {cap}"
                continue
            if need not in ("rotary", "output_weight"):
                known = "rotary, output_weight, uncapped, hidden and tokens"
                raise PlanError(f"an evictor needs {need!r} of the model; known are {known}")
            for index in layers:
                found = self._rotation(index) if need == "rotary" else self._linear(index)
                if isinstance(found, str):
                    return found
        return None

    def output_weight(self, layer_idx: int) -> Tensor:
        """See ModelFacts.output_weight."""
        linear = self._linear(layer_idx)
        if isinstance(linear, str):
            raise UnsupportedModelError(f"{type(self.model).__name__}: {linear}")
        size = self._head_dim(layer_idx)
        weight = plain_weight(linear)
        if weight is None:
            device = next((p.device for p in linear.parameters() if not p.is_meta), self.model.device)
            weight = weight_by_images(linear, size * self.config.num_attention_heads, device, self.model.dtype)
        return weight.view(weight.shape[0], -1, size).permute(1, 2, 0)

    def rotate(self, layer_idx: int, x: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        """See ModelFacts.rotate."""
        found = self._rotation(layer_idx)
        if isinstance(found, str):
            raise UnsupportedModelError(f"{type(self.model).__name__}: {found}")
        x = x if x.dtype == torch.float64 else x.float()
        return x if found is None else self._turned(layer_idx, found, x, positions, inverse)

    @contextlib.contextmanager
    def keeping_tables(self) -> Iterator[None]:
        """Keep rotary tables meanwhile, so that layers which rotate by the same positions make them once."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def _attention(self, layer_idx: int) -> nn.Module | None:
        layer = self.layers[layer_idx]
        for module in layer.modules():
            if getattr(module, "layer_idx", None) == layer_idx and any(hasattr(module, name) for name in _PROJECTIONS):
                return module
        return None

    def _head_dim(self, layer_idx: int) -> int:
        found = getattr(self._attention(layer_idx), "head_dim", None)
        return found or self.config.hidden_size // self.config.num_attention_heads

    def _linear(self, layer_idx: int) -> nn.Module | str:
        """Return the output projection, or the reason why it cannot be used."""
        attention = self._attention(layer_idx)
        linear = next((getattr(attention, name) for name in _PROJECTIONS if hasattr(attention, name)), None)
        heads = self.config.num_attention_heads
        size = self._head_dim(layer_idx)
        if linear is None or not is_linear(linear, heads * size):
            return (
                f"the plan needs the output projection of every head, and layer {layer_idx} has no linear one of "
                f"{heads} heads with {size} channels"
            )
        return linear

    def _rotation(self, layer_idx: int) -> Callable[..., Any] | str | None:
        if layer_idx not in self._rotations:
            self._rotations[layer_idx] = self._find_rotation(layer_idx)
        return self._rotations[layer_idx]

    def _find_rotation(self, layer_idx: int) -> Callable[..., Any] | str | None:
        unknown = f"the plan needs the model's rotary embedding, and layer {layer_idx} applies it in an unknown way"
        attention = self._attention(layer_idx)
        if attention is None:
            return unknown
        rotary = getattr(self.decoder, "rotary_emb", None)
        kinds = getattr(rotary, "rope_type", None)
        kind = kinds.get(self._layer_type(layer_idx)) if isinstance(kinds, dict) else kinds
        if kind in ("dynamic", "longrope"):
            return (
                f"the plan needs the model's rotary embedding, which changes with the prompt's length (rope {kind!r})"
            )
        apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        if self.model.device.type == "meta":
            # Nothing can be computed; this is repeated once weights are loaded.
            return apply
        try:
            with torch.no_grad():
                keys, positions = self._keys(layer_idx, attention)
                still, loose = (0.01, 0.1) if keys.dtype in (torch.float16, torch.bfloat16) else (1e-3, 1e-3)
                keys = keys if keys.dtype == torch.float64 else keys.float()
                if variation(keys) < still:
                    return None
                if apply is None:
                    return unknown
                back = self._turned(layer_idx, apply, keys, positions, inverse=True)
                if variation(back) < loose and self._is_rotation(layer_idx, apply, keys, positions):
                    return apply
        except Exception:  # a layer that is called in another way, or tables of another kind
            pass
        return unknown

    def _is_rotation(self, layer_idx: int, apply: Callable[..., Any], x: Tensor, positions: Tensor) -> bool:
        """Return True if rotating and rotating back is the identity, and products depend on distances alone."""
        x = x.double()
        there = self._turned(layer_idx, apply, x, positions, inverse=False)
        back = self._turned(layer_idx, apply, there, positions, inverse=True)
        moved = self._turned(layer_idx, apply, x, positions + _MOVED, inverse=False)
        products = there @ there.transpose(-1, -2)
        others = moved @ moved.transpose(-1, -2)
        near = (there.norm() * 1e-4) ** 2, products.norm() * 1e-3
        return bool((back - x).norm() ** 2 <= near[0]) and bool((products - others).norm() <= near[1])

    def _keys(self, layer_idx: int, attention: nn.Module) -> tuple[Tensor, Tensor]:
        """[1, H, P, D] keys that the layer makes of one hidden state at the positions int64 [1, P]."""
        device = next((p.device for p in attention.parameters()), self.model.device)
        # Weights loaded for each call are not in memory now.
        device = self.model.device if device.type == "meta" else device
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(self.config.hidden_size, generator=generator).to(device, self.model.dtype)
        positions = torch.tensor([_POSITIONS], device=device)
        hidden = hidden.expand(1, len(_POSITIONS), -1)
        known: dict[str, Any] = {"hidden_states": hidden, "position_ids": positions, "attention_mask": None}
        known |= dict.fromkeys((*CACHE_NAMES, "past_key_value", "layer_past"), _Catch())
        if hasattr(self.decoder, "rotary_emb"):
            known["position_embeddings"] = self._tables(layer_idx, hidden, positions)
        taken = inspect.signature(attention.forward).parameters
        try:
            attention(**{name: value for name, value in known.items() if name in taken})
        except _Caught as caught:
            return caught.keys, positions
        raise LookupError("the attention stored no keys")

    def _layer_type(self, layer_idx: int) -> str | None:
        types = getattr(self.config, "layer_types", None)
        return types[layer_idx] if types else None

    def _tables(self, layer_idx: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The model's own tables (cos, sin), [B or 1, L, R] each, in the dtype of x."""
        # Its hooks record its output for the layers, and must not run here.
        make = self.decoder.rotary_emb.forward
        if "layer_type" in inspect.signature(make).parameters:
            return make(x, positions, self._layer_type(layer_idx))
        return make(x, positions)

    def _unit_tables(self, layer_idx: int, x: Tensor, positions: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        """The tables of length one: YaRN's carry a factor."""
        key = self._layer_type(layer_idx), x.dtype, x.device, inverse
        known = None if self._kept is None else self._kept.get(key)
        if known is not None and torch.equal(known[0], positions):
            return known[1], known[2]
        cos, sin = self._tables(layer_idx, x, positions.to(x.device))
        length = torch.hypot(cos, sin)
        cos = cos / length
        sin = (-sin if inverse else sin) / length
        if self._kept is not None:
            self._kept[key] = positions, cos, sin
        return cos, sin

    def _turned(self, layer_idx: int, apply: Callable[..., Any], x: Tensor, positions: Tensor, inverse: bool) -> Tensor:
        cos, sin = self._unit_tables(layer_idx, x, positions, inverse)
        size = cos.shape[-1]
        part = x[..., :size]
        # One head of queries is enough: only keys are returned.
        turned = apply(part[:, :1], part, cos, sin)[1]
        return turned if size == x.shape[-1] else torch.cat([turned, x[..., size:]], -1)


def variation(entries: Tensor) -> float:
    """Return how far entries [1, H, P, D] are from those at the first position, relatively, by channel on average.

    A norm over the channels would not do: one that hardly changes may be the largest by far.
    """
    distance = (entries - entries[:, :, :1]).abs().amax(2)
    return (distance / entries.abs().amax(2).clamp_min(1e-30)).mean().item()


class _Caught(Exception):
    """Ends an attention's forward pass where it stores its keys."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class _Catch:
    """A cache that stores nothing."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> None:
        raise _Caught(keys)

    def get_seq_length(self, *args: Any) -> int:
        return 0
