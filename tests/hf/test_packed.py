"""decode="packed": linear layers with packed weights while attached, the model as it was afterwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kvsieve
from kvsieve.hf.decode import packed_choice
from kvsieve.hf.decode.packed_weights import PackedLinears
from kvsieve.models.families import build

PROMPT = torch.arange(3, 83)[None]
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    return build("qwen2", dtype=torch.bfloat16)  # its projections have biases


@pytest.mark.parametrize("tokens", [1, 5, 64, 65])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_packed_layers_compute_what_theirs_do(tokens, bias):
    torch.manual_seed(tokens)
    layers = nn.Sequential(nn.Linear(48, 40, bias=bias), nn.Linear(40, 17, bias=bias)).bfloat16()
    given = torch.randn(1, tokens, 48, dtype=torch.bfloat16)
    packed = PackedLinears(layers)
    with torch.no_grad():
        wanted = layers(given)
        packed.install()
        assert all("forward" in vars(layer) for layer in layers)
        # Nothing is packed before a token is decoded.
        assert torch.equal(layers(given), wanted) and packed.bytes == 0
        packed.pack()
        ours = layers(given)
        assert packed.bytes == sum(layer.weight.nbytes for layer in layers) and packed.seconds > 0
        packed.remove()
    assert not any("forward" in vars(layer) for layer in layers)
    torch.testing.assert_close(ours, wanted, atol=0.02, rtol=0.02)


def test_answers_are_the_models_own(model):
    plan = kvsieve.plan("snapkv", budget=40, window=4)
    scores = {}
    for decode in ("eager", "packed"):
        with kvsieve.attach(model, plan, decode=decode) as sieve:
            result = sieve.generate(PROMPT, output_logits=True, return_dict_in_generate=True, **GREEDY)
        assert result.stats.decoding.engine == decode and result.stats.decoding.reason is None
        scores[decode] = result.output.logits[1].float()
    torch.testing.assert_close(scores["packed"], scores["eager"], atol=0.03, rtol=0.03)


def test_packed_weights_are_what_decodes(model, monkeypatch):
    rows = []
    plain = F.linear

    def watched(given, *args):
        rows.append(given.shape[-2])
        return plain(given, *args)

    monkeypatch.setattr(F, "linear", watched)
    with kvsieve.attach(model, kvsieve.plan("full"), decode="packed") as sieve:
        sieve.generate(PROMPT, **GREEDY)
    # The prompt's pass, and the output layer for its last token.
    assert rows.count(1) == 1 and set(rows) == {80, 1}


def test_statistics_tell_what_packing_costs(model):
    with kvsieve.attach(model, kvsieve.plan("full"), decode="packed") as sieve:
        first, second = (sieve.generate(PROMPT, **GREEDY).stats.decoding for _ in range(2))
        held = sieve.engine.packed_cost[0]
    linears = {module for module in model.modules() if type(module) is nn.Linear}
    assert first.packed_bytes == second.packed_bytes == held == sum(each.weight.nbytes for each in linears)
    assert first.capture_s > 0 and first.packed_s == pytest.approx(first.capture_s, abs=1e-3)
    # Once while a plan is attached.
    assert second.capture_s == 0 and second.packed_s == first.packed_s
    assert sieve.engine.packed_cost[0] == 0


def test_weights_that_change_are_packed_again():
    layer = nn.Linear(48, 40).bfloat16()
    packed, given = PackedLinears(nn.Sequential(layer)), torch.randn(1, 3, 48, dtype=torch.bfloat16)
    with torch.no_grad():
        packed.install()
        packed.pack()
        layer.weight.mul_(-2)
        wanted = F.linear(given, layer.weight, layer.bias)
        torch.testing.assert_close(layer(given), wanted, atol=0.02, rtol=0.02)
    # Gradients come by the plain way.
    layer(given).sum().backward()
    assert layer.weight.grad is not None
    packed.remove()


@pytest.fixture
def large(monkeypatch, tmp_path):
    """Weights of any size matter, nothing is known of this machine, and nothing is fused."""
    monkeypatch.setattr(packed_choice, "fused_or_none", lambda decoder: None)
    monkeypatch.setattr(packed_choice, "_LEAST", 0)
    monkeypatch.setattr(packed_choice, "_KNOWN", {})
    monkeypatch.setenv("KVSIEVE_CACHE", str(tmp_path))


@pytest.mark.parametrize("ratio, engine", [(0.5, "packed"), (0.95, "eager")])
def test_by_default_weights_are_packed_where_it_pays(model, large, monkeypatch, ratio, engine):
    asked = []
    monkeypatch.setattr(packed_choice, "measured_ratio", lambda weights: asked.append(len(weights)) or ratio)
    for _ in range(2):
        with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
            told = sieve.generate(PROMPT, **GREEDY).stats.decoding
        assert (told.engine, told.reason) == (engine, None) and (told.packed_bytes > 0) == (engine == "packed")
        # The file knows it afterwards.
        packed_choice._KNOWN.clear()
    assert len(asked) == 1


def test_by_default_nothing_is_packed_without_need_or_memory(model, large, monkeypatch):
    layers = PackedLinears(model).layers
    monkeypatch.setattr(packed_choice, "free_memory", lambda: 3 * sum(each.weight.nbytes for each in layers))
    assert "free" in packed_choice.why_not_by_default(layers)
    monkeypatch.setattr(packed_choice, "_LEAST", 32 << 20)
    assert "too small" in packed_choice.why_not_by_default(layers)
    other = build("llama", dtype=torch.float32)
    assert packed_choice.packed_by_default(other.model, other.lm_head) is None


def test_what_is_measured_is_a_ratio_of_times():
    weights = [torch.randn(64, 48, dtype=torch.bfloat16) for _ in range(3)]
    assert 0 < packed_choice.measured_ratio(weights) < 1000
    assert packed_choice.free_memory() is None or packed_choice.free_memory() > 0


def test_the_model_is_left_as_it_was(model):
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ZeroDivisionError), kvsieve.attach(model, kvsieve.plan("full"), decode="packed"):
        1 / 0  # noqa: B018
    assert [dict(vars(module)) for module in model.modules()] == before


def test_what_cannot_be_packed_runs_eagerly_and_says_why():
    other = build("llama", dtype=torch.float32)
    with kvsieve.attach(other, kvsieve.plan("full"), decode="packed") as sieve:
        told = sieve.generate(PROMPT, **GREEDY).stats.decoding
    assert told.engine == "eager"
    assert told.reason == "packed weights are for linear layers in bfloat16 on a CPU, found torch.float32 on cpu"
