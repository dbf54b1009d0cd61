"""Roofline: the machine's rates, measured with the model's weights, and the least time of a prompt and a token."""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvsieve.hf.compat import decoder_of, layers_of
from kvsieve.kernels.cpu import products, quantized
from kvsieve.kernels.cpu.quantized import QuantizedMatrix
from kvsieve.lab.bench.geometry import Geometry
from kvsieve.lab.bench.plain import wait
from kvsieve.models.quantized import matrices_of

# Weights read in one go, beyond the size of caches; and rows of a large product.
READ_BYTES = 2**29
ROWS = {"cpu": 2048, "cuda": 8192}
LEAST_SECONDS = 0.5


@dataclass(frozen=True)
class Rates:
    """Rates that a machine reaches, each the best of several.

    Attributes:
        bandwidth: bytes/s of matrix-vector products over more of the model's weights than caches hold.
        matmul: FLOP/s of products of many tokens with a decoder layer's weights.
    """

    bandwidth: float
    matmul: float

    def prefill_seconds(self, flops: float) -> float:
        return flops / self.matmul

    def decode_seconds(self, geometry: Geometry, rows: int, kv_bytes: float, element_bytes: float) -> float:
        """Return the seconds per token of each row, if `kv_bytes` are read for it in all.

        element_bytes: mean of a number of the weights.
        """
        return (geometry.weights_read(rows) * element_bytes + kv_bytes) / self.bandwidth

    def best(self, other: Rates) -> Rates:
        """Return the larger of each rate, since both were reached."""
        return Rates(max(self.bandwidth, other.bandwidth), max(self.matmul, other.matmul))

    def to_dict(self) -> dict[str, float]:
        return {"bandwidth_gb_per_s": self.bandwidth / 1e9, "matmul_tflops": self.matmul / 1e12}


@torch.no_grad()
def measure_rates(model: Any) -> Rates:
    """Measure on the model's device, in its dtype, with its threads."""
    layers = [weight for layer in layers_of(decoder_of(model)) or () for weight in _weights(layer)]
    head = model.get_output_embeddings()
    weights = layers if head is None else [*layers, *_weights(head)]
    own = sum(weight.nbytes for weight in weights)
    copies = [_copied(weight) for _ in range(math.ceil(READ_BYTES / own) - 1) for weight in weights]
    everything = [*weights, *copies]
    inputs = functools.partial(torch.randn, dtype=model.dtype, device=model.device)
    vectors = {inner: inputs(1, inner) for _, inner in map(_shape, weights)}
    on = next(iter(vectors.values()))
    seconds = min(_best_seconds(read, on) for read in _readings(everything, vectors))
    bandwidth = sum(weight.nbytes for weight in everything) / seconds
    everything.clear()
    copies.clear()
    shapes = Counter(map(_shape, layers))
    weight_of = {_shape(weight): weight for weight in layers}
    size = ROWS[model.device.type] if model.device.type in ROWS else ROWS["cpu"]
    flops = seconds = 0.0
    for shape, count in shapes.items():
        tokens = inputs(size, shape[1])
        plain = _plain(weight_of[shape], model.dtype)
        took = _best_seconds(lambda x=tokens, w=plain: functional.linear(x, w), tokens)
        flops += count * 2 * size * math.prod(shape)
        seconds += count * took
    return Rates(bandwidth, flops / seconds)


def _weights(module: nn.Module) -> list[Tensor | QuantizedMatrix]:
    """Return the matrices of a module's weights, those in blocks as they are stored."""
    return [*(weight for weight in module.parameters() if weight.ndim == 2), *matrices_of(module)]


def _shape(weight: Tensor | QuantizedMatrix) -> tuple[int, int]:
    if isinstance(weight, Tensor):
        return weight.shape[0], weight.shape[1]
    return weight.width, weight.inner


def _copied(weight: Tensor | QuantizedMatrix) -> Tensor | QuantizedMatrix:
    if isinstance(weight, Tensor):
        return torch.clone(weight)
    return QuantizedMatrix(weight.data.clone(), weight.kind, weight.order)


def _plain(weight: Tensor | QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize(torch.empty(_shape(weight), dtype=dtype))


def _readings(weights: list[Tensor | QuantizedMatrix], vectors: dict[int, Tensor]) -> list[Callable[[], None]]:
    """Return functions that multiply every weight with a vector: torch's, and the C kernel if the CPU has it.

    Weights in blocks have one product.
    """
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    blocks = [weight for weight in weights if not isinstance(weight, Tensor)]

    def of_blocks() -> None:
        for matrix in blocks:
            quantized.multiply(vectors[matrix.inner], matrix, None)

    def by_torch() -> None:
        of_blocks()
        for weight in plain:
            functional.linear(vectors[weight.shape[1]], weight)

    unfit = any(weight.is_cuda or weight.dtype not in products.MOST_ROWS for weight in plain[:1])
    if not plain or unfit or products.built().loaded is None:
        return [by_torch]
    wrapped = [products.Weight(weight.contiguous(), None) for weight in plain]

    def in_c() -> None:
        of_blocks()
        for weight in wrapped:
            products.multiply(vectors[weight.weight.shape[1]], weight)

    return [by_torch, in_c]


def _best_seconds(run: Any, on: Tensor) -> float:
    """Return the least of at least three runs, after a warm-up."""
    run()
    best = math.inf
    spent = 0.0
    runs = 0
    while runs < 3 or (spent < LEAST_SECONDS and runs < 50):
        wait(on)
        began = time.perf_counter()
        run()
        wait(on)
        took = time.perf_counter() - began
        best = min(best, took)
        spent = spent + took
        runs = runs + 1
    return best
