"""Codes: what is packed comes back, errors stay within their bounds, and what codes cannot hold is refused."""

from __future__ import annotations

import math

import pytest
import torch

from kvsieve.core.codebooks import float8_levels, gaussian_levels, level_scale
from kvsieve.core.codes import CodeFormat, Codes, decode, encode, nearest, nearest_codes, pack, planes, unpack
from kvsieve.core.rotation import rotation
from kvsieve.errors import PlanError, UnsupportedModelError
from kvsieve.kernels.cpu import codes as compiled
from layers import golden


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_come_back_from_their_bytes(bits):
    codes = (torch.arange(5 * 3 * 24) * 37 % 251 % (1 << bits)).to(torch.uint8).view(5, 3, 24)
    packed = pack(codes, bits)
    assert packed.shape == (5, 3, 24 * bits // 8) and packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, bits, 24), codes)


def test_where_codes_lie_in_their_bytes():
    """Planes by width, the high bits first; byte j of a plane holds numbers j, j + its bytes and so on."""
    assert [planes(bits) for bits in (2, 3, 4, 7, 8)] == [[2], [2, 1], [4], [4, 2, 1], [8]]
    codes = torch.tensor([1, 2, 3, 0, 3, 2, 1, 0], dtype=torch.uint8)
    # Numbers 0, 2, 4, 6 are the first byte's, 1, 3, 5, 7 the second's.
    assert pack(codes, 2).tolist() == [1 | 3 << 2 | 3 << 4 | 1 << 6, 2 | 0 << 2 | 2 << 4 | 0 << 6]
    assert pack(codes, 4).tolist() == [1 | 3 << 4, 2 | 2 << 4, 3 | 1 << 4, 0]
    # Of 3 bits the upper two, then the lowest, of all eight numbers in one byte.
    high = codes.new_tensor([0, 1, 2, 3, 3, 2, 1, 0])
    low = codes.new_tensor([1, 0, 1, 1, 0, 0, 1, 0])
    assert pack(high * 2 + low, 3).tolist() == [*pack(high, 2).tolist(), sum(int(b) << at for at, b in enumerate(low))]


def test_kivi_of_two_bits_by_hand():
    """Keys per channel: of channel 0 the range is -1..2, steps of 1; channel 1 is constant; of 2 and 3 by halves."""
    keys = torch.tensor([[[-1.0, 5, 0, 0.5], [0, 5, 1, -0.5], [2, 5, 0.5, 1], [1, 5, 1.5, 0]]])
    made = encode(CodeFormat(2, "channel"), keys)
    assert made.scale.tolist() == [[[1, 0, 0.5, 0.5]]] and made.zero.tolist() == [[[-1, 5, 0, -0.5]]]
    codes = [[0, 0, 0, 2], [1, 0, 2, 0], [3, 0, 1, 3], [2, 0, 3, 1]]
    assert unpack(made.packed, 2, 4).tolist() == [codes]
    assert made.packed.tolist() == [[[sum(c << 2 * at for at, c in enumerate(row))] for row in codes]]
    assert torch.equal(decode(CodeFormat(2, "channel"), made, 4), keys)
    # Values per token, two groups of two channels each.
    values = torch.tensor([[[0.0, 3, -1.5, 0], [4, 4, 1, 7]]])
    made = encode(CodeFormat(2, "token", 2), values)
    assert made.scale.tolist() == [[[1, 0.5], [0, 2]]] and made.zero.tolist() == [[[0, -1.5], [4, 1]]]
    assert unpack(made.packed, 2, 4).tolist() == [[[0, 3, 0, 3], [0, 0, 0, 3]]]
    assert torch.equal(decode(CodeFormat(2, "token", 2), made, 4), values)
    # 2.4 of 0..6 in steps of 2 is nearer to 2 than to 4.
    made = encode(CodeFormat(2, "channel"), torch.tensor([[[0.0] * 4, [6.0] * 4, [2.4] * 4, [3.1] * 4]]))
    assert decode(CodeFormat(2, "channel"), made, 4)[0, :, 0].tolist() == [0, 6, 2, 4]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("form", [CodeFormat(1, "channel"), CodeFormat(1, "token", 8)], ids=["channel", "token"])
def test_errors_are_half_a_step_at_most(form, bits):
    form = CodeFormat(bits, form.axis, form.group)
    x = golden((3, 32, 16), bits) * torch.logspace(-3, 3, 16) + torch.linspace(-50, 50, 16)
    made = encode(form, x)
    step = made.scale.float() if form.axis == "channel" else made.scale.float().repeat_interleave(8, -1)
    # Scale and zero are float16.
    rounding = step * (1 << bits) / 2048 + x.abs() / 1024
    assert bool(((decode(form, made, 16) - x).abs() <= step / 2 + rounding).all())


def test_bits_per_number_are_the_bytes_that_blocks_take():
    for form in (
        CodeFormat(3, "channel"),
        CodeFormat(4, "token", 16),
        CodeFormat(2, "channel", apart=40),
        CodeFormat(8, "token", 32, zero=False, levels=tuple(map(float, range(-127, 128)))),
    ):
        made = encode(form, golden((6, 64, 32), 1))
        bits = 8 * sum(part.nbytes for part in made.tensors())
        assert bits == form.bits_per_number(32, 64) * 6 * 64 * 32


def test_the_rotation_is_orthogonal_and_the_same_in_every_process():
    for dim in (16, 64, 80):
        turn = rotation(dim, torch.device("cpu")).double()
        torch.testing.assert_close(turn @ turn.T, torch.eye(dim, dtype=torch.float64), rtol=0, atol=1e-6)
        # No channel goes anywhere whole.
        assert turn.abs().max() < 0.6
    # Given once and for all: what one process encodes, another decodes.
    signs = [1, -1, 1, 1, 1, 1, -1, 1, 1, -1, 1, -1, -1, -1, -1, -1]
    assert (rotation(16, torch.device("cpu"))[:, 0] * 4).tolist() == signs
    assert rotation(24, torch.device("cpu"))[0, :3].tolist() == pytest.approx([-0.0592075, 0.2025994, 0.2267799])


@pytest.mark.parametrize("bits, error", [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_levels_are_those_of_lloyd_and_max(bits, error):
    levels = gaussian_levels(bits)
    assert len(levels) == 1 << bits and list(levels) == sorted(levels)
    assert [-level for level in reversed(levels)] == list(levels)
    # Evenly spread over the distribution.
    x = torch.special.ndtri((torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000).float()
    assert (x - nearest(levels, x)).square().mean().item() == pytest.approx(error, rel=3e-3)


def test_the_scale_is_that_of_least_squares():
    form = CodeFormat(2, "token", 64, zero=False, levels=gaussian_levels(2))
    x = golden((2, 5, 1, 64), 9)
    scale = level_scale(form, x, 3)

    def error(by):
        return (x - nearest(form.levels, x / (scale * by)) * scale * by).square().sum(3)

    assert bool((error(1.0) <= error(0.9)).all() and (error(1.0) <= error(1.1)).all())
    assert bool((error(1.0) < (x - nearest(form.levels, x)).square().sum(3)).any())
    # Of 7 times the numbers it is 7 times the scale.
    torch.testing.assert_close(level_scale(form, 7 * x, 3), 7 * scale)


@pytest.mark.parametrize("bits, most", [(2, 1.01), (3, 1.02), (4, 1.05)])
def test_the_scale_is_near_the_best(bits, most):
    """Beside the best of 60 scales, and nearer to it than the root mean square."""
    form = CodeFormat(bits, "token", 64, zero=False, levels=gaussian_levels(bits))
    x = torch.randn(500, 1, 1, 64, generator=torch.Generator().manual_seed(1))

    def error(scale):
        return (x - nearest(form.levels, x / scale) * scale).square().sum(3)

    root = x.square().mean(3, keepdim=True).sqrt()
    best = torch.stack([error(root * (0.7 + 0.01 * step)) for step in range(60)]).amin(0)
    ratio = error(level_scale(form, x, 3)).sum() / best.sum()
    assert ratio < most
    assert error(root).sum() / best.sum() > ratio


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_products_with_decoded_keys_are_little_shorter(bits):
    """With what was encoded; a scale of least squares shortens them by as much as it misses."""
    form = CodeFormat(bits, "token", 64, zero=False, levels=gaussian_levels(bits))
    x = torch.randn(400, 1, 64, generator=torch.Generator().manual_seed(2))

    def kept(products):
        made = encode(form, x, lambda form, x, dim: (level_scale(form, x, dim, products=products), None))
        return ((decode(form, made, 64) * x).sum() / x.square().sum()).item()

    # Mean squared errors of these codebooks.
    assert kept(False) == pytest.approx(1 - {2: 0.1175, 3: 0.0345, 4: 0.0095}[bits], abs=0.01)
    assert 0 < 1 - kept(True) < 0.6 * (1 - kept(False))


@pytest.mark.skipif(compiled.built().reason is not None, reason=str(compiled.built().reason))
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("size", [64, 40, 1])
def test_compiled_scales_and_codes_are_those_of_torch(bits, size, monkeypatch):
    levels = gaussian_levels(bits)
    form = CodeFormat(bits, "token", size, zero=False, levels=levels)
    x = golden((7, 3, 1, size), bits) * torch.logspace(-6, 4, 7)[:, None, None, None]
    x[2, 1] = 0
    scale, codes = level_scale(form, x, 3), nearest_codes(levels, x)
    long = level_scale(form, x, 3, products=True)
    asked = []
    monkeypatch.setattr(compiled, "takes", lambda x, levels: asked.append(levels) or False)
    torch.testing.assert_close(scale, level_scale(form, x, 3), rtol=1e-5, atol=0)
    torch.testing.assert_close(long, level_scale(form, x, 3, products=True), rtol=1e-5, atol=0)
    assert torch.equal(codes, nearest_codes(levels, x)) and asked
    assert scale[2, 1].item() == 0 and len(codes.unique()) > (1 if size == 1 else 3)


def test_floats_of_eight_bits():
    levels = float8_levels()
    assert len(levels) == 253 and levels[-1] == 448 and levels[126] == 0 and levels[127] == 2**-9
    assert [-level for level in reversed(levels)] == list(levels)
    x = golden((4, 9), 3) * 100
    torch.testing.assert_close(nearest(levels, x), x.to(torch.float8_e4m3fn).float(), rtol=0, atol=0)


def test_numbers_kept_apart_are_told_and_others_as_without():
    def inner(form, x, dim):
        return x.new_full((len(x), 1, x.shape[2]), 2 / 3), x.new_full((len(x), 1, x.shape[2]), -1.0)

    x = golden((2, 300, 128), 4).clamp(-1, 1)
    x[0, 299, 127], x[0, 0, 3], x[1, 5, 5] = 40.0, -30.0, 1000.0
    plain, form = CodeFormat(2, "channel"), CodeFormat(2, "channel", apart=2)
    without, made = encode(plain, x, inner), encode(form, x, inner)
    found, before = decode(form, made, 128), decode(plain, without, 128)
    apart = torch.stack([found[0, 299, 127], found[0, 0, 3], found[1, 5, 5]])
    torch.testing.assert_close(apart, torch.tensor([40.0, -30, 1000]), rtol=1e-3, atol=0)
    assert {int(place) & 0xFFFF for place in made.places[0]} == {299 * 128 + 127, 3}
    changed = (found != before).nonzero().tolist()
    assert len(changed) <= 4 and [0, 299, 127] in changed and [1, 5, 5] in changed


@pytest.mark.parametrize(
    "form",
    [
        CodeFormat(2, "channel"),
        CodeFormat(4, "token", 8),
        CodeFormat(3, "token", 16, zero=False, levels=gaussian_levels(3)),
        CodeFormat(4, "channel", apart=3),
    ],
    ids=["channel", "token", "levels", "apart"],
)
def test_equal_numbers(form):
    """A group without a range is its zero; nothing but zeros is zeros, also where no level is 0."""
    zeros = torch.zeros(2, 8, 16)
    assert torch.equal(decode(form, encode(form, zeros), 16), zeros)
    if form.zero:
        assert torch.equal(decode(form, encode(form, zeros - 2.5), 16), zeros - 2.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e9])
@pytest.mark.parametrize(
    "form, fit",
    [
        (CodeFormat(2, "channel"), None),
        (CodeFormat(4, "token", 8), None),
        (
            CodeFormat(4, "token", 16, zero=False, levels=gaussian_levels(4)),
            lambda form, x, dim: (level_scale(form, x, dim), None),
        ),
        (
            CodeFormat(4, "channel", apart=3),
            lambda form, x, dim: (x.new_ones(len(x), 1, x.shape[2]), x.new_zeros(len(x), 1, x.shape[2])),
        ),
    ],
    ids=["channel", "token", "levels", "apart"],
)
def test_what_is_no_number_is_refused(form, fit, bad):
    x = golden((2, 8, 16), 1)
    x[1, 3, 5] = bad
    with pytest.raises(PlanError, match="NaN, infinite or beyond .*run it in bfloat16 or float32, or without codec="):
        encode(form, x, fit) if fit is not None else encode(form, x)


def test_sizes_of_heads_that_codes_do_not_divide():
    CodeFormat(3, "channel").check(72, "its keys")
    with pytest.raises(
        UnsupportedModelError, match="its keys have 60 channels, .* codes of 3 bits take multiples of 8"
    ):
        CodeFormat(3, "channel").check(60, "its keys")
    with pytest.raises(UnsupportedModelError, match="its values have 80 channels, which groups of 64 do not divide"):
        CodeFormat(4, "token", 64).check(80, "its values")
    CodeFormat(8, "token", 40).check(80, "its values")


def test_codes_are_joined_and_changed_part_by_part():
    form = CodeFormat(2, "channel", apart=1)
    one, other = encode(form, golden((2, 8, 8), 1)), encode(form, golden((3, 8, 8), 2))
    both = Codes.joined([one, other])
    assert torch.equal(decode(form, both, 8), torch.cat([decode(form, one, 8), decode(form, other, 8)]))
    again = both.apply(lambda part: part[2:])
    assert torch.equal(decode(form, again, 8), decode(form, other, 8))


def test_blocks_of_which_no_number_could_be_told_apart():
    with pytest.raises(UnsupportedModelError, match="blocks of 1024 entries of 128 channels .* smaller block"):
        encode(CodeFormat(4, "channel", apart=1), torch.zeros(1, 1024, 128))
