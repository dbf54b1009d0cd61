"""SCOPE: the prompt's budget is the base's, the answer has its own."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import H2O, KNorm, PerTurn, Scope, SnapKV
from small import stored
from stepped import run
from tiny import tiny_prompt

OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Kept(Scope, heads="own", query_aware=True):
    """Counts as the runtime does, for a layer without one."""

    def select(self, ctx, counts):
        if ctx.step.phase == "decode":
            prompt = ctx.index < 12
            ctx.protected = prompt
            before = int(prompt.sum(-1).amax())
            counts = (before + self.answer_entries(ctx.step.lengths[0] - 12, before, counts[0]),)
        return super().select(ctx, counts)


@pytest.mark.parametrize("groups", [1, 2])
def test_equals_the_slow_reference(groups):
    make = torch.Generator().manual_seed(groups)
    query = torch.randn(2 * groups, 40, 8, generator=make, dtype=torch.float64) * 2
    keys = torch.randn(2, 40, 8, generator=make, dtype=torch.float64)
    evictor = Kept(base=KNorm(budget=6), answer=7, recent=3)
    found = run(evictor, query, keys, 12, 6)
    for head in range(2):
        own = query[head * groups : (head + 1) * groups]
        prompt = sorted(sorted(range(12), key=lambda token: float(keys[head, token].norm()))[:6])
        answer = []
        assert found[0][head] == prompt
        for token in range(12, 40):
            answer.append(token)
            if len(answer) > 7:
                seen = [*prompt, *answer]
                weights = (own[:, token] @ keys[head, seen].T * 8**-0.5).softmax(-1).mean(0)[len(prompt) :].tolist()
                best = sorted(range(len(answer) - 3), key=lambda at: -weights[at])[:4]
                answer = [*(answer[at] for at in sorted(best)), *answer[-3:]]
            assert found[token - 11][head] == [*prompt, *answer]


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("slide", [min(tokens, 6) for tokens in range(1, 31)]),
        ("adaptive", [min(tokens, 4 + (tokens - 1) // 5) for tokens in range(1, 31)]),
        # Chosen after 5, 10, ... tokens; those in between are added.
        (
            "discontinuous",
            [tokens if tokens < 5 else 4 + (tokens // 5 * 5 - 1) // 5 + tokens % 5 for tokens in range(1, 31)],
        ),
    ],
)
def test_strategies_on_a_model(model, strategy, sizes):
    ids = tiny_prompt(1, 40, seed=5)
    bound = {"answer": 6} if strategy == "slide" else {"interval": 5}
    plan = kvsieve.Plan(evict=Scope(base=SnapKV(budget=20, window=5), recent=4, strategy=strategy, **bound))
    found = []
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.new_cache()
        handle = model.register_forward_hook(lambda *_: found.append({*cache.entries()}))
        sieve.generate(ids, cache=cache, max_new_tokens=31, min_new_tokens=31, **OPTIONS)
        handle.remove()
    assert found == [{20}, *({20 + size} for size in sizes)]


def test_bases_whose_heads_keep_different_numbers(model):
    ids = tiny_prompt(2, 40, seed=5)
    mask = torch.ones_like(ids)
    ids[1, :9], mask[1, :9] = 0, 0
    base = kvsieve.plan("adakv", budget=20, window=4).evict
    with kvsieve.attach(model, kvsieve.Plan(evict=Scope(base=base, answer=6, recent=4))) as sieve:
        prompt = stored(sieve.prefill(ids, mask), [0, 9])
        together = sieve.generate(ids, mask, max_new_tokens=21, min_new_tokens=21, **OPTIONS)
        alone = sieve.generate(ids[1:, 9:], max_new_tokens=21, min_new_tokens=21, **OPTIONS)
        after = stored(together.cache, [0, 9])
    for row, length in enumerate((40, 31)):
        for before, now in zip(prompt[row], after[row], strict=True):
            for own, kept in zip(before, now, strict=True):
                assert [token for token in kept if token < length] == own and len(kept) == len(own) + 6
    assert len({len(head) for layer in prompt[0] for head in layer}) > 1
    assert stored(alone.cache)[0] == after[1]


@pytest.mark.parametrize("base", [H2O(budget=20), SnapKV(budget=50, every=8), PerTurn(base=SnapKV(budget=50))])
def test_bases_that_act_otherwise_are_refused(base):
    with pytest.raises(PlanError, match="base must evict at the end of prompts only"):
        Scope(base=base)


@pytest.mark.parametrize(
    "given",
    [
        {"answer": 256},
        {"answer": "64MiB"},
        {"recent": 0},
        {"interval": 0},
        {"strategy": "jump"},
        {"base": "fastkv"},
        {"base": "h2o"},
        {"base": "nothing"},
    ],
)
def test_bad_parameters_are_refused(given):
    with pytest.raises(PlanError):
        kvsieve.plan("scope", **given)
