"""Queues of the scheduler: turns of owners, and the order of prefills, by scripted prompts."""

from __future__ import annotations

import collections
import itertools
import random
from dataclasses import dataclass

import pytest

from kvsieve.planning.plans import Plan
from kvsieve.serve.queue import FairQueue, PrefillQueue
from kvsieve.serve.ticket import Order, Ticket

STEP = 100


@dataclass(eq=False)
class Prompt:
    """A prompt that comes when `came` tokens have been prefilled."""

    name: str
    tokens: int
    owner: str = ""
    came: int = 0

    def __post_init__(self):
        self.ticket = Ticket(Order((), Plan(), 1, owner=self.owner), print, print)
        self.left = self.size = self.tokens


def prefilled(prompts, more=lambda done: (), seen=lambda queue, tokens: None):
    """Prefill prompts STEP tokens at a time; return by name how many tokens were prefilled when each was complete.

    Args:
        prompts: the first ones.
        more: returns further ones that come after so many tokens.
        seen: called before each step with the queue and the tokens that each owner has got.
    """
    queue, coming, done, ends, tokens = PrefillQueue(), list(prompts), 0, {}, collections.Counter()
    while coming or len(queue):
        if not len(queue):
            done = max(done, min(prompt.came for prompt in coming))
        now = [prompt for prompt in coming if prompt.came <= done]
        coming = [prompt for prompt in coming if prompt not in now]
        for prompt in [*now, *more(done)]:
            prompt.before = tokens[prompt.owner]
            queue.add(prompt)
        seen(queue, tokens)
        current = queue.first()
        step = min(STEP, current.left)
        current.left -= step
        done += step
        tokens[current.owner] += step
        queue.spend(current, step)
        if not current.left:
            queue.remove(current)
            ends[current.name] = done
    return ends


def test_owners_take_turns():
    waiting = FairQueue()
    for number, owner in enumerate("aaabbc"):
        waiting.put(Ticket(Order((number,), Plan(), 1, owner=owner), print, print))
    order = []
    while waiting.first() is not None:
        order.append(waiting.take().order)
    assert "".join(each.owner for each in order) == "abcaba"
    assert [each.ids[0] for each in order if each.owner == "a"] == [0, 1, 2]


def test_prompts_that_come_together_are_prefilled_one_after_the_other_short_ones_first():
    alike = [Prompt(name, 3000) for name in "abc"]
    assert prefilled(alike) == {"a": 3000, "b": 6000, "c": 9000}
    unequal = [Prompt(name, tokens) for name, tokens in (("a", 4000), ("b", 2000), ("c", 3000), ("d", 2000))]
    assert prefilled(unequal) == {"b": 2000, "d": 4000, "c": 7000, "a": 11000}
    # So are those of several owners.
    assert prefilled([Prompt(name, 3000, name) for name in "abc"]) == {"a": 3000, "b": 6000, "c": 9000}


def test_a_short_prompt_overtakes_a_long_one_unless_that_has_less_left():
    found = prefilled([Prompt("long", 8000), Prompt("short", 500, came=1000), Prompt("late", 2000, came=7000)])
    assert found == {"short": 1500, "long": 8500, "late": 10500}


def test_a_long_prompt_waits_for_at_most_as_many_later_tokens_as_it_has():
    numbers = itertools.count()

    def shorts(done):
        # There are always three of them.
        return [Prompt(str(next(numbers)), 300) for _ in range(1 if done else 3)] if done % 300 == 0 else []

    ends = prefilled([Prompt("long", 6000)], lambda done: shorts(done) if done < 60_000 else ())
    assert 2 * 6000 <= ends["long"] <= 2 * 6000 + 3 * 300


def test_an_owner_with_many_prompts_does_not_delay_others():
    many = [Prompt(f"a{number}", 2000, "a") for number in range(10)]
    found = prefilled([*many, Prompt("b", 3000, "b", came=500)])
    assert found["b"] == 5000 and found["a9"] == 23_000
    # One who comes late does not wait for all of two others either.
    two = [Prompt(f"{owner}{number}", 2000, owner) for number in range(10) for owner in "ab"]
    assert prefilled([*two, Prompt("c", 3000, "c", came=20_000)])["c"] == 27_000


def test_an_owner_of_short_prompts_without_pause_gets_no_more_than_another():
    numbers = itertools.count()

    def shorts(done):
        return [Prompt(f"a{next(numbers)}", 500, "a")] if done % 500 == 0 and done < 50_000 else ()

    assert prefilled([Prompt("b", 10_000, "b")], shorts)["b"] <= 2 * 10_000


@pytest.mark.parametrize("seed", range(5))
def test_owners_who_wait_get_as_much_as_each_other(seed):
    draw = random.Random(seed)
    prompts = [Prompt(str(n), STEP * draw.randint(1, 60), draw.choice("abc")) for n in range(60)]

    def seen(queue, tokens):
        if len({prompt.owner for prompt in queue}) == 3:
            assert max(tokens[owner] for owner in "abc") - min(tokens[owner] for owner in "abc") <= 60 * STEP

    prefilled(prompts, seen=seen)


@pytest.mark.parametrize("owners", ["a", "abc"])
def test_nothing_overtakes_a_prompt_whose_owner_has_got_as_many_tokens_as_it_has(owners):
    draw = random.Random(1)
    for _ in range(10):
        comes = [STEP * draw.randint(0, 600) for _ in range(30)]
        prompts = [
            Prompt(str(n), STEP * draw.randint(1, 60), draw.choice(owners), came) for n, came in enumerate(comes)
        ]
        ends = prefilled(prompts)
        overtakes = 0
        for one, other in itertools.permutations(prompts, 2):
            if one.owner == other.owner and one.before < other.before and ends[other.name] < ends[one.name]:
                assert other.before + other.tokens < one.before + one.tokens
                overtakes += 1
        assert overtakes


def test_who_leaves_is_not_waited_for():
    queue = PrefillQueue()
    first, second, third = (Prompt(name, 1000) for name in "abc")
    for prompt in (first, second, third):
        queue.add(prompt)
    queue.remove(first)
    assert queue.first() is second and list(queue) == [second, third]
