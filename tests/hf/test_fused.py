"""decode="fused": small operations of decoder layers in one compiled call each, the model as it was afterwards."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

import kvsieve
from kvsieve.errors import KvsieveWarning
from kvsieve.hf.compat import CACHE
from kvsieve.hf.decode import fused_decoder, fused_modules, linears
from kvsieve.hf.decode.fused_modules import FusedModules
from kvsieve.kernels.cpu import build, layers
from tiny import greedy
from tiny_models import build as build_model

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="kernels are compiled, and there is no gcc")
GREEDY = greedy(max_new_tokens=6)
CLOSE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 1e-3, "rtol": 1e-2}}
PROMPT = torch.arange(3, 83)[None]
PAIR = torch.stack([torch.arange(3, 43), torch.arange(5, 45)])


def numbers(*shape, dtype, seed=0):
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 576), (3, 5, 7), (40, 1, 1024)], ids=str)
def test_norms_are_torchs(dtype, shape):
    x, weight = numbers(*shape, dtype=dtype), torch.rand(shape[-1]).to(dtype)
    wide = x.float()
    wanted = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    torch.testing.assert_close(layers.rms_norm(x, weight, 1e-5), wanted, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("count", [1, 100, 9000, 40000])
def test_gates_are_torchs(dtype, count):
    gate, up = numbers(count, dtype=dtype), numbers(count, dtype=dtype, seed=1)
    torch.testing.assert_close(layers.gated_silu(gate, up), F.silu(gate) * up, **CLOSE[dtype])


def test_what_is_no_number_stays_none():
    bad = torch.tensor([float("nan"), 1.0])
    assert layers.gated_silu(bad, bad).isnan().tolist() == [True, False]
    assert layers.rms_norm(bad.bfloat16(), bad.new_ones(2).bfloat16(), 1e-5).isnan().all()


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_positions_are_torchs(dtype, rows):
    x, (cosine, sine) = numbers(2, 4, 3, 16, dtype=dtype).transpose(1, 2), numbers(2, min(rows, 2), 4, 16, dtype=dtype)
    turned = torch.cat((-x[..., 8:], x[..., :8]), -1)
    found = layers.rotate(x, cosine, sine)
    torch.testing.assert_close(found, x * cosine[:, None] + turned * sine[:, None], **CLOSE[dtype])
    assert found.stride() == x.stride()


def test_a_rotation_is_found_while_modules_are_fused():
    with kvsieve.attach(build_model("llama"), kvsieve.plan("full"), decode="fused") as sieve:
        assert sieve.engine.fused[1] and sieve.facts.why_missing(["rotary"], [0, 1]) is None


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
def test_fused_attention_takes_its_cache_by_the_names_that_its_own_does(name):
    model = build_model("llama")
    attention, fused = model.model.layers[0].self_attn, FusedModules(model.get_decoder())
    hidden, tables = torch.randn(1, 3, 64), model.model.rotary_emb(torch.zeros(1), torch.arange(3)[None])
    fused.install()
    cache = DynamicCache(config=model.config)
    attention(hidden, position_embeddings=tables, attention_mask=None, **{name: cache})
    assert "forward" in attention.__dict__ and cache.get_seq_length() == 3


# A norm before attention and one before the MLP of four layers, and the last; Qwen3 has two more for queries and keys.
# Gemma's norms add one to their weights and its gates are GELU; Phi-3 keeps gate and up in one weight.
@pytest.mark.parametrize(
    "family, count", [("llama", 17), ("qwen2", 17), ("qwen3", 25), ("gemma", 4), ("phi3", 9), ("gpt_neox", None)]
)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_only_what_is_known_is_replaced(family, count, dtype):
    decoder = build_model(family, dtype=dtype).get_decoder()
    if count is None:
        with pytest.raises(ValueError, match="none of its modules is one that is known"):
            FusedModules(decoder)
        return
    for part in (each for each in decoder.modules() if type(each).__name__.endswith("RMSNorm")):
        nn.init.uniform_(part.weight, 0.5, 1.5)
    fused = FusedModules(decoder)
    assert fused.count == count
    with torch.no_grad():
        wanted = decoder(PAIR[:, :5]).last_hidden_state
        fused.install()
        found = decoder(PAIR[:, :5]).last_hidden_state
        fused.remove()
        again = decoder(PAIR[:, :5]).last_hidden_state
    assert torch.equal(again, wanted) and not any("forward" in vars(each) for each in decoder.modules())
    bound = {torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(found, wanted, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_prompts_and_tokens_are_computed_by_the_kernels(dtype, monkeypatch):
    model, asked = build_model("qwen2", dtype=dtype), []
    for name in ("rms_norm", "gated_silu", "rotate"):
        own = getattr(layers, name)
        monkeypatch.setattr(
            layers, name, lambda x, *rest, own=own, name=name: asked.append((name, x.shape)) or own(x, *rest)
        )
    scores = {}
    for decode in ("eager", "fused"):
        with kvsieve.attach(model, kvsieve.plan("snapkv", budget=40, window=4), decode=decode) as sieve:
            asked.clear()  # The comparison when it is attached.
            result = sieve.generate(PROMPT, output_logits=True, return_dict_in_generate=True, **GREEDY)
        told = result.stats.decoding
        assert (told.engine, told.reason, told.fused_modules) == (decode, None, 17 if decode == "fused" else 0)
        scores[decode] = torch.stack(result.output.logits).float()
    names = [name for name, shape in asked if shape[-2] > 1]
    # The prompt: four layers, two of whose norms, and the last one's; queries and keys. Tokens: the last norm.
    assert [names.count(name) for name in ("rms_norm", "gated_silu", "rotate")] == [9, 4, 8]
    assert [name for name, shape in asked if shape[-2] == 1] == ["rms_norm"] * 5
    # On AVX2 either is 1.2e-5 from the scores in float64 here.
    bound = {torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(scores["fused"], scores["eager"], atol=bound, rtol=bound)


def test_padded_rows_and_hooks_are_served():
    model, seen = build_model("llama"), []
    mask = torch.ones_like(PAIR)
    mask[0, :7] = 0
    hook = model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda *given: seen.append(given[2].shape[1]))
    found = {}
    for decode in ("eager", "fused"):
        with kvsieve.attach(model, kvsieve.plan("full"), decode=decode) as sieve:
            seen.clear()
            found[decode] = sieve.generate(PAIR, attention_mask=mask, **GREEDY).sequences
        assert seen == [40, 1, 1, 1, 1, 1]
    hook.remove()
    assert torch.equal(found["fused"], found["eager"])


def test_an_mlp_takes_a_prompt_in_parts_unless_somebody_looks(monkeypatch):
    monkeypatch.setattr(fused_modules, "_PART", 16)
    mlp, seen = build_model("llama").get_decoder().layers[0].mlp, []
    own = layers.gated_silu
    monkeypatch.setattr(layers, "gated_silu", lambda gate, up: seen.append(gate.shape[:-1]) or own(gate, up))
    x = torch.randn(2, 19, mlp.gate_proj.in_features, generator=torch.Generator().manual_seed(0))
    forward = fused_modules._gated(mlp)
    with torch.no_grad():
        torch.testing.assert_close(forward(x), mlp(x))
        assert seen == [(16,), (16,), (6,)]
        hook = mlp.up_proj.register_forward_hook(lambda *given: seen.append(given[2].shape[:-1]))
        seen.clear()
        forward(x)
        hook.remove()
    assert seen == [(2, 19), (2, 19)]


def test_gradients_come_by_the_models_own_operations():
    decoder = build_model("llama").get_decoder()
    fused = FusedModules(decoder)
    fused.install()
    decoder(PAIR[:, :5]).last_hidden_state.sum().backward()
    fused.remove()
    assert (
        decoder.layers[0].input_layernorm.weight.grad is not None
        and decoder.layers[0].self_attn.q_proj.weight.grad is not None
    )


def test_by_default_weights_that_matter_are_fused(monkeypatch):
    model = build_model("llama")
    engines = []
    for least in (fused_decoder._LEAST, 0):
        monkeypatch.setattr(fused_decoder, "_LEAST", least)
        with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
            engines.append(sieve.generate(PROMPT, **GREEDY).stats.decoding.engine)
    assert engines == ["eager", "fused"]


@pytest.mark.parametrize(
    "make, reason",
    [
        (
            lambda: build_model("llama", dtype=torch.float16),
            "in float32 or bfloat16 on a CPU, found torch.float16 on cpu",
        ),
        (
            lambda: build_model("llama", dtype=torch.float16),
            "no linear layers with plain weights in float32 or bfloat16",
        ),
    ],
    ids=["operations", "products"],
)
def test_what_cannot_be_fused_runs_eagerly_and_says_why(make, reason):
    with (
        pytest.warns(KvsieveWarning, match=f"decode='fused' computes tokens eagerly here: .*{reason}"),
        kvsieve.attach(make(), kvsieve.plan("full"), decode="fused") as sieve,
    ):
        told = sieve.generate(PROMPT[:, :8], max_new_tokens=3, eos_token_id=None, pad_token_id=0).stats.decoding
    assert told.engine == "eager" and reason in told.reason and told.fused_modules == told.linear_layers == 0


def test_a_family_without_known_operations_has_products():
    with kvsieve.attach(build_model("gpt_neox"), kvsieve.plan("full"), decode="fused") as sieve:
        told = sieve.generate(PROMPT[:, :8], max_new_tokens=3, eos_token_id=None, pad_token_id=0).stats.decoding
    assert (told.engine, told.reason, told.fused_modules, told.linear_layers) == ("fused", None, 0, 17)


def test_without_a_compiler_nothing_is_fused(monkeypatch):
    reason = "there is no C compiler: install gcc"
    for each in (fused_modules, linears):
        monkeypatch.setattr(each.kernel, "built", lambda: build.Library(None, reason))
    decoder = build_model("llama").get_decoder()
    for made in (FusedModules, linears.Linears, fused_decoder.FusedDecoder):
        with pytest.raises(ValueError, match=reason):
            made(decoder)
