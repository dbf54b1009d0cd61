"""The contract of roles: it is forwarded whole, refused where it is misread, and nobody guesses at it."""

from __future__ import annotations

import ast
import dataclasses
import types
from dataclasses import dataclass, field

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.methods import AdaKV, ExpectedAttention, Finch, KNorm, KVzip, RocketEviction, SnapKV, SqueezeAttention
from kvsieve.planning import roles
from kvsieve.planning.budget import Budget
from kvsieve.planning.roles import (
    ChunkedEvictor,
    DelegatingEvictor,
    Evictor,
    Propagator,
    Reader,
    Traits,
    role_class,
    role_name,
)
from source_tree import imports, modules
from tiny_models import build

ROLES = (Evictor, roles.ProbingEvictor, ChunkedEvictor, Propagator, Reader)
EVICTOR = {name: value for name, value in vars(Evictor).items() if not name.startswith("_")}
CONTRACT = {name for kind in ROLES for name in vars(kind) if not name.startswith("_")}
CONTRACT |= {
    "TRAITS",
    "traits",
    "budget",
    "question_tokens",
    "chunk_length",
    *(f.name for f in dataclasses.fields(Traits)),
}


@dataclass(frozen=True)
class Recording(Evictor, needs=("rotary",), heads="own", ragged=True, takes_quotas=True):
    """Answers with what it was asked."""

    budget: Budget = Budget(tokens=77)
    window: int = 3
    minimum: int = 5
    when: kvsieve.types.When = kvsieve.types.When(steps=9)
    skip_layers: tuple = (1, -1)
    lacks_tokenizer: bool = True
    grows: bool = True
    keeps_prompt: bool = True
    asked: list = field(default_factory=list, compare=False)

    def for_tokenizer(self, tokenizer):
        return dataclasses.replace(self, window=tokenizer, lacks_tokenizer=False)

    def _answer(self, *given):
        self.asked.append(given)
        return given

    check = rhythm = why_not_joined = requested = entries = answer_entries = stored_heads = observe = select = (
        is_noop
    ) = _answer


GIVEN = {
    "check": (4,),
    "rhythm": (50,),
    "why_not_joined": (70,),
    "requested": (50, 7),
    "entries": (60, 8),
    "answer_entries": (5, 20, 60),
    "stored_heads": (2, 6),
    "observe": ("a context",),
    "select": ("a context", (3,)),
    "is_noop": (1, 4, (9,), {}),
}


def test_whoever_holds_an_evictor_forwards_its_whole_contract():
    base = Recording()
    held = DelegatingEvictor(base=base)
    assert EVICTOR.keys() | {"budget", "traits", "TRAITS"} <= vars(DelegatingEvictor).keys()
    # Each of it is here: as a value, with arguments of its own, or by itself below.
    methods = {name for name, value in EVICTOR.items() if isinstance(value, types.FunctionType)}
    assert methods == {*GIVEN, "for_tokenizer"}
    for name in {"budget", *EVICTOR.keys() - methods - {"TRAITS", "traits"}}:
        assert getattr(held, name) == getattr(base, name) != getattr(Evictor, name, None), name
    for name, given in GIVEN.items():
        answer = getattr(held, name)(*given)
        assert base.asked.pop() == given and not base.asked, name
        assert answer == (None if name in ("check", "observe") else given), name
    again = held.for_tokenizer(21)
    assert type(again) is DelegatingEvictor and again.window == 21 and not again.lacks_tokenizer


def test_whoever_holds_an_evictor_has_the_traits_of_both():
    class Own(DelegatingEvictor, needs=("output_weight",), heads="own", is_view=True): ...

    class All(DelegatingEvictor, heads="all"): ...

    class Silent(Own): ...

    base = Recording()
    both = Traits(needs=("output_weight", "rotary"), heads="own", ragged=True, is_view=True, takes_quotas=True)
    assert Own(base=base).traits == both and base.traits.needs == ("rotary",)
    # Whose heads are looked at is not inherited, and the wider of both counts.
    assert Silent(base=base).traits == dataclasses.replace(both, heads=None)
    assert All(base=base).traits.heads == "all" and Own(base=All(base=base)).traits.heads == "all"
    assert not Own(base=KNorm(budget=3)).traits.ragged


def test_traits_that_depend_on_parameters():
    assert KVzip(budget=9).traits.ragged and not KVzip(budget=9, uniform=True).traits.ragged
    assert [KVzip(budget=9, uniform=each).traits.heads for each in (False, True)] == ["all", "own"]
    assert AdaKV(base=SnapKV(budget=40)).traits.heads == "all"
    assert AdaKV(base=kvsieve.methods.TOVA(budget=40)).traits.heads is None
    needs = SqueezeAttention(base=ExpectedAttention(budget=40)).traits.needs
    assert needs == ("hidden", "output_weight", "rotary", "uncapped")


@pytest.mark.parametrize("base", [KVzip(budget=9), Finch(budget=9, question_tokens=3)], ids=["probing", "chunked"])
def test_what_needs_passes_of_its_own_is_not_held(base):
    """Whoever holds it would be neither, so that the passes would never come."""
    with pytest.raises(PlanError, match=f"DelegatingEvictor: {type(base).__name__} needs passes of its own"):
        DelegatingEvictor(base=base)
    with pytest.raises(PlanError, match="base must be an evictor, such as SnapKV.*got 'snapkv'"):
        DelegatingEvictor(base="snapkv")


def test_a_name_of_the_contract_is_of_its_kind():
    with pytest.raises(TypeError, match="Counted.entries is a value; in the contract of its role it is a method"):

        class Counted(KNorm):
            entries: int = 3

    with pytest.raises(TypeError, match="Bare.is_noop is a value"):

        class Bare(KNorm):
            is_noop: bool

    with pytest.raises(TypeError, match="Called.window is a method; in the contract of its role it is a value"):

        class Called(KNorm):
            def window(self):
                return 3

    with pytest.raises(TypeError, match="Undecided.window: a field of its role's contract needs a default"):

        class Undecided(Propagator):
            window: int

    with pytest.raises(TypeError, match="Loud: unknown trait 'loud'; known are fixed_counts, heads, is_view, needs"):

        class Loud(KNorm, loud=True): ...


def test_a_role_without_its_methods_is_not_made():
    class Nothing(Evictor): ...

    with pytest.raises(TypeError, match="abstract"):
        Nothing()


def test_what_only_looks_like_a_role_is_refused():
    class Alike:
        budget, window, minimum, when = Budget(tokens=3), 0, 1, kvsieve.types.END_OF_PROMPT

        def select(self, ctx, counts):
            return None

    with pytest.raises(
        PlanError, match=r"takes a Evictor, got .*or a class of your own that derives from kvsieve\.planning\.roles"
    ):
        kvsieve.Plan(evict=Alike())


def test_classes_are_found_by_the_name_that_files_use():
    assert role_name(SnapKV) == "SnapKV" and role_class("SnapKV") is SnapKV
    assert role_name(Recording) == f"{__name__}:Recording" and role_class(role_name(Recording)) is Recording
    # What a function makes has no name to find it by, and private ones are nobody's plan.
    for name in ("kvsieve.hf.prompt.probe_passes:_Watch", "os:system", f"{__name__}:Alike", "Nothing"):
        assert role_class(name) is None, name


def test_a_cascade_acts_on_tokens_under_fixed_shapes():
    """It cannot say when it would drop nothing, so passes stop for it, and the answer is that of eager passes."""
    model, ids = build("llama", dtype=torch.float64), torch.randint(2, 120, (1, 40))
    plan = kvsieve.plan("dynamickv", budget=20, window=1, every=4)
    out = []
    for decode in ("eager", "auto"):
        with kvsieve.attach(model, plan, decode=decode) as sieve:
            out.append(sieve.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0))
    assert torch.equal(out[0].sequences, out[1].sequences) and out[0].stats.kv_entries == out[1].stats.kv_entries
    assert plan.evict.is_noop(0, 4, (40,), {}) is False


def test_a_wrapper_keeps_the_split_of_rocketkvs_first_stage():
    base = RocketEviction(budget=32, window=4, kernel=5)
    held = kvsieve.methods.CriticalKV(base=base)
    assert held.entries(300, 20) == base.entries(300, 20) > 2 * base.budget.entries(300)
    assert held.requested(300, 20) == base.requested(300, 20) == base.entries(300, 20)


def nodes(kind):
    return [(name, node) for name, (_, tree) in modules().items() for node in ast.walk(tree) if isinstance(node, kind)]


def test_nobody_guesses_whether_a_role_has_something():
    found = []
    for module, node in nodes(ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr") and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value in CONTRACT:
                found.append(f"{module}:{node.lineno} {ast.unparse(node)}")
    assert found == []


HOLDING = {"evict", "evictor", "propagate", "propagator", "read", "reader", "inner", "base", "role"}


def test_nothing_that_holds_a_role_is_typed_any():
    found = []
    for module, node in nodes((ast.arg, ast.AnnAssign)):
        if not any(
            target.startswith(("kvsieve.planning.roles", "kvsieve.planning.plans"))
            for target in imports()[module] | {module}
        ):
            continue
        name = node.arg if isinstance(node, ast.arg) else node.target
        value = getattr(node, "value", None)
        name = name.id if isinstance(name, ast.Name) else name
        holds = name in HOLDING or (isinstance(value, ast.Attribute) and value.attr in HOLDING)
        if holds and node.annotation is not None and "Any" in ast.unparse(node.annotation).split(" | "):
            found.append(f"{module}:{node.lineno} {ast.unparse(node)}")
    assert found == []
