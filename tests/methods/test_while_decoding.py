"""Evictors that act while decoding: TOVA, H2O, and any other with `every`."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.hf.compat import CACHE
from kvsieve.methods import H2O, TOVA, TSP, LagKV
from layers import context, kept
from scored import best
from tiny import tiny_prompt

PLANS = {
    "tova": {"budget": 20},
    "h2o": {"budget": 20},
    "streamingllm": {"budget": 20, "every": 1},
    "knorm": {"budget": 20, "every": 4},
    "snapkv": {"budget": 20, "window": 5, "kernel": 3, "every": 3},
}


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(2, 40, seed=5)


def attention(query, keys, scale):
    """[Hq, L, N] causal weights of the last L of N entries, from the definition."""
    groups, length, new = query.shape[0] // keys.shape[0], keys.shape[1], query.shape[1]
    logits = torch.stack([query[h] @ keys[h // groups].T * scale for h in range(query.shape[0])])
    hidden = torch.arange(length) > torch.arange(length - new, length)[:, None]
    return logits.masked_fill(hidden, float("-inf")).softmax(-1)


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8], ids=lambda g: f"G{g}")
def test_tova_and_h2o_equal_the_slow_reference_in_padded_batches(groups):
    torch.manual_seed(groups)
    length, padding = 601 if groups == 2 else 53, [0, 17]
    query = torch.randn(2, 2 * groups, length, 8, dtype=torch.float64)
    keys = torch.randn(2, 2, length, 8, dtype=torch.float64)
    for row, pad in enumerate(padding):
        ctx = context(query, keys, padding=padding)
        true = length - pad
        weights = attention(query[row, :, pad:], keys[row, :, pad:], ctx.scale)
        last = weights[:, -1].mean(0).tolist()
        wanted = [pad + j for j in best(last, int(0.3 * true))]
        assert kept(TOVA(budget="30%"), ctx, row) == [wanted] * 2
        count = int(0.3 * true)
        for head, ours in enumerate(kept(H2O(budget="30%"), context(query, keys, padding=padding), row)):
            mass = weights[head * groups : (head + 1) * groups].sum((0, 1)).tolist()
            recent = range(true - count // 2, true)
            heavy = best([float("-inf") if j in recent else mass[j] for j in range(true)], count - count // 2)
            assert ours == [pad + j for j in sorted([*heavy, *recent])]


def test_h2o_by_hand():
    # Two tokens: the second attends to both alike (0.5 each). Three: the third looks at slot 1 only.
    keys = torch.tensor([[0.0, 0.0], [0.0, 20.0], [0.0, 0.0], [0.0, 0.0]])[None, None]
    query = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]])[None, None]
    # Mass: slot 0 has 1 + 0.5, slot 1 has 0.5 + 1 + 1, slots 2 and 3 next to nothing.
    ctx = context(query, keys, scale=1.0)
    assert kept(H2O(budget=2), ctx) == [[1, 3]]
    assert kept(H2O(budget=3, recent=0.4), context(query, keys, scale=1.0)) == [[0, 1, 3]]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.slow
def test_a_long_generation_stays_within_its_budget(model, ids, name):
    plan = kvsieve.plan(name, **PLANS[name])
    slack = plan.evict.every - 1
    sizes, bytes_held = [], []
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.new_cache()

        def watch(module, args, output):
            sizes.append(max(cache.entries()))
            bytes_held.append(cache.nbytes())

        handle = model.register_forward_hook(watch)
        sieve.generate(ids[:1], cache=cache, max_new_tokens=400, min_new_tokens=400, do_sample=False)
        handle.remove()
    assert max(sizes) <= 20 + slack and min(sizes) == 20
    assert len(set(bytes_held[1:])) == 1, "buffers serve on"
    assert cache.get_seq_length() == 40 + 399


@pytest.mark.parametrize("name", PLANS)
def test_a_share_is_one_of_the_prompt(model, ids, name):
    plan = kvsieve.plan(name, **{**PLANS[name], "budget": "50%"})
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.generate(ids[:1], max_new_tokens=61, min_new_tokens=61, do_sample=False).cache
    # 60 generated tokens are stored, a multiple of every `every`.
    assert set(cache.entries()) == {20}


@pytest.mark.parametrize("name", PLANS)
def test_rows_of_a_batch_go_their_own_way(model, ids, name):
    ids, mask = ids.clone(), torch.ones_like(ids)
    ids[1, :9], mask[1, :9] = 0, 0
    plan = kvsieve.plan(name, **{**PLANS[name], "budget": "50%"})
    with kvsieve.attach(model, plan) as sieve:
        together = sieve.generate(ids, mask, max_new_tokens=15, min_new_tokens=15, do_sample=False).sequences
        alone = sieve.generate(ids[1:, 9:], max_new_tokens=15, min_new_tokens=15, do_sample=False).sequences
        beams = sieve.generate(ids, mask, max_new_tokens=8, num_beams=3, do_sample=False).sequences
        beam = sieve.generate(ids[1:, 9:], max_new_tokens=8, num_beams=3, do_sample=False).sequences
    assert torch.equal(together[1, 40:], alone[0, 31:])
    assert torch.equal(beams[1, 40:][: beam.shape[1] - 31], beam[0, 31:])


@pytest.mark.parametrize("name", ["h2o", "tova", "streamingllm"])
def test_chunks_change_nothing(model, ids, name):
    plan = kvsieve.plan(name, **PLANS[name])
    with kvsieve.attach(model, plan) as sieve:
        whole = sieve.generate(ids[:1], max_new_tokens=12, do_sample=False)
        parts = sieve.generate(ids[:1], chunk=7, max_new_tokens=12, do_sample=False)
    assert torch.equal(whole.sequences, parts.sequences)
    for one, other in zip(whole.cache.sieve_layers.values(), parts.cache.sieve_layers.values(), strict=True):
        assert torch.equal(one.store.index, other.store.index)


def test_decoding_keeps_what_the_slow_reference_keeps(model, ids):
    """First layer only: its keys and queries do not depend on what was evicted elsewhere."""
    steps, budget = 12, 20
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        seen = {}

        def spy(module, args, kwargs, output):
            seen.setdefault("hidden", []).append(kwargs.get("hidden_states", args[0] if args else None))
            seen["rope"] = module

        layer = model.get_decoder().layers[0]
        handle = layer.self_attn.register_forward_hook(spy, with_kwargs=True)
        tokens = tiny_prompt(1, 40 + steps, seed=9)
        cache = sieve.prefill(tokens)
        handle.remove()
        hidden = torch.cat(seen["hidden"], 1)
    keys = cache.sieve_layers[0].store.keys[0]
    attn = layer.self_attn
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = model.get_decoder().rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
    query = attn.q_proj(hidden).view(1, -1, model.config.num_attention_heads, keys.shape[-1]).transpose(1, 2)
    query = apply_rotary_pos_emb(query, query, cos, sin)[0][0]
    groups = query.shape[0] // keys.shape[0]
    for name in ("tova", "h2o"):
        plan = kvsieve.plan(name, budget=budget)
        with kvsieve.attach(model, plan) as sieve, torch.no_grad():
            own = sieve.prefill(tokens[:, :40])
            for step in range(steps):
                model(input_ids=tokens[:, 40 + step : 41 + step], **{CACHE: own}, use_cache=True)
        for head in range(keys.shape[0]):
            stored, mass = list(range(40)), None
            first = attention(query[:, :40], keys[:, :40], attn.scaling)
            if name == "tova":
                stored = best(first[:, -1].mean(0).tolist(), budget)
            else:
                mass = dict(enumerate(first[head * groups : (head + 1) * groups].sum((0, 1)).tolist()))
                recent = stored[-budget // 2 :]
                heavy = sorted((j for j in stored if j not in recent), key=lambda j: (-mass[j], j))
                stored = sorted([*heavy[: budget // 2], *recent])
            for now in range(40, 40 + steps):
                stored = [*stored, now]
                if name == "tova":
                    # TOVA's heads share one set, so all of them are looked at.
                    weights = torch.stack(
                        [
                            (keys[h // groups, stored] @ query[h, now] * attn.scaling).softmax(0)
                            for h in range(query.shape[0])
                        ]
                    ).mean(0)
                    stored = [stored[j] for j in best(weights.tolist(), budget)]
                    continue
                for h in range(head * groups, (head + 1) * groups):
                    weights = (keys[head, stored] @ query[h, now] * attn.scaling).softmax(0).tolist()
                    for j, weight in zip(stored, weights, strict=True):
                        mass[j] = mass.get(j, 0.0) + weight
                recent = stored[-(budget // 2) :]
                heavy = sorted((j for j in stored if j not in recent), key=lambda j: (-mass[j], j))
                stored = sorted([*heavy[: budget - budget // 2], *recent])
            assert own.sieve_layers[0].store.index[0, head].tolist() == stored, name


def test_chunkwise_evictors_do_not_go_with_propagation():
    with pytest.raises(PlanError, match="LagKV acts on every chunk.*TSP"):
        kvsieve.Plan(propagate=TSP(rate=0.3, layer=1), evict=LagKV(budget=0.2, chunks=True))


@pytest.mark.parametrize(("name", "given"), [("h2o", {"recent": 2}), ("tova", {"every": 0}), ("knorm", {"every": "x"})])
def test_bad_parameters_are_refused(name, given):
    with pytest.raises(PlanError):
        kvsieve.plan(name, **given)
