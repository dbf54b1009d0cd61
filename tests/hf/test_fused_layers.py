"""Decoder layers around whose attention two compiled calls compute: tokens as the layers' own code has them."""

from __future__ import annotations

import dataclasses
import shutil
from copy import deepcopy

import pytest
import torch
from torch import nn

import kvsieve
from in_blocks import quantized
from kvsieve.decoding.loop import feed_rows
from kvsieve.hf.compat import CACHE
from kvsieve.hf.decode import token_layers
from kvsieve.hf.decode.fused_layers import FusedLayers
from kvsieve.hf.decode.fused_modules import FusedModules
from kvsieve.hf.decode.linears import Linears
from kvsieve.kernels.cpu.decoder_layer import DecoderLayer
from kvsieve.planning.drafts import as_draft
from tiny import greedy
from tiny_models import build

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="kernels are compiled, and there is no gcc")
PROMPT = torch.randint(3, 90, (1, 60), generator=torch.Generator().manual_seed(0))
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.06}


@pytest.fixture
def calls(monkeypatch):
    """Tokens of each layer that is computed by compiled calls; one for all layers counts for each."""
    found = []
    whole = token_layers.through_layers
    own = DecoderLayer.after_attention
    monkeypatch.setattr(
        DecoderLayer, "after_attention", lambda self, one, x: found.append(x.shape[1]) or own(self, one, x)
    )
    monkeypatch.setattr(
        token_layers,
        "through_layers",
        lambda x, *given: found.extend([x.shape[1]] * len(given[2][0].layers)) or whole(x, *given),
    )
    return found


def layers_of(decoder):
    return FusedLayers(decoder, FusedModules(decoder).replaced, Linears(decoder).by_layer)


def scores(model, decode, ids=PROMPT, plan=None, **options):
    with kvsieve.attach(model, plan or kvsieve.plan("full"), decode=decode) as sieve:
        out = sieve.generate(
            ids, output_logits=True, return_dict_in_generate=True, **greedy(max_new_tokens=6), **options
        )
    return torch.stack(out.output.logits).float()


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_layers_code(family, dtype, calls):
    model = build(family, dtype=dtype)
    plan = kvsieve.plan("snapkv", budget=40, window=4)
    wanted = scores(model, "eager", plan=plan)
    assert not calls
    found = scores(model, "fused", plan=plan)
    # The comparison when it is attached, and five tokens through four layers.
    assert calls == [2, *[1] * 20]
    torch.testing.assert_close(found, wanted, atol=BOUND[dtype], rtol=BOUND[dtype])


def test_hooks_of_layers_see_the_models_own_passes_only(calls):
    model = build("llama")
    seen = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs.keys()), with_kwargs=True)
    scores(model, "fused")
    # The comparison when it is attached, which has no cache, is none of them; `kvsieve bench` counts work by hooks.
    assert calls[0] == 2 and seen and all(CACHE in kwargs for kwargs in seen)


def test_weights_in_blocks_are_read_by_the_same_calls(calls):
    blocks, plain = quantized(build("qwen2"))
    torch.testing.assert_close(scores(blocks, "fused"), scores(plain, "eager"), atol=1e-4, rtol=1e-4)
    assert calls == [2, *[1] * 20]


def test_padded_rows_and_several_tokens_are(calls):
    model = build("llama")
    ids = torch.cat([PROMPT, PROMPT.flip(1)])
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    wanted = scores(model, "eager", ids, attention_mask=mask)
    torch.testing.assert_close(scores(model, "fused", ids, attention_mask=mask), wanted, atol=1e-4, rtol=1e-4)
    draft = dataclasses.replace(as_draft(deepcopy(model)), tokens=3, adapt=False)
    calls.clear()
    found = scores(model, "fused", ids[:1], draft=draft)
    torch.testing.assert_close(found, scores(model, "eager", ids[:1]), atol=1e-4, rtol=1e-4)
    # Layers of passes over the last token and a draft.
    assert calls.count(2) >= 8


def test_rows_of_several_caches_are(calls):
    model = build("llama")
    logits = {}
    for decode in ("eager", "fused"):
        with kvsieve.attach(model, kvsieve.plan("full"), decode=decode) as sieve:
            caches = [sieve.prefill(PROMPT[:, :size]) for size in (30, 50)]
            calls.clear()
            fed = feed_rows(sieve, caches, [torch.tensor([[5]]), torch.tensor([[7, 8]])])
        logits[decode] = [part for part, _ in fed]
    assert calls == [3] * 4
    for found, wanted in zip(logits["fused"], logits["eager"], strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def look_at(layer):
    layer.mlp.up_proj.register_forward_hook(lambda *_: None)


def double(layer):
    own = layer.mlp.forward
    layer.mlp.forward = lambda x: 2 * own(x)


def exchange(layer):
    layer.self_attn.v_proj = nn.Sequential(layer.self_attn.v_proj, nn.Identity())


def write(layer):
    layer.mlp.down_proj.weight.data.mul_(2)
    layer.input_layernorm.weight = nn.Parameter(2 * layer.input_layernorm.weight)


@pytest.mark.parametrize(("change", "computed"), [(look_at, 15), (double, 15), (exchange, 15), (write, 20)])
def test_what_is_done_to_a_layer_later_has_its_effect(change, computed, calls):
    model = build("llama")
    other = deepcopy(model)
    change(other.model.layers[1])
    wanted = scores(other, "eager")
    with kvsieve.attach(model, kvsieve.plan("full"), decode="fused") as sieve, torch.no_grad():
        change(model.model.layers[1])
        calls.clear()
        out = sieve.generate(PROMPT, output_logits=True, return_dict_in_generate=True, **greedy(max_new_tokens=6))
    assert len(calls) == computed
    torch.testing.assert_close(torch.stack(out.output.logits), wanted, atol=1e-4, rtol=1e-4)


def test_layers_of_other_wiring_keep_their_code():
    model = build("llama")
    assert layers_of(model.model).count == 4
    for layer in model.model.layers[:2]:
        layer.__class__ = type("Parallel", (type(layer),), {"forward": parallel})
    attention = model.model.layers[2].self_attn
    attention.__class__ = type("Scaled", (type(attention),), {"scaling": 0.5, "forward": type(attention).forward})
    attention.scaling = 0.5
    assert layers_of(model.model).count == 2


def parallel(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
    given = {"attention_mask": attention_mask, "position_embeddings": position_embeddings, **kwargs}
    attended, _ = self.self_attn(self.input_layernorm(hidden_states), **given)
    return hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))


def test_the_model_is_as_it_was_afterwards():
    model = build("qwen3")
    with kvsieve.attach(model, kvsieve.plan("full"), decode="fused"):
        assert all("forward" in layer.__dict__ for layer in model.model.layers)
    assert not any("forward" in module.__dict__ for module in model.modules())
