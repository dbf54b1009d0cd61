"""The server over HTTP: OpenAI's own client and plain requests against a live one, with keys, limits and errors."""

from __future__ import annotations

import contextlib
import json
import time

import httpx
import openai
import pytest
import torch

import kvsieve
from kvsieve.errors import InputError
from kvsieve.planning.turns import render, token_ids
from kvsieve.serve.keys import Keys, read_keys
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.reply_schema import ChatReply, CompletionReply
from kvsieve.serve.run import ServerOptions, application
from served_apps import listening
from tiny import tiny_model
from tiny_models import build
from toy_chats import chat_tokenizer
from toy_words import words

CHUNK = 24
KEYS = ("first-key", "second-key")
# Special tokens are not in an answer's text, so without them it can be written again.
PLAIN = {"0": -100, "1": -100, "2": -100}
PLAN = {"budget": 24, "window": 4, "paper": True}


@contextlib.contextmanager
def served(model, tokenizer, **given):
    """The address of a live server."""
    plan = kvsieve.plan("snapkv", **PLAN)
    limits = given.pop("limits", ServerLimits(chunk=CHUNK, max_tokens=64, body_bytes=40_000, messages=30))
    options = ServerOptions(
        plan, "snapkv:window=4:paper=True", 24, ("full", "streamingllm"), codecs=True, limits=limits, **given
    )
    with application(model, tokenizer, options, "tiny") as app, listening(app) as url:
        yield url, app


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def server(tokenizer):
    with served(build("llama"), tokenizer, keys=Keys(KEYS)) as (url, app):
        yield url, app


@pytest.fixture(scope="module")
def url(server):
    return server[0]


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def lone():
    return tiny_model(dtype=torch.float32)


def post(url, body, key=KEYS[0], path="/v1/chat/completions", **how):
    return httpx.post(f"{url}{path}", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=120, **how)


def alone(lone, tokenizer, messages, tokens, plan=None):
    """What the library answers."""
    ids = torch.tensor([token_ids(tokenizer, render(tokenizer, messages))])
    with kvsieve.attach(lone, plan or kvsieve.plan("snapkv", **PLAN)) as sieve:
        out = sieve.generate(ids, chunk=CHUNK, max_new_tokens=tokens, do_sample=False, eos_token_id=127, pad_token_id=0)
    return tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True), ids.shape[1]


def test_a_chat_is_answered_as_the_library_answers_it(client, lone, tokenizer):
    messages = [{"role": "user", "content": words(1, 90)}]
    told = client.chat.completions.create(model="tiny", messages=messages, max_tokens=9)
    text, tokens = alone(lone, tokenizer, messages, 9)
    choice, usage = told.choices[0], told.usage
    assert choice.message.content == text and choice.finish_reason == "length"
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (tokens, 9, tokens + 9)
    assert usage.kv["entries"] == 24 and usage.kv["method"] == "snapkv" and usage.kv["applied"]


def test_a_stream_is_the_same_answer_in_pieces(client, lone, tokenizer):
    messages = [{"role": "user", "content": words(2, 60)}]
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_completion_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"kv": {"method": "full", "map": 10}},
        )
    )
    text, tokens = alone(lone, tokenizer, messages, 9, kvsieve.plan("full"))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert len([c for c in chunks if c.choices]) >= 8 and chunks[0].choices[0].delta.role == "assistant"
    kv = chunks[-1].usage.kv
    assert kv["method"] == "full" and kv["entries"] == tokens and kv["map"] == [1.0] * 10


@pytest.mark.parametrize("budget", [30, "30", 0.25, "25%"])
def test_a_request_has_its_own_budget(client, budget):
    kv = {"method": "streamingllm", "budget": budget}
    told = client.completions.create(model="tiny", prompt=[5] * 120, max_tokens=1, extra_body={"kv": kv})
    assert told.usage.kv["method"] == "streamingllm" and told.usage.kv["entries"] == 30


def test_a_stream_on_the_wire_ends_with_done(url):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "w1"}], "max_tokens": 3, "stream": True}
    reply = post(url, body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in reply.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    assert all(json.loads(line[6:])["object"] == "chat.completion.chunk" for line in lines[:-1])


def test_the_second_question_on_a_document_finds_it(client, lone, tokenizer):
    document = words(3, 200)
    for seed in (4, 5):
        messages = [{"role": "user", "content": f"{document} {words(seed, 6)}"}]
        told = client.chat.completions.create(model="tiny", messages=messages, max_tokens=7)
        assert told.choices[0].message.content == alone(lone, tokenizer, messages, 7)[0]
    assert told.usage.prompt_tokens_details.cached_tokens >= 150
    other = openai.OpenAI(base_url=client.base_url, api_key=KEYS[1], max_retries=0)
    told = other.chat.completions.create(model="tiny", messages=messages, max_tokens=7)
    assert told.usage.prompt_tokens_details.cached_tokens == 0


def test_what_was_read_for_one_key_is_not_looked_for_by_another(server, url, monkeypatch):
    """Probes of another key's prompts: whole, cut, longer, in its session. No tree but the key's own is looked into."""
    tiers = server[1].state.service.scheduler.prefixes.store._tiers
    owners = [server[1].state.service.keys.owner(f"Bearer {key}") for key in KEYS]
    document = words(21, 140)
    body = {"model": "tiny", "prompt": document, "max_tokens": 2}
    for kv in ({"method": "full"}, {"method": "full", "session": "one"}):
        post(url, {**body, "kv": kv}, path="/v1/completions")
    looked, best = [], tiers.best

    def seen(key, owners, ids, request):
        looked.extend(owners)
        return best(key, owners, ids, request)

    monkeypatch.setattr(tiers, "best", seen)
    cached = []
    probes = (document, document.rsplit(" ", 20)[0], f"{document} w1 w2 w3")
    for probe in probes:
        for kv in ({"method": "full"}, {"method": "full", "session": "one"}, {"method": "full", "session": "../one"}):
            told = post(url, {**body, "prompt": probe, "kv": kv}, key=KEYS[1], path="/v1/completions")
            cached.append(told.json()["usage"]["prompt_tokens_details"]["cached_tokens"] if told.is_success else None)
            assert told.is_success or told.json()["error"]["param"] == "kv.session"
    # All that is found the key has had read itself, by the probe before.
    assert cached[:3] == [0, 0, None]
    assert looked and {owner.partition("/")[0] for owner in looked} == {owners[1]}
    listed = httpx.get(f"{url}/v1/kv", headers={"Authorization": f"Bearer {KEYS[1]}"}).json()["nodes"]
    mine = {node.key for node in tiers if node.owner.partition("/")[0] == owners[1]}
    assert {each["key"] for each in listed} <= mine
    # What is stored of the same prompt for both is not the same memory either.
    both = [[n for n in tiers if n.owner == owner and len(n.ids) >= 100] for owner in owners]
    places = [{part.data_ptr() for n in nodes for part in n.content.all_tensors() if part.numel()} for nodes in both]
    assert places[0] and places[1] and not places[0] & places[1]


def test_a_session_goes_on_as_a_chat_does(client, lone, tokenizer):
    said = [words(6, 80), words(7, 12), words(8, 12)]
    with kvsieve.attach(lone, kvsieve.plan("snapkv", **PLAN)) as sieve:
        chat = sieve.chat(tokenizer, max_new_tokens=8, chunk=CHUNK, suppress_tokens=[0, 1, 2])
        expected = [chat.ask(text).text for text in said]
        fed = chat.ids.shape[1]
    messages, answers = [], []
    for text in said:
        messages.append({"role": "user", "content": text})
        told = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, logit_bias=PLAIN, extra_body={"kv": {"session": "mine"}}
        )
        answers.append(told.choices[0].message.content)
        messages.append({"role": "assistant", "content": answers[-1]})
    assert answers == expected
    assert told.usage.prompt_tokens_details.cached_tokens > 80 and told.usage.prompt_tokens <= fed


def test_sampling_seeds_and_several_answers(client):
    messages = [{"role": "user", "content": words(9, 40)}]
    asked = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 1.0, "seed": 5, "n": 2}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [[choice.message.content for choice in each.choices] for each in (first, second)]
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1] and first.usage.completion_tokens <= 12


def test_likelihoods_and_stops(client):
    messages = [{"role": "user", "content": words(10, 40)}]
    told = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, logprobs=True, top_logprobs=3, logit_bias=PLAIN
    ).choices[0]
    tokens = told.logprobs.content
    assert len(tokens) == 6 and all(len(t.top_logprobs) == 3 and t.logprob <= t.top_logprobs[0].logprob for t in tokens)
    third = tokens[2].token
    asked = {"model": "tiny", "messages": messages, "max_tokens": 6, "logit_bias": PLAIN}
    cut = client.chat.completions.create(**asked, stop=third).choices[0]
    assert cut.finish_reason == "stop" and third not in cut.message.content
    assert told.message.content.startswith(cut.message.content)


def test_completions_of_several_prompts(client, lone):
    prompts = [words(11, 50), words(12, 20)]
    told = client.completions.create(model="tiny", prompt=prompts, max_tokens=5, echo=True)
    assert [c.index for c in told.choices] == [0, 1]
    assert all(c.text.startswith(prompt) for c, prompt in zip(told.choices, prompts, strict=True))
    parts = list(client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=5, stream=True, logprobs=1))
    assert sum(len(p.choices[0].logprobs.tokens) for p in parts if p.choices[0].logprobs) == 5


def test_deltas_of_a_stream_end_with_the_calls():
    from kvsieve.decoding.asked import AnswerPart
    from kvsieve.serve.chat import ChatDeltas
    from kvsieve.serve.parsers.form import AnswerForm
    from kvsieve.serve.parsers.objects import MarkedCalls

    text = 'Sure.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    called, deltas = ChatDeltas(AnswerForm(MarkedCalls())), []
    for at in range(0, len(text), 5):
        deltas += called.add(AnswerPart(0, text[at : at + 5]))
    deltas += called.add(AnswerPart(0, "", finish="stop"))
    assert "".join(delta.get("content", "") for delta, _, _ in deltas) == "Sure."
    parts = [call["function"] for delta, _, _ in deltas for call in delta.get("tool_calls", ())]
    assert parts[0]["name"] == "add" and deltas[-1][2] == "tool_calls"
    assert "".join(part["arguments"] for part in parts) == '{"a": 1}'
    plain, deltas = ChatDeltas(AnswerForm(MarkedCalls())), []
    for piece in ("Hello", " {", " there"):
        deltas += plain.add(AnswerPart(0, piece))
    assert "".join(delta.get("content", "") for delta, _, _ in deltas) == "Hello { there"
    deltas += plain.add(AnswerPart(0, " <tool", finish="stop"))
    assert "".join(delta.get("content", "") for delta, _, _ in deltas) == "Hello { there <tool"


BAD = {
    "no JSON": (b"{", 400, None),
    "no messages": ({"messages": []}, 400, "messages"),
    "a wrong role": ({"messages": [{"role": "king", "content": "w1"}]}, 400, "messages.0.role"),
    "an unknown parameter": ({"best": 3}, 400, "best"),
    "another model": ({"model": "gpt"}, 404, "model"),
    "a method that is not allowed": ({"kv": {"method": "h2o"}}, 400, "kv"),
    "a file's name": ({"kv": {"method": "snapkv:profile=/etc/passwd"}}, 400, "kv"),
    "a codec of no kind": ({"kv": {"codec": "../x"}}, 400, "kv.codec"),
    "a question that is all": ({"kv": {"question": True}}, 400, "kv.question"),
    "a question that is all, streamed": ({"kv": {"question": 99}, "stream": True}, 400, "kv.question"),
    "a session of no kind": ({"kv": {"session": "../x"}}, 400, "kv.session"),
    "too many tokens": ({"max_tokens": 65}, 400, "max_tokens"),
    "too many tokens by their new name": ({"max_completion_tokens": 65}, 400, "max_completion_tokens"),
    "too many answers": ({"n": 99}, 400, "n"),
    "a prompt beyond the context": ({"messages": [{"role": "user", "content": words(1, 600)}]}, 400, None),
    "too many messages": ({"messages": [{"role": "user", "content": "w1"}] * 31}, 400, "messages"),
    "too long a body": ({"messages": [{"role": "user", "content": "w1 " * 20_000}]}, 413, None),
    "a number as text": ({"max_tokens": "5"}, 400, "max_tokens"),
    "a budget of no kind": ({"kv": {"budget": [1]}}, 400, "kv.budget"),
    "a stop of no kind": ({"stop": 5}, 400, "stop"),
    "a content of no kind": ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content"),
    "no content": ({"messages": [{"role": "user"}]}, 400, "messages"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_told_in_openais_form(url, what):
    given, status, param = BAD[what]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "w1"}], "max_tokens": 3}
    content = given if isinstance(given, bytes) else json.dumps({**body, **given})
    headers = {"Authorization": f"Bearer {KEYS[0]}", "Content-Type": "application/json"}
    reply = httpx.post(f"{url}/v1/chat/completions", content=content, headers=headers, timeout=60)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param if param else error["param"])
    assert error["message"] and set(error) == {"message", "type", "param", "code"} and "/work" not in error["message"]


WHOLE = ("max_tokens", "max_completion_tokens", "n", "seed", "top_k", "top_logprobs", "logprobs", "best_of")


@pytest.mark.parametrize("name", [*WHOLE, "kv.map", "kv.question"])
def test_a_whole_number_may_have_a_point_and_nothing_else_is_one(url, name):
    """JSON has one kind of number, and some clients write 1 as 1.0."""
    text = name in ("logprobs", "best_of")
    path = "/v1/completions" if text else "/v1/chat/completions"
    body = {
        "model": "tiny",
        "max_tokens": 3,
        **({"prompt": "w1 w2"} if text else {"messages": [{"role": "user", "content": "w1"}]}),
    }
    body |= {"logprobs": True} if name == "top_logprobs" else {}
    if name == "max_completion_tokens":
        del body["max_tokens"]

    def asked(value):
        member = {name: value} if "." not in name else {"kv": {name[3:]: value}}
        return post(url, {**body, **member}, path=path)

    assert asked(1.0).status_code == 200, asked(1.0).text
    if name == "max_tokens":
        assert asked(2.0).json()["usage"]["completion_tokens"] == 2
    for value, said in {1.5: "1.5", "1": '"1"', True: "true"}.items():
        if (name, value) == ("kv.question", True):
            continue
        error = asked(value).json()["error"]
        assert error["message"].startswith(f"{name}: ") and error["message"].endswith(f", got {said}")
        assert error["param"] == name


def test_token_ids_have_no_point(url):
    for prompt in ([5.0], [[5.0]], [5, True], ["w1", 5]):
        reply = post(url, {"model": "tiny", "prompt": prompt}, path="/v1/completions")
        assert (reply.status_code, reply.json()["error"]["param"].split(".")[0]) == (400, "prompt")


def test_a_refused_value_is_repeated_where_it_is_short(url):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "w1"}]}
    for value, end in {"5": ', got "5"', "5" * 60: "integer", None: None}.items():
        reply = post(url, {**body, "max_tokens": value})
        assert reply.status_code == 200 if end is None else reply.json()["error"]["message"].endswith(end)


def test_other_paths_and_methods_are_refused_in_openais_form(url):
    missing, wrong = httpx.get(f"{url}/v1/none"), httpx.put(f"{url}/v1/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405) and wrong.headers["allow"] == "POST"
    assert missing.json()["error"]["type"] == "not_found_error" and wrong.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions", "/v1/v1/messages", "/v1/embeddings"])
def test_a_path_that_there_is_not_is_named_and_addresses_for_clients_are_told(url, path):
    """A client whose base_url has or lacks /v1 sends to such paths."""
    reply = post(url, {"model": "tiny"}, path=path)
    message = reply.json()["error"]["message"]
    assert reply.status_code == 404 and repr(path) in message and "OpenAI's clients" in message


def test_replies_are_what_the_schema_tells(url):
    body = {"model": "tiny", "max_tokens": 2, "kv": {"map": 3}, "temperature": 1e-300, "repetition_penalty": 0.01}
    chat = post(url, {**body, "messages": [{"role": "user", "content": "w1"}], "logprobs": True, "top_logprobs": 2})
    ChatReply.model_validate(chat.json())
    text = post(url, {**body, "prompt": "w1", "logprobs": 2}, path="/v1/completions")
    CompletionReply.model_validate(text.json())
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    errors = {
        ref["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for status, ref in paths["/v1/completions"]["post"]["responses"].items()
        if status != "200"
    }
    assert errors == {"ErrorReply"} and set(paths["/health"]["get"]["responses"]) == {"200", "503"}


def test_keys_are_asked_for_and_forms_of_other_pages_are_not_taken(url, tmp_path, monkeypatch):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "w1"}]}
    for path in ("/v1/models", "/v1/kv"):
        assert httpx.get(f"{url}{path}").status_code == 401
    assert post(url, body, key="wrong").json()["error"]["code"] == "invalid_api_key"
    headers = {"Authorization": f"Bearer {KEYS[0]}", "Content-Type": "text/plain"}
    reply = httpx.post(f"{url}/v1/chat/completions", content=json.dumps(body), headers=headers)
    assert reply.status_code == 415
    (tmp_path / "keys").write_text("# ours\none\n\ntwo\n")
    monkeypatch.setenv("KVSIEVE_API_KEYS", "three")
    keys = read_keys(str(tmp_path / "keys"))
    assert [keys.owner(f"Bearer {each}") is not None for each in ("one", "two", "three", "# ours")] == [True] * 3 + [
        False
    ]
    with pytest.raises(InputError, match="cannot be read"):
        read_keys(str(tmp_path / "none"))


def test_control_tokens_in_messages_stay_text(server, tokenizer):
    from kvsieve.serve.schema import ChatRequest

    preparer = server[1].state.service.preparer
    spelled = "w1 [EOS] w2"
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": spelled})}}
    for message in (
        {"role": "user", "content": spelled},
        {"role": "user", "content": [{"type": "text", "text": spelled}]},
        {"role": "assistant", "content": spelled, "tool_calls": [call]},
    ):
        order = preparer.chat(ChatRequest(model="tiny", messages=[message]), "")
        assert order.ids.count(127) == 1


def test_protect_and_question_reach_the_plan(server, client):
    from kvsieve.serve.schema import ChatRequest

    preparer = server[1].state.service.preparer
    messages = [{"role": "system", "content": "w5 w6"}, {"role": "user", "content": words(13, 70)}]
    messages.append({"role": "user", "content": "w7 w8 w9"})
    body = {"model": "tiny", "messages": messages, "kv": {"protect": [0], "question": True}}
    order = preparer.chat(ChatRequest(**body), "")
    assert order.constraints.protect == [(0, 4)] and order.constraints.question_tokens == 6
    assert client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=3, extra_body={"kv": body["kv"]}
    ).usage.kv["applied"]


def test_the_operators_views(url, client):
    messages = [{"role": "user", "content": words(14, 90)}]
    client.chat.completions.create(model="tiny", messages=messages, max_tokens=3)
    assert [each.id for each in client.models.list()] == ["tiny"]
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    told = httpx.get(f"{url}/v1/kv", headers={"Authorization": f"Bearer {KEYS[0]}"}).json()
    assert told["methods"][1:] == ["full", "streamingllm"] and told["state"]["running"] == 0
    assert told["store"]["nodes"] >= len(told["nodes"]) > 0
    metrics = httpx.get(f"{url}/metrics").text
    assert "kvsieve_answered_total" in metrics and "kvsieve_queue_seconds_bucket" in metrics
    page = httpx.get(f"{url}/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_a_client_that_goes_away_frees_its_work(server, url):
    scheduler = server[1].state.service.scheduler
    before = scheduler.counts["cancelled"]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "w1"}], "max_tokens": 64, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    many = {**body, "n": 8, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=many, headers=headers, timeout=60) as reply:
        next(reply.iter_lines())
    deadline = time.monotonic() + 60
    while scheduler.state()["kv_bytes"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert scheduler.state()["running"] == 0 and scheduler.state()["kv_bytes"] == 0
    assert scheduler.counts["cancelled"] in (before, before + 1)


def test_a_full_server_says_when_to_come_again(tokenizer):
    limits = ServerLimits(running=1, queue=1, chunk=CHUNK, max_tokens=512, kv_bytes=1 << 30)
    with served(build("llama"), tokenizer, limits=limits, store_memory="0") as (url, app):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "w1"}], "max_tokens": 400, "ignore_eos": True}
        assert httpx.get(f"{url}/v1/models", headers={"Host": "elsewhere.example"}).status_code == 400
        begun = app.state.service.scheduler
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                asked = {**body, "stream": True}
                streaming = httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=60)
                next(stack.enter_context(streaming).iter_lines())
            # One runs and one waits, for as long as the first is not through.
            reply = post(url, {**body, "max_tokens": 1})
            assert begun.counts["refused"] or begun.counts["answered"]
        assert reply.status_code == (429 if begun.counts["refused"] else 200)
        assert reply.status_code == 200 or int(reply.headers["retry-after"]) >= 1


def test_the_store_outlives_the_server(tokenizer, tmp_path):
    model, messages = build("llama"), [{"role": "user", "content": words(20, 150)}]
    found = []
    for _ in range(2):
        with served(model, tokenizer, store=str(tmp_path / "store")) as (url, _):
            reply = post(url, {"model": "tiny", "messages": messages, "max_tokens": 4}).json()
            found.append(
                (reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens_details"]["cached_tokens"])
            )
    assert found[0][1] == 0 and found[1][1] >= 96 and found[0][0] == found[1][0]
