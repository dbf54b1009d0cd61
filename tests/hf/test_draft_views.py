"""The model drafts for itself under views of the cache: answers and caches stay as without drafts."""

from __future__ import annotations

import functools

import pytest
import torch

import kvsieve
from drafted import alone, begun, drafted
from kvsieve.errors import PlanError, UnsupportedOptionError
from kvsieve.hf.drafts import draft_passes
from kvsieve.hf.drafts.views import checked_view, view_drafter
from kvsieve.hf.forward.request import PassRequest
from kvsieve.methods import Quest
from small import plan_of
from tiny import greedy, tiny_model, tiny_prompt

N = 60
NEW = 12
SNAPKV = "snapkv:budget=12:window=4:floor=0"
VIEWS = {
    "reader": "quest:budget=16",
    "evictor": SNAPKV,
    "evictor, ragged": "adakv:budget=12:window=4:floor=0",
    "evictor in decode": "lagkv:budget=12:lag=2:sinks=2:floor=0",
    "evictor and codec": "knorm:budget=24:floor=0:codec=kivi",
    "codec": "kivi:tail=4",
}
PLANS = {
    "full": {},
    "snapkv": {"budget": 24, "window": 4},
    "adakv": {"budget": 24, "window": 4},
    "lagkv": {"budget": 26, "lag": 4},
    "h2o": {"budget": 24},
    "rocketkv": {"budget": 20, "window": 4, "kernel": 5},
    "kivi": {"tail": 4},
    "perturn": {"budget": 20, "base": "knorm"},
}
# Every kind of view under full KV, and some under each other plan and on other kinds of layers.
CASES = [
    *(("llama", "full", view) for view in VIEWS),
    ("llama", "snapkv", "evictor in decode"),
    ("llama", "snapkv", "codec"),
    ("llama", "adakv", "reader"),
    ("llama", "adakv", "evictor, ragged"),
    ("llama", "lagkv", "reader"),
    ("llama", "lagkv", "codec"),
    ("llama", "lagkv", "evictor in decode"),
    ("llama", "perturn", "evictor"),
    ("llama", "h2o", "reader"),
    ("llama", "h2o", "evictor"),
    ("llama", "rocketkv", "reader"),
    ("llama", "rocketkv", "evictor"),
    ("llama", "kivi", "reader"),
    ("llama", "kivi", "evictor and codec"),
    ("gemma3_text", "full", "reader"),
    ("gemma3_text", "h2o", "evictor"),
    ("gpt_oss", "full", "evictor in decode"),
    ("gemma3n_text", "full", "reader"),
    ("gemma3n_text", "h2o", "evictor"),
    ("qwen3_next", "full", "reader"),
    ("qwen3_next", "full", "codec"),
    ("deepseek_v3", "full", "evictor"),
]


@pytest.fixture(autouse=True)
def unsure(monkeypatch):
    """Tiny models are unsure of every token; their drafts go on nevertheless."""
    monkeypatch.setattr(draft_passes, "LEAST", 0.0)


@functools.cache
def undrafted(family, plan):
    model = tiny_model(family, torch.float32)
    with kvsieve.attach(model, plan_of(plan, model, **PLANS[plan])) as sieve, torch.no_grad():
        cache, tokens = alone(sieve, tiny_prompt(1, N), NEW)
    return contents(cache), tokens


def viewed(sieve, text):
    plan = checked_view(text, sieve)
    return lambda cache: view_drafter(sieve, cache, plan)


def contents(cache):
    """What a cache stores, but for windows, which drop entries later: keys, values, indices, states; counts."""
    stored = [part for layer in cache.all_layers for part in layer.state_tensors()]
    for layer in cache.sieve_layers.values():
        store = layer.store
        real = torch.ones_like(store.index) if store.valid is None else store.valid.expand_as(store.index)
        stored += [store.keys[real.bool()], store.values[real.bool()], store.index[real.bool()]]
    reads = {**vars(cache.turn.record.reads), "executors": None}
    return stored, (cache.num_seen, cache.turn.decoded, reads)


@pytest.mark.parametrize(("family", "plan", "view"), CASES, ids=map("-".join, CASES))
def test_an_answer_with_views_is_the_answer_without(family, plan, view):
    model = tiny_model(family, torch.float32)
    ids = tiny_prompt(1, N)
    with kvsieve.attach(model, plan_of(plan, model, **PLANS[plan])) as sieve, torch.no_grad():
        found, same, row = drafted(sieve, ids, NEW, viewed(sieve, VIEWS[view]))
    (stored, counts), tokens = undrafted(family, plan)
    assert same == tokens
    assert row.note is None
    assert row.counts.drafted >= 8
    for one, other in zip(stored, contents(found)[0], strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
    assert counts == contents(found)[1]


@pytest.mark.parametrize(
    ("plan", "view"), [("full", SNAPKV), ("perturn", SNAPKV), ("full", VIEWS["evictor in decode"])]
)
def test_the_copy_is_what_the_plan_leaves_of_a_prompt(model, plan, view):
    """Re-reading the last tokens after the others' entries gives the evictor what a prefill would have."""
    ids = tiny_prompt(1, N)
    with kvsieve.attach(model, plan_of(plan, model, **PLANS[plan])) as sieve, torch.no_grad():
        cache, tokens = begun(sieve, ids)
        drafter = view_drafter(sieve, cache, checked_view(view, sieve))
        drafter.extend(tokens)
        copy = drafter.copied()
    with kvsieve.attach(model, kvsieve.plan(view)) as sieve, torch.no_grad():
        own, _ = begun(sieve, ids)
    assert copy.entries() == own.entries() == [12] * 4
    assert all(layer.view is None for layer in copy.all_layers)
    for one, other in zip(contents(copy)[0], contents(own)[0], strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_a_copy_of_what_the_same_method_has_left_begins_anew(model):
    """What LagKV remembers of partitions is about entries that the copy lacks."""
    with kvsieve.attach(model, kvsieve.plan("lagkv:budget=40:lag=8:sinks=2")) as sieve, torch.no_grad():
        cache, tokens = begun(sieve, tiny_prompt(1, N))
        drafter = view_drafter(sieve, cache, checked_view("lagkv:budget=12:lag=2:sinks=2", sieve))
        drafter.extend(tokens)
        assert drafter.copied().entries() == [12] * 4


@pytest.mark.parametrize("view", ["evictor", "codec"])
def test_a_copy_shares_no_memory_with_the_cache(model, view):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve, torch.no_grad():
        cache, tokens = begun(sieve, tiny_prompt(1, N))
        drafter = view_drafter(sieve, cache, checked_view(VIEWS[view], sieve))
        drafter.extend(tokens)
        pairs = zip(cache.sieve_layers.values(), drafter.copied().sieve_layers.values(), strict=True)
        assert not any(one.keys.data_ptr() == other.keys.data_ptr() for one, other in pairs)


@pytest.mark.parametrize("view", ["reader", "evictor", "codec"])
def test_a_view_of_itself_is_right_wherever_nothing_is_left_out(model, view):
    """Views that see all that matters draft the answer itself: all tokens are accepted."""
    ids = tiny_prompt(1, N)
    text = {"reader": "exacttopk:budget=16", "evictor": "snapkv:budget=59:window=4:floor=0", "codec": "kivi"}[view]
    plan = plan_of("exacttopk", model, budget=16) if view == "reader" else kvsieve.plan("full")
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        row = drafted(sieve, ids, NEW, viewed(sieve, text))[2]
    least = {"reader": 8, "evictor": 5, "codec": 8}[view]
    assert row.counts.accepted >= least


def test_a_view_that_fails_in_the_middle_leaves_the_cache_as_it_was(model, monkeypatch):
    ids = tiny_prompt(1, N)
    calls = []

    def choose(*arguments):
        calls.append(arguments)
        if len(calls) == 7:
            raise RuntimeError("out of luck")
        return chosen(*arguments)

    chosen = Quest.choose
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve, torch.no_grad():
        cache, tokens = alone(sieve, ids, NEW)
        monkeypatch.setattr(Quest, "choose", choose)
        monkeypatch.setattr(Quest, "recipe", lambda *arguments: None)
        found, same, row = drafted(sieve, ids, NEW, viewed(sieve, VIEWS["reader"]))
    assert len(calls) == 7
    assert "out of luck" in row.note
    assert same == tokens
    for one, other in zip(contents(cache)[0], contents(found)[0], strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_a_copy_of_one_row_of_a_batch(model):
    """Rows have copies of their own; a reader, which drafts on the cache itself, takes one row only."""
    ids = tiny_prompt(2, N)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve, torch.no_grad():
        cache = sieve.new_cache()
        cache.begin_turn(N, 32)
        sieve.feed(cache, ids, mask, PassRequest(phase="prefill"))
        plan = checked_view(SNAPKV, sieve)
        proposals = []
        for row in range(2):
            drafter = view_drafter(sieve, cache, plan, row)
            drafter.extend([*ids[row][mask[row].bool()].tolist(), 5])
            proposals.append(drafter.propose(3))
            single, tokens = begun(sieve, ids[row : row + 1, 9 * row :])
            drafter = view_drafter(sieve, single, plan)
            drafter.extend([*tokens[:-1], 5])
            assert drafter.propose(3) == proposals[-1]
        with pytest.raises(UnsupportedOptionError, match="holds 2 rows; ask them one by one"):
            view_drafter(sieve, cache, checked_view(VIEWS["reader"], sieve))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("full", "reads everything"),
        ("fastkv", "drops tokens between layers"),
        ("gemfilter", "drops tokens between layers"),
        ("xattention", "sparse prefill"),
        ("finch:question_tokens=4", "compresses a prompt while it is prefilled"),
        ("kvzip", "further passes over the prompt"),
        ("h2o", "queries of the whole prompt"),
        ("perturn:base=snapkv", "drops nothing"),
        ("kivi:tail=4", "encoded so already"),
    ],
)
def test_plans_that_are_no_views_are_refused(model, text, message):
    with (
        kvsieve.attach(model, kvsieve.plan("kivi:tail=4")) as sieve,
        pytest.raises(PlanError, match=f"draft='self:{text}'.*{message}"),
    ):
        checked_view(text, sieve)


@pytest.mark.parametrize("text", ["quest:budget=100", "snapkv:floor=512", "lagkv:budget=60:lag=4:floor=0"])
def test_a_view_of_everything_ends_drafting_with_a_note(model, text):
    ids = tiny_prompt(1, N)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve, torch.no_grad():
        row = drafted(sieve, ids, NEW, viewed(sieve, text))[2]
    assert not row.counts.drafted
    assert "would cost as much as the answer" in row.note


@pytest.mark.parametrize(
    ("family", "plan", "message"),
    [
        ("qwen3_next", "full", "recurrent layers cannot"),
        ("llama", "gemfilter", "gemfilter has left some out"),
        ("llama", "adakv", "heads keep different numbers"),
    ],
)
def test_caches_without_such_a_view_are_refused(family, plan, message):
    model = tiny_model(family)
    with kvsieve.attach(model, plan_of(plan, model, budget=20)) as sieve, torch.no_grad():
        cache = sieve.prefill(tiny_prompt(1, N))
        with pytest.raises(UnsupportedOptionError, match=message):
            view_drafter(sieve, cache, checked_view(SNAPKV, sieve))


@pytest.mark.parametrize(
    ("plan", "rows", "view", "message"),
    [("adakv", 1, SNAPKV, "heads keep different numbers"), ("full", 2, "quest:budget=16", "which holds 2 rows")],
)
def test_a_later_turn_without_such_a_view_is_refused_before_anything_is_fed(plan, rows, view, message):
    model = tiny_model()
    ids = tiny_prompt(rows, N)
    with kvsieve.attach(model, plan_of(plan, model, budget=20)) as sieve:
        cache = sieve.prefill(ids)
        more = torch.cat([ids, tiny_prompt(rows, 5)], 1)
        with pytest.raises(UnsupportedOptionError, match=message):
            sieve.generate(more, cache=cache, draft=f"self:{view}", **greedy(max_new_tokens=4))
        assert (cache.status, cache.num_seen) == ("ready", N)
        sieve.generate(more, cache=cache, **greedy(max_new_tokens=4))


@pytest.mark.parametrize(
    ("family", "plan", "options", "view", "message"),
    [
        ("llama", "full", {"num_return_sequences": 2, "do_sample": True}, "quest:budget=16", "which holds 2 rows"),
        ("llama", "adakv", {}, SNAPKV, "heads keep different numbers"),
        ("llama", "gemfilter", {}, SNAPKV, "gemfilter has left some out"),
        ("qwen3_next", "full", {}, SNAPKV, "recurrent layers cannot"),
    ],
)
@pytest.mark.parametrize("used", [False, True])
def test_a_prompt_without_such_a_view_is_refused_before_anything_is_fed(family, plan, options, view, message, used):
    model = tiny_model(family)
    ids = tiny_prompt(1, N)
    with kvsieve.attach(model, plan_of(plan, model, budget=20)) as sieve:
        cache = sieve.prefill(ids) if used else sieve.new_cache()
        more = torch.cat([ids, tiny_prompt(1, 5)], 1)
        with pytest.raises(UnsupportedOptionError, match=message):
            sieve.generate(more, cache=cache, draft=f"self:{view}", **{**greedy(max_new_tokens=4), **options})
        assert (cache.status, cache.num_seen) == ("ready", N * used or 0) or plan == "gemfilter"
        sieve.generate(more, cache=cache, **greedy(max_new_tokens=4))
