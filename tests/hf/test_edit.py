"""Edits of a cache's conversation: tokens cut, replaced, inserted and moved, with entries reused."""

from __future__ import annotations

import itertools

import pytest
import torch

import kvsieve
from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.hf.edit.difference import pieces_between
from kvsieve.hf.edit.editor import Editor
from kvsieve.hf.edit.layout import Arrangement
from small import longrope_factors
from tiny_models import build

PLANS = {
    "full": {},
    "snapkv": {"budget": 40, "window": 8},
    "adakv": {"budget": 40, "window": 8},
    "fastkv": {"budget": 40, "tsp_layer": 1},
    "rocketkv-mt": {"budget": 32, "window": 8},
    "kivi": {"bits": 4, "block": 16, "tail": 8},
}


@pytest.fixture
def ids():
    return torch.randint(3, 90, (1, 120), generator=torch.Generator().manual_seed(2))


def attached(model, name="full"):
    floor = {} if name in ("full", "kivi") else {"floor": 0}
    return kvsieve.attach(model, kvsieve.plan(name, **floor, **PLANS[name]))


def after(sieve, cache, token=7):
    """Logits of a token that follows the conversation of a cache."""
    result = sieve.feed(cache, torch.tensor([[token]]), None, logits=1)
    return result.logits[0, -1]


EDITS = {
    "cut": (lambda edit, new: edit.cut((30, 50)), lambda ids, new: [ids[:30], ids[50:]]),
    "replace": (lambda edit, new: edit.replace((30, 50), new), lambda ids, new: [ids[:30], new, ids[50:]]),
    "insert": (lambda edit, new: edit.insert(0, new), lambda ids, new: [new, ids]),
    "move": (
        lambda edit, new: edit.move((30, 50), 100),
        lambda ids, new: [ids[:30], ids[50:100], ids[30:50], ids[100:]],
    ),
    "move back": (
        lambda edit, new: edit.move((60, 80), 10),
        lambda ids, new: [ids[:10], ids[60:80], ids[10:60], ids[80:]],
    ),
}
NEW = torch.tensor([11, 12, 13, 14, 15])


@pytest.mark.parametrize("name", EDITS)
def test_a_window_of_all_is_a_new_prefill(model, ids, name):
    edit, wanted = EDITS[name]
    with attached(model) as sieve:
        cache = sieve.prefill(ids)
        done = edit(sieve.edit(cache, ids, window="all"), NEW)
        expected = torch.cat(wanted(ids[0], NEW))[None]
        assert torch.equal(done.ids, expected) and done.moved == 0
        anew = sieve.prefill(expected)
        assert cache.num_seen == anew.num_seen
        for layer, other in zip(cache.all_layers, anew.all_layers, strict=True):
            torch.testing.assert_close(layer.keys, other.keys, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(layer.values, other.values, atol=1e-5, rtol=1e-4)
            assert torch.equal(layer.store.index, other.store.index)
        torch.testing.assert_close(after(sieve, cache), after(sieve, anew), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("family", ["llama", "gemma", "phi3", "gpt_neox", "stablelm"])
def test_entries_of_the_first_layer_are_exact_without_a_window(family, ids, name):
    """They depend on a token and its position alone."""
    edit, wanted = EDITS[name]
    with kvsieve.attach(build(family).float().eval(), kvsieve.plan("full")) as sieve:
        cache = sieve.prefill(ids)
        done = edit(sieve.edit(cache, ids, window=0), NEW)
        expected = torch.cat(wanted(ids[0], NEW))[None]
        anew = sieve.prefill(expected)
        assert done.reread == (0 if name in ("cut", "move", "move back") else len(NEW))
        first, other = cache.all_layers[0], anew.all_layers[0]
        torch.testing.assert_close(first.keys, other.keys, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(first.values, other.values, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", EDITS)
def test_edits_work_under_plans(model, ids, plan, name):
    edit, wanted = EDITS[name]
    with attached(model, plan) as sieve:
        cache = sieve.prefill(ids)
        before = cache.entries()
        done = edit(sieve.edit(cache, ids, window=4), NEW)
        assert done.reused + done.reread == done.ids.shape[1] == cache.num_seen
        assert all(entries <= most + len(NEW) for entries, most in zip(cache.entries(), before, strict=True))
        for layer in cache.sieve_layers.values():
            index = layer.store.index
            real = index >= 0 if layer.store.valid is None else layer.store.valid.expand_as(index)
            assert int(index[real].max()) < cache.num_seen
            for row in index[0]:
                kept = row[row >= 0]
                assert (kept.diff() > 0).all() or layer.store.is_encoded
        more = torch.cat([done.ids, torch.tensor([[5, 6, 7]])], 1)
        result = sieve.generate(more, cache=cache, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert result.sequences.shape[1] == more.shape[1] + 4


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_are_refused(family, ids):
    """They are in the hidden states, so entries cannot move."""
    with kvsieve.attach(build(family), kvsieve.plan("full")) as sieve:
        cache = sieve.prefill(ids)
        with pytest.raises(UnsupportedOptionError, match="adds positions to hidden states"):
            sieve.edit(cache, ids)
        texts = [ids[:, :20], ids[:, 20:40]]
        with pytest.raises(UnsupportedOptionError, match="adds positions to hidden states"):
            sieve.join(texts, kind="modules")
        # These do not move.
        assert sieve.join(texts, kind="ape").cache.num_seen == 40


def test_latent_entries_are_refused(ids):
    """Only a part of each is rotated."""
    with kvsieve.attach(build("deepseek_v3"), kvsieve.plan("full")) as sieve:
        cache = sieve.prefill(ids)
        with pytest.raises(UnsupportedOptionError, match="latent attention"):
            sieve.edit(cache, ids)
        with pytest.raises(UnsupportedOptionError, match="latent attention"):
            sieve.join([ids[:, :20], ids[:, 20:40]], kind="modules")


@pytest.mark.parametrize("plan", ["full", "snapkv", "adakv", "kivi"])
def test_kept_tokens_are_those_of_before(model, ids, plan):
    with attached(model, plan) as sieve:
        cache = sieve.prefill(ids)
        sets = [
            {int(ids[0, column]) * 1000 + column for column in row.tolist() if column >= 0}
            for layer in cache.sieve_layers.values()
            for row in layer.store.index[0]
        ]
        sieve.edit(cache, ids, window=8).cut((30, 50))
        later = [row for layer in cache.sieve_layers.values() for row in layer.store.index[0]]
        for before, row in zip(sets, later, strict=True):
            moved = {column % 1000 for column in before if not 30 <= column % 1000 < 50}
            assert {column + 20 * (column >= 30) for column in row.tolist() if column >= 0} == moved


def test_cutting_the_end_takes_it_back(model, ids):
    with attached(model) as sieve:
        cache = sieve.prefill(ids)
        alone = sieve.prefill(ids[:, :90])
        sieve.edit(cache, ids).cut((90, 120))
        for layer, other in zip(cache.all_layers, alone.all_layers, strict=True):
            torch.testing.assert_close(layer.keys, other.keys, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(after(sieve, cache), after(sieve, alone), atol=1e-5, rtol=1e-5)


def test_two_edits_equal_one(model, ids):
    with attached(model) as sieve:
        twice, once = sieve.prefill(ids), sieve.prefill(ids)
        edit = sieve.edit(twice, ids, window=0)
        edit.cut((70, 90))
        first = edit.cut((20, 30))
        second = sieve.edit(once, ids, window=0).rewrite([(0, 20), (30, 70), (90, 120)])
        assert torch.equal(first.ids, second.ids)
        for layer, other in zip(twice.all_layers, once.all_layers, strict=True):
            torch.testing.assert_close(layer.keys, other.keys, atol=1e-5, rtol=1e-4)


def test_there_and_back_changes_nothing_but_rounding(model, ids):
    with attached(model) as sieve:
        cache, untouched = sieve.prefill(ids), sieve.prefill(ids)
        edit = sieve.edit(cache, ids, window=0)
        edit.move((30, 50), 100)
        assert torch.equal(edit.move((80, 100), 30).ids, ids)
        for layer, other in zip(cache.all_layers, untouched.all_layers, strict=True):
            torch.testing.assert_close(layer.keys, other.keys, atol=1e-5, rtol=1e-4)
            assert torch.equal(layer.values, other.values)


def test_an_edited_cache_is_saved_and_continues_equally(model, ids, tmp_path):
    with attached(model, "snapkv") as sieve:
        cache = sieve.prefill(ids)
        done = sieve.edit(cache, ids).cut((30, 50))
        sieve.save(cache, tmp_path / "edited", ids=done.ids)
        loaded = sieve.load(tmp_path / "edited")
        torch.testing.assert_close(after(sieve, cache), after(sieve, loaded.cache), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("plan", ["full", "adakv", "kivi"])
def test_an_edit_in_chunks_equals_one_in_long_passes(model, ids, plan):
    new = torch.arange(5, 55)
    with attached(model, plan) as sieve:
        whole, parts = sieve.prefill(ids), sieve.prefill(ids)
        Editor(sieve, whole, ids, 20).insert(30, new)
        done = []
        Editor(sieve, parts, ids, 20, chunk=16, progress=lambda *tokens: done.append(tokens)).insert(30, new)
        assert done == [(16, 70), (32, 70), (48, 70), (64, 70), (70, 70)]
        for layer, other in zip(whole.sieve_layers.values(), parts.sieve_layers.values(), strict=True):
            mine, its = layer.store.padded(), other.store.padded()
            assert torch.equal(mine.index, its.index)
            torch.testing.assert_close(mine.values, its.values, atol=1e-5, rtol=1e-4, equal_nan=True)
        torch.testing.assert_close(after(sieve, whole), after(sieve, parts), atol=1e-4, rtol=1e-4)


def test_an_edit_stopped_by_its_progress_changes_nothing(model, ids):
    def stop(done, total):
        raise KeyboardInterrupt

    with attached(model) as sieve:
        cache, other = sieve.prefill(ids), sieve.prefill(ids)
        with pytest.raises(KeyboardInterrupt):
            Editor(sieve, cache, ids, chunk=8, progress=stop).insert(30, torch.arange(5, 25))
        assert torch.equal(after(sieve, cache), after(sieve, other))


def test_only_the_window_and_new_tokens_are_fed(model, ids, monkeypatch):
    with attached(model) as sieve:
        cache = sieve.prefill(ids)
        fed = []
        feed = sieve.feed
        monkeypatch.setattr(sieve, "feed", lambda *given, **more: fed.append(given[1].shape[1]) or feed(*given, **more))
        done = sieve.edit(cache, ids, window=16).replace((30, 50), NEW)
        assert fed == [21] and done.reread == 21 and done.moved == 120 - 50 - 16


def test_seams_and_runs():
    layout = Arrangement.of(torch.arange(10))
    assert layout.rewritten([(0, 10)]).runs(3) == []
    assert layout.rewritten([(0, 3), (5, 10)]).runs(2) == [(3, 5)]
    assert layout.rewritten([(0, 8)]).runs(2) == []
    assert layout.rewritten([torch.tensor([1, 2]), (0, 10)]).runs(1) == [(0, 3)]
    assert layout.rewritten([(0, 3), torch.tensor([1]), (3, 10)]).runs(0) == [(3, 4)]
    assert layout.rewritten([(0, 3), (5, 7), (3, 5), (7, 10)]).runs(1) == [(3, 4), (5, 6), (7, 8)]
    assert layout.rewritten([(0, 3), (5, 10)]).runs("all") == [(3, 8)]


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda edit: edit.cut((5, 5)), "start < end <= 120"),
        (lambda edit: edit.cut((100, 121)), "start < end <= 120"),
        (lambda edit: edit.cut("1-2"), "a span is"),
        (lambda edit: edit.cut((0, 120)), "removes every token"),
        (lambda edit: edit.insert(121, [1]), "0 to 120"),
        (lambda edit: edit.insert(3, []), "at least one"),
        (lambda edit: edit.insert(3, [1.5]), "new text is the token ids"),
        (lambda edit: edit.replace((3, 5), "text"), "new text is the token ids"),
        (lambda edit: edit.become([5.0]), "the conversation is the token ids"),
        (lambda edit: edit.insert(3, [10**6]), "the model knows 0 to"),
        (lambda edit: edit.become(torch.full((1, 130), -1)), "the model knows 0 to"),
        (lambda edit: edit.rewrite([]), "removes every token"),
        (lambda edit: edit.insert(3, [5] * 393), "would have 513 tokens, the model's context ends at 512"),
        (lambda edit: edit.become(torch.full((1, 513), 7)), "would have 513 tokens"),
        (lambda edit: edit.move((10, 20), 15), "lies within"),
        (lambda edit: edit.rewrite([(0, 20), (10, 30)]), "overlap"),
    ],
)
def test_bad_edits_are_refused_and_change_nothing(model, ids, edit, told):
    with attached(model) as sieve:
        cache = sieve.prefill(ids)
        keys = [layer.keys.clone() for layer in cache.all_layers]
        with pytest.raises(InputError, match=told):
            edit(sieve.edit(cache, ids))
        assert cache.num_seen == 120
        assert all(torch.equal(layer.keys, part) for layer, part in zip(cache.all_layers, keys, strict=True))


def test_protected_tokens_cannot_be_cut(model, ids):
    with attached(model, "snapkv") as sieve:
        cache = sieve.prefill(ids, protect=[(10, 20)])
        with pytest.raises(InputError, match="protect="):
            sieve.edit(cache, ids).cut((15, 30))
        done = sieve.edit(cache, ids).cut((0, 5))
        with pytest.raises(InputError, match="protect="):
            sieve.edit(cache, done.ids).cut((5, 6))
        sieve.edit(cache, done.ids).cut((16, 20))


@pytest.mark.parametrize(
    ("plan", "options", "told"),
    [
        ("h2o", {"budget": 40}, "H2O, it has counted attention"),
        ("lagkv", {"budget": "50%", "lag": 16, "sinks": 4}, "partitions"),
        ("gemfilter", {"budget": 40}, "shorter"),
        ("cam", {"budget": 40}, "CaM, its entries have"),
        ("attentionmatching", {"budget": 40, "repeat_ids": (), "answer_ids": ()}, "weighted entries"),
    ],
)
def test_plans_that_cannot_be_edited_are_refused(model, ids, plan, options, told):
    with kvsieve.attach(model, kvsieve.plan(plan, floor=0, **options)) as sieve:
        cache = sieve.prefill(ids)
        with pytest.raises(UnsupportedOptionError, match=told):
            sieve.edit(cache, ids)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_models_that_forget_are_refused(ids, family):
    with kvsieve.attach(build(family).float().eval(), kvsieve.plan("full")) as sieve:
        cache = sieve.prefill(ids)
        with pytest.raises(UnsupportedOptionError, match="do not go back"):
            sieve.edit(cache, ids)


def test_rotation_that_depends_on_the_length_is_refused(ids):
    """Before the first edit, as for a join."""
    model = build("phi3", rope_parameters=longrope_factors(100), original_max_position_embeddings=100)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = sieve.prefill(ids)
        with pytest.raises(UnsupportedOptionError, match="changes with the prompt's length"):
            sieve.edit(cache, ids)


def test_other_ids_and_rows_are_refused(model, ids):
    with attached(model) as sieve:
        cache = sieve.prefill(ids)
        for given, told in (
            (ids[0].tolist(), "pass torch.tensor"),
            (ids.float(), "int64"),
            (ids[0], "batch dimension"),
        ):
            with pytest.raises(InputError, match=told):
                sieve.edit(cache, given)
        assert sieve.edit(cache, {"input_ids": ids}).cut((0, 5)).ids.shape[1] == 115
        cache = sieve.prefill(ids)
        with pytest.raises(InputError, match="120 tokens"):
            sieve.edit(cache, ids[:, :-1])
        several = sieve.prefill(ids.repeat(2, 1))
        with pytest.raises(InputError, match="2 rows"):
            sieve.edit(several, ids.repeat(2, 1))


@pytest.mark.parametrize("plan", ["full", "snapkv", "kivi"])
def test_an_interrupt_leaves_the_cache_as_it_was(model, ids, plan, monkeypatch):
    with attached(model, plan) as sieve:
        cache, untouched = sieve.prefill(ids), sieve.prefill(ids)
        edit = sieve.edit(cache, ids)
        with monkeypatch.context() as patch:
            patch.setattr(
                sieve.decoder.layers[1], "forward", lambda *given, **more: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                edit.replace((30, 50), NEW)
        assert torch.equal(edit.ids, ids) and cache.num_seen == 120
        torch.testing.assert_close(after(sieve, cache), after(sieve, untouched), atol=1e-6, rtol=1e-6)


def joined(old, pieces):
    return torch.cat([piece if isinstance(piece, torch.Tensor) else old[slice(*piece)] for piece in pieces])


@pytest.mark.parametrize("seed", range(20))
def test_pieces_lead_from_one_conversation_to_another(seed):
    dice = torch.Generator().manual_seed(seed)
    old = torch.randint(0, 40 if seed % 2 else 400, (300,), generator=dice)
    cuts = sorted(torch.randint(0, 300, (4,), generator=dice).tolist())
    new = torch.cat(
        [old[: cuts[0]], torch.randint(0, 400, (9,), generator=dice), old[cuts[1] : cuts[2]], old[cuts[3] :]]
    )
    pieces = pieces_between(old, new)
    assert torch.equal(joined(old, pieces), new)
    spans = [piece for piece in pieces if not isinstance(piece, torch.Tensor)]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    fresh = sum(len(piece) for piece in pieces if isinstance(piece, torch.Tensor))
    assert fresh <= 9 + 2 * 8


def test_a_conversation_becomes_another(model, ids):
    new = torch.cat([ids[:, :20], ids[:, 50:80], NEW[None], ids[:, 85:]], 1)
    with attached(model) as sieve:
        cache = sieve.prefill(ids)
        done = sieve.edit(cache, ids, window=0).become(new)
        assert torch.equal(done.ids, new) and done.reread == len(NEW)
        assert sieve.edit(cache, new).become(new).reread == 0


def test_removed_entries_do_not_return_in_the_next_turn(model, ids):
    """Heads that have kept different tokens have different numbers of entries after a cut."""
    with attached(model, "snapkv") as sieve:
        cache = sieve.prefill(ids)
        done = sieve.edit(cache, ids, window=0).cut((40, 60))
        before = [layer.store.index.clone() for layer in cache.all_layers]
        more = torch.cat([done.ids, torch.randint(3, 90, (1, 6))], 1)
        sieve.prefill(more, cache=cache)
        uneven = False
        for layer, old in zip(cache.all_layers, before, strict=True):
            store = layer.store
            real = torch.ones_like(store.index, dtype=torch.bool) if store.valid is None else store.valid
            real = real.expand_as(store.index)
            for head in range(store.heads):
                columns = store.index[0, head][real[0, head]].tolist()
                known = old[0, head].tolist()
                uneven = uneven or -1 in known
                assert columns == sorted(set(columns))
                assert set(columns) <= {*known, *range(100, 106)} - {-1}
        assert uneven


def test_an_edit_moves_the_lengths_of_prompts(model, ids):
    with attached(model) as sieve:
        cache = sieve.prefill(ids)
        sieve.edit(cache, ids, window=4).cut((30, 50))
        assert cache.conversation.prompt_lengths == (100,)
