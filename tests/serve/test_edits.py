"""Edits of sessions: prompts that do not continue their session go on with most of its entries, and say so."""

from __future__ import annotations

import httpx
import pytest
import torch
from typer.testing import CliRunner

import kvsieve
from kvsieve.cli.main import app
from kvsieve.decoding.asked import AnswerPart, Sampling
from kvsieve.errors import InputError
from kvsieve.hf.attach import attached
from kvsieve.hf.edit.editor import WINDOW
from kvsieve.hf.generate.edited import EditedEntries
from kvsieve.planning.plans import Plan
from kvsieve.serve.edits import RULE, LatestConversations, edit_between
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.prefixes import ServerPrefixes
from kvsieve.serve.run import ServerOptions, application
from kvsieve.serve.scheduler import Scheduler
from kvsieve.serve.ticket import Order, PromptImages
from kvsieve.store import PrefixStore
from orders import TIMEOUT, Heard, ask, prompt
from served_apps import listening
from small import plan_of
from tiny_models import build
from toy_chats import chat_tokenizer
from toy_words import word_tokenizer, words

CHUNK = 16
TOKENS = 8
FIRST = prompt(1, 200)
# The span that the second prompt leaves out, as stripped reasoning is.
CUT = (40, 100)
NEW = prompt(2, 20)
SESSION = {"session": "s", "edits": True}


@pytest.fixture(scope="module")
def sieve():
    with attached(build("llama"), Plan(), "eager", any_plan=True) as attached_sieve:
        yield attached_sieve


@pytest.fixture(scope="module")
def lone():
    """The model's twin, to which one plan at a time is attached."""
    return build("llama")


@pytest.fixture
def scheduler(sieve):
    """Makes schedulers with these limits; they are closed at the end."""
    made = []

    def make(**limits):
        store = ServerPrefixes(PrefixStore(), share=False)
        made.append(Scheduler(sieve, word_tokenizer(), ServerLimits(chunk=CHUNK, **limits), store))
        return made[-1]

    yield make
    for one in made:
        one.close()


def changed(answer):
    """The second prompt: the conversation without a span, and a new message."""
    return (*FIRST[: CUT[0]], *FIRST[CUT[1] :], *answer, *NEW)


def answered(sieve, ids, cache):
    out = sieve.generate(
        torch.tensor([ids]), chunk=CHUNK, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, cache=cache
    )
    return out.sequences[0, len(ids) :].tolist()


def by_library(model, plan):
    """Both answers of the library, which edits a cache."""
    with kvsieve.attach(model, plan) as own:
        cache = own.new_cache()
        first = answered(own, FIRST, cache)
        second = changed(first)
        known = torch.tensor([[*FIRST, *first[:-1]]])
        own.edit(cache, known).become(torch.tensor([second[: -len(NEW) - 1]]))
        return first, answered(own, second, cache)


def heard_all(heard):
    *parts, summary = heard.all()
    return [token.own.id for part in parts for token in part.tokens], summary


@pytest.mark.parametrize("name", ["full", "snapkv", "adakv", "kivi"])
def test_an_edited_session_answers_as_the_librarys_edited_cache(scheduler, sieve, lone, name):
    plan = plan_of(name, sieve.model).for_model(sieve.model)
    first, second = by_library(lone, plan)
    one = scheduler()
    one.start()
    assert ask(one, FIRST, plan, TOKENS, **SESSION)[0].ids() == first
    found, summary = heard_all(ask(one, changed(first), plan, TOKENS, **SESSION)[0])
    assert found == second
    # The window behind the cut is prefilled again.
    assert summary.stats.edited == EditedEntries(round(75 / len(changed(first)), 4), 115, WINDOW, [RULE])
    assert summary.cached_tokens == 115
    assert (one.counts["edited"], one.counts["edited_tokens"], one.counts["reread_tokens"]) == (1, 115, WINDOW)
    # The next turn continues the edited session, whose entries stay approximate.
    third = (*changed(first), *found, *prompt(3, 10))
    _, summary = heard_all(ask(one, third, plan, TOKENS, **SESSION)[0])
    edited = summary.stats.edited
    assert (edited.reused, edited.reread, edited.rules) == (0, 0, [RULE]) and 0 < edited.share < 0.45
    assert summary.cached_tokens == len(changed(first)) + TOKENS - 1


def test_requests_without_edits_are_prefilled(scheduler, sieve):
    plan = plan_of("snapkv", sieve.model).for_model(sieve.model)
    one = scheduler()
    one.start()
    first = ask(one, FIRST, plan, TOKENS, **SESSION)[0].ids()
    second = changed(first)
    plain, summary = heard_all(ask(one, second, plan, TOKENS, session="s")[0])
    assert summary.stats.edited is None and summary.cached_tokens == 0
    heard_all(ask(one, second, plan, TOKENS, **SESSION)[0])
    # Approximate entries serve no request that does not ask for them.
    assert heard_all(ask(one, second, plan, TOKENS, session="t")[0])[0] == plain


def test_a_session_of_an_earlier_process_is_edited(sieve, tmp_path):
    plan = plan_of("snapkv", sieve.model).for_model(sieve.model)
    found = []
    for restarts in (False, True):
        folder = tmp_path / str(restarts)
        one = Scheduler(sieve, word_tokenizer(), ServerLimits(chunk=CHUNK), ServerPrefixes(PrefixStore(folder), False))
        one.start()
        first = ask(one, FIRST, plan, TOKENS, **SESSION)[0].ids()
        if restarts:
            one.close()
            prefixes = ServerPrefixes(PrefixStore(folder), False)
            one = Scheduler(sieve, word_tokenizer(), ServerLimits(chunk=CHUNK), prefixes)
            one.start()
        # Another session has no such conversation.
        assert heard_all(ask(one, changed(first), plan, 2, session="t", edits=True)[0])[1].stats.edited is None
        answer, summary = heard_all(ask(one, changed(first), plan, TOKENS, **SESSION)[0])
        found.append((answer, summary.stats.edited))
        one.close()
    assert found[0] == found[1] and found[0][1].rules == [RULE]


def test_prompts_with_little_in_common_are_prefilled(scheduler, sieve):
    plan, one = plan_of("full", sieve.model), scheduler()
    one.start()
    heard_all(ask(one, FIRST, plan, TOKENS, **SESSION)[0])
    other = (*prompt(4, 150), *FIRST[100:], *prompt(5, 100))
    _, summary = heard_all(ask(one, other, plan, TOKENS, **SESSION)[0])
    assert summary.stats.edited is None and summary.cached_tokens < 4
    (note,) = [note for note in summary.stats.notes if "not edited" in note]
    assert note.endswith("of the prompt's first 250 tokens, less than half")


def test_an_edit_that_is_refused_says_why(scheduler, sieve, lone):
    plan = plan_of("lagkv", sieve.model).for_model(sieve.model)
    one = scheduler()
    one.start()
    first = ask(one, FIRST, plan, TOKENS, **SESSION)[0].ids()
    found, summary = heard_all(ask(one, changed(first), plan, TOKENS, **SESSION)[0])
    (note,) = [note for note in summary.stats.notes if "not edited" in note]
    assert "cannot be edited: of LagKV" in note and summary.stats.edited is None
    with kvsieve.attach(lone, plan) as own:
        assert found == answered(own, changed(first), None)


def test_a_session_of_another_plan_is_not_edited_and_says_why(scheduler, sieve):
    one = scheduler()
    one.start()
    first = ask(one, FIRST, plan_of("full", sieve.model), TOKENS, **SESSION)[0].ids()
    plan = plan_of("snapkv", sieve.model).for_model(sieve.model)
    _, summary = heard_all(ask(one, changed(first), plan, TOKENS, **SESSION)[0])
    (note,) = [note for note in summary.stats.notes if "not edited" in note]
    assert note.endswith("the store lacks tokens of it under this plan") and summary.stats.edited is None


def test_an_edit_of_images_says_why_there_is_none(scheduler, sieve):
    one = scheduler()
    one.start()
    plan = plan_of("full", sieve.model)
    first = ask(one, FIRST, plan, TOKENS, **SESSION)[0].ids()
    ids = changed(first)
    order = Order(ids, plan, TOKENS, images=PromptImages({}, ids, len(ids), b""), **SESSION)
    assert one.prefixes.edit(sieve, order, CHUNK, 0, None).why_not == "edits take text alone, and it has images"


def test_an_edit_takes_no_more_memory_than_there_is(scheduler, sieve):
    plan, one = plan_of("full", sieve.model), scheduler()
    needed = max(one._work.needs(Order(ids, plan, TOKENS)) for ids in (FIRST, changed([0] * TOKENS)))
    one.close()
    one = scheduler(kv_bytes=needed + 1000)
    one.start()
    first = ask(one, FIRST, plan, TOKENS, **SESSION)[0].ids()
    _, summary = heard_all(ask(one, changed(first), plan, TOKENS, **SESSION)[0])
    assert summary.stats.edited is None and any("bytes more while they move" in note for note in summary.stats.notes)
    assert one.state()["kv_bytes"] == 0


def test_new_text_of_an_edit_is_read_between_the_tokens_of_others(scheduler, sieve):
    plan, one = plan_of("full", sieve.model), scheduler(gap=1.0)
    one.start()
    known = prompt(1, 300)
    first = ask(one, known, plan, TOKENS, **SESSION)[0].ids()
    running, _ = ask(one, prompt(7, 10), plan, 400, ignore_eos=True)
    running.events.get(timeout=TIMEOUT)
    before = one.counts["new_tokens"]
    # A long message takes a short one's place.
    second = (*known[:40], *prompt(8, 8 * CHUNK), *known[80:], *first, *NEW)
    _, summary = heard_all(ask(one, second, plan, 2, **SESSION)[0])
    assert summary.stats.edited.reread == 8 * CHUNK + WINDOW
    assert one.counts["new_tokens"] - before >= 8 * one.sieve.num_layers


def test_who_leaves_during_an_edit_changes_nothing(scheduler, sieve):
    plan, one = plan_of("snapkv", sieve.model).for_model(sieve.model), scheduler()
    one.start()
    first = ask(one, FIRST, plan, TOKENS, **SESSION)[0].ids()
    nodes = {node.key for node in one.prefixes.store.nodes()}
    goes_on = (*FIRST, *first, *NEW)
    heard, tickets = Heard(), []

    def leave(event):
        if isinstance(event, AnswerPart) and event.progress and event.progress.done > 83:
            tickets[0].cancel()
        heard.events.put(event)

    order = Order(changed(first), plan, TOKENS, sampling=Sampling(logprobs=0), progress=True, **SESSION)
    tickets.append(one.submit(order, leave))
    # The next request of the session comes once the one before has gone.
    other, _ = ask(one, prompt(9, 400), plan, 2)
    other.ids()
    assert one.counts["cancelled"] == 1 and one.counts["edited"] == 0
    assert {node.key for node in one.prefixes.store.nodes() if node.owner} == nodes
    _, summary = heard_all(ask(one, goes_on, plan, TOKENS, **SESSION)[0])
    assert summary.cached_tokens == len(FIRST) + TOKENS - 1 and summary.stats.edited is None


def test_what_an_edit_saves_is_counted_in_tokens():
    known = torch.arange(300)
    # The last run is as short as the window, which is prefilled again in any case.
    edit = edit_between(
        known, [*range(100), *range(1000, 1010), *range(200, 200 + WINDOW), *range(2000, 2010)], lambda: None
    )
    assert (edit.size, edit.reused, edit.why_not) == (100, 100, None)
    edit = edit_between(known, [*range(100), *range(1000, 1010), *range(150, 260), *range(2000, 2010)], lambda: None)
    assert (edit.size, edit.reused) == (220, 100 + 110 - WINDOW)
    assert edit_between(known, [*range(1000, 1300)], lambda: None).size == 0


def test_the_tokens_of_few_conversations_are_remembered():
    latest = LatestConversations(most=2, tokens=50)
    for name, count in (("a", 20), ("b", 20), ("a", 25), ("c", 20)):
        latest.put(name, range(count))
    assert latest.get("b") is None and len(latest.get("a")) == 25 and len(latest.get("c")) == 20
    latest.put("d", range(51))
    assert latest.get("d") is latest.get("c") is None


OLD, QUESTION, THEN = words(1, 30), words(2, 150), words(3, 8)


@pytest.fixture(scope="module")
def url():
    options = ServerOptions(limits=ServerLimits(chunk=CHUNK, max_tokens=16), edits=True)
    with application(build("llama"), chat_tokenizer(), options, "tiny") as served, listening(served) as address:
        yield address


def post(url, path, body):
    return httpx.post(f"{url}/v1/{path}", json={"model": "tiny", **body}, timeout=TIMEOUT)


def by_chat(url, name, kv):
    kv = {"session": name, **kv}
    system = {"role": "system", "content": OLD}
    messages = [{"role": "user", "content": QUESTION}]
    reply = post(url, "chat/completions", {"messages": [system, *messages], "max_tokens": 8, "kv": kv}).json()
    messages += [reply["choices"][0]["message"], {"role": "user", "content": THEN}]
    return post(url, "chat/completions", {"messages": messages, "max_tokens": 8, "kv": kv}).json()["usage"]


def by_responses(url, name, kv):
    kv = {"session": name, **kv}
    message = {"role": "user", "content": QUESTION}
    body = {"instructions": OLD, "input": [message], "max_output_tokens": 8, "kv": kv}
    reply = post(url, "responses", body).json()
    body = {"input": [message, *reply["output"], {"role": "user", "content": THEN}], "max_output_tokens": 8, "kv": kv}
    return post(url, "responses", body).json()["usage"]


def by_previous_response(url, name, kv):
    body = {"instructions": OLD, "input": QUESTION, "max_output_tokens": 8, "kv": kv}
    before = post(url, "responses", body).json()["id"]
    body = {"input": THEN, "previous_response_id": before, "max_output_tokens": 8, "kv": kv}
    return post(url, "responses", body).json()["usage"]


def by_messages(url, name, kv):
    kv = {"session": name, **kv}
    message = {"role": "user", "content": QUESTION}
    body = {"system": OLD, "messages": [message], "max_tokens": 8, "kv": kv}
    reply = post(url, "messages", body).json()
    messages = [message, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": THEN}]
    return post(url, "messages", {"messages": messages, "max_tokens": 8, "kv": kv}).json()["usage"]


PROTOCOLS = {
    "chat": by_chat,
    "responses": by_responses,
    "previous response": by_previous_response,
    "messages": by_messages,
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_edits_sessions(url, protocol):
    kv = PROTOCOLS[protocol](url, protocol.replace(" ", "-"), {})["kv"]
    # The system prompt is gone: the question moves, and its beginning is prefilled again.
    edited = kv["edited"]
    assert edited["reread"] == WINDOW and edited["reused"] >= len(QUESTION.split()) + 2 - WINDOW
    assert 0.4 < edited["share"] < 0.8 and edited["rules"] == [RULE]
    declined = PROTOCOLS[protocol](url, protocol.replace(" ", "-") + "-plain", {"edits": False})["kv"]
    assert "edited" not in declined


WORD = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2}
ALONE = {
    "a chat": ("chat/completions", WORD),
    "a completion": ("completions", {"prompt": "w1"}),
    "a message": ("messages", WORD),
    "a response that is not stored": ("responses", {"input": "w1", "store": False}),
}


@pytest.mark.parametrize("case", ALONE)
def test_edits_of_no_conversation_are_refused(url, case):
    path, body = ALONE[case]
    reply = post(url, path, {**body, "kv": {"edits": True}})
    assert reply.status_code == 400 and "kv.edits: a request without kv.session" in reply.json()["error"]["message"]


def test_operators_allow_edits(url):
    chat = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2, "kv": {"edits": True}}
    reply = post(url, "chat/completions", chat)
    assert reply.status_code == 400 and "kv.session" in reply.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/kv").json()["edits"] is True
    with application(build("llama"), chat_tokenizer(), ServerOptions(), "tiny") as served, listening(served) as other:
        for kv, status in (({"edits": True}, 400), ({"edits": False}, 200), ({}, 200)):
            reply = post(other, "chat/completions", {**chat, "kv": {"session": "s", **kv}})
            assert reply.status_code == status
            assert status == 200 or "--edits on" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "reason"), [(["yes"], "on or off"), (["on", "--store-memory", "0"], "--store-memory 0")]
)
def test_options_of_edits_are_checked(options, reason):
    with pytest.raises(InputError, match=reason):
        CliRunner().invoke(app, ["serve", "--edits", *options], catch_exceptions=False, standalone_mode=False)
