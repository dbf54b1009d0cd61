"""Rules by which a cache's entries are approximate: set by edits, kept in copies, files and batches."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kvsieve
from kvsieve.hf.cache.batching import stack
from kvsieve.hf.persist.cache_file import header_digest

RULE = ("edit:window=4",)
NEW = torch.tensor([11, 12, 13])


@pytest.fixture
def ids():
    return torch.randint(3, 90, (1, 60), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def sieve(model):
    with kvsieve.attach(model, kvsieve.plan("full")) as attached:
        yield attached


def edited(sieve, ids, window=4):
    """A cache with a span cut, and its conversation."""
    cache = sieve.prefill(ids)
    return cache, sieve.edit(cache, ids, window=window).cut((20, 30)).ids


@pytest.mark.parametrize(
    ("plan", "window", "edit", "rules"),
    [
        ("full", 4, lambda edit: edit.cut((20, 30)), RULE),
        ("full", 0, lambda edit: edit.move((20, 30), 40), ("edit:window=0",)),
        ("full", 4, lambda edit: edit.replace((20, 30), NEW), RULE),
        ("full", "all", lambda edit: edit.cut((20, 30)), ()),
        # Nothing has moved.
        ("full", 0, lambda edit: edit.cut((50, 60)), ()),
        ("full", 4, lambda edit: edit.cut((50, 57)), ()),
        ("full", 0, lambda edit: edit.insert(60, NEW), ()),
        ("full", 4, lambda edit: edit.rewrite([(0, 60)]), ()),
        # Dropped tokens stay dropped, and a new prefill would choose others.
        ("snapkv", 4, lambda edit: edit.rewrite([(0, 20), (20, 60)]), ()),
        ("snapkv", 4, lambda edit: edit.cut((50, 60)), RULE),
        ("snapkv", "all", lambda edit: edit.cut((20, 30)), ("edit:window=all",)),
        ("kivi", "all", lambda edit: edit.cut((20, 30)), ("edit:window=all",)),
    ],
)
def test_an_edit_adds_its_rule_unless_it_is_a_new_prefill(model, ids, plan, window, edit, rules):
    options = {"snapkv": {"budget": 30, "window": 4, "floor": 0}, "kivi": {"bits": 4, "block": 16, "tail": 8}}
    with kvsieve.attach(model, kvsieve.plan(plan, **options.get(plan, {}))) as sieve:
        cache = sieve.prefill(ids)
        edit(sieve.edit(cache, ids, window=window))
        assert cache.conversation.approximate == rules


def test_rules_add_up_and_stay(sieve, ids):
    cache, known = edited(sieve, ids)
    known = sieve.edit(cache, known, window=2).cut((5, 10)).ids
    known = sieve.edit(cache, known, window=2).cut((5, 10)).ids
    known = sieve.edit(cache, known, window="all").cut((20, 23)).ids
    sieve.generate(torch.cat([known, NEW[None]], 1), cache=cache, max_new_tokens=2, pad_token_id=0)
    assert cache.conversation.approximate == ("edit:window=2", *RULE)
    cache.reset()
    assert cache.conversation.approximate == ()


def test_an_edit_that_fails_adds_none(sieve, ids, monkeypatch):
    cache = sieve.prefill(ids)
    monkeypatch.setattr(sieve, "feed", lambda *given, **more: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        sieve.edit(cache, ids).cut((0, 5))
    assert cache.conversation.approximate == ()


def became(sieve, cache, path):
    other = sieve.new_cache()
    other.become(cache.fork())
    return other


def rolled_back(sieve, cache, path):
    taken = cache.snapshot()
    cache.reset()
    cache.rollback(taken)
    return cache


def saved(sieve, cache, path):
    sieve.save(cache, path / "cache")
    return sieve.load(path / "cache").cache


COPIES = {
    "fork": lambda sieve, cache, path: cache.fork(),
    "copy": lambda sieve, cache, path: copy.deepcopy(cache),
    "rollback": rolled_back,
    "become": became,
    "file": saved,
    "first row": lambda sieve, cache, path: stack([cache, sieve.prefill(torch.zeros(1, 50, dtype=torch.int64) + 5)]),
    "last row": lambda sieve, cache, path: stack([sieve.prefill(torch.zeros(1, 50, dtype=torch.int64) + 5), cache]),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_keep_the_rules(sieve, ids, tmp_path, name):
    cache, _ = edited(sieve, ids)
    assert COPIES[name](sieve, cache, tmp_path).conversation.approximate == RULE


def test_a_snapshot_from_before_an_edit_has_none(sieve, ids):
    cache = sieve.prefill(ids)
    taken = cache.snapshot()
    sieve.edit(cache, ids, window=4).cut((20, 30))
    cache.rollback(taken)
    assert cache.conversation.approximate == ()


def test_a_file_of_an_earlier_version_is_exact(sieve, ids, tmp_path):
    sieve.save(sieve.prefill(ids), tmp_path / "now")
    data = load_file(tmp_path / "now")
    with safe_open(tmp_path / "now", "pt") as opened:
        header = json.loads(opened.metadata()["kvsieve"])
    facts = header["cache"]["Conversation"]["dict"]
    left = [fact for fact in facts if fact[0] != "approximate"]
    assert len(left) == len(facts) - 1
    header["cache"]["Conversation"]["dict"] = left
    del header["sha256"]
    header["sha256"] = header_digest(header)
    save_file(data, tmp_path / "then", {"kvsieve": json.dumps(header)})
    assert sieve.load(tmp_path / "then").cache.conversation.approximate == ()
