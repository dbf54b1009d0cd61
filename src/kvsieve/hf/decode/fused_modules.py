"""Small operations of decoder layers, each fused into one compiled call, on a CPU.

A norm, rotary positions and a gated activation are a dozen operations of torch, each of which costs more than its
computation for one token, and reads and writes all of a prompt's. An MLP processes a prompt in parts, so that
intermediate results stay in cache and are never stored for all tokens. Modules are replaced only if, by the names in
their code, their forward consists of exactly the kernel's computation; one of each kind is compared with the kernel
first.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvsieve.hf.compat import CACHE_NAMES, without_renaming
from kvsieve.kernels.cpu import layers as kernel
from kvsieve.models.quantized import LINEARS, dequantized_together

# Tokens that an MLP takes at a time.
_PART = 1024
# All that the forward of such a module may name.
_NORM = {"dtype", "to", "torch", "float32", "pow", "mean", "rsqrt", "variance_epsilon", "weight"}
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ROTARY = {"unsqueeze", "rotate_half"}
_TURN = "apply_rotary_pos_emb"
# How far each number may be from the model's own, and how far beside its size.
_NEAR = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-3, 1e-2)}


class FusedModules:
    """Norms, gated MLPs and attention of a decoder whose small operations are fused.

    `install` replaces their forward on the instance, `remove` brings it back.

    Args:
        decoder: of a model.

    Attributes:
        count: modules that are replaced.
        replaced: the modules, and their new forward.

    Raises:
        ValueError: there is nothing to fuse, or no kernel; with the reason.
    """

    def __init__(self, decoder: nn.Module) -> None:
        kinds = {(parameter.device.type, parameter.dtype) for parameter in decoder.parameters()}
        if len(kinds) != 1 or next(iter(kinds)) not in [("cpu", dtype) for dtype in kernel.DTYPES]:
            found = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in kinds)) or "none"
            raise ValueError(f"fused operations are for weights in float32 or bfloat16 on a CPU, found {found}")
        if kernel.built().reason is not None:
            raise ValueError(f"fused operations are compiled, which is {kernel.built().status}")
        self.replaced = dict(_replacements(decoder))
        self.count = len(self.replaced)
        if not self.replaced:
            raise ValueError("none of its modules is one that is known, such as Llama's norms and gated MLPs")

    def install(self) -> None:
        """Let the modules compute in compiled calls."""
        for module, forward in self.replaced.items():
            module.forward = forward

    def remove(self) -> None:
        """Bring the modules' own forward back."""
        for module in self.replaced:
            module.__dict__.pop("forward", None)


def _replacements(decoder: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Yield modules with replacements of their forward."""
    known: dict[object, bool] = {}

    def agrees(kind: object, check: Callable[..., bool], *given: Any) -> bool:
        if kind not in known:
            known[kind] = check(*given)
        return known[kind]

    for module in decoder.modules():
        own: Any = without_renaming(type(module).forward)
        names = _names_of(own)
        if names is None or "forward" in module.__dict__:
            continue
        if names <= _NORM and "rsqrt" in names and set(module._parameters) == {"weight"}:
            if agrees(own, _norm_agrees, module):
                yield module, _norm(module)
        elif names == _GATED:
            if agrees((own, type(module.act_fn)), _gate_agrees, module, decoder):
                yield module, _gated(module)
        elif _TURN in names:
            turn = own.__globals__.get(_TURN)
            if isinstance(turn, types.FunctionType) and agrees(turn, _rotary_agrees, turn, decoder):
                yield module, types.MethodType(_renaming(type(module).forward, _with_rotary(own, turn)), module)


def _names_of(function: Any) -> set[str] | None:
    """Names that a function's code uses; None where it is no plain function."""
    return set(function.__code__.co_names) if isinstance(function, types.FunctionType) else None


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    own = module.forward
    eps = module.variance_epsilon
    parameters = module._parameters

    def forward(hidden_states: Tensor) -> Tensor:
        weight = parameters["weight"]
        if _computes_otherwise(hidden_states, weight):
            return own(hidden_states)
        return kernel.rms_norm(hidden_states, weight, eps)

    return forward


def _gated(module: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        tokens = x.shape[:-1].numel()
        linears = module.gate_proj, module.up_proj, module.down_proj
        if tokens <= _PART or not all(map(_can_be_divided, linears)):
            return whole(x)
        wants_gradient = torch.is_grad_enabled() and x.requires_grad
        weights = [None] * 3 if wants_gradient else dequantized_together(linears)
        parts = x.reshape(tokens, -1).split(_PART)
        return torch.cat([whole(part, weights) for part in parts]).view(*x.shape[:-1], -1)

    def whole(x: Tensor, weights: Sequence[Tensor | None] = (None, None, None)) -> Tensor:
        gate = _product(module.gate_proj, x, weights[0])
        up = _product(module.up_proj, x, weights[1])
        opened = module.act_fn(gate) * up if _computes_otherwise(gate, up) else kernel.gated_silu(gate, up)
        return _product(module.down_proj, opened, weights[2])

    return forward


def _product(linear: Any, x: Tensor, weight: Tensor | None) -> Tensor:
    """Multiply with a linear layer. weight: dequantized; None: as the layer does."""
    return linear(x) if weight is None else F.linear(x, weight, linear.bias)


def _can_be_divided(module: nn.Module) -> bool:
    """Return True if a module computes each token separately, and nothing inspects its input."""
    return type(module) in LINEARS and not (module._forward_hooks or module._forward_pre_hooks)


def _with_rotary(forward: types.FunctionType, own: Callable[..., Any]) -> types.FunctionType:
    """Return the same forward, calling another function where it turns queries and keys."""

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if args or kwargs or cos.shape[-1] != q.shape[-1]:
            return own(q, k, cos, sin, *args, **kwargs)
        heads_inside = q.transpose(1, 2), k.transpose(1, 2)
        if _computes_otherwise(heads_inside[0], cos) or _computes_otherwise(heads_inside[1], sin):
            return own(q, k, cos, sin)
        return kernel.rotate(q, cos, sin), kernel.rotate(k, cos, sin)

    names = {**forward.__globals__, _TURN: turned}
    function = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    function.__kwdefaults__ = forward.__kwdefaults__
    return function


def _renaming(own: Callable[..., Any], made: types.FunctionType) -> Callable[..., Any]:
    """Return `made`; if a module's `own` forward accepts its cache by older names, wrapped likewise."""
    if without_renaming(own) is own:
        return made

    # Callers look its parameters up.
    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (made if kwargs.keys().isdisjoint(CACHE_NAMES[1:]) else own)(self, *args, **kwargs)

    return forward


def _computes_otherwise(x: Tensor, other: Tensor) -> bool:
    """Return True if gradients, another dtype or another layout are required, which kernels do not support."""
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or other.requires_grad)
    plain = x.dtype == other.dtype and x.is_contiguous() and other.is_contiguous()
    return wants_gradient or not plain or torch.is_autocast_enabled("cpu")


def _near(found: Tensor, wanted: Tensor) -> bool:
    atol, rtol = _NEAR[wanted.dtype]
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=rtol, atol=atol)


def _random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(1))).to(dtype)


@torch.no_grad()
def _norm_agrees(module: Any) -> bool:
    weight = module.weight
    x = _random(1, 2, weight.numel(), dtype=weight.dtype, scale=3)
    return weight.dim() == 1 and _near(kernel.rms_norm(x, weight, module.variance_epsilon), module(x))


@torch.no_grad()
def _gate_agrees(module: Any, decoder: nn.Module) -> bool:
    x = _random(2, 512, dtype=next(decoder.parameters()).dtype, scale=2)
    return _near(kernel.gated_silu(x, x), module.act_fn(x) * x)


@torch.no_grad()
def _rotary_agrees(turn: types.FunctionType, decoder: nn.Module) -> bool:
    if _names_of(turn) != _ROTARY:
        return False
    dtype = next(decoder.parameters()).dtype
    q, cos, sin = _random(1, 2, 3, 16, dtype=dtype).transpose(1, 2), *_random(2, 1, 2, 16, dtype=dtype)
    return _near(kernel.rotate(q, cos, sin), turn(q, q, cos, sin)[0])
