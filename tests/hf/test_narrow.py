"""Float32 weights that hold bfloat16 numbers are read from copies of half the size, which change nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kvsieve
from kvsieve.hf.decode import fused_decoder, narrow, products
from kvsieve.kernels.cpu import products as kernel
from tiny_models import build

pytestmark = pytest.mark.skipif(kernel.built().reason is not None, reason=kernel.built().status)


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def rounded(module):
    """The module with weights that came from bfloat16; biases, which are not copied, may be any numbers."""
    for name, parameter in module.named_parameters():
        if name.endswith("weight"):
            parameter.data = parameter.data.bfloat16().float()
    return module


def close(layer, given):
    wanted = F.linear(given.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    torch.testing.assert_close(layer(given).double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.fixture
def read(monkeypatch):
    """Whether each product read copies in bfloat16."""
    found, own = [], products.kernel.multiply

    def noted(given, weight):
        found.append(weight.weight.dtype == torch.bfloat16)
        return own(given, weight)

    monkeypatch.setattr(products.kernel, "multiply", noted)
    return found


def test_copies_are_made_when_they_pay_and_freed(read, served):
    layer, given = rounded(nn.Linear(48, 40)), numbers(1, 48)
    made = served(layer, narrow=True)
    for turn in range(6):
        close(layer, given * turn)
        assert made.narrow_bytes == (0 if turn + 1 < narrow._AFTER else 40 * 48 * 2)
    assert read == [turn + 1 >= narrow._AFTER for turn in range(6)]
    made.remove()
    assert made.narrow_bytes == 0 and "forward" not in vars(layer)


def test_other_numbers_stay_as_they_are(read, served):
    layer = rounded(nn.Linear(48, 40))
    layer.weight.data[3, 5] += 1e-6
    made = served(layer, narrow=True)
    for _ in range(6):
        close(layer, numbers(2, 48))
    assert not any(read) and made.narrow_bytes == 0


def test_weights_in_bfloat16_have_no_copies(served):
    made = served(nn.Linear(48, 40, dtype=torch.bfloat16), narrow=True)
    assert all(product.narrow is None for product in made.products)


@pytest.mark.parametrize("change", ["written", "moved", "replaced"])
def test_weights_that_change_are_copied_again(read, served, change):
    layer, given = rounded(nn.Linear(48, 40)), numbers(1, 48)
    served(layer, narrow=True)
    for _ in range(5):
        layer(given)
    if change == "written":
        layer.weight.mul_(-2)
    elif change == "moved":
        layer.weight.data = layer.weight.data * -2
    else:
        layer.weight = nn.Parameter(layer.weight.data * -2)
    for _ in range(5):
        close(layer, given)
    assert read == [False] * 3 + [True] * 2 + [False] * 3 + [True] * 2


@pytest.mark.parametrize("shape", [(48, 40), (40, 48), (48, 48), (96, 8), (8, 96)])
@pytest.mark.parametrize("part", ["all", "row", "column"])
def test_writes_that_torch_does_not_count_are_looked_for(read, served, part, shape):
    """PEFT's merge_adapter() writes through `.data`, which moves no version and no address."""
    layer, given = rounded(nn.Linear(*shape)), numbers(1, shape[0])
    made = served(layer, narrow=True)
    for _ in range(5):
        layer(given)
    made.look()
    assert made.narrow_bytes == 2 * layer.weight.numel()
    place = {"all": ..., "row": 7, "column": (slice(None), 5)}[part]
    layer.weight.data[place] *= -2
    made.look()
    assert made.narrow_bytes == 0
    for _ in range(5):
        close(layer, given)
    assert made.narrow_bytes == 2 * layer.weight.numel()


def _merge(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["down_proj", "q_proj"], r=4, init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("how", ["data", "merge_adapter"])
@pytest.mark.parametrize("path", ["generate", "prefill", "model.generate", "model"])
def test_an_answer_is_that_of_the_weights_as_they_are(monkeypatch, how, path):
    monkeypatch.setattr(fused_decoder, "_LEAST", 0)
    inner, ids = rounded(build("llama")), torch.randint(3, 100, (1, 40))
    outer = _merge(inner) if how == "merge_adapter" else inner

    def answer(sieve):
        if path == "model":
            return inner(ids, past_key_values=sieve.new_cache()).logits[0, -1]
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        if path == "model.generate":
            return torch.cat(inner.generate(ids, **options).logits)
        cache = sieve.prefill(ids[:, :20]) if path == "prefill" else None
        return torch.cat(sieve.generate(ids, cache=cache, **options).output.logits)

    with torch.no_grad(), kvsieve.attach(inner, kvsieve.plan("full"), decode="auto") as sieve:
        assert sieve.generate(ids, max_new_tokens=8, min_new_tokens=8).stats.decoding.narrow_bytes
        before = answer(sieve)
        if how == "data":
            inner.model.layers[0].mlp.down_proj.weight.data.mul_(2)
        else:
            outer.merge_adapter()
        found = answer(sieve)
    with torch.no_grad(), kvsieve.attach(inner, kvsieve.plan("full"), decode="eager") as sieve:
        wanted = answer(sieve)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    # Merging adapters changes no answer, and their products are not copies'.
    assert how == "merge_adapter" or (found - before).abs().max() > 0.1


@pytest.mark.parametrize("decode", ["auto", "eager", "fused"])
def test_a_model_that_was_cast_within_the_block_is_refused(decode):
    model, ids = build("llama"), torch.arange(3, 40)[None]
    with kvsieve.attach(model, kvsieve.plan("full"), decode=decode) as sieve:
        cache = sieve.prefill(ids[:, :20])
        model.to(torch.bfloat16)
        for act in (sieve.generate, sieve.prefill, sieve.begin, model.generate, model):
            with pytest.raises(kvsieve.KvsieveError, match="is torch.bfloat16 on cpu and was torch.float32 on cpu"):
                act(ids)
        with pytest.raises(kvsieve.KvsieveError, match="when the plan was attached"):
            sieve.generate(ids, cache=cache)
        model.to(torch.float32)
        assert sieve.generate(ids, cache=cache, max_new_tokens=2).stats.prompt_tokens == 37
    model.to(torch.bfloat16)
    with kvsieve.attach(model, kvsieve.plan("full"), decode=decode) as sieve:
        assert sieve.generate(ids, max_new_tokens=2).cache.layers[0].keys.dtype == torch.bfloat16


def test_no_copies_without_memory_for_them(monkeypatch, read, served, caplog):
    layer = rounded(nn.Linear(48, 40))
    for free in (None, 4 * 40 * 48 * 2 - 1):
        monkeypatch.setattr(narrow, "free_memory", lambda free=free: free)
        assert "free" in narrow.why_not_narrow([layer])
        made = served(layer, narrow=True)
        for _ in range(6):
            close(layer, numbers(1, 48))
        made.remove()
    assert not any(read)
    monkeypatch.setattr(narrow, "free_memory", lambda: 4 * 40 * 48 * 2)
    assert narrow.why_not_narrow([layer]) is None


def test_weights_of_inference_mode_have_no_copies(read, served):
    with torch.inference_mode():
        layer = rounded(nn.Linear(48, 40))
        served(layer, narrow=True)
        for turn in range(6):
            layer.weight.mul_(-1)
            close(layer, numbers(1, 48) + turn)
    assert not any(read)


@pytest.mark.parametrize("decode", ["auto", "fused"])
def test_auto_reads_copies_and_fused_does_not(monkeypatch, read, decode):
    monkeypatch.setattr(fused_decoder, "_LEAST", 0)
    model = rounded(build("qwen2", dtype=torch.float32))
    prompt = torch.arange(3, 83)[None]
    told = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=40, window=4), decode="eager") as sieve:
        wanted = sieve.generate(prompt, output_logits=True, return_dict_in_generate=True, **told)
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=40, window=4), decode=decode) as sieve:
        result = sieve.generate(prompt, output_logits=True, return_dict_in_generate=True, **told)
    assert any(read) == (decode == "auto")
    weights = {id(each.weight): each.weight for each in model.modules() if isinstance(each, nn.Linear)}
    assert result.stats.decoding.narrow_bytes == sum(each.nbytes // 2 for each in weights.values()) * (decode == "auto")
    for found, own in zip(result.output.logits, wanted.output.logits, strict=True):
        torch.testing.assert_close(found, own, atol=1e-4, rtol=1e-4)


def test_a_copy_holds_the_same_numbers_or_there_is_none():
    whole = torch.tensor([[0.0, -0.0, 1.5, -3.0], [float("inf"), -float("inf"), 2.0**-130, 2.0**127]])
    assert torch.equal(whole.bfloat16().float(), whole)
    copy = narrow.narrowed(whole)
    assert copy.dtype == torch.bfloat16 and copy.is_contiguous()
    assert torch.equal(copy.float().view(torch.int32), whole.view(torch.int32))
    for at, other in ((0, 1.001), (5, 2.0**-149), (7, 1 + 2.0**-8)):
        changed = whole.clone()
        changed.view(-1)[at] = other
        assert narrow.narrowed(changed) is None
