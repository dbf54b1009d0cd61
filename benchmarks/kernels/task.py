"""Measurable tasks of kernels, and the layer that they work for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """A layer: H KV heads, G query heads for each, D channels."""

    heads: int
    groups: int
    dim: int
    device: torch.device
    dtype: torch.dtype

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).to(self.dtype)


@dataclass(frozen=True)
class KernelTask:
    """One kernel on one shape. tensors: makes its inputs; run: by kernel; plain: in torch; bytes: least a run moves."""

    name: str
    shape: str
    bytes: int
    tensors: Callable[[], tuple[Tensor, ...]]
    run: Callable[..., Tensor]
    plain: Callable[..., Tensor]
