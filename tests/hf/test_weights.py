"""Weights as people have them: low-bit, with adapters of PEFT, offloaded to disk by accelerate."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import kvsieve
from in_blocks import quantized
from kvsieve.errors import CacheFileError, CacheStateError, KvsieveError, UnsupportedModelError
from kvsieve.hf.compat import CACHE
from kvsieve.hf.model.facts import Facts
from tiny_models import build

# Sizes that blocks of 32 and 64 weights divide.
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
IDS = torch.arange(180).remainder(90).add(3).reshape(2, 90)
MORE = torch.cat([IDS, IDS[:, :5]], 1)
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
PLANS = {
    "snapkv": kvsieve.plan("snapkv", budget=40, window=8),
    "fastkv": kvsieve.plan("fastkv", budget=40, window=8, tsp_layer=1),
    "criticalkv": kvsieve.plan("criticalkv", budget=60),
    "squeezeattention": kvsieve.plan("squeezeattention", budget=40),
    "expectedattention": kvsieve.plan("expectedattention", budget=40),
}


@pytest.fixture
def folder(tmp_path):
    build("llama", **SHAPE).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def answer(model, plan=None, **options):
    with kvsieve.attach(model, plan or kvsieve.plan("full")) as sieve:
        return sieve.generate(IDS, **GREEDY, **options)


def same_kept(ours, theirs) -> None:
    assert torch.equal(ours.sequences, theirs.sequences)
    for index, layer in ours.cache.sieve_layers.items():
        assert torch.equal(layer.store.index, theirs.cache.sieve_layers[index].store.index)


# low-bit weights


class EightBits(nn.Module):
    """A linear layer as the libraries have them: integers and scales, multiplied when it is called."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = nn.Parameter(linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.packed = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    @property
    def unpacked(self):
        return self.packed * self.scale

    def forward(self, x):
        return nn.functional.linear(x, self.unpacked.to(x.dtype), self.bias)


def replaced(model, make):
    """The model with each linear layer of its decoder layers made another."""
    for layer in model.get_decoder().layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, make(child))
    return model


def unpacked(model):
    def plain(linear):
        out = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        out.weight.data.copy_(linear.unpacked)
        if linear.bias is not None:
            out.bias.data.copy_(linear.bias)
        return out

    for layer in model.get_decoder().layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, EightBits):
                    setattr(part, name, plain(child))
    return model


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_low_bit_weights_answer_as_their_values_do(plan):
    low, high = (replaced(build("qwen2", **SHAPE), EightBits) for _ in range(2))
    high = unpacked(high)
    torch.testing.assert_close(Facts(low).output_weight(1), Facts(high).output_weight(1), atol=1e-6, rtol=0)
    same_kept(answer(low, plan), answer(high, plan))


def test_low_bit_weights_are_multiplied_by_their_own_library():
    model = replaced(build("llama", **SHAPE), EightBits)
    with kvsieve.attach(model, kvsieve.plan("full"), decode="fused") as sieve:
        assert not any("forward" in vars(each) for each in model.modules() if isinstance(each, EightBits))
        told = sieve.generate(IDS, **GREEDY).stats.decoding
    # The output layer is a plain one.
    assert (told.engine, told.linear_layers) == ("fused", 1)


def test_a_projection_of_floats_of_eight_bits_is_not_taken_at_face_value():
    linear = nn.Linear(128, 128, bias=False)
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    linear.forward = lambda x: 3 * nn.functional.linear(x, linear.weight.to(x.dtype))
    model = build("llama", **SHAPE)
    model.model.layers[1].self_attn.o_proj = linear
    found = Facts(model).output_weight(1).permute(2, 0, 1).flatten(1)
    torch.testing.assert_close(found, 3 * linear.weight.float())


def _bitsandbytes(folder, **bits):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**bits)
    )


def _torchao(folder):
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)


def _hqq(folder):
    hqq = pytest.importorskip("hqq.core.quantize")
    config = hqq.BaseQuantizeConfig(nbits=4, group_size=32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return replaced(model, lambda linear: hqq.HQQLinear(linear, config, compute_dtype=torch.bfloat16, device="cpu"))


LIBRARIES = {
    "bitsandbytes-8": (lambda folder: _bitsandbytes(folder, load_in_8bit=True), "Linear8bitLt"),
    "bitsandbytes-4": (lambda folder: _bitsandbytes(folder, load_in_4bit=True), "Linear4bit"),
    "torchao": (_torchao, "Int8Tensor"),
    "hqq": (_hqq, "HQQLinear"),
}


@pytest.mark.parametrize(("load", "kind"), LIBRARIES.values(), ids=LIBRARIES)
def test_weights_of_the_libraries(load, kind, folder, tmp_path):
    model = load(folder).eval()
    projection = model.model.layers[1].self_attn.o_proj
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    weight = Facts(model).output_weight(1).float()
    ours, theirs = torch.einsum("nhd,hdc->nc", x.view(5, 4, 32).float(), weight), projection(x).float()
    assert (ours - theirs).norm() < 0.02 * theirs.norm()
    logits = model(IDS).logits
    with kvsieve.attach(model, kvsieve.plan("full")):
        torch.testing.assert_close(model(IDS).logits, logits, atol=0.05 * logits.abs().max().item(), rtol=0)
    for name, plan in PLANS.items():
        with kvsieve.attach(model, plan) as sieve:
            result = sieve.generate(IDS, **GREEDY)
            assert min(result.stats.kv_entries) <= 60 and result.stats.applied, name
            sieve.save(result.cache, tmp_path / f"{name}.kv")
            assert sieve.load(tmp_path / f"{name}.kv").cache.num_seen == result.cache.num_seen
    with kvsieve.attach(model, kvsieve.plan("full"), decode="fused"):
        assert "forward" not in vars(projection)


# adapters


@pytest.fixture
def adapted():
    """A model of PEFT with the adapters "default", which is active, and "other"."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build("llama", **SHAPE), config)
    model.add_adapter("other", config)
    return model.eval()


def merged(adapted, name):
    """The same model with an adapter's weights added to its own."""
    import copy

    found = copy.deepcopy(adapted)
    found.set_adapter(name)
    return found.merge_and_unload()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_each_adapter_answers_as_merged_weights_do(adapted, plan):
    for name in ("default", "other"):
        alone = merged(adapted, name)
        with kvsieve.attach(adapted, plan) as sieve:
            adapted.set_adapter(name)
            torch.testing.assert_close(sieve.facts.output_weight(1), Facts(alone).output_weight(1))
            same_kept(sieve.generate(IDS, **GREEDY), answer(alone, plan))


def test_adapters_act_on_weights_in_blocks_and_are_not_merged_into_them():
    peft = pytest.importorskip("peft")
    models = []
    for base in quantized(build("llama", **SHAPE)):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
        models.append(peft.get_peft_model(base, config).eval())
    blocks, plain = models
    same_kept(answer(blocks, PLANS["snapkv"]), answer(plain, PLANS["snapkv"]))
    for merge in (blocks.merge_adapter, lambda: blocks.merge_adapter(safe_merge=True), blocks.merge_and_unload):
        with pytest.raises(KvsieveError, match="cannot be written, nor adapters merged.*weights='expand'"):
            merge()
    same_kept(answer(blocks, PLANS["snapkv"]), answer(plain, PLANS["snapkv"]))


def augment(weight):
    weight *= 2


WRITES = {
    "in place": lambda weight: weight.mul_(2),
    "rows": lambda weight: weight.__setitem__(0, 0),
    "augmented": augment,
    "its data": lambda weight: weight.data.zero_(),
    "rows of its data": lambda weight: weight.data.__setitem__(slice(2), 0),
    "a view": lambda weight: weight.T[0].zero_(),
    "detached": lambda weight: weight.detach().copy_(weight),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_weights_in_blocks_is_not_lost_in_silence(write):
    """Such a weight is a copy made for the caller."""
    blocks, _ = quantized(build("llama", **SHAPE))
    for layer in (blocks.lm_head, blocks.model.embed_tokens, blocks.model.layers[0].mlp.up_proj):
        with torch.no_grad(), pytest.raises(KvsieveError, match="cannot be written.*weights='expand'"):
            WRITES[write](layer.weight)
        with pytest.raises(KvsieveError, match="cannot be written"):
            layer.weight = torch.nn.Parameter(torch.zeros(2, 2))
        copy = layer.weight.clone()
        copy[0] = 0
        assert type(copy) is torch.Tensor and type(layer.weight + 1) is torch.Tensor


def test_a_peft_model_is_left_as_it_was_found(adapted):
    before = adapted.generate(input_ids=IDS, **GREEDY)
    inner = adapted.base_model.model
    known = {id(each): set(vars(each)) for each in (adapted, adapted.base_model, inner, inner.model)}
    with kvsieve.attach(adapted, PLANS["snapkv"]) as sieve:
        through_peft = adapted.generate(input_ids=IDS, **GREEDY)
        assert sieve.last_stats is not None and max(sieve.last_stats.kv_entries) == 40
        assert torch.equal(through_peft, sieve.generate(IDS, **GREEDY).sequences)
    for each in (adapted, adapted.base_model, inner, inner.model):
        assert set(vars(each)) == known[id(each)]
        assert not each._forward_hooks and not each._forward_pre_hooks
    assert torch.equal(adapted.generate(input_ids=IDS, **GREEDY), before)


def test_a_cache_belongs_to_the_adapter_that_read_it(adapted, tmp_path):
    with kvsieve.attach(adapted, kvsieve.plan("full")) as sieve:
        cache = sieve.prefill(IDS)
        before = cache.snapshot()
        sieve.save(cache, tmp_path / "cache.kv")
        adapted.set_adapter("other")
        with pytest.raises(CacheStateError, match="read under 'default', and 'other' acts now.*switch back, or"):
            sieve.generate(MORE, cache=cache, **GREEDY)
        with pytest.raises(CacheStateError, match="'other' acts now"):
            adapted(IDS[:, :5], **{CACHE: cache})
        with pytest.raises(CacheFileError, match="made under 'default', and 'other' acts here"):
            sieve.load(tmp_path / "cache.kv")
        with adapted.disable_adapter(), pytest.raises(CacheStateError, match="no adapter acts now"):
            sieve.generate(MORE, cache=cache, **GREEDY)
        # A cache that nothing was read into is anyone's; adopting goes on with what there is.
        fresh = sieve.new_cache()
        adapted.set_adapter("default")
        sieve.generate(IDS, cache=fresh, **GREEDY)
        adapted.set_adapter("other")
        sieve.generate(MORE, cache=sieve.adopt(cache.fork()), **GREEDY)
        adapted.set_adapter("default")
        cache.rollback(before)
        sieve.generate(MORE, cache=cache, **GREEDY)


def test_adapters_act_beside_compiled_products(adapted):
    told = {}
    for decode in ("eager", "fused"):
        with kvsieve.attach(adapted, kvsieve.plan("full"), decode=decode) as sieve:
            told[decode] = sieve.generate(IDS, output_logits=True, return_dict_in_generate=True, **GREEDY)
    assert told["fused"].stats.decoding.linear_layers > 0
    ours, wanted = (torch.stack(told[decode].output.logits) for decode in ("fused", "eager"))
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)
    # They are read as they lie.
    layer = adapted.get_decoder().layers[0].self_attn.q_proj
    with kvsieve.attach(adapted, kvsieve.plan("full"), decode="fused"), torch.no_grad():
        apart = layer(torch.ones(1, 1, 128))
        adapted.merge_adapter()
        torch.testing.assert_close(layer(torch.ones(1, 1, 128)), apart, atol=1e-4, rtol=1e-4)


# offloading


def offloaded(folder, tmp_path, places):
    pytest.importorskip("accelerate")
    return AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path / "offload").eval()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_layers_on_disk_answer_as_those_in_memory_do(plan, folder, tmp_path):
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{index}": "cpu" if index == 0 else "disk" for index in range(4)}
    model = offloaded(folder, tmp_path, places)
    layer = model.model.layers[2]
    known = set(vars(layer)), layer.forward
    assert layer.mlp.up_proj.weight.is_meta
    same_kept(answer(model, plan, chunk=32), answer(build("llama", **SHAPE), plan, chunk=32))
    assert layer.mlp.up_proj.weight.is_meta and (set(vars(layer)), layer.forward) == known
    assert not layer._forward_hooks and not layer._forward_pre_hooks


def test_layers_on_disk_are_not_fused(folder, tmp_path):
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = offloaded(folder, tmp_path, places | {"model.layers": "disk"})
    with kvsieve.attach(model, kvsieve.plan("full"), decode="fused") as sieve:
        told = sieve.generate(IDS, **GREEDY).stats.decoding
    assert told.engine == "eager" and told.reason == "the model lies on several devices"


def test_a_model_that_lies_on_disk_with_its_embeddings_is_refused(folder, tmp_path):
    model = offloaded(folder, tmp_path, {"": "disk"})
    with pytest.raises(UnsupportedModelError, match="its embeddings too.*keep these in memory"):
        answer(model)
    assert "generate" not in vars(model)
