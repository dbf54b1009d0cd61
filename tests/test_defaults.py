"""Parameters that come with the model: from profiles, from its depth and tokenizer, or, if asked, from the paper."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from pathlib import Path

import pytest
import torch

import kvsieve
from kvsieve import Plan
from kvsieve.cli.specs import make_run, method_specs
from kvsieve.errors import InputError, KvsieveWarning, PlanError
from kvsieve.hf.persist.saved import read_header
from kvsieve.lab.eval.cells import on_model, settings
from kvsieve.lab.eval.store import writing
from kvsieve.methods import TSP, SnapKV
from kvsieve.planning.defaults import digits_per_token
from kvsieve.planning.profiles import Fingerprint, Profile, keep_profile, load_profile, profiles_dir
from source_tree import needs_results
from tiny import tiny_model, tiny_prompt
from tiny_models import build

ROOT = Path(__file__).parent.parent
DEMO = load_profile("smollm2-135m-instruct").fingerprint
# As deep as a real model, and of a shape that nothing was calibrated for.
UNKNOWN = dataclasses.replace(DEMO, layers=24, name="unknown")


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSIEVE_HOME", str(tmp_path))
    return tmp_path / "profiles"


def profile_of(model, name="tiny", **parameters):
    heads = tuple(tuple(float(i == j) for j in range(2)) for i in range(4))
    return Profile(Fingerprint.of(model, name), parameters=parameters, heads=heads)


class Digits:
    """A tokenizer that puts so many digits into a token, and something before every text."""

    def __init__(self, each):
        self.each = each

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [0, *range(-(-len(text) // self.each))]}


def ids(count=90):
    return tiny_prompt(1, count, seed=1)


@pytest.mark.parametrize("each", [1, 2, 3])
def test_digits_of_a_token_are_counted(each):
    assert digits_per_token(Digits(each)) == each and digits_per_token() == 1
    with pytest.raises(InputError, match="takes a tokenizer of transformers, got 'gpt2'"):
        digits_per_token("gpt2")


def test_without_a_profile_depth_and_digits_decide():
    plan = kvsieve.plan("fastkv").for_model(UNKNOWN)
    assert plan.propagate == TSP(rate=0.2, layer=16, window=16, kernel="auto")
    assert plan.evict == SnapKV(budget="10%", window=16, kernel="auto", pooling="max")
    assert plan.name == "fastkv" and plan.profile is None and plan.unset is None
    assert str(plan.filled) == "tsp_layer=16, window=16, kernel=auto from the model's depth and tokenizer"
    assert kvsieve.plan("snapkv").for_model(UNKNOWN, Digits(3)).evict.kernel == 7, "an answer has fewer tokens there"
    assert kvsieve.plan("gemfilter").for_model(UNKNOWN).propagate.layer == 16
    assert kvsieve.plan("asl").for_model(UNKNOWN).propagate.source(24) == 16
    assert kvsieve.plan("knorm").for_model(UNKNOWN) == kvsieve.plan("knorm")


# Left out: methods with a parameter that no model's shape gives, of which specprefill's is a draft model.
NEED_MORE = ("per-layer", "finch", "specprefill", "threshold")


@pytest.mark.parametrize("name", [name for name in kvsieve.list_methods() if name not in NEED_MORE])
@pytest.mark.parametrize("layers", [2, 4, 12, 24, 80])
def test_every_method_finds_its_parameters_at_any_depth(name, layers):
    info = kvsieve.method_info(name)
    if info.part is not None:
        return
    shape = dataclasses.replace(UNKNOWN, layers=layers)
    plan = kvsieve.plan(name).for_model(shape)
    assert plan.unset is None and plan.for_model(DEMO) == plan, "what is settled stays so"
    if plan.propagate is not None and layers > {"asl": 8, "pyramidinfer": 2}.get(name, 0):
        assert 0 <= plan.propagate.source(layers) < layers - (name != "gemfilter")
    if info.adapts:
        paper = kvsieve.plan(name, paper=True)
        assert paper.for_model(shape) == paper and paper.unset is None and paper.filled is None


def test_what_is_given_stays():
    plan = kvsieve.plan("fastkv", tsp_layer=None, kernel=5, budget=40).for_model(DEMO)
    assert plan.propagate.layer is None and (plan.propagate.kernel, plan.propagate.window) == (5, 16)
    assert plan.evict == SnapKV(budget=40, window=16, kernel=5)
    assert set(plan.filled.values) == {"tsp_rate", "window", "pooling"}
    few = kvsieve.plan("fastkv", budget=12).for_model(UNKNOWN)
    assert few.evict.window == 6, "a window may not be all that is kept"
    changed = dataclasses.replace(kvsieve.plan("fastkv"), evict=SnapKV(budget=50)).for_model(DEMO)
    assert changed.evict == SnapKV(budget=50) and changed.propagate.layer == 21


def test_the_papers_defaults_are_had_by_asking():
    plan = kvsieve.plan("fastkv", paper=True)
    assert plan.propagate == TSP(rate=0.2) and plan.for_model(DEMO) is plan
    assert kvsieve.plan("chunkkv", paper=True).for_model(DEMO).evict.base == SnapKV(budget="20%", pooling="max")
    with pytest.raises(PlanError, match="paper=True and profile= are two sources"):
        kvsieve.plan("fastkv", paper=True, profile="smollm2-135m-instruct")
    with pytest.raises(PlanError, match="paper must be True or False, got 'yes'"):
        kvsieve.plan("snapkv", paper="yes")
    for name in ("knorm", "qfilters"):
        with pytest.raises(PlanError, match="has no parameter 'paper'"):
            kvsieve.plan(name, paper=True)


def test_the_shipped_profile_of_a_model_is_found():
    plan = kvsieve.plan("fastkv").for_model(DEMO)
    explicit = kvsieve.plan("fastkv", profile="smollm2-135m-instruct")
    assert plan == explicit and plan.profile == DEMO and explicit.unset is None
    assert plan.propagate.layer == 21 and "from the shipped profile smollm2-135m-instruct" in str(plan.filled)
    assert kvsieve.plan("duoattention").for_model(DEMO).evict.heads == load_profile("smollm2-135m-instruct").heads
    wrappers = [info for info in map(kvsieve.method_info, kvsieve.list_methods()) if info.parameters.get("base")]
    assert {"chunkkv", "rerotation", "perturn", "scope"} < {info.name for info in wrappers}
    for info in wrappers:
        if info.roles == ("evict",):
            skipped = {"skip_layers": (0, -1)} if "skip_layers" in info.parameters else {}
            plan = kvsieve.plan(info.name, **{**info.example, "base": "snapkv"}, **skipped)
            base = plan.for_model(DEMO).evict.base
            assert (base.window, base.kernel) == (16, 21) and base.skip_layers == skipped.get("skip_layers", 0), (
                info.name
            )
            assert "base.kernel" in plan.for_model(DEMO).filled.values, info.name
            papers = kvsieve.plan(info.name, **{**info.example, "base": "snapkv"}, paper=True).evict.base
            assert (papers.window, papers.pooling) == (32, "max"), info.name
    assert kvsieve.plan("chunkkv", base="qfilters").for_model(DEMO).evict.base.filters
    assert kvsieve.plan("chunkkv", base="knorm", budget=9).for_model(DEMO).filled is None


def test_a_saved_profile_is_found_by_the_models_shape(model, home, tmp_path):
    assert not home.exists() and profiles_dir() == home
    found = profile_of(model, snapkv={"window": 5, "kernel": 9, "pooling": "max"})
    assert keep_profile(found).parent == home and load_profile(keep_profile(found)) == found
    assert len(list(home.iterdir())) == 1, "one for each model"
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=40)) as sieve:
        result = sieve.generate(ids(), max_new_tokens=2, do_sample=False)
        sieve.save(result.cache, tmp_path / "cache")
        assert sieve.plan.evict == SnapKV(budget=40, window=5, kernel=9, pooling="max")
        (note,) = result.stats.notes
        assert result.stats.applied and "window=5, kernel=9, pooling=max from your profile tiny-" in note
    header = read_header(tmp_path / "cache")["plan"]
    assert header["evict"]["window"] == 5 and "unset" not in header
    with kvsieve.attach(model, kvsieve.plan("duoattention", budget=30, sinks=2, recent=8)) as sieve:
        assert sieve.plan.evict.heads == found.heads and sieve.plan.profile == found.fingerprint
    assert kvsieve.plan("fastkv").for_model(model).filled.parts[0][0] == "the model's depth and tokenizer"
    other = build("llama", num_hidden_layers=3)
    assert kvsieve.plan("snapkv").for_model(other).evict.kernel == "auto"
    assert Plan.from_dict(json.loads(json.dumps(sieve.plan.to_dict()))) == sieve.plan


def test_of_several_profiles_the_models_own_comes_first_then_the_last(model, home):
    for index, name in enumerate(("acme/first", "acme/Second", "third")):
        file = keep_profile(profile_of(model, name, snapkv={"kernel": 11 + 2 * index}))
        os.utime(file, (index, index))
    shape = Fingerprint.of(model)
    kernels = {
        name: kvsieve.plan("snapkv").for_model(dataclasses.replace(shape, name=name)).evict.kernel
        for name in ("other/first", "second", "unheard of", "")
    }
    assert kernels == {"other/first": 11, "second": 13, "unheard of": 15, "": 15}
    damaged = next(home.glob("third*"))
    damaged.write_text("{")
    with pytest.warns(KvsieveWarning, match="left out: the profile .*third.*damaged"):
        assert kvsieve.plan("snapkv").for_model(shape).evict.kernel == 13
    keep_profile(profile_of(model, "third", snapkv={"kernel": 8}))
    with pytest.raises(PlanError, match="snapkv with the parameters of your profile third.*kernel must be an odd"):
        kvsieve.plan("snapkv").for_model(shape)


def test_what_is_left_open_survives_a_round_trip():
    for name, given in (("fastkv", {"budget": kvsieve.Budget(tokens=40)}), ("per-layer", {"shares": [1, 2]})):
        plan = kvsieve.plan(name, **given)
        again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
        assert again == plan and plan != kvsieve.plan(name, **given, paper=True)
        assert again.for_model(UNKNOWN) == plan.for_model(UNKNOWN) and isinstance(hash(plan), int)


def test_results_are_named_by_what_ran():
    def labels(methods, shape):
        return [each.label for each in on_model(settings(method_specs(methods), ["10%"]), shape)[1:]]

    both = "snapkv,snapkv:paper=true,snapkv:paper=true:kernel=21,chunkkv,qfilters"
    assert labels(both, DEMO) == [
        "snapkv window=16 kernel=21",
        "snapkv pooling=max",
        "snapkv kernel=21 pooling=max",
        "chunkkv base.window=16 base.kernel=21",
        "qfilters profile=SmolLM2-135M-Instruct",
    ]
    assert labels("snapkv,snapkv:kernel=5", UNKNOWN) == ["snapkv window=16 kernel=auto", "snapkv kernel=5 window=16"]
    with pytest.raises(PlanError, match="'snapkv window=16 kernel=21' at a budget of 10% is named twice"):
        labels("snapkv,snapkv:paper=true:window=16:kernel=21:pooling=avg", DEMO)
    run = make_run("fastkv", budget="5%").for_model(DEMO)
    assert (
        run.label == "fastkv:budget=5%"
        and run.full_label == "fastkv:budget=5%:tsp_layer=21:window=16:kernel=21:pooling=avg"
    )
    assert run.parameters["tsp_layer"] == 21 and run.parameters["kernel"] == 21 and "paper" not in run.parameters


def test_settings_that_the_model_completes_do_not_mix_with_others(tmp_path):
    about = {"model": "toy", "dtype": "float32", "seed": 0, "haystack": "noise", "tasks": {}}
    cells = settings(method_specs("snapkv,qfilters"), ["10%"])
    with writing(tmp_path, about, resume=False) as writer:
        writer.settle([each.described() for each in on_model(cells, DEMO)])
        writer.save(0.0)
    run = json.loads((tmp_path / "run.json").read_text())
    assert [each["parameters"].get("kernel") for each in run["settings"]] == [None, 21, None]
    changed = [dataclasses.replace(each, parameters={**each.parameters, "recent": 3}) for each in on_model(cells, DEMO)]
    with writing(tmp_path, about, resume=True) as writer:
        with pytest.raises(InputError, match="'qfilters profile=.*with parameters"):
            writer.settle([each.described() for each in changed])


def committed(folder):
    run = json.loads((ROOT / "benchmarks" / "results" / folder / "run.json").read_text())
    return {(each["label"], each["budget"]): each for each in run["settings"]}


@needs_results
def test_the_grids_methods_are_those_of_the_committed_results():
    folder, model = "qwen2.5-coder-0.5b/ruler", load_profile("qwen2.5-coder-0.5b-instruct").fingerprint
    grid = tomllib.loads((ROOT / "benchmarks" / "answers" / "grids" / "retained.toml").read_text())
    specs = method_specs(",".join(grid["methods"]))
    known = committed(folder)
    for each in (cell.described() for cell in on_model(settings(specs, grid["budgets"]), model)):
        before = known[each["label"], each["budget"]]
        changed = {name: v for name, v in before["parameters"].items() if each["parameters"].get(name) != v}
        assert not changed, each["label"]


POOLED = [name for name in kvsieve.list_methods() if kvsieve.method_info(name).derive is not None]
POOLED = [name for name in POOLED if {"window", "budget"} <= kvsieve.method_info(name).parameters.keys()]


@pytest.mark.parametrize("name", POOLED)
def test_half_of_a_small_budget_is_more_than_the_window(model, home, name):
    plan = kvsieve.plan(name, budget=20)
    given = kvsieve.method_info(name).parameters["window"]
    assert plan.window == min(10, given) and plan.for_model(model).window <= 10
    assert Plan.from_dict(plan.to_dict()).for_model(model).filled == plan.for_model(model).filled
    with pytest.raises(PlanError, match=rf"(?i)^{name}: a budget of 20 entries is too small, at least 33 are needed"):
        kvsieve.plan(name, budget=20, window=32)


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("fastkv", {"tsp_rate": 4}, "fastkv: a tsp_rate of 4"),
        ("adakv", {"kernel": 2}, "adakv: kernel must be"),
        ("pyramidinfer", {"budget": 9, "window": 9}, "pyramidinfer: a budget of 9"),
        ("d2o", {"recent": 3}, "d2o: "),
        ("snapkv", {"kernel": 2}, "SnapKV: kernel must be"),
    ],
)
def test_errors_of_named_plans_name_the_method(method, given, message):
    with pytest.raises(PlanError, match=f"^{message}"):
        kvsieve.plan(method, **given)


def test_errors_at_a_model_name_the_method(model):
    with (
        pytest.raises(PlanError, match="^fastkv: skip_layers=99 lies outside"),
        kvsieve.attach(model, kvsieve.plan("fastkv", skip_layers=99, tsp_layer=1)),
    ):
        pass
