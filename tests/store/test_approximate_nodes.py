"""Approximate nodes: found by prompts that name their rules, never by others."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kvsieve
from kvsieve.cli.main import run_cli
from kvsieve.errors import InputError
from kvsieve.hf.persist.cache_file import header_digest
from kvsieve.hf.reuse import StoredPrefixes
from kvsieve.store import PrefixStore
from tiny import greedy, tiny_model, tiny_prompt
from toy_chats import chat_tokenizer

RULES = ("edit:window=4",)
PLANS = {"full": {}, "snapkv": {"budget": 30, "window": 4, "floor": 0}, "kivi": {"bits": 4, "block": 16, "tail": 8}}
GREEDY = greedy(max_new_tokens=3)
CHAT = {"suppress_tokens": [0, 1, 2], "max_new_tokens": 6, "chunk": 64}


@pytest.fixture(scope="module")
def model():
    return tiny_model(max_position_embeddings=1024)


@pytest.fixture
def sieve(model):
    with kvsieve.attach(model, kvsieve.plan("full")) as attached:
        yield attached


def prompt(seed=1, size=80):
    return tiny_prompt(1, size, seed=seed)


def edited(sieve, ids, window=4):
    """A cache with a span cut, and its conversation."""
    cache = sieve.prefill(ids)
    return cache, sieve.edit(cache, ids, window=window).cut((20, 30)).ids


def longer(ids):
    return torch.cat([ids, prompt(9, 8)], 1)


def same(cache, other):
    for layer, found in zip(cache.all_layers, other.all_layers, strict=True):
        assert torch.equal(layer.keys, found.keys) and torch.equal(layer.values, found.values)


def by_file(sieve, ids, cache, path, store):
    sieve.save(cache, path / "cache")
    store.add(sieve, ids[0], sieve.load(path / "cache").cache, 1.0)


def by_generate(sieve, ids, cache, path, store):
    StoredPrefixes(store).prefill(sieve, longer(ids), cache, {"chunk": 16})


def by_export(sieve, ids, cache, path, store):
    with PrefixStore() as first:
        first.add(sieve, ids[0], cache, 1.0)
        first.export(path / "all.tar")
    store.import_(path / "all.tar")


WAYS = {
    "add": lambda sieve, ids, cache, path, store: store.add(sieve, ids[0], cache, 1.0),
    "add_prompt": lambda sieve, ids, cache, path, store: store.add_prompt(sieve, ids[0], cache, 1.0),
    "fork": lambda sieve, ids, cache, path, store: store.add(sieve, ids[0], cache.fork(), 1.0),
    "file": by_file,
    "export": by_export,
    "a prompt that goes on": by_generate,
    "a session": lambda sieve, ids, cache, path, store: StoredPrefixes(store, session=True).add(
        sieve, ids[0].tolist(), cache, 1.0, None
    ),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", WAYS)
def test_no_other_prompt_gets_them(model, tmp_path, plan, way):
    with kvsieve.attach(model, kvsieve.plan(plan, **PLANS[plan])) as sieve, PrefixStore(tmp_path / "store") as store:
        cache, ids = edited(sieve, prompt())
        WAYS[way](sieve, ids, cache, tmp_path, store)
        for _ in ("in memory", "on disk"):
            assert [node.approximate for node in store.nodes()] in ([RULES], [RULES] * 2, [])
            for rules in ((), ("edit:window=5",), ("edit:window=5", *RULES), ("link:tokens=4",)):
                for turns in (None, (ids.shape[1],)):
                    asked = {"turns": turns, "approximate": rules}
                    assert store.find(sieve, longer(ids)[0], **asked) is None
                    assert store.find(sieve, ids[0], **asked) is None
                    assert store.covered(sieve, ids[0], **asked) == 0
            store.flush()
            store._tiers._memory = 0
            store._tiers._fit_memory()


@pytest.mark.parametrize("plan", PLANS)
def test_a_prompt_that_names_their_rules_gets_them(model, tmp_path, plan):
    with kvsieve.attach(model, kvsieve.plan(plan, **PLANS[plan])) as sieve:
        # After an answer: entries that a question has chosen serve the next turn only.
        result = sieve.generate(prompt(), **GREEDY)
        cache = result.cache
        ids = sieve.edit(cache, result.sequences[:, : cache.num_seen], window=4).cut((20, 30)).ids
        with PrefixStore(tmp_path) as store:
            node = store.add(sieve, ids[0], cache, 1.0)
            assert node.approximate == RULES and node.to_dict()["approximate"] == RULES
            assert store.covered(sieve, longer(ids)[0], approximate=RULES) == ids.shape[1]
        with PrefixStore(tmp_path) as store:
            assert store.nodes() == [node] or store.nodes()[0].approximate == RULES
            found = store.find(sieve, longer(ids)[0], approximate=[*RULES, *RULES])
            assert found.tokens == ids.shape[1] and found.approximate == found.cache.conversation.approximate == RULES
            same(cache, found.cache)
            answers = [sieve.generate(longer(ids), cache=part, **GREEDY) for part in (cache, found.cache)]
            assert torch.equal(*(answer.sequences for answer in answers))
            stats = store.stats()
            assert stats.hits == stats.approximate_hits == 1
            # Its next turn is approximate too.
            after = store.add(sieve, answers[1].sequences[0], found.cache, 2.0)
            assert after.approximate == RULES and store.find(sieve, longer(answers[1].sequences)[0]) is None


def test_a_common_beginning_stays_approximate(sieve):
    cache, ids = edited(sieve, prompt())
    other = torch.cat([ids[:, :50], prompt(3, 8)], 1)
    with PrefixStore() as store:
        store.add(sieve, ids[0], cache, 1.0)
        found = store.find(sieve, other[0], turns=(58,), approximate=RULES)
        assert found.tokens == 50 and found.cache.conversation.approximate == found.approximate == RULES


def test_the_longest_node_wins_and_then_the_exact_one(sieve):
    cache, ids = edited(sieve, prompt())
    with PrefixStore() as store:
        store.add(sieve, ids[0], cache, 1.0)
        store.add(sieve, ids[0], sieve.prefill(ids[:, :40]), 1.0)
        assert [node.tokens for node in store.nodes()] == [70, 40] and not store.stats().replaced
        assert store.find(sieve, longer(ids)[0]).tokens == 40
        assert store.find(sieve, longer(ids)[0], approximate=RULES).tokens == 70
        exact = sieve.prefill(ids)
        # Neither takes the place of the other.
        store.add(sieve, ids[0], exact, 1.0)
        assert sorted((node.tokens, node.approximate) for node in store.nodes()) == [(70, ()), (70, RULES)]
        for rules in ((), RULES):
            found = store.find(sieve, longer(ids)[0], approximate=rules)
            assert found.approximate == ()
            same(exact, found.cache)
        for owner in ("ann", "ben"):
            assert store.find(sieve, longer(ids)[0], owner, approximate=RULES) is None


def test_entries_of_an_edited_conversation_are_stored_anew(sieve):
    """Equal tokens may have other entries than before an edit."""
    cache, ids = edited(sieve, prompt(), window=0)
    with PrefixStore() as store:
        store.add(sieve, ids[0], cache, 1.0)
        edit = sieve.edit(cache, ids, window=0)
        edit.replace((30, 40), ids[0, 30:40].clone())
        known = edit.cut((65, 70)).ids
        assert torch.equal(known, ids[:, :65])
        store.remove(*(node.key for node in store.nodes() if node.tokens == 65))
        store.add(sieve, known[0], cache, 1.0)
        found = store.find(sieve, longer(known)[0], turns=None, approximate=("edit:window=0",))
        assert found.tokens == 65
        same(cache, found.cache)


def test_rules_of_another_form_are_refused(sieve):
    with PrefixStore() as store:
        for rules in ("edit:window=4", (4,), None, {"edit:window=4": 1}):
            for search in (store.find, store.covered):
                with pytest.raises(InputError, match="approximate= is a tuple of rules"):
                    search(sieve, prompt()[0], approximate=rules)


def test_statistics_say_so(sieve):
    cache, ids = edited(sieve, prompt())
    with PrefixStore() as store:
        store.add(sieve, ids[0], cache, 1.0)
        told = {
            rules: StoredPrefixes(store, approximate=rules).generate(sieve, longer(ids), **GREEDY).stats.notes
            for rules in (RULES, ())
        }
        assert told == {RULES: ["70 of 78 tokens came from the store, approximate by edit:window=4"], (): []}
        assert StoredPrefixes(store, approximate=RULES).covered(sieve, longer(ids)[0].tolist(), None) == 77


def test_a_chat_goes_on_storing_its_turns(model):
    tokenizer = chat_tokenizer()
    document = " ".join(f"w{number % 70}" for number in range(60))
    with kvsieve.attach(model, kvsieve.plan("full"), tokenizer=tokenizer) as sieve, PrefixStore() as store:
        chat = sieve.chat(tokenizer, store=store, **CHAT)
        chat.ask(document)
        chat.ask("w5 w6 w7 w8")
        chat.replace(0, f"w1 w2 {document}", window=4)
        before = {node.key for node in store.nodes()}
        assert all(node.approximate == () for node in store.nodes())
        assert store.covered(sieve, chat.ids[0]) < 40
        chat.ask("w9")
        chat.ask("w3 w4")
        new = [node for node in store.nodes() if node.key not in before]
        assert new and all(node.approximate == RULES for node in new)
        known = chat.ids[0, :-1]
        assert store.covered(sieve, chat.ids[0]) < 40
        found = store.find(sieve, chat.ids[0], approximate=RULES)
        assert found.tokens == len(known)
        same(chat.cache, found.cache)
        # One edited with window="all" is read anew.
        other = sieve.chat(tokenizer, store=store, **CHAT)
        other.ask("w8 w9")
        other.ask(document)
        other.replace(0, "w7", window="all")
        other.ask("w2")
        assert other.cache.conversation.approximate == ()
        assert store.find(sieve, other.ids[0]).tokens == other.ids.shape[1] - 1


def headers_changed(path, change):
    """Change the header of a file, with a right checksum."""
    data = load_file(path)
    with safe_open(path, "pt") as opened:
        header = json.loads(opened.metadata()["kvsieve"])
    change(header)
    header["sha256"] = header_digest(header)
    save_file(data, path, {"kvsieve": json.dumps(header)})


def without_rules(header):
    header["extra"]["store"].pop("approximate")
    facts = header["cache"]["Conversation"]
    facts["dict"] = [fact for fact in facts["dict"] if fact[0] != "approximate"]


def test_files_of_earlier_versions_are_exact(sieve, tmp_path):
    cache, ids = edited(sieve, prompt())
    with PrefixStore(tmp_path) as store:
        exact = store.add(sieve, ids[0], sieve.prefill(ids), 1.0).key
        edits = store.add(sieve, ids[0], cache, 1.0).key
    for key in (exact, edits):
        headers_changed(tmp_path / f"{key}.kv", without_rules)
    with PrefixStore(tmp_path) as store:
        # An approximate one cannot pass for one of them.
        assert [(node.key, node.approximate) for node in store.nodes()] == [(exact, ())]
        assert store.stats().damaged == 1
        assert store.find(sieve, longer(ids)[0]).tokens == 70


def test_a_list_names_the_rules(sieve, tmp_path, capsys):
    cache, ids = edited(sieve, prompt())
    with PrefixStore(tmp_path) as store:
        store.add(sieve, ids[0], cache, 1.0)
        store.add(sieve, prompt(5)[0], sieve.prefill(prompt(5)), 1.0)
    with pytest.raises(SystemExit):
        run_cli(["store", "ls", str(tmp_path)])
    rows = capsys.readouterr().out.splitlines()
    assert any("edit:window=4" in row and " 70 " in row for row in rows)
    assert any("exact" in row and " 80 " in row for row in rows)


def test_nodes_share_entries_up_to_an_edit(sieve):
    """Also where a token that follows the edit repeats one before it."""
    ids = prompt()
    ids[0, 40] = ids[0, 50]
    cache = sieve.prefill(ids)
    edit = sieve.edit(cache, ids, window=0)
    known = edit.cut((75, 76)).ids
    with PrefixStore() as store:
        whole = store.add(sieve, known[0], cache, 1.0).memory_bytes
        after = edit.cut((40, 50)).ids
        assert torch.equal(after[0, :41], known[0, :41])
        store.add(sieve, after[0], cache, 1.0)
        assert store.stats().memory_bytes == whole + (len(after[0]) - 40) * (whole // len(known[0]))
        same(cache, store.find(sieve, longer(after)[0], approximate=("edit:window=0",)).cache)
