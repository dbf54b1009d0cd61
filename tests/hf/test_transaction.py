"""Several tokens of an answer fed at once equal the same tokens fed one by one, and those taken back leave no trace."""

from __future__ import annotations

import functools

import pytest
import torch

import kvsieve
from codecs_of_tests import Formats
from kvsieve.core.codes import CodeFormat
from kvsieve.errors import CacheStateError, InputError, UnsupportedOptionError
from kvsieve.hf.cache.layer import StoreLayer, WindowLayer
from kvsieve.hf.compat import CACHE
from kvsieve.hf.forward.one_by_one import StatesTransaction, StepsTransaction
from kvsieve.hf.forward.parts import PartSession
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.runtime import AttachedModel
from kvsieve.methods import H2O, HSA, AdaKV, SnapKV
from small import plan_of
from tiny_models import build

CODEC = Formats(of_keys=CodeFormat(8, "channel"), of_values=CodeFormat(8, "token", 16), block=8, tail=4)
SMALL = {"budget": 16, "window": 4}
# By name: family of models, and the plan.
CASES = {
    "full": ("llama", "full", {}),
    "snapkv": ("llama", "snapkv", SMALL),
    "snapkv every=3": ("llama", "snapkv", {**SMALL, "every": 3}),
    "h2o": ("llama", "h2o", {"budget": 16}),
    "h2o every=3": ("llama", "h2o", {"budget": 16, "every": 3}),
    "h2o, which begins to evict": ("llama", "h2o", {"budget": 60}),
    "tova": ("llama", "tova", {"budget": 16}),
    "tova every=2": ("llama", "tova", {"budget": 16, "every": 2}),
    "streamingllm every=2": ("llama", "streamingllm", {"budget": 16, "every": 2}),
    "expected every=3": ("llama", "expectedattention", {"budget": 16, "every": 3}),
    "lagkv": ("llama", "lagkv", {"budget": 14, "lag": 4}),
    "adakv": ("llama", "adakv", SMALL),
    "adakv every=3": ("llama", "adakv", {**SMALL, "every": 3}),
    "fastkv": ("llama", "fastkv", SMALL),
    "gemfilter": ("llama", "gemfilter", {"budget": 24}),
    "quest": ("llama", "quest", {"budget": 16}),
    "quest, which begins to choose": ("llama", "quest", {"budget": 52}),
    "sparq": ("llama", "sparq", {"budget": 16}),
    "exacttopk": ("llama", "exacttopk", {"budget": 16}),
    "rocketkv": ("llama", "rocketkv", {"budget": 20, "window": 4, "kernel": 5}),
    "perturn": ("llama", "perturn", {"budget": 20, "base": "knorm"}),
    "codec": ("llama", kvsieve.Plan(codec=CODEC), {}),
    "codec and h2o": ("llama", kvsieve.Plan(evict=H2O(budget=24), codec=CODEC), {}),
    "codec and adakv every=3": (
        "llama",
        kvsieve.Plan(evict=AdaKV(base=SnapKV(budget=24, window=4, every=3)), codec=CODEC),
        {},
    ),
    "cascade every=3": ("llama", "cake", {**SMALL, "every": 3}),
    "quest shared": ("llama", "quest", {"budget": 16, "share": 2}),
    "quest shared, which begins to choose": ("llama", "quest", {"budget": 52, "share": 3}),
    "rocketkv shared": ("llama", "rocketkv", {"budget": 20, "window": 4, "kernel": 5, "share": 2}),
    "kascade": ("llama", "kascade", {"budget": 16}),
    "clusterkv": ("llama", "clusterkv", {"budget": 24, "sinks": 2, "per_cluster": 8, "chunk_length": 4}),
    "infllm": ("llama", "infllm", {"budget": 20, "local": 6, "block": 3}),
    "codec and hsa shared": ("llama", kvsieve.Plan(read=HSA(budget=16, share=2), codec=CODEC), {}),
    "windows, read shared": ("gemma3_text", "quest", {"budget": 16, "share": 8}),
    "shared KV, read shared": ("gemma3n_text", "quest", {"budget": 16, "share": 2}),
    "windows": ("gemma3_text", "h2o", {"budget": 16}),
    "sinks": ("gpt_oss", "tova", {"budget": 16}),
    "latent": ("deepseek_v3", "h2o", {"budget": 16}),
    "latent, full": ("deepseek_v3", "full", {}),
    "shared KV": ("gemma3n_text", "h2o", {"budget": 16}),
    "shared KV, read": ("gemma3n_text", "quest", {"budget": 16}),
    "shared KV, full": ("gemma3n_text", "full", {}),
    "hybrid": ("qwen3_next", "snapkv", SMALL),
}
LENGTHS = 56, 47
NEW = 5


@functools.cache
def built(family):
    return build(family, dtype=torch.float64)


def planned(case):
    family, name, given = CASES[case]
    model = built(family)
    return model, name if isinstance(name, kvsieve.Plan) else plan_of(name, model, **given)


def tokens(rows, size, seed):
    return torch.randint(3, 120, (rows, size), generator=torch.Generator().manual_seed(seed))


def feed(sieve, cache, ids, **request):
    mask = cache.conversation.mask
    mask = None if mask is None else torch.cat([mask, mask.new_ones(ids.shape)], 1)
    return sieve.feed(cache, ids, mask, PassRequest(phase="decode", **request), logits=ids.shape[1])


def one_by_one(sieve, cache, ids):
    """Logits [B, L, V]."""
    return torch.cat([feed(sieve, cache, token).logits for token in ids.split(1, 1)], 1)


def kept(cache, row):
    """Keys and values of a row's real entries, by layer and head; of a window, those that the next token sees."""
    found = []
    for layer in cache.all_layers:
        if isinstance(layer, StoreLayer):
            store, last = layer.store, slice(1 - layer.window.span if isinstance(layer, WindowLayer) else None, None)
            real = torch.ones(store.keys.shape[:3], dtype=torch.bool) if store.valid is None else store.valid
            real = real.expand(store.keys.shape[:3])[row]
            for head, there in enumerate(real):
                found += [store.keys[row, head][there][last], store.values[row, head][there][last]]
    return found


def close(ours, theirs):
    """Some parts of models compute in float32."""
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def read(sieve, rows=(0, 1)):
    """A cache after prompts of different lengths, and two tokens of the answers."""
    ids = [tokens(1, length, seed) for seed, length in enumerate(LENGTHS)]
    most = max(LENGTHS[row] for row in rows)
    padded = torch.cat([torch.nn.functional.pad(ids[row], (most - LENGTHS[row], 0)) for row in rows])
    mask = torch.stack([torch.arange(most) >= most - LENGTHS[row] for row in rows]).long()
    cache = sieve.prefill(padded, mask)
    one_by_one(sieve, cache, tokens(2, 2, 9)[list(rows)])
    return cache


@pytest.mark.parametrize("case", [case for case in CASES if case != "hybrid"])
def test_tokens_at_once_equal_tokens_one_by_one(case):
    model, plan = planned(case)
    ids, more = tokens(2, NEW, 5), tokens(2, 3, 6)
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        before = read(sieve)
        plains, logits = [before.fork()], []
        for token in ids.split(1, 1):
            plains.append(plains[-1].fork())
            logits.append(feed(sieve, plains[-1], token).logits)
        wanted = torch.cat(logits, 1)
        at_once = before.fork()
        close(feed(sieve, at_once, ids).logits, wanted)
        for count in (NEW, 3, 1, 0):
            tried, plain = before.fork(), plains[count]
            found = feed(sieve, tried, ids, tentative=True)
            close(found.logits, wanted)
            found.transaction.accept(count)
            same_records(tried, plain)
            for row in (0, 1):
                close(kept(tried, row), kept(plain, row))
            close(one_by_one(sieve, tried, more), one_by_one(sieve, plain, more))
            same_records(tried, plain)


def sizes_of_parts(monkeypatch):
    """Note, by layer, how many tokens attend together."""
    parts = {}
    own = PartSession.read

    def noted(self, index, layer, asked):
        parts.setdefault(index, []).append(self.tokens.size)
        return own(self, index, layer, asked)

    monkeypatch.setattr(PartSession, "read", noted)
    return parts


@pytest.mark.parametrize("together", [True, False])
def test_recurrent_layers_at_once_and_one_by_one(together, monkeypatch):
    """Which of them is decided by a trial of the model, by the clock too."""
    monkeypatch.setattr(AttachedModel, "_continues_together", together)
    test_tokens_at_once_equal_tokens_one_by_one("hybrid")
    test_rows_accept_different_numbers("hybrid")
    model, plan = planned("hybrid")
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        found = feed(sieve, read(sieve), tokens(2, NEW, 5), tentative=True)
        assert isinstance(found.transaction, StatesTransaction if together else StepsTransaction)


def test_recurrent_layers_that_compute_several_tokens_otherwise_take_them_one_by_one():
    model = build("zamba2", dtype=torch.float32)
    with kvsieve.attach(model, kvsieve.Plan()) as sieve, torch.no_grad():
        cache = sieve.prefill(tokens(1, 20, 1))
        assert isinstance(feed(sieve, cache, tokens(1, 2, 5), tentative=True).transaction, StepsTransaction)


ONLY_STORE = ["full", "adakv", "quest", "sparq", "exacttopk", "rocketkv", "perturn", "shared KV, read"]


@pytest.mark.parametrize("case", ONLY_STORE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_layers_that_only_store_attend_at_once(case, dtype, monkeypatch):
    """In float32 by C, where it is compiled."""
    family, name, given = CASES[case]
    model = build(family, dtype=dtype)
    ids, more = tokens(2, NEW, 5), tokens(2, 2, 6)
    with kvsieve.attach(model, plan_of(name, model, **given)) as sieve, torch.no_grad():
        before = read(sieve)
        wanted = one_by_one(sieve, before.fork(), torch.cat([ids[:, :3], more], 1))
        parts = sizes_of_parts(monkeypatch)
        found = feed(sieve, before, ids, tentative=True)
        assert parts and all(sizes == [NEW] for sizes in parts.values())
        found.transaction.accept(3)
        close(torch.cat([found.logits[:, :3], feed(sieve, before, more).logits], 1), wanted)


@pytest.mark.parametrize(
    ("case", "sizes"),
    {
        "full": [5],
        "snapkv every=3": [1, 3, 1],
        "h2o every=3": [1, 3, 1],
        "h2o": [1, 1, 1, 1, 1],
        "tova every=2": [2, 2, 1],
        "lagkv": [1, 3, 1],
        "codec": [5],
        "shared KV": [1, 1, 1, 1, 1],
    }.items(),
)
def test_tokens_pass_a_layer_together_up_to_the_next_act(case, sizes, monkeypatch):
    model, plan = planned(case)
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        cache = read(sieve)
        parts = sizes_of_parts(monkeypatch)
        feed(sieve, cache, tokens(2, NEW, 5))
    assert parts and all(found == sizes for found in parts.values())


def same_records(ours, theirs):
    """What is counted of two conversations is equal."""
    assert ours.num_seen == theirs.num_seen and ours.get_seq_length() == theirs.get_seq_length()
    assert [layer.get_seq_length() for layer in ours.sieve_layers.values()] == [
        layer.get_seq_length() for layer in theirs.sieve_layers.values()
    ]
    one, two = ours.turn, theirs.turn
    assert (one.decoded, one.record.evicted) == (two.decoded, two.record.evicted)
    for name in ("tokens", "entries", "entry_bytes", "whole_bytes", "sparse"):
        assert getattr(one.record.reads, name) == getattr(two.record.reads, name), name


# Encoded again, a row's entries differ from those of the row alone, which also rows of one number do.
ALONE = [case for case in CASES if case not in ("codec and adakv every=3", "cascade every=3", "hybrid")]


@pytest.mark.parametrize("case", ALONE)
def test_rows_accept_different_numbers(case):
    """Each row then goes on as it would alone."""
    model, plan = planned(case)
    more = tokens(2, 3, 6)
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        before, alone = read(sieve), [read(sieve, [row]) for row in (0, 1)]
        for counts in ((1, 4), (NEW, 0)):
            tried = before.fork()
            apart = [cache.fork() for cache in alone]
            # Twice, so that padding lies among the tokens of the second pass.
            for seed in (5, 7):
                ids = tokens(2, NEW, seed)
                feed(sieve, tried, ids, tentative=True).transaction.accept(counts)
                for row, cache in enumerate(apart):
                    if counts[row]:
                        one_by_one(sieve, cache, ids[row : row + 1, : counts[row]])
            for row, cache in enumerate(apart):
                close(kept(tried, row), kept(cache, 0))
            found = one_by_one(sieve, tried, more)
            for row, cache in enumerate(apart):
                close(found[row], one_by_one(sieve, cache, more[row : row + 1])[0])


def entries(cache):
    return [kept(cache, row) for row in range(cache.conversation.batch)]


@pytest.mark.parametrize("case", ["full", "snapkv", "adakv", "quest", "codec", "latent, full"])
def test_a_cache_is_cropped_where_tokens_were_only_stored(case):
    model, plan = planned(case)
    ids, more = tokens(2, 4, 5), tokens(2, 3, 6)
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        before = read(sieve)
        for count in (-3, before.num_seen + 1):
            cropped, plain = before.fork(), before.fork()
            one_by_one(sieve, cropped, ids)
            snapshot = cropped.snapshot()
            cropped.crop(count)
            one_by_one(sieve, plain, ids[:, :1])
            close(entries(cropped), entries(plain))
            close(one_by_one(sieve, cropped, more), one_by_one(sieve, plain, more))
            # What was noted down before stays.
            cropped.rollback(snapshot)
            one_by_one(sieve, plain := before.fork(), ids)
            close(one_by_one(sieve, cropped, more), one_by_one(sieve, plain, more))


@pytest.mark.parametrize("case", ["full", "h2o every=3", "adakv", "windows", "codec and h2o"])
def test_candidates_of_plain_calls_are_taken_back(case):
    """As transformers' assisted decoding does: several tokens after a prompt are no turn of their own then."""
    model, plan = planned(case)
    ids, more = tokens(1, NEW, 5), tokens(1, 3, 6)
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        tried, plain = (read(sieve, [0]) for _ in range(2))
        tried.activate_past_recording()
        for count in (2, NEW):
            model(ids, **{CACHE: tried})
            tried.crop(count - NEW)
            one_by_one(sieve, plain, ids[:, :count])
        assert tried.turn.number == plain.turn.number == 0
        close(entries(tried), entries(plain))
        close(one_by_one(sieve, tried, more), one_by_one(sieve, plain, more))


def test_what_cannot_be_taken_back_is_refused_by_name():
    ids = tokens(1, 3, 5)
    model, plan = planned("h2o")
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        with pytest.raises(UnsupportedOptionError, match="h2o acts: read the prompt before"):
            sieve.new_cache().activate_past_recording()
        cache = read(sieve, [0])
        with pytest.raises(UnsupportedOptionError, match="h2o acts while decoding; call activate_past_recording"):
            cache.crop(-1)
        found = feed(sieve, cache, ids, tentative=True)
        for wrong in (4, -1, [1, 2]):
            with pytest.raises(InputError, match=r"accept takes how many of 3 tokens stay"):
                found.transaction.accept(wrong)
        feed(sieve, cache, ids[:, :1])
        with pytest.raises(CacheStateError, match="until anything else happens to the cache"):
            found.transaction.accept(1)
        with feed(sieve, cache, ids, tentative=True).transaction:
            assert cache.num_seen == LENGTHS[0] + 2 + 3 + 1 + 3
        assert cache.num_seen == LENGTHS[0] + 2 + 3 + 1
        fresh = sieve.new_cache()
        with pytest.raises(CacheStateError, match="this turn's prompt is not complete"):
            feed(sieve, fresh, ids, tentative=True)
        with pytest.raises(InputError, match="3 columns are to be taken back, and 0 were fed"):
            fresh.crop(-3)
    model, plan = planned("snapkv")
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        cache = read(sieve, [0])
        with pytest.raises(UnsupportedOptionError, match="1 of them are of the prompt, on which snapkv has acted"):
            cache.crop(-3)
    model, plan = planned("hybrid")
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        cache = read(sieve, [0])
        assert not cache.is_croppable
        with pytest.raises(UnsupportedOptionError, match="recurrent layers do not go back"):
            cache.activate_past_recording()
    model, plan = planned("cascade every=3")
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        cache = read(sieve)
        found = feed(sieve, cache, tokens(2, 3, 5), tentative=True)
        with pytest.raises(
            UnsupportedOptionError, match=r"rows accept different numbers of tokens, \[1, 2\], and cake"
        ):
            found.transaction.accept([1, 2])
        found.transaction.accept(1)
