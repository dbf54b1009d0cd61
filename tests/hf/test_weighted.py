"""Entries that stand for several: answers are those with as many copies, whatever a conversation does with them."""

from __future__ import annotations

import dataclasses
import shutil
from types import SimpleNamespace

import pytest
import torch

import kvsieve
from drafted import alone, drafted
from interpreted import interpreted
from kvsieve.cache import DenseStore, RaggedStore
from kvsieve.errors import PlanError, UnsupportedOptionError
from kvsieve.hf.decode import token_layers
from kvsieve.hf.decode.token_layers import TokenLayers
from kvsieve.hf.drafts import draft_passes
from kvsieve.hf.drafts.views import checked_view, view_drafter
from kvsieve.hf.forward.written import in_rows
from kvsieve.hf.model.support import why_unsupported
from kvsieve.methods import KIVI, ExactTopK
from kvsieve.types import Selection
from oracle import let_drafts_know
from pairs import Pairs, SomePairs
from small import recorder_stand_in
from tiny import greedy, padded_prompt, tiny_model, tiny_prompt
from tiny_models import build

pytestmark = pytest.mark.filterwarnings("ignore::kvsieve.KvsieveWarning")
NEW = 9
GREEDY = greedy(max_new_tokens=NEW, return_dict_in_generate=True, output_logits=True)
KINDS = {"dense": Pairs, "ragged": SomePairs}
CLOSE = {"atol": 1e-5, "rtol": 1e-3}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def logits(result):
    return torch.stack(result.output.logits)


def talk(model, plan, ids, mask=None, *, decode="auto", chunk=None, more=None, **options):
    """Return the results of one turn, and of another if there is `more` to say."""
    mask = torch.ones_like(ids) if mask is None else mask
    results = []
    with kvsieve.attach(model, plan, decode=decode) as sieve:
        results.append(sieve.generate(ids, mask, chunk=chunk, **GREEDY, **options))
        if more is not None:
            whole = torch.cat([results[0].sequences, more], 1)
            ones = torch.ones(len(ids), whole.shape[1] - mask.shape[1], dtype=mask.dtype)
            known = results[0].cache
            results.append(sieve.generate(whole, torch.cat([mask, ones], 1), cache=known, chunk=chunk, **GREEDY))
    return results


def same(ours, theirs, close=CLOSE):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(logits(one), logits(other), **close)
        assert torch.equal(one.sequences, other.sequences)


CASES = {
    "one": {},
    "an odd number": {"size": 61},
    "two turns": {"more": 20},
    "chunks": {"more": 30, "chunk": 16},
    "acts later": {"late": 3},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_answers_are_those_with_copies(model, kind, case):
    ids = tiny_prompt(size=case.get("size", 60))
    options = {"chunk": case.get("chunk"), "more": tiny_prompt(size=case["more"], seed=4) if "more" in case else None}
    ours, theirs = (
        talk(model, kvsieve.Plan(evict=kind(copies=copies, late=case.get("late"))), ids, **options)
        for copies in (False, True)
    )
    same(ours, theirs)
    store, whole = (results[0].cache.sieve_layers[0].store for results in (ours, theirs))
    assert store.log_weight is not None and whole.log_weight is None
    assert type(store) is (DenseStore if kind is Pairs else RaggedStore)
    assert store.entries < whole.entries and float(store.log_weight.max()) == pytest.approx(0.6931472)
    weights = store.log_weight.exp()
    weights = (weights if store.valid is None else weights * store.valid).sum(-1)
    assert torch.allclose(weights, torch.full_like(weights, max(whole.lengths)))


@pytest.mark.parametrize("late", [None, 3])
def test_a_row_of_a_padded_batch_goes_the_way_it_would_alone(model, kind, late):
    ids, mask = padded_prompt(50, 9)
    more = tiny_prompt(2, 20, seed=4)
    plan = kvsieve.Plan(evict=kind(late=late))
    together = talk(model, plan, ids, mask, more=more)
    same(together, talk(model, dataclasses.replace(plan, evict=kind(copies=True, late=late)), ids, mask, more=more))
    for row, padding in enumerate((0, 9)):
        alone = talk(model, plan, ids[row : row + 1, padding:], more=more[row : row + 1])
        for one, other in zip(alone, together, strict=True):
            torch.testing.assert_close(logits(one), logits(other)[:, row : row + 1], **CLOSE)


def test_a_conversation_goes_on_from_its_file(model, kind, tmp_path):
    ids, mask = padded_prompt(50, 9)
    with kvsieve.attach(model, kvsieve.Plan(evict=kind())) as sieve:
        first = sieve.generate(ids, mask, **GREEDY)
        sieve.save(first.cache, tmp_path / "talk", ids=first.sequences)
        read = sieve.load(tmp_path / "talk")
        stores = [result.cache.sieve_layers[1].store for result in (first, read)]
        assert torch.equal(stores[0].log_weight, stores[1].log_weight)
        whole = torch.cat([first.sequences, tiny_prompt(2, 20, seed=4)], 1)
        ones = torch.cat([mask, torch.ones(2, whole.shape[1] - 50, dtype=mask.dtype)], 1)
        same(*([sieve.generate(whole, ones, cache=cache, **GREEDY)] for cache in (read.cache, first.cache)))


def test_drafts_change_nothing(model, kind, monkeypatch):
    ids = tiny_prompt(low=3, high=12)
    plan = kvsieve.Plan(evict=kind())
    plain = talk(model, plan, ids)
    let_drafts_know(monkeypatch, plain[0].sequences.tolist())
    found = talk(model, plan, ids, draft="lookup:tokens=4:ngram=1:adapt=false")
    same(found, plain)
    assert found[0].stats.drafts.drafted


@pytest.mark.parametrize("view", ["quest:budget=16", "adakv:budget=12:window=4:floor=0"])
def test_views_of_them_draft(model, kind, view, monkeypatch):
    monkeypatch.setattr(draft_passes, "LEAST", 0.0)
    ids = tiny_prompt()
    with kvsieve.attach(model, kvsieve.Plan(evict=kind())) as sieve, torch.no_grad():
        plan = checked_view(view, sieve)
        _, found, row = drafted(sieve, ids, NEW, lambda cache: view_drafter(sieve, cache, plan))
        cache, plain = alone(sieve, ids, NEW)
        with pytest.raises(UnsupportedOptionError, match="entries have weights, which codecs do not keep"):
            view_drafter(sieve, cache, checked_view("kivi:tail=4", sieve))
    assert found == plain and row.counts.drafted >= 6


def test_tentative_passes_over_answers_that_act(model, kind, monkeypatch):
    ids = tiny_prompt(low=3, high=12)
    plan = kvsieve.Plan(evict=kind(late=3))
    plain = talk(model, plan, ids)
    let_drafts_know(monkeypatch, plain[0].sequences.tolist())
    same(talk(model, plan, ids, draft="lookup:tokens=4:ngram=1:adapt=false"), plain)


def test_readers_choose_among_them(model, kind):
    """A reader with room for all of them changes nothing; entries that it reads keep their weights."""
    plain = talk(model, kvsieve.Plan(evict=kind()), tiny_prompt(), more=tiny_prompt(size=20, seed=4))
    plan = kvsieve.Plan(evict=kind(), read=ExactTopK(budget=1000))
    same(talk(model, plan, tiny_prompt(), more=tiny_prompt(size=20, seed=4)), plain)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="kernels are compiled, and there is no gcc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_passes_all_layers_in_one_call(kind, dtype, monkeypatch):
    model = build("qwen2", dtype=dtype)
    passes = []
    own = token_layers.through_layers
    monkeypatch.setattr(token_layers, "through_layers", lambda *given: passes.append(1) or own(*given))
    plan = kvsieve.Plan(evict=kind())
    (ours,) = talk(model, plan, tiny_prompt(), decode="fused")
    assert len(passes) == NEW - 2
    monkeypatch.setattr(TokenLayers, "run", lambda *_: None)
    (theirs,) = talk(model, plan, tiny_prompt(), decode="fused")
    assert torch.equal(logits(ours), logits(theirs)) and ours.stats.traffic == theirs.stats.traffic
    for one, other in zip(ours.cache.layers, theirs.cache.layers, strict=True):
        assert torch.equal(one.store.log_weight, other.store.log_weight)


def test_recorded_passes(model, kind):
    plan = kvsieve.Plan(evict=kind())
    plain = talk(model, plan, tiny_prompt())
    with recorder_stand_in():
        recorded = talk(model, plan, tiny_prompt(), decode="graph")
        same(recorded, plain)
        assert recorded[0].cache.turn.record.passes.fixed == NEW - 1
        small = build("llama", num_hidden_layers=2)
        (wanted,) = talk(small, plan, tiny_prompt(), decode="eager")
        with interpreted():
            (found,) = talk(small, plan, tiny_prompt(), decode="graph")
    torch.testing.assert_close(logits(found), logits(wanted), atol=1e-4, rtol=1e-4)


def test_bytes_have_the_weights(model):
    (ours,) = talk(model, kvsieve.Plan(evict=Pairs()), tiny_prompt())
    (plain,) = talk(model, kvsieve.plan("streamingllm", budget=30), tiny_prompt())
    stores = [result.cache.sieve_layers[0].store for result in (ours, plain)]
    assert stores[0].size == stores[1].size and stores[0].entry_size() == stores[1].entry_size() + 4
    assert ours.stats.traffic.bytes == plain.stats.traffic.bytes * stores[0].entry_size() // stores[1].entry_size()
    assert stores[0].nbytes() - stores[1].nbytes() == 4 * stores[0].heads * stores[0].capacity


REFUSED = {
    "codec": ({"codec": KIVI(bits=4)}, "KIVI encodes the entries of tokens; leave codec= and rest= out"),
    "rest": ({"rest": KIVI(bits=4)}, "KIVI encodes the entries of tokens; leave codec= and rest= out"),
}


@pytest.mark.parametrize(("roles", "match"), REFUSED.values(), ids=REFUSED)
def test_plans_that_cannot_store_them_are_refused(roles, match):
    with pytest.raises(PlanError, match=f"Pairs writes keys, values or weights of entries, and {match}"):
        kvsieve.Plan(evict=Pairs(), **roles)


def test_latents_are_refused():
    model = build("deepseek_v3")
    assert "Pairs writes the keys and values of heads; use another" in why_unsupported(
        model, kvsieve.Plan(evict=Pairs())
    )


def written(change, *, trait=True):
    """Return an evictor with a selection that is changed, and a class with the trait or without."""

    class Own(Pairs, heads="own", query_aware=False, writes=trait):
        def select(self, ctx, counts):
            chosen = super().select(ctx, counts)
            return None if chosen is None else dataclasses.replace(chosen, **change(ctx, chosen))

    return Own()


WRONG = {
    "no trait": (
        written(lambda ctx, chosen: {}, trait=False),
        r"Own.select returned log_weight of entries, and its class lacks the trait .* writes=True",
    ),
    "another shape": (
        written(lambda ctx, chosen: {"keys": ctx.keys}),
        r"Own.select returned keys of shape \[1, 2, 60, 16\], expected \[1, 2, 30, 16\]",
    ),
    "no numbers": (
        written(lambda ctx, chosen: {"log_weight": chosen.log_weight - float("inf")}),
        "Own.select returned log_weight that are NaN or infinite",
    ),
}


@pytest.mark.parametrize(("evictor", "match"), WRONG.values(), ids=WRONG)
def test_selections_that_do_not_fit_are_refused(model, evictor, match):
    with kvsieve.attach(model, kvsieve.Plan(evict=evictor)) as sieve, pytest.raises(PlanError, match=match):
        sieve.prefill(tiny_prompt())


def test_rows_that_do_not_act_keep_their_entries_as_they_are():
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 1, 5, 4)
    slots = torch.tensor([[[1, 4]], [[2, 3]]])
    index = torch.arange(5, dtype=torch.int32).expand(2, 1, -1)
    chosen = Selection(slots, keys=torch.ones(2, 1, 2, 4), log_weight=torch.tensor([[[0.5, 0.7]], [[0.1, 0.2]]]))
    ctx = SimpleNamespace(keys=keys, values=values, index=index, valid=None, log_weight=None)
    found = in_rows(chosen, ctx, (True, False))
    real = found.real()
    assert found.indices[0, 0][real[0]].tolist() == [1, 4] and found.indices[1, 0].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(found.keys[0, 0][real[0]], torch.ones(2, 4)) and torch.equal(found.keys[1], keys[1])
    assert torch.allclose(found.log_weight[0, 0][real[0]], torch.tensor([0.5, 0.7]))
    assert bool((found.log_weight[1] == 0).all()) and found.values is None


def test_evictors_that_act_again_see_the_weights(model):
    """Mass counts an entry by its weight, also where a later prompt's queries ask."""
    seen = {}

    class Watching(Pairs, heads="own", query_aware=False, writes=True):
        def select(self, ctx, counts):
            seen[ctx.step.turn, ctx.layer_idx] = ctx.log_weight
            return super().select(ctx, counts)

    talk(model, kvsieve.Plan(evict=Watching()), tiny_prompt(), more=tiny_prompt(size=20, seed=4))
    assert seen[0, 0] is None and seen[1, 0].shape[-1] == 30 + NEW + 20 and float(seen[1, 0][..., 30:].abs().max()) == 0
