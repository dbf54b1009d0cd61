"""Joins of documents: prefilled alone, moved to their places, prefilled again in part."""

from __future__ import annotations

import itertools

import pytest
import torch

import kvsieve
from kvsieve.errors import CacheStateError, InputError, PlanError, UnsupportedOptionError
from kvsieve.store import PrefixStore
from tiny_models import build

# Plans that act on every document alone, and plans that act on the question.
ALONE = {
    "full": {},
    "keydiff": {"budget": 24},
    "kivi": {"bits": 4, "block": 16, "tail": 8},
    "kvzip": {"budget": "50%", "repeat_ids": (), "go_on_ids": (), "answer_ids": ()},
    "quest": {"budget": 24},
    "lagkv": {"budget": "60%", "lag": 4, "sinks": 10},
}
LATER = {
    "snapkv": {"budget": 40, "window": 8},
    "adakv": {"budget": 40, "window": 8},
    "rocketkv-mt": {"budget": 32, "window": 8},
}
PLANS = {**ALONE, **LATER}
QUESTION = torch.tensor([[5, 6, 7, 8, 9]])


def tokens(size, seed):
    return torch.randint(3, 90, (1, size), generator=torch.Generator().manual_seed(seed))


BEFORE = tokens(10, 0)
DOCUMENTS = [tokens(40, 1), tokens(33, 2), tokens(50, 3)]
TOGETHER = torch.cat([BEFORE, *DOCUMENTS], 1)


def attached(model, name="full"):
    floor = {} if name in ("full", "kivi") else {"floor": 0}
    return kvsieve.attach(model, kvsieve.plan(name, **floor, **PLANS[name]))


def after(sieve, cache, token=7):
    """Logits of a token that follows the conversation of a cache."""
    return sieve.feed(cache, torch.tensor([[token]]), None, logits=1).logits[0, -1]


def answered(sieve, joined, **options):
    more = torch.cat([joined.ids, QUESTION], 1)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0} | options
    return sieve.generate(more, torch.ones_like(more), cache=joined.cache, **options)


def assert_equal_entries(cache, other, **near):
    assert cache.num_seen == other.num_seen
    for layer, wanted in zip(cache.all_layers, other.all_layers, strict=True):
        assert torch.equal(layer.store.index, wanted.store.index)
        torch.testing.assert_close(layer.keys, wanted.keys, **near)
        torch.testing.assert_close(layer.values, wanted.values, **near)


EXACT = {"atol": 0, "rtol": 0}
NEAR = {"atol": 1e-5, "rtol": 1e-4}


@pytest.mark.parametrize("kind", ["full", "link:tokens=50"])
@pytest.mark.parametrize("before", [None, BEFORE])
def test_everything_again_is_a_plain_prefill_to_the_bit(kind, before):
    with attached(build("llama").float().eval()) as sieve:
        joined = sieve.join(DOCUMENTS, before, kind=kind)
        plain = sieve.prefill(joined.ids)
        assert_equal_entries(joined.cache, plain, **EXACT)
        assert torch.equal(after(sieve, joined.cache), after(sieve, plain))
        assert joined.reread == joined.ids.shape[1] - joined.reused


@pytest.mark.parametrize("kind", ["modules", "link"])
def test_one_document_is_a_plain_prefill_to_the_bit(model, kind):
    with attached(model) as sieve:
        joined = sieve.join(DOCUMENTS[:1], BEFORE, kind=kind)
        assert (joined.prefilled, joined.reused, joined.reread) == (40, 50, 0)
        assert_equal_entries(joined.cache, sieve.prefill(joined.ids), **EXACT)


def test_tokens_again_are_those_of_a_plain_prefill_up_to_the_first_reused_one(model):
    """The first document and the second one's first tokens see exact entries only."""
    with attached(model) as sieve:
        joined = sieve.join(DOCUMENTS, BEFORE, kind="link:tokens=33")
        plain = sieve.prefill(TOGETHER)
        for layer, wanted in zip(joined.cache.all_layers, plain.all_layers, strict=True):
            torch.testing.assert_close(layer.keys[:, :, :116], wanted.keys[:, :, :116], **NEAR)
            torch.testing.assert_close(layer.values[:, :, :116], wanted.values[:, :, :116], **NEAR)
            assert layer.store.index[0, 0].tolist() == list(range(133))
        assert (joined.reused, joined.reread) == (133 - 66, 66)


@pytest.mark.parametrize("family", ["llama", "gemma", "phi3", "gpt_neox", "stablelm"])
def test_entries_of_the_first_layer_are_exact(family):
    """They depend on a token and its position alone."""
    with kvsieve.attach(build(family).float().eval(), kvsieve.plan("full")) as sieve:
        joined = sieve.join(DOCUMENTS, BEFORE, kind="modules")
        plain = sieve.prefill(TOGETHER)
        first, wanted = joined.cache.all_layers[0], plain.all_layers[0]
        torch.testing.assert_close(first.keys, wanted.keys, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(first.values, wanted.values, **NEAR)


@pytest.mark.parametrize("kind", ["modules", "link:tokens=4", "full"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("before", [None, BEFORE])
def test_joined_documents_are_asked_under_plans(model, plan, kind, before):
    with attached(model, plan) as sieve:
        joined = sieve.join(DOCUMENTS, before, kind=kind)
        seen = joined.cache.num_seen
        # A plan that acts on the question observes the last tokens together with it.
        assert joined.ids.shape[1] - seen == (8 if plan in LATER else 0)
        assert joined.cache.conversation.half_read == (plan in LATER)
        assert joined.reused + joined.reread == seen
        assert joined.cache.conversation.approximate == (() if kind == "full" else (kind,))
        result = answered(sieve, joined)
        assert result.sequences.shape[1] > joined.ids.shape[1] + 5
        for layer in result.cache.sieve_layers.values():
            store = layer.store
            real = store.index >= 0 if store.valid is None else store.valid.expand_as(store.index)
            assert int(store.index[real].min()) >= 0
            assert int(store.index[real].max()) < result.cache.num_seen


def test_partitions_of_joined_documents_are_cut_in_later_turns(model):
    with attached(model, "lagkv") as sieve:
        joined = sieve.join(DOCUMENTS, BEFORE, kind="link:tokens=4")
        result = answered(sieve, joined, max_new_tokens=24, min_new_tokens=24)
        # 60% of the prompt's 138 tokens, and up to two partitions in progress.
        assert all(82 <= entries <= 90 for entries in result.cache.entries())


@pytest.mark.parametrize("plan", LATER)
def test_the_question_reduces_full_documents_as_one_prompt(model, plan):
    with attached(model, plan) as sieve:
        joined = sieve.join(DOCUMENTS, BEFORE, kind="full")
        more = torch.cat([joined.ids, QUESTION], 1)
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        alone = sieve.generate(more, torch.ones_like(more), **options)
        result = answered(sieve, joined)
        assert torch.equal(result.sequences, alone.sequences)
        assert result.cache.entries() == alone.cache.entries()


def test_the_last_documents_may_be_shorter_than_the_observation_window(model):
    short = [*DOCUMENTS, tokens(3, 4), tokens(2, 5)]
    with attached(model, "snapkv") as sieve:
        joined = sieve.join(short, BEFORE, kind="modules")
        assert (joined.cache.num_seen, joined.prefilled) == (130, 123)
        assert answered(sieve, joined).cache.conversation.acted == ((0, 143),)


@pytest.mark.parametrize("plan", ["keydiff", "kvzip", "lagkv"])
def test_documents_keep_what_they_keep_alone(model, plan):
    with attached(model, plan) as sieve:
        joined = sieve.join(DOCUMENTS, kind="link:tokens=4")
        places = [0, 40, 73]
        alone = [sieve.prefill(text) for text in DOCUMENTS]
        for index, layer in joined.cache.sieve_layers.items():
            for head in range(layer.store.heads):
                kept = []
                for place, cache in zip(places, alone, strict=True):
                    columns = cache.all_layers[index].store.index[0, head]
                    kept += (columns[columns >= 0] + place).tolist()
                columns = layer.store.index[0, head]
                assert columns[columns >= 0].tolist() == kept


def test_order_and_repeats_are_free(model):
    with attached(model) as sieve:
        one, two, three = DOCUMENTS
        for order in itertools.permutations([one, two, three]):
            joined = sieve.join(list(order), BEFORE, kind="modules")
            assert torch.equal(joined.ids, torch.cat([BEFORE, *order], 1))
        joined = sieve.join([one, one, one], BEFORE, kind="modules")
        for layer in joined.cache.all_layers:
            values = layer.values
            torch.testing.assert_close(values[:, :, 10:50], values[:, :, 50:90], **NEAR)
            torch.testing.assert_close(values[:, :, 10:50], values[:, :, 90:130], **NEAR)
        assert joined.prefilled == 40


def test_lists_and_tensors_are_documents(model):
    with attached(model) as sieve:
        joined = sieve.join([DOCUMENTS[0], DOCUMENTS[1][0], DOCUMENTS[2][0].tolist()], BEFORE[0].tolist())
        assert torch.equal(joined.ids, TOGETHER)
        assert joined.kind == "link:tokens=32:shift=true"


@pytest.mark.parametrize("plan", ALONE)
def test_a_joined_cache_is_saved_forked_and_loaded(model, plan, tmp_path):
    with attached(model, plan) as sieve:
        joined = sieve.join(DOCUMENTS, BEFORE, kind="link:tokens=4")
        sieve.save(joined.cache, tmp_path / "joined", ids=joined.ids)
        caches = [joined.cache, joined.cache.fork(), sieve.load(tmp_path / "joined").cache]
        logits = [after(sieve, cache) for cache in caches]
        torch.testing.assert_close(logits[1], logits[0])
        torch.testing.assert_close(logits[2], logits[0])


@pytest.mark.parametrize("plan", sorted(ALONE.keys() - {"lagkv"}))
def test_a_joined_cache_is_edited(model, plan):
    with attached(model, plan) as sieve:
        joined = sieve.join(DOCUMENTS, BEFORE, kind="link:tokens=4")
        done = sieve.edit(joined.cache, joined.ids, window=4).cut((20, 60))
        assert joined.cache.num_seen == done.ids.shape[1] == 93
        after(sieve, joined.cache)


def test_a_prompt_in_progress_is_not_saved_or_edited(model, tmp_path):
    with attached(model, "snapkv") as sieve:
        joined = sieve.join(DOCUMENTS, BEFORE)
        with pytest.raises(CacheStateError, match="middle of a prompt"):
            sieve.save(joined.cache, tmp_path / "joined")
        with pytest.raises(CacheStateError, match="middle of a prompt"):
            sieve.edit(joined.cache, joined.ids)
        # For several questions.
        first, second = answered(sieve, joined), None
        assert first.cache.conversation.acted == ((0, TOGETHER.shape[1] + 5),)
        assert second is None


def test_a_joined_cache_takes_drafts(model):
    with attached(model) as sieve:
        plain = answered(sieve, sieve.join(DOCUMENTS, BEFORE))
        drafted = answered(sieve, sieve.join(DOCUMENTS, BEFORE), draft="lookup")
        assert torch.equal(plain.sequences, drafted.sequences)


@pytest.mark.parametrize("plan", ["full", "snapkv"])
def test_chunks_change_nothing(model, plan):
    with attached(model, plan) as sieve:
        whole = sieve.join(DOCUMENTS, BEFORE, kind="link:tokens=20")
        chunks = sieve.join(DOCUMENTS, BEFORE, kind="link:tokens=20", chunk=7)
        assert_equal_entries(chunks.cache, whole.cache, **NEAR)


@pytest.mark.parametrize("plan", ["full", "snapkv"])
@pytest.mark.parametrize("kind", ["modules", "link:tokens=4", "full"])
def test_progress_ascends_to_the_total(model, plan, kind):
    calls = []
    with attached(model, plan) as sieve:
        joined = sieve.join(DOCUMENTS, BEFORE, kind=kind, chunk=16, progress=lambda *call: calls.append(call))
    total = joined.cache.num_seen if kind == "full" else 133 + joined.reread
    assert {size for _, size in calls} == {total} and calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize(
    ("documents", "before", "message"),
    [
        ([], None, "at least one document"),
        (DOCUMENTS[0], None, "a list of at least one document"),
        ([DOCUMENTS[0], []], None, "document 1 is the token ids of one text"),
        ([DOCUMENTS[0].repeat(2, 1)], None, r"document 0 .* got shape \(2, 40\)"),
        ([DOCUMENTS[0]], [1.5], "before is the token ids"),
        ([[1, 2, 10**6]], None, "the model knows 0 to"),
        ([tokens(400, 4)] * 30, None, "context ends at"),
    ],
)
def test_bad_documents_are_refused(model, documents, before, message):
    with attached(model) as sieve, pytest.raises(InputError, match=message):
        sieve.join(documents, before)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "lnk"}, PlanError, "did you mean 'link'"),
        ({"chunk": 0}, InputError, "chunk must be"),
        ({"progress": 3}, InputError, "progress must be a function"),
        ({"store": 3}, InputError, "PrefixStore"),
    ],
)
def test_bad_options_are_refused(model, options, error, message):
    with attached(model) as sieve, pytest.raises(error, match=message):
        sieve.join(DOCUMENTS, **options)


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        ("h2o", {"budget": 40}, "H2O, it has counted attention"),
        ("fastkv", {"budget": 40, "tsp_layer": 1}, "drops tokens between layers"),
        ("gemfilter", {"budget": 40}, "shorter prompt in their place; generate on one prompt"),
        ("lagkv", {"budget": "50%", "lag": 4, "sinks": 9}, "give it sinks=10"),
    ],
)
def test_plans_that_cannot_join_are_refused(model, plan, options, message):
    with (
        kvsieve.attach(model, kvsieve.plan(plan, floor=0, **options)) as sieve,
        pytest.raises(UnsupportedOptionError, match=message),
    ):
        sieve.join(DOCUMENTS, BEFORE)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_models_that_forget_join_in_full_only(family):
    with kvsieve.attach(build(family).float().eval(), kvsieve.plan("full")) as sieve:
        with pytest.raises(UnsupportedOptionError, match=r"do not go back.*join 'full'"):
            sieve.join(DOCUMENTS)
        assert sieve.join(DOCUMENTS, kind="full").cache.num_seen == 123


@pytest.mark.parametrize("plan", ["full", "keydiff", "kivi", "snapkv"])
def test_documents_come_from_a_store_at_any_place(model, plan):
    with attached(model, plan) as sieve, PrefixStore() as store:
        first = sieve.join(DOCUMENTS, BEFORE, kind="link:tokens=4", store=store)
        assert first.prefilled == 123 - first.found
        order = [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[0]]
        again = sieve.join(order, BEFORE, kind="link:tokens=4", store=store)
        plain = sieve.join(order, BEFORE, kind="link:tokens=4")
        assert (again.found, again.prefilled) == (123, 0)
        assert_equal_entries(again.cache, plain.cache, **NEAR)


def test_owners_have_documents_of_their_own(model):
    with attached(model) as sieve, PrefixStore() as store:
        sieve.join(DOCUMENTS, BEFORE, store=store, owner="one")
        other = sieve.join(DOCUMENTS, BEFORE, store=store, owner="two")
        assert other.prefilled == 123


def test_stored_documents_serve_plain_prompts(model):
    with attached(model) as sieve, PrefixStore() as store:
        sieve.join(DOCUMENTS, BEFORE, store=store)
        found = store.find(sieve, torch.cat([BEFORE, DOCUMENTS[1], QUESTION], 1)[0].tolist(), turns=(48,))
        assert found is not None and found.tokens == 43


@pytest.mark.parametrize("plan", ["full", "snapkv"])
def test_an_interrupted_join_has_stored_what_it_has_read(model, plan, monkeypatch):
    with attached(model, plan) as sieve, PrefixStore() as store:
        with monkeypatch.context() as patch:
            calls = []
            feed = sieve.feed

            def interrupted(*arguments, **options):
                calls.append(arguments)
                if len(calls) == 3:
                    raise KeyboardInterrupt
                return feed(*arguments, **options)

            patch.setattr(sieve, "feed", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sieve.join(DOCUMENTS, BEFORE, store=store)
        joined = sieve.join(DOCUMENTS, BEFORE, store=store)
        assert joined.found == 73
        plain = sieve.join(DOCUMENTS, BEFORE)
        assert_equal_entries(joined.cache, plain.cache, **NEAR)
