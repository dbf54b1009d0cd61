"""Codes of vectors chosen together, so that what they miss lies where queries do not ask for it."""

from __future__ import annotations

from kvsieve.core.codes import CodeFormat, Codes, Fit, encode, level_tensor, nearest_codes, pack, unpack
from kvsieve.lazy import Tensor, torch

# Times that each code is chosen anew. More gain next to nothing.
_ROUNDS = 2

# Numbers that are worked on at a time where torch does it: what caches hold; on GPUs in fewer launches.
_AT_ONCE, _AT_ONCE_ON_GPUS = 1 << 17, 1 << 24


def encode_shaped(form: CodeFormat, x: Tensor, fit: Fit, metric: Tensor, rows: Tensor) -> Codes:
    """Encode blocks float32 [N, T, D] as `codes.encode` does, and then choose codes by what products miss.

    Vector by vector and one after the other, each code becomes the one by which a product with the queries misses
    least, the others given; what one has to miss, later ones make up for. The scale is at last that by which the codes
    keep the vector's product with itself, in this metric: that of least squares would shorten all products, and with
    them the largest, which attention is after.

    metric: float32 [R, D, D], mean of q q^T over the queries of each KV row. rows: int64 [N], that of each block.
    """
    from kvsieve.kernels.cpu import codes as compiled

    assert form.levels is not None and form.zero is False and form.group == x.shape[-1]
    made = encode(form, x, fit)
    codes = unpack(made.packed, form.bits, x.shape[-1])
    if compiled.shapes(x, len(form.levels)):
        levels = level_tensor(form.levels, x.device)
        scale = compiled.shape_codes(x.contiguous(), metric.contiguous(), rows, levels, codes, _ROUNDS)
    else:
        step = max(1, (_AT_ONCE if x.device.type == "cpu" else _AT_ONCE_ON_GPUS) // x[0].numel())
        parts = zip(x.split(step), rows.split(step), codes.split(step), strict=True)
        found = [_shaped(form.levels, part, metric[mine], first) for part, mine, first in parts]
        codes, scale = (torch.cat(each) for each in zip(*found, strict=True))
    half = scale.to(torch.float16)
    # What float16 does not hold keeps the scale of before, which it does.
    return Codes(pack(codes, form.bits), torch.where(half.isfinite(), half, made.scale))


def _shaped(levels: tuple[float, ...], x: Tensor, metric: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [N, T, D] and scales float32 [N, T, 1], chosen anew; 0 where x is."""
    table, tiny = level_tensor(levels, x.device), torch.finfo(torch.float32).tiny
    # Channels first, so that one of all vectors is read at once.
    x, made = x.transpose(1, 2).contiguous(), codes.transpose(1, 2).contiguous()
    of = table[made.long()]
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
            made[:, at], of[:, at] = code, level
    asked = metric @ x
    product = (of * asked).sum(1)
    found = torch.where(product > 0, (x * asked).sum(1) / product.clamp_min(tiny), torch.zeros_like(product))
    return made.transpose(1, 2), found[..., None]
