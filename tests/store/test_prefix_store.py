"""The store itself: the tree, its tiers and budgets, owners, files that are damaged, locked or cannot be written."""

from __future__ import annotations

import errno
import random
import threading

import numpy as np
import pytest
import torch

import kvsieve
from kvsieve.errors import CacheFileError, CacheStateError, InputError
from kvsieve.hf.persist import cache_file
from kvsieve.store import PrefixStore
from kvsieve.store.radix import RadixTree, common
from tiny import greedy, tiny_model, tiny_prompt
from tiny_models import build

GREEDY = greedy(max_new_tokens=2)


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture
def sieve(model):
    with kvsieve.attach(model, kvsieve.plan("full")) as attached:
        yield attached


@pytest.fixture
def snapkv():
    with kvsieve.attach(build("llama"), kvsieve.plan("snapkv", budget=30, window=4, paper=True)) as attached:
        yield attached


def prompt(seed, size=60):
    return tiny_prompt(1, size, seed=seed)


def put(store, sieve, ids, seconds=1.0, **more):
    return store.add(sieve, ids[0], sieve.prefill(ids), seconds, **more)


def longer(ids):
    return torch.cat([ids, prompt(99, 8)], 1)


def test_the_tree_finds_what_a_plain_search_finds():
    chance = random.Random(3)
    tree, inside = RadixTree(), []
    for number in range(400):
        tokens = np.array([chance.choice((1, 1, 1, 2, 3)) for _ in range(chance.randrange(1, 12))], dtype=np.int64)
        if inside and chance.random() < 0.4:
            old, entry = inside.pop(chance.randrange(len(inside)))
            tree.remove(old, entry)
        tree.add(tokens, number)
        inside.append((tokens, number))
        asked = np.array([chance.choice((1, 1, 2, 3)) for _ in range(10)], dtype=np.int64)
        expected = {entry: same for old, entry in inside if (same := common(old, asked))}
        found = list(tree.along(asked))
        assert dict(found) == expected and len(found) == len(expected)
        assert [same for _, same in found] == sorted((same for _, same in found), reverse=True)
        whole = {entry: len(old) for old, entry in inside if common(old, asked) == len(old)}
        assert dict(tree.prefixes(asked)) == whole
        assert sorted(tree) == sorted(entry for _, entry in inside)


def test_nodes_share_what_they_begin_with(sieve):
    """Two questions on one document: the second takes its own tokens only, and what is found is nobody else's."""
    document = prompt(1)
    one, two = (torch.cat([document, prompt(seed, 6)], 1) for seed in (2, 3))
    with PrefixStore() as store:
        put(store, sieve, one)
        alone = store.stats().memory_bytes
        per_token = alone // one.shape[1]
        found = store.find(sieve, two[0])
        assert found.tokens == document.shape[1] and found.seconds == pytest.approx(60 / 66)
        sieve.prefill(two, cache=found.cache)
        store.add(sieve, two[0], found.cache, 2.0)
        assert store.stats().memory_bytes == alone + 6 * per_token
        # Copied when it is written to: both go on from the same node, and the node stays as it is.
        forks = [store.find(sieve, longer(one)[0]).cache for _ in range(2)]
        pointers = {fork.sieve_layers[0].store.buffers()[0].data_ptr() for fork in forks}
        assert len(pointers) == 1
        answers = [sieve.generate(longer(one), cache=fork, **GREEDY).sequences for fork in forks]
        assert torch.equal(*answers) and torch.equal(answers[0], sieve.generate(longer(one), **GREEDY).sequences)
        # A conversation that goes on takes the place of what it began with.
        more = longer(two)
        sieve.prefill(more, cache=found.cache)
        store.add(sieve, more[0], found.cache, 3.0)
        assert sorted(node.tokens for node in store.nodes()) == [66, 74] and store.stats().replaced == 1
        assert store.find(sieve, longer(two)[0]).tokens == 66 + 8 - 1


def test_what_saves_little_per_byte_leaves_first(sieve, tmp_path):
    ids = [prompt(seed) for seed in range(4)]
    with PrefixStore() as store:
        size = put(store, sieve, ids[0]).memory_bytes
    with PrefixStore(memory=int(2.5 * size)) as store:
        put(store, sieve, ids[0], 9.0)
        put(store, sieve, ids[1], 1.0)
        put(store, sieve, ids[2], 5.0)
        assert {node.seconds for node in store.nodes()} == {9.0, 5.0}
        pinned = put(store, sieve, ids[3], 0.1, pin=True)
        assert {node.seconds for node in store.nodes()} == {9.0, 0.1} and pinned.pinned
        store.pin(pinned.key, False)
        # What is not asked for any more goes in time, whatever it once took.
        for seed in range(10, 40):
            put(store, sieve, prompt(seed), 3.0)
        assert 9.0 not in {node.seconds for node in store.nodes()}
        stats = store.stats()
        assert stats.memory_bytes <= 2.5 * size and stats.evictions >= stats.added - stats.nodes
    # On the disk the budget holds as well; what leaves memory is read back.
    with PrefixStore(tmp_path, memory=0, disk=int(3.5 * size)) as store:
        for seed, seconds in enumerate((9.0, 1.0, 5.0, 6.0)):
            put(store, sieve, ids[seed], seconds)
            assert store.flush()
        assert store.stats().memory_bytes == 0 and store.stats().disk_bytes <= 3.5 * size
        assert [bool(store.find(sieve, longer(each)[0])) for each in ids] == [True, False, True, True]
        assert len([*tmp_path.glob("*.kv")]) == 3


def test_owners_see_their_own(sieve):
    ids = prompt(1)
    with PrefixStore() as store:
        put(store, sieve, ids, owner="ann")
        put(store, sieve, prompt(2), owner="")
        asked = longer(ids)[0]
        assert store.find(sieve, asked, "bob") is None and store.find(sieve, asked) is None
        assert store.find(sieve, asked, "ann").tokens == 60
        assert store.find(sieve, asked, "bob", also=("ann",)).tokens == 60
        # Adding the same for another owner takes nothing from the first one's.
        put(store, sieve, ids, owner="bob")
        assert store.remove(owner="ann") == 1 and store.find(sieve, asked, "bob") and len(store.nodes()) == 2


def test_other_weights_plans_and_tokenizers_find_nothing(model, sieve, snapkv):
    ids = prompt(1)
    with PrefixStore() as store:
        put(store, sieve, ids)
        asked = longer(ids)[0]
        assert store.find(snapkv, asked) is None and store.find(sieve, asked) is not None
        sieve.tokenizer = type("Words", (), {"get_vocab": lambda self: {"a": 0}})()
        assert store.find(sieve, asked) is None
        sieve.tokenizer = None
        assert store.find(sieve, asked) is not None
        weight = next(model.parameters())
        with torch.no_grad():
            weight.mul_(2)
            try:
                assert store.find(sieve, asked) is None
            finally:
                weight.div_(2)
        assert store.find(sieve, asked) is not None


def test_what_was_chosen_by_a_question_serves_what_goes_on_behind_its_answer(snapkv):
    ids = prompt(1)
    with PrefixStore() as store:
        cache = snapkv.prefill(ids)
        assert store.add(snapkv, ids[0], cache, 1.0).serves == "conversation"
        # As a document that was read ahead, it was reduced without the question that follows now.
        assert store.find(snapkv, longer(ids)[0]) is None
        assert store.find(snapkv, longer(ids)[0], turns=(68,)) is None
        assert store.find(snapkv, longer(ids)[0], turns=(60, 68)).tokens == 60
        assert store.find(snapkv, ids[0], turns=(60,), leave=0).tokens == 60
        result = snapkv.generate(ids, **GREEDY)
        store.add(snapkv, result.sequences[0], result.cache, 1.0)
        found = store.find(snapkv, longer(result.sequences)[0])
        assert found.tokens == 61 and not found.cache.conversation.half_read


def test_the_beginning_of_a_prompt_leaves_its_window(snapkv):
    ids = prompt(1, 100)
    with PrefixStore() as store:
        cache = snapkv.begin(ids[:, :98], chunk=32)
        store.add(snapkv, ids[0], cache, 1.0)
        assert [store.find(snapkv, ids[0, :size]).tokens for size in (100, 99, 50)] == [96, 95, 46]
        # With few tokens left the last pass would look back on fewer queries than the plan does.
        found = store.find(snapkv, ids[0])
        again = snapkv.generate(ids, cache=found.cache, **GREEDY)
        assert torch.equal(again.sequences, snapkv.generate(ids, **GREEDY).sequences)
        assert again.stats.applied


@pytest.mark.parametrize("harm", ["cut", "flipped", "renamed", "foreign"])
def test_a_damaged_file_is_set_aside_and_never_served(sieve, tmp_path, harm, caplog):
    ids, other = prompt(1), prompt(2)
    with PrefixStore(tmp_path) as store:
        bad, good = put(store, sieve, ids), put(store, sieve, other)
    file = tmp_path / f"{bad.key}.kv"
    data = bytearray(file.read_bytes())
    if harm == "renamed":
        file.rename(tmp_path / f"{'0' * 32}.kv")
    else:
        data[-5000] ^= 255
        file.write_bytes({"cut": data[:-9], "flipped": data, "foreign": b"no node"}[harm])
    with PrefixStore(tmp_path) as store, caplog.at_level("WARNING"):
        assert store.find(sieve, longer(ids)[0]) is None
        assert store.find(sieve, longer(other)[0]).tokens == 60
        assert store.stats().damaged == 1 and [node.key for node in store.nodes()] == [good.key]
        assert len([*(tmp_path / "damaged").iterdir()]) == 1 and "set aside" in caplog.text
        assert store.verify() == []
        flipped = tmp_path / f"{good.key}.kv"
        flipped.write_bytes(flipped.read_bytes()[:-1] + b"?")
        assert store.verify() == [good.key] and store.stats().damaged == 2


def test_other_files_in_its_directory_stay(sieve, tmp_path):
    chat = tmp_path / "chat.kv"
    sieve.save(sieve.prefill(prompt(1)), chat)
    saved = chat.read_bytes()
    with PrefixStore(tmp_path) as store:
        put(store, sieve, prompt(2))
    with PrefixStore(tmp_path) as store:
        assert store.verify() == [] and len(store.nodes()) == 1 and store.stats().damaged == 0
    assert chat.read_bytes() == saved


def test_a_full_disk_loses_nothing(sieve, tmp_path, monkeypatch, caplog):
    full, own = threading.Event(), cache_file.write

    def write(file, tensors, text):
        own(file, tensors, text)
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvsieve.hf.persist.saved.write", write)
    ids, other = prompt(1), prompt(2)
    with PrefixStore(tmp_path) as store:
        put(store, sieve, other)
        assert store.flush()
        full.set()
        put(store, sieve, ids)
        # A longer one is to take the place of another, which stays on the disk until that is written.
        put(store, sieve, longer(other))
        assert not store.flush() and store.stats().write_errors >= 2 and "No space left" in caplog.text
        assert store.stats().waiting == 2 and len([*tmp_path.glob("*.kv")]) == 1
        assert store.find(sieve, longer(ids)[0]).tokens == 60
        full.clear()
        assert store.flush() and store.stats().waiting == 0
        assert len([*tmp_path.iterdir()]) == 3
    with PrefixStore(tmp_path) as store:
        assert sorted(node.tokens for node in store.nodes()) == [60, 68]


def test_one_process_writes_and_others_read(sieve, tmp_path):
    ids = prompt(1)
    with PrefixStore(tmp_path) as store:
        put(store, sieve, ids)
        store.flush()
        with pytest.raises(
            InputError, match=r"^the store at .* in use by process \d+, and only one .*read_only=True\)$"
        ):
            PrefixStore(tmp_path)
        with PrefixStore(tmp_path, read_only=True) as reader:
            assert reader.find(sieve, longer(ids)[0]).from_disk
            put(reader, sieve, prompt(2))
            assert len(reader.nodes()) == 2 and len([*tmp_path.glob("*.kv")]) == 1
            store.remove(store.nodes()[0].key)
        with PrefixStore(tmp_path, read_only=True) as reader:
            assert reader.nodes() == []
    with PrefixStore(tmp_path) as store:
        assert store.stats().nodes == 0
    with pytest.raises(InputError, match="there is no store"):
        PrefixStore(tmp_path / "none", read_only=True)
    (tmp_path / "file").write_text("text")
    with pytest.raises(InputError, match="cannot use"):
        PrefixStore(tmp_path / "file")


def test_export_and_import(sieve, snapkv, tmp_path):
    with PrefixStore() as store:
        put(store, sieve, prompt(1))
        put(store, snapkv, prompt(2))
        assert store.export(tmp_path / "all.tar") == 2
        with pytest.raises(InputError, match="there already"):
            store.export(tmp_path / "all.tar")
    with PrefixStore(tmp_path / "other") as store:
        assert store.import_(tmp_path / "all.tar") == 2 and store.import_(tmp_path / "all.tar") == 0
        assert store.find(sieve, longer(prompt(1))[0]).tokens == 60
    data = bytearray((tmp_path / "all.tar").read_bytes())
    data[8000] ^= 1
    (tmp_path / "all.tar").write_bytes(data)
    with PrefixStore() as store, pytest.raises(CacheFileError, match="damaged node"):
        store.import_(tmp_path / "all.tar")


def test_bad_input(sieve, snapkv):
    ids = prompt(1)
    cache = sieve.prefill(ids)
    with PrefixStore() as store:
        with pytest.raises(InputError, match="has read 60 tokens and token_ids has 59"):
            store.add(sieve, ids[0, :-1], cache, 1.0)
        with pytest.raises(InputError, match="token ids of one conversation"):
            store.find(sieve, ["a"])
        with pytest.raises(CacheStateError, match="was made for another model"):
            store.add(snapkv, ids[0], cache, 1.0)
        with pytest.raises(InputError, match="no nodes of the store"):
            store.remove("abc")
        rows = sieve.prefill(torch.cat([ids, ids]))
        kept = snapkv.prefill(ids, protect=[(0, 9)])
        assert store.add(sieve, ids[0], rows, 1.0) is None and store.add(snapkv, ids[0], kept, 1.0) is None
        assert store.stats().refused == 2
    with pytest.raises(InputError, match="memory= is a number of bytes"):
        PrefixStore(memory=-1)


def test_threads_may_share_a_store(sieve, tmp_path):
    caches = [(ids, sieve.prefill(ids)) for ids in map(prompt, range(12))]
    with PrefixStore(tmp_path, memory=100_000) as store:

        def work(mine):
            for ids, cache in mine:
                store.add(sieve, ids[0], cache, 1.0)
                store.find(sieve, longer(ids)[0])

        threads = [threading.Thread(target=work, args=(caches[at::3],)) for at in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert store.flush() and store.stats().added == 12
        assert all(store.find(sieve, longer(ids)[0]).tokens == 60 for ids, _ in caches)


@pytest.mark.parametrize("path", ["", "a\0b", "/dev/null", "/dev/null/below"])
def test_a_directory_that_is_none_is_told(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="the directory of a store"):
        PrefixStore(path)
    assert not list(tmp_path.iterdir())
