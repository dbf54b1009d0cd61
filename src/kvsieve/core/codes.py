"""Quantization: packs blocks of keys or values as codes of few bits with scales, and decodes them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Literal, Self, TypeAlias

from kvsieve.errors import PlanError, UnsupportedModelError
from kvsieve.lazy import Tensor, torch

# Up to this many levels, a CPU compares a number with every border faster than it searches.
_COMPARED = 16

# Function that computes the scale and zero of [N, ..., group, ...] numbers; see `fit_range`.
Fit: TypeAlias = "Callable[[CodeFormat, Tensor, int], tuple[Tensor, Tensor | None]]"


@dataclass(frozen=True)
class CodeFormat:
    """Layout of encoded keys or values: a number is ``level[code] * scale + zero``.

    Attributes:
        bits: per code, 1 to 8.
        axis: "channel": one scale per channel of a block, over its tokens; "token": one per token and group of
            channels.
        group: channels that share a scale, for axis "token".
        zero: store a zero point with each scale; without, numbers are symmetric about 0.
        levels: the number of each code, ascending; None: the code itself.
        rotated: rotate channels randomly before encoding (`rotation`).
        centered: subtract the mean of each channel over the first entries encoded.
        balanced: divide each channel by the root of its standard deviation over the first entries encoded, or of its
            ratio to the queries' standard deviation, where known.
        apart: outliers per block, the numbers with the largest coding error in steps of their scale, stored separately.
    """

    bits: int
    axis: Literal["channel", "token"]
    group: int = 0
    zero: bool = True
    levels: tuple[float, ...] | None = None
    rotated: bool = False
    centered: bool = False
    balanced: bool = False
    apart: int = 0

    def check(self, dim: int, what: str) -> None:
        """Raise UnsupportedModelError for vectors of `dim` channels that cannot be packed; what: "its keys"."""
        per_byte = 8 // min(planes(self.bits))
        if dim % per_byte:
            raise UnsupportedModelError(
                f"{what} have {dim} channels, of which codes of {self.bits} bits take multiples of {per_byte}; choose "
                "other bits"
            )
        if self.axis == "token" and dim % self.group:
            raise UnsupportedModelError(
                f"{what} have {dim} channels, which groups of {self.group} do not divide; choose another group"
            )

    def bits_per_number(self, dim: int, tokens: float) -> float:
        """Return the bits per number, scales and outliers included, for blocks of `tokens` entries."""
        scales = 1 / tokens if self.axis == "channel" else 1 / self.group
        # A position in a block, and a float16.
        apart = self.apart * 32 / (tokens * dim)
        return self.bits + 16 * scales * (2 if self.zero else 1) + apart


@dataclass
class Codes:
    """Codes of N blocks of T tokens.

    Attributes:
        packed: uint8 [N, T, bytes], each token's planes of bits one after another (`pack`).
        scale: float16 [N, 1, D] or [N, T, D / group].
        zero: the same shape, or None.
        places: int16 [N, apart], positions t * D + d of outliers; None if there are none.
        extra: float16 [N, apart], the outliers' differences from their codes.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor | None = None
    places: Tensor | None = None
    extra: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        yield from (part for part in vars(self).values() if part is not None)

    def apply(self, change: Callable[[Tensor], Tensor]) -> Codes:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return Codes(**{name: None if part is None else change(part) for name, part in parts.items()})  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: list[Self]) -> Codes:
        first = parts[0]
        names = [field.name for field in fields(first)]
        return Codes(
            **{
                name: None if getattr(first, name) is None else torch.cat([getattr(part, name) for part in parts])
                for name in names
            }  # type: ignore[arg-type]
        )


def planes(bits: int) -> list[int]:
    """Return the widths of the planes that codes of `bits` bits are stored in, low bits last: 3 is [2, 1]."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 [..., D] below 2 ** bits as uint8 [..., D * bits / 8].

    A plane of w bits is D * w / 8 bytes. Byte j holds those of numbers j, j + D * w / 8 and so on, low bits first, so
    that neighbours of one shift are adjacent in memory.
    """
    if bits == 8:
        return codes
    out = []
    low = 0
    for width in reversed(planes(bits)):
        per_byte = 8 // width
        part = ((codes >> low) & ((1 << width) - 1)).unflatten(-1, (per_byte, -1))
        byte = part[..., 0, :].clone()
        for at in range(1, per_byte):
            byte |= part[..., at, :] << (at * width)
        out.append(byte)
        low += width
    return torch.cat(out[::-1], -1)


def unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    if bits == 8:
        return packed
    out: Tensor | None = None
    for width in planes(bits):
        count = dim * width // 8
        byte = packed[..., :count]
        packed = packed[..., count:]
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=byte.device)[:, None]
        part = ((byte[..., None, :] >> shifts) & ((1 << width) - 1)).flatten(-2)
        out = part if out is None else (out << width) | part
    assert out is not None
    return out


def fit_range(form: CodeFormat, x: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
    """Return the scale and zero with which codes span all numbers along `dim`, which keeps size 1."""
    top = (1 << form.bits) - 1
    if form.levels is not None:
        return x.abs().amax(dim, keepdim=True) / max(map(abs, form.levels)), None
    low = x.amin(dim, keepdim=True)
    return (x.amax(dim, keepdim=True) - low) / top, low


def encode(form: CodeFormat, x: Tensor, fit: Fit = fit_range) -> Codes:
    """Encode blocks float32 [N, T, D]; rotation and mean are the caller's.

    fit: computes scale and zero.

    Raises:
        PlanError: a number is NaN, infinite or beyond the range of float16.
    """
    grouped = x if form.axis == "channel" else x.unflatten(-1, (-1, form.group))
    along = 1 if form.axis == "channel" else 3
    scale, zero = fit(form, grouped, along)
    half = scale.to(torch.float16)
    offset = None if zero is None else zero.to(torch.float16)
    _refuse_overflow(half, *([] if offset is None else [offset]))
    shifted = grouped if offset is None else grouped - offset.float()
    # Equal numbers have scale 0 and are decoded as the zero, or 0.
    ratio = shifted / torch.where(half > 0, half, torch.ones_like(half)).float()
    if form.levels is None:
        codes = ratio.round_().clamp_(0, (1 << form.bits) - 1).to(torch.uint8)
    else:
        codes = nearest_codes(form.levels, ratio)
    if form.axis == "token":
        codes = codes.flatten(-2)
        half = half[..., 0]
        offset = None if offset is None else offset[..., 0]
    encoded = Codes(pack(codes, form.bits), half, offset)
    if form.apart:
        _keep_apart(form, encoded, x)
    return encoded


def _keep_apart(form: CodeFormat, encoded: Codes, x: Tensor) -> None:
    """Store the outliers of x [N, T, D], the numbers with the largest coding error in steps, beside its codes."""
    if x[0].numel() > 1 << 16:
        raise UnsupportedModelError(
            f"blocks of {x.shape[1]} entries of {x.shape[2]} channels have more than 65536 numbers, whose "
            "places do not fit into 16 bits; choose a smaller block"
        )
    missed = x - decode(form, encoded, x.shape[-1])
    steps = encoded.scale if form.axis == "channel" else encoded.scale.repeat_interleave(form.group, -1)
    steps = torch.where(steps > 0, steps, torch.ones_like(steps)).float()
    places = (missed / steps).abs().flatten(1).topk(form.apart, sorted=False).indices
    encoded.places = places.to(torch.int16)
    encoded.extra = missed.flatten(1).gather(1, places).to(torch.float16)
    _refuse_overflow(encoded.extra)


def _refuse_overflow(*parts: Tensor) -> None:
    """Raise PlanError if scales or outliers exceed the range of float16."""
    if not all(bool(part.isfinite().all()) for part in parts):
        raise PlanError(
            "keys or values to be encoded are NaN, infinite or beyond +-65504, which codes cannot hold: the model has "
            "overflowed, or its weights are damaged; run it in bfloat16 or float32, or without codec="
        )


def nearest_codes(levels: tuple[float, ...], x: Tensor) -> Tensor:
    """Return the code uint8 of the level nearest to each number of x."""
    from kvsieve.kernels.cpu import codes as compiled

    step = _step(levels)
    if step is not None:
        return x.sub(levels[0]).div_(step).round_().clamp_(0, len(levels) - 1).to(torch.uint8)
    if compiled.takes(x, len(levels)):
        return compiled.code_levels(x.contiguous(), _borders(levels, x.device))
    if x.device.type != "cpu" or len(levels) > _COMPARED:
        return torch.bucketize(x, _borders(levels, x.device)).to(torch.uint8)
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for border in _borders(levels, x.device).tolist():
        codes += x > border
    return codes


def nearest(levels: tuple[float, ...], x: Tensor) -> Tensor:
    codes = nearest_codes(levels, x)
    return level_tensor(levels, x.device).index_select(0, codes.flatten().int()).view_as(x)


def decode(form: CodeFormat, codes: Codes, dim: int) -> Tensor:
    """Return numbers [N, T, dim] in float32, the inverse of `encode` up to coding errors."""
    found = unpack(codes.packed, form.bits, dim)
    if form.levels is None:
        x = found.float()
    else:
        x = level_tensor(form.levels, found.device).index_select(0, found.flatten().int()).view(found.shape)
    grouped = x if form.axis == "channel" else x.unflatten(-1, (-1, form.group))
    scale, zero = (
        None if part is None else (part if form.axis == "channel" else part[..., None]).float()
        for part in (codes.scale, codes.zero)
    )
    assert scale is not None
    grouped = grouped.mul_(scale)
    if zero is not None:
        grouped = grouped.add_(zero)
    x = grouped if form.axis == "channel" else grouped.flatten(-2)
    if codes.places is not None and codes.extra is not None:
        # Positions beyond 32767 wrapped around.
        x = x.flatten(1).scatter_add_(1, codes.places.long() & 0xFFFF, codes.extra.float()).view_as(x)
    return x


@functools.cache  # Cached forever: a recorded pass reads them at their address.
def level_tensor(levels: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the levels as float32 [L], cached."""
    return torch.tensor(levels, dtype=torch.float32, device=device)


@functools.lru_cache(maxsize=64)
def _step(levels: tuple[float, ...]) -> float | None:
    steps = {high - low for low, high in itertools.pairwise(levels)}
    return steps.pop() if len(steps) == 1 else None


@functools.lru_cache(maxsize=64)
def _borders(levels: tuple[float, ...], device: torch.device) -> Tensor:
    table = level_tensor(levels, device)
    return (table[1:] + table[:-1]) / 2
