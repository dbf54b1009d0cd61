"""Linear layers that read the same input are one product with packed weights, whatever a model does with them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kvsieve
from kvsieve.hf.decode import products
from kvsieve.hf.decode.packed_weights import PackedLinears
from kvsieve.models.families import build

PROMPT = torch.arange(3, 83)[None]
NAMES = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    """Projections of unequal width, which `asks` calls in its own way."""

    def __init__(self, bias=(True, True, True), width=48):
        super().__init__()
        for name, rows, has in zip(NAMES, (40, 16, 24), bias, strict=True):
            setattr(self, name, nn.Linear(width, rows, bias=has, dtype=torch.bfloat16))

    def own(self, name, given):
        layer = getattr(self, name)
        return F.linear(given, layer.weight, layer.bias)

    def all(self, given):
        return [getattr(self, name)(given) for name in NAMES]


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)


@pytest.fixture
def calls(monkeypatch):
    """Widths of the products that were computed with packed weights."""
    widths, own = [], products.multiplied

    def counted(given, *args):
        out = own(given, *args)
        widths.append(out.shape[-1])
        return out

    monkeypatch.setattr(products, "multiplied", counted)
    return widths


@pytest.fixture
def packed():
    """Pack modules for the test."""
    made = []

    def pack(*modules, **options):
        made.append(PackedLinears(nn.Sequential(*modules), **options))
        made[-1].install()
        made[-1].pack()
        return made[-1]

    with torch.no_grad():
        yield pack
    for each in made:
        each.remove()


@pytest.mark.parametrize("bias", [(True, True, True), (False, False, False), (True, False, True)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 48), (3, 1, 48), (1, 5, 48), (2, 4, 48), (64, 48)], ids=str)
def test_siblings_are_one_product(calls, packed, bias, shape):
    module, given = Attention(bias), numbers(*shape)
    apart = packed(module, joint=False)
    separate = module.all(given)
    apart.remove()
    assert calls == [40, 16, 24]
    packed(module)
    found = module.all(given)
    assert calls[3:] == [80]
    for one, other, name in zip(found, separate, NAMES, strict=True):
        close(one, module.own(name, given))
        # oneDNN may sum in another order; it did not where this was written.
        torch.testing.assert_close(one, other, atol=2e-3, rtol=8e-3)
        # Models reshape them as they do the outputs of layers of their own.
        assert one.is_contiguous() and one.view(-1, 8).shape[1] == 8


def test_memory_is_that_of_the_weights(packed):
    module = Attention()
    made = packed(module)
    assert made.bytes == sum(getattr(module, name).weight.nbytes for name in NAMES)
    made.remove()
    assert made.bytes == 0 and not any("forward" in vars(each) for each in module.modules())


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0), (0, 1, 1, 2), (0, 0, 1, 2)], ids=str)
def test_any_order_of_calls_is_right(packed, order):
    module = Attention()
    packed(module)
    for turn in range(3):
        given = numbers(1, 1, 48) * (turn + 1)
        for at in order:
            close(getattr(module, NAMES[at])(given), module.own(NAMES[at], given))


def test_other_inputs_get_their_own_products(packed):
    module = Attention()
    packed(module)
    given, other = numbers(1, 1, 48), -numbers(1, 1, 48)
    module.q_proj(given)
    close(module.k_proj(other), module.own("k_proj", other))
    # An equal tensor, and the same one after it was written to.
    given.mul_(-3)
    close(module.v_proj(given), module.own("v_proj", given))


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_an_input_that_is_written_to_between_calls(calls, packed, without_gradients):
    module = Attention()
    packed(module)
    with without_gradients():
        given = numbers(1, 1, 48) * 1
        module.q_proj(given)
        close(module.k_proj(given), module.own("k_proj", given))
        given.add_(1)
        close(module.v_proj(given), module.own("v_proj", given))
    assert calls == [80]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("when", ["before", "between"])
def test_weights_that_are_written_to_count_at_once(packed, name, part, when):
    module, given = Attention(), numbers(1, 1, 48)
    packed(module)
    module.all(given)
    if when == "between":
        module.q_proj(given)
    getattr(getattr(module, name), part).mul_(-2)
    for each in NAMES[when == "between" :]:
        close(getattr(module, each)(given), module.own(each, given))


def test_layers_that_are_not_all_asked_are_products_of_their_own(calls, packed):
    module = Attention()
    made = packed(module)
    before = made.bytes
    for _ in range(3):
        given = numbers(1, 1, 48)
        close(module.q_proj(given), module.own("q_proj", given))
    assert calls == [80, 40, 40] and made.bytes == before
    module.all(given)
    assert calls[3:] == [40, 16, 24]


def test_hooks_see_and_change_what_is_theirs(packed):
    module, given = Attention(), numbers(1, 1, 48)
    packed(module)
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


def test_only_siblings_that_hang_in_one_place_go_together():
    def sets(*modules):
        made = PackedLinears(nn.Sequential(*modules))
        return [len(each.layers) for each in made.products]

    assert sets(Attention()) == [3]
    # The same module twice is one.
    one = Attention()
    assert sets(one, one) == [3]
    # A layer that two modules share, one that has another input, and one whose forward is another's already.
    two = Attention()
    two.k_proj = one.k_proj
    assert sets(one, two) == [1] * 5
    wider = Attention()
    wider.v_proj = nn.Linear(64, 24, dtype=torch.bfloat16)
    assert sets(wider) == [1] * 3
    taken = Attention()
    taken.v_proj.forward = taken.v_proj.forward
    assert sets(taken) == [1] * 2


# Attention and gated MLPs of four layers; Phi-3 has one weight for each, GPT-NeoX no gates.
@pytest.mark.parametrize("family, joint, alone", [("llama", 8, 8), ("qwen2", 8, 8), ("phi3", 0, 16)])
def test_products_of_families(family, joint, alone):
    sizes = [len(each.layers) for each in PackedLinears(build(family, dtype=torch.bfloat16).get_decoder()).products]
    assert (sum(each > 1 for each in sizes), sizes.count(1)) == (joint, alone)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_token_takes_four_products_a_layer(calls, rows):
    model, ids = build("qwen2", dtype=torch.bfloat16), PROMPT.repeat(rows, 1)
    told = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=40, window=4), decode="packed") as sieve:
        result = sieve.generate(ids, output_logits=True, return_dict_in_generate=True, **told)
    assert len(calls) == 3 * (4 * 4 + 1)
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=40, window=4), decode="eager") as sieve:
        wanted = sieve.generate(ids, output_logits=True, return_dict_in_generate=True, **told)
    torch.testing.assert_close(result.output.logits[1].float(), wanted.output.logits[1].float(), atol=0.03, rtol=0.03)


def test_threads_that_meet_between_calls_get_their_own(packed):
    module, one, other = Attention(), numbers(1, 1, 48), -numbers(1, 1, 48)
    packed(module)
    # As two threads do it: the second begins before the first has all.
    queries = [module.q_proj(given) for given in (one, other)]
    for given, query in zip((one, other), queries, strict=True):
        close(query, module.own("q_proj", given))
        for name in NAMES[1:]:
            close(getattr(module, name)(given), module.own(name, given))
