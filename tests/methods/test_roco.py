"""RoCo against a reference that keeps sums in lists."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import RoCo
from layers import context, kept
from stepped import run


class Slow:
    """One KV head: weights received by each token, group mean, in order."""

    def __init__(self, query, keys):
        self.query, self.keys, self.got = query, keys, {}

    def see(self, token, stored):
        logits = self.query[:, token] @ self.keys[stored].T * self.keys.shape[-1] ** -0.5
        for other, weight in zip(stored, logits.softmax(-1).mean(0).tolist(), strict=True):
            self.got.setdefault(other, []).append(weight)

    def keep(self, stored, count, recent, newest, sinks):
        evicted = len(stored) - count
        mean = {token: sum(self.got[token]) / len(self.got[token]) for token in stored}
        spread = {
            token: max(sum(each**2 for each in self.got[token]) / len(self.got[token]) - mean[token] ** 2, 0) ** 0.5
            for token in stored
        }
        free = stored[sinks : len(stored) - newest]
        steady = sorted(free, key=lambda token: spread[token])[: max(count - int(count * recent), evicted)]
        gone = sorted(steady, key=lambda token: mean[token])[:evicted]
        return [token for token in stored if token not in gone]


@pytest.mark.parametrize(("groups", "newest", "sinks"), [(1, 3, 0), (2, 4, 2)])
def test_equals_the_slow_reference(groups, newest, sinks):
    make = torch.Generator().manual_seed(groups)
    query = torch.randn(2 * groups, 60, 8, generator=make, dtype=torch.float64) * 2
    keys = torch.randn(2, 60, 8, generator=make, dtype=torch.float64)
    evictor = RoCo(budget=16, newest=newest, sinks=sinks)
    found = run(evictor, query, keys, 30, 16)
    for head in range(2):
        slow = Slow(query[head * groups : (head + 1) * groups], keys[head])
        stored = list(range(30))
        for token in stored:
            slow.see(token, stored[: token + 1])
        stored = slow.keep(stored, 16, 0.3, newest, sinks)
        assert found[0][head] == stored
        for token in range(30, 60):
            stored = [*stored, token]
            slow.see(token, stored)
            stored = slow.keep(stored, 16, 0.3, newest, sinks)
            assert found[token - 29][head] == stored


def test_a_padded_row_is_as_alone():
    make = torch.Generator().manual_seed(3)
    query = torch.randn(2, 4, 41, 8, generator=make, dtype=torch.float64)
    keys = torch.randn(2, 2, 41, 8, generator=make, dtype=torch.float64)
    evictor = RoCo(budget=12, newest=2, sinks=1)
    evictor.observe(together := context(query, keys, padding=[0, 11]))
    evictor.observe(alone := context(query[1:, :, 11:], keys[1:, :, 11:]))
    ours = [[slot - 11 for slot in head] for head in kept(evictor, together, 1)]
    assert ours == kept(evictor, alone)


@pytest.mark.parametrize("given", [{"recent": 1.5}, {"newest": 0}, {"sinks": -1}, {"budget": 14}, {"recent": "x"}])
def test_bad_parameters_are_refused(given):
    with pytest.raises(PlanError):
        kvsieve.plan("roco", **given)
