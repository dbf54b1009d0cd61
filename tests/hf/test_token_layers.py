"""A token that passes all layers in one call: the same, bit for bit, as layer by layer, and only where nobody looks."""

from __future__ import annotations

import contextlib
import shutil
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

import kvsieve
from in_blocks import quantized
from kvsieve.decoding.loop import feed_rows
from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.attach import attached, under
from kvsieve.hf.decode import fused_decoder, token_layers
from kvsieve.hf.decode.token_layers import TokenLayers, computed_before
from kvsieve.hf.forward.pass_state import ComputedLayers
from tiny import greedy, padded_prompt, tiny_prompt
from tiny_models import build

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="kernels are compiled, and there is no gcc"),
    pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning"),
]
PROMPT = tiny_prompt(size=90)
NEW = 8


@pytest.fixture
def passes(monkeypatch):
    """Columns before each token that took the one call, for each cache in it."""
    found = []
    own = token_layers.through_layers
    monkeypatch.setattr(token_layers, "through_layers", lambda *given: found.append(given[-1]) or own(*given))
    return found


@contextlib.contextmanager
def layer_by_layer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenLayers, "run", lambda *_: None)
        yield


def answered(model, plan, ids=PROMPT, mask=None, new=NEW, **options):
    """Return the result of `generate`, with logits."""
    with kvsieve.attach(model, plan, decode="fused") as sieve:
        return sieve.generate(
            ids, mask, **greedy(max_new_tokens=new), output_logits=True, return_dict_in_generate=True, **options
        )


def entries(cache):
    """What the layers store."""
    return [
        (layer.store.keys, layer.store.values, layer.store.index, layer.store.valid, layer.store.lengths)
        for layer in cache.layers
    ]


def assert_same(found, wanted):
    for one, other in zip(found.output.logits, wanted.output.logits, strict=True):
        assert torch.equal(one, other)
    for parts, others in zip(entries(found.cache), entries(wanted.cache), strict=True):
        for part, other in zip(parts, others, strict=True):
            assert torch.equal(part, other) if isinstance(part, torch.Tensor) else part == other
    assert found.stats.executors == wanted.stats.executors
    assert found.stats.traffic == wanted.stats.traffic
    assert found.cache.num_seen == wanted.cache.num_seen


PLANS = {
    "full": kvsieve.plan("full"),
    "snapkv": kvsieve.plan("snapkv", budget=40, window=4),
    "pyramidkv": kvsieve.plan("pyramidkv", budget=40, window=4),
    "adakv": kvsieve.plan("adakv", budget=40, window=4),
    "fastkv": kvsieve.plan("fastkv", budget=40, window=4, tsp_layer=1, tsp_rate=0.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_tokens_and_entries_are_those_of_one_layer_after_another(name, dtype, passes):
    model = build("qwen2", dtype=dtype)
    found = answered(model, PLANS[name])
    # The first token shows which executors the layers have.
    assert passes == [[column] for column in range(91, 90 + NEW - 1)]
    with layer_by_layer():
        wanted = answered(model, PLANS[name])
    assert_same(found, wanted)
    assert all(name.startswith("C (Triton: ") for name in found.stats.executors["answer"])


def look_at(model):
    return [layer.register_forward_hook(lambda *_: None) for layer in model.model.layers[1:2]]


def adapt(model):
    attention = model.model.layers[1].self_attn
    attention.v_proj = torch.nn.Sequential(attention.v_proj, torch.nn.Identity())


def move(model):
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = 2 * weight.data


def write(model):
    model.model.layers[1].input_layernorm.weight.data.mul_(2)


# What may happen between two answers, and whether tokens pass all layers in one call afterwards. Casts are refused.
BETWEEN = {
    "nothing": (lambda _: None, True),
    "weights in other memory": (move, True),
    "weights written": (write, True),
    "another number of threads": (lambda _: torch.set_num_threads(torch.get_num_threads() % 2 + 1), True),
    "a hook": (look_at, False),
    "an adapter": (adapt, False),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_later_answers_take_it_from_their_first_token(case, passes):
    """Unless what they need for it has changed: then they compute with the change."""
    change, in_one = BETWEEN[case]
    found = []
    threads = torch.get_num_threads()
    for alone in (False, True):
        model = build("qwen2")
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_num_threads, threads)
            if alone:
                stack.enter_context(layer_by_layer())
            sieve = stack.enter_context(kvsieve.attach(model, PLANS["full"], decode="fused"))
            options = greedy(max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True)
            sieve.generate(PROMPT, **options)
            change(model)
            passes.clear()
            found.append(sieve.generate(PROMPT, **options))
            assert passes == ([[column] for column in range(90, 90 + NEW - 1)] if in_one and not alone else [])
    assert_same(*found)


def fed_after_another_answer(model, plan, passes, *prompt):
    """Feed an answer's tokens under a plan after one under full KV: once in one call if possible, once layer by layer.

    Returns:
        Of both ways, columns of the passes in one call, logits and what is stored, and the executors.
    """
    found = []
    for alone in (False, True):
        with contextlib.ExitStack() as stack:
            if alone:
                stack.enter_context(layer_by_layer())
            sieve = stack.enter_context(attached(model, PLANS["full"], "fused", any_plan=True))
            sieve.generate(PROMPT, **greedy(max_new_tokens=3))
            assert alone or passes
            sieve = under(sieve, plan)
            cache = sieve.prefill(*prompt)
            for layer in cache.sieve_layers.values():
                layer.store.make_room(NEW)
            passes.clear()
            parts = []
            for column in tiny_prompt(len(prompt[0]), 3, seed=1).split(1, 1):
                mask = cache.conversation.mask
                mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)
                parts.append(sieve.feed(cache, column, mask, logits=1).logits)
            parts += [part for layer in entries(cache) for part in layer if isinstance(part, torch.Tensor)]
            found.append((list(passes), parts, vars(cache.turn.record.reads)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_answers_of_other_plans_take_it_from_their_first_token(name, dtype, passes):
    """Their executors are their own."""
    found, wanted = fed_after_another_answer(build("qwen2", dtype=dtype), PLANS[name], passes, *padded_prompt(50, 7))
    assert len(found[0]) == 3 and wanted[0] == []
    assert all(map(torch.equal, found[1], wanted[1])) and found[2] == wanted[2]


def test_rows_and_weights_in_blocks_and_norms_of_heads_take_it(passes):
    blocks, _ = quantized(build("qwen3"))
    ids = tiny_prompt(3, 50)
    found = answered(blocks, PLANS["snapkv"], ids)
    assert len(passes) == NEW - 2
    with layer_by_layer():
        assert_same(found, answered(blocks, PLANS["snapkv"], ids))


OTHERWISE = {
    "codec": kvsieve.plan("kivi", bits=4),
    "reader": kvsieve.plan("quest", budget=40, page=4),
    "acts while decoding": kvsieve.plan("snapkv", budget=40, window=4, every=3),
    "view": kvsieve.plan("perturn", budget=40),
}


@pytest.mark.parametrize("plan", OTHERWISE.values(), ids=OTHERWISE)
def test_plans_that_do_more_to_a_token_pass_layer_by_layer(plan, passes):
    found, wanted = fed_after_another_answer(build("llama"), plan, passes, PROMPT)
    assert found[0] == wanted[0] == [] and found[2] == wanted[2]
    assert all(map(torch.equal, found[1], wanted[1]))


def test_rows_with_padding_take_it(passes):
    model = build("llama")
    ids, mask = padded_prompt(50, 7)
    for plan in (PLANS["full"], PLANS["snapkv"], PLANS["adakv"]):
        passes.clear()
        found = answered(model, plan, ids, mask)
        assert len(passes) == NEW - 2
        with layer_by_layer():
            assert_same(found, answered(model, plan, ids, mask))


def test_windows_and_entries_that_will_be_encoded_pass_layer_by_layer(passes):
    answered(build("llama"), OTHERWISE["codec"], PROMPT[:, :10])
    answered(build("mistral", sliding_window=16), PLANS["full"])
    assert passes == []


def test_buffers_that_grow_take_one_token_alone(passes):
    model = build("llama")
    logits = []
    for alone in (False, True):
        with contextlib.ExitStack() as stack:
            if alone:
                stack.enter_context(layer_by_layer())
            sieve = stack.enter_context(kvsieve.attach(model, kvsieve.plan("full"), decode="fused"))
            cache = sieve.prefill(PROMPT)
            tokens = tiny_prompt(size=70, seed=1).split(1, 1)
            logits.append(torch.cat([sieve.feed(cache, token, None, logits=1).logits for token in tokens]))
            assert cache.sieve_layers[0].store.size == 160
    assert torch.equal(*logits)
    left_out = set(range(91, 160)) - {column for (column,) in passes}
    assert 1 <= len(left_out) <= 4


def test_tokens_taken_back_leave_no_trace(passes):
    model = build("llama")
    with kvsieve.attach(model, PLANS["adakv"], decode="fused") as sieve:
        one = sieve.prefill(PROMPT)
        other = sieve.prefill(PROMPT)
        tokens = tiny_prompt(size=6, seed=1).split(1, 1)
        for token in tokens[:4]:
            sieve.feed(one, token, None, logits=1)
        one.crop(-3)
        copy = one.fork()
        for token in (tokens[0], *tokens[4:]):
            wanted = sieve.feed(other, token, None, logits=1).logits
        for token in tokens[4:]:
            found = sieve.feed(one, token, None, logits=1).logits
        assert torch.equal(found, wanted)
        assert [parts[4] for parts in entries(one)] == [parts[4] for parts in entries(other)]
        assert copy.num_seen == 91 and one.num_seen == other.num_seen == 93
        for token in tokens[4:]:
            found = sieve.feed(copy, token, None, logits=1).logits
        assert torch.equal(found, wanted)
    assert passes


def test_hooks_of_others_see_every_layer(passes):
    model = build("llama")
    seen = []
    with kvsieve.attach(model, kvsieve.plan("full"), decode="fused") as sieve:
        cache = sieve.prefill(PROMPT)
        tokens = tiny_prompt(size=5, seed=1).split(1, 1)
        for number, token in enumerate(tokens):
            handles = []
            if number == 2:
                layers = model.model.layers
                handles = [layer.register_forward_hook(lambda *given: seen.append(given[2])) for layer in layers]
            sieve.feed(cache, token, None, logits=1)
            for handle in handles:
                handle.remove()
    assert passes == [[91], [93], [94]]
    assert len(seen) == 4 and not any(torch.equal(seen[0], other) for other in seen[1:])


def test_a_decoder_that_runs_fewer_layers_is_left_alone(passes):
    model = build("llama")
    with kvsieve.attach(model, kvsieve.plan("full"), decode="fused") as sieve:
        cache = sieve.prefill(PROMPT)
        for depth in (4, 4, 3):
            model.config.num_hidden_layers = depth
            sieve.feed(cache, PROMPT[:, :1], None, logits=1)
        assert passes == [[91]]
        assert [layer.store.size for layer in cache.layers] == [93, 93, 93, 92]


def test_a_decoder_that_changes_what_passes_between_layers_is_left_alone():
    hidden = [torch.zeros(1, 1, 4) for _ in range(3)]
    angles = {"position_embeddings": (torch.zeros(1), torch.zeros(1))}
    session = SimpleNamespace(computed=None)
    way = TokenLayers(torch.nn.ModuleList(), [None, None], None)
    way.note(session, 0, hidden[0], angles, hidden[1])
    way.note(session, 1, hidden[1] * 2, angles, hidden[2])
    assert not way.linked
    way.note(session, 0, hidden[0], angles, hidden[1])
    way.note(session, 1, hidden[1], angles, hidden[2])
    assert way.linked
    session.computed = ComputedLayers(2, hidden[2], angles["position_embeddings"])
    assert computed_before(session, 1, hidden[2], angles) is hidden[2]
    with pytest.raises(UnsupportedModelError, match="another input"):
        computed_before(session, 1, hidden[1], angles)


def test_nothing_of_a_cache_is_held(passes):
    """The entries that tokens were computed on are freed with their cache."""
    import gc
    import weakref

    with kvsieve.attach(build("llama"), kvsieve.plan("full"), decode="fused") as sieve:
        cache = sieve.prefill(PROMPT)
        for token in (5, 6, 7):
            sieve.feed(cache, torch.tensor([[token]]), None, logits=1)
        buffers = weakref.ref(cache.sieve_layers[0].store.tensors[0])
        whole = weakref.ref(cache)
        del cache
        gc.collect()
        assert passes and buffers() is None and whole() is None


def test_tokens_of_several_caches_pass_together(passes):
    model = build("llama")
    plans = [PLANS["full"], PLANS["snapkv"], PLANS["adakv"]]
    logits = {}
    for alone in (False, True):
        with contextlib.ExitStack() as stack:
            if alone:
                stack.enter_context(layer_by_layer())
            sieve = stack.enter_context(attached(model, plans[0], "fused", any_plan=True))
            caches = [under(sieve, plan).prefill(PROMPT[:, at:]) for at, plan in enumerate(plans)]
            for token in range(5, 9):
                fed = feed_rows(sieve, caches, [torch.tensor([[token + row]]) for row in range(3)])
            logits[alone] = [part for part, _ in fed]
            assert [cache.num_seen for cache in caches] == [94, 93, 92]
    assert passes == [[90 + step, 89 + step, 88 + step] for step in range(1, 4)]
    for found, wanted in zip(logits[False], logits[True], strict=True):
        assert torch.equal(found, wanted)


def test_copies_of_weights_are_read_and_follow_writes(passes, monkeypatch):
    monkeypatch.setattr(fused_decoder, "_LEAST", 0)
    model = build("llama", dtype=torch.bfloat16).float()
    other = deepcopy(model)
    tokens = tiny_prompt(size=16, seed=1).split(1, 1)
    logits = []
    for one, decode in ((model, "auto"), (other, "eager")):
        with kvsieve.attach(one, kvsieve.plan("full"), decode=decode) as sieve, torch.no_grad():
            cache = sieve.prefill(PROMPT)
            for number, token in enumerate(tokens):
                if number == 8:
                    one.model.layers[2].mlp.up_proj.weight.mul_(2)
                logits.append(sieve.feed(cache, token, None, logits=1).logits)
    # Until there are copies, also of what was written, each token passes layer by layer.
    columns = [column for (column,) in passes]
    assert 97 in columns and 98 not in columns and columns[-1] == 105
    torch.testing.assert_close(torch.stack(logits[:16]), torch.stack(logits[16:]), atol=1e-4, rtol=1e-4)
