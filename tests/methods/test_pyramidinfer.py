"""PyramidInfer: which tokens each layer passes on, and that rows, chunks and turns do not disturb each other."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.methods import PyramidInfer, pyramidinfer
from kvsieve.planning.roles import Propagator
from layers import context
from tiny import greedy, tiny_model, tiny_prompt
from toy_words import WORDS, word_tokenizer

LAYERS = 6
GREEDY = greedy(max_new_tokens=6)


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(2, 90, seed=3)


def pyramid(**given):
    return kvsieve.plan(
        "pyramidinfer", **{"rate": 0.4, "recent": 0.1, "min_context": 8, "sinks": 2, "paper": True, **given}
    )


def run(model, plan, *inputs, **options):
    with kvsieve.attach(model, plan) as sieve:
        return sieve.generate(*inputs, **{**GREEDY, "return_dict_in_generate": True, "output_logits": True, **options})


def prompt_columns(result, length, row=0):
    """Per layer, the columns of the prompt that are stored."""
    columns = []
    for layer in result.cache.sieve_layers.values():
        index = layer.store.index[row, 0]
        real = index >= 0 if layer.store.valid is None else layer.store.valid[row, 0]
        columns.append(index[real & (index < length)].tolist())
    return columns


def sizes(part, length, layers):
    """Tokens that come to each layer, from the definition."""
    tail, out = math.floor(length * part.recent) + 1, [length]
    floor = min(part.min_context, length - tail)
    for layer in range(layers - 1):
        if part.strategy == "cosine":
            share = (1 - part.rate) * (math.cos(math.pi * layer / layers) + 1) / 2 + part.rate
        else:
            share = 1 - (1 - part.rate) * layer / layers
        behind = out[-1] - tail
        kept = math.floor(behind * share) if layer % part.interval == 0 and share < 1 else behind
        out.append(tail + kept if behind > floor and kept > floor else out[-1])
    return out


@pytest.mark.parametrize(
    ("rate", "recent", "layers", "average"),
    [
        (0.7, 0.2, 32, 0.596),
        (0.75, 0.2, 36, 0.603),
        (0.3, 0.2, 32, 0.497),
        (0.01, 0.01, 32, 0.34),
        (0.9, 0.2, 32, 0.767),
    ],
)
def test_the_published_sizes(rate, recent, layers, average):
    part, length = PyramidInfer(rate=rate, recent=recent), 16000
    got = [length]
    for layer in range(layers - 1):
        got.append(part.passed_on(got[-1], part.queries(length), part.share(layer, layers)))
    assert got == sizes(part, length, layers)
    assert sum(got) / length / layers == pytest.approx(average, abs=0.003)


def test_by_hand():
    # Ten tokens, R = 2: a tail of three, context of seven, one sink. Layer 1 of 4 passes on floor(7 * s) of it.
    keys = torch.zeros(1, 1, 10, 2)
    keys[0, 0, 3, 0], keys[0, 0, 5, 0], keys[0, 0, 6, 1] = 3.0, 2.0, 2.5
    query = torch.zeros(1, 1, 10, 2)
    query[..., 0] = 1.0
    part = PyramidInfer(rate=0.2, recent=0.25, min_context=2, sinks=1)
    # (1 - 0.2) * (cos(pi / 4) + 1) / 2 + 0.2 = 0.883: six stay, and slot 6 is the last of the equals that goes.
    ctx = context(query, keys, scale=1.0, layer_idx=1)
    assert part.select(ctx).indices.tolist() == [[0, 1, 2, 3, 4, 5, 7, 8, 9]]
    # Layer 2: half of (0.8) + 0.2 = 0.6: four stay, the sink, 3, 5 and the first of the equals.
    ctx.layer_idx = 2
    assert part.select(ctx).indices.tolist() == [[0, 1, 3, 5, 7, 8, 9]]
    # With the last query looking the other way and much the heaviest, slot 6 is better than 5.
    ctx.query[0, 0, 9] = torch.tensor([0.0, 1.0])
    assert PyramidInfer(**{**vars(part), "distance_weight": 9.0}).select(ctx).indices.tolist() == [
        [0, 3, 5, 6, 7, 8, 9]
    ]
    for layer in (0, 3):
        ctx.layer_idx = layer
        assert part.select(ctx) is None


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8], ids=lambda g: f"G{g}")
def test_equals_the_slow_reference_in_padded_batches(groups, monkeypatch):
    torch.manual_seed(groups)
    length, padding, heads, layer = 63, [0, 17], 2, 2
    query = torch.randn(2, heads * groups, length, 8, dtype=torch.float64)
    keys = torch.randn(2, heads, length, 8, dtype=torch.float64)
    part = PyramidInfer(rate=0.3, recent=0.25, min_context=5, sinks=3, distance_weight=2.0)
    selection = part.select(context(query, keys, padding=padding, layer_idx=layer))
    # Blocks of queries change nothing.
    monkeypatch.setattr(pyramidinfer, "_BLOCK_ELEMENTS", 2 * heads * groups * length * 2)
    again = part.select(context(query, keys, padding=padding, layer_idx=layer))
    assert torch.equal(again.indices, selection.indices)
    for row, pad in enumerate(padding):
        own, tail = length - pad, int((length - pad) * 0.25) + 1
        behind = own - tail
        scores = [0.0] * behind
        for head in range(heads * groups):
            for number, place in enumerate(range(behind, own)):
                logits = keys[row, head // groups, pad : pad + place + 1] @ query[row, head, pad + place] * 8**-0.5
                weight = 1 + number / (tail - 1)
                for column, mass in enumerate(logits.softmax(0)[:behind].tolist()):
                    scores[column] += weight * mass
        scores[:3] = [math.inf] * 3
        count = int(behind * ((1 - 0.3) * (math.cos(math.pi * layer / 4) + 1) / 2 + 0.3))
        best = sorted(sorted(range(behind), key=lambda j: (-scores[j], j))[:count])
        wanted = [pad + column for column in [*best, *range(behind, own)]]
        assert selection.lengths[row] == len(wanted)
        assert selection.indices[row, -len(wanted) :].tolist() == wanted


@pytest.mark.parametrize("given", [{}, {"strategy": "linear"}, {"interval": 2}, {"recent": 0.3, "sinks": 0}], ids=str)
def test_token_sets_are_nested_and_counted(model, ids, given):
    plan = pyramid(**given)
    result = run(model, plan, ids[:1])
    expected = sizes(plan.propagate, 90, LAYERS)
    assert len(set(expected)) > 2
    assert result.stats.kv_entries == expected == result.stats.report["layer_tokens"]
    assert result.stats.applied and result.stats.deep_tokens == expected[-1]
    columns = prompt_columns(result, 90)
    tail = int(90 * plan.propagate.recent) + 1
    for outer, inner in itertools.pairwise(columns):
        assert set(inner) <= set(outer)
    assert set(columns[-1]) >= {*range(plan.propagate.sinks), *range(90 - tail, 90)}
    assert [len(each) for each in columns] == expected


def test_a_layer_sees_the_next_tokens_only(model, ids):
    """What goes on is what the layer's own hidden states say: a slow run by hand of the first drops."""
    plan = pyramid()
    columns = prompt_columns(run(model, plan, ids[:1]), 90)
    shown = {}

    class Look(Propagator):
        window = 1

        def source(self, num_layers):
            return plan.propagate.source(num_layers)

        def select(self, ctx):
            selection = plan.propagate.select(ctx)
            shown[ctx.layer_idx] = (ctx.index[0, 0].tolist(), selection)
            return selection

    with kvsieve.attach(model, kvsieve.Plan(propagate=Look())) as sieve:
        sieve.prefill(ids[:1])
    for layer, (index, selection) in shown.items():
        assert index == columns[layer]
        if selection is not None:
            assert [index[slot] for slot in selection.indices[0].tolist()] == columns[layer + 1]
    assert [layer for layer, (_, selection) in shown.items() if selection is None] == [0, LAYERS - 1]


def test_a_rate_of_one_is_the_full_model(model, ids):
    ours, full = run(model, pyramid(rate=1.0), ids), run(model, kvsieve.plan("full"), ids)
    assert torch.equal(ours.sequences, full.sequences)
    assert all(torch.equal(*pair) for pair in zip(ours.output.logits, full.output.logits, strict=True))
    assert not ours.stats.applied and "every token went through" in ours.stats.notes[0]
    short = run(model, pyramid(min_context=64), ids[:, :70])
    assert not short.stats.applied and short.stats.kv_entries == [70] * LAYERS


@pytest.mark.parametrize("budget", [None, "30%"])
@pytest.mark.parametrize("chunk", [None, 4, 31])
def test_a_padded_row_is_the_row_alone_and_chunks_change_nothing(model, ids, chunk, budget):
    ids, mask = ids.clone(), torch.ones_like(ids)
    ids[1, :23], mask[1, :23] = 0, 0
    given = {"budget": budget, "window": 5, "kernel": 3} if budget else {}
    together = run(model, pyramid(**given), ids, mask, chunk=chunk)
    for row, pad in enumerate((0, 23)):
        alone = run(model, pyramid(**given), ids[row : row + 1, pad:])
        assert torch.equal(together.sequences[row, 90:], alone.sequences[0, 90 - pad :])
        for ours, theirs in zip(together.output.logits, alone.output.logits, strict=True):
            torch.testing.assert_close(ours[row], theirs[0])
        wanted = [[pad + column for column in layer] for layer in prompt_columns(alone, 90 - pad)]
        assert prompt_columns(together, 90, row) == wanted
        if budget is not None:
            assert alone.stats.kv_entries == [int(0.3 * (90 - pad))] * LAYERS


def test_the_last_chunk_holds_the_whole_tail(model, ids):
    plan = pyramid(recent=0.5)
    fed = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda module, args: fed.append(args[0].shape[1]))
    try:
        run(model, plan, ids, chunk=20, max_new_tokens=1)
    finally:
        handle.remove()
    assert plan.queries(90) == 46 and fed == [20, 20, 50]


def test_a_later_turn_drops_of_its_own_tokens(model, ids):
    more = tiny_prompt(1, 80, seed=8)
    plan = pyramid()
    with kvsieve.attach(model, plan) as sieve:
        first = sieve.generate(ids[:1], **GREEDY)
        stored = first.cache.entries()
        talk = torch.cat([first.sequences, more], 1)
        second = sieve.generate(talk, cache=first.cache, **GREEDY)
    # The last token of the first answer is read with the second prompt.
    turn = sizes(plan.propagate, 81, LAYERS)
    assert second.stats.deep_tokens == turn[-1]
    assert second.stats.kv_entries == [before + now for before, now in zip(stored, turn, strict=True)]


def test_an_evaluation_runs_it(model):
    evaluator = Evaluator(model, word_tokenizer(), chunk=16)
    sample = Sample(
        " ".join(WORDS[3 + (7 * i) % 110] for i in range(70)),
        (QuestionAnswer("w5 w6 w7", ("w1",), lambda answer, expected: {"score": 0.0}, 8),),
    )
    prompt = evaluator.prompter.encode(sample).prompt
    plans = [kvsieve.plan("full"), pyramid(), pyramid(budget="30%", window=4)]
    for plan, outcome in zip(plans, evaluator.run(sample, plans, "visible"), strict=True):
        alone = run(model, plan, prompt, torch.ones_like(prompt), max_new_tokens=8).sequences[0, prompt.shape[1] :]
        assert outcome.answers == [evaluator.prompter.answer(alone.tolist())[0]] and outcome.applied


@pytest.mark.parametrize(
    "given",
    [
        {"rate": 0},
        {"rate": 1.1},
        {"recent": 1.0},
        {"recent": -0.1},
        {"strategy": "steep"},
        {"interval": 0},
        {"sinks": -1},
        {"min_context": 1},
        {"distance_weight": 0},
        {"distance_weight": math.nan},
    ],
    ids=str,
)
def test_bad_parameters_are_named(given):
    with pytest.raises(PlanError, match=next(iter(given))):
        pyramid(**given)


def test_plans(model):
    with pytest.raises(PlanError, match=r"drops after layer 5, the model has 6 layers.*1\.\.4"):
        with kvsieve.attach(model, pyramid(interval=5)):
            pass
    plan = pyramid()
    assert plan.acts_once and plan.evict is None and kvsieve.Plan.from_dict(plan.to_dict()) == plan
    assert pyramid(budget=64).evict == kvsieve.methods.SnapKV(budget=64)
