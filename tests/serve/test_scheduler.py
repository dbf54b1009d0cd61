"""The scheduler alone: answers are those of sieve.generate, whoever comes and goes; limits, turns and cancelling."""

from __future__ import annotations

import random
import threading

import pytest
import torch

import kvsieve
from kvsieve.decoding.asked import AnswerPart, Sampling
from kvsieve.errors import InputError, PlanError
from kvsieve.hf.attach import attached
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.pace import ReadingPace
from kvsieve.serve.scheduler import Scheduler
from kvsieve.serve.ticket import BusyError, Order, Summary, TooLargeError
from orders import TIMEOUT, Noted, ask, prompt
from small import plan_of
from tiny import tiny_model
from tiny_models import build
from toy_words import word_tokenizer

CHUNK = 24
NAMES = ("full", "snapkv", "adakv", "fastkv", "streamingllm", "rocketkv-mt", "kivi", "finch")


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def lone(model):
    """Its twin, to which one plan at a time is attached."""
    return build("llama")


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


@pytest.fixture
def scheduler(model, tokenizer):
    """Makes schedulers with these limits; they are closed at the end."""
    with attached(model, Plan(), "eager", any_plan=True) as sieve:
        made = []

        def make(start=True, **limits):
            one = Scheduler(sieve, tokenizer, ServerLimits(chunk=CHUNK, **limits))
            made.append(one)
            if start:
                one.start()
            return one

        yield make
        for one in made:
            one.close()


def alone(model, plan, ids, tokens):
    with kvsieve.attach(model, plan) as sieve:
        out = sieve.generate(
            torch.tensor([ids]), chunk=CHUNK, max_new_tokens=tokens, do_sample=False, eos_token_id=None
        )
    return out.sequences[0, len(ids) :].tolist()


def tokens(events):
    return [token.own.id for event in events[:-1] for token in event.tokens]


@pytest.mark.parametrize("gap", [2.5, 1.0])
def test_answers_are_those_of_generate_whoever_joins_and_leaves(scheduler, model, lone, gap):
    """With a gap of 1, reading stops in the middle of every layer."""
    draw = random.Random(3)
    plans = [plan_of(name, model) for name in NAMES]
    longest = 14 if gap > 1 else 40
    jobs = [(prompt(n, draw.randint(3, 150)), plans[n % len(plans)], draw.randint(1, longest)) for n in range(12)]
    running = scheduler(start=False, running=5, gap=gap)
    border = threading.Event()
    heard = []
    for number, (ids, plan, tokens) in enumerate(jobs):
        # The first ones wait for each other, so that some are answered together however slow this thread is.
        if number == 5:
            running.start()
        # The next comes at some token of those before.
        before = running.counts["decode_passes"] + draw.randint(0, 3)
        while running.counts["decode_passes"] < before and running.state()["running"]:
            border.wait(0.001)
        heard.append(ask(running, ids, plan, tokens)[0])
    found = [each.ids() for each in heard]
    assert found == [alone(lone, plan, ids, tokens) for ids, plan, tokens in jobs]
    # They were answered together.
    assert running.counts["decode_passes"] < sum(tokens for _, _, tokens in jobs) - len(jobs)
    assert running.state() == {"queued": 0, "reading": 0, "running": 0, "kv_bytes": 0, "kv_limit": 0}


def test_a_recurrent_hybrid_decodes_together(model):
    hybrid = build("qwen3_next")
    plan = plan_of("snapkv", hybrid)
    with attached(hybrid, Plan(), "eager", any_plan=True) as sieve:
        one = Scheduler(sieve, word_tokenizer(), ServerLimits(chunk=CHUNK, gap=1.0))
        jobs = [(prompt(n, 30 + 9 * n), 5 + n) for n in range(3)]
        heard = [ask(one, ids, plan, tokens)[0] for ids, tokens in jobs]
        one.start()
        found = [each.ids() for each in heard]
        one.close()
    assert found == [alone(hybrid, plan, *job) for job in jobs]


def test_a_long_prompt_is_read_between_the_tokens_of_others(scheduler, model):
    one = scheduler(gap=1.0)
    first, _ = ask(one, prompt(1, 10), plan_of("full", model), 200, ignore_eos=True)
    first.events.get(timeout=TIMEOUT)
    before = one.counts["new_tokens"]
    second, _ = ask(one, prompt(2, 20 * CHUNK), plan_of("snapkv", model), 2)
    second.events.get(timeout=TIMEOUT)
    # A token for each part of each layer and chunk.
    assert one.counts["new_tokens"] - before >= min(2 * one.sieve.num_layers * 20, 150)


def test_a_prompt_that_is_alone_is_read_in_longer_passes_and_whoever_comes_is_served(
    scheduler, model, lone, monkeypatch
):
    one, sizes, order, plan = scheduler(start=False), [], [], plan_of("full", model)
    feed, heard = AttachedModel.feed, [Noted(order, "long"), Noted(order, "short")]
    long, short = prompt(1, 20 * CHUNK + 3), prompt(2, CHUNK)

    def noted(self, cache, ids, *args, **kwargs):
        first_long = ids.shape[1] >= 2 * CHUNK > max(sizes, default=0)
        sizes.append(ids.shape[1])
        if first_long:
            one.submit(Order(short, plan, 3, sampling=Sampling(logprobs=0)), heard[1].put)
        result = feed(self, cache, ids, *args, **kwargs)
        if first_long:
            order.append("end of a pass")
        return result

    monkeypatch.setattr(AttachedModel, "feed", noted)
    one.submit(Order(long, plan_of("snapkv", model), 3, sampling=Sampling(logprobs=0)), heard[0].put)
    one.start()
    found = [one_heard.ids() for one_heard in heard]
    monkeypatch.undo()
    assert order == ["short", "end of a pass", "long"]
    assert found == [alone(lone, plan_of("snapkv", model), long, 3), alone(lone, plan, short, 3)]


def test_prompts_that_come_together_are_prefilled_in_turn_in_long_passes(scheduler, model, lone, monkeypatch):
    one, plan, sizes, begun, waiting = scheduler(start=False), plan_of("snapkv", model), [], [], []
    feed, begin = AttachedModel.feed, ReadingPace.begin

    def noted(self, cache, ids, *args, **kwargs):
        if not begun:
            sizes.append(ids.shape[1])
        return feed(self, cache, ids, *args, **kwargs)

    monkeypatch.setattr(AttachedModel, "feed", noted)
    monkeypatch.setattr(
        ReadingPace, "begin", lambda *args, **more: waiting.append(more["prompts"]) or begin(*args, **more)
    )
    prompts = [prompt(number, CHUNK * chunks) for number, chunks in enumerate((9, 12, 6, 5, 9))]
    heard = [Noted(begun, number) for number in range(5)]
    for ids, one_heard in zip(prompts, heard, strict=True):
        one.submit(Order(ids, plan, 3, sampling=Sampling(logprobs=0)), one_heard.put)
    one.start()
    events = [one_heard.all() for one_heard in heard]
    assert begun == [3, 2, 0, 4, 1]
    # Those that wait do not make the passes of the first one shorter.
    assert max(sizes) >= 2 * CHUNK
    assert sorted(set(waiting)) == [1, 2, 3, 4, 5] and waiting == sorted(waiting, reverse=True)
    queued = [events[number][-1].queued_s for number in begun]
    assert queued == sorted(queued) and all(each[-1].queued_s < each[-1].ttft_s for each in events)
    monkeypatch.undo()
    assert [tokens(each) for each in events] == [alone(lone, plan, ids, 3) for ids in prompts]


def test_a_short_prompt_overtakes_one_in_progress_and_who_leaves_is_not_read(scheduler, model, lone):
    one, plan, begun, tickets = scheduler(start=False), plan_of("full", model), [], []
    rules, prompts = Sampling(logprobs=0), [prompt(1, 20 * CHUNK), prompt(2, 2 * CHUNK), prompt(3, 3 * CHUNK)]

    def others_come(event):
        if not tickets and isinstance(event, AnswerPart) and event.progress and event.progress.done >= CHUNK:
            tickets.extend(one.submit(Order(prompts[n], plan, 4, sampling=rules), heard[n].put) for n in (1, 2))

    heard = [Noted(begun, 0, others_come), Noted(begun, 1, lambda event: tickets[1].cancel()), Noted(begun, 2)]
    one.submit(Order(prompts[0], plan, 4, sampling=rules, progress=True), heard[0].put)
    one.start()
    events = [heard[n].all() for n in (0, 1)]
    assert begun == [1, 0] and one.counts["cancelled"] == 1 and one.state()["kv_bytes"] == 0
    assert [tokens(each) for each in events] == [alone(lone, plan, ids, 4) for ids in prompts[:2]]


def test_seeds_make_answers_again_and_several_answers_differ(scheduler, model):
    one, plan, ids = scheduler(), plan_of("snapkv", model), prompt(5, 60)
    rules = Sampling(temperature=1.0, seed=7, logprobs=2)
    events = [ask(one, ids, plan, 12, sampling=rules, answers=3)[0].all() for _ in range(2)]
    texts = [[[t.own.id for e in told[:-1] if e.answer == n for t in e.tokens] for n in range(3)] for told in events]
    assert texts[0] == texts[1] and len({tuple(each) for each in texts[0]}) == 3
    assert all(len(t.top) == 2 and t.own.logprob <= t.top[0].logprob for e in events[0][:-1] for t in e.tokens)
    assert events[0][-1].new_tokens == sum(map(len, texts[0]))


def test_a_stop_text_ends_an_answer_before_it(scheduler, model, tokenizer):
    one, plan, ids = scheduler(), plan_of("full", model), prompt(6, 40)
    whole = "".join(e.text for e in ask(one, ids, plan, 12)[0].all()[:-1])
    stop = whole.split()[4]
    told = ask(one, ids, plan, 12, stops=(stop,))[0].all()
    assert "".join(e.text for e in told[:-1]) == whole[: whole.index(stop)]
    assert told[-2].finish == "stop" and told[-1].new_tokens < 12


def test_cancelling_frees_what_waits_is_read_or_runs(scheduler, model):
    one, plan = scheduler(running=1), plan_of("full", model)
    running, job = ask(one, prompt(1, 10), plan, 400, ignore_eos=True)
    running.events.get(timeout=TIMEOUT)
    waiting, queued = ask(one, prompt(2, 10), plan)
    queued.cancel()
    job.cancel()
    last, _ = ask(one, prompt(3, 20 * CHUNK), plan)
    assert len(last.ids()) == 8
    reading, read = ask(one, prompt(3, 20 * CHUNK), plan)
    read.cancel()
    assert len(ask(one, prompt(4, 10), plan)[0].ids()) == 8
    assert one.state()["kv_bytes"] == 0 and one.counts["cancelled"] == 3 and one.counts["answered"] == 2


def test_what_does_not_fit_waits_and_what_never_fits_is_refused(scheduler, model):
    plan = plan_of("full", model)
    one = scheduler(start=False)
    needed = one._work.needs(Order(prompt(1, 40), plan, 8))
    one = scheduler(start=False, kv_bytes=2 * needed + 10, queue=3)
    with pytest.raises(TooLargeError, match="send less or lower max_tokens"):
        ask(one, prompt(1, 400), plan)
    with pytest.raises(InputError, match="more than the model's context"):
        ask(one, prompt(1, one.context), plan)
    heard = [ask(one, prompt(n, 40), plan)[0] for n in range(3)]
    with pytest.raises(BusyError, match="3 requests wait") as refused:
        ask(one, prompt(9, 40), plan)
    assert refused.value.retry_after >= 1
    most, admit = [], one._admit

    def watched():
        admit()
        most.append(one.state()["kv_bytes"])

    one._admit = watched
    one.start()
    assert [len(each.ids()) for each in heard] == [8] * 3
    assert needed <= max(most) <= 2 * needed + 10


def test_a_request_that_fails_harms_no_other(scheduler, model, lone):
    one, plan = scheduler(), plan_of("snapkv", model)
    good, _ = ask(one, prompt(1, 50), plan, 20)
    bad, _ = ask(one, (3, 4, 10**6), plan)
    (error,) = bad.all()
    assert isinstance(error, InputError)
    # Nothing can be drawn from what this leaves.
    cold, _ = ask(one, prompt(2, 20), plan, 20, sampling=Sampling(temperature=1e-300, seed=1))
    assert isinstance(cold.all()[-1], RuntimeError)
    assert good.ids() == alone(lone, plan, prompt(1, 50), 20)


def test_time_ends_what_runs_and_what_waits(scheduler, model):
    one, plan = scheduler(running=1, seconds=0.2), plan_of("full", model)
    slow, _ = ask(one, prompt(1, 10), plan, 10000, ignore_eos=True)
    waiting, _ = ask(one, prompt(2, 10), plan, 10000, ignore_eos=True)
    told = slow.all()
    assert told[-2].finish == "length" and isinstance(told[-1], Summary)
    last = waiting.all()[-1]
    assert isinstance(last, BusyError | Summary)
    # Every request that was taken is counted once at its end.
    ends = {name: one.counts[name] for name in ("answered", "failed", "cancelled")}
    failed = int(isinstance(last, BusyError))
    assert ends == {"answered": 2 - failed, "failed": failed, "cancelled": 0} and one.counts["requests"] == 2


def test_a_plan_with_a_draft_model_is_refused_by_name(scheduler):
    with pytest.raises(PlanError, match=r"specprefill reads prompts with a draft model"):
        scheduler(start=False).check_plan(kvsieve.plan("specprefill", draft=build("llama", num_hidden_layers=1)))


def test_closing_refuses_what_comes_and_ends_what_runs(scheduler, model):
    one, plan = scheduler(), plan_of("full", model)
    heard, _ = ask(one, prompt(1, 10), plan, 10000, ignore_eos=True)
    heard.events.get(timeout=TIMEOUT)
    one.close()
    assert isinstance(heard.all()[-1], Summary)
    with pytest.raises(BusyError, match="closing"):
        ask(one, prompt(1, 10), plan)
