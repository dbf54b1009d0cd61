"""What each method keeps: by hand, by golden vectors, and by a slow reference written from the definitions."""

from __future__ import annotations

import warnings

import pytest
import torch

import kvsieve
from kvsieve.core.scoring import width
from kvsieve.errors import PlanError
from kvsieve.methods import TSP, KNorm, SnapKV, StreamingLLM
from layers import context, golden, kept
from scored import best
from tiny import tiny_model, tiny_prompt

GOLDEN = {"query": 3 * golden((1, 4, 24, 4), 1), "keys": 3 * golden((1, 2, 24, 4), 2)}


def test_streaming_llm_by_hand():
    ctx = context(torch.zeros(1, 1, 10, 2), torch.zeros(1, 1, 10, 2))
    assert kept(StreamingLLM(budget=5, sinks=2), ctx) == [[0, 1, 7, 8, 9]]
    assert kept(StreamingLLM(budget=3, sinks=0), ctx) == [[7, 8, 9]]


def test_streaming_llm_counts_true_tokens_of_a_padded_row():
    ctx = context(torch.zeros(2, 1, 10, 2), torch.zeros(2, 1, 10, 2), padding=[0, 4])
    assert kept(StreamingLLM(budget=4, sinks=2), ctx, row=1) == [[4, 5, 8, 9]]
    # A wrapper weighs the scores, so they count no padding either.
    assert StreamingLLM(budget=4, sinks=2).scores(ctx)[1, 0, 6:].tolist() == [2, 3, 4, 5]


def test_knorm_by_hand():
    # Norms 5, 1, 3, 1, 2: the smallest three are slots 1, 3 and 4.
    keys = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 3.0], [0.0, -1.0], [2.0, 0.0]])[None, None]
    ctx = context(torch.zeros_like(keys), keys)
    assert kept(KNorm(budget=3), ctx) == [[1, 3, 4]]
    assert KNorm(budget=3, skip_layers=1).select(ctx, (3,)) is None


def test_snapkv_by_hand():
    # One query of the window (slot 5) against keys along one axis: logits are 9 at slot 1, 8 at slot 3, else 0.
    # Unpooled the best context entry is 1, then 3; a max pool of 3 lifts slots 0 and 2 to slot 1's mass as well.
    keys = torch.tensor([0.0, 9.0, 0.0, 8.0, 0.0, 0.0])[None, None, :, None]
    ctx = context(torch.ones_like(keys), keys, scale=1.0)
    assert kept(SnapKV(budget=2, window=1, kernel=1), ctx) == [[1, 5]]
    assert kept(SnapKV(budget=3, window=1, kernel=1), ctx) == [[1, 3, 5]]
    assert kept(SnapKV(budget=4, window=1, kernel=3, pooling="max"), ctx) == [[0, 1, 2, 5]]


def test_snapkv_shares_a_group_or_keeps_one_set_per_query_head():
    # Head 0 looks for slot 1 (mass 0.91 against 0.05 elsewhere), head 1 weakly for slot 2: the group keeps slot 1.
    keys = torch.eye(4)[None, None]
    query = torch.stack([4 * torch.eye(4)[1].expand(4, 4), 2 * torch.eye(4)[2].expand(4, 4)])[None]
    ctx = context(query, keys, scale=1.0)
    assert kept(SnapKV(budget=2, window=1, kernel=1), ctx) == [[1, 3]]
    assert kept(SnapKV(budget=2, window=1, kernel=1, per_query_head=True), ctx) == [[1, 3], [2, 3]]


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("avg", [[2, 3, 8, 9, 10, 11], [8, 9, 10, 11, 14, 15]]),
        ("max", [[4, 8, 9, 10, 11, 12], [7, 8, 9, 10, 11, 12]]),
    ],
)
def test_golden_retention_and_propagation(pooling, expected):
    ctx = context(**GOLDEN, layer_idx=1)
    window = [20, 21, 22, 23]
    assert kept(SnapKV(budget=10, window=4, kernel=3, pooling=pooling), ctx) == [each + window for each in expected]
    chosen = TSP(rate=10, layer=1, window=4, kernel=3, pooling=pooling).select(ctx)
    assert chosen.indices.tolist() == [[7, 8, 9, 10, 11, 12, *window]]


def slow_scores(query, keys, scale, window, kernel, pooling):
    """[Hq][M] pooled window mass, from the definition, plain Python over lists."""
    heads, length = keys.shape[0], keys.shape[1]
    context_length, out = length - window, []
    for head in range(query.shape[0]):
        mass = torch.zeros(length, dtype=torch.float64)
        for w in range(window):
            seen = context_length + w + 1
            logits = keys[head * heads // query.shape[0], :seen].double() @ query[head, context_length + w].double()
            mass[:seen] += (logits * scale).softmax(0)
        mass, pooled = mass[:context_length].tolist(), []
        for j in range(context_length):
            near = mass[max(0, j - kernel // 2) : j + kernel // 2 + 1]
            pooled.append(max(near) if pooling == "max" else sum(near) / kernel)
        out.append(pooled)
    return out


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8], ids=lambda g: f"G{g}")
@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_snapkv_and_tsp_equal_the_slow_reference_in_padded_batches(groups, pooling):
    torch.manual_seed(groups)
    heads, length, window, kernel, padding = 2, 63, 5, 7, [0, 17]
    query = torch.randn(2, heads * groups, length, 16, dtype=torch.float64)
    keys = torch.randn(2, heads, length, 16, dtype=torch.float64)
    ctx = context(query, keys, padding=padding)
    evictor = SnapKV(budget="30%", window=window, kernel=kernel, pooling=pooling)
    tsp = TSP(rate=0.4, layer=0, window=window, kernel=kernel, pooling=pooling).select(ctx)
    for row, pad in enumerate(padding):
        true = length - pad
        scores = slow_scores(query[row, :, pad:], keys[row, :, pad:], ctx.scale, window, kernel, pooling)
        tail = list(range(length - window, length))
        for head, ours in enumerate(kept(evictor, ctx, row)):
            group = scores[head * groups : (head + 1) * groups]
            shared = [sum(column) for column in zip(*group, strict=True)]
            assert ours == [j + pad for j in best(shared, int(true * 0.3) - window)] + tail
        saliency = [sum(column) for column in zip(*scores, strict=True)]
        assert tsp.lengths[row] == int(true * 0.4)
        ours = tsp.indices[row, -tsp.lengths[row] :].tolist()
        assert ours == [j + pad for j in best(saliency, int(true * 0.4) - window)] + tail


def test_an_automatic_kernel_follows_what_each_row_keeps():
    """A sixth of the entries, odd, from 7 to 95, row by row: evictor and propagator alike."""
    torch.manual_seed(1)
    query, keys = (torch.randn(2, 2, 400, 8, dtype=torch.float64) for _ in range(2))
    padded = context(query, keys, padding=[0, 250])
    auto = SnapKV(budget="30%", window=5, kernel="auto")
    tsp = TSP(rate="30%", layer=0, window=5, kernel="auto")
    chosen = tsp.select(padded)
    for row, (pad, kernel) in enumerate([(0, 21), (250, 7)]):
        alone = context(query[row : row + 1, :, pad:], keys[row : row + 1, :, pad:])
        fixed = SnapKV(budget="30%", window=5, kernel=kernel)
        expected = [[slot + pad for slot in head] for head in kept(fixed, alone)]
        assert kept(auto, padded, row) == expected != kept(SnapKV(budget="30%", window=5, kernel=13), padded, row)
        wanted = TSP(rate="30%", layer=0, window=5, kernel=kernel).select(alone)
        ours = chosen.indices[row, -chosen.lengths[row] :]
        assert (ours - pad).tolist() == wanted.indices[0].tolist()
    assert [width("auto", (each,)) for each in (1, 60, 90, 96, 400, 1000)] == [7, 11, 15, 17, 67, 95]
    assert width("auto", (60, 61)) == 11 and width("auto", (60, 400)) == (11, 67) and width(9, (400, 10)) == 9


def test_budgets_below_the_window_are_refused_and_ratios_raised():
    with pytest.raises(PlanError, match="8 entries is too small, at least 33"):
        SnapKV(budget=8)
    with pytest.raises(PlanError, match="at least 5"):
        StreamingLLM(budget=4)
    assert SnapKV(budget=33).budget.tokens == 33
    ctx = context(**GOLDEN)
    assert len(kept(SnapKV(budget="10%", window=4, kernel=3), ctx)[0]) == 5


def test_nothing_is_dropped_when_the_budget_covers_the_prompt():
    ctx = context(**GOLDEN)
    assert SnapKV(budget=24, window=4).select(ctx, (24,)) is None
    assert TSP(rate=24, layer=1).select(ctx) is None


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": 4},
        {"kernel": 0},
        {"kernel": "wide"},
        {"window": 0},
        {"window": 2.5},
        {"pooling": "median"},
        {"skip_layers": -1},
    ],
)
def test_bad_parameters_are_named(options):
    with pytest.raises(PlanError, match=next(iter(options))):
        SnapKV(budget=100, **options)


@pytest.fixture(scope="module")
def llama():
    return tiny_model()


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(1, 100, seed=3)


def run(model, ids, **parameters):
    with kvsieve.attach(
        model, kvsieve.plan("fastkv", **{"tsp_layer": 1, "window": 4, "paper": True, **parameters})
    ) as sieve:
        return sieve.generate(
            ids, max_new_tokens=3, do_sample=False, eos_token_id=None, return_dict_in_generate=True, output_logits=True
        )


def columns(result, layer, head=0):
    """What a layer kept of the prompt."""
    return result.cache.layers[layer].store.index[0, head, : result.stats.kv_entries[layer]].tolist()


def test_fastkv_propagates_and_retains_independently(llama, ids):
    result = run(llama, ids, budget="10%", tsp_rate=0.25)
    assert result.stats.applied and result.stats.deep_tokens == 25 and result.stats.kv_entries == [10] * 4
    wide = run(llama, ids, budget="100%", tsp_rate=0.25)
    assert wide.stats.kv_entries == [100, 100, 25, 25]
    propagated = set(columns(wide, 2))
    assert len(propagated) == 25 and columns(wide, 2) == sorted(propagated) == columns(wide, 3, head=1)
    for layer in range(4):
        for head in range(2):
            assert columns(result, layer, head)[-4:] == [96, 97, 98, 99]
    assert set(columns(result, 2)) | set(columns(result, 3)) <= propagated
    # The first token is chosen before anything is evicted; later ones are not.
    assert torch.equal(result.output.logits[0], wide.output.logits[0])
    assert not torch.equal(result.output.logits[1], wide.output.logits[1])


def test_the_early_layers_do_not_depend_on_the_tsp_rate(llama, ids):
    few, many = run(llama, ids, budget="10%", tsp_rate=0.2), run(llama, ids, budget="10%", tsp_rate=0.9)
    assert [columns(few, layer) for layer in (0, 1)] == [columns(many, layer) for layer in (0, 1)]


def test_propagating_everything_is_snapkv(llama, ids):
    fastkv = run(llama, ids, budget="10%", tsp_rate=1.0)
    plan = kvsieve.plan("snapkv", budget="10%", window=4, kernel=7, pooling="max")
    with kvsieve.attach(llama, plan) as sieve:
        snapkv = sieve.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert torch.equal(fastkv.sequences, snapkv.sequences)
    assert [columns(fastkv, layer) for layer in range(4)] == [columns(snapkv, layer) for layer in range(4)]
    assert not fastkv.stats.applied and "every token went through" in fastkv.stats.notes[0]


def test_dropped_hidden_states_count_before_the_source_and_not_after(llama, ids):
    """Noise on tokens that do not go on changes nothing behind the source layer, and everything before it."""
    chosen = set(columns(run(llama, ids, budget="100%", tsp_rate=0.25), 2))
    dropped = [column for column in range(100) if column not in chosen]

    def noise(module, args, output):
        if output.shape[1] == 100:
            output = output.clone()
            output[:, dropped] += 1.0
        return output

    plain = run(llama, ids, tsp_rate=0.25).output.logits[0]
    for layer, changes in ((1, False), (0, True)):
        handle = llama.model.layers[layer].register_forward_hook(noise)
        try:
            noisy = run(llama, ids, tsp_rate=0.25).output.logits[0]
        finally:
            handle.remove()
        assert torch.equal(noisy, plain) != changes


def test_a_tsp_layer_outside_the_model_is_refused(llama):
    for layer in (3, 30):
        with pytest.raises(PlanError, match=f"TSP layer {layer} is outside the model: it has 4 layers"):
            with kvsieve.attach(llama, kvsieve.plan("fastkv", tsp_layer=layer)):
                pass


def test_leaving_the_tsp_layer_out_warns(llama):
    with pytest.warns(kvsieve.KvsieveWarning, match="no tsp_layer given: using layer 1 of 4"):
        with kvsieve.attach(llama, kvsieve.plan("fastkv", paper=True)):
            pass
    with warnings.catch_warnings(action="error"), kvsieve.attach(llama, kvsieve.plan("fastkv")) as sieve:
        assert sieve.plan.propagate.source(sieve.num_layers) == 2, "a layer that comes with the model"


def test_a_prompt_within_the_window_is_said_not_to_be_reduced(llama, ids):
    with pytest.warns(kvsieve.KvsieveWarning, match="the prompt has 4 tokens"):
        stats = run(llama, ids[:, :4], budget="50%").stats
    assert not stats.applied and stats.kv_entries == [4] * 4 and len(stats.notes) == 3
