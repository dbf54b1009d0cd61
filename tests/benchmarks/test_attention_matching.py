"""The trial of Attention Matching: what it solves, on small tensors."""

from __future__ import annotations

import torch

from benchmarks.answers.attention_matching import bounded_least_squares, compacted

SCALE = 0.5


def attended(query, keys, values, biases):
    """Output [H, Q, D], and the logarithm of the mass [H, Q], of queries [1, H, Q, D] on entries [1, H, N, D]."""
    logits = (query @ keys.transpose(2, 3) * SCALE)[0] + biases[:, None]
    return logits.softmax(-1) @ values[0], logits.logsumexp(-1)


def test_one_entry_stands_for_three_equal_ones():
    torch.manual_seed(0)
    keys, query = torch.randn(4, 8), torch.randn(50, 8)
    probabilities = (query @ keys[[0, 1, 2, 3, 3, 3]].T * SCALE).softmax(-1).double()
    weights = bounded_least_squares(probabilities[:, :4])
    assert torch.allclose(weights, torch.tensor([1.0, 1, 1, 3], dtype=torch.float64), atol=1e-3)


def test_values_are_fitted_to_the_output():
    torch.manual_seed(1)
    keys, values, query = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8), torch.randn(1, 4, 300, 8)
    none = torch.zeros(2, 40)
    errors = {}
    for steps in ("keys", "biases", "matching"):
        (few_keys, few_values), biases = compacted(query, keys, values, SCALE, 10, steps)
        queries = query[0].unflatten(0, (2, 2)).flatten(1, 2)[None]
        few, mass = attended(queries, few_keys, few_values, biases)
        whole, whole_mass = attended(queries, keys, values, none)
        errors[steps] = (few - whole).square().mean().item(), (mass - whole_mass).square().mean().item()
    assert errors["matching"][0] < 0.7 * errors["keys"][0] and errors["biases"][1] < 0.2 * errors["keys"][1]


def test_weights_stay_within_their_bounds():
    columns = torch.rand(30, 5, dtype=torch.float64) * 1e-3
    assert torch.allclose(bounded_least_squares(columns), torch.tensor(3.0, dtype=torch.float64).exp())
    assert torch.allclose(bounded_least_squares(torch.eye(4, dtype=torch.float64)), torch.ones(4, dtype=torch.float64))
