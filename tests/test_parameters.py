"""A parameter of another kind than its annotation is a PlanError, named alike by `plan` and by a role's class."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Literal

import numpy
import pytest

import kvsieve
from kvsieve import methods
from kvsieve.cli.specs import chosen_spec, compared_specs
from kvsieve.errors import KvsieveError, PlanError
from kvsieve.planning.budget import Budget
from kvsieve.planning.parameters import MOST, Checked, check_kinds
from kvsieve.planning.registry import method_info

NAN, INF = float("nan"), float("inf")
BAD = {
    ("adakv", "alpha"): ("0.5", None, [0.5], NAN, INF, True),
    ("asl", "tau"): ("low", None, NAN, {}),
    ("asl", "observed"): (8.0, "8", None),
    ("cake", "tau1"): ("x", None, NAN, INF, 10**400),
    ("cake", "gamma"): ("x", NAN),
    ("dynamickv", "most"): ("5", INF, ()),
    ("h2o", "recent"): ("x", None, NAN),
    ("sagekv", "recent"): ([], "half"),
    ("pyramidinfer", "rate"): ("x", None, [1]),
    ("pyramidinfer", "distance_weight"): ("x", INF),
    ("squeezeattention", "p"): ("x", None, NAN),
    ("zigzagkv", "target"): ("x", None, NAN),
    ("zigzagkv", "layer_floor"): ("x", {}),
    ("snapkv", "kernel"): ("x", 7.0, True, None, 5001, MOST + 2, 10**40 + 1),
    ("snapkv", "window"): ("8", 8.5, NAN, 10**400),
    ("snapkv", "pooling"): ("mean", 3, None, ["avg"]),
    ("snapkv", "per_query_head"): (1, "yes", None),
    ("snapkv", "every"): ("x", 0.5, True, 0),
    ("snapkv", "skip_layers"): (1.5, "a/b", [0.5], -1),
    ("snapkv", "budget"): ([], None, {}, NAN, INF, "nan%", "1e3", "", 10**40, "9" * 5000, True),
    ("snapkv", "floor"): ("x", {}, [], "", False, 1.5, -1, NAN),
    ("fastkv", "tsp_rate"): ([], "many", 0),
    ("fastkv", "tsp_layer"): ("14", 1.5),
    ("lookahead", "draft"): ([], "x"),
    ("lookahead", "lookahead"): (10**9, "x"),
    ("expectedattention", "n_future"): (10**9, 0.5),
    ("triattention", "n_future"): (0, 10**9, 0.5),
    ("triattention", "profile"): (5, [], "no such file"),
    ("kvzip", "repeat_ids"): ("x", [1.5], 5),
    ("per-layer", "shares"): (5, "x", [NAN], (10**400, 1), ()),
    ("chunkkv", "base"): (5, None, "nothing", "full", "chunkkv"),
    ("duoattention", "profile"): (5, [], "no such file", "a\0b", "~nouser/profile.json"),
    ("quest", "newest"): (1, "x"),
}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("adakv:beta=14", "AdaKV: beta=14 has no effect with pyramid=False; leave it out"),
        ("criticaladakv:beta=14", "criticaladakv: beta=14 has no effect with pyramid=False"),
        ("scope:interval=5", "Scope: interval=5 has no effect with strategy='slide'"),
        ("scope:strategy=adaptive:answer=512", "no effect with strategy='adaptive'"),
        ("scope:strategy=discontinuous:answer=50%", "no effect with strategy='discontinuous'"),
        ("kvcrush:seed=7", "KVCrush: seed=7 has no effect with anchor='alternating'"),
        ("kvcrush:representatives=0", "KVCrush: representatives=0 keeps what base keeps alone"),
        ("adakv:rule=kvpress:normalize=false", "AdaKV: normalize=False has no effect with rule='kvpress'"),
        ("attentionmatching:values=false:ridge=0.1", "AttentionMatching: ridge=0.1 has no effect with values=False"),
        ("compactor:parts=leverage:chunk_length=8", "Compactor: chunk_length=8 has no effect with parts='leverage'"),
        ("compactor:parts=attention:sketch=8", "Compactor: sketch=8 has no effect with parts='attention'"),
        ("compactor:parts=leverage:blending=1", "Compactor: blending=1 has no effect with parts='leverage'"),
        ("compactor:parts=attention:blending=0.5", "Compactor: blending=0.5 has no effect with parts='attention'"),
        ("k8v4:rotate_values=true:group=32", "K8V4: group=32 has no effect with rotate_values=True"),
        ("pyramidinfer:recent=0:distance_weight=2", "PyramidInfer: distance_weight=2 has no effect with recent=0"),
    ],
)
def test_a_parameter_without_effect_is_refused(spec, message):
    ((name, given),) = compared_specs(spec, None)
    with pytest.raises(PlanError, match=message):
        kvsieve.plan(name, **given)


POOLED = [name for name in kvsieve.list_methods() if {"kernel", "pooling"} <= method_info(name).parameters.keys()]


@pytest.mark.parametrize("method", POOLED)
def test_a_kind_of_pooling_is_refused_where_nothing_is_pooled(method):
    info = method_info(method)
    default, other = sorted(("avg", "max"), key=lambda kind: kind != info.parameters["pooling"])
    assert kvsieve.plan(method, **{**info.example, "kernel": 1, "pooling": default})
    with pytest.raises(PlanError, match=f"{method}: pooling='{other}' has no effect with kernel=1; leave it out"):
        kvsieve.plan(method, **{**info.example, "kernel": 1, "pooling": other})


@pytest.mark.parametrize(
    "spec",
    [
        "adakv:beta=14:pyramid=true",
        "adakv:beta=20",
        "scope:strategy=adaptive:interval=5:recent=2000",
        "kvcrush:seed=7:anchor=random",
        "compactor:parts=leverage:sketch=8",
        "compactor:parts=attention:chunk_length=8",
        "attentionmatching:values=false:biases=false",
    ],
)
def test_a_parameter_with_effect_or_by_default_is_taken(spec):
    ((name, given),) = compared_specs(spec, None)
    assert kvsieve.plan(name, **given).evict is not None


@pytest.mark.parametrize(("method", "name"), BAD, ids="-".join)
def test_a_parameter_of_another_kind_is_refused_and_named(method, name):
    for value in BAD[method, name]:
        with pytest.raises(PlanError) as error:
            kvsieve.plan(method, **{name: value})
        said = str(error.value)
        assert name in said.lower() and len(said) < 1000, f"{value!r}: {said}"


@pytest.mark.parametrize("method", kvsieve.list_methods())
def test_every_parameter_of_every_method_is_named_where_it_is_refused(method):
    """By kvsieve's own errors, whichever of its places refuses it."""
    info = method_info(method)
    for name in info.parameters:
        refused = 0
        for value in (object(), [NAN], NAN, "?", -1.5, numpy.float32(0.25)):
            try:
                kvsieve.plan(method, **{**info.example, name: value})
            except KvsieveError as error:
                said = str(error).lower()
                # Roles have the last word of a few names: TSP's `layer` is fastkv's `tsp_layer`.
                assert any(part in said for part in name.split("_")) and len(said) < 1000, f"{name}={value!r}: {said}"
                refused += 1
        assert refused >= 4, name


@pytest.mark.parametrize(
    ("method", "role", "name", "value"),
    [
        ("snapkv", methods.SnapKV, "kernel", "x"),
        ("snapkv", methods.SnapKV, "window", NAN),
        ("snapkv", methods.SnapKV, "pooling", "mean"),
        ("h2o", methods.H2O, "recent", "x"),
        ("cake", methods.CAKE, "tau1", "x"),
        ("quest", methods.Quest, "page", 2.5),
        ("lagkv", methods.LagKV, "lag", "x"),
        ("gemfilter", methods.GemFilter, "keep_last", None),
        ("pyramidinfer", methods.PyramidInfer, "rate", "x"),
        ("finch", methods.Finch, "chunk_length", 0.5),
        ("kvzip", methods.KVzip, "prefix", "x"),
    ],
)
def test_a_role_made_by_hand_says_the_same(method, role, name, value):
    needed = {each.name for each in dataclasses.fields(role) if each.default is dataclasses.MISSING}
    given = {"budget": 0.5, "question_tokens": 3}
    with pytest.raises(PlanError) as by_hand:
        role(**{each: given[each] for each in needed}, **{name: value})
    with pytest.raises(PlanError) as by_name:
        kvsieve.plan(method, **{**method_info(method).example, name: value})
    assert str(by_hand.value).partition(": ")[2] == str(by_name.value).partition(": ")[2]
    assert str(by_hand.value).startswith(f"{role.__name__}: {name} must be ")


def test_fields_that_are_read_from_text_stay_so():
    made = methods.SnapKV(budget="20%", skip_layers="0/-1")
    assert made == methods.SnapKV(budget=Budget(ratio=0.2), skip_layers=(0, -1))
    assert methods.PerLayer(shares="2/1").shares == (2.0, 1.0)
    assert kvsieve.plan("h2o", recent=1).evict.recent == 1
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), dataclasses.replace(made)):
        assert copied == made
    with pytest.raises(PlanError, match="kernel"):
        dataclasses.replace(made, kernel="x")


@pytest.mark.parametrize(
    "make",
    [
        lambda: kvsieve.plan("snapkv:kernel=7:kernel=9"),
        lambda: kvsieve.plan("fastkv:tsp-rate=0.2;tsp_rate=0.3"),
        lambda: kvsieve.plan("snapkv", codec="kivi:bits=4:bits=2"),
        lambda: kvsieve.plan("snapkv", merge="mean:sinks=1:sinks=2"),
        lambda: compared_specs("full,snapkv:kernel=7:kernel=9", None),
        lambda: chosen_spec("snapkv", None, ["kernel=7", "kernel=9"]),
    ],
)
def test_a_parameter_that_is_given_twice_is_refused(make):
    with pytest.raises(PlanError, match=r"(kernel|tsp_rate|bits|sinks) is given twice, as .*; leave one out"):
        make()


def test_codecs_and_prefills_as_text_take_what_plans_of_them_take():
    for text in ("compactattention:paper=true", "compactattention:paper=false:block=64"):
        assert kvsieve.plan("snapkv", prefill=text).prefill == kvsieve.plan(text).prefill
    with pytest.raises(PlanError, match="xattention has no parameter 'codec'"):
        kvsieve.plan("snapkv", prefill="xattention:codec=int8")


@pytest.mark.parametrize(
    "method", [name for name in kvsieve.list_methods() if "newest" in method_info(name).parameters]
)
def test_newest_false_is_honoured_or_refused(method):
    if isinstance(method_info(method).parameters["newest"], bool):
        try:
            plan = kvsieve.plan(method, newest=False)
        except PlanError as error:
            assert method in ("clusterkv", "infllm") and "newest=False would do nothing; leave it out" in str(error)
        else:
            assert plan.read.newest is False and method not in ("clusterkv", "infllm")


def test_what_a_method_cannot_do_without_is_asked_for():
    with pytest.raises(PlanError, match=r"per-layer needs shares=, e.g. plan\('per-layer', shares='1'\)"):
        kvsieve.plan("per-layer")
    with pytest.raises(PlanError, match="expected a method's name"):
        kvsieve.plan(5)


def test_a_share_that_is_dropped_is_told_from_one_that_is_kept():
    with pytest.raises(PlanError, match="compression_ratio=0.4 is budget='60%'"):
        kvsieve.plan("snapkv", compression_ratio=0.4)
    with pytest.raises(PlanError, match="give budget="):
        kvsieve.plan("knorm", compression_ratio="x")
    with pytest.raises(PlanError, match="pyramidinfer has no parameter 'compression_rate'"):
        kvsieve.plan("pyramidinfer", compression_rate=0.4)


@pytest.mark.parametrize(
    "data",
    [
        5,
        {"evict": {"type": "SnapKV", "budget": "20%", "kernle": 7}},
        {"evict": {"type": "SnapKV"}},
        {"evict": {"type": "SnapKV", "budget": "20%", "kernel": "7"}},
        {"evict": {"type": 5}},
        {"evict": "SnapKV"},
        {"profile": {"layers": 4}},
        {"profile": 5},
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_read_is_a_plan_error(data):
    with pytest.raises(PlanError):
        kvsieve.Plan.from_dict(data)


def test_annotations_are_what_is_checked():
    def make(number: float, choice: Literal["a", 2], either: int | None, other: list[int], nothing=None):
        """A method of somebody else's."""

    for fine in ({"number": 3}, {"choice": 2}, {"either": None}, {"other": 5}, {"nothing": object()}):
        check_kinds("it", make, fine)
    for bad, words in (
        ({"number": "3"}, "a number, got '3'"),
        ({"choice": "b"}, "one of 'a', 2, got 'b'"),
        ({"choice": 2.0}, "one of 'a', 2, got 2.0"),
        ({"either": 1.0}, "a whole number or None, got 1.0"),
        ({"either": MOST + 1}, f"a whole number or None of at most {MOST}"),
    ):
        with pytest.raises(PlanError, match=f"^it: {next(iter(bad))} must be {words}"):
            check_kinds("it", make, bad)


def test_a_class_that_is_no_dataclass_of_ours_is_checked_as_well():
    @dataclasses.dataclass(frozen=True)
    class Mine(Checked):
        size: int = 3

    assert Mine(size=4).size == 4
    with pytest.raises(PlanError, match="Mine: size must be a whole number, got 'x'"):
        Mine(size="x")
