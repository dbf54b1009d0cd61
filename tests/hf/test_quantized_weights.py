"""Plans on a model whose weights stay in blocks: what they do on the model with the same weights dequantized."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import kvsieve
from in_blocks import quantized
from kvsieve.errors import KvsieveError
from kvsieve.hf.decode import fused_modules
from kvsieve.hf.decode.fused_modules import FusedModules
from kvsieve.hf.forward.pieces import rows_are_alone
from kvsieve.kernels.cpu.quantized import QuantizedMatrix
from kvsieve.models.quantized import QuantizedLinear, weight_bytes
from kvsieve.planning.drafts import as_draft
from tiny_models import build

pytest.importorskip("gguf")

PLANS = {
    "full": {},
    "snapkv": {"budget": 40},
    "fastkv": {"budget": 40},
    "criticalkv": {"budget": 40},
    "lagkv": {"budget": 60},
    "rocketkv": {"budget": 40},
    "h2o": {"budget": 40},
}


@pytest.fixture(scope="module", params=["Q8_0", "BF16"])
def pair(request):
    return quantized(build("llama", num_hidden_layers=3), request.param)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 90, (1, 90), generator=torch.Generator().manual_seed(0))


def answer(model, plan, ids, **options):
    with kvsieve.attach(model, plan) as sieve:
        return sieve.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, **options)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_gives_the_tokens_of_dequantized_weights(pair, ids, name):
    found, wanted = (answer(model, kvsieve.plan(name, **PLANS[name]), ids) for model in pair)
    assert found.sequences.tolist() == wanted.sequences.tolist()
    assert found.stats.kv_entries == wanted.stats.kv_entries


@pytest.mark.parametrize("options", [{"chunk": 32}, {"draft": "lookup"}])
def test_chunks_and_drafts_give_the_same_tokens(pair, ids, options):
    plan = kvsieve.plan("full", codec="kivi:bits=4")
    found, wanted = (answer(model, plan, ids, **options) for model in pair)
    assert found.sequences.tolist() == wanted.sequences.tolist()


def test_a_model_in_blocks_drafts_and_is_drafted_for(pair, ids):
    blocks, plain = pair
    wanted = answer(plain, kvsieve.plan("full"), ids)
    for model, draft in (pair, pair[::-1]):
        always = dataclasses.replace(as_draft(draft), adapt=False)
        found = answer(model, kvsieve.plan("full"), ids, draft=always)
        assert found.sequences.tolist() == wanted.sequences.tolist()
        assert found.stats.drafts.accepted > 0


def test_operations_around_the_products_are_compiled(pair):
    assert [FusedModules(model.model).count for model in pair] == [3 * 4 + 1] * 2


def test_an_mlp_takes_a_long_prompt_in_parts_and_dequantizes_once(pair, ids, monkeypatch):
    blocks, _ = pair
    with torch.no_grad():
        wanted = blocks(ids).logits
    monkeypatch.setattr(fused_modules, "_PART", 32)
    seen = []
    own = QuantizedMatrix.dequantize
    monkeypatch.setattr(QuantizedMatrix, "dequantize", lambda self, out: seen.append(self.width) or own(self, out))
    rows = []
    gated = fused_modules.kernel.gated_silu
    monkeypatch.setattr(
        fused_modules.kernel, "gated_silu", lambda gate, up: rows.append(gate.shape[-2]) or gated(gate, up)
    )
    with kvsieve.attach(blocks, kvsieve.plan("full"), decode="fused"), torch.no_grad():
        seen.clear()
        rows.clear()
        torch.testing.assert_close(blocks(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    assert rows == [32, 32, 26] * 3
    assert len(seen) == 3 * 7 + 1


def test_a_prompt_in_several_chunks_at_once_asks_these_layers_too(pair):
    assert rows_are_alone(pair[0].model, 64) == rows_are_alone(pair[1].model, 64)


def test_sizes_count_blocks(pair):
    blocks, plain = pair
    assert weight_bytes(plain) == 4 * sum(p.numel() for p in plain.parameters())
    assert weight_bytes(plain) / 4 < weight_bytes(blocks) < 0.51 * weight_bytes(plain)


def test_a_cast_model_computes_in_the_new_dtype_and_no_other_device_takes_it(pair, ids):
    model = copy.deepcopy(pair[0]).to(torch.bfloat16)
    layer = model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, QuantizedLinear) and layer.weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert model(ids).logits.dtype == torch.bfloat16
    with pytest.raises(KvsieveError, match="computed with on a CPU.*weights='expand'"):
        model.to("meta")


def test_gradients_of_inputs_are_those_of_the_dequantized_weight(pair):
    layer = pair[0].model.layers[0].mlp.up_proj
    for tokens in (2, 80):
        given = torch.randn(tokens, 64, requires_grad=True)
        (layer(given) ** 2).sum().backward()
        own = given.detach().clone().requires_grad_()
        ((own @ layer.weight.T) ** 2).sum().backward()
        torch.testing.assert_close(given.grad, own.grad)
