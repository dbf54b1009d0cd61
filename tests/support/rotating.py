"""Facts of a made-up model with half-split rotary pairs."""

from __future__ import annotations

import torch


class Rotating:
    def __init__(self, weight=None, base=100.0):
        self.weight, self.base = weight, base

    def output_weight(self, layer_idx):
        return self.weight

    def rotate(self, layer_idx, x, positions, *, inverse=False):
        half = x.shape[-1] // 2
        angle = positions[:, None, :, None] * self.base ** -(torch.arange(half, dtype=x.dtype) / half)
        cos, sin = angle.cos(), -angle.sin() if inverse else angle.sin()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
