"""Window mass, pooling and group reduction against slow definitions and the golden vectors."""

from __future__ import annotations

import pytest
import torch

from attend import window_mass
from kvsieve.core.scoring import group_mean, pool


def golden(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The deterministic generator of the method specification, float64."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    raw = (index * 2654435761 + seed * 40503 + 12345) % 2**32
    return (raw.double() / 2**31 - 1).view(shape)


def naive(query, keys, scale, valid=None):
    """[B, Hq, N], one softmax at a time."""
    batch, query_heads, window, _ = query.shape
    heads, length = keys.shape[1:3]
    out = torch.zeros(batch, query_heads, length, dtype=torch.float64)
    for row in range(batch):
        for head in range(query_heads):
            for w in range(window):
                own = length - window + w
                seen = [j for j in range(own + 1) if valid is None or valid[row, 0, j]]
                if valid is not None and not valid[row, 0, own]:
                    continue
                logits = torch.stack(
                    [query[row, head, w].double() @ keys[row, head * heads // query_heads, j].double() for j in seen]
                )
                out[row, head, seen] += (logits * scale).softmax(0)
    return out


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8], ids=lambda g: f"G{g}")
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("block", [None, 7], ids=["whole", "blocked"])
def test_window_mass_equals_the_naive_loop(groups, padded, block):
    torch.manual_seed(groups)
    query = torch.randn(2, 2 * groups, 5, 6, dtype=torch.float64)
    keys = torch.randn(2, 2, 23, 6, dtype=torch.float64)
    valid = None
    if padded:
        valid = torch.ones(2, 1, 23, dtype=torch.bool)
        valid[1, :, :9] = False
        valid[0, :, 20] = False
    mass = window_mass(query, keys, 0.37, valid=valid, block=block)
    torch.testing.assert_close(mass, naive(query, keys, 0.37, valid), atol=1e-12, rtol=0)
    if not padded:
        torch.testing.assert_close(mass.sum(-1), torch.full((2, 2 * groups), 5.0, dtype=torch.float64))


def test_golden_window_mass_and_pools():
    query, keys = 3 * golden((1, 4, 24, 4), 1), 3 * golden((1, 2, 24, 4), 2)
    assert query[0, 0, 0].tolist() == pytest.approx([-2.999926, 0.708278, -1.583518, 2.124686], abs=1e-6)
    mass = window_mass(query[:, :, -4:], keys, 0.5)[..., :-4]
    expected = [0.000695, 0.283067, 0.386085, 0.524014, 0.295664, 0.000279]
    assert mass[0, 0, :6].tolist() == pytest.approx(expected, abs=1e-6)
    assert mass[0].sum(-1).tolist() == pytest.approx([2.796146, 3.962496, 3.923546, 3.661041], abs=1e-6)
    average = [0.094587, 0.223282, 0.397722, 0.401921, 0.273319, 0.175103]
    assert pool(mass, 3, "avg")[0, 0, :6].tolist() == pytest.approx(average, abs=1e-6)
    highest = [0.283067, 0.386085, 0.524014, 0.524014, 0.524014, 0.295664]
    assert pool(mass, 3, "max")[0, 0, :6].tolist() == pytest.approx(highest, abs=1e-6)


def test_half_precision_is_scored_in_float32():
    query, keys = torch.randn(1, 2, 3, 8).bfloat16(), torch.randn(1, 1, 11, 8).bfloat16()
    mass = window_mass(query, keys, 0.35)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), naive(query, keys, 0.35), atol=1e-6, rtol=0)


def test_average_pooling_counts_zeros_beyond_the_ends_and_max_ignores_them():
    scores = torch.tensor([[-3.0, -6.0, -9.0]])
    assert pool(scores, 3, "avg").tolist() == [[-3.0, -6.0, -5.0]]
    assert pool(scores, 3, "max").tolist() == [[-3.0, -3.0, -6.0]]
    assert pool(scores, 1, "avg").tolist() == scores.tolist()


def test_group_mean_pairs_neighbouring_query_heads():
    scores = torch.tensor([[[1.0], [3.0], [10.0], [20.0]]])
    assert group_mean(scores, 2).tolist() == [[[2.0], [15.0]]]
