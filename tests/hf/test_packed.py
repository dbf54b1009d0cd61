"""decode="packed": linear layers with packed weights while attached, the model as it was afterwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kvsieve
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
        ours = layers(given)
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
    # The output layer is not packed; of the decoder's layers only the prompt's pass comes here.
    assert rows.count(1) == 6 and set(rows) == {80, 1}


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
