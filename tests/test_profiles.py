"""Profiles: files, what a plan takes from them, and models they do not fit."""

from __future__ import annotations

import json

import pytest
import torch

import kvsieve
from kvsieve import Plan
from kvsieve.errors import PlanError
from kvsieve.lab.eval.cells import settings
from kvsieve.methods import TSP, SnapKV
from kvsieve.planning.defaults import pooling
from kvsieve.planning.profiles import Fingerprint, Profile, load_profile, shipped_profiles
from kvsieve.planning.settled import all_parameters
from tiny import tiny_model, tiny_prompt
from tiny_models import build


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture
def profile(model):
    return Profile(
        Fingerprint.of(model, "tiny"),
        parameters={
            "fastkv": {"tsp_layer": 2, "tsp_rate": "30%", "kernel": 21, "window": 16, "pooling": "avg"},
            "snapkv": {"kernel": 21, "window": 16, "pooling": "max"},
        },
        heads=((0.5, 1.0),) * 4,
        q_filters=(((0.6, -0.8), (1.0, 0.0)),) * 4,
        measured={"tsp": {"layers": [0, 1], "relative": [0.5, None]}},
        text={"source": "generated"},
        environment={"torch": torch.__version__},
    )


def test_round_trip(profile, tmp_path):
    file = tmp_path / "profile.json"
    profile.save(file)
    assert load_profile(file) == profile == load_profile(str(file)) and load_profile(profile) is profile
    assert [each.name for each in tmp_path.iterdir()] == ["profile.json"]
    assert " [0.6, -0.8],\n" in file.read_text(), "numbers stand in lines, not in columns"
    hash(load_profile(file).q_filters)


def test_a_fingerprint_is_that_of_the_config(model):
    found = Fingerprint.of(model)
    assert found == Fingerprint("llama", 4, 4, 2, 16, 64, 128, name="whatever")
    assert Fingerprint.of(build("llama", num_key_value_heads=4)).differences(found) == ["kv_heads"]


def test_a_plan_takes_what_was_not_given(profile, tmp_path):
    file = tmp_path / "profile.json"
    profile.save(file)
    plan = kvsieve.plan("fastkv", profile=str(file), kernel=5, budget=64)
    assert plan.propagate == TSP(rate=0.3, layer=2, window=16, kernel=5, pooling="avg")
    assert plan.evict == SnapKV(budget=64, window=16, kernel=5, pooling="avg")
    assert plan.profile == profile.fingerprint and plan.name == "fastkv"
    assert kvsieve.plan("fastkv", profile=profile, tsp_layer=None).propagate.layer is None, "None was given"
    assert kvsieve.plan("snapkv", profile=profile, every=7).evict.every == 7
    assert kvsieve.plan("fastkv", profile=None).profile is None
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and again.profile == plan.profile and hash(again) == hash(plan)


def test_reports_name_the_parameters_that_ran(profile, tmp_path):
    file = tmp_path / "profile.json"
    profile.save(file)
    found = all_parameters("fastkv", {"profile": profile, "kernel": 5})
    assert (found["tsp_layer"], found["kernel"], found["profile"], found["budget"]) == (2, 5, "tiny", "10%")
    setting = settings([("snapkv", {"profile": str(file)})], ["25%"])[1]
    assert setting.parameters["kernel"] == 21 and setting.parameters["budget"] == "25%"
    assert setting.plan.profile == profile.fingerprint and setting.label == f"snapkv profile={file}"


def test_a_plan_refuses_what_a_profile_cannot_give(profile):
    with pytest.raises(PlanError, match="profile of tiny holds no parameters for asl.*fastkv, snapkv"):
        kvsieve.plan("asl", profile=profile)
    with pytest.raises(PlanError, match="knorm has no parameter 'profile'"):
        kvsieve.plan("knorm", profile=profile)
    odd = Profile(profile.fingerprint, parameters={"snapkv": {"kernal": 3}})
    with pytest.raises(PlanError, match="no parameter 'kernal'"):
        kvsieve.plan("snapkv", profile=odd)


def test_attach_refuses_another_model_and_names_both(model, profile):
    ids = tiny_prompt(1, 40, seed=1)
    with kvsieve.attach(model, kvsieve.plan("snapkv", profile=profile, budget=20)) as sieve:
        assert sieve.generate(ids, max_new_tokens=2, do_sample=False).stats.kv_entries == [20] * 4
    other = build("qwen2", num_hidden_layers=3)
    with pytest.raises(PlanError, match="made for tiny .llama, 4 layers.*this model is.*qwen2, 3 layers") as caught:
        with kvsieve.attach(other, kvsieve.plan("snapkv", profile=profile)):
            pass
    assert "differ in model_type, layers" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged .not JSON"),
        ("[1]", "not a profile of kvsieve"),
        ('{"layers": 3}', "not a profile of kvsieve"),
        ('{"format": 7}', "has format 7, this version of kvsieve reads format 1"),
        ('{"format": 1}', "damaged .'fingerprint' is missing"),
        ('{"format": 1, "fingerprint": {"layers": 3}}', "damaged"),
    ],
)
def test_files_that_are_no_profiles(text, message, tmp_path):
    file = tmp_path / "odd.json"
    file.write_text(text)
    with pytest.raises(PlanError, match=message) as caught:
        kvsieve.plan("fastkv", profile=file)
    assert "odd.json" in str(caught.value) and "kvsieve calibrate" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("heads", [[0.5]]),
        ("heads", [["a", 1]] * 4),
        ("heads", 3),
        ("q_filters", [[1.0, 2.0]] * 4),
        ("q_filters", [[[float("nan")]]] * 4),
        ("q_centres", [[[1.0, 2.0]]] * 3),
        ("head_budgets", [[0.5, 0.5]] * 4),
        ("entropies", [0.5] * 4),
        ("parameters", [1]),
        ("parameters", {"fastkv": 3}),
    ],
    ids=str,
)
def test_damaged_parts_are_named(profile, name, value):
    with pytest.raises(PlanError, match="it is damaged"):
        Profile.from_dict({**profile.to_dict(), name: value}, "it")


def test_missing_files_and_odd_sources(tmp_path):
    with pytest.raises(PlanError, match="cannot read the profile 'nothing'.*neither a file nor shipped"):
        load_profile("nothing")
    with pytest.raises(PlanError, match="cannot read the profile"):
        load_profile(tmp_path)
    with pytest.raises(PlanError, match="must be a Profile, a file or the name"):
        load_profile(3)


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_are_whole(name):
    profile = load_profile(name)
    shape = profile.fingerprint
    assert profile.name.lower() == name
    assert [len(layer) for layer in profile.heads] == [shape.kv_heads] * shape.layers
    assert all(0 <= score <= 1 for layer in profile.heads for score in layer)
    filters = torch.tensor(profile.q_filters)
    assert filters.shape == (shape.layers, shape.kv_heads, shape.head_dim)
    torch.testing.assert_close(filters.norm(dim=-1), torch.ones(filters.shape[:2]), atol=1e-3, rtol=0)
    for method in ("fastkv", "snapkv", "asl", "qfilters"):
        plan = kvsieve.plan(method, profile=name)
        assert plan.profile == shape
        if plan.propagate is not None:
            assert 0 <= plan.propagate.source(shape.layers) < shape.layers - 1


@pytest.mark.parametrize("name", shipped_profiles())
def test_methods_that_are_newer_than_a_profile_take_its_pooling(name):
    profile = load_profile(name)
    pooled = {key: profile.parameters["snapkv"][key] for key in ("window", "kernel", "pooling")}
    takers = [info for info in map(kvsieve.method_info, kvsieve.list_methods()) if info.derive is pooling]
    takers = [info for info in takers if pooled.keys() <= info.parameters.keys()]
    assert {"criticaladakv", "mixed", "obcache"} <= {info.name for info in takers}
    for info in takers:
        filled = kvsieve.plan(info.name).for_model(profile.fingerprint).filled.values
        assert pooled.items() <= filled.items() or info.name in profile.parameters, info.name
        given = all_parameters(info.name, {"profile": name})
        assert pooled.items() <= given.items() or info.name in profile.parameters, info.name
