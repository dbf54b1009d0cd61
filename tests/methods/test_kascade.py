"""Kascade: the anchors' choices, the layers that read them, and anchors by similarity."""

from __future__ import annotations

import itertools

import pytest
import torch

import kvsieve
from attend import asking
from kvsieve.core.kv_rows import KVRows, ReadFacts
from kvsieve.errors import PlanError
from kvsieve.lab.calibrate import Options, measure
from kvsieve.lab.calibrate.anchors import AnchorSimilarity, anchor_count, choose_anchors, importance_into
from kvsieve.lab.calibrate.prompts import Prompt
from kvsieve.lab.calibrate.reading import read
from kvsieve.methods import Kascade
from kvsieve.methods.readers import Setting
from layers import context
from tiny import greedy, tiny_model, tiny_prompt


def test_a_kv_head_reads_what_its_query_heads_attend_to_together():
    query = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]])
    keys = torch.tensor([[[1.0, 0.0], [0.0, 3.0], [0.0, 1.0], [0.5, 0.5], [0.0, 0.0]]])
    kv_rows = KVRows(keys[0], keys[0], None, torch.zeros(1, dtype=torch.int64), 1, 5)
    weights = (query[0] @ keys[0].T).softmax(-1).sum(0)
    choice = Kascade(budget=16, newest=False).choose(asking(query, 1.0), kv_rows, {}, Setting(3, 3))
    assert choice.entries.tolist() == [sorted(weights.topk(3).indices.tolist())]
    assert choice.metadata_bytes == keys.nbytes
    dense = Kascade(budget=16).choose(asking(query, 1.0), kv_rows, {}, Setting(3, 3, dense=True))
    assert 4 in dense.entries[0].tolist() and dense.metadata_bytes == 0


def test_layers_and_their_anchors():
    reader = Kascade(budget=16)
    assert [reader.anchor(layer, 14) for layer in range(14)] == [0] * 6 + [6] * 6 + [12] * 2
    reader = Kascade(budget=16, share="0/2/8", anchor_heads=[[0, 1]] * 10)
    assert [reader.anchor(layer, 10) for layer in range(10)] == [0, 0, 2, 2, 2, 2, 2, 2, 8, 8]
    assert reader.heads_of_anchor(8, 10) is None and reader.heads_of_anchor(9, 10) == (0, 1)
    assert [reader.setting(ReadFacts(layer, 10, 100, 0, 8)).dense for layer in (0, 1, 2)] == [True, False, False]
    with pytest.raises(PlanError, match="anchor_heads of 10 layers, the model has 12"):
        reader.setting(ReadFacts(0, 12, 100, 0, 8))
    with pytest.raises(PlanError, match="anchor_heads must be numbers"):
        Kascade(budget=16, anchor_heads=(1, 2))


def test_paper_and_profile():
    assert Kascade(budget=16).traits.heads is None and Kascade(budget=16, anchor_heads=[[0]]).traits.heads == "all"
    assert not kvsieve.plan("kascade", paper=True).read.newest
    assert kvsieve.plan("kascade").read.budget == kvsieve.Budget.parse("10%")


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_anchors_maximize_the_sum_of_similarities(count):
    similarity = torch.rand(6, 6, generator=torch.Generator().manual_seed(count)).triu()

    def total(anchors):
        return sum(float(similarity[max(one for one in anchors if one <= layer), layer]) for layer in range(6))

    options = [(0, *rest) for rest in itertools.combinations(range(1, 6), count - 1)]
    assert total(choose_anchors(similarity, count)) == pytest.approx(max(map(total, options)))
    assert [anchor_count(layers) for layers in (1, 4, 24, 32)] == [1, 2, 4, 5]


def test_similarity_is_the_attention_that_another_heads_set_holds(monkeypatch):
    """Two layers of two KV heads, one entry per set; one head of the later layer likes the other head's entry."""
    monkeypatch.setattr("kvsieve.lab.calibrate.anchors._LEAST", 1)
    found = AnchorSimilarity(2, 2)
    eye = 4 * torch.eye(3)
    keys = torch.stack([eye, eye])[None]
    # Queries of one token, the last of three entries: each prefers the entry of its number.
    for layer, wanted in ((0, (0, 1)), (1, (1, 2))):
        query = torch.stack([eye[one] for one in wanted])[None, :, None]
        found.see(context(query, keys, layer_idx=layer, num_layers=2, scale=1.0), 1)
    found.end_prompt()
    found.importance += 1
    weights = torch.tensor([16.0, 0.0, 0.0]).softmax(-1)
    rest = float(weights[1] / weights[0])
    result = found.result()
    torch.testing.assert_close(result[0, 0], torch.tensor([[1.0, rest], [rest, 1.0]]))
    torch.testing.assert_close(result[0, 1], torch.tensor([[rest, 1.0], [rest, rest]]))
    assert found.heads_of([0])[1][0] == 1 and found.heads_of([0, 1]) == [[0, 1], [0, 1]]
    torch.testing.assert_close(found.between_layers()[0], torch.tensor([1.0, (1 + rest) / 2]))


def test_calibration_finds_anchors_that_attaching_takes(tmp_path):
    model = tiny_model(num_hidden_layers=6)
    prompts = [Prompt(tiny_prompt(1, 60, seed=seed), tiny_prompt(1, 5, seed=seed + 9)) for seed in range(2)]
    profile = measure(model, prompts, prompts[0], options=Options(parts=("anchors",)), name="tiny")
    found = profile.measured["anchors"]
    assert found["weighted"] and found["layers"][0] == 0 and len(found["layers"]) == 2
    profile.save(tmp_path / "profile.json")
    reader = kvsieve.plan("kascade", budget=16, profile=tmp_path / "profile.json").read
    assert reader.share == tuple(found["layers"]) and len(reader.anchor_heads) == 6
    with kvsieve.attach(model, kvsieve.Plan(read=reader)) as sieve:
        stats = sieve.generate(tiny_prompt(1, 70), max_new_tokens=4, **greedy()).stats
    assert stats.traffic.tokens == 3 and stats.applied


def test_importance_is_the_turn_of_the_hidden_states():
    """1 - cos of a layer's input and of the input plus its attention's output, by hooks."""
    model = tiny_model(num_hidden_layers=2)
    ids = tiny_prompt(1, 30)
    sums = torch.zeros(2)
    read(model, kvsieve.Plan(evict=importance_into(sums)), ids)
    noted = {}

    def note(at, output):
        noted[at] = output[0].detach()

    handles = [
        layer.self_attn.register_forward_hook(lambda *given, at=at: note(at, given[-1]))
        for at, layer in enumerate(model.model.layers)
    ]
    out = model(ids, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    for at in range(2):
        before = out.hidden_states[at][0]
        wanted = 1 - torch.cosine_similarity(before, before + noted[at][0], dim=-1).mean()
        assert float(sums[at]) == pytest.approx(float(wanted), rel=1e-4)
