"""The scheduler survives errors of requests and of the store; where it cannot go on, those that wait get the reason."""

from __future__ import annotations

import dataclasses
import json

import httpx
import pytest
import torch

import kvsieve
from kvsieve.decoding import loop
from kvsieve.decoding.asked import Sampling
from kvsieve.hf.attach import attached
from kvsieve.planning.plans import Plan
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.plan_sieves import PlanSieves, plan_key
from kvsieve.serve.prefixes import Prefixes
from kvsieve.serve.run import ServerOptions, application
from kvsieve.serve.scheduler import Scheduler
from kvsieve.serve.ticket import ClosingError, PromptDocuments, StoppedError, Summary
from orders import ask, prompt
from served_apps import listening
from small import plan_of
from tiny_models import build
from toy_chats import chat_tokenizer
from toy_words import word_tokenizer

CHUNK = 24


@pytest.fixture(scope="module")
def sieve():
    with attached(build("llama"), Plan(), "eager", any_plan=True) as made:
        yield made


@pytest.fixture
def scheduler(sieve):
    made = []

    def make(prefixes=None, **limits):
        made.append(Scheduler(sieve, word_tokenizer(), ServerLimits(chunk=CHUNK, **limits), prefixes))
        return made[-1]

    yield make
    for one in made:
        one.close()


class FailingStore(Prefixes):
    """A store one of whose doings fails."""

    def __init__(self, doing: str, error: Exception) -> None:
        def fails(*given):
            raise error

        setattr(self, doing, fails)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory"), KeyError("x")], ids=repr)
@pytest.mark.parametrize("doing", ["find", "at_border", "add", "add_answer", "join"])
def test_an_error_of_the_store_costs_no_answer(scheduler, sieve, doing, error):
    plan, ids = plan_of("snapkv", sieve.model), prompt(1, 3 * CHUNK)
    documents = PromptDocuments(ids[:9], (ids[9:30], ids[30:60]), "link:tokens=4") if doing == "join" else None
    right, one = scheduler(), scheduler(FailingStore(doing, error))
    right.start()
    one.start()
    wanted = ask(right, ids, plan, documents=documents)[0].ids()
    assert [ask(one, ids, plan, documents=documents)[0].ids() for _ in range(2)] == [wanted, wanted]
    assert one.counts["store_failed"] >= 2 and one.counts["answered"] == 2 and one.alive


def test_a_store_that_cannot_be_written_ends_nothing_else(scheduler, sieve):
    one = scheduler(FailingStore("close", MemoryError()))
    one.start()
    assert len(ask(one, prompt(1, 20), plan_of("full", sieve.model))[0].ids()) == 8
    one.close()


@pytest.mark.parametrize("step", ["let_go", "has_room", "step"])
def test_an_error_between_requests_is_sent_to_those_it_may_be_of(scheduler, sieve, monkeypatch, step):
    one, plan = scheduler(), plan_of("full", sieve.model)
    whole, failing = getattr(one._work, step), [True]

    def fails(*given):
        if failing.pop() if failing else False:
            raise MemoryError
        return whole(*given)

    monkeypatch.setattr(one._work, step, fails)
    first, _ = ask(one, prompt(1, 10), plan)
    one.start()
    assert isinstance(first.all()[-1], MemoryError)
    assert len(ask(one, prompt(2, 10), plan)[0].ids()) == 8
    assert one.alive and one.state()["kv_bytes"] == 0


@pytest.mark.parametrize("step", ["let_go", "has_room", "step"])
def test_where_the_thread_ends_all_that_wait_are_sent_the_reason(scheduler, sieve, monkeypatch, step):
    one, plan = scheduler(running=1), plan_of("full", sieve.model)
    waiting = [ask(one, prompt(n, 10), plan)[0] for n in range(3)]

    def ends(*given):
        raise SystemExit(3)

    monkeypatch.setattr(one._work, step, ends)
    one.start()
    for each in waiting:
        assert isinstance(each.all()[-1], StoppedError)
    one._thread.join()
    assert not one.alive
    with pytest.raises(StoppedError, match=r"the server has stopped \(SystemExit\)"):
        ask(one, prompt(9, 10), plan)


def test_who_listens_badly_harms_no_other(scheduler, sieve):
    one, plan = scheduler(), plan_of("full", sieve.model)
    bad, ticket = ask(one, prompt(1, 10), plan)
    good, _ = ask(one, prompt(2, 10), plan)

    def fails(event):
        raise OSError("gone")

    ticket.tell = fails
    one.start()
    assert len(good.ids()) == 8 and one.alive and bad.events.empty()
    assert one.state()["kv_bytes"] == 0


def test_http_tells_that_the_server_has_stopped():
    with application(build("llama"), chat_tokenizer(), ServerOptions(), "tiny") as app, listening(app) as url:
        scheduler = app.state.service.scheduler

        def ends(*given):
            raise SystemExit

        scheduler._work.step = ends
        body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2}
        for _ in range(2):
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert reply.status_code == 503 and "the server has stopped" in reply.json()["error"]["message"]
            scheduler._thread.join()
        lines = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}, timeout=60)
        assert lines.status_code == 503
        assert httpx.get(f"{url}/health").status_code == 503 and json.loads(lines.text)["error"]["type"]


SHARES = (0.1,) * 15
DIFFERENT = {
    "a share behind the 40th sign": [kvsieve.plan("per-layer", shares=(*SHARES, last)) for last in (0.5, 0.9)],
    "a skipped layer": [kvsieve.plan("snapkv", budget=40, skip_layers=(*range(19), n)) for n in (19, 25)],
    "a parameter that is given as the paper has it": [
        kvsieve.plan("snapkv", budget=40, **given) for given in ({}, {"window": 32}, {"paper": True})
    ],
    "one entry and all": [kvsieve.plan("knorm", budget=each) for each in (1, 1.0)],
    "a name": [Plan(name=name) for name in ("one", "other")],
    "a codec": [kvsieve.plan("snapkv", budget=40, codec=each) for each in (None, "kivi:bits=4", "kivi:bits=2")],
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_plans_that_differ_are_remembered_apart(what):
    plans = DIFFERENT[what]
    assert len({plan_key(plan) for plan in plans}) == len(plans)
    for plan in plans:
        again = dataclasses.replace(plan)
        assert plan_key(again) == plan_key(plan) and again == plan


@pytest.mark.parametrize("what", ["a share behind the 40th sign", "a skipped layer", "a codec"])
def test_plans_that_differ_late_look_different(what):
    assert len({repr(plan) for plan in DIFFERENT[what]}) == len(DIFFERENT[what])


def test_the_plans_used_last_are_remembered(sieve):
    under = PlanSieves(sieve, most=3)
    plans = [kvsieve.plan("snapkv", budget=budget, window=4) for budget in range(20, 25)]
    first = [under.of(plan) for plan in plans[:3]]
    assert under.of(plans[0]) is first[0]
    under.of(plans[3])
    # The one used longest ago has made room.
    assert under.of(plans[0]) is first[0] and under.of(plans[2]) is first[2] and len(under) == 3
    assert under.of(plans[1]) is not first[1] and len(under) == 3
    assert under.of(plans[1]).plan.evict.budget.tokens == 21


def test_a_request_is_answered_under_its_own_plan(scheduler, sieve):
    """Whatever plans were asked for before it."""
    one, ids = scheduler(), prompt(3, 90)
    one.start()
    plans = [kvsieve.plan("snapkv", budget=40, skip_layers=layers, paper=True) for layers in ((0,), (0, 1), (0, 1, 2))]
    entries = []
    for plan in plans * 2:
        events = ask(one, ids, plan, sampling=Sampling())[0].all()
        entries.append(events[-1].stats.kv_entries)
    assert entries[:3] == entries[3:] and len({tuple(each) for each in entries}) == 3


def test_closing_tells_those_that_wait(scheduler, sieve):
    one, plan = scheduler(running=1), plan_of("full", sieve.model)
    waiting = [ask(one, prompt(n, 10), plan, 10_000, ignore_eos=True)[0] for n in range(3)]
    one.start()
    one.close()
    ends = [each.all()[-1] for each in waiting]
    assert all(isinstance(each, ClosingError | Summary) for each in ends)


def test_what_comes_while_it_closes_is_told_too(scheduler, sieve, monkeypatch):
    one, plan = scheduler(), plan_of("full", sieve.model)
    whole, heard = one._work.let_go, []

    def closes(*given):
        whole(*given)
        if not heard:
            # Behind the look at those that wait, and before the scheduler sees that it is closed.
            heard.append(ask(one, prompt(2, 10), plan)[0])
            one._closed = True
            one.stop(0.0)

    monkeypatch.setattr(one._work, "let_go", closes)
    first, _ = ask(one, prompt(1, 10), plan)
    one.start()
    one._thread.join()
    for each in (first, *heard):
        assert isinstance(each.all()[-1], ClosingError | Summary)
    assert len(heard) == 1
    with pytest.raises(ClosingError, match="closing"):
        ask(one, prompt(3, 10), plan)


def of_four(scheduler, sieve, monkeypatch, fails):
    """Answers of each of four requests alone, and events of all where a pass over the four fails, by the second."""
    plans = [plan_of(name, sieve.model) for name in ("full", "snapkv", "full", "snapkv")]
    right, one, failed = scheduler(), scheduler(), []
    right.start()
    wanted = [ask(right, prompt(n, 40), plan, 30, ignore_eos=True)[0].ids() for n, plan in enumerate(plans)]
    whole = loop.feed

    def feed(model, part):
        at_fault = any(tuple(rows.answers[0].sampler.ids[:40].tolist()) == prompt(1, 40) for rows in part)
        if at_fault and (failed or len(part) == 4):
            failed.append(len(part))
            fails(model, part)
        return whole(model, part)

    monkeypatch.setattr(loop, "feed", feed)
    heard = [ask(one, prompt(n, 40), plan, 30, ignore_eos=True)[0] for n, plan in enumerate(plans)]
    one.start()
    return wanted, [each.all() for each in heard], failed


def test_of_answers_that_fail_together_only_the_one_at_fault_ends(scheduler, sieve, monkeypatch):
    def fails(model, part):
        raise MemoryError

    wanted, heard, failed = of_four(scheduler, sieve, monkeypatch, fails)
    assert isinstance(heard[1][-1], MemoryError) and failed == [4, 1]
    for right, events in zip([*wanted[:1], *wanted[2:]], [*heard[:1], *heard[2:]], strict=True):
        assert [token.own.id for event in events[:-1] for token in event.tokens] == right


def test_answers_whose_caches_a_failed_pass_has_changed_all_end(scheduler, sieve, monkeypatch):
    def fails(model, part):
        hook = model.layers[-1].register_forward_pre_hook(lambda *given: 1 / 0)
        try:
            loop.feed_rows(model, [rows.cache for rows in part], [torch.tensor([[5]])] * len(part))
        finally:
            hook.remove()

    _, heard, failed = of_four(scheduler, sieve, monkeypatch, fails)
    assert failed == [4]
    assert [type(events[-1]) for events in heard] == [ZeroDivisionError] * 4
