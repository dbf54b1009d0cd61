"""Codes of vectors chosen jointly, so that their errors are small in the directions of the queries."""

from __future__ import annotations

from kvsieve.core.codes import CodeFormat, Codes, Fit, encode, level_tensor, nearest_codes, pack, unpack
from kvsieve.lazy import Tensor, torch

# Times that each code is chosen again; more gain next to nothing.
_ROUNDS = 2

# Numbers processed at a time by torch: as many as fit into caches; on GPUs more, for fewer launches.
_AT_ONCE = 1 << 17
_AT_ONCE_ON_GPUS = 1 << 24


def encode_shaped(form: CodeFormat, x: Tensor, fit: Fit, metric: Tensor, rows: Tensor) -> Codes:
    """Encode blocks float32 [N, T, D] as `codes.encode` does, then adjust codes to minimize errors of products.

    Each code of a vector in turn becomes the one with the least error of the product with the queries, the others
    fixed. The final scale preserves the vector's product with itself in this metric; the least-squares scale would
    shorten all products, including the largest, which matter most to attention.

    metric: float32 [R, D, D], mean of q q^T over the queries of each KV row. rows: int64 [N], KV row of each block.
    """
    from kvsieve.kernels.cpu import codes as compiled

    assert form.levels is not None and form.zero is False and form.group == x.shape[-1]
    encoded = encode(form, x, fit)
    codes = unpack(encoded.packed, form.bits, x.shape[-1])
    if compiled.shapes(x, len(form.levels)):
        levels = level_tensor(form.levels, x.device)
        scale = compiled.shape_codes(x.contiguous(), metric.contiguous(), rows, levels, codes, _ROUNDS)
    else:
        step = max(1, (_AT_ONCE if x.device.type == "cpu" else _AT_ONCE_ON_GPUS) // x[0].numel())
        parts = zip(x.split(step), rows.split(step), codes.split(step), strict=True)
        found = [_shaped(form.levels, part, metric[numbers], first) for part, numbers, first in parts]
        codes, scale = (torch.cat(part) for part in zip(*found, strict=True))
    half = scale.to(torch.float16)
    # A scale beyond float16's range is not changed.
    return Codes(pack(codes, form.bits), torch.where(half.isfinite(), half, encoded.scale))


def _shaped(levels: tuple[float, ...], x: Tensor, metric: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return adjusted codes uint8 [N, T, D] and scales float32 [N, T, 1], 0 where x is."""
    table = level_tensor(levels, x.device)
    tiny = torch.finfo(torch.float32).tiny
    # Channels first, so that one channel of all vectors is a contiguous read.
    x = x.transpose(1, 2).contiguous()
    by_channel = codes.transpose(1, 2).contiguous()
    of = table[by_channel.long()]
    own = metric.diagonal(dim1=1, dim2=2).clamp_min(tiny)
    for _ in range(_ROUNDS):
        pulled = metric @ of
        norm = (of * pulled).sum(1, keepdim=True)
        step = (x * pulled).sum(1, keepdim=True) / norm
        step = step.clamp_min(tiny)
        missed = x - step * of
        for at in range(x.shape[1]):
            pull = (metric[:, at : at + 1] @ missed)[:, 0]
            code = nearest_codes(levels, of[:, at] + pull / (own[:, at, None] * step[:, 0]))
            level = table[code.long()]
            missed[:, at] += step[:, 0] * (of[:, at] - level)
            by_channel[:, at], of[:, at] = code, level
    weighted = metric @ x
    product = (of * weighted).sum(1)
    found = torch.where(product > 0, (x * weighted).sum(1) / product.clamp_min(tiny), torch.zeros_like(product))
    return by_channel.transpose(1, 2), found[..., None]
