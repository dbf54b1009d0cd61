"""An evictor that holds another one forwards what that one offers, and keeps as much as that one would."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import kvsieve
from kvsieve import methods
from kvsieve.errors import PlanError
from kvsieve.methods import (
    CAKE,
    H2O,
    TSP,
    DefensiveKV,
    Finch,
    KNorm,
    KVzip,
    Lookahead,
    PerTurn,
    RocketEviction,
    SnapKV,
)
from kvsieve.methods.base import ScoredEvictor, Wrapper
from kvsieve.planning.roles import ChunkedEvictor, Evictor
from kvsieve.types import When
from tiny_models import build

MORE = {
    "PerLayer": {"shares": (1, 1, 1, 1)},
    "AdaKV": {"normalize": False},
    "HeadKV": {"heads": ((1.0, 0.5),) * 4},
    "LUKV": {"shares": (((0.3, 0.5), (0.4, 0.8)),) * 4},
    "UNComp": {"heads": ((1.0, 0.5),) * 4},
    "Threshold": {"threshold": -1e9, "recent": 1},
}


def holders():
    """Every class of kvsieve.methods that holds another evictor, and the register may make."""
    found, todo = {PerTurn}, [Wrapper]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if getattr(methods, kind.__name__, None) is kind:
            found.add(kind)
    return sorted(found, key=lambda kind: kind.__name__)


WRAPPERS = [kind for kind in holders() if issubclass(kind, Wrapper)]


def over(kind, base):
    return kind(base=base, **MORE.get(kind.__name__, {}))


@dataclass(frozen=True, kw_only=True)
class Offering(ScoredEvictor, heads="own", needs=("rotary",), takes_quotas=False):
    """Has all that an evictor may have."""

    window = 3
    minimum = 7

    def check(self, num_layers):
        raise PlanError(f"asked about {num_layers} layers")

    def requested(self, length, new_tokens=0):
        return length - new_tokens

    def entries(self, length, new_tokens=0):
        return length - 2 * new_tokens - 1

    def is_noop(self, layer_idx, num_layers, stored, state):
        return (layer_idx, num_layers, stored, state)

    def scores(self, ctx):
        return -ctx.index.double().expand(ctx.keys.shape[:3])


@dataclass(frozen=True, kw_only=True)
class Observing(Offering):
    when = When(observes=True, steps=9)

    def observe(self, ctx):
        ctx.append("observed")


def test_every_wrapper_is_found():
    assert len(holders()) == 18


# The budget of others is what they keep; this one's is a limit.
BUDGETED = [kind for kind in holders() if kind.__name__ != "Threshold"]


@pytest.mark.parametrize("kind", BUDGETED, ids=lambda kind: kind.__name__)
def test_what_the_base_offers_is_forwarded(kind):
    base = Offering(budget="30%", skip_layers=(1, -1), every=None if kind is PerTurn else 5)
    held = over(kind, base)
    assert isinstance(held, Evictor)
    for name in ("budget", "window", "minimum", "skip_layers"):
        assert getattr(held, name) == getattr(base, name), name
    assert held.traits.takes_quotas == base.traits.takes_quotas and held.traits.is_view == (kind is PerTurn)
    assert held.when.steps == base.when.steps and held.when.chunks == base.when.chunks
    assert set(base.traits.needs) <= set(held.traits.needs)
    assert [held.entries(length, 3) for length in (50, 90)] == [43, 83]
    assert held.requested(50, 3) == 47
    with pytest.raises(PlanError, match="asked about 4 layers"):
        held.check(4)
    # Of a base that keeps what it would keep by itself; others cannot tell by it.
    same = kind.__name__ in ("ChunkKV", "CriticalKV", "EntropyChunkKV", "KVCrush")
    if kind is not PerTurn:
        assert held.is_noop(2, 4, (9,), {}) == ((2, 4, (9,), {}) if same else False)
    plain = over(kind, KNorm(budget="30%"))
    assert not plain.is_noop(0, 4, (9,), {}) and plain.entries(50) == plain.requested(50) == 15
    if kind is not PerTurn:
        over(kind, KNorm(budget="30%")).base.check(4)


@pytest.mark.parametrize("kind", WRAPPERS, ids=lambda kind: kind.__name__)
def test_a_base_that_observes_is_shown_every_pass(kind):
    held, seen = over(kind, Observing(budget="30%")), []
    assert held.when.observes and held.when.steps == 9
    if kind.__name__ != "SqueezeAttention":
        held.observe(seen)
        assert seen == ["observed"]


@pytest.mark.parametrize("kind", BUDGETED, ids=lambda kind: kind.__name__)
def test_rocketkvs_first_stage_keeps_its_own_split(kind):
    """The average of heads and layers is what the first stage stores, not the budget of the second one's reads."""
    model, ids = build("llama", dtype=torch.float64), torch.randint(2, 120, (1, 300))
    base = RocketEviction(budget=32, window=4, kernel=5)
    for new in (0, 20):
        wanted = base.entries(300, new)
        assert wanted > 64
        with kvsieve.attach(model, kvsieve.Plan(evict=over(kind, base))) as sieve:
            if new:
                given = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
                result = sieve.generate(ids, **given)
                kept, cache = result.stats.kv_entries, result.cache
                assert result.stats.kv_asked == wanted
            else:
                cache = sieve.prefill(ids)
                kept = cache.entries()
        layers = list(cache.sieve_layers.values())
        if kind is PerTurn:
            assert [layer.view.slots.shape[-1] for layer in layers] == [wanted] * len(layers)
        else:
            assert sum(kept) == pytest.approx(wanted * len(layers), abs=len(layers))
            assert min(kept) >= base.window + 1


def test_the_window_of_rocketkvs_first_stage_stays_in_every_layer():
    base = RocketEviction(budget=16, window=32)
    assert base.minimum == 33 and base.least_budget == 16
    with pytest.raises(PlanError, match="at least 16 are needed"):
        RocketEviction(budget=15)


@dataclass(frozen=True, kw_only=True)
class Sounds(KNorm):
    """Has the attributes of an evictor that reads in chunks, and is none."""

    question_tokens: int = 3
    chunk_length: int = 8


def test_an_evictor_that_only_looks_like_a_chunked_one_is_none():
    evictor = Sounds(budget="50%")
    plan = kvsieve.Plan(evict=evictor)
    assert not isinstance(evictor, ChunkedEvictor) and not plan.shortens_prompt
    assert kvsieve.Plan(evict=Finch(budget="50%", question_tokens=3)).shortens_prompt
    assert plan.acts_once
    kvsieve.Plan(propagate=TSP(rate=0.5, layer=1), evict=evictor)
    model, ids = build("llama", dtype=torch.float64), torch.randint(2, 120, (1, 40))
    with kvsieve.attach(model, plan) as sieve:
        ours = sieve.prefill(ids)
        assert ours.conversation.short_prompt is None
    with kvsieve.attach(model, kvsieve.plan("knorm", budget="50%")) as sieve:
        plain = sieve.prefill(ids)
    for one, other in zip(ours.sieve_layers.values(), plain.sieve_layers.values(), strict=True):
        assert torch.equal(one.store.index, other.store.index)


@pytest.mark.parametrize(
    "base",
    [KVzip(budget="50%", uniform=True), Lookahead(budget="50%"), Finch(budget="50%", question_tokens=4)],
    ids=["kvzip", "lookahead", "finch"],
)
def test_a_view_of_what_needs_passes_of_its_own_is_refused(base):
    with pytest.raises(PlanError, match="needs passes of its own over the prompt, which a view has not"):
        PerTurn(base=base)


@pytest.mark.parametrize("base", [CAKE(), DefensiveKV(across_layers=True)], ids=["cascade", "across layers"])
def test_a_view_of_what_weighs_layers_is_refused(base):
    with pytest.raises(PlanError, match=f"PerTurn: {type(base).__name__} weighs layers against each other"):
        PerTurn(base=base)


def test_bases_that_do_more_than_rank_are_refused():
    for kind in WRAPPERS:
        for base in (H2O(budget=20), Lookahead(budget="20%"), RocketEviction):
            with pytest.raises(PlanError, match="base must be an evictor that ranks entries by scores alone"):
                over(kind, base)
        assert over(kind, SnapKV(budget=0.5)).budget == kvsieve.Budget(ratio=0.5)
