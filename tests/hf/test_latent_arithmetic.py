"""What kvsieve makes of latents equals what transformers' own latent attention makes of them, family by family."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache

from attend import latent_attention
from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.compat import CACHE
from kvsieve.hf.model.latent import candidates, up_projection
from tiny import tiny_prompt
from tiny_models import available, build

LATENT = (
    "deepseek_v2 deepseek_v3 glm4_moe_lite axk1 minicpm3 youtu longcat_flash mistral4 kimi_linear bailing_hybrid"
).split()
FAMILIES = [family.name for family in available() if family.name in LATENT]


class Spy:
    """An attention implementation that hands over what it was given, and what eager attention makes of it."""

    def __init__(self) -> None:
        self.seen: list[tuple[nn.Module, dict]] = []

    def __call__(self, module, query, key, value, mask, scaling=None, **kwargs):
        logits = query @ key.transpose(2, 3) * scaling
        new, length = logits.shape[-2:]
        later = torch.ones(new, length, dtype=torch.bool).triu(length - new + 1)
        out = logits.masked_fill(later, float("-inf")).softmax(-1) @ value
        self.seen.append((module, {"query": query, "key": key, "value": value, "scale": scaling, "out": out}))
        return out.transpose(1, 2).contiguous(), None


@pytest.fixture
def spy():
    spy = Spy()
    AttentionInterface.register("latent_spy", spy)
    return spy


@pytest.mark.parametrize("name", FAMILIES)
def test_latents_give_what_the_model_attends_to(name, spy):
    model = build(name, dtype=torch.float64)
    model.set_attn_implementation("latent_spy")
    ids = tiny_prompt(2, 24, seed=0)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :20], **{CACHE: cache})
        first, spy.seen = spy.seen, []
        model(ids[:, 20:], **{CACHE: cache})
    assert first and len(spy.seen) == len(first)
    for module, given in spy.seen:
        latents, rotated = (
            part for part in (cache.layers[module.layer_idx].keys, cache.layers[module.layer_idx].values)
        )
        up = up_projection(module, latents, rotated, given["key"], given["value"], name)
        entries = torch.cat([latents, rotated], -1)
        for mine, theirs in zip(up.expand(entries), (given["key"], given["value"]), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)
        ours = latent_attention(given["query"], entries, up, scale=given["scale"])
        torch.testing.assert_close(ours, given["out"], atol=1e-11, rtol=0)


def test_a_layer_whose_keys_are_made_otherwise_is_refused(spy):
    attention = build("deepseek_v3", dtype=torch.float64).model.layers[0].self_attn
    torch.manual_seed(0)
    latents, rotated = torch.randn(1, 1, 3, 24).double(), torch.randn(1, 1, 3, 16).double()
    key, value = attention.expand_kv(latents, rotated)
    assert up_projection(attention, latents, rotated, key, value, "layer 0").rank == 24
    swapped = torch.cat([key[..., 16:], key[..., :16]], -1)
    assert up_projection(attention, latents, rotated, swapped, value, "layer 0").rotated_first
    for wrong in ((key * 1.01, value), (key, value + 0.01), (key.roll(1, 1), value)):
        with pytest.raises(UnsupportedModelError, match="layer 0 caches latents"):
            up_projection(attention, latents, rotated, *wrong, "layer 0")
    attention.kv_b_proj.weight = nn.Parameter(attention.kv_b_proj.weight.to(torch.int8), requires_grad=False)
    assert candidates(attention, 24) == []
    with pytest.raises(UnsupportedModelError, match="low-bit or offloaded"):
        up_projection(attention, latents, rotated, key, value, "layer 0")
