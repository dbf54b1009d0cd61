"""Linear layers multiply few tokens in C, whatever a model does with them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.hf.decode import linears, products
from kvsieve.hf.decode.linears import Linears
from kvsieve.kernels.cpu import products as kernel
from tiny_models import build

pytestmark = pytest.mark.skipif(kernel.built().reason is not None, reason=kernel.built().status)

PROMPT = torch.arange(3, 83)[None]
NAMES = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    """Projections of unequal width."""

    def __init__(self, bias=(True, True, True), width=48):
        super().__init__()
        for name, rows, has in zip(NAMES, (40, 16, 24), bias, strict=True):
            setattr(self, name, nn.Linear(width, rows, bias=has, dtype=torch.bfloat16))

    def own(self, name, given):
        layer = getattr(self, name)
        return F.linear(given, layer.weight, layer.bias)

    def all(self, given):
        return [getattr(self, name)(given) for name in NAMES]


class Own(nn.Parameter):
    """A parameter of a kind of its own."""


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)


@pytest.fixture
def calls(monkeypatch):
    """Widths of the products that the kernel computed."""
    widths, own = [], products.kernel.multiply

    def counted(given, weight):
        widths.append(weight.width)
        return own(given, weight)

    monkeypatch.setattr(products.kernel, "multiply", counted)
    return widths


@pytest.mark.parametrize("bias", [(True, True, True), (False, False, False), (True, False, True)], ids=str)
@pytest.mark.parametrize("shape", [(48,), (1, 1, 48), (3, 1, 48), (1, 5, 48), (2, 4, 48), (32, 48)], ids=str)
def test_few_tokens_are_products_in_c(calls, served, bias, shape):
    module, given = Attention(bias), numbers(*shape)
    served(module)
    found = module.all(given)
    assert calls == [40, 16, 24]
    for one, name in zip(found, NAMES, strict=True):
        close(one, module.own(name, given))
        # Models reshape them as they do the outputs of layers of their own.
        assert one.is_contiguous() and one.view(-1, 8).shape[1] == 8


def test_nothing_is_left_behind(served):
    module = Attention()
    before = [dict(vars(each)) for each in module.modules()]
    made = served(module)
    assert made.count == 3 and all("forward" in vars(getattr(module, name)) for name in NAMES)
    module.all(numbers(1, 1, 48))
    made.remove()
    assert [dict(vars(each)) for each in module.modules()] == before


@pytest.mark.parametrize("dtype", kernel.MOST_ROWS, ids=str)
def test_many_tokens_are_torchs(calls, served, dtype):
    module, most = Attention().to(dtype), kernel.MOST_ROWS[dtype]
    served(module)
    for rows, asked in ((0, 0), (1, 3), (most, 3), (most + 1, 0)):
        given = numbers(rows, 48).to(dtype)
        calls.clear()
        for found, name in zip(module.all(given), NAMES, strict=True):
            close(found, module.own(name, given))
        assert len(calls) == asked


@pytest.mark.parametrize("native", [True, False], ids=["native", "emulated"])
def test_many_tokens_are_float32s_where_bfloat16_is_emulated(served, monkeypatch, native):
    """Parts of weight and tokens at a time give the product of all, rounded once."""
    monkeypatch.setattr(linears, "cpu_computes_bfloat16", lambda: native)
    monkeypatch.setattr(linears, "_NUMBERS", 48 * 7)
    monkeypatch.setattr(linears, "_TOKENS", 13)
    module, multiplied, own = Attention((True, False, True)), [], F.linear
    monkeypatch.setattr(linears.F, "linear", lambda *given: multiplied.append(given[0].dtype) or own(*given))
    served(module)
    for shape in ((40, 48), (2, 33, 48), (33, 96)):
        given = numbers(*shape)[..., :48]
        multiplied.clear()
        outputs = module.all(given)
        assert set(multiplied) == {torch.bfloat16 if native else torch.float32}
        assert len(multiplied) == 3 if native else len(multiplied) > 3
        for found, name in zip(outputs, NAMES, strict=True):
            close(found, module.own(name, given))
            if not native:
                layer = getattr(module, name)
                bias = None if layer.bias is None else layer.bias.float()
                wanted = own(given.float(), layer.weight.float(), bias)
                # A sum whose order differs may round to the neighbour.
                torch.testing.assert_close(found.float(), wanted, atol=1e-5, rtol=2**-7)
    with pytest.raises(RuntimeError, match="shapes"):
        module.q_proj(numbers(40, 47))
    # A weight of another kind, which may not be what its numbers say, is torch's.
    multiplied.clear()
    module.k_proj.weight = Own(numbers(16, 48), requires_grad=False)
    close(module.k_proj(numbers(40, 48)), module.own("k_proj", numbers(40, 48)))
    assert multiplied[0] == torch.bfloat16


def test_any_input_of_theirs_is_taken(calls, served):
    module = Attention()
    served(module)
    wide = numbers(3, 96)
    for given in (wide[:, ::2], wide.view(48, 6).T, wide[0, :48]):
        for found, name in zip(module.all(given), NAMES, strict=True):
            close(found, module.own(name, given))
    assert len(calls) == 9
    for wrong, error in ((numbers(1, 47), "shapes"), (numbers(1, 48).float(), "dtype")):
        with pytest.raises(RuntimeError, match=error):
            module.q_proj(wrong)


def test_gradients_and_autocast_are_torchs(calls, served):
    module, given = Attention(), numbers(1, 1, 48)
    served(module)
    with torch.enable_grad():
        sum(part.sum() for part in module.all(given)).backward()
        for name in NAMES:
            assert getattr(module, name).weight.grad is not None
            getattr(module, name).weight.requires_grad_(False)
        # Of biases alone.
        module.zero_grad()
        module.k_proj(given).sum().backward()
        assert module.k_proj.bias.grad is not None
        module.requires_grad_(False)
        module.q_proj(given)
        assert len(calls) == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.float().q_proj(given.float()).dtype == torch.bfloat16
    assert len(calls) == 1


def test_traces_see_torchs_operations(calls, served):
    module, given = Attention(), numbers(1, 1, 48)
    served(module)
    found = torch.compile(module.q_proj, backend="eager", fullgraph=True)(given)
    close(found, module.own("q_proj", given))
    assert not calls


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_weights_that_are_written_to_count_at_once(served, name, part):
    module, given = Attention(), numbers(1, 1, 48)
    served(module)
    module.all(given)
    getattr(getattr(module, name), part).mul_(-2)
    for each in NAMES:
        close(getattr(module, each)(given), module.own(each, given))


@pytest.mark.parametrize("name", NAMES)
def test_weights_in_other_memory_count_at_once(calls, served, name):
    module, given = Attention(), numbers(1, 1, 48)
    served(module)
    module.all(given)
    layer, own = getattr(module, name), getattr(module, name).weight
    square = numbers(48, 48)[: layer.out_features]
    others = (
        lambda: setattr(layer, "weight", nn.Parameter(square.clone())),
        lambda: setattr(layer.weight, "data", -square),
        # The kernel reads neither of them, which leaves them to torch.
        lambda: setattr(layer.weight, "data", square.T.contiguous().T),
        lambda: module.double(),
    )
    for number, change in enumerate(others):
        change()
        calls.clear()
        told = given.to(layer.weight.dtype)
        for each in NAMES:
            close(getattr(module, each)(told), module.own(each, told))
        assert len(calls) == (3, 3, 2, 0)[number]
    assert layer.weight is not own


def test_weights_of_inference_mode_are_served(calls, served):
    with torch.inference_mode():
        module, given = Attention(), numbers(1, 1, 48)
        served(module)
        for found, name in zip(module.all(given), NAMES, strict=True):
            close(found, module.own(name, given))
        module.q_proj.weight.mul_(-2)
        close(module.q_proj(given), module.own("q_proj", given))
    assert calls == [40, 16, 24, 40]


def test_a_tied_output_layer_is_served_once(calls, served):
    model = build("llama", dtype=torch.bfloat16, tie_word_embeddings=True)
    decoder, output = model.get_decoder(), model.get_output_embeddings()
    made = Linears(decoder, output)
    assert output.weight is decoder.embed_tokens.weight and made.layers.count(output) == 1
    assert Linears(model, output).layers.count(output) == 1
    made.install()
    given = numbers(1, 1, output.in_features)
    close(output(given), F.linear(given, output.weight))
    made.remove()
    assert calls == [output.out_features]


def test_hooks_see_and_change_what_is_theirs(served):
    module, given = Attention(), numbers(1, 1, 48)
    served(module)
    handles = [
        module.q_proj.register_forward_hook(lambda _, args, out: out.mul_(2)),
        module.k_proj.register_forward_pre_hook(lambda _, args: (-args[0],)),
        module.v_proj.register_forward_hook(lambda _, args, out: out + 1),
    ]
    query, key, value = module.all(given)
    for handle in handles:
        handle.remove()
    close(query, 2 * module.own("q_proj", given))
    close(key, module.own("k_proj", -given))
    close(value, module.own("v_proj", given) + 1)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_token_takes_a_product_of_each_layer(calls, rows):
    model, ids = build("granite", dtype=torch.bfloat16), PROMPT.repeat(rows, 1)
    told = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=40, window=4), decode="fused") as sieve:
        result = sieve.generate(ids, output_logits=True, return_dict_in_generate=True, **told)
    # And the output layer for the prompt's last token.
    assert len(calls) == 3 * (4 * 7 + 1) + 1
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=40, window=4), decode="eager") as sieve:
        wanted = sieve.generate(ids, output_logits=True, return_dict_in_generate=True, **told)
    torch.testing.assert_close(result.output.logits[1].float(), wanted.output.logits[1].float(), atol=0.03, rtol=0.03)


def test_packed_weights_are_gone():
    with (
        pytest.raises(PlanError, match="decode 'packed' is gone.*'fused'"),
        kvsieve.attach(build("llama"), kvsieve.plan("full"), decode="packed"),
    ):
        pass
