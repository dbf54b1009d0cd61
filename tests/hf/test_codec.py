"""Plans with a codec: encoded entries go through turns, copies and files, and say what they are."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.cache import PackedStore
from kvsieve.methods import KIVI
from kvsieve.models.families import build
from kvsieve.plans import Plan

CODEC = KIVI(bits=8, block=16, tail=16)
GREEDY = {
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
    "max_new_tokens": 6,
    "return_dict_in_generate": True,
    "output_logits": True,
}


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def talk():
    """A padded batch of prompts, their mask, and what is said after the answer."""
    made = torch.Generator().manual_seed(11)
    ids = torch.randint(2, 120, (2, 90), generator=made)
    mask = torch.ones_like(ids)
    ids[1, :7], mask[1, :7] = 0, 0
    return ids, mask, torch.randint(2, 120, (2, 40), generator=made)


def with_codec(plan, codec=CODEC):
    return kvsieve.Plan(plan.propagate, plan.evict, plan.read, codec, name=plan.name)


def goes_on(sieve, result, talk, cache=None, **options):
    ids, mask, more = talk
    whole = torch.cat([result.sequences, more[: len(result.sequences)]], 1)
    ones = torch.ones(len(whole), whole.shape[1] - mask.shape[1], dtype=mask.dtype)
    mask = torch.cat([mask[: len(whole)], ones], 1)
    return sieve.generate(whole, mask, cache=result.cache if cache is None else cache, **{**GREEDY, **options})


def logits(result):
    return torch.stack(result.output.logits)


def stores(cache):
    return [layer.store for layer in cache.sieve_layers.values()]


def test_a_saved_cache_keeps_the_encoded_form(model, talk, tmp_path):
    ids, mask, _ = talk
    path = tmp_path / "talk"
    with kvsieve.attach(model, with_codec(kvsieve.plan("snapkv", budget=60, window=4))) as sieve:
        first = sieve.generate(ids, mask, **GREEDY)
        held = stores(first.cache)
        assert all(isinstance(store, PackedStore) and store.bodies[0].width for store in held)
        sieve.save(first.cache, path, ids=first.sequences)
        second = goes_on(sieve, first, talk)
        loaded = sieve.load(path)
        assert all(isinstance(store, PackedStore) for store in stores(loaded.cache))
        again = goes_on(sieve, first, talk, cache=loaded.cache)
        assert torch.equal(logits(second), logits(again))
    # Tensors of keys and values are bytes, and those of what is exact yet.
    assert path.stat().st_size < 0.7 * first.cache.fork().nbytes() + 40_000
    with (
        kvsieve.attach(model, Plan(sieve.plan.propagate, sieve.plan.evict, codec=KIVI(block=16, tail=16))) as other,
        pytest.raises(kvsieve.errors.CacheFileError, match="codec.bits is 8 in the file and 4 here"),
    ):
        other.load(path)
