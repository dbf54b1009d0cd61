"""Budgets, plans and names."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

import kvsieve
from kvsieve import Budget, Plan
from kvsieve.errors import PlanError
from kvsieve.methods import TSP, KNorm, SnapKV
from kvsieve.planning.registry import register_method


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20%", Budget(ratio=0.2)),
        ("0.5", Budget(ratio=0.5)),
        (0.1, Budget(ratio=0.1)),
        (1.0, Budget(ratio=1.0)),
        ("2048", Budget(tokens=2048)),
        (7, Budget(tokens=7)),
        (Budget(tokens=3), Budget(tokens=3)),
    ],
)
def test_budgets_are_read_as_users_write_them(text, expected):
    assert Budget.parse(text) == expected


@pytest.mark.parametrize("bad", ["0%", "150%", "many", 0, -3, 1.5, 0.0, True, None, "12.5", float("nan")])
def test_bad_budgets_are_refused(bad):
    with pytest.raises(PlanError, match="budget|Budget"):
        Budget.parse(bad)


@pytest.mark.parametrize("given", [{}, {"tokens": 3, "ratio": 0.2}, {"tokens": 2.5}])
def test_a_budget_is_one_thing(given):
    with pytest.raises(PlanError):
        Budget(**given)


def test_entries_round_down_and_respect_the_minimum():
    assert Budget(ratio=0.2).entries(1004) == 200
    assert Budget(ratio=0.2).entries(10, minimum=9) == 9
    assert Budget(tokens=5).entries(10**6) == 5


def test_names():
    assert kvsieve.list_methods()[0] == "full"
    assert {"streamingllm", "knorm", "snapkv", "fastkv"} < set(kvsieve.list_methods())
    assert kvsieve.plan("Streaming-LLM", budget=9).name == "streamingllm" == kvsieve.method_info("streaming_llm").name
    with pytest.raises(PlanError, match="unknown method 'fastkw'; did you mean 'fastkv'"):
        kvsieve.plan("fastkw")
    with pytest.raises(PlanError, match="snapkv has no parameter 'budgett'; did you mean 'budget'"):
        kvsieve.plan("snapkv", budgett="20%")
    with pytest.raises(PlanError, match="registered already"):
        register_method("snap_kv", title="", paper="", phase="", query_aware=True)(lambda: Plan())


def test_a_plan_as_text_has_codecs_and_sparse_prompts():
    same = kvsieve.plan("snapkv", codec="int8", prefill="xattention", budget="30%")
    assert kvsieve.plan("snapkv:codec=int8:prefill=xattention:budget=30%") == same
    assert same.roles == ("evict", "prefill", "codec")
    with pytest.raises(PlanError, match="codec is given twice"):
        kvsieve.plan("snapkv:codec=int8", codec="int8")


def test_plans_compose_and_refuse_what_does_not_fit():
    plan = Plan(propagate=TSP(rate=0.3, layer=2), evict=KNorm(budget=0.2))
    assert plan.roles == ("propagate", "evict") and plan.name == "TSP+KNorm" and plan.window == 8
    assert Plan().roles == () and Plan().name == "full"
    for bad in (SnapKV, "snapkv", TSP(rate=0.3)):
        with pytest.raises(PlanError, match="takes a Evictor"):
            Plan(evict=bad)


@pytest.mark.parametrize("name", ["full", "streamingllm", "knorm", "snapkv", "fastkv"])
def test_plans_survive_a_round_trip(name):
    plan = kvsieve.plan(name) if name != "fastkv" else kvsieve.plan(name, tsp_rate=777, tsp_layer=3, budget="12%")
    again = Plan.from_dict(plan.to_dict())
    assert again == plan and again.name == name
    with pytest.raises(PlanError, match="cannot read a plan"):
        Plan.from_dict({"evict": {"type": "Nothing"}})


def test_attach_takes_a_plan():
    with pytest.raises(kvsieve.KvsieveError, match="attach takes a Plan, got 'snapkv'"), kvsieve.attach(None, "snapkv"):
        pass


@pytest.fixture
def registry(monkeypatch):
    """What is registered here is forgotten afterwards."""
    kvsieve.list_methods()
    monkeypatch.setattr(kvsieve.planning.registry, "_METHODS", dict(kvsieve.planning.registry._METHODS))


ABOUT = {"title": "", "paper": "", "phase": "end of prompt", "query_aware": False}


def test_the_class_of_a_role_is_a_method(registry):
    @register_method("loud", **ABOUT, budget="25%")
    @dataclass(frozen=True, kw_only=True)
    class Loud(KNorm):
        """Loudest keys.

        And so on.
        """

        loudness: int = 3
        order: tuple = field(default_factory=lambda: (1, 2))

    info = kvsieve.method_info("loud")
    given = {"budget": "25%", "loudness": 3, "order": (1, 2), "skip_layers": 0, "every": None}
    given |= {"answer": None, "grows": False, "floor": 0}
    assert list(info.parameters.items()) == list(given.items()) and info.summary == "Loudest keys."
    assert kvsieve.plan("loud").evict == Loud(budget=0.25) and kvsieve.plan("loud").name == "loud"
    assert kvsieve.plan("loud", budget=7, every=2, loudness=1).evict == Loud(budget=7, every=2, loudness=1)
    with pytest.raises(PlanError, match="loud: loudness must be a whole number, got 'much'"):
        kvsieve.plan("loud", loudness="much")
    with pytest.raises(PlanError, match="loud has no parameter 'loudnes'; did you mean 'loudness'"):
        kvsieve.plan("loud", loudnes=3)


def test_what_is_no_class_of_one_role_is_not_registered(registry):
    class Bare(KNorm): ...

    for kind in (Bare, dataclass(type("Neither", (), {}))):
        with pytest.raises(PlanError, match=f"a dataclass that derives from Evictor.*got {kind.__name__}"):
            register_method("bare", **ABOUT, budget="25%")(kind)
    made = dataclass(frozen=True, kw_only=True)(Bare)
    with pytest.raises(PlanError, match="'bare' has no default for budget: give one, as budget= of register"):
        register_method("bare", **ABOUT)(made)
    register_method("bare", **ABOUT, summary="Bare.", example={"budget": 9})(made)
    assert kvsieve.method_info("bare").summary == "Bare."
    with pytest.raises(PlanError, match=r"bare needs budget=, e.g. plan\('bare', budget=9\)"):
        kvsieve.plan("bare")
