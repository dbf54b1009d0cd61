"""ASL: the layer it finds, what goes on from there, and that rows, chunks and turns do not disturb each other."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.core.scoring import pooled_mass
from kvsieve.core.selection import top_mask
from kvsieve.errors import PlanError
from kvsieve.methods import TSP, AdaptiveTSP, GemFilter, SnapKV
from kvsieve.methods.asl import _RowTrace
from kvsieve.planning.roles import Propagator
from layers import context, golden
from tiny import tiny_model, tiny_prompt

LAYERS = 9


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(2, 60, seed=3)


def adaptive(tau, **given):
    return AdaptiveTSP(**{"rate": 20, "tau": tau, "observed": 3, "first": 3, "window": 4, "kernel": 3, **given})


def observe(layers, top, tau=0.3, observed=None):
    """Feed rank vectors (as scores) of successive layers to one row; its relative variances."""
    part = AdaptiveTSP(rate=8, tau=tau, observed=observed or len(layers), first=(observed or len(layers)) - 1, window=1)
    row = _RowTrace(len(layers[0]) + 1, top + 1)
    variances = []
    for index, ranks in enumerate(layers):
        if row.layer is not None:
            break
        ctx = context(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 8, 2), layer_idx=index, num_layers=64)
        part._observe(row, -torch.tensor(ranks, dtype=torch.float64), top, ctx)
        variances.append(row.base)
    return row, variances[-1]


def test_golden_variances():
    alternating = [[1, 2, 3, 4, 5, 6], [2, 1, 4, 3, 6, 5]] * 2
    assert observe(alternating, top=2)[1] == 0.25
    assert observe([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]], top=2)[1] == 4.25


def test_a_row_selects_once_its_ranks_have_settled():
    moving, still = [1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]
    row, _ = observe([moving, still, still, still, moving], top=2, observed=2)
    # Relative variance 1 at the first window, 0 at the next: layer 2 selects, and nothing is looked at after it.
    assert row.layer == 2 and row.trace == [1.0, 0.0]
    row, _ = observe([moving, moving, still], top=2, observed=2)
    assert row.trace[0] == 0.0 and row.layer == 1, "no variance at all is settled"


@pytest.mark.parametrize("tau", [0.0, 0.5, 0.8, 0.95, 2.0])
def test_propagation_is_tsp_at_the_layer_that_was_found(model, ids, tau):
    plan = kvsieve.Plan(propagate=adaptive(tau))
    with kvsieve.attach(model, plan) as sieve:
        result = sieve.generate(ids[:1], max_new_tokens=8, do_sample=False)
    (found,), (trace,) = result.stats.report["selection_layer"], result.stats.report["relative_variance"]
    assert trace[0] == 1.0 and all(value >= tau for value in trace[:-1])
    if found is None:
        assert tau < 0.6 and not result.stats.applied and "never fell below tau" in result.stats.notes[0]
        same = kvsieve.plan("full")
    else:
        assert found == 3 + len(trace) - 1 and trace[-1] < tau and result.stats.deep_tokens == 20
        same = kvsieve.Plan(propagate=TSP(rate=20, layer=found, window=4, kernel=3, pooling="avg"))
    if tau == 2.0:
        assert found == 3
    with kvsieve.attach(model, same) as sieve:
        other = sieve.generate(ids[:1], max_new_tokens=8, do_sample=False)
    assert torch.equal(result.sequences, other.sequences)
    assert result.stats.kv_entries == other.stats.kv_entries
    layers = zip(result.cache.sieve_layers.values(), other.cache.sieve_layers.values(), strict=True)
    for ours, theirs in layers:
        assert torch.equal(ours.store.index, theirs.store.index)
        torch.testing.assert_close(ours.store.keys, theirs.store.keys)


def test_rows_find_their_own_layers(model, ids):
    ids, mask = ids.clone(), torch.ones_like(ids)
    ids[1, :11], mask[1, :11] = 0, 0
    alone = []
    for row in (ids[:1], ids[1:, 11:]):
        with kvsieve.attach(model, kvsieve.Plan(propagate=adaptive(2.0))) as sieve:
            trace = sieve.generate(row, max_new_tokens=1, do_sample=False).stats.report["relative_variance"]
        assert trace == [[1.0]]
    # A tau between the two rows' smallest relative variances, so that they part ways.
    traces = []
    for row in (ids[:1], ids[1:, 11:]):
        with kvsieve.attach(model, kvsieve.Plan(propagate=adaptive(0.0))) as sieve:
            traces += sieve.generate(row, max_new_tokens=1, do_sample=False).stats.report["relative_variance"]
    low, high = sorted(min(trace) for trace in traces)
    for tau in ((low + high) / 2, high + 0.01):
        plan = kvsieve.Plan(propagate=adaptive(tau), evict=SnapKV(budget=18, window=4, kernel=3))
        with kvsieve.attach(model, plan) as sieve:
            together = sieve.generate(ids, mask, max_new_tokens=8, min_new_tokens=8, do_sample=False)
            alone = [
                sieve.generate(row, max_new_tokens=8, min_new_tokens=8, do_sample=False)
                for row in (ids[:1], ids[1:, 11:])
            ]
        layers = [each.stats.report["selection_layer"][0] for each in alone]
        assert together.stats.report["selection_layer"] == layers and layers[0] != layers[1]
        assert torch.equal(together.sequences[0, 60:], alone[0].sequences[0, 60:])
        assert torch.equal(together.sequences[1, 60:], alone[1].sequences[0, 49:])


@pytest.mark.parametrize("chunk", [9, 25])
def test_chunks_change_nothing(model, ids, chunk):
    plan = kvsieve.Plan(propagate=adaptive(0.95), evict=SnapKV(budget=18, window=4, kernel=3))
    with kvsieve.attach(model, plan) as sieve:
        whole = sieve.generate(ids, max_new_tokens=8, do_sample=False)
        parts = sieve.generate(ids, chunk=chunk, max_new_tokens=8, do_sample=False)
    assert torch.equal(whole.sequences, parts.sequences)
    assert whole.stats.report["selection_layer"] == parts.stats.report["selection_layer"]
    for one, other in zip(whole.cache.sieve_layers.values(), parts.cache.sieve_layers.values(), strict=True):
        assert torch.equal(one.store.index, other.store.index)


def test_a_later_turn_decides_anew(model, ids):
    plan = kvsieve.Plan(propagate=adaptive(2.0), evict=SnapKV(budget=18, window=4, kernel=3))
    with kvsieve.attach(model, plan) as sieve:
        first = sieve.generate(ids[:1], max_new_tokens=4, do_sample=False)
        more = tiny_prompt(1, 50, seed=8)
        second = sieve.generate(
            torch.cat([first.sequences, more], 1), cache=first.cache, max_new_tokens=4, do_sample=False
        )
    assert second.stats.deep_tokens == 20 and second.stats.report["selection_layer"] == [3]
    assert set(second.cache.entries()) <= {18, 19, 20, 21}


def test_full_before_selection_keeps_everything_in_the_first_layers(model, ids):
    given = {"budget": 20, "observed": 3, "first": 3, "window": 4, "tau": 2.0}
    with kvsieve.attach(model, kvsieve.plan("asl", **given, full_before=True)) as sieve:
        kept = sieve.generate(ids[:1], max_new_tokens=2, do_sample=False).stats.kv_entries
    assert kept == [60] * 4 + [20] * 5
    with kvsieve.attach(model, kvsieve.plan("asl", **given)) as sieve:
        kept = sieve.generate(ids[:1], max_new_tokens=2, do_sample=False).stats.kv_entries
    assert kept == [20] * 9


def test_golden_tokens_of_a_fixed_layer():
    """At the layer it selects, ASL's tokens are FastKV's of the same window, kernel and count (V2)."""
    part = AdaptiveTSP(rate=10, tau=2.0, observed=2, first=1, window=4, kernel=3)
    shared = {}
    ctx = [
        context(3 * golden((1, 4, 24, 4), 1), 3 * golden((1, 2, 24, 4), 2), layer_idx=i, num_layers=8, shared=shared)
        for i in range(2)
    ]
    assert part.select(ctx[0]) is None
    assert part.select(ctx[1]).indices.tolist() == [[7, 8, 9, 10, 11, 12, 20, 21, 22, 23]]


@pytest.mark.parametrize(
    "given", [{"tau": -1}, {"observed": 1}, {"first": 2}, {"window": 0}, {"kernel": 4}, {"full_before": 3}], ids=str
)
def test_bad_parameters_are_refused(given):
    with pytest.raises(PlanError):
        kvsieve.plan("asl", **given)


def test_a_model_without_room_is_refused(model):
    with pytest.raises(PlanError, match="8 is outside the model: it has 9 layers"):
        with kvsieve.attach(model, kvsieve.plan("asl", budget=40, first=8)):
            pass


class Look(Propagator):
    """A propagator that only remembers what it was shown."""

    window = 4

    def __init__(self):
        self.seen = {}

    def source(self, num_layers):
        return 0

    def select(self, ctx):
        self.seen[ctx.layer_idx] = ctx


def read_again(result, row=0):
    columns = result.cache.conversation.short_prompt.token_index[row]
    return columns[columns >= 0].tolist()


def generated(model, plan, *inputs, **options):
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, **options}
    with kvsieve.attach(model, plan) as sieve:
        return sieve.generate(*inputs, return_dict_in_generate=True, output_logits=True, **options)


@pytest.mark.parametrize("rule", ["asl", "gemfilter"])
@pytest.mark.parametrize("tau", [0.0, 0.95, 2.0])
def test_two_passes_read_the_selected_tokens_again(model, ids, tau, rule):
    ids = ids[:1]
    one = generated(model, kvsieve.Plan(propagate=adaptive(tau)), ids)
    two = generated(model, kvsieve.Plan(propagate=adaptive(tau, two_pass=True, rule=rule)), ids)
    (found,), (settled,) = two.stats.report["selection_layer"], two.stats.report["settled"]
    assert one.stats.report["selection_layer"] == [found if settled else None]
    traces = one.stats.report["relative_variance"][0], two.stats.report["relative_variance"][0]
    assert traces[1][: len(traces[0])] == traces[0]
    look = Look()
    with kvsieve.attach(model, kvsieve.Plan(propagate=look)) as sieve:
        sieve.prefill(ids)
    if rule == "gemfilter":
        wanted = GemFilter(budget=20).best(look.seen[found], (20,))[0][0].nonzero()[:, 0].tolist()
    else:
        mass = pooled_mass(look.seen[found], 4, 3, "avg").mean(1)
        wanted = [*top_mask(mass, (16,))[0].nonzero()[:, 0].tolist(), *range(56, 60)]
    assert read_again(two) == wanted
    if settled and rule == "asl":
        assert one.cache.layers[-1].store.index[0, 0, :20].tolist() == wanted
    assert (found == LAYERS - 1 and tau == 0) if not settled else found == 2 + len(traces[0])
    assert two.stats.applied and two.stats.deep_tokens == 20 and two.stats.kv_entries == [20] * LAYERS
    plain = generated(model, kvsieve.plan("full"), ids[:, wanted])
    assert all(torch.equal(*pair) for pair in zip(two.output.logits, plain.output.logits, strict=True))


@pytest.mark.parametrize("rule", ["asl", "gemfilter"])
def test_two_passes_of_rows_that_part_ways(model, ids, rule):
    ids, mask = ids.clone(), torch.ones_like(ids)
    ids[1, :11], mask[1, :11] = 0, 0
    single = ids[:1], ids[1:, 11:]
    traces = []
    for row in single:
        report = generated(model, kvsieve.Plan(propagate=adaptive(0.0)), row).stats.report
        traces += report["relative_variance"]
    low, high = sorted(min(trace) for trace in traces)
    for rate in (20, "40%"):
        plan = kvsieve.Plan(propagate=adaptive((low + high) / 2, two_pass=True, rule=rule, rate=rate))
        alone = [generated(model, plan, row) for row in single]
        for chunk in (None, 9):
            together = generated(model, plan, ids, mask, chunk=chunk)
            for row, (result, pad) in enumerate(zip(alone, (0, 11), strict=True)):
                assert read_again(together, row) == [pad + column for column in read_again(result)]
                assert torch.equal(together.sequences[row, 60:], result.sequences[0, 60 - pad :])
                assert together.stats.report["selection_layer"][row] == result.stats.report["selection_layer"][0]
        assert len(set(together.stats.report["selection_layer"])) == 2
        assert sorted(together.stats.report["settled"]) == [False, True]


def test_two_passes_of_a_prompt_that_fits_are_one(model, ids):
    plan = kvsieve.Plan(propagate=adaptive(0.5, two_pass=True, rate=60))
    result, full = generated(model, plan, ids), generated(model, kvsieve.plan("full"), ids)
    assert torch.equal(result.sequences, full.sequences) and not result.stats.applied


def test_two_pass_plans():
    plan = kvsieve.plan("asl", two_pass=True, budget=64)
    assert plan.evict is None and plan.shortens_prompt and not plan.acts_once
    assert not kvsieve.plan("asl").shortens_prompt and kvsieve.Plan.from_dict(plan.to_dict()) == plan
    for bad in ({"rule": "gemfilter"}, {"two_pass": True, "rule": "best"}, {"two_pass": True, "full_before": True}):
        with pytest.raises(PlanError, match="rule|full_before"):
            kvsieve.plan("asl", **bad)


def test_a_rate_of_no_more_than_the_window_leaves_a_token_to_rank():
    part = AdaptiveTSP(rate=4, window=4, observed=2, first=1)
    assert part.reread_tokens(50) == 5 and part.reread_tokens(3) == 3
