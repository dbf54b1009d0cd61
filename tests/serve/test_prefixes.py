"""The server's prefix store: whose requests it serves, and what it stores of them."""

from __future__ import annotations

import pytest
import torch

from kvsieve.hf.attach import attached, under
from kvsieve.hf.prompt.constraints import PromptConstraints
from kvsieve.planning.plans import Plan
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.prefixes import ServerPrefixes
from kvsieve.serve.scheduler import Scheduler
from kvsieve.store import PrefixStore
from orders import ask, prompt
from small import plan_of
from tiny_models import build
from toy_words import word_tokenizer

CHUNK = 16


@pytest.fixture(scope="module")
def sieve():
    with attached(build("llama"), Plan(), "eager", any_plan=True) as attached_sieve:
        yield attached_sieve


@pytest.fixture
def scheduler(sieve):
    one = Scheduler(sieve, word_tokenizer(), ServerLimits(chunk=CHUNK), ServerPrefixes(PrefixStore(), share=False))
    one.start()
    yield one
    one.close()


def notes(scheduler, plan, **more):
    """What an answer says of the store."""
    heard, _ = ask(scheduler, prompt(1, 60), plan, **more)
    return [note for note in heard.all()[-1].stats.notes if "left out" in note]


def test_a_request_that_the_store_cannot_serve_says_so(scheduler, sieve):
    finch, snapkv = (plan_of(name, sieve.model).for_model(sieve.model) for name in ("finch", "snapkv"))
    assert notes(scheduler, finch) == [
        "the prefix store was left out: finch reads the whole conversation again in every turn"
    ]
    own = "the prefix store was left out: protect= makes its reading the caller's own"
    assert notes(scheduler, snapkv, constraints=PromptConstraints([(0, 4)])) == [own]
    assert scheduler.prefixes.to_dict()["added"] == 0
    assert notes(scheduler, snapkv) == []


@pytest.mark.parametrize(("name", "tokens"), [("full", 67), ("snapkv", 48)])
def test_what_serves_no_new_prompt_is_stored_for_sessions_only(scheduler, sieve, name, tokens):
    plan = plan_of(name, sieve.model).for_model(sieve.model)
    ask(scheduler, prompt(1, 60), plan)[0].ids()
    # Longer nodes replace the border of 32 tokens; the last border is stored for a plan that acts at the end.
    store = scheduler.prefixes.store
    assert [node.tokens for node in store.nodes()] == [tokens]
    ask(scheduler, prompt(1, 60), plan, session="s")[0].ids()
    assert [node.tokens for node in store.nodes() if node.owner == "/s"][:1] == [67]


def test_a_node_counts_the_time_of_the_prefix_that_it_went_on_from(sieve):
    ids, store, plan = prompt(1, 60), PrefixStore(), plan_of("full", sieve.model)
    under_plan = under(sieve, plan)
    store.add(under_plan, ids[:40], under_plan.prefill(torch.tensor([ids[:40]])), 1000.0)
    one = Scheduler(sieve, word_tokenizer(), ServerLimits(chunk=CHUNK), ServerPrefixes(store, share=False))
    one.start()
    ask(one, ids, plan)[0].ids()
    one.close()
    assert [(node.tokens, node.seconds > 1000) for node in store.nodes()] == [(67, True)]
