"""Latent attention under plans: latents are stored, all heads keep the same ones, the rest is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import kvsieve
from attend import window_weights
from kvsieve.attention import LatentQueries
from kvsieve.cache import LatentStore
from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.cache.batching import can_stack
from kvsieve.hf.forward import sparse_prompt
from kvsieve.hf.model import support
from kvsieve.hf.model.support import why_unsupported
from kvsieve.methods import SnapKV
from kvsieve.planning.plans import Plan
from kvsieve.shared.prompt import read_shared
from small import recorder_stand_in
from tiny import greedy, padded_prompt, tiny_model

GREEDY = greedy(max_new_tokens=6, return_dict_in_generate=True, output_logits=True)
RANK, ROTATED, HEADS = 24, 16, 4
PLANS = {
    "full": {},
    "snapkv": {"budget": 16, "window": 4},
    "adakv": {"budget": 16, "window": 4},
    "kvzip": {"budget": 16, "chunk_length": 16, "repeat_ids": (3, 5), "go_on_ids": (7,), "answer_ids": (9,)},
    "h2o": {"budget": 16},
    "streamingllm": {"budget": 16, "every": 1},
    "fastkv": {"budget": 16, "tsp_layer": 1, "tsp_rate": 0.5, "window": 4},
    "gemfilter": {"budget": 16, "layer": 1},
}


# What does not fit four layers as it is by default.
OWN = {"asl": {"first": 1, "observed": 2}}


@pytest.fixture(scope="module")
def model():
    return tiny_model("deepseek_v3")


@pytest.fixture(scope="module")
def prompt():
    return padded_prompt(48, 7, seed=3)


def plan(name):
    return kvsieve.plan(name, **PLANS[name])


def alike(one, other, loose=1e-5):
    return all((a - b).abs().max() < loose for a, b in zip(one.output.logits, other.output.logits, strict=True))


def test_what_is_stored_are_latents(model, prompt):
    with kvsieve.attach(model, plan("full")) as sieve:
        cache = sieve.prefill(*prompt)
    stores = [layer.store for layer in cache.sieve_layers.values()]
    assert len(stores) == 4 and all(isinstance(store, LatentStore) for store in stores)
    for store in stores:
        assert store.keys.shape == (2, 1, 48, RANK + ROTATED) and store.values.shape == (2, 1, 48, RANK)
        assert store.entry_bytes() == 2 * store.capacity * (RANK + ROTATED) * 8
    # The model's own cache holds as much; expanded keys and values would take 192 channels.
    assert cache.entries() == [48] * 4


def test_snapkv_chooses_for_all_heads_by_the_keys_the_model_attends_to(model, prompt, monkeypatch):
    seen = {}
    attend = sparse_prompt.attend

    def spy(request):
        assert isinstance(request.asked, LatentQueries)
        seen[len(seen)] = request.asked
        return attend(request)

    monkeypatch.setattr(sparse_prompt, "attend", spy)
    ids = prompt[0][:1]
    evictor = SnapKV(budget=16, window=4, kernel=1)
    with kvsieve.attach(model, Plan(evict=evictor)) as sieve:
        cache = sieve.prefill(ids)
    for index, asked in seen.items():
        weights = torch.cat([*window_weights(asked.query[:, :, -4:], asked.keys, asked.scale)], -1)
        mass = weights.sum(2).mean(1)[0, :44]
        kept = [*sorted(mass.topk(12).indices.tolist()), 44, 45, 46, 47]
        assert cache.layers[index].store.index[0, 0].tolist() == kept


@pytest.mark.parametrize("name", PLANS)
def test_a_long_second_turn_equals_one_prompt_or_a_rehearsal(model, name):
    """Later turns attend to what is stored, long ones to what is expanded of it."""
    made = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 120, (1, 160), generator=made)
    with kvsieve.attach(model, plan(name)) as sieve, torch.no_grad():
        for first in (40, 150):
            cache = sieve.prefill(ids[:, :first])
            snapshot = cache.snapshot()
            answers = [sieve.generate(ids, cache=cache, **GREEDY)]
            cache.rollback(snapshot)
            answers.append(sieve.generate(ids, cache=cache, chunk=11 if name != "gemfilter" else None, **GREEDY))
            assert answers[0].stats.applied or name == "full"
            assert alike(*answers)
    if name == "full":
        with torch.no_grad():
            reference = model.generate(ids, **GREEDY)
        # Logits are float32 and below 8: two units in the last place.
        assert max((a - b).abs().max() for a, b in zip(answers[0].output.logits, reference.logits, strict=True)) < 1e-6


@pytest.mark.parametrize("name", PLANS)
def test_rollback_fork_and_file_continue_bit_equal(model, prompt, name, tmp_path):
    ids, mask = prompt
    longer, whole = torch.cat([ids, ids[:, 20:30]], 1), torch.cat([mask, mask[:, 20:30]], 1)
    with kvsieve.attach(model, plan(name)) as sieve:
        cache = sieve.prefill(ids, mask)
        sieve.save(cache, tmp_path / "cache", ids=ids)
        taken, fork = cache.snapshot(), cache.fork()
        first = sieve.generate(longer, whole, cache=cache, **GREEDY)
        cache.rollback(taken)
        loaded = sieve.load(tmp_path / "cache")
        assert all(isinstance(layer.store, LatentStore) for layer in loaded.cache.sieve_layers.values())
        assert loaded.cache.entries() == cache.entries()
        for other in (cache, fork, loaded.cache):
            again = sieve.generate(longer, whole, cache=other, **GREEDY)
            assert torch.equal(again.sequences, first.sequences)
            assert all(torch.equal(a, b) for a, b in zip(again.output.logits, first.output.logits, strict=True))


def test_beams_and_repeated_rows(model, prompt):
    ids, mask = prompt
    for options in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        given = {**GREEDY, **options, "output_logits": False}
        reference = model.generate(ids, attention_mask=mask, **given)
        with kvsieve.attach(model, plan("full")) as sieve:
            ours = sieve.generate(ids, mask, **given)
        assert torch.equal(ours.sequences, reference.sequences)


def test_every_method_runs_or_is_refused_by_name(model):
    refused = {}
    for name in kvsieve.list_methods():
        info = kvsieve.method_info(name)
        chosen = info.make(**{**info.example, **OWN.get(name, {})})
        reason = why_unsupported(model, chosen)
        if reason is not None:
            refused[name] = reason
            assert reason.startswith("its layer 0 has latent attention")
            with pytest.raises(UnsupportedModelError, match="latent attention"), kvsieve.attach(model, chosen):
                pass
    assert {"quest", "rocketkv", "expectedattention", "criticalkv", "squeezeattention"} <= refused.keys()
    assert {"snapkv", "adakv", "kvzip", "fastkv", "h2o", "tova", "pyramidkv", "gemfilter"}.isdisjoint(refused)


def test_a_view_reads_what_evicting_would_leave(model, prompt):
    ids, mask = prompt
    view = Plan(evict=kvsieve.methods.PerTurn(base=SnapKV(budget=16, window=4)))
    with kvsieve.attach(model, view) as sieve:
        seen = sieve.generate(ids, mask, **GREEDY)
    with kvsieve.attach(model, Plan(evict=view.evict.base)) as sieve:
        kept = sieve.generate(ids, mask, **GREEDY)
    assert alike(seen, kept) and seen.cache.entries() == [53] * 4 and kept.cache.entries() == [21] * 4


def test_one_reading_serves_many_evictors(model, prompt):
    """As evaluation does it: what an evictor keeps of a shared reading is what the plan itself keeps."""
    ids = prompt[0][:1]
    chosen = Plan(evict=SnapKV(budget=16, window=4, kernel=3))
    shared = read_shared(model, None, ids, torch.ones_like(ids), window=8)
    cache = shared.reduced(chosen.evict)
    with kvsieve.attach(model, chosen) as sieve:
        own = sieve.prefill(ids)
    for mine, theirs in zip(cache.sieve_layers.values(), own.sieve_layers.values(), strict=True):
        assert isinstance(mine.store, LatentStore)
        assert torch.equal(mine.store.index, theirs.store.index) and torch.equal(mine.store.keys, theirs.store.keys)
    assert not can_stack([cache, own])


def test_a_set_per_query_head_is_refused(model, prompt):
    each = Plan(evict=SnapKV(budget=16, window=4, per_query_head=True))
    with kvsieve.attach(model, each) as sieve, pytest.raises(UnsupportedModelError, match="per_query_head"):
        sieve.generate(*prompt, **GREEDY)


def test_decoding_with_fixed_shapes_runs_eagerly_and_says_why(model, prompt):
    with recorder_stand_in(), kvsieve.attach(model, plan("snapkv"), decode="graph") as sieve:
        result = sieve.generate(*prompt, **GREEDY)
    assert "latent attention" in str(result.stats.decoding)


def test_weights_that_do_not_expand_the_latents_are_refused(model, prompt):
    ids, mask = prompt
    other = copy.deepcopy(model)
    expand = other.model.layers[2].self_attn.kv_b_proj
    handle = expand.register_forward_hook(lambda module, given, out: out * 1.5)
    with (
        kvsieve.attach(other, plan("snapkv")) as sieve,
        pytest.raises(UnsupportedModelError, match=r"layer 2 .*no linear layer of it is the up-projection"),
    ):
        sieve.generate(ids, mask, **GREEDY)
    handle.remove()
    with kvsieve.attach(other, plan("snapkv")) as sieve:
        before = sieve.generate(ids, mask, **GREEDY)
        # Changed in place inside the block: what is found is the weight as it is now.
        with torch.no_grad():
            expand.weight.mul_(1.5)
        after = sieve.generate(ids, mask, **GREEDY)
    assert not alike(before, after)
    with kvsieve.attach(other, plan("snapkv")) as sieve:
        assert alike(after, sieve.generate(ids, mask, **GREEDY))
    expand.weight = nn.Parameter(expand.weight.to(torch.int8), requires_grad=False)
    assert "layer 2 has latent attention, and no linear layer with plain weights" in why_unsupported(
        other, plan("full")
    )


def test_heads_divided_among_processes_are_refused(model, monkeypatch):
    monkeypatch.setattr(support, "tensor_parallel_mesh", lambda given: object())
    assert "run it on one process" in why_unsupported(model, plan("snapkv"))


def test_a_profile_is_of_one_head_of_latents(model):
    shape = kvsieve.planning.profiles.Fingerprint.of(model)
    assert (shape.query_heads, shape.kv_heads, shape.head_dim) == (HEADS, 1, RANK + ROTATED)
