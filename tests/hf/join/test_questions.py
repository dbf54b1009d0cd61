"""Questions on joined documents cost their own tokens, also under plans with passes of their own over a prompt."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import kvsieve
from kvsieve.hf.attach import attached
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.prompt.read import read_prompt
from kvsieve.hf.sieve import Sieve
from kvsieve.planning.plans import Plan
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.prefixes import ServerPrefixes
from kvsieve.serve.scheduler import Scheduler
from kvsieve.serve.ticket import PromptDocuments
from kvsieve.store import PrefixStore
from orders import ask
from tiny import greedy, tiny_prompt
from tiny_models import build
from toy_chats import chat_tokenizer
from toy_words import word_tokenizer

BEFORE = tiny_prompt(size=10)
DOCUMENTS = [tiny_prompt(size=size, seed=size) for size in (40, 33, 50)]
QUESTION = tiny_prompt(size=7, seed=1)
REPEATING = {"repeat_ids": (), "go_on_ids": (), "answer_ids": ()}
# Plans with probe passes that do not see the question.
PROBING = {
    "kvzip": kvsieve.plan("kvzip", budget="50%", **REPEATING),
    "kvzip, encoded": kvsieve.plan("kvzip", budget="50%", codec="int8", **REPEATING),
    "kvcompose": kvsieve.plan("kvcompose", budget="50%"),
}
KINDS = ["link:tokens=4", "ape", "full"]
NOTE = "compressed the joined documents without a question, and left this turn's tokens whole"


@pytest.fixture
def fed(monkeypatch):
    """Tokens of each pass over several of them since the last join, in any path."""
    sizes = []

    def note(module, inputs):
        if isinstance(module, torch.nn.Embedding) and inputs[0].shape[-1] > 1:
            sizes.append(inputs[0].shape[-1])

    join = Sieve.join

    def joined(*arguments, **options):
        found = join(*arguments, **options)
        sizes.clear()
        return found

    monkeypatch.setattr(Sieve, "join", joined)
    handle = register_module_forward_pre_hook(note)
    yield sizes
    handle.remove()


def joined_question(sieve, kind="link:tokens=4"):
    """A joined cache, and the prompt that it begins."""
    joined = sieve.join(DOCUMENTS, BEFORE, kind=kind)
    return joined.cache, torch.cat([joined.ids, QUESTION], 1)


def asked(sieve, ids, cache, **options):
    return sieve.generate(ids, torch.ones_like(ids), cache=cache, **greedy(max_new_tokens=4, **options))


def by_generate(sieve, cache, ids, fed, tmp_path):
    asked(sieve, ids, cache)


def by_prefill(sieve, cache, ids, fed, tmp_path):
    sieve.prefill(ids, cache=cache)


def by_parts(sieve, cache, ids, fed, tmp_path):
    sieve.begin(ids[:, :-4], cache=cache)
    asked(sieve, ids, cache)


def by_file(sieve, cache, ids, fed, tmp_path):
    sieve.save(cache, tmp_path / "joined")
    asked(sieve, ids, sieve.load(tmp_path / "joined").cache)


def by_fork(sieve, cache, ids, fed, tmp_path):
    asked(sieve, ids, cache.fork())


def by_edit(sieve, cache, ids, fed, tmp_path):
    editor = sieve.edit(cache, ids[:, : cache.num_seen], window=0)
    editor.cut((20, 24))
    fed.clear()
    asked(sieve, torch.cat([editor.ids, QUESTION], 1), cache)


def by_driver(sieve, cache, ids, fed, tmp_path):
    """As the server and the evaluation prefill."""
    read_prompt(sieve, ids, None, cache, ReadOptions(leave_last=False))


LIBRARY = [by_generate, by_prefill, by_parts, by_file, by_fork, by_edit, by_driver]


@pytest.mark.parametrize("path", LIBRARY)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PROBING)
def test_a_question_feeds_its_own_tokens(model, fed, tmp_path, plan, kind, path):
    if path is by_edit and kind == "ape":
        pytest.skip("documents at the same positions are not edited")
    with kvsieve.attach(model, PROBING[plan]) as sieve:
        path(sieve, *joined_question(sieve, kind), fed, tmp_path)
    assert sum(fed) == QUESTION.shape[1]


def test_a_question_on_the_command_line_feeds_its_own_tokens(cli, fed, tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    chat_tokenizer().save_pretrained(tmp_path / "model")
    for number in range(3):
        (tmp_path / f"w{number}").write_text(" ".join(f"w{(number + 7 * i) % 80}" for i in range(40)))
    files = ",".join(str(tmp_path / f"w{number}") for number in range(3))
    options = ["--documents", files, "--question", "w1 w2 w3", "--method", "kvzip:budget=50%", "--max-new-tokens", 4]
    code, out, err = cli("run", tmp_path / "model", *options, "--dtype", "float32", "--json")
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    assert sum(fed) == result["stats"]["prompt_tokens"] - result["join"]["tokens"]
    assert result["stats"]["applied"] and any(NOTE in note for note in result["stats"]["notes"])


PLANS = {
    **PROBING,
    "full": kvsieve.plan("full"),
    "keydiff": kvsieve.plan("keydiff", budget=40),
    "lagkv": kvsieve.plan("lagkv", budget="60%", lag=4, sinks=10),
    "kivi": kvsieve.plan("kivi", bits=4, block=16, tail=8),
    "quest": kvsieve.plan("quest", budget=24),
    "snapkv": kvsieve.plan("snapkv", budget=40, window=8),
    "rocketkv-mt": kvsieve.plan("rocketkv-mt", budget=32, window=8),
}


@pytest.mark.parametrize("plan", PLANS)
def test_questions_to_the_server_feed_their_own_tokens(fed, plan):
    """A second request finds the documents in the store, in another order."""
    before, question, *texts = (tuple(ids[0].tolist()) for ids in (BEFORE, QUESTION, *DOCUMENTS))
    with attached(build("llama"), Plan(), "eager", any_plan=True) as sieve:
        one = Scheduler(sieve, word_tokenizer(), ServerLimits(chunk=16), ServerPrefixes(PrefixStore(), share=False))
        one.start()
        try:
            for order in (texts, texts[::-1]):
                documents = PromptDocuments(before, tuple(order), "link:tokens=4")
                ids = (*before, *(token for text in order for token in text), *question)
                heard, _ = ask(one, ids, PLANS[plan], 4, documents=documents, ignore_eos=True)
                summary = heard.all()[-1]
                assert sum(fed) == len(question) + PLANS[plan].window
        finally:
            one.close()
    assert (summary.documents.found, summary.documents.prefilled, summary.documents.reread) == (123, 0, 8)
    assert (plan in PROBING) == any(NOTE in note for note in summary.stats.notes)


@pytest.mark.parametrize("kind", ["link:tokens=4", "full"])
@pytest.mark.parametrize("plan", PLANS)
def test_later_turns_feed_their_own_tokens(model, fed, plan, kind):
    with kvsieve.attach(model, PLANS[plan]) as sieve:
        cache, ids = joined_question(sieve, kind)
        for turn in range(3):
            fed.clear()
            result = asked(sieve, ids, cache)
            # The last token of the answer before was not fed, nor were those that a plan observes with the question.
            before = 1 if turn else sieve.plan.window
            assert sum(fed) == QUESTION.shape[1] + before
            assert (plan in PROBING) == any(NOTE in note for note in result.stats.notes)
            ids = torch.cat([result.sequences, QUESTION], 1)


@pytest.mark.parametrize("plan", PROBING)
def test_the_question_stays_whole_and_the_documents_compressed(model, plan):
    with kvsieve.attach(model, PROBING[plan]) as sieve:
        cache, ids = joined_question(sieve)
        before = cache.entries()
        other = cache.fork()
        result = asked(sieve, ids, cache)
        whole = asked(sieve, ids, other, reduce=False)
        assert result.stats.kv_entries == [entries + QUESTION.shape[1] for entries in before]
        assert result.stats.applied and result.stats.notes == [f"{sieve.plan.name} {NOTE}"]
        assert torch.equal(result.sequences, whole.sequences)
        assert (result.stats.codec is not None) == ("encoded" in plan)


@pytest.mark.parametrize("plan", PROBING)
def test_an_explicit_choice_stays(model, fed, plan):
    with kvsieve.attach(model, PROBING[plan]) as sieve:
        cache, ids = joined_question(sieve)
        result = asked(sieve, ids, cache, reduce=True)
        assert sum(fed) > ids.shape[1]
        assert not any(NOTE in note for note in result.stats.notes)


def test_a_question_hidden_from_the_plan_lets_it_act_before(model, fed):
    with kvsieve.attach(model, PROBING["kvzip"]) as sieve:
        cache, ids = joined_question(sieve)
        asked(sieve, ids, cache, question_tokens=3)
        assert sum(fed) > ids.shape[1]


def test_cheap_evictors_act_on_the_question(model):
    with kvsieve.attach(model, PLANS["keydiff"]) as sieve:
        cache, ids = joined_question(sieve)
        result = asked(sieve, ids, cache)
        assert result.stats.applied and result.stats.kv_entries == [40] * 4


def test_documents_within_the_budget_are_noted(model):
    with kvsieve.attach(model, kvsieve.plan("kvzip", budget=200, **REPEATING)) as sieve:
        cache, ids = joined_question(sieve)
        stats = asked(sieve, ids, cache).stats
        assert not stats.applied and any("nothing was evicted" in note for note in stats.notes)


@pytest.mark.parametrize("kind", ["link:tokens=4", "full"])
def test_a_store_serves_exact_documents_as_any_prompt(model, kind):
    """What continues approximate entries, by their rule, continues the join."""
    with kvsieve.attach(model, PROBING["kvzip"]) as sieve, PrefixStore() as store:
        cache, ids = joined_question(sieve, kind)
        store.add(sieve, ids[0, : cache.num_seen].tolist(), cache, 1.0)
        rules = cache.conversation.approximate
        found = store.find(sieve, ids[0].tolist(), approximate=rules)
        assert found is not None and found.tokens == cache.num_seen
        assert found.cache.conversation.edits.alone == bool(rules)
