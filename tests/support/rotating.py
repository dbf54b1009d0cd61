"""Half-split rotary pairs: facts of a made-up model, and the embedding from its definition."""

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


def turned(model, keys, moves):
    """keys [n, D] moved by `moves` [n] positions: the rotary embedding from its definition."""
    half = keys.shape[1] // 2
    theta = model.config.rope_parameters["rope_theta"]
    angles = torch.tensor(moves)[:, None].double() * theta ** (-torch.arange(half).double() / half)
    one, two = keys[:, :half], keys[:, half:]
    return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], 1)
