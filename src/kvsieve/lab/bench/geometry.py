"""Costs of a model's parts: parameters, attention, entries and state of each layer, from its config alone.

The model is built on torch's `meta` device, so parameters are counted exactly and weights take no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.shape import LayerKind, LayerShape

if TYPE_CHECKING:
    from torch import nn

_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
# 2 FLOPs per element to update a state with a token, 2 to read it.
_STATE_FLOPS = 4
_WIDE_BYTES = 4


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Hq query heads, H KV heads.

    Attributes:
        linear_parameters: multiplied once per token (2 FLOPs each), of a mixture's experts only the active share.
        outputs: numbers per token that its linear layers output.
        pair_flops: attention FLOPs per pair of a query and a key, all heads.
        kv_elements: key and value elements per token and row, in the layer that stores its entries; latent entries,
            shared by all heads, as stored.
        groups: Hq / H.
        kind: of its own state.
        sees: kind of the layer that stores its entries.
        reads: index of the layer that stores its entries, its own unless layers share them.
        state_elements: elements of its recurrent state per row, in the model's dtype.
        wide_state_elements: those always in float32.
        last_token_only: True if only a prompt's last token passes it.
    """

    linear_parameters: float
    outputs: float
    pair_flops: float
    kv_elements: int
    groups: int
    kind: LayerKind
    sees: LayerKind
    reads: int
    state_elements: int = 0
    wide_state_elements: int = 0
    last_token_only: bool = False

    @property
    def state_flops(self) -> float:
        return _STATE_FLOPS * (self.state_elements + self.wide_state_elements)

    def state_bytes(self, element_bytes: int) -> int:
        return self.state_elements * element_bytes + self.wide_state_elements * _WIDE_BYTES


def pairs(before: int, new: int, kind: LayerKind) -> float:
    """Return the visible pairs of a query and a key for `new` tokens after `before` in a layer of this kind."""
    span = kind.span
    if span is None:
        return new * before + new * (new + 1) / 2
    if kind.entries == "chunk":
        return _chunk_pairs(before + new, span) - _chunk_pairs(before, span)
    growing = min(max(span - before, 0), new)
    return growing * before + growing * (growing + 1) / 2 + (new - growing) * span


def _chunk_pairs(tokens: int, span: int) -> float:
    whole, rest = divmod(tokens, span)
    return whole * span * (span + 1) / 2 + rest * (rest + 1) / 2


@dataclass(frozen=True)
class Geometry:
    """Costs of a model's parts.

    Attributes:
        parameters: all, tied ones once, including a vision tower's.
        head_parameters: of the output layer.
        outside_parameters: linear ones of the decoder outside its layers, used by every token.
        read_parameters: read for any token of text, without embedding tables and experts.
        expert_parameters: of all experts; a token uses `active_share` of them.
        model: on the meta device; None if only its config was read.
        shapes: of its layers.
    """

    layers: tuple[Layer, ...]
    parameters: int
    head_parameters: int
    outside_parameters: int
    read_parameters: int
    expert_parameters: int
    active_share: float
    model: Any = field(repr=False, compare=False)
    shapes: tuple[LayerShape, ...] = ()

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return tuple(layer.kind for layer in self.layers)

    def weights_read(self, batch: int) -> float:
        """Return the parameters read to decode one token in each of `batch` rows, assuming even routing."""
        return self.read_parameters + self.expert_parameters * (1 - (1 - self.active_share) ** batch)


def geometry(config: Any) -> Geometry:
    """Return the geometry for a transformers config; nothing is downloaded or loaded.

    For a composite model with text: the decoder computes, and the other parts only take memory.

    Raises:
        UnsupportedModelError: the formulas do not describe the model's cost.
    """
    from torch import nn

    from kvsieve.hf.compat import decoder_of, layers_of, text_config
    from kvsieve.hf.model.shapes import layer_shapes, meta_model

    try:
        model = meta_model(config)
        text = text_config(model)
        if getattr(text, "index_topk", None):
            raise UnsupportedModelError("its indexed attention chooses what to read by itself")
        shapes = layer_shapes(model)
    except UnsupportedModelError as error:
        raise _unsupported(config, str(error)) from error
    modules: Any = layers_of(decoder_of(model))
    experts, share = _experts(config, text, modules)
    tables = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    head = model.get_output_embeddings()
    head_parameters = head.weight.numel() if head is not None else 0
    inside = {id(p) for layer in modules for p in layer.parameters()}
    # A text model computes with everything, others with the decoder.
    whole = model if text is model.config else decoder_of(model)
    rest = [p for p in whole.parameters() if id(p) not in tables and (head is None or p is not head.weight)]
    return Geometry(
        layers=_layers(shapes, modules, share),
        parameters=sum(p.numel() for p in model.parameters()),
        head_parameters=head_parameters,
        outside_parameters=sum(p.numel() for p in rest if p.ndim == 2 and id(p) not in inside),
        read_parameters=sum(p.numel() for p in rest) + head_parameters - experts,
        expert_parameters=experts,
        active_share=share,
        model=model,
        shapes=shapes,
    )


def _unsupported(config: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"estimate cannot price a model of type {config.model_type!r}: {reason}")


def _is_expert(name: str, parameter: nn.Parameter) -> bool:
    return ".experts." in f".{name}" and parameter.ndim > 1


def _experts(config: Any, text: Any, decoder_layers: Any) -> tuple[int, float]:
    """Return the parameters of all routed experts, and the share of them per token."""
    sizes = [
        (p.numel(), p.shape[0]) for layer in decoder_layers for n, p in layer.named_parameters() if _is_expert(n, p)
    ]
    if not sizes:
        return 0, 1.0
    active = next((getattr(text, name) for name in _ACTIVE_EXPERTS if getattr(text, name, None)), None)
    numbers = {count for _, count in sizes}
    if not isinstance(active, int) or len(numbers) != 1:
        raise _unsupported(config, "its config does not tell how many of its experts a token takes")
    return sum(size for size, _ in sizes), min(1.0, active / numbers.pop())


def _layers(shapes: tuple[LayerShape, ...], modules: Any, share: float) -> tuple[Layer, ...]:
    layers = []
    for index, (shape, module) in enumerate(zip(shapes, modules, strict=True)):
        weights = [
            (p, share if _is_expert(name, p) else 1)
            for name, p in module.named_parameters()
            if p.ndim >= 2 and not name.endswith("bias")
        ]
        source = shape.kind.source
        owner = shape if source is None else shapes[source]
        layers.append(
            Layer(
                linear_parameters=sum(p.numel() * part for p, part in weights),
                outputs=sum(p.numel() // p.shape[-1] * part for p, part in weights),
                pair_flops=2 * shape.pair_elements,
                kv_elements=owner.entry_elements,
                groups=shape.query_heads // (owner.heads or 1),
                kind=shape.kind,
                sees=owner.kind,
                reads=index if source is None else source,
                state_elements=shape.state_elements,
                wide_state_elements=shape.wide_state_elements,
                last_token_only=shape.last_token_only,
            )
        )
    return tuple(layers)
