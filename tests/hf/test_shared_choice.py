"""Layers that read what a layer before them has chosen: which entries, and that nothing is chosen or kept there."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvsieve
from kvsieve.cache.entry_tokens import EntryTokens, entries_of_tokens
from kvsieve.core.kv_rows import Choice
from kvsieve.decoding.loop import feed_rows
from kvsieve.errors import PlanError
from kvsieve.hf.forward.request import PassRequest
from kvsieve.methods import HSA, ExactTopK, Kascade, Quest, SnapKV, StreamingLLM
from kvsieve.planning.roles import Reader
from kvsieve.shared.prompt import next_logits
from tiny import greedy, tiny_prompt
from tiny_models import build

LAYERS = 4


@pytest.fixture(scope="module")
def model():
    return build("llama", dtype=torch.float64, num_hidden_layers=LAYERS)


def logits(model, plan, ids, answer, at_once=False, mask=None):
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        cache = sieve.prefill(ids, mask)
        if at_once:
            return sieve.feed(cache, answer, None, PassRequest(phase="decode"), logits=answer.shape[1]).logits, cache
        found = []
        for column in answer.T:
            ids = torch.cat([ids, column[:, None]], 1)
            mask = None if mask is None else torch.cat([mask, torch.ones_like(column[:, None])], 1)
            found.append(next_logits(sieve, cache, ids, mask))
        return torch.cat(found, 1), cache


@dataclasses.dataclass(frozen=True)
class Copying(Reader):
    """Shares by hand: layers in `anchors` choose, the others look up what was chosen for as many entries."""

    inner: Reader
    anchors: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...] | None = None
    noted: dict = dataclasses.field(default_factory=dict, compare=False)

    def setting(self, facts):
        return self.inner.setting(facts), facts.layer_idx

    def reads_all(self, setting, size):
        return self.inner.reads_all(setting[0], size)

    def choose(self, asked, kv_rows, state, setting):
        own, layer = setting
        anchor = max(one for one in self.anchors if one <= layer)
        if anchor == layer:
            choice = self.inner.choose(asked, kv_rows, state, own)
            self.noted[anchor, kv_rows.size] = choice.entries
            return choice
        entries = self.noted[anchor, kv_rows.size]
        if self.heads is not None:
            wanted = torch.tensor(self.heads[layer])
            entries = entries.unflatten(0, (-1, len(wanted)))[:, wanted].flatten(0, 1)
        return Choice(entries)


CASES = {
    "exact": ExactTopK(budget=16),
    "exact, per KV head": ExactTopK(budget=16, per_group=True, newest=True),
    "quest": Quest(budget=16, page=3),
    "hsa": HSA(budget=16),
}


@pytest.mark.parametrize("at_once", [False, True], ids=["", "at once"])
@pytest.mark.parametrize("share, anchors", [(2, (0, 2)), ((0, 3), (0, 3)), (LAYERS, (0,))])
@pytest.mark.parametrize("case", CASES)
def test_layers_read_the_entries_of_their_anchor(model, case, share, anchors, at_once):
    ids, answer = tiny_prompt(2, 70), tiny_prompt(2, 6, seed=1)
    reader = dataclasses.replace(CASES[case], share=share)
    wanted, _ = logits(model, kvsieve.Plan(read=Copying(CASES[case], anchors)), ids, answer)
    found, _ = logits(model, kvsieve.Plan(read=reader), ids, answer, at_once)
    torch.testing.assert_close(found, wanted)
    alone, _ = logits(model, kvsieve.Plan(read=CASES[case]), ids, answer)
    assert not torch.allclose(found, alone)


def test_after_an_evictor_that_keeps_the_same_tokens_everywhere(model):
    ids, answer, evict = tiny_prompt(1, 90), tiny_prompt(1, 6, seed=1), StreamingLLM(budget=50)
    wanted, _ = logits(model, kvsieve.Plan(evict=evict, read=Copying(HSA(budget=16), (0, 2))), ids, answer)
    found, _ = logits(model, kvsieve.Plan(evict=evict, read=HSA(budget=16, share=2)), ids, answer)
    torch.testing.assert_close(found, wanted)


def test_heads_are_remapped(model):
    config = model.config
    heads = tuple(tuple(range(config.num_key_value_heads))[::-1] for _ in range(LAYERS))
    exact = ExactTopK(budget=16, per_group=True, newest=True)
    ids, answer = tiny_prompt(2, 70), tiny_prompt(2, 5, seed=1)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    for rows in (None, mask):
        copying = kvsieve.Plan(read=_After(Copying(exact, (1,), heads)))
        wanted, _ = logits(model, copying, ids, answer, mask=rows)
        shared = Kascade(budget=16, share=(1,), anchor_heads=heads, skip_layers=1)
        found, _ = logits(model, kvsieve.Plan(read=shared), ids, answer, mask=rows)
        torch.testing.assert_close(found, wanted)


@dataclasses.dataclass(frozen=True)
class _After(Reader):
    """Another reader in all layers but the first."""

    inner: Reader

    def setting(self, facts):
        return None if facts.layer_idx == 0 else self.inner.setting(facts)

    def reads_all(self, setting, size):
        return self.inner.reads_all(setting, size)

    def choose(self, asked, kv_rows, state, setting):
        return self.inner.choose(asked, kv_rows, state, setting)


def test_only_anchors_choose_and_keep_metadata(model, monkeypatch):
    asked = []
    choose = Quest.choose
    monkeypatch.setattr(Quest, "choose", lambda self, *given: asked.append(given[1].size) or choose(self, *given))
    ids, answer = tiny_prompt(1, 70), tiny_prompt(1, 5, seed=1)
    _, cache = logits(model, kvsieve.Plan(read=Quest(budget=16, share=3)), ids, answer)
    # Layers 0 and 3, each of five tokens.
    assert sorted(asked) == sorted(2 * list(range(71, 76)))
    groups = [layer.store.derived["kv_rows"].grouped.groups for layer in cache.sieve_layers.values()]
    assert [[bool(group.state) for group in one] for one in groups] == [[True], [False], [False], [True]]
    _, every = logits(model, kvsieve.Plan(read=Quest(budget=16)), ids, answer)
    reads, all_reads = cache.turn.record.reads, every.turn.record.reads
    assert reads.entries == all_reads.entries
    assert reads.estimate_bytes * 2 == all_reads.estimate_bytes


def test_layers_with_another_number_of_entries_choose_for_themselves(model):
    ids, answer = tiny_prompt(1, 90), tiny_prompt(1, 4, seed=1)
    plan = dataclasses.replace(kvsieve.plan("pyramidkv", budget=40, window=4, beta=2), read=HSA(budget=16, share=4))
    alone = dataclasses.replace(plan, read=HSA(budget=16))
    torch.testing.assert_close(logits(model, plan, ids, answer)[0], logits(model, alone, ids, answer)[0])


def test_rows_of_a_joint_pass_share_their_own_choices(model):
    plan = kvsieve.Plan(read=HSA(budget=16, share=2))
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        caches = [sieve.prefill(tiny_prompt(1, size, seed=size)) for size in (60, 45)]
        alone = [cache.fork() for cache in caches]
        for token in range(3):
            ids = [torch.tensor([[token + 5 + row]]) for row in range(2)]
            joint = feed_rows(sieve, caches, ids)
            for row, cache in enumerate(alone):
                wanted = sieve.feed(cache, ids[row], None, PassRequest(phase="decode"), logits=1).logits
                torch.testing.assert_close(joint[row][0], wanted)


def test_an_answer_with_drafts_is_the_same(model):
    ids = tiny_prompt(1, 80)
    found = []
    for drafts in (None, "lookup"):
        with kvsieve.attach(model, kvsieve.plan("hsa", budget=16, share=2)) as sieve:
            given = {} if drafts is None else {"prompt_lookup_num_tokens": 3}
            found.append(sieve.generate(ids, max_new_tokens=12, **greedy(), **given).output.tolist())
    assert found[0] == found[1]


def slow_entries(ours, theirs):
    place = {token: at for at, token in enumerate(theirs)}
    free = iter(at for at, token in enumerate(theirs) if token not in ours)
    return [place[token] if token in place else next(free) for token in ours]


def test_entries_of_other_tokens_correspond_in_order():
    make = torch.Generator().manual_seed(0)
    for size in (1, 5, 12):
        ours, theirs = (
            torch.stack([torch.randperm(15, generator=make)[:size].sort().values for _ in range(6)]) for _ in range(2)
        )
        one, other = (EntryTokens(part[:, :1], part, size) for part in (ours, theirs))
        found = entries_of_tokens(one, other)
        wanted = [slow_entries(a, b) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True)]
        assert (found.tolist() if found is not None else ours.argsort(1).tolist()) == wanted
    assert entries_of_tokens(one, one) is None
    start = torch.tensor([[3], [7]])
    consecutive = EntryTokens(start, None, 4)
    assert entries_of_tokens(consecutive, EntryTokens(start, start + torch.arange(6), 6)) is None


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(PlanError, match="share must be a number of layers, at least 1"):
        Quest(budget=16, share=0)
    with pytest.raises(PlanError, match="share must be a number of layers"):
        Quest(budget=16, share="0/x")
    assert Quest(budget=16, share="9/0/4").share == (0, 4, 9)
    with pytest.raises(PlanError, match="AdaKV keeps different numbers of entries per head"):
        dataclasses.replace(kvsieve.plan("adakv", budget=40), read=Quest(budget=16, share=2))
    with pytest.raises(PlanError, match="SnapKV drops entries while decoding"):
        kvsieve.Plan(evict=SnapKV(budget=40, every=8), read=Quest(budget=16, share=2))
    with pytest.raises(PlanError, match="OmniKV reads the same tokens in all heads"):
        dataclasses.replace(kvsieve.plan("omnikv"), evict=SnapKV(budget=40))
