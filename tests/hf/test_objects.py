"""What objects show of themselves, what a plain generate leaves behind, what is logged, and attach without with."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings

import pytest
import torch
from transformers import GenerationConfig, MaxLengthCriteria, StoppingCriteriaList, pipeline

import kvsieve
from kvsieve.errors import KvsieveWarning, NotAttachedError, UnsupportedModelError
from kvsieve.hf.cache.layer import StoreLayer
from kvsieve.hf.cache.states import StateLayer
from kvsieve.hf.compat import CACHE
from kvsieve.hf.generate.stats import Stats
from kvsieve.hf.model.support import check_model, methods_for, why_unsupported
from tiny import tiny_model, tiny_prompt
from tiny_models import build
from toy_words import word_tokenizer

GREEDY = {"do_sample": False, "pad_token_id": 0}
SNAPKV = kvsieve.plan("snapkv", budget="20%", window=4, paper=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(1, 50, seed=0, low=3, high=100)


def test_stats_are_one_readable_line(model, ids):
    with kvsieve.attach(model, SNAPKV) as sieve:
        stats = sieve.generate(ids, max_new_tokens=3, min_new_tokens=3, **GREEDY).stats
    line = str(stats)
    assert line.startswith("snapkv: 10 of 50 entries (20%), KV 0.0") and line.endswith(", 3 tokens")
    assert " MiB, TTFT " in line and " ms, " in line and "\n" not in line and len(line) < 120
    assert repr(stats) == f"<Stats {line}>"
    assert (stats.compressed_layers, stats.kv_share) == (4, 0.2)
    assert Stats(**{**stats.to_dict(), "traffic": None}).kv_share == 0.2


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("full", {}, "full: 50 of 50 entries, KV "),
        ("snapkv", {"budget": 300}, "note: nothing was evicted: the prompt's 50 tokens fit"),
        (
            "fastkv",
            {"tsp_layer": 1, "tsp_rate": 0.5, "window": 4},
            ", 25 tokens through the last layer",
        ),
        ("quest", {"budget": 16, "page": 4}, "quest: 50 of 50 entries, 16 entries read per token, KV "),
        (
            "snapkv",
            {"budget": 10, "window": 4, "skip_layers": 1},
            ": 3 of 4 layers compressed, 40% of KV kept, KV ",
        ),
    ],
)
def test_the_line_tells_what_the_plan_did(model, ids, method, given, expected):
    with kvsieve.attach(model, kvsieve.plan(method, **given)) as sieve:
        stats = sieve.generate(ids, max_new_tokens=4, min_new_tokens=4, **GREEDY).stats
    assert expected in str(stats)


def test_objects_are_short_in_a_terminal_and_tables_in_a_notebook(model, ids):
    plan = kvsieve.plan("fastkv", budget="20%", tsp_layer=1, window=4)
    evict = "evict SnapKV(budget=20%, window=4, pooling='max')"
    roles = f"propagate TSP(rate=20%, layer=1, window=4), {evict}"
    assert repr(plan) == f"<Plan fastkv: {roles}, parameters not given with the model>"
    settled = repr(plan.for_model(model))
    assert "kernel='auto'" in settled and "not given" not in settled
    assert repr(kvsieve.plan("full")) == "<Plan full>"
    with kvsieve.attach(model, plan) as sieve:
        assert repr(sieve) == f"<Sieve LlamaForCausalLM, 4 layers, decode eager, {sieve.plan!r}>"
        assert repr(sieve.new_cache()) == "<SieveCache 0 tokens seen, 0 entries in each of 4 layers, 0.000 MiB>"
        result = sieve.generate(ids, max_new_tokens=3, min_new_tokens=3, **GREEDY)
        assert repr(result) == f"<GenerateResult [1, 53] tokens, {result.stats}>"
        assert "<SieveCache 52 tokens seen, 12 entries in each of 4 layers, " in repr(result.cache)
        chat = sieve.chat(word_tokenizer("{% for m in messages %}{{ m.content }} {% endfor %}"), max_new_tokens=2)
        assert repr(chat) == "<Chat under fastkv: 0 turns, 0 tokens, KV 0.000 MiB>"
        reply = chat.ask(" ".join(f"w{i}" for i in range(40)))
        assert repr(chat).startswith("<Chat under fastkv: 1 turns, 4") and "tokens=" not in repr(reply)
        assert max(map(len, map(repr, (chat, chat.snapshot(), reply, result.cache.snapshot())))) < 300
    for thing, part in (
        (plan, "<td style='text-align:left'>TSP("),
        (result.stats, "10 of 50"),
        (result, "1 x 53"),
        (result.cache, "all 4 layers hold KV that grows"),
    ):
        shown = thing._repr_html_()
        assert shown.startswith("<table>") and shown.endswith("</table>") and part in shown
    assert "<script>" not in kvsieve.Plan(name="<script>")._repr_html_()


def test_reprs_of_all_plans_are_short():
    for name in kvsieve.list_methods():
        plan = kvsieve.plan(name, **kvsieve.method_info(name).example)
        assert len(repr(plan)) < 300 and "\n" not in repr(plan), name


def test_a_plain_generate_leaves_stats_too(model, ids):
    found = dict(vars(model))
    with kvsieve.attach(model, SNAPKV) as sieve:
        assert sieve.last_stats is None
        ours = sieve.generate(ids, max_new_tokens=3, min_new_tokens=3, **GREEDY)
        assert sieve.last_stats is ours.stats
        theirs = model.generate(ids, max_new_tokens=3, min_new_tokens=3, **GREEDY)
        assert torch.equal(theirs, ours.sequences)
        plain, same = (
            sieve.last_stats,
            ("method", "applied", "kv_entries", "new_tokens", "traffic", "kv_share", "notes"),
        )
        assert plain is not ours.stats and plain.ttft_s > 0 and plain.tpot_s > 0 and plain.peak_bytes is None
        assert [getattr(plain, name) for name in same] == [getattr(ours.stats, name) for name in same]
        # As its fourth argument, stopping_criteria may be given by position.
        config = GenerationConfig(max_new_tokens=3, min_new_tokens=3, **GREEDY)
        model.generate(ids, config, None, StoppingCriteriaList([MaxLengthCriteria(51)]))
        assert sieve.last_stats.new_tokens == 1
        cache = sieve.new_cache()
        model.generate(ids, **{CACHE: cache}, max_new_tokens=2, **GREEDY)
        assert sieve.last_stats.kv_bytes == cache.nbytes()
        with pytest.raises(ValueError):
            model.generate(ids, max_new_tokens=-1, **GREEDY)
        assert sieve.last_stats is None
    assert vars(model) == found


def test_a_generate_of_the_models_own_is_put_back(ids):
    model = build("llama")
    mine = model.generate = type(model).generate.__get__(model)
    with kvsieve.attach(model, SNAPKV) as sieve:
        model.generate(ids, max_new_tokens=2, **GREEDY)
        assert sieve.last_stats.kv_entries == [10] * 4
    assert vars(model)["generate"] is mine


def test_a_pipeline_leaves_stats_too(model):
    writer = pipeline("text-generation", model=model, tokenizer=word_tokenizer())
    with kvsieve.attach(model, SNAPKV) as sieve:
        writer(" ".join(f"w{i}" for i in range(50)), max_new_tokens=2, do_sample=False)
    assert sieve.last_stats.kv_entries == [10] * 4 and sieve.last_stats.applied


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "gemma3n_text", "gemma3_text"])
def test_means_are_over_layers_whose_kv_grows(family):
    model = build(family)
    ids = tiny_prompt(1, 60, seed=0, low=3, high=100)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        full = sieve.generate(ids, max_new_tokens=3, **GREEDY)
    growing = list(full.cache.sieve_layers)
    assert full.stats.growing_layers == growing and full.stats.kv_share == 1 and full.stats.notes == []
    assert f"full: 60 of 60 entries in {len(growing)} of 4 layers, KV" in str(full.stats)
    holding = sum(entries > 0 for entries in full.cache.entries())
    assert f"{holding} of 4 layers" in repr(full.cache) or holding == 4
    storage, states = full.stats.storage, [layer for layer in full.cache.layers if isinstance(layer, StateLayer)]
    assert storage.state_bytes == sum(part.nbytes for layer in states for part in layer.state_tensors())
    assert (storage.state_bytes > 0) == (family in ("qwen3_next", "lfm2"))
    stores = [layer.store for layer in full.cache.layers if isinstance(layer, StoreLayer)]
    assert storage.bytes == sum(store.entry_bytes() for store in stores)
    assert storage.bytes + storage.metadata_bytes + storage.state_bytes == full.stats.kv_bytes == full.cache.nbytes()
    assert storage.entries == 62 and full.stats.traffic.entries == 61.5
    with kvsieve.attach(model, kvsieve.plan("quest", budget=32, page=16)) as sieve:
        read = sieve.generate(ids, max_new_tokens=3, **GREEDY).stats
    # Said where fewer are read than these layers hold, whatever the others do.
    assert read.traffic.entries == 32 and "32 entries read per token" in str(read)
    with kvsieve.attach(model, kvsieve.plan("knorm", budget=15, skip_layers=(growing[0],))) as sieve:
        one = sieve.generate(ids, max_new_tokens=3, **GREEDY).stats
    assert one.compressed_layers == len(growing) - 1


def test_partly_compressed_models_say_so_and_name_methods_that_run():
    model = build("gemma3_text")
    ids = tiny_prompt(1, 60, seed=0, low=3, high=100)
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=10, window=4, paper=True)) as sieve:
        stats = sieve.generate(ids, max_new_tokens=2, **GREEDY).stats
        sliding = [index for index in range(len(stats.kv_entries)) if index not in sieve.new_cache().sieve_layers]
    full = sum(stats.kv_entries[index] for index in sliding) + 60 * (len(stats.kv_entries) - len(sliding))
    share = sum(stats.kv_entries) / full
    assert sliding and stats.applied and stats.kv_share == pytest.approx(share, abs=1e-3)
    compressed = len(stats.kv_entries) - len(sliding)
    assert stats.compressed_layers == compressed
    assert f"10 of 60 entries in {compressed} of {len(stats.kv_entries)} layers ({share:.0%} of KV)" in str(stats)
    assert stats.notes == [f"{compressed} of 4 layers hold KV that grows, {len(sliding)} have a sliding window"]
    assert stats.growing_layers == [1, 3]
    works = methods_for(model)
    assert {"snapkv", "adakv", "quest"} <= set(works) and not {"finch", "full"} & set(works)
    for name in works:
        assert why_unsupported(model, kvsieve.plan(name, **kvsieve.method_info(name).example)) is None
    with pytest.raises(UnsupportedModelError, match=f"Methods that run on it: {', '.join(works)}\\."):
        with kvsieve.attach(model, kvsieve.plan("finch", budget=16, question_tokens=4)):
            pass


def test_attach_without_with_says_so(model):
    sieve = kvsieve.attach(model, SNAPKV)
    for name in ("generate", "prefill", "chat", "last_stats"):
        with pytest.raises(NotAttachedError, match=f"with kvsieve.attach.model, plan. as sieve:. and use sieve.{name}"):
            getattr(sieve, name)
    assert "with kvsieve.attach" in repr(sieve) and not hasattr(sieve, "_repr_html_")
    assert model.config._attn_implementation != "kvsieve"
    with contextlib.ExitStack() as stack:
        entered = stack.enter_context(sieve)
        assert isinstance(entered, kvsieve.Sieve)
    with pytest.raises(kvsieve.KvsieveError, match="entered before"), sieve:
        pass


def test_a_caution_points_at_the_with_block(model, monkeypatch):
    monkeypatch.setattr(kvsieve.Plan, "caution", lambda plan, num_layers: "take care")
    with pytest.warns(KvsieveWarning, match="take care") as caught:
        with kvsieve.attach(model, SNAPKV):
            pass
    assert caught[0].filename == __file__


def test_what_happens_is_logged_and_warnings_stay_warnings(model, ids, caplog):
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("kvsieve").handlers)
    with caplog.at_level(logging.DEBUG, "kvsieve"), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "decode='graph' computes tokens eagerly")
        with kvsieve.attach(model, SNAPKV, decode="graph") as sieve:
            stats = sieve.generate(ids, max_new_tokens=2, **GREEDY).stats
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert ("INFO", f"attached {sieve!r}") in told and ("INFO", "detached snapkv") in told
    assert ("DEBUG", "snapkv: prompt of 50 tokens, entries per layer: 10 in each of 4") in told
    assert ("INFO", str(stats)) in told
    assert any(level == "INFO" and text.startswith("tokens are generated eagerly: ") for level, text in told)
    assert all(record.name.startswith("kvsieve.") for record in caplog.records)
    assert json.dumps(stats.to_dict())


@pytest.mark.parametrize(
    "family, method, said",
    [
        ("mamba2", "snapkv", "recurrent in 4 of 4 (0, 1, 2, 3), so its cache is small already"),
        ("mistral:sliding", "snapkv", "sliding window of 16 in 4 of 4 (0, 1, 2, 3), so its cache is small already"),
        ("gemma3n_text", "fastkv", "as 2 of 4 layers do with an earlier one's (2, 3)"),
        ("bloom", "snapkv", "AttentionInterface in any layer"),
    ],
)
def test_a_refusal_says_which_layers_are_in_the_way_and_what_runs(family, method, said):
    options = {"tsp_layer": 1} if method == "fastkv" else {}
    with pytest.raises(UnsupportedModelError) as caught:
        check_model(build(family), kvsieve.plan(method, **options))
    assert said in str(caught.value)
    ways = ("such as 'snapkv'", "run it without kvsieve")
    assert any(way in str(caught.value) for way in ways)
    if method == "fastkv":
        assert "Methods that run on it: a-shape, adakv, " in str(caught.value)
