"""Log-likelihoods under a plan: what generate itself would have read, for every kind of plan."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import InputError
from kvsieve.lab.eval.loglikelihood import by_context, score, split
from small import fill, longrope_factors
from tiny_models import build

CONTEXT = tuple(torch.randint(2, 120, (60,), generator=torch.Generator().manual_seed(5)).tolist())
OTHER = (7, 9, 11)
LONG = {"max_position_embeddings": 256, "rope_parameters": longrope_factors(64)}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
SCALED = {
    # Its generate reads everything again behind the border.
    "phi3": {"family_name": "phi3", "original_max_position_embeddings": 64, **LONG},
    "llama": {"family_name": "llama", **LONG},
    "dynamic": {"family_name": "llama", "max_position_embeddings": 64, "rope_parameters": DYNAMIC},
}


@pytest.mark.parametrize(
    "plan",
    [
        kvsieve.plan("full"),
        kvsieve.plan("snapkv", budget=16, window=4, kernel=3),
        kvsieve.plan("fastkv", budget="30%", tsp_layer=0, tsp_rate=0.5, window=6, kernel=3),
        kvsieve.plan("gemfilter", budget=20, layer=1),
        kvsieve.plan("lookahead", budget=20, lookahead=4, window=4),
        kvsieve.plan("lagkv", budget=20, sinks=2, lag=4),
        kvsieve.plan("h2o", budget=16),
        kvsieve.plan("quest", budget=16, page=4),
        kvsieve.plan("rocketkv-mt", budget=24, window=4),
    ],
    ids=lambda plan: plan.name,
)
def test_a_continuation_scores_what_generate_gave_it(model, plan):
    ids = torch.tensor([CONTEXT])
    own = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with kvsieve.attach(model, plan) as sieve:
        out = sieve.generate(ids, **own)
    answer = tuple(out.sequences[0, len(CONTEXT) :].tolist())
    chosen = [step[0].log_softmax(-1)[token] for step, token in zip(out.output.logits, answer, strict=True)]
    # The answer beside another one, on one reading: neither leaves a trace in the other.
    scored = score(model, plan, CONTEXT, [answer, OTHER, answer[:1], answer])
    assert [greedy for _, greedy in scored.scores] == [True, False, True, True]
    assert scored.scores[0][0] == pytest.approx(float(sum(chosen)), abs=1e-4)
    assert scored.scores[2][0] == pytest.approx(float(chosen[0]), abs=1e-4) and scored.scores[0] == scored.scores[3]
    assert (scored.applied, scored.prompt_tokens) == (out.stats.applied, out.stats.prompt_tokens)
    assert scored.kv_share == pytest.approx(out.stats.kv_share, abs=1e-4)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    "plan",
    [
        kvsieve.plan("snapkv", budget="20%", window=8, kernel=3),
        kvsieve.plan("fastkv", budget="20%", tsp_layer=1, window=8, kernel=3),
        kvsieve.plan("asl", budget="20%", observed=2, first=1, window=8, kernel=3),
        kvsieve.plan("gemfilter", budget=20, layer=1),
        kvsieve.plan("lagkv", budget="20%"),
        kvsieve.plan("h2o", budget=20),
        kvsieve.plan("quest", budget="20%"),
        kvsieve.plan("lookahead", budget="20%", lookahead=4, window=4),
    ],
    ids=lambda plan: plan.name,
)
@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
def test_a_context_shorter_than_windows_is_read_whole(model, plan, tokens):
    """One token is what the harness makes of an empty context."""
    full = score(model, kvsieve.plan("full"), CONTEXT[:tokens], [OTHER])
    scored = score(model, plan, CONTEXT[:tokens], [OTHER])
    assert scored.scores[0] == (pytest.approx(full.scores[0][0], abs=1e-6), full.scores[0][1])
    assert not scored.applied and scored.notes and scored.kv_share == 1


def test_a_text_beyond_the_context_is_cut_on_the_left():
    assert split(CONTEXT, OTHER, 100) == (CONTEXT, OTHER)
    assert split(CONTEXT, OTHER, 10) == (CONTEXT[-8:], OTHER)
    assert split(CONTEXT, OTHER, 3) == (CONTEXT[-1:], OTHER)
    for wrong in ((), OTHER):
        with pytest.raises(InputError, match=f"1 to 2 tokens .*got {len(wrong)}"):
            split(CONTEXT, wrong, 2)


def test_pairs_are_grouped_by_context():
    pairs = [((1, 2), (3,)), ((1, 2, 3), (4,)), ((1, 2), (5,))]
    assert list(by_context(pairs)) == [((1, 2, 3), [1]), ((1, 2), [0, 2])]


@pytest.mark.parametrize("name", ["full", "snapkv"])
@pytest.mark.parametrize("family", SCALED)
def test_a_continuation_that_changes_the_rotary_tables_scores_what_generate_gave_it(family, name):
    """Tables of a prompt of 60 tokens hold up to 64 (longrope), or for one length alone (dynamic)."""
    model = fill(build(dtype=torch.float64, **SCALED[family]))
    plan = kvsieve.plan("full") if name == "full" else kvsieve.plan("snapkv", budget=30, window=4, kernel=3, paper=True)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with kvsieve.attach(model, plan) as sieve:
        out = sieve.generate(torch.tensor([CONTEXT]), eos_token_id=None, pad_token_id=0, **options)
    answer = tuple(out.sequences[0, len(CONTEXT) :].tolist())
    chosen = [step[0].log_softmax(-1)[token] for step, token in zip(out.output.logits, answer, strict=True)]
    scored = score(model, plan, CONTEXT, [answer, answer[:3]]).scores
    assert scored[0] == (pytest.approx(float(sum(chosen)), abs=1e-4), True)
    assert scored[1] == (pytest.approx(float(sum(chosen[:3])), abs=1e-4), True)
