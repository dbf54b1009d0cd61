"""Shares keep at least a floor of entries: short prompts are full KV under every method, longer ones are reduced."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.planning.budget import Budget
from kvsieve.planning.named import plan_without_floor
from kvsieve.planning.turns import render, token_ids
from paths import COMMANDS, SERVED, Ask, answer, plain, words
from small import plan_of, stored
from tiny import greedy, tiny_model

NAMES = kvsieve.list_methods()
TAKE_SHARES = [name for name in NAMES if kvsieve.method_info(name).takes_floor]
OPTIONS = greedy()
SHORT, LONG = 30, 160


def model():
    return tiny_model(filled=True)


def prompts(*lengths, seed=0):
    """Ids and mask of rows of so many tokens, padded on the left."""
    make, most = torch.Generator().manual_seed(seed), max(lengths)
    ids, mask = torch.zeros(2, len(lengths), most, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, most - length :] = torch.randint(3, 90, (length,), generator=make)
        mask[row, most - length :] = 1
    return ids, mask


def answers(plan, ids, mask, new_tokens=8, **how):
    with kvsieve.attach(model(), plan) as sieve:
        return sieve.generate(ids, mask, max_new_tokens=new_tokens, **how, **OPTIONS)


@functools.cache
def full(seed, new_tokens, *lengths):
    return answers(kvsieve.Plan(), *prompts(*lengths, seed=seed), new_tokens).sequences


def named(name, floor):
    """A plan that drops much of a short prompt where it has no floor."""
    shares = {"budget": "20%", "keep": "20%", "tsp_rate": 0.2, "early_rate": 0.3, "rate": 0.3, "most": 2.0}
    if name in ("pyramidinfer", "specprefill"):
        # Their tokens alone, without SnapKV besides.
        shares["budget"] = None
    if name == "uncomp":
        # Of its stages, which it has by request only.
        del shares["rate"]
    return plan_of(name, model(), floor=floor, **shares)


@pytest.mark.parametrize("name", TAKE_SHARES)
def test_a_prompt_below_the_floor_is_full_kv(name):
    plan = named(name, 64)
    assert plan.floor == 64
    for how in ({}, {"chunk": 16}):
        result = answers(plan, *prompts(SHORT), new_tokens=4, **how)
        assert torch.equal(result.sequences, full(0, 4, SHORT))
        assert set(result.stats.kv_entries) == {SHORT}
        assert f"all {SHORT} tokens kept: below the floor of 64" in result.stats.notes
        assert sum("tokens kept" in note or "nothing was" in note for note in result.stats.notes) == 1


@pytest.mark.parametrize("name", TAKE_SHARES)
def test_without_the_floor_it_is_reduced(name):
    """Otherwise the test above could not fail."""
    stats = answers(named(name, 0), *prompts(60), new_tokens=2).stats
    assert stats.applied
    assert not any("floor" in note for note in stats.notes)


@pytest.mark.parametrize("name", ["snapkv", "adakv", "lagkv", "kvzip", "perturn", "rocketkv", "fastkv", "gemfilter"])
def test_forty_short_questions_in_a_batch_are_full_kv(name):
    lengths = [5 + 13 * number % 50 for number in range(40)]
    result = answers(named(name, 512), *prompts(*lengths), new_tokens=4)
    assert torch.equal(result.sequences, full(0, 4, *lengths))


@pytest.mark.parametrize("name", TAKE_SHARES)
def test_a_short_row_beside_a_long_one_is_full_kv(name):
    ids, mask = prompts(SHORT, LONG)
    with kvsieve.attach(model(), named(name, 40)) as sieve:
        result = sieve.generate(ids, mask, max_new_tokens=4, **OPTIONS)
    assert torch.equal(result.sequences[0], full(0, 4, SHORT, LONG)[0])


DECODING = [(name, 3) for name in TAKE_SHARES if "every" in kvsieve.method_info(name).parameters]
DECODING = [each for each in DECODING if each[0] not in ("lookahead", "mixed")]


@pytest.mark.parametrize("name, every", [*((name, None) for name in TAKE_SHARES), *DECODING])
def test_an_answer_is_full_kvs_until_the_floor(name, every):
    plan = named(name, 40) if every is None else plan_of(name, model(), floor=40, budget="20%", every=every)
    result = answers(plan, *prompts(32), new_tokens=8)
    assert torch.equal(result.sequences, full(0, 8, 32))


@pytest.mark.parametrize("name", ["rocketkv", "rocketkv-mt"])
def test_rocketkvs_split_for_a_long_answer_leaves_the_prompt_whole(name):
    """Its budget counts tokens to come as well, which are more here than the floor has room for."""
    result = answers(named(name, 64), *prompts(60), new_tokens=20)
    assert set(result.stats.kv_entries) == {60}
    assert set(answers(named(name, 0), *prompts(60), new_tokens=20).stats.kv_entries) != {60} or name == "rocketkv-mt"


def two_turns(plan):
    ids, mask = prompts(40)
    with kvsieve.attach(model(), plan) as sieve:
        first = sieve.generate(ids[:, :24], mask[:, :24], max_new_tokens=3, **OPTIONS)
        more = torch.cat([first.sequences, ids[:, 24:]], 1)
        return sieve.generate(more, cache=first.cache, max_new_tokens=5, **OPTIONS).sequences


@functools.cache
def full_turns():
    return two_turns(kvsieve.Plan())


@pytest.mark.parametrize("name", TAKE_SHARES)
def test_two_short_turns_are_full_kv(name):
    assert torch.equal(two_turns(named(name, 64)), full_turns())


def test_a_floor_that_is_more_than_the_share_is_the_number():
    """Of evictors that keep one number in every layer, what is kept is what the number of entries keeps."""
    for name in TAKE_SHARES:
        plan = plan_without_floor(name, **kvsieve.method_info(name).example)
        if plan.roles != ("evict",) or name in (
            "perturn",
            "kvzip",
            "finch",
            "duoattention",
            "qfilters",
            "lagkv",
            "corm",
            "scope",
        ):
            continue
        floored, number = (
            answers(plan_of(name, model(), **given), *prompts(LONG), new_tokens=4)
            for given in ({"budget": "20%", "floor": 70}, {"budget": 70})
        )
        assert stored(floored.cache) == stored(number.cache), name
        kept = [len(head) for layer in stored(floored.cache)[0] for head in layer]
        if name in ("fastgen", "simlayerkv"):
            # Their budget is what some heads or layers keep.
            continue
        assert sum(kept) / len(kept) == 70 + (0 if plan.evict.when.steps == 1 else 3), name


@pytest.mark.parametrize("name", TAKE_SHARES)
def test_a_share_of_more_than_the_floor_is_as_before(name):
    with_floor, without = (answers(named(name, floor), *prompts(LONG), new_tokens=4) for floor in (20, 0))
    assert torch.equal(with_floor.sequences, without.sequences)
    assert stored(with_floor.cache) == stored(without.cache)


@pytest.mark.parametrize("chunk", [None, 40])
def test_lagkvs_share_of_partitions_stops_at_the_floor(chunk):
    """Partitions are cut, the oldest first, as long as the floor stays; 8 of 10 go of each."""
    plan = plan_of("lagkv", model(), budget="20%", floor=100, chunks=True, lag=10)
    with kvsieve.attach(model(), plan) as sieve:
        cache = sieve.prefill(prompts(LONG)[0], chunk=chunk)
    # 2 sinks, 15 partitions and 8 more: 7 partitions may go down to 2 before fewer than 100 are left.
    assert set(cache.entries()) == {LONG - 7 * 8}


def test_pyramidinfer_passes_on_the_floor():
    plan = plan_of("pyramidinfer", model(), rate=0.1, recent=0.1, floor=100)
    assert min(answers(plan, *prompts(LONG)).stats.report["layer_tokens"]) == 100


def test_plans_by_name_have_the_floor_and_objects_have_none(usual_floor):
    assert usual_floor == 512
    for name in TAKE_SHARES:
        info = kvsieve.method_info(name)
        share = {"budget": "30%"} if "budget" in info.parameters else {}
        plan = kvsieve.plan(name, **info.example, **share)
        assert plan.floor == 512 and info.parameters["floor"] == 512
        assert kvsieve.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
        if info.adapts:
            assert plan.for_model(model()).floor == 512 if info.part is None else True
        assert kvsieve.plan(name, **info.example, **share, floor=0).floor == 0
        assert plan_without_floor(name, **info.example, **share).floor == 0
        if "paper" in info.parameters:
            assert kvsieve.plan(name, **info.example, **share, paper=True).floor == 0
    assert kvsieve.methods.SnapKV(budget=0.3).budget.floor == 0
    for budget in (2048, "512MiB"):
        assert kvsieve.plan("snapkv", budget=budget).floor == 0


def test_a_budget_with_a_floor_keeps_its_own(usual_floor):
    budget = Budget(ratio=0.2, floor=100)
    assert str(budget) == "20% (at least 100)" and Budget.parse(str(budget)) == budget
    for given in (budget, str(budget)):
        assert kvsieve.plan("snapkv", budget=given).floor == 100
        assert kvsieve.plan("snapkv", budget=given, floor=30).floor == 30
        assert kvsieve.plan("snapkv", budget=given, floor=0).floor == 0
    assert [budget.entries(length) for length in (10, 400, 600)] == [100, 100, 120]


def test_plans_from_files_without_a_floor_have_none(usual_floor):
    """What was written before there were floors."""
    data = plan_without_floor("fastkv", budget="10%").to_dict()
    assert "512" not in json.dumps(data) and "floor" not in json.dumps(data)
    plan = kvsieve.Plan.from_dict(data)
    assert plan.floor == 0 and plan.for_model(model()).floor == 0


def test_parameters_from_the_model_leave_the_floor(usual_floor):
    plan = kvsieve.plan("per-layer", shares="1/1/1/1", budget="20%", floor=70)
    assert plan.for_model(model()).floor == 70
    replaced = dataclasses.replace(plan, evict=kvsieve.methods.SnapKV(budget=0.5))
    assert replaced.for_model(model()).floor == 0


@pytest.mark.parametrize(
    "given, told",
    [
        ({"floor": -1}, "floor must be a whole number of entries from 0 to"),
        ({"floor": True}, "got True"),
        ({"floor": "many"}, "got 'many'"),
        ({"budget": 64, "floor": 100}, "floor=100 is the least that a share keeps, and 64 is none"),
        ({"budget": "1GiB", "floor": 100}, "floor=100 is the least that a share keeps, and 1GiB is none"),
    ],
)
def test_a_floor_that_means_nothing_is_refused(given, told):
    with pytest.raises(PlanError, match=told):
        kvsieve.plan("snapkv", **given)
    with pytest.raises(PlanError, match="100 is no share; leave floor=5 out"):
        Budget(tokens=100, floor=5)
    assert kvsieve.plan("snapkv", budget=100, floor=100).evict.budget == Budget(tokens=100)
    with pytest.raises(PlanError, match="full has no parameter 'floor'"):
        kvsieve.plan("full", floor=5)


@functools.cache
def asked(method, budget):
    return Ask(model(), words(40, seed=3), method=method, budget=budget)


BY_DEFAULT = [("fastkv", None, path) for path in ("generate", "pipeline", "chat", *COMMANDS, *SERVED)]
BY_DEFAULT += [("snapkv", "20%", path) for path in ("model.generate", "padded row", "chat command", "session")]


@pytest.mark.parametrize("method, budget, path", BY_DEFAULT)
def test_short_questions_are_full_kv_on_every_path_by_default(usual_floor, method, budget, path):
    """Nobody says floor= here; tests/test_paths.py has the paths on which somebody does."""
    ask = asked(method, budget)
    assert answer(path, ask) == plain(ask) == plain(asked("full", None))
    assert len(set(plain(ask).split())) > 2


@pytest.mark.slow
def test_short_questions_to_the_real_model(real_model_in_float32, usual_floor):
    """With seven entries of 39 it answers with a loop."""
    loaded, tokenizer = kvsieve.models.load_demo()
    plans = [kvsieve.plan("full"), kvsieve.plan("fastkv"), kvsieve.plan("snapkv", budget="20%")]
    text = render(tokenizer, [{"role": "user", "content": "How many legs has a spider?"}])
    ids = torch.tensor([token_ids(tokenizer, text)])
    made = []
    for plan in plans:
        with kvsieve.attach(loaded, plan) as sieve:
            made.append(sieve.generate(ids, max_new_tokens=8, do_sample=False).sequences)
    assert all(torch.equal(made[0], each) for each in made[1:])


def test_users_have_it_without_asking():
    """In a process of its own: tests have another default."""
    code = "import kvsieve; print(kvsieve.plan('snapkv').floor)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "512\n"
