"""Documents of a request: joined before the first user message's text, and found in the store in any order."""

from __future__ import annotations

import json
import weakref

import httpx
import pytest
import torch

import kvsieve
from kvsieve.hf.attach import attached
from kvsieve.hf.join.documents import JoinReader
from kvsieve.hf.join.join import Joining
from kvsieve.planning.plans import Plan
from kvsieve.planning.turns import render, token_ids
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.run import ServerOptions, application
from kvsieve.serve.scheduler import Scheduler
from kvsieve.serve.ticket import PromptDocuments
from orders import TIMEOUT, ask, prompt
from served_apps import listening
from tiny_models import build
from toy_chats import chat_tokenizer
from toy_words import word_tokenizer, words

CHUNK = 16
SIZE = 50


# Each protocol has documents of its own, so that none is found that another has left.
SYSTEM, QUESTION = "w81 w82 w83", "w84 w85"


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


WIDE = "snapkv:window=32:paper=True"
ALLOWED = ("full", "snapkv:window=4:paper=True", WIDE, "fastkv:tsp_layer=1:window=4:paper=True", "finch", "gemfilter")


@pytest.fixture(scope="module")
def url(tokenizer):
    limits = ServerLimits(chunk=CHUNK, max_tokens=16, documents=4)
    options = ServerOptions(limits=limits, others=ALLOWED)
    with application(build("llama"), tokenizer, options, "tiny") as app, listening(app) as address:
        yield address


def post(url, path, body):
    return httpx.post(f"{url}/v1/{path}", json={"model": "tiny", **body}, timeout=TIMEOUT)


def by_chat(url, text, kv):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    reply = post(url, "chat/completions", {"messages": messages, "max_tokens": 6, "kv": kv}).json()
    return reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens"], reply["usage"]["kv"]


def by_responses(url, text, kv):
    reply = post(url, "responses", {"instructions": SYSTEM, "input": text, "max_output_tokens": 6, "kv": kv}).json()
    return reply["output"][0]["content"][0]["text"], reply["usage"]["input_tokens"], reply["usage"]["kv"]


def by_messages(url, text, kv):
    messages = [{"role": "user", "content": text}]
    reply = post(url, "messages", {"system": SYSTEM, "messages": messages, "max_tokens": 6, "kv": kv}).json()
    usage = reply["usage"]
    return reply["content"][0]["text"], usage["input_tokens"] + usage["cache_read_input_tokens"], usage["kv"]


# The default join.
LINK = "link:tokens=32:shift=true"
PROTOCOLS = {"chat": by_chat, "responses": by_responses, "messages": by_messages}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_documents_are_found_in_any_order(url, protocol):
    send, seed = PROTOCOLS[protocol], 10 * list(PROTOCOLS).index(protocol)
    first, second, third = (words(seed + number, SIZE) for number in range(3))
    counts = send(url, QUESTION, {"documents": [first, second]})[2]["documents"]
    assert counts == {"join": LINK, "found": 0, "prefilled": 2 * SIZE, "reread": 32}
    found = send(url, "w86", {"documents": [third, second, first]})
    assert found[2]["documents"] == {"join": LINK, "found": 2 * SIZE, "prefilled": SIZE, "reread": 64}
    assert found[2]["edited"]["rules"] == [LINK] and not found[2]["notes"]
    # The prompt is the text that a client would have written.
    written = send(url, f"{third}\n\n{second}\n\n{first}\n\nw86", {})
    assert found[1] == written[1]
    full = send(url, "w86", {"documents": [third, second, first], "join": "full"})
    assert full[:2] == written[:2] and "edited" not in full[2]


def test_a_later_turn_finds_the_documents_of_the_first(url):
    documents = [words(seed, SIZE) for seed in (71, 72)]
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    kv = {"documents": documents}
    first = post(url, "chat/completions", {"messages": chat, "max_tokens": 6, "kv": kv}).json()
    # Documents of other tests may begin with the same word.
    assert first["usage"]["kv"]["documents"]["prefilled"] >= 2 * SIZE - 2
    chat += [{"role": "assistant", "content": "w3"}, {"role": "user", "content": "w87"}]
    later = post(url, "chat/completions", {"messages": chat, "max_tokens": 6, "kv": kv}).json()
    counts = {"join": LINK, "found": 2 * SIZE, "prefilled": 0, "reread": 32}
    assert later["usage"]["kv"]["documents"] == counts
    # The prompt is the text that a client would have written.
    chat[1] = {"role": "user", "content": "\n\n".join([*documents, QUESTION])}
    written = post(url, "chat/completions", {"messages": chat, "max_tokens": 6}).json()
    assert later["usage"]["prompt_tokens"] == written["usage"]["prompt_tokens"]


@pytest.mark.parametrize("method", ["full", "snapkv:window=4:paper=True"])
@pytest.mark.parametrize(
    "join", ["modules", "link:tokens=8", "blend:share=15%", "prophet", "relevant:documents=1", "ape:temperature=0.9"]
)
def test_the_answer_is_that_of_the_librarys_join(url, tokenizer, method, join):
    texts = [words(seed, SIZE) for seed in (51, 52, 53)]
    kv = {"documents": texts, "join": join, "method": method, "budget": 24} if "snap" in method else {}
    kv = kv or {"documents": texts, "join": join, "method": method}
    text, _, usage = by_chat(url, QUESTION, kv)
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "\n\n".join([*texts, QUESTION])}]
    ids = token_ids(tokenizer, render(tokenizer, chat))
    start = ids.index(token_ids(tokenizer, "w91")[0]) + 1
    documents = [ids[at : at + SIZE] for at in range(start, start + 3 * SIZE, SIZE)]
    plan = kvsieve.plan("snapkv", window=4, paper=True, budget=24) if "snap" in method else kvsieve.plan("full")
    with kvsieve.attach(build("llama"), plan) as sieve:
        question = ids[start + 3 * SIZE :]
        joined = sieve.join(documents, ids[:start], kind=join, question=question, chunk=CHUNK)
        out = sieve.generate(
            torch.tensor([ids]), cache=joined.cache, chunk=CHUNK, max_new_tokens=6, do_sample=False, eos_token_id=127
        )
    assert text == tokenizer.decode(out.sequences[0, len(ids) :], skip_special_tokens=True)
    assert usage["documents"]["join"] == joined.kind
    assert usage["entries"] == (24 if "snap" in method else len(ids))


CHAT = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2}
ANSWERED = {"role": "assistant", "content": "w2"}
REFUSED = {
    "no list": (CHAT, {"documents": "w1"}, "kv.documents"),
    "none": (CHAT, {"documents": []}, "kv.documents"),
    "no texts": (CHAT, {"documents": [1]}, "kv.documents"),
    "too many": (CHAT, {"documents": ["w1"] * 5}, "at most 4"),
    "a blank one": (CHAT, {"documents": ["w1", " \n"]}, "number 1 is blank"),
    "too long": (CHAT, {"documents": [words(1, 600)]}, "context"),
    "no documents": (CHAT, {"join": "link"}, "kv.join"),
    "an unknown join": (CHAT, {"documents": ["w1"], "join": "lnk"}, "link"),
    "a join's unknown parameter": (CHAT, {"documents": ["w1"], "join": "link:token=3"}, "tokens"),
    "a session": (CHAT, {"documents": ["w1"], "session": "s"}, "kv.session"),
    "an edit": (CHAT, {"documents": ["w1"], "edits": True}, "without kv.edits"),
    "protected messages": (CHAT, {"documents": ["w1"], "protect": [0]}, "kv.protect"),
    "no user": ({"messages": [ANSWERED]}, {"documents": ["w1"]}, "the user's"),
    "a method": (
        CHAT,
        {"documents": [words(1, SIZE), words(2, SIZE)], "method": "gemfilter"},
        "keeps a shorter prompt in their place; send them in the message, or",
    ),
    "a method that shortens the prompt": (
        CHAT,
        {"documents": ["w1"], "join": "full", "method": "gemfilter"},
        "keeps a shorter prompt in their place; send them in the message, or",
    ),
    "a question shorter than the observation window": (
        CHAT,
        {"documents": [words(1, SIZE), words(2, SIZE)], "join": "ape", "method": WIDE, "budget": 40},
        "looks back on the last 32; ask more, take kv.join 'full', or take another method",
    ),
    "a join deeper than the model": (
        CHAT,
        {"documents": [words(1, SIZE), words(2, SIZE)], "join": "blend:layer=40"},
        "leaves no deeper layer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_documents_that_cannot_be_joined_are_refused(url, case):
    chat, kv, message = REFUSED[case]
    for stream in (False, True):
        reply = post(url, "chat/completions", {**chat, "kv": kv, "stream": stream})
        assert reply.status_code == 400 and message in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize("join", ["link", "modules", "blend", "prophet", "ape"])
def test_one_document_is_answered_as_a_plain_prompt_is(url, join):
    """Also under a method that joins nothing else, in every join that the library prefills in order."""
    messages = [{"role": "user", "content": "w1 w2"}]
    body = {"messages": messages, "max_tokens": 4}
    kv = {"method": "fastkv:tsp_layer=1:window=4:paper=True", "budget": 24}
    wanted, found = (
        post(url, "chat/completions", {**body, "kv": {**kv, "documents": [words(3, SIZE)], "join": kind}})
        for kind in ("full", join)
    )
    assert found.status_code == 200, found.text
    assert found.json()["choices"] == wanted.json()["choices"]
    two = {**kv, "documents": [words(3, SIZE), words(4, SIZE)], "join": "modules"}
    refused = post(url, "chat/completions", {**body, "kv": two})
    assert refused.status_code == 400 and "drops tokens between layers" in refused.json()["error"]["message"]


BODIES = {
    "chat/completions": CHAT,
    "responses": {"input": "w1", "max_output_tokens": 2},
    "messages": CHAT,
}


@pytest.mark.parametrize("path", BODIES)
def test_sessions_have_no_documents_in_any_protocol(url, path):
    reply = post(url, path, {**BODIES[path], "kv": {"documents": ["w1"], "session": "s"}})
    assert reply.status_code == 400 and "without kv.session" in reply.json()["error"]["message"]


def test_a_response_says_that_the_documents_before_it_are_not_stored(url):
    kv = {"documents": [words(81, SIZE), words(82, SIZE)]}
    body = {"input": QUESTION, "max_output_tokens": 2}
    first = post(url, "responses", {**body, "kv": kv}).json()["id"]
    found = [
        post(url, "responses", {**body, "previous_response_id": first, **more}).json()["usage"]["kv"]["notes"]
        for more in ({"kv": kv}, {})
    ]
    assert found == [[], ["the previous response had kv.documents, which are not stored: this prompt is without them"]]


@pytest.mark.parametrize("plan", [{}, {"method": "snapkv:window=4:paper=True", "budget": 24}], ids=["full", "snapkv"])
def test_progress_never_goes_back(url, plan):
    """Of documents that are prefilled, and of the same ones that are found."""
    kv = {"documents": [words(91, SIZE), words(92, SIZE)], **plan}
    for _ in range(2):
        reply = post(url, "chat/completions", {**CHAT, "kv": kv, "stream": True, "return_progress": True})
        chunks = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if "_progress" in line]
        reports = [chunk["prompt_progress"] for chunk in chunks]
        done = [report["processed"] for report in reports]
        assert len(done) > 2 and done == sorted(done)
        assert all(report["cache"] <= report["processed"] for report in reports)


@pytest.mark.parametrize("join", ["link:tokens=4", "full"])
def test_memory_is_reserved_for_all_caches_of_a_join(monkeypatch, join):
    sizes, alive, left = [], [], []
    prefill, fill = JoinReader.prefill, Joining._fill

    def noted(self, ids, done):
        cache, found = prefill(self, ids, done)
        sizes.append(cache.num_seen)
        alive.append(weakref.ref(cache))
        return cache, found

    def filled(*given):
        left.extend(one for one in alive if one() is not None)
        return fill(*given)

    monkeypatch.setattr(JoinReader, "prefill", noted)
    monkeypatch.setattr(Joining, "_fill", filled)
    texts = (prompt(1, 20), prompt(2, 30), prompt(1, 20))
    documents = PromptDocuments(prompt(3, 40), texts, join)
    with attached(build("llama"), Plan(), "eager", any_plan=True) as sieve:
        joined = sieve.join(texts, documents.before, kind=join, chunk=CHUNK)
    assert not left
    # The only cache of documents in order is the prompt's.
    assert documents.copied == (0 if join == "full" else sum(sizes)) and joined.cache.num_seen == documents.end


@pytest.mark.parametrize(
    ("prompt", "kv", "param"),
    [("w1", {"documents": ["w1"]}, "kv.documents"), (["w1", "w2"], {"session": "s"}, "kv.session")],
)
def test_completions_have_no_documents_and_a_session_has_one_prompt(url, prompt, kv, param):
    reply = post(url, "completions", {"prompt": prompt, "kv": kv})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_control_tokens_in_documents_are_text(url):
    documents = [f"{words(61, SIZE)} [EOS]", words(62, SIZE)]
    tokens = by_chat(url, QUESTION, {"documents": documents})[1]
    assert tokens == by_chat(url, "\n\n".join([*documents, QUESTION]), {})[1]


def test_documents_are_prefilled_between_the_tokens_of_others():
    with attached(build("llama"), Plan(), "eager", any_plan=True) as sieve:
        one = Scheduler(sieve, word_tokenizer(), ServerLimits(chunk=CHUNK, gap=1.0))
        one.start()
        running, _ = ask(one, prompt(7, 10), Plan(), 400, ignore_eos=True)
        running.events.get(timeout=TIMEOUT)
        before = one.counts["new_tokens"]
        texts = tuple(prompt(seed, 5 * CHUNK) for seed in (1, 2, 3))
        documents = PromptDocuments(prompt(4, 9), texts, "link:tokens=32")
        ids = (*documents.before, *(token for text in texts for token in text), *prompt(5, 9))
        heard, _ = ask(one, ids, Plan(), 2, documents=documents)
        counts = heard.all()[-1].documents
        # A token for each part of each layer and chunk.
        assert one.counts["new_tokens"] - before >= 15 * sieve.num_layers
        assert (counts.prefilled, counts.reread) == (15 * CHUNK, 64)
        one.close()
