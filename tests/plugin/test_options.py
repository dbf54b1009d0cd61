"""Plans that vLLM's engine carries, and what is refused at its start, with the reason."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig

import kvsieve
from doc_pages import sections
from kvsieve.errors import PlanError, UnsupportedOptionError
from kvsieve_vllm.carried import check_carried
from kvsieve_vllm.engine import REFUSED, EngineFacts, check_engine, needs_no_prefix_caching, settle
from kvsieve_vllm.options import EngineOptions

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
FACTS = EngineFacts(version="0.32.0", device="cpu", block_size=32, num_layers=4)


def options(text: str) -> EngineOptions:
    found = EngineOptions.given({"kvsieve": text})
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("KVSIEVE_VLLM_PLAN", "KVSIEVE_VLLM_ANY_VERSION"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("nothing", [{}, None, {"other": 1}, "hashable"])
def test_without_options_there_is_no_plan(nothing):
    assert EngineOptions.given(nothing) is None


def test_a_plan_is_given_as_text_in_a_dict_or_in_the_environment(monkeypatch):
    plan = kvsieve.plan("quest:budget=256")
    assert options("quest:budget=256").plan == plan
    assert EngineOptions.given({"kvsieve": {"plan": "quest:budget=256", "self_test": True}}).self_test
    monkeypatch.setenv("KVSIEVE_VLLM_PLAN", "hsa:budget=128")
    assert EngineOptions.given({}).plan == kvsieve.plan("hsa:budget=128")
    assert options("quest:budget=256").plan == plan


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (3, "takes a plan such as"),
        ({"plan": "quest", "pages": 8}, "takes a plan such as"),
        ("quest,hsa", "one method"),
        ("qest", "quest"),
        ("quest:bugdet=8", "budget"),
    ],
)
def test_options_that_cannot_be_read_are_refused(given, told):
    with pytest.raises(PlanError, match=told):
        EngineOptions.given({"kvsieve": given})


@pytest.mark.parametrize("option", ["skip_layers=0/4", "skip_layers=5"])
def test_layers_outside_the_model_are_refused(option):
    with pytest.raises(PlanError, match="lies outside the model, which has 4 layers"):
        check_engine(options(f"quest:budget=256:{option}"), FACTS)


@pytest.mark.parametrize(
    "text",
    [
        "quest:budget=256:skip_layers=2",
        "hsa:budget=256",
        "rocketkv",
        "snapkv",
        "keydiff:every=64",
        "knorm",
        "streamingllm:every=32",
        "lagkv",
        "lagkv:decode=false",
        "snapkv:every=64",
    ],
)
def test_carried_plans(text):
    check_carried(kvsieve.plan(text))


def test_the_page_lists_every_method_that_is_carried():
    rows = re.findall(r"^\| (`.*?) \|", sections(PAGE.read_text())["plans"], re.M)
    listed = {name.partition(":")[0] for row in rows for name in re.findall(r"`([^`]+)`", row)}
    with pytest.raises(PlanError) as raised:
        check_carried(kvsieve.plan("fastkv"))
    assert listed == set(re.search(r"It carries ([\w, -]+);", str(raised.value)).group(1).split(", "))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("full", "it does nothing"),
        ("fastkv", "token propagation"),
        ("kivi", "vLLM's pages"),
        ("snapkv:rest=2bit", "no page holds encoded ones"),
        ("snapkv:prefill=xattention", "prompts are read by kernels that attend to every block"),
        ("adakv", "different number of entries per head"),
        ("h2o", "learns from pass to pass"),
        ("rocketkv-mt", "vLLM has no turns"),
        ("kvzip", "different number of entries"),
        ("sparq", "single entries"),
        ("quest:per_query_head=true", "read once for all"),
        ("quest:newest=false", "always read"),
        ("quest:sparse_questions=true", "sparse_questions"),
        ("snapkv:skip_layers=2", "freed in all layers"),
        ("snapkv:per_query_head=true", "more heads"),
        ("keydiff:chunks=true", "chunks as its schedule has it"),
        ("snapkv:budget=64MiB", "no meaning here"),
    ],
)
def test_plans_that_are_not_carried_are_refused_with_the_reason(text, reason):
    with pytest.raises(PlanError, match=reason) as raised:
        check_carried(kvsieve.plan(text))
    assert "kvsieve serve" in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": "0.33.1"}, "install vllm==0.32.0"),
        ({"device": "rocm"}, "attention on rocm"),
        ({"kv_cache_dtype": "fp8"}, "fp8"),
        *(({"refused": {name}}, reason) for name, reason in REFUSED.items()),
    ],
)
def test_engines_that_a_plan_does_not_go_with_are_refused(changed, reason):
    check_engine(options("quest:budget=256"), FACTS)
    with pytest.raises(UnsupportedOptionError, match=reason):
        check_engine(options("quest:budget=256"), dataclasses.replace(FACTS, **changed))


def test_both_devices_go_with_a_plan():
    check_engine(options("quest:budget=256"), dataclasses.replace(FACTS, device="cuda"))


def test_with_recurrent_layers_entries_are_read_and_evicted():
    for text in ("quest:budget=256", "rocketkv:budget=256"):
        check_engine(options(text), dataclasses.replace(FACTS, recurrent=True))


def test_another_version_can_be_tried(monkeypatch):
    monkeypatch.setenv("KVSIEVE_VLLM_ANY_VERSION", "1")
    check_engine(options("quest:budget=256"), dataclasses.replace(FACTS, version="0.33.1"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("quest:budget=256:page=12", "pages of 12"),
        ("quest:budget=48", "reads 24 entries exactly, .* until it reads 64"),
        ("quest:budget=48:page=16", "reads 48 entries exactly"),
        ("hsa:budget=64:skip_layers=1", "reads 32 entries exactly"),
        ("quest:budget=5%:floor=0:page=32", "does not fit the budget of 16"),
    ],
)
def test_pages_are_the_engines_blocks(text, told):
    for fine in ("quest:budget=256:page=32", "quest:budget=128", "hsa:budget=16:skip_layers=4"):
        check_engine(options(fine), FACTS)
    with pytest.raises(PlanError, match=told):
        check_engine(options(text), FACTS)


def test_prefix_caching_stays_for_reading_and_goes_for_evicting():
    caching = dataclasses.replace(FACTS, prefix_caching=True)
    assert needs_no_prefix_caching(options("snapkv"), FACTS) is None
    assert needs_no_prefix_caching(options("quest"), caching) is None
    assert "other entries" in needs_no_prefix_caching(options("snapkv"), caching)


def test_a_plan_is_settled_for_the_model_once_and_read_alike_in_every_process():
    config = LlamaConfig(num_hidden_layers=4)
    settled = settle(options("snapkv:budget=20%"), config, None)
    assert settled.settled and settled.plan.evict.window == 16 and settled.plan.unset is None
    again = EngineOptions.given({"kvsieve": json.loads(json.dumps(settled.handed_on()))})
    assert again.settled and again.plan == settled.plan and settle(again, None, None) == again
