"""The server's prefix store: whose requests it serves, and what it stores of them."""

from __future__ import annotations

import pytest
import torch

from kvsieve.hf.attach import attached, under
from kvsieve.hf.prompt.constraints import PromptConstraints
from kvsieve.hf.reuse import StoredPrefixes
from kvsieve.planning.plans import Plan
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.prefixes import ServerPrefixes
from kvsieve.serve.scheduler import Scheduler
from kvsieve.serve.ticket import Order
from kvsieve.store import PrefixStore
from orders import Noted, ask, prompt
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


def test_a_session_of_a_server_without_a_store_says_so(sieve):
    one = Scheduler(sieve, word_tokenizer(), ServerLimits(chunk=CHUNK))
    one.start()
    plan = plan_of("full", sieve.model)
    found = [notes(one, plan), notes(one, plan, session="s")]
    one.close()
    assert found == [
        [],
        ["the prefix store was left out: this server has none, so kv.session has no effect"],
    ]


@pytest.mark.parametrize(("name", "tokens"), [("full", 67), ("snapkv", 48)])
def test_what_serves_no_new_prompt_is_stored_for_sessions_only(scheduler, sieve, name, tokens):
    plan = plan_of(name, sieve.model).for_model(sieve.model)
    ask(scheduler, prompt(1, 60), plan)[0].ids()
    # Longer nodes replace the border of 32 tokens; the last border is stored for a plan that acts at the end.
    store = scheduler.prefixes.store
    assert [node.tokens for node in store.nodes()] == [tokens]
    ask(scheduler, prompt(1, 60), plan, session="s")[0].ids()
    assert [node.tokens for node in store.nodes() if node.owner == "/s"][:1] == [67]


def test_approximate_prefixes_serve_requests_for_their_rules_only(sieve):
    class Edited(ServerPrefixes):
        def find(self, sieve, order, chunk):
            prefixes = StoredPrefixes(self.store, "/s", session=True, approximate=("edit:window=4",))
            return prefixes.find(sieve, order.known_ids, chunk)

    store = PrefixStore()
    plan = plan_of("full", sieve.model)
    under_plan = under(sieve, plan)
    cache = under_plan.prefill(torch.tensor([prompt(1, 60)]))
    known = under_plan.edit(cache, torch.tensor([prompt(1, 60)]), window=4).cut((10, 20)).ids[0].tolist()
    store.add(under_plan, known, cache, 1.0, "/s")
    found = {}
    for prefixes in (Edited, ServerPrefixes):
        one = Scheduler(sieve, word_tokenizer(), ServerLimits(chunk=CHUNK), prefixes(store, share=False))
        one.start()
        ids = (*known, *prompt(2, 10))
        told = ask(one, ids, plan, session="s")[0].all()[-1]
        one.close()
        found[prefixes] = told.cached_tokens, [note for note in told.stats.notes if "the store" in note]
    note = "50 of 60 tokens came from the store, approximate by edit:window=4"
    assert found == {ServerPrefixes: (0, []), Edited: (50, [note])}
    # Turns of both are stored, apart.
    assert {node.approximate for node in store.nodes() if node.tokens == 67} == {("edit:window=4",), ()}


def test_a_node_counts_the_time_of_the_prefix_that_it_went_on_from(sieve):
    ids, store, plan = prompt(1, 60), PrefixStore(), plan_of("full", sieve.model)
    under_plan = under(sieve, plan)
    store.add(under_plan, ids[:40], under_plan.prefill(torch.tensor([ids[:40]])), 1000.0)
    one = Scheduler(sieve, word_tokenizer(), ServerLimits(chunk=CHUNK), ServerPrefixes(store, share=False))
    one.start()
    ask(one, ids, plan)[0].ids()
    one.close()
    assert [(node.tokens, node.seconds > 1000) for node in store.nodes()] == [(67, True)]


def test_prompts_that_come_together_prefill_a_common_beginning_once(sieve):
    one = Scheduler(sieve, word_tokenizer(), ServerLimits(chunk=CHUNK), ServerPrefixes(PrefixStore(), share=False))
    document, plan, begun = prompt(1, 80), plan_of("full", sieve.model), []
    first, second = ((*document, *prompt(more, more)) for more in (10, 40))
    requests = {"first": (first, "a"), "second": (second, "a"), "other": (prompt(3, 100), "a"), "key": (first, "b")}
    heard = [Noted(begun, name) for name in requests]
    for (ids, owner), one_heard in zip(requests.values(), heard, strict=True):
        one.submit(Order(ids, plan, 2, owner=owner), one_heard.put)
    one.start()
    cached = [one_heard.all()[-1].cached_tokens for one_heard in heard]
    one.close()
    # Nothing of another owner is found.
    assert cached == [0, 80, 0, 0]
    # The second is shorter than the other, once the first is stored.
    assert [name for name in begun if name != "key"] == ["first", "second", "other"]


def test_what_is_stored_of_a_prompt_shortens_its_wait(sieve):
    known, store, plan, begun = prompt(1, 200), PrefixStore(), plan_of("full", sieve.model), []
    under_plan = under(sieve, plan)
    store.add(under_plan, known, under_plan.prefill(torch.tensor([known])), 1.0)
    one = Scheduler(sieve, word_tokenizer(), ServerLimits(chunk=CHUNK), ServerPrefixes(store, share=False))
    heard = [Noted(begun, name) for name in ("new", "known")]
    for ids, one_heard in zip([prompt(2, 60), (*known, *prompt(3, 10))], heard, strict=True):
        one.submit(Order(ids, plan, 2), one_heard.put)
    one.start()
    cached = [one_heard.all()[-1].cached_tokens for one_heard in heard]
    one.close()
    assert begun == ["known", "new"] and cached == [0, 200]
    # Each prompt is looked up once.
    assert (store.stats().hits, store.stats().misses) == (1, 1)
