"""Models that cap logits or have learned sinks: the same as transformers' eager attention, whatever a plan does."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from transformers import logging

import kvsieve
from attend import AttentionTerms, dense_attention, masked_attention
from eager import exact_eager
from interpreted import interpreted
from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.forward.attention import _check_sinks
from kvsieve.hf.model.support import why_unsupported
from kvsieve.methods import HSA, ExactTopK, Quest, SparQ
from kvsieve.planning.roles import Reader
from small import recorder_stand_in
from tiny import greedy, padded_prompt
from tiny_models import available, build

logging.set_verbosity_error()

KNOWN = [family.name for family in available()]
CAPPED = ["gemma2", "vaultgemma"]
SINKS = [name for name in ("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "flint") if name in KNOWN]
FULL = {"layer_types": ["full_attention"] * 4}
PADDING = 7
GENERATE = greedy(max_new_tokens=6, return_dict_in_generate=True, output_logits=True)
PLANS = {
    "snapkv": {"budget": 16, "window": 4},
    "adakv": {"budget": 16, "window": 4},
    "h2o": {"budget": 16, "every": 1},
    "fastkv": {"budget": 16, "window": 4, "tsp_layer": 1, "tsp_rate": 0.5},
    "pyramidinfer": {"min_context": 8},
    "exacttopk": {"budget": 16},
    "quest": {"budget": 16},
    "sparq": {"budget": 16},
    "rocketkv": {"budget": 16, "window": 4, "kernel": 5},
    "perturn": {"budget": 20, "base": "tova"},
}
RECORDED = ("full", "snapkv", "adakv", "quest", "sparq", "rocketkv", "perturn")


def built(name, dtype=torch.float64, **changes):
    """The family's tiny model, with sinks of some size, and logits that a cap bends."""
    model = build(name, dtype=dtype, **changes)
    torch.manual_seed(5)
    for called, weight in model.named_parameters():
        if called.endswith(".sinks"):
            weight.data.normal_()
    return model


@pytest.fixture(scope="module", params=CAPPED[:1] + SINKS[:1])
def model(request):
    """A capped one, and one with sinks, whose layers all store everything."""
    return built(request.param, **FULL)


@pytest.fixture(autouse=True)
def eager():
    with exact_eager():
        yield


def prompts():
    return padded_prompt(48, PADDING, seed=0)


def plan_of(name):
    return kvsieve.plan(name, **PLANS.get(name, {}))


def answer(model, plan, ids, mask=None, decode="eager", **options):
    with kvsieve.attach(model, plan, decode=decode) as sieve:
        result = sieve.generate(ids, mask, **GENERATE, **options)
    assert result.stats.applied or plan.name == "full"
    return result, torch.stack(result.output.logits)


@pytest.mark.parametrize("name", CAPPED + SINKS)
def test_each_layers_attention_is_transformers_eager_attention(name, monkeypatch):
    """Windows included: the masks are those that transformers made."""
    model, seen = built(name, torch.float32), []
    module = sys.modules[type(model).__module__]
    eager = module.eager_attention_forward

    def watching(layer, query, key, value, attention_mask, scaling=None, **kwargs):
        out = eager(layer, query, key, value, attention_mask, scaling=scaling, **kwargs)
        seen.append((query, key, value, attention_mask == 0, scaling, kwargs, out[0]))
        return out

    monkeypatch.setattr(module, "eager_attention_forward", watching)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(prompts()[0])
    found = []
    for query, key, value, mask, scale, kwargs, wanted in seen:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        terms = AttentionTerms(kwargs.get("softcap"), kwargs.get("s_aux"))
        found.append(any(each is not None for each in terms))
        if not found[-1]:
            continue
        ours = masked_attention(query, key, value, mask, scale=scale, terms=terms).transpose(1, 2)
        torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-6)
        if mask[0, 0, -1].all():
            ours = dense_attention(query, key, value, scale=scale, terms=terms).transpose(1, 2)
            torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-6)
        without = masked_attention(query, key, value, mask, scale=scale).transpose(1, 2)
        assert (without - wanted).abs().max() > 1e-2, "its terms change what it attends to"
    assert len(seen) == 4 and any(found)


@pytest.mark.parametrize("windows", [False, True], ids=["", "windows"])
@pytest.mark.parametrize("name", CAPPED + SINKS)
def test_models_answer_as_they_do_themselves(name, windows):
    """With every second layer sliding, and with none; MiMo has sinks in those that slide."""
    ids, mask = prompts()
    model = built(name, **({} if windows else FULL))
    reference = model.generate(ids, attention_mask=mask, **GENERATE)
    wanted = torch.stack(reference.logits)
    assert wanted.isfinite().all()
    full = kvsieve.plan("full")
    # Granite takes a sigmoid in float32.
    close = 1e-4 if name.startswith("granite") else 1e-5
    for options in ({}, {"chunk": 16}):
        result, logits = answer(model, full, ids, mask, **options)
        torch.testing.assert_close(logits, wanted, atol=close, rtol=0)
        assert torch.equal(result.sequences, reference.sequences)


@pytest.mark.parametrize("name", PLANS)
def test_padded_rows_and_chunks(model, name):
    """A padded row equals the row alone, and chunks one shot, scores included."""
    ids, mask = prompts()
    both, logits = answer(model, plan_of(name), ids, mask)
    alone = answer(model, plan_of(name), ids[1:, PADDING:])[1]
    torch.testing.assert_close(logits[:, 1:], alone, atol=1e-6, rtol=0)
    chunked = answer(model, plan_of(name), ids, mask, chunk=16)[1]
    torch.testing.assert_close(chunked, logits, atol=1e-6, rtol=0)
    assert both.stats.applied


@dataclasses.dataclass(frozen=True)
class Whole(Reader):
    """What a reader chooses when it may choose everything."""

    inner: Reader

    def setting(self, facts):
        return self.inner.setting(facts)

    def reads_all(self, setting, size):
        return False

    def choose(self, asked, kv_rows, state, setting):
        setting = dataclasses.replace(setting, count=kv_rows.size)
        return self.inner.choose(asked, kv_rows, state, setting)


@pytest.mark.parametrize("reader", [ExactTopK(budget=16), SparQ(budget=16), Quest(budget=16), HSA(budget=16)], ids=repr)
def test_reading_everything_is_dense(model, reader):
    ids, mask = prompts()
    wanted = answer(model, kvsieve.plan("full"), ids, mask)[1]
    ours = answer(model, kvsieve.Plan(read=Whole(reader), name="whole"), ids, mask)[1]
    torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", RECORDED)
def test_fixed_shapes(model, name):
    ids, mask = prompts()
    wanted = answer(model, plan_of(name), ids, mask)[1]
    with recorder_stand_in():
        ours, logits = answer(model, plan_of(name), ids, mask, decode="graph")
    assert ours.cache.turn.record.passes.fixed > 0
    torch.testing.assert_close(logits, wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize("family, name", [("gemma2", "full"), ("gemma2", "adakv"), ("gpt_oss", "sparq")])
def test_fixed_shapes_with_kernels(family, name):
    """What a GPU would run, under Triton's interpreter."""
    model = built(family, torch.float32, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    ids, mask = (part[:, -24:] for part in prompts())
    wanted, logits = answer(model, plan_of(name), ids, mask)
    with recorder_stand_in(), interpreted():
        ours, same = answer(model, plan_of(name), ids, mask, decode="graph")
    assert ours.cache.turn.record.passes.fixed > 0 and torch.equal(ours.sequences, wanted.sequences)
    torch.testing.assert_close(same, logits, atol=1e-4, rtol=0)


def test_refusals():
    reason = why_unsupported(build("gemma2", **FULL), kvsieve.plan("expected_attention"))
    assert reason is not None and "capped, here at 2.0" in reason
    assert why_unsupported(build("granite_swa", **FULL), kvsieve.plan("expected_attention")) is None
    query = torch.zeros(1, 4, 1, 8)
    with pytest.raises(UnsupportedModelError, match=r"s_aux= of shape \(3,\).*4 query heads"):
        _check_sinks("layer 0", query, torch.zeros(3))
