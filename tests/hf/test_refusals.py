"""Caches of another plan or model, calls after the block, and inputs that are none: refused, and named."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.cli.answers import encode
from kvsieve.cli.prompts import TextPrompt
from kvsieve.errors import CacheStateError, InputError, KvsieveError, PlanError
from kvsieve.hf.compat import CACHE
from kvsieve.methods import (
    LUKV,
    CompressKV,
    CriticalKV,
    DuoAttention,
    HeadKV,
    Kascade,
    QFilters,
    Rerotation,
    TriAttention,
    UNComp,
)
from kvsieve.planning.segments import role_spans
from tiny import greedy, tiny_prompt
from tiny_models import build
from toy_chats import chat_tokenizer
from toy_words import word_tokenizer

GREEDY = greedy(max_new_tokens=3)
PLAN = kvsieve.plan("snapkv", budget=16, window=4)
OTHERS = {
    "full": kvsieve.plan("full"),
    "other parameters": kvsieve.plan("snapkv", budget=20, window=4),
    "reader": kvsieve.plan("hsa", budget=16),
}


@pytest.fixture(scope="module")
def twin():
    """Another model of the same shape."""
    torch.manual_seed(1)
    return build("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(2, 40, seed=5)


@pytest.fixture
def used(model, ids):
    """A cache that has read `ids` under PLAN, and the next turn's ids."""
    with kvsieve.attach(model, PLAN) as sieve:
        cache = sieve.prefill(ids)
    return cache, torch.cat([ids, ids[:, :5]], 1)


def ways(sieve, model, cache, longer, path):
    """Every way in which a cache is used."""
    return {
        "generate": lambda: sieve.generate(longer, cache=cache, **GREEDY),
        "prefill": lambda: sieve.prefill(longer, cache=cache),
        "model.generate": lambda: model.generate(longer, **{CACHE: cache}, **GREEDY),
        "model": lambda: model(longer[:, -1:], **{CACHE: cache}),
        "save": lambda: sieve.save(cache, path),
    }


WAYS = list(ways(None, None, None, None, None))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OTHERS)
def test_a_cache_of_another_plan_is_refused(model, used, tmp_path, name, way):
    cache, longer = used
    before = [layer.store.keys.clone() for layer in cache.sieve_layers.values()]
    with kvsieve.attach(model, OTHERS[name]) as sieve:
        with pytest.raises(CacheStateError, match="the cache was made under 'snapkv', and this is|with other param"):
            ways(sieve, model, cache, longer, tmp_path / "it")[way]()
    assert not list(tmp_path.iterdir()) and cache.num_seen == 40
    for layer, was in zip(cache.sieve_layers.values(), before, strict=True):
        assert torch.equal(layer.store.keys, was)
    with kvsieve.attach(model, PLAN) as sieve:
        assert sieve.generate(longer, cache=cache, **GREEDY).stats.applied, "nothing was lost"


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_of_another_model_is_refused(twin, used, tmp_path, way):
    with kvsieve.attach(twin, PLAN) as sieve:
        with pytest.raises(CacheStateError, match="made for another model"):
            ways(sieve, twin, *used, tmp_path / "it")[way]()
        with pytest.raises(CacheStateError, match="made for another model"):
            sieve.adopt(used[0])


def test_the_same_plan_attached_again_goes_on(model, ids, used, tmp_path):
    """A plan is what it says, not one object; forks, snapshots and files belong to whom their cache belongs to."""
    cache, longer = used
    with kvsieve.attach(model, PLAN) as sieve:
        wanted = sieve.generate(longer, cache=sieve.prefill(ids), **GREEDY).sequences
    with kvsieve.attach(model, kvsieve.Plan.from_dict(PLAN.to_dict())) as sieve:
        taken = cache.snapshot()
        sieve.save(cache, tmp_path / "it")
        loaded = sieve.load(tmp_path / "it").cache
        for mine in (cache.fork(), loaded, cache):
            assert torch.equal(sieve.generate(longer, cache=mine, **GREEDY).sequences, wanted)
        cache.rollback(taken)
        assert torch.equal(sieve.generate(longer, cache=cache, **GREEDY).sequences, wanted)
    fork = cache.fork()
    with kvsieve.attach(model, OTHERS["full"]) as sieve:
        for mine in (fork, loaded):
            with pytest.raises(CacheStateError, match="made under 'snapkv'"):
                sieve.prefill(torch.cat([wanted, ids], 1), cache=mine)


def test_an_empty_cache_belongs_to_the_plan_that_first_reads(model, ids):
    with kvsieve.attach(model, PLAN) as sieve:
        cache = sieve.new_cache()
    with kvsieve.attach(model, OTHERS["full"]) as sieve:
        assert sieve.generate(ids, cache=cache, **GREEDY).stats.kv_entries[0] == 40
    with kvsieve.attach(model, PLAN) as sieve, pytest.raises(CacheStateError, match="made under 'full'"):
        sieve.prefill(torch.cat([ids, ids], 1), cache=cache)


def test_what_was_adopted_goes_on_and_is_not_saved(model, used, tmp_path):
    cache, longer = used
    with kvsieve.attach(model, OTHERS["full"]) as sieve:
        taken = cache.snapshot()
        assert sieve.adopt(cache) is cache
        assert sieve.prefill(longer, cache=cache).entries()[0] == 16 + 5
        with pytest.raises(CacheStateError, match="two plans have read"):
            sieve.save(cache, tmp_path / "it")
        cache.rollback(taken)
        with pytest.raises(CacheStateError, match="made under 'snapkv'"):
            sieve.prefill(longer, cache=cache)


def test_a_chats_cache_belongs_to_its_plan(model):
    with kvsieve.attach(model, PLAN) as sieve:
        chat = sieve.chat(chat_tokenizer(), max_new_tokens=2)
        chat.ask("w5 w6 w7")
    with kvsieve.attach(model, OTHERS["full"]) as sieve:
        with pytest.raises(CacheStateError, match="made under 'snapkv'"):
            sieve.generate(torch.cat([chat.ids, chat.ids], 1), cache=chat.cache, **GREEDY)


def test_after_the_block_nothing_runs_without_the_plan(model, ids, tmp_path):
    with kvsieve.attach(model, PLAN) as sieve:
        cache, chat = sieve.prefill(ids), sieve.chat(chat_tokenizer(), max_new_tokens=2)
        chat.ask("w5 w6 w7")
    longer = torch.cat([ids, ids[:, :1]], 1)
    for call in (
        lambda: sieve.generate(ids, **GREEDY),
        lambda: sieve.generate(ids[:, :1], **{**GREEDY, "max_new_tokens": 1}),
        lambda: sieve.prefill(ids),
        lambda: sieve.prefill(longer, cache=cache),
        lambda: sieve.chat(chat_tokenizer()),
        lambda: chat.ask("w5"),
        lambda: chat.read("w5"),
        lambda: next(chat.stream("w5")),
    ):
        with pytest.raises(CacheStateError, match="the `with` block that attached 'snapkv' has ended"):
            call()
    for call in (
        lambda: model(longer[:, -1:], **{CACHE: cache}),
        lambda: model.generate(longer, **{CACHE: cache}, **{**GREEDY, "max_new_tokens": 1}),
        lambda: model(ids, **{CACHE: sieve.new_cache()}),
    ):
        with pytest.raises(CacheStateError, match="runs without the plan that this cache belongs to"):
            call()
    # Nothing that was read is lost: it can still be written, and goes on where the plan is attached again.
    sieve.save(cache, tmp_path / "it")
    chat.save(tmp_path / "chat")
    with kvsieve.attach(model, PLAN) as again:
        assert again.generate(longer, cache=cache, **GREEDY).stats.applied
        assert again.chat(chat_tokenizer(), load=tmp_path / "chat").messages == chat.messages


def test_a_cache_is_not_taken_through_a_model_that_is_not_attached(model, twin, used):
    cache, longer = used
    with kvsieve.attach(model, PLAN), pytest.raises(CacheStateError, match="runs without the plan"):
        twin(longer[:, -1:], **{CACHE: cache})


@pytest.mark.parametrize("value", [2, -1, 0.5, float("-inf"), float("nan")])
def test_a_mask_of_other_values_than_0_and_1_is_refused(model, ids, value):
    mask = torch.ones(ids.shape, dtype=torch.long if isinstance(value, int) else torch.float64)
    mask[1, :3], mask[1, 4] = 0, value
    with kvsieve.attach(model, PLAN) as sieve:
        for call in (
            lambda: sieve.generate(ids, mask, **GREEDY),
            lambda: sieve.prefill(ids, mask),
            lambda: model.generate(ids, attention_mask=mask, **GREEDY),
            lambda: model(ids, attention_mask=mask),
        ):
            with pytest.raises(InputError, match="attention_mask holds .*1 for tokens and 0 for padding"):
                call()


def test_masks_of_any_type_are_the_same(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with kvsieve.attach(model, PLAN) as sieve:
        wanted = sieve.generate(ids, mask, **GREEDY)
        for dtype in (torch.bool, torch.float32, torch.int8):
            result = sieve.generate(ids, mask.to(dtype), **GREEDY)
            assert torch.equal(result.sequences, wanted.sequences) and result.stats.kv_entries == [16] * 4


IDS = {
    "a list": ([[3, 4]], "got .*3, 4.*torch.tensor"),
    "floats": (torch.ones(1, 5), "must be token ids.*torch.float32"),
    "an id too high": (torch.full((1, 5), 128), "holds the id 128, the model knows 0 to 127"),
    "a negative id": (torch.full((1, 5), -1), "holds the id -1"),
    "a text": ("w5", "input_ids must be a tensor"),
    "nothing": (None, "input_ids must be a tensor"),
}


@pytest.mark.parametrize("name", IDS)
def test_ids_that_are_none_are_refused(model, name):
    bad, message = IDS[name]
    with kvsieve.attach(model, PLAN) as sieve:
        for call in (lambda: sieve.generate(bad, **GREEDY), lambda: sieve.prefill(bad)):
            with pytest.raises(InputError, match=message):
                call()
        if isinstance(bad, torch.Tensor):
            with pytest.raises(InputError, match=message):
                model(bad)


@pytest.mark.parametrize(
    "given",
    [
        {"cache": 5},
        {"cache": "x"},
        {"chunk": 1.5},
        {"chunk": "7"},
        {"chunk": True},
        {"chunk": 0},
        {"attention_mask": [[1] * 40] * 2},
        {"attention_mask": 5},
        {"progress": 5},
        {"reduce": "no"},
        {"protect": 5},
        {"question_tokens": 1.5},
        {"max_new_tokens": "9"},
        {"max_new_tokens": 1.5},
        {"num_beams": "two"},
        {"num_return_sequences": 0.5},
        {"stopping_criteria": 5},
        {"generation_config": {"do_sample": False}},
        {"pad_token_id": "x"},
        {"max_nwe_tokens": 3},
        {"synced_gpus": True},
        {"measure": 1},
        {"inputs": torch.ones(2, 40, dtype=torch.long)},
    ],
    ids=lambda given: next(iter(given)),
)
def test_arguments_of_the_wrong_kind_are_refused_and_nothing_is_read(model, ids, given):
    with kvsieve.attach(model, PLAN) as sieve:
        cache = sieve.new_cache()
        with pytest.raises(KvsieveError) as error:
            sieve.generate(ids, **{"cache": cache, "chunk": 10, **GREEDY, **given})
        assert next(iter(given)) in str(error.value)
    assert cache.num_seen == 0


@pytest.mark.parametrize(
    "given",
    [
        {"num_beams": "two"},
        {"num_return_sequences": [1]},
        {"generation_config": "x"},
        {"progress": 5},
        {"prefix_allowed_tokens_fn": 5},
        {"logits_processor": [5]},
        {"chunk": 1.5},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_chats_options_of_the_wrong_kind_are_refused(model, given):
    with kvsieve.attach(model, PLAN) as sieve:
        chat = sieve.chat(chat_tokenizer(), max_new_tokens=2)
        with pytest.raises(InputError) as error:
            chat.ask("w5", **given)
        assert next(iter(given)) in str(error.value) and chat.messages == []


def test_an_option_that_generate_itself_refuses_is_an_input_error(model, ids):
    with kvsieve.attach(model, PLAN) as sieve:
        with pytest.raises(InputError, match="top_k=-3.*strictly positive"):
            sieve.generate(ids, **{**GREEDY, "top_k": -3, "do_sample": True})
        with pytest.raises(InputError, match="temperature=tensor"):
            sieve.generate(ids, **{**GREEDY, "temperature": torch.tensor([]), "do_sample": True})
        with pytest.raises(ValueError, match="mine"):
            sieve.generate(ids, prefix_allowed_tokens_fn=broken, **GREEDY)


def broken(row, ids):
    raise ValueError("mine")


def test_what_a_tokenizer_returns_is_a_prompt(model):
    tokenizer = chat_tokenizer()
    tokenizer.padding_side = "left"
    texts = [" ".join(f"w{3 * i % 90}" for i in range(30)), "w5 w6 w7 w8 w9 w10 w11 w12"]
    encoded = tokenizer(texts, return_tensors="pt", padding=True)
    with kvsieve.attach(model, PLAN) as sieve:
        wanted = sieve.generate(encoded["input_ids"], encoded["attention_mask"], **GREEDY)
        for given in (encoded, dict(encoded)):
            result = sieve.generate(given, **GREEDY)
            assert torch.equal(result.sequences, wanted.sequences)
            assert sieve.prefill(given).conversation.mask.sum(-1).tolist() == [30, 8]
        with pytest.raises(InputError, match="attention_mask is given twice"):
            sieve.generate(encoded, encoded["attention_mask"], **GREEDY)
        with pytest.raises(InputError, match="pixel_values, which is not read"):
            sieve.prefill({**encoded, "pixel_values": 1})
        with pytest.raises(InputError, match="no input_ids"):
            sieve.prefill({"attention_mask": encoded["attention_mask"]})
        with pytest.raises(InputError, match='return_tensors="pt"'):
            sieve.prefill(tokenizer(texts))


def test_half_a_character_is_refused_in_a_chat(model):
    with kvsieve.attach(model, PLAN) as sieve:
        with pytest.raises(InputError, match="system holds half a character"):
            sieve.chat(chat_tokenizer(), "w5 \ud800")
        chat = sieve.chat(chat_tokenizer(), max_new_tokens=2)
        for call in (chat.ask, chat.read):
            with pytest.raises(InputError, match=r"at position 3 \('.ud800', a surrogate\)"):
                call("w5 \ud800 w6")
        assert chat.messages == [] and chat.context is None
    said = [{"role": "system", "content": "w5"}, {"role": "user", "content": "w6 \udcff"}]
    with pytest.raises(InputError, match="the text holds half a character"):
        role_spans(chat_tokenizer(), said)
    for bad in ({"messages": "w5"}, {"messages": [5]}, {"messages": said, "roles": 5}):
        with pytest.raises(InputError, match="must be"):
            role_spans(chat_tokenizer(), **bad)
    for tokenizer in (chat_tokenizer(), word_tokenizer()):
        with pytest.raises(InputError, match="the text holds half a character"):
            encode(tokenizer, TextPrompt("w6 \udcff"))


@pytest.mark.parametrize("path", [5, None, "", "a\0b", "\ud800", b"it", ["x"]], ids=repr)
def test_what_names_no_file_is_refused(model, used, path):
    with kvsieve.attach(model, PLAN) as sieve:
        for call in (lambda: sieve.save(used[0], path), lambda: sieve.load(path)):
            with pytest.raises(KvsieveError, match="path must be the name of a file"):
                call()


def filled(*shape):
    return [filled(*shape[1:])] * shape[0] if shape else 0.5


# Roles with arrays of layers, KV heads, query heads and channels.
ARRAYS = {
    "headkv": lambda n, h, q, d: HeadKV(heads=filled(n, h)),
    "uncomp": lambda n, h, q, d: UNComp(heads=filled(n, h)),
    "lukv": lambda n, h, q, d: LUKV(shares=filled(n, h, 9)),
    "duoattention": lambda n, h, q, d: DuoAttention(budget=20, heads=filled(n, h)),
    "compresskv": lambda n, h, q, d: CompressKV(budget=20, heads=filled(n, h)),
    "qfilters": lambda n, h, q, d: QFilters(budget=20, filters=filled(n, h, d)),
    "triattention": lambda n, h, q, d: TriAttention(budget=20, centres=filled(n, q, 2 * d)),
    "kascade": lambda n, h, q, d: Kascade(budget=20, anchor_heads=[[0] * h] * n),
    "wrapped": lambda n, h, q, d: CriticalKV(base=QFilters(budget=20, filters=filled(n, h, d))),
    "rerotated": lambda n, h, q, d: Rerotation(base=QFilters(budget=20, filters=filled(n, h, d)), question_tokens=2),
}
OFF = {"layers": (1, 0, 0, 0), "heads": (0, 1, 1, 0), "channels": (0, 0, 0, 1)}
FIT_ANY = {"kascade": ("heads", "channels")} | {
    name: ("channels",) for name in ("headkv", "uncomp", "lukv", "duoattention", "compresskv")
}


@pytest.mark.parametrize("off", OFF)
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_another_shape_than_the_models_are_refused_before_any_prefill(model, name, off):
    config = model.config
    shape = (config.num_hidden_layers, config.num_key_value_heads, config.num_attention_heads, config.head_dim)
    plans = []
    for numbers in (shape, [one + more for one, more in zip(shape, OFF[off], strict=True)]):
        role = ARRAYS[name](*numbers)
        plans.append(kvsieve.Plan(read=role) if name == "kascade" else kvsieve.Plan(evict=role))
    with kvsieve.attach(model, plans[0]):
        pass
    if off not in FIT_ANY.get(name, ()):
        with pytest.raises(PlanError, match="of this model|this model"), kvsieve.attach(model, plans[1]):
            pass
