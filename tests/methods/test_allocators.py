"""Allocators: who gets how much, by hand and by slow references, and the laws with a model."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

import kvsieve
from kvsieve import Plan
from kvsieve.core.allocation import allocate, clusters, winners
from kvsieve.errors import CacheStateError, PlanError
from kvsieve.hf.compat import CACHE
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.methods import (
    CAKE,
    AdaKV,
    CakeScores,
    ChunkKV,
    DynamicKV,
    GroupedSnapKV,
    KNorm,
    PerLayer,
    PyramidKV,
    SnapKV,
    SqueezeAttention,
    StreamingLLM,
    ZigZagKV,
)
from kvsieve.shared.prompt import read_shared
from layers import context
from scored import best, pooled, prompt, run, sizes, weights
from tiny import padded_prompt
from tiny_models import build

PADDING = 7


def snap_scores(query, keys, window, kernel):
    """[H][M]: mass pooled per query head, then the group's mean."""
    mass = weights(query, keys, window).sum(1)[:, :-window]
    lines = [pooled(line, kernel, "avg") for line in mass.tolist()]
    groups = len(lines) // len(keys)
    return [
        [sum(column) / groups for column in zip(*lines[h * groups : (h + 1) * groups], strict=True)]
        for h in range(len(keys))
    ]


def level_shares(wanted, total, low, high):
    """clip(level * weight) by bisection, then largest remainders: written apart from the library."""
    lo, hi = 0.0, 1e9 / max(wanted)
    for _ in range(300):
        mid = (lo + hi) / 2
        lo, hi = (mid, hi) if sum(min(max(mid * w, low), high) for w in wanted) < total else (lo, mid)
    shares = [min(max(lo * w, low), high) for w in wanted]
    whole = [int(share + 1e-7) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (-round(shares[i] - whole[i], 7), i))
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole


def test_pyramidkv_by_hand():
    # 4 layers, 12 entries each on average, 2 of them the window: 10 on average, from 20 - 1 down to 1 (beta 10).
    parts = prompt(layers=4, length=60)
    kept = run(PyramidKV(base=SnapKV(budget=12, window=2, kernel=1), beta=10), parts)
    assert sizes(kept) == [[21] * 2, [15] * 2, [9] * 2, [3] * 2]
    for layer, (query, keys) in enumerate(parts):
        scores = snap_scores(query[0], keys[0], 2, 1)
        assert kept[layer][0] == [[*best(line, [19, 13, 7, 1][layer]), 58, 59] for line in scores]
    # Shorter than twice 10, all layers are alike; 20 tokens, 18 besides the window, leave the last layer 2.
    base = SnapKV(budget=12, window=2)
    assert sizes(run(PyramidKV(base=base, beta=10), prompt(layers=4, length=19))) == [[12] * 2] * 4
    assert sizes(run(PyramidKV(base=base, beta=1), parts)) == [[12] * 2] * 4
    assert sizes(run(PyramidKV(base=base), prompt(layers=3, length=20))) == [[20] * 2, [12] * 2, [4] * 2]


def test_pyramidkv_keeps_every_layers_least_and_what_the_caller_protects():
    base = SnapKV(budget=12, window=2, kernel=1, skip_layers=(1,))
    parts = prompt(layers=4, length=60)
    protected = torch.zeros(1, 2, 60, dtype=torch.bool)
    protected[..., 3:13] = True
    for evictor in (PyramidKV(base=base), CAKE(base=base), ZigZagKV(base=base, floor=0), AdaKV(base=base, alpha=0)):
        kept = run(evictor, parts, protected=protected)
        assert sizes(kept)[1] == [60, 60]
        assert all(set(range(3, 13)) <= set(head) for layer in kept for head in layer[0])
        assert sum(map(sum, sizes(kept))) - 120 == 3 * 2 * 12
        # As many as the budget: nothing else stays, not even the window.
        more = protected.clone()
        more[..., 13:15] = True
        assert run(evictor, parts, protected=more)[2:] == [[[[*range(3, 15)]] * 2]] * 2
        kept = run(evictor, parts)
        assert all(len(head) >= 3 - isinstance(evictor, AdaKV) for layer in kept for head in layer[0])
        assert sum(map(sum, sizes(kept))) - 120 == 3 * 2 * 12


def test_per_layer_by_hand():
    parts = prompt(layers=4, length=30)
    base = KNorm(budget=10)

    def per_head(**options):
        return [head for head, _ in sizes(run(PerLayer(**options), parts))]

    assert per_head(base=base, shares=(4, 3, 2, 1)) == [16, 12, 8, 4]
    # 40 entries: 30 is all the first can give, the others share 10 by 1 : 1 : 3; text as the command line has it.
    assert per_head(base=base, shares="95/1/1/3") == [30, 2, 2, 6]
    assert per_head(base=dataclasses.replace(base, skip_layers=2), shares=(9, 9, 0, 1)) == [30, 30, 1, 19]
    for bad in ((), (0, 0), (1, -1), "1/x", (1, float("nan")), 3):
        with pytest.raises(PlanError, match="shares must be"):
            PerLayer(base=KNorm(budget=10), shares=bad)


def test_ada_golden():
    """Winners and budgets of the published example; rounded exactly, heads lose nothing (2 + 2 and 2 + 3 there)."""
    scores = torch.tensor([[[0.5, 0.3, 0.1, 0.05, 0.03, 0.02], [0.2, 0.2, 0.2, 0.15, 0.15, 0.1]]])
    for normalize, wins, rounded, ours in ((True, [3, 3], [2, 2], [3, 3]), (False, [2, 4], [2, 3], [2, 4])):
        evictor = AdaKV(base=KNorm(budget=3), normalize=normalize)
        scaled = evictor._normalized(scores, [3]) if normalize else scores
        assert winners(scaled, (6,)).tolist() == [wins]
        assert [round(win * 0.8 + int(3 * 0.2)) for win in wins] == rounded
        assert evictor.head_budgets(scores, (3,)).tolist() == [ours]
    # The floor counts: half of 3 is 1 for sure, and the other 4 go 2 : 4 among the heads.
    assert AdaKV(base=KNorm(budget=3), normalize=False, alpha=0.5).head_budgets(scores, (3,)).tolist() == [[2, 4]]
    assert AdaKV(base=KNorm(budget=3), alpha=1).head_budgets(scores, (3,)).tolist() == [[3, 3]]
    # Two of each are safe; then .2 and .1 | .15 ... of both.
    assert AdaKV(base=KNorm(budget=3), alpha=0.7, rule="kvpress").head_budgets(scores, (3,)).tolist() == [[2, 4]]


def ada_reference(query, keys, window, kernel, budget, alpha, normalize):
    """[H] kept columns, from methods.md 5.8."""
    heads, length = len(keys), keys.shape[1]
    groups, base = len(query) // heads, budget - window
    mass = weights(query, keys, window).mean(1)[:, :-window]
    scores = [pooled(mass[h * groups : (h + 1) * groups].mean(0).tolist(), kernel, "max") for h in range(heads)]
    scale = [sum(sorted(line)[-base:]) / sum(line) if normalize else 1.0 for line in scores]
    pairs = [(-score * scale[h], h, j) for h, line in enumerate(scores) for j, score in enumerate(line)]
    wins = [0] * heads
    for _, head, _ in sorted(pairs)[: heads * base]:
        wins[head] += 1
    floor = int(base * alpha)
    rest = heads * (base - floor)
    exact = [floor + rest * win / (heads * base) for win in wins]
    whole = [int(each + 1e-9) for each in exact]
    order = sorted(range(heads), key=lambda h: (-round(exact[h] - whole[h], 9), h))
    for head in order[: heads * base - sum(whole)]:
        whole[head] += 1
    return [[*best(line, whole[h]), *range(length - window, length)] for h, line in enumerate(scores)]


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8], ids=lambda g: f"G{g}")
@pytest.mark.parametrize("normalize", [True, False])
def test_adakv_equals_the_slow_reference_in_padded_batches(groups, normalize):
    heads, length, padding = 3, 61, [0, 13]
    parts = prompt(1, heads, groups, length, batch=2, seed=groups)
    evictor = AdaKV(base=GroupedSnapKV(budget="30%", window=5, kernel=7), normalize=normalize)
    kept = run(evictor, parts, padding)
    for row, pad in enumerate(padding):
        query, keys = (part[row, :, pad:] for part in parts[0])
        budget = int(0.3 * (length - pad))
        wanted = ada_reference(query, keys, 5, 7, budget, 0.2, normalize)
        assert kept[0][row] == [[column + pad for column in head] for head in wanted]
        assert sum(sizes(kept, row)[0]) == heads * budget


def test_adakv_variants():
    parts = prompt(4, 3, 2, 61, seed=5)
    base = SnapKV(budget=20, window=4, kernel=3)
    uniform = run(base, parts)
    assert run(AdaKV(base=base, alpha=1.0), parts) == uniform, "all floor is uniform"
    pyramid = sizes(run(PyramidKV(base=base, beta=5), parts))
    both = sizes(run(AdaKV(base=base, pyramid=True, beta=5), parts))
    assert list(map(sum, both)) == list(map(sum, pyramid)) and len({size for layer in both for size in layer}) > 4
    kvpress = run(AdaKV(base=base, rule="kvpress", alpha=0.5), parts)
    for layer, (query, keys) in enumerate(parts):
        scores = [[*line, *[9.0] * 4] for line in snap_scores(query[0], keys[0], 4, 3)]
        safe = [best(line, 10) for line in scores]
        rest = sorted((-s, h, j) for h, line in enumerate(scores) for j, s in enumerate(line) if j not in safe[h])
        wanted = [sorted([*safe[h], *(j for _, g, j in rest[:30] if g == h)]) for h in range(3)]
        assert kvpress[layer][0] == wanted
    per_query = sizes(run(AdaKV(base=dataclasses.replace(base, per_query_head=True)), parts))
    assert [len(layer) for layer in per_query] == [6] * 4 and set(map(sum, per_query)) == {120}
    with pytest.raises(PlanError, match="KNorm ranks by scores that can be negative"):
        run(AdaKV(base=KNorm(budget=20)), parts)
    assert list(map(sum, sizes(run(AdaKV(base=KNorm(budget=20), normalize=False), parts)))) == [60] * 4


def cake_statistics(query, keys, window):
    """Preference at tau 1, and [H][M] mean + 200 var, avg-pooled by 3, group mean: methods.md 6.3."""
    near = weights(query, keys, window)[:, :, :-window]
    entropy = -sum(a * torch.log(torch.tensor(a + 1e-10, dtype=torch.float64)).item() for a in near.flatten().tolist())
    variance = near.var(1)
    line = near.mean(1) + 200 * variance
    lines = [pooled(each, 3, "avg") for each in line.tolist()]
    groups = len(query) // len(keys)
    shared = [
        [sum(column) / groups for column in zip(*lines[h * groups : (h + 1) * groups], strict=True)]
        for h in range(len(keys))
    ]
    return entropy * variance.sum().item(), shared


@pytest.mark.parametrize("groups", [1, 3, 4], ids=lambda g: f"G{g}")
def test_cake_equals_sharing_out_once_at_the_end(groups):
    """Rows of a padded batch, layers cut as they come, never more held than promised."""
    layers, heads, length, window, padding = 5, 2, 53, 4, [0, 11]
    parts = prompt(layers, heads, groups, length, batch=2, seed=10 + groups)
    evictor = CAKE(base=CakeScores(budget="25%", window=window, kernel=3), tau1=1.5, tau2=0.7)
    held = []
    kept = run(evictor, parts, padding, watch=held.append)
    for row, pad in enumerate(padding):
        true = length - pad
        count = int(0.25 * true)
        found = [cake_statistics(query[row, :, pad:], keys[row, :, pad:], window) for query, keys in parts]
        prefer = []
        for query, keys in parts:
            near = weights(query[row, :, pad:], keys[row, :, pad:], window)[:, :, :-window]
            entropy = -(near * (near + 1e-10).log()).sum().item()
            prefer.append(entropy ** (1 / 1.5) * near.var(1).sum().item() ** (1 / 0.7))
        budgets = level_shares(prefer, (count - window) * layers, 1, true - window)
        for layer, budget in enumerate(budgets):
            tail = range(length - window, length)
            wanted = [[*(j + pad for j in best(line, budget)), *tail] for line in found[layer][1]]
            assert kept[layer][row] == wanted
        assert len(set(budgets)) > 2 and sum(map(sum, sizes(kept, row))) == heads * layers * count
        assert all(sum(now[row] for now in step) <= heads * (layers * count + layers) for step in held)


def test_cake_works_in_blocks_and_on_windows_of_one(monkeypatch):
    parts = prompt(3, length=1500, seed=4)
    evictor = CAKE(base=CakeScores(budget=100, window=8))
    whole = run(evictor, parts)
    from kvsieve.core import scoring

    monkeypatch.setattr(scoring, "_BLOCK_ELEMENTS", 1)
    assert run(evictor, parts) == whole
    # One query has no variance: entries are ranked by its attention; layers are weighed by the last 32.
    parts = prompt(3)
    one = run(CAKE(base=CakeScores(budget=9, window=1, kernel=1)), parts)
    assert sum(map(sum, sizes(one))) == 3 * 2 * 9 and len(set(map(sum, sizes(one)))) > 1
    for layer, (query, keys) in zip(one, parts, strict=True):
        scores = snap_scores(query[0], keys[0], 1, 1)
        assert layer[0] == [[*best(line, len(layer[0][0]) - 1), 39] for line in scores]


@pytest.mark.parametrize("groups", [1, 2], ids=lambda g: f"G{g}")
def test_zigzagkv_equals_the_slow_reference(groups):
    layers, length, window, padding = 4, 47, 5, [0, 9]
    parts = prompt(layers, 2, groups, length, batch=2, seed=20 + groups)
    evictor = ZigZagKV(base=SnapKV(budget="40%", window=window, kernel=3), target=0.8, floor=0.3)
    kept = run(evictor, parts, padding)
    for row, pad in enumerate(padding):
        true = length - pad
        free = int(0.4 * true) - window
        least, needed = int(0.3 * free), []
        for query, keys in parts:
            fewest = []
            for line in weights(query[row, :, pad:], keys[row, :, pad:], window).sum(1).tolist():
                ordered, total, number = sorted(line, reverse=True), 0.0, 0
                while total < 0.8 * sum(line):
                    total, number = total + ordered[number], number + 1
                fewest.append(number)
            needed.append(sum(fewest) / len(fewest))
        rest = layers * (free - least)
        budgets = [least + each for each in level_shares(needed, rest, 0, true - window - least)]
        assert [each[0] - window for each in sizes(kept, row)] == budgets and len(set(budgets)) > 1
        scores = snap_scores(parts[0][0][row, :, pad:], parts[0][1][row, :, pad:], window, 3)
        tail = range(length - window, length)
        assert kept[0][row] == [[*(j + pad for j in best(line, budgets[0])), *tail] for line in scores]
    assert sizes(run(ZigZagKV(base=evictor.base, floor=1.0), parts)) == [[int(0.4 * length)] * 2] * layers


@pytest.mark.parametrize("interval", [1, 2, 3, 9])
def test_dynamickv_equals_the_slow_reference(interval):
    layers, heads, length, window, count, most = 5, 2, 60, 4, 13, 3
    parts = prompt(layers, heads, 2, length, seed=30)
    evictor = DynamicKV(base=SnapKV(budget=count, window=window, kernel=3), most=most, interval=interval)
    free, kept = count - window, []
    for layer, (query, keys) in enumerate(parts):
        scores = snap_scores(query[0], keys[0], window, 3)
        kept.append([[(line[j], j) for j in best(line, most * free)] for line in scores])
        if (layer + 1) % interval and layer + 1 < layers:
            continue
        so_far = layer + 1
        pairs = [(-s, m, h, j) for m, heads_of in enumerate(kept) for h, line in enumerate(heads_of) for s, j in line]
        hits = [0] * so_far
        for _, m, _, _ in sorted(pairs)[: free * heads * so_far]:
            hits[m] += 1
        budgets = allocate(hits, free * so_far, [1] * so_far, [len(each[0]) for each in kept])
        for m, budget in enumerate(budgets):
            kept[m] = [
                sorted(sorted(line, key=lambda p: (-p[0], p[1]))[:budget], key=lambda p: p[1]) for line in kept[m]
            ]
    tail = [*range(length - window, length)]
    wanted = [[[j for _, j in line] + tail for line in layer] for layer in kept]
    found = [layer[0] for layer in run(evictor, parts)]
    assert found == wanted and sum(len(head) for layer in found for head in layer) == heads * layers * count


def squeeze_weights(similar, p):
    labels = clusters(similar, 3)
    top = labels.count(max(labels))
    return [p if label == max(labels) else (len(similar) - top * p) / (len(similar) - top) for label in labels]


def test_squeezeattention_by_hand():
    # Layers 1 and 3 change least and keep half of 20; the other three share the 80 that are left of 100.
    assert squeeze_weights([0.5, 0.95, 0.2, 0.9, 0.55], 0.5) == pytest.approx([4 / 3, 0.5, 4 / 3, 0.5, 4 / 3])
    parts = prompt(layers=5, length=70)
    evictor = SqueezeAttention(base=StreamingLLM(budget=20), p=0.5)
    kept, shared = [], {}
    for index, ((query, keys), similar) in enumerate(zip(parts, [0.5, 0.95, 0.2, 0.9, 0.55], strict=True)):
        ctx = context(query, keys, layer_idx=index, num_layers=5, shared=shared)
        ctx.state["similarity"] = torch.tensor([[similar * 70, 70.0]])
        kept.append(evictor.select(ctx, (20,)))
    assert kept[:4] == [{}] * 4 and sorted(kept[4]) == [0, 1, 2, 3, 4]
    assert [kept[4][layer].indices.shape[-1] for layer in range(5)] == [27, 10, 27, 10, 26]
    assert kept[4][1].indices.tolist() == [[[0, 1, 2, 3, *range(64, 70)]] * 2]


def wrapped(base):
    shares = tuple(range(1, 9))
    return [
        PyramidKV(base=base, beta=7),
        AdaKV(base=base, normalize=False),
        AdaKV(base=base, rule="kvpress", pyramid=True),
        CAKE(base=base),
        ZigZagKV(base=base),
        DynamicKV(base=base, interval=2),
        PerLayer(base=base, shares=shares),
    ]


@pytest.mark.parametrize("seed", range(6))
def test_totals_are_exact_for_any_size_and_base(seed):
    rng = random.Random(seed)
    for _ in range(6):
        layers, heads, length = rng.randint(1, 6), rng.randint(1, 4), rng.randint(6, 70)
        skip, padding = rng.randint(0, layers - 1), [0, rng.randint(0, length - 1)]
        budget = rng.choice([rng.randint(6, 80), f"{rng.randint(1, 100)}%"])
        base = rng.choice(
            [
                SnapKV(budget=budget, window=4, kernel=3, skip_layers=skip),
                KNorm(budget=budget, skip_layers=skip),
                StreamingLLM(budget=budget, sinks=2, skip_layers=skip),
            ]
        )
        parts = prompt(layers, heads, 2, length, batch=2, seed=seed)
        for evictor in wrapped(base):
            if isinstance(evictor, PerLayer):
                evictor = dataclasses.replace(evictor, shares=tuple(rng.random() for _ in range(layers)))
            kept = run(evictor, parts, padding)
            for row, pad in enumerate(padding):
                true = length - pad
                count = min(base.budget.entries(true, base.minimum), true)
                got = sizes(kept, row)
                assert got[:skip] == [[true] * heads] * skip
                assert sum(map(sum, got[skip:])) == heads * (layers - skip) * count, evictor
                alone = run(
                    evictor, [(query[row : row + 1, :, pad:], keys[row : row + 1, :, pad:]) for query, keys in parts]
                )
                assert [[[c - pad for c in head] for head in layer[row]] for layer in kept] == [x[0] for x in alone]


def test_bases_and_numbers_that_cannot_work_are_refused():
    for kind in (PyramidKV, CAKE, AdaKV):
        with pytest.raises(PlanError, match="base must be an evictor that ranks"):
            kind(base=kvsieve.plan("h2o").evict)
        with pytest.raises(PlanError, match="base must be an evictor that ranks"):
            kind(base=ChunkKV(base=SnapKV(budget=0.2)))
    for name, options in {
        "pyramidkv": {"beta": 0},
        "adakv": {"alpha": 1.1},
        "cake": {"tau1": 0},
        "zigzagkv": {"target": 0},
        "dynamickv": {"most": 0.5},
        "squeezeattention": {"p": 0},
    }.items():
        with pytest.raises(PlanError, match=next(iter(options))):
            kvsieve.plan(name, **options)


# With a model.

SMALL = {"window": 4, "kernel": 3}
PLANS = {
    "pyramidkv": kvsieve.plan("pyramidkv", budget=16, beta=5, **SMALL),
    "adakv": kvsieve.plan("adakv", budget=16, **SMALL),
    "ada-pyramid": kvsieve.plan("adakv", budget=16, pyramid=True, beta=5, rule="kvpress", **SMALL),
    "per-layer": kvsieve.plan("per-layer", budget=16, base="streamingllm", shares=(1, 3, 2, 2)),
    "cake": kvsieve.plan("cake", budget=16, **SMALL),
    "zigzagkv": Plan(evict=ZigZagKV(base=SnapKV(budget=16, **SMALL), target=0.5)),
    "dynamickv": kvsieve.plan("dynamickv", budget=16, interval=3, **SMALL),
    "squeezeattention": kvsieve.plan("squeezeattention", budget=16),
}
TOTAL = 4 * 2 * 16


def again(plan, **changes):
    """The plan with a changed base."""
    base = dataclasses.replace(plan.evict.base, **changes)
    return dataclasses.replace(plan, evict=dataclasses.replace(plan.evict, base=base))


@pytest.fixture(scope="module")
def prompts():
    return padded_prompt(60, PADDING, seed=5)


def columns(cache, row=0, pad=0):
    """[layers][heads] columns stored, padding not counted."""
    out = []
    for layer in cache.sieve_layers.values():
        store = layer.store
        real = torch.ones_like(store.index, dtype=torch.bool) if store.valid is None else store.valid
        real = real.expand_as(store.index)
        out.append([(index[here] - pad).tolist() for index, here in zip(store.index[row], real[row], strict=True)])
    return out


def entries(cache, row=0):
    return sum(len(head) for layer in columns(cache, row) for head in layer)


@pytest.mark.parametrize("name", PLANS)
def test_totals_chunks_padding_and_shared_readings(model, prompts, name):
    ids, mask = prompts
    plan = PLANS[name]
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    with kvsieve.attach(model, plan) as sieve:
        together = sieve.prefill(ids, mask)
        pieces = sieve.prefill(ids, mask, chunk=17)
        first = sieve.prefill(ids[:1])
        second = sieve.prefill(ids[1:, PADDING:])
    with kvsieve.attach(model, Plan(evict=plan.evict.base)) as sieve:
        uniform = sieve.prefill(ids[:1])
    assert columns(first) != columns(uniform) and entries(uniform) == TOTAL
    assert [entries(together, row) for row in (0, 1)] == [TOTAL] * 2
    assert [columns(pieces, row) for row in (0, 1)] == [columns(together, row) for row in (0, 1)]
    assert columns(first) == columns(together) and columns(second) == columns(together, 1, PADDING)
    for chunk in (None, 17):
        shared = read_shared(
            model, None, ids, mask, window=plan.window + 3, evictors=[plan.evict], options=ReadOptions(chunk)
        )
        cache = shared.reduced(plan.evict)
        assert [columns(cache, row) for row in (0, 1)] == [columns(together, row) for row in (0, 1)]
        assert cache.turn.record == together.turn.record and entries(shared.cache) == 4 * 2 * 60
        for ours, theirs in zip(cache.sieve_layers.values(), together.sieve_layers.values(), strict=True):
            assert set(ours.state) == set(theirs.state)
            for key, value in ours.state.items():
                torch.testing.assert_close(value, theirs.state[key])


@pytest.mark.parametrize("name", PLANS)
def test_decoding_stays_within_the_total(model, prompts, name):
    ids, mask = prompts
    plan = again(PLANS[name], every=3)
    totals = []
    with kvsieve.attach(model, plan) as sieve:

        def tokens(ids, mask=None, cache=None, **options):
            cache = sieve.new_cache() if cache is None else cache
            mask = torch.ones_like(ids) if mask is None else mask
            options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **options}
            return model.generate(ids, attention_mask=mask, **{CACHE: cache}, **options)[:, ids.shape[1] :]

        cache, short = sieve.new_cache(), sieve.new_cache()

        def watch(module, args, output):
            totals.append([entries(cache, row) for row in (0, 1)])

        handle = model.register_forward_hook(watch)
        together = tokens(ids, mask, cache)
        handle.remove()
        alone = tokens(ids[1:, PADDING:])
        beams = tokens(ids, mask, num_beams=2, min_new_tokens=0)
        beam = tokens(ids[1:, PADDING:], num_beams=2, min_new_tokens=0)
        tokens(ids[:1, :13], cache=short)
    assert totals[0] == totals[3] == totals[6] == [TOTAL] * 2
    assert max(max(each) for each in totals) <= TOTAL + 2 * 4 * 2
    assert torch.equal(together[1], alone[0]) and torch.equal(beams[1, : beam.shape[1]], beam[0])
    # A prompt that fits grows to the total, and no further; 13 tokens and 6 generated ones would be 19 everywhere.
    assert entries(short) == TOTAL + 4 * 2


@pytest.mark.parametrize("name", PLANS)
def test_a_later_turn_is_shared_out_anew(model, prompts, name):
    ids, _ = prompts
    plan = again(PLANS[name], budget="40%")
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.prefill(ids[:1, :30])
        assert entries(cache) == 4 * 2 * 12
        sieve.prefill(ids[:1], cache=cache)
        assert entries(cache) == 4 * 2 * 24
        assert all(head[-1] == 59 for layer in columns(cache) for head in layer)


@pytest.mark.parametrize("name", [name for name in PLANS if name != "per-layer"])
def test_layers_that_do_not_evict_are_left_out(prompts, name):
    """Sliding-window layers, and the last layer, are none of the total; the deciding layer is the last that evicts."""
    ids, mask = prompts
    model = build("gemma3_text", dtype=torch.float64)
    with kvsieve.attach(model, PLANS[name]) as sieve:
        cache = sieve.prefill(ids, mask)
    assert list(cache.sieve_layers) == [1, 3] and [entries(cache, row) for row in (0, 1)] == [TOTAL // 2] * 2
    model = build("llama", dtype=torch.float64)
    with kvsieve.attach(model, again(PLANS[name], skip_layers=(0, -1))) as sieve:
        cache = sieve.prefill(ids, mask)
    kept = columns(cache)
    assert [len(head) for head in kept[0] + kept[3]] == [60] * 4
    assert sum(len(head) for layer in kept[1:3] for head in layer) == TOTAL // 2


def test_propagated_layers_give_what_they_cannot_hold_to_others(model, prompts):
    ids, _ = prompts
    tsp = kvsieve.methods.TSP(rate=0.2, layer=1, window=4)
    for name in ("cake", "zigzagkv", "pyramidkv", "adakv"):
        plan = Plan(propagate=tsp, evict=again(PLANS[name], budget=20).evict)
        for chunk in (None, 25):
            with kvsieve.attach(model, plan) as sieve:
                kept = columns(sieve.prefill(ids[:1], chunk=chunk))
            assert all(len(head) <= 12 for layer in kept[2:] for head in layer)
            if name in ("cake", "zigzagkv"):
                # Deep layers hold 12 of their 20; nothing before was dropped that would not have been.
                assert [len(head) for layer in kept[2:] for head in layer] == [12] * 4


def test_a_schedule_of_another_length_is_refused(model):
    with pytest.raises(PlanError, match="has 3 shares and the model 4 layers"):
        with kvsieve.attach(model, kvsieve.plan("per-layer", shares=(1, 2, 3))):
            pass


def test_ragged_memory_falls_as_promised(model, prompts):
    ids, _ = prompts
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        full = sieve.prefill(ids[:1])
    with kvsieve.attach(model, PLANS["adakv"]) as sieve:
        cache = sieve.prefill(ids[:1])
    stores = [layer.store for layer in cache.sieve_layers.values()]
    assert any(store.is_ragged for store in stores)
    per_entry = 2 * 16 * 8 + 4
    # A slot per head for the next token, up to a multiple of 8, and what attention adds for each head for every slot.
    assert cache.nbytes() <= (TOTAL + 4 * (2 + 7)) * (per_entry + 2 * 8)
    assert full.nbytes() == 4 * 2 * 60 * per_entry


def test_squeezeattention_measures_the_residual_stream(model, prompts):
    ids, mask = prompts
    seen = {}

    def entering(index):
        return lambda module, args, kwargs: seen.update({("in", index): args[0] if args else kwargs["hidden_states"]})

    def attended(index):
        return lambda module, args, output: seen.update({("out", index): output[0]})

    handles = []
    for index, layer in enumerate(model.model.layers):
        handles.append(layer.register_forward_pre_hook(entering(index), with_kwargs=True))
        handles.append(layer.self_attn.register_forward_hook(attended(index)))
    plan = PLANS["squeezeattention"]
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.prefill(ids, mask)
        for handle in handles:
            handle.remove()
        chunked = sieve.prefill(ids, mask, chunk=11)
    for row, pad in enumerate((0, PADDING)):
        similar = []
        for index in range(4):
            before, change = seen["in", index][row, pad:], seen["out", index][row, pad:]
            similar.append(torch.cosine_similarity(before, before + change, dim=-1).mean().item())
            for each in (cache, chunked):
                total, number = each.sieve_layers[index].state["similarity"][row].tolist()
                assert number == 60 - pad and total / number == pytest.approx(similar[-1], abs=1e-12)
        budgets = allocate(squeeze_weights(similar, 0.3), 4 * 16, [5] * 4, [60 - pad] * 4)
        assert [len(layer[0]) for layer in columns(cache, row)] == budgets and len(set(budgets)) > 1
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_squeezeattention_must_have_been_there_when_the_prompt_was_read(model, prompts):
    evictor = PLANS["squeezeattention"].evict
    shared = read_shared(model, None, prompts[0][:1], window=4)
    with pytest.raises(CacheStateError, match="observes every pass"):
        shared.reduced(evictor)
