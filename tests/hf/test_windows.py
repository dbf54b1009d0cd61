"""Token propagation across windows: they go by original positions, however many tokens were dropped in between."""

from __future__ import annotations

import pytest
import torch
from transformers import logging

import kvsieve
from eager import exact_eager
from kvsieve.hf.cache.layer import WindowLayer
from kvsieve.hf.model.support import why_unsupported
from tiny import greedy, tiny_prompt
from tiny_models import build

logging.set_verbosity_error()

WINDOW = 16
# Ministral-8B: one layer of four attends to everything.
MINISTRAL_8B = {"num_hidden_layers": 8, "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 2}
MODELS = {
    "ministral": (MINISTRAL_8B, 4),
    "mistral": ({"sliding_window": None}, 1),
    "gemma3_text": ({}, 1),
    "gpt_oss": ({}, 1),
}
GREEDY = greedy(max_new_tokens=30, return_dict_in_generate=True, output_logits=True)


def by_hand(model, ids, kept, prompt, source):
    """Logits of the tokens from the prompt's last on: layers behind `source` run over kept tokens and what follows.

    Every layer gets its mask, of positions.
    """
    decoder, config = model.model, model.config
    positions = torch.arange(ids.shape[1])[None]
    hidden = decoder.embed_tokens(ids)
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    for index, layer in enumerate(decoder.layers):
        apart = positions[:, :, None] - positions[:, None]
        seen = apart >= 0
        if types[index] == "sliding_attention":
            seen &= apart < WINDOW
        # What float32 has, too: eager attention takes the softmax there.
        mask = torch.zeros(seen.shape, dtype=hidden.dtype).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
        rotary = (hidden, positions, types[index]) if config.model_type == "gemma3_text" else (hidden, positions)
        made = layer(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=decoder.rotary_emb(*rotary),
        )
        hidden = made[0] if isinstance(made, tuple) else made
        if index == source:
            stays = torch.cat([kept, torch.arange(prompt, ids.shape[1])])
            hidden, positions = hidden[:, stays], positions[:, stays]
    new = ids.shape[1] - prompt
    return model.lm_head(decoder.norm(hidden)[:, -new - 1 : -1])[0]


@pytest.mark.parametrize("rate", [0.1, 0.4])
@pytest.mark.parametrize("name", MODELS)
def test_deep_layers_see_what_lies_within_their_window(name, rate):
    changes, source = MODELS[name]
    model = build(name, dtype=torch.float64, **changes)
    ids = tiny_prompt(1, 150, seed=3)
    plan = kvsieve.Plan(propagate=kvsieve.methods.TSP(rate=rate, layer=source, window=4), name="tsp")
    with kvsieve.attach(model, plan) as sieve:
        ours = [sieve.generate(ids, **GREEDY), sieve.generate(ids, chunk=40, **GREEDY)]
    last = max(ours[0].cache.sieve_layers)
    layers = ours[0].cache.all_layers
    kept = layers[last].store.index[0, 0].long() if last > source else None
    if kept is None:
        kept = _chosen(model, plan, ids, source)
    kept = kept[kept < 150]
    assert len(kept) == round(150 * rate) and ours[0].stats.deep_tokens == len(kept)
    assert (kept.diff() > WINDOW // 4).any(), "holes are what this is about"
    model.set_attn_implementation("eager")
    with exact_eager(), torch.no_grad():
        wanted = by_hand(model, ours[0].sequences, kept, 150, source)
    for each in ours:
        torch.testing.assert_close(torch.cat(each.output.logits).double(), wanted, atol=1e-4, rtol=0)
    for index, layer in enumerate(layers):
        if isinstance(layer, WindowLayer):
            assert layer.store.size <= WINDOW + layer.room
            assert layer.holes == (index > source)


def _chosen(model, plan, ids, source):
    """Tokens that go on, told by the layer behind the source layer."""
    seen = []
    handle = model.model.layers[source + 1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    with kvsieve.attach(model, plan) as sieve:
        sieve.prefill(ids)
    handle.remove()
    return seen[0][0]


def test_a_long_answer_holds_no_more_than_a_window():
    """In every row of a padded batch, with holes, and the answer is that of the row alone."""
    model = build("ministral", dtype=torch.float64, **MINISTRAL_8B)
    ids = tiny_prompt(2, 90, seed=3)
    mask = torch.ones_like(ids)
    ids[1, :31], mask[1, :31] = 0, 0
    plan = kvsieve.plan("fastkv", budget=30, tsp_layer=4, tsp_rate=0.3, window=4, paper=True)
    assert why_unsupported(model, plan) is None
    long = {**GREEDY, "max_new_tokens": 100}
    with kvsieve.attach(model, plan) as sieve:
        both = sieve.generate(ids, mask, **long)
        alone = sieve.generate(ids[1:, 31:], **long)
    for mine, its in zip(both.output.logits, alone.output.logits, strict=True):
        torch.testing.assert_close(mine[1:], its, atol=1e-6, rtol=0)
    windows = [layer for layer in both.cache.all_layers if isinstance(layer, WindowLayer)]
    assert len(windows) == 6
    for layer in windows:
        assert layer.store.size <= WINDOW + layer.room and layer.store.capacity <= 2 * WINDOW + layer.room
