"""While a prompt is read, the host waits for the device a few times, however many layers the model has."""

from __future__ import annotations

import functools

import pytest
import torch

import kvsieve
from faraway import Away, sent, watched
from small import plan_of, stored
from tiny import tiny_prompt
from tiny_models import build

pytestmark = pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")

# Of ids, whether they are known, on the way to the driver and by the decoder's hook; of a mask, whether it hides any.
CHECKS = 3
# And once for all layers, whether scores are numbers.
ONCE = CHECKS + 1
# The others' waits: of the whole prompt, and of each layer.
MORE = {
    "a-shape": (CHECKS + 2, 1),
    "adakv": (ONCE + 1, 1),
    "asl": (6, 0),
    "cake": (ONCE, 2),
    # A table of blocks is gathered by the host, for every head and chunk.
    "compactattention": (CHECKS + 2, 45),
    "corm": (ONCE, 1),
    "critiprefill": (CHECKS + 2, 1),
    "criticaladakv": (ONCE + 1, 1),
    "d2o": (ONCE, 2),
    "defensivekv": (ONCE, 3),
    "dynamickv": (ONCE, 3),
    "fastgen": (ONCE, 1),
    "flashprefill": (CHECKS + 2, 1),
    "flexprefill": (CHECKS + 2, 1),
    "gemfilter": (9, 0),
    "lookahead": (11, 0),
    "minference": (CHECKS + 2, 1),
    "mixed": (ONCE + 6, 17),
    "simlayerkv": (ONCE, 1),
    "specprefill": (13, 0),
    "squeezeattention": (ONCE, 2),
    "threshold": (ONCE, 1),
    "xattention": (CHECKS + 2, 1),
    "zigzagkv": (ONCE, 2),
}
# These move a prompt's tokens to and fro between passes.
ELSEWHERE = ("attentionmatching", "finch", "kvcompose", "kvsquared", "kvzip", "per-layer", "rerotation")
METHODS = [name for name in kvsieve.list_methods() if not kvsieve.method_info(name).is_codec and name not in ELSEWHERE]


@functools.cache
def models(layers):
    here = build("llama", num_hidden_layers=layers, dtype=torch.float64)
    return here, sent(build("llama", num_hidden_layers=layers, dtype=torch.float64))


def prompt(rows=1):
    return tiny_prompt(rows, 150, seed=1)


def kept(cache, padding=(0,)):
    """Which tokens are stored, and the last keys of first heads."""
    return stored(cache, padding), [layer.store.keys[:, :1, -20:].cpu() for layer in cache.layers]


def assert_same(found, wanted):
    assert found[0] == wanted[0]
    for mine, other in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("name", METHODS)
def test_waits_do_not_grow_with_the_layers(name):
    """And what is kept there is what is kept here."""
    least, each = MORE.get(name, (ONCE, 0))
    for layers in (3, 5):
        here, away = models(layers)
        with kvsieve.attach(away, plan_of(name, here)) as sieve, watched() as waits:
            cache = sieve.prefill(Away(prompt()))
            assert sum(waits.values()) <= least + each * layers, waits
            found = kept(cache)
    with kvsieve.attach(here, plan_of(name, here)) as sieve:
        assert_same(found, kept(sieve.prefill(prompt())))


@pytest.mark.parametrize("name", ["snapkv", "lagkv", "fastkv", "rocketkv", "knorm"])
def test_chunks_and_later_turns_wait_no_more(name):
    """But for the ids of each chunk."""
    here, away = models(3)
    ids = prompt()
    with kvsieve.attach(away, plan_of(name, here)) as sieve, watched() as waits:
        cache = sieve.prefill(Away(ids[:, :90]), chunk=30)
        assert sum(waits.values()) <= ONCE + 2, waits
        waits.clear()
        cache = sieve.prefill(Away(ids), cache=cache)
        assert sum(waits.values()) <= ONCE, waits
        found = kept(cache)
    with kvsieve.attach(here, plan_of(name, here)) as sieve:
        assert_same(found, kept(sieve.prefill(ids, cache=sieve.prefill(ids[:, :90], chunk=30))))


@pytest.mark.parametrize("name", ["snapkv", "lagkv", "adakv", "fastkv", "knorm"])
def test_what_is_kept_of_padded_rows_is_the_same(name):
    here, away = models(3)
    ids, mask = prompt(2), torch.ones(2, 150, dtype=torch.long)
    mask[1, :37] = 0
    with kvsieve.attach(away, plan_of(name, here)) as sieve, watched() as waits:
        cache = sieve.prefill(Away(ids), Away(mask))
        # Attention asks once per layer how rows are padded; LagKV which entries of a row are real.
        assert sum(waits.values()) <= ONCE + 6 + 3 * {"lagkv": 5, "adakv": 2}.get(name, 1), waits
        found = kept(cache, (0, 37))
    with kvsieve.attach(here, plan_of(name, here)) as sieve:
        assert_same(found, kept(sieve.prefill(ids, mask), (0, 37)))


def test_scores_that_are_no_numbers_are_refused_when_the_prompt_has_been_read():
    _, away = models(3)
    weight = away.model.layers[0].self_attn.k_proj.weight.inner
    before = weight.clone()
    try:
        weight.fill_(float("nan"))
        plan = kvsieve.plan("snapkv", budget=40, window=4)
        with kvsieve.attach(away, plan) as sieve, watched(), pytest.raises(ValueError, match="NaN"):
            sieve.prefill(Away(prompt()))
    finally:
        weight.copy_(before)
