"""``paper=True`` is what the paper ran, in every field; models of the papers' shapes get those values by themselves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import kvsieve
from doc_pages import sections
from kvsieve.cli.specs import make_run
from kvsieve.planning import defaults
from kvsieve.planning.profiles import Fingerprint

LLAMA = defaults.MODELS["Llama-3.1-8B"]

# Method -> parameters of ``paper=True``, written from the papers. Sections are those of the paper named.
AS_PUBLISHED = {
    # FastKV 5.1: observation window 8, pooling kernel 7, TSP rate 20%, KV retention 10%; max pooling in its code.
    "fastkv": {"window": 8, "kernel": 7, "tsp_rate": 0.2, "budget": "10%", "pooling": "max", "tsp_layer": None},
    # ASL 5.1: L_obs 8, KV budget 2048; 5.5: tau 0.3; C.2: average pooling, window 32, kernel 7.
    "asl": {"observed": 8, "budget": 2048, "tau": 0.3, "window": 32, "kernel": 7, "pooling": "avg", "first": None},
    # GemFilter, algorithm 1: pooling of width 5, the last token is not forced.
    "gemfilter": {"kernel": 5, "keep_last": 0, "layer": None},
    # SnapKV 5.3, LongBench: window 32, kernel 7, max pooling.
    "snapkv": {"window": 32, "kernel": 7, "pooling": "max"},
    # LagKV 3.2: lag 128, r adapted by eq. 13; 3.3: 16 sinks.
    "lagkv": {"lag": 128, "sinks": 16, "chunks": False, "variant": "lag"},
    # RocketKV 3.2: kernel 63; A.3: window 32 in single turns; algorithm 1: no entry is forced.
    "rocketkv": {"kernel": 63, "window": 32, "newest": False, "pooling": "max"},
    # RocketKV A.3: window 128 in conversations.
    "rocketkv-mt": {"kernel": 63, "window": 128, "newest": False, "pooling": "max"},
    "hsa": {"newest": False},
    # RocketKV A.3: the budget is the top-k value.
    "exacttopk": {"newest": False, "per_group": False},
    # H2O 5: half of the budget for recent tokens, every step.
    "h2o": {"recent": 0.5, "every": 1},
    # PyramidKV 5 and its code: beta 20, window 8, kernel 7, max pooling.
    "pyramidkv": {"beta": 20, "window": 8, "kernel": 7, "pooling": "max"},
    # Quest 4.1: pages of 16, the first two layers dense.
    "quest": {"page": 16, "skip_layers": 2, "per_query_head": True},
    "sparq": {"per_query_head": True, "mean_value": True, "newest": False},
    # Loki, algorithm 1: a quarter of the components, a set per query head.
    "loki": {"part": 0.25, "per_query_head": True, "newest": False},
    # ClusterKV 3 and its code: 16 sinks, a cluster for 80 entries, chunks of 320, two dense layers.
    "clusterkv": {"sinks": 16, "per_cluster": 80, "chunk_length": 320, "per_query_head": True, "skip_layers": 2},
    "kascade": {"newest": False, "per_group": True},
    # Ada-KV 5: floor 0.2, window 32, kernel 7, max pooling.
    "adakv": {"alpha": 0.2, "window": 32, "kernel": 7, "pooling": "max", "normalize": True, "rule": "paper"},
    # CAKE, code: window 32, kernel 5, gamma 200.
    "cake": {"window": 32, "kernel": 5, "gamma": 200.0, "pooling": "avg"},
    "claa": {"window": 8, "kernel": 7, "joined": 4, "skip_layers": 4},
}


def test_the_table_has_every_method_of_papers():
    assert set(AS_PUBLISHED) == set(defaults.PAPER)
    for name, values in defaults.PAPER.items():
        assert values.items() <= AS_PUBLISHED[name].items(), name


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_paper_is_the_papers_in_every_field(name):
    plan = kvsieve.plan(name, paper=True)
    written = make_run(name, paper=True).parameters
    for field, value in AS_PUBLISHED[name].items():
        assert written[field] == value, f"{name}: {field}"
        holders = [vars(plan)[role] for role in plan.roles]
        holders += [part.base for part in holders if "base" in {each.name for each in dataclasses.fields(part)}]
        held = [vars(part)[field] for part in holders if field in vars(part)]
        assert all(each == value for each in held) or field in ("budget", "skip_layers"), f"{name}: {field}"
    assert plan.floor == 0 and plan.unset is None and plan.for_model(LLAMA) == plan


def test_what_is_given_stays_beside_paper():
    plan = kvsieve.plan("rocketkv-mt", paper=True, window=16, newest=True)
    assert plan.evict.base.window == 16 and plan.read.newest
    assert kvsieve.plan("chunkkv", paper=True, skip_layers=1).evict.base.pooling == "max", "its base is the paper's"
    assert kvsieve.plan("chunkkv", paper=True, base="knorm").evict.base == kvsieve.methods.KNorm(budget="20%")


def test_labels_tell_the_papers_setting_from_the_usual_one():
    assert make_run("rocketkv", paper=True).full_label == "rocketkv:newest=False"
    assert make_run("snapkv", paper=True, floor=0).full_label == "snapkv:pooling=max"
    assert make_run("snapkv", paper=True, pooling="avg").full_label == "snapkv"
    assert make_run("chunkkv", paper=True).full_label == "chunkkv:base.pooling=max"
    assert make_run("chunkkv", paper=True).parameters["base.pooling"] == "max"
    assert make_run("adakv", paper=True).full_label == "adakv"


# (method, model) -> what attach takes by itself. FastKV 5.1, ASL 5.1 and C.2, GemFilter's code.
ON_MODELS = {
    ("fastkv", "Llama-3.1-8B"): {"tsp_layer": 15, "window": 8, "kernel": 7, "pooling": "max"},
    ("fastkv", "Ministral-8B"): {"tsp_layer": 17, "window": 8, "kernel": 7, "pooling": "max"},
    ("fastkv", "Qwen2.5-7B"): {"tsp_layer": 14, "window": 8, "kernel": 7, "pooling": "max"},
    ("gemfilter", "Llama-3.1-8B"): {"layer": 13, "kernel": 5},
    ("gemfilter", "Ministral-8B"): {"layer": 17, "kernel": 5},
    ("gemfilter", "Qwen2.5-7B"): {"layer": 14, "kernel": 5},
    ("asl", "Llama-3.1-8B"): {"first": 10, "tau": 0.3, "observed": 8, "window": 32, "kernel": 7, "pooling": "avg"},
    ("asl", "Qwen2.5-7B"): {"first": 9, "tau": 0.3, "observed": 8, "window": 32, "kernel": 7, "pooling": "avg"},
    ("snapkv", "Llama-3.1-8B"): {"window": 32, "kernel": 7, "pooling": "max"},
    ("chunkkv", "Mistral-7B-v0.2"): {"base.window": 32, "base.kernel": 7, "base.pooling": "max"},
}


@pytest.mark.parametrize(("method", "name"), ON_MODELS)
def test_a_model_of_a_papers_shape_gets_the_papers_values(method, name):
    model = defaults.MODELS[name]
    plan = kvsieve.plan(method).for_model(model)
    assert plan.filled.values == ON_MODELS[method, name]
    assert str(plan.filled).endswith(f"from its paper, for a model of {name}'s shape")
    if method in defaults.LAYERS:
        assert kvsieve.plan(method, paper=True).propagate.source(model.layers) == plan.propagate.source(model.layers)


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Fingerprint) if each.compare])
def test_one_difference_of_shape_is_another_model(field):
    """Depth and digits decide then; see tests/test_defaults.py."""
    value = vars(LLAMA)[field]
    other = dataclasses.replace(LLAMA, **{field: "qwen2" if field == "model_type" else value + 4})
    assert "its paper" not in str(kvsieve.plan("fastkv").for_model(other).filled)
    assert kvsieve.plan("fastkv").for_model(other).propagate.window == 16


def test_a_model_is_known_whatever_its_name_and_by_either_type():
    assert defaults.paper_model(dataclasses.replace(LLAMA, name="my/finetune")) == "Llama-3.1-8B"
    ministral = dataclasses.replace(defaults.MODELS["Ministral-8B"], model_type="ministral")
    assert kvsieve.plan("fastkv").for_model(ministral).propagate.layer == 17


def test_a_method_without_a_published_layer_for_a_model_goes_by_depth_there():
    model = defaults.MODELS["Mistral-7B-v0.2"]
    filled = kvsieve.plan("fastkv").for_model(model).filled
    assert filled.values == {"tsp_layer": 22, "window": 16, "kernel": "auto"} and "its paper" not in str(filled)
    assert kvsieve.plan("staged").for_model(LLAMA).propagate.layer == 22, "no paper's method"
    given = kvsieve.plan("fastkv", tsp_layer=20, budget=12).for_model(LLAMA)
    assert given.propagate.layer == 20 and given.evict.window == 6


def published_table():
    """Rows of docs/calibrate.md: a method, what paper=True gives it, and its layers on the papers' models."""
    for name, values in defaults.PAPER.items():
        _, layers = defaults.LAYERS.get(name, ("", {}))
        told = ", ".join(f"`{field}={value}`" for field, value in values.items())
        yield " | ".join((f"| `{name}`", told, ", ".join(f"{model} {layer}" for model, layer in layers.items()))) + " |"


PAGE = (Path(__file__).parents[1] / "docs" / "calibrate.md").read_text()


def test_the_page_names_the_methods_that_need_a_profile_and_those_that_the_model_fills_in():
    parts = sections(PAGE)
    for info in map(kvsieve.method_info, kvsieve.list_methods()):
        if info.part is not None:
            assert f"`{info.name}`" in parts["using-a-profile"], info.name
        elif info.derive is not None and info.derive(LLAMA, 1):
            assert f"`{info.name}`" in parts["without-a-profile"], info.name


def test_the_page_says_what_the_tables_say():
    for line in published_table():
        assert line.replace("|  |", "| |") in PAGE, f"docs/calibrate.md lacks the line\n{line}"
    *models, last = defaults.MODELS
    assert f"{', '.join(models)} or {last}" in PAGE.replace("\n", " ")
