"""A class that derives from a method's class takes what comes with the model as that method does."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import pytest
import torch

import kvsieve
from kvsieve.cli.specs import compared_specs, make_run
from kvsieve.errors import KvsieveWarning
from kvsieve.lab.eval.cells import on_model, settings, unlike_settings
from kvsieve.lab.eval.results import Results
from kvsieve.lab.eval.tables import settings_table
from kvsieve.methods import SnapKV
from kvsieve.planning import loading, registry
from kvsieve.planning.profiles import Fingerprint, Profile, keep_profile, load_profile
from kvsieve.planning.settled import settled_role
from tiny import tiny_prompt
from tiny_models import build
from toy_words import WORDS, word_tokenizer

ABOUT = {"title": "", "paper": "", "phase": "end of prompt", "query_aware": True, "budget": "20%"}
DEMO = load_profile("smollm2-135m-instruct").fingerprint
UNKNOWN = dataclasses.replace(DEMO, layers=24, name="unknown")
LLAMA = Fingerprint("llama", 32, 32, 8, 128, 4096, 128256)


@dataclass(frozen=True, kw_only=True)
class Mine(SnapKV, heads="own", query_aware=True):
    """SnapKV under another name."""


@dataclass(frozen=True, kw_only=True)
class Narrow(Mine, heads="own", query_aware=True):
    """SnapKV with a kernel of its own."""

    kernel: int = 3
    power: int = 2


@dataclass(frozen=True, kw_only=True)
class Narrower(Narrow, heads="own", query_aware=True):
    """A class of a class."""


@pytest.fixture
def methods(monkeypatch):
    """Register them for one test."""
    kvsieve.list_methods()
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    monkeypatch.setattr(loading, "REGISTERED", dict(loading.REGISTERED))
    for name, kind in (("mine", Mine), ("narrow", Narrow), ("narrower", Narrower)):
        kvsieve.register_method(name, **ABOUT)(kind)


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model with a profile, whose window and kernel are not those of the class."""
    monkeypatch.setenv("KVSIEVE_HOME", str(tmp_path))
    model = build("llama", dtype=torch.float64)
    heads = tuple(tuple(float(i == j) for j in range(2)) for i in range(4))
    parameters = {"snapkv": {"window": 5, "kernel": 9, "pooling": "max"}}
    keep_profile(Profile(Fingerprint.of(model, "tiny"), parameters=parameters, heads=heads))
    return model


def test_a_subclass_that_changes_nothing_keeps_and_answers_what_snapkv_does(methods, model):
    ids = tiny_prompt(1, 90, seed=1)
    found = []
    for name in ("snapkv", "mine"):
        with kvsieve.attach(model, kvsieve.plan(name, budget=40)) as sieve:
            result = sieve.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
            kept = sieve.kept(result.cache, result.sequences)
            assert "window=5, kernel=9, pooling=max from your profile tiny-" in result.stats.notes[0]
        found.append((result.sequences.tolist(), result.stats.kv_entries, str(kept).replace(name, "")))
    assert found[0] == found[1]


def test_a_subclass_is_compared_fairly_by_name_and_as_an_object(methods, model):
    context = " ".join(WORDS[3 + (7 * i) % 110] for i in range(80))
    rows = [{"context": context, "question": f"w{i} w{i + 1}", "answer": "w1"} for i in range(3)]
    evaluator = kvsieve.Evaluator(model, word_tokenizer())
    table = evaluator.compare(rows, ["snapkv:budget=30%", "mine:budget=30%", Mine(budget="30%")])
    given = {"full", "snapkv window=5 kernel=9 pooling=max", "mine window=5 kernel=9 pooling=max",
             "Mine window=5 kernel=9 pooling=max"}  # fmt: skip
    assert {row["label"] for row in table} == given and len(table) == 12
    outcomes = {row["label"]: [] for row in table}
    for row in table:
        outcomes[row["label"]].append((row["answers"], row["kv_entries"], row["kl"], row["score"]))
    full, snapkv, *mine = outcomes.values()
    assert mine == [snapkv, snapkv] and full != snapkv
    with pytest.warns(KvsieveWarning, match="unlike settings: window is 5 in snapkv and 32 in Mine; kernel is 9 in sn"):
        table = evaluator.compare(rows, ["snapkv:budget=30%", kvsieve.Plan(evict=Mine(budget="30%"))], samples=1)
    assert [row["label"] for row in table] == ["full", "snapkv window=5 kernel=9 pooling=max", "Mine"]


def test_fields_that_a_class_declares_anew_keep_its_defaults(methods, model):
    for name in ("narrow", "narrower"):
        evict = kvsieve.plan(name).for_model(model).evict
        assert (evict.window, evict.kernel, evict.pooling, evict.power) == (5, 3, "max", 2), name
        assert kvsieve.plan(name, window=7).for_model(model).evict.window == 7
    role = settled_role(Narrow(budget=40, power=3), model)
    assert role.evict == Narrow(budget=40, power=3, window=5, pooling="max")
    assert role.filled.values == {"window": 5, "pooling": "max"}
    own = settled_role(SnapKV(budget=40, window=6), model).evict
    assert own == SnapKV(budget=40, window=6, kernel=9, pooling="max")


def test_every_source_of_parameters_is_the_parents(methods, model):
    mine = kvsieve.method_info("mine")
    assert mine.parent == "snapkv" and mine.adapts and mine.parameters["paper"] is False
    assert kvsieve.plan("mine", paper=True).evict == Mine(budget="20%", window=32, kernel=7, pooling="max")
    assert kvsieve.plan("narrow", paper=True).evict == Narrow(budget="20%", window=32, pooling="max")
    for shape in (UNKNOWN, LLAMA, DEMO):
        evict = kvsieve.plan("snapkv").for_model(shape).evict
        assert kvsieve.plan("mine").for_model(shape).evict == Mine(**vars(evict))
    shipped = kvsieve.plan("mine", profile="smollm2-135m-instruct")
    assert (shipped.evict.window, shipped.evict.kernel, shipped.profile) == (16, 21, DEMO)
    own = Profile(Fingerprint.of(model, "tiny"), parameters={"mine": {"kernel": 11}, "snapkv": {"kernel": 13}})
    assert kvsieve.plan("mine", profile=own).evict.kernel == 11, "what a profile says of the method itself comes first"


def test_a_method_that_says_itself_what_comes_with_the_model_has_no_parent(methods):
    @kvsieve.register_method("says", **ABOUT, derive=lambda model, digits: {"window": 9})
    @dataclass(frozen=True, kw_only=True)
    class Says(SnapKV, heads="own", query_aware=True):
        """Nine."""

    evict = kvsieve.plan("says").for_model(UNKNOWN).evict
    assert kvsieve.method_info("says").parent is None and (evict.window, evict.kernel) == (9, 7)
    ours = [kvsieve.method_info(name) for name in kvsieve.list_methods()]
    assert [info.name for info in ours if info.parent] == ["mine", "narrow", "narrower"]


@pytest.mark.parametrize(
    ("specs", "found"),
    [
        (["snapkv", "fastkv", "rocketkv", "mine"], []),
        (["snapkv", "narrow"], ["kernel is 21 in snapkv and 3 in narrow"]),
        (["snapkv", "narrow:kernel=21"], []),
        (["snapkv:kernel=7", "snapkv:kernel=21", "mine:kernel=7", "mine:kernel=21"], []),
        (["snapkv:paper=true", "mine"], [
            "window is 32 in snapkv and 16 in mine",
            "kernel is 7 in snapkv and 21 in mine",
            "pooling is max in snapkv and avg in mine",
        ]),
        (["snapkv:kernel=7", "fastkv"], ["kernel is 7 in snapkv and 21 in fastkv"]),
        (["chunkkv", "narrow"], ["kernel is 21 in chunkkv and 3 in narrow"]),
        (["knorm", "narrow"], []),
    ],
)  # fmt: skip
def test_unlike_settings_are_named(methods, specs, found):
    parsed = [kvsieve.planning.specs.split_specs(each)[0] for each in specs]
    assert unlike_settings(on_model(settings(parsed, ["10%", "20%"]), DEMO)) == found


def test_the_report_marks_settings_unlike_the_baselines(methods, tmp_path):
    def table(*chosen, baseline=None):
        cells = on_model(settings(chosen, ["10%"]), DEMO)
        run = {"settings": [json.loads(json.dumps(each.described())) for each in cells]}
        return settings_table(Results(tmp_path, run, [], []), baseline)

    chosen = [("snapkv", {}), ("narrow", {}), ("snapkv", {"paper": True}), ("chunkkv", {}), ("knorm", {})]
    (found,) = table(*chosen)
    assert found.headers == ["method", "paper", "window", "kernel", "pooling"] and found.note.endswith("kernel=21.")
    assert [[entry.text for entry in row] for row in found.rows] == [
        ["snapkv window=16 kernel=21", "no", "16", "21", "avg"],
        ["narrow window=16", "no", "16", "3", "avg"],
        ["snapkv pooling=max", "yes", "32", "7", "max"],
        ["chunkkv base.window=16 base.kernel=21", "no", "16", "21", "avg"],
    ]
    assert [[entry.best for entry in row[1:]] for row in found.rows] == [
        [False] * 4,
        [False, False, True, False],
        [True] * 4,
        [False] * 4,
    ]
    (found,) = table(*chosen, baseline="narrow window=16")
    assert [entry.best for entry in found.rows[0]] == [False, False, False, True, False]
    assert table(("knorm", {})) == []


def test_compared_methods_of_the_command_line_take_the_parents_profile(methods):
    specs = compared_specs("mine,narrow:window=7,knorm,full", "20%", "smollm2-135m-instruct")
    assert specs == [
        ("mine", {"budget": "20%", "profile": "smollm2-135m-instruct"}),
        ("narrow", {"window": 7, "budget": "20%", "profile": "smollm2-135m-instruct"}),
        ("knorm", {"budget": "20%"}),
        ("full", {}),
    ]
    evict = make_run("mine", **specs[0][1]).plan.evict
    assert (evict.window, evict.kernel) == (16, 21)
