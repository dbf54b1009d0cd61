"""Anthropic's Messages over HTTP: its own client against a live server, with tools, streams, keys and errors."""

from __future__ import annotations

import json
import time

import anthropic
import httpx
import pytest

from kvsieve.errors import KvsieveError
from kvsieve.serve.anthropic.reply import ContentBlocks
from kvsieve.serve.anthropic.reply_schema import MessageReply
from kvsieve.serve.keys import Keys
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.run import ServerOptions, application
from kvsieve.serve.ticket import BusyError, StoppedError
from served_apps import listening
from tiny_models import build
from toy_chats import chat_tokenizer
from toy_images import data_url, file_of, part, picture, processor
from toy_tools import scripted, tools_tokenizer

KEYS = ("first-key", "second-key")
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ADD = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
QUESTION = {"role": "user", "content": "w1 w2 w3"}
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_a", "name": "add", "input": {"a": 2}}]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_a", "content": "5"}]}
# The scripted model answers "The sum is 5." to a result.
SUM = {"messages": [QUESTION, CALLED, RESULT]}
BASE = {"model": "scripted", "max_tokens": 40, "messages": [QUESTION]}


@pytest.fixture(scope="module")
def server():
    tokenizer = tools_tokenizer()
    options = ServerOptions(keys=Keys(KEYS), limits=ServerLimits(chunk=24, max_tokens=64, body_bytes=40_000))
    with application(scripted(tokenizer), tokenizer, options, "scripted") as app, listening(app) as url:
        yield app, url


@pytest.fixture(scope="module")
def url(server):
    return server[1]


@pytest.fixture(scope="module")
def client(url):
    with anthropic.Anthropic(base_url=url, api_key=KEYS[0], max_retries=0, timeout=60) as made:
        yield made


def post(url, body, path="/v1/messages", **headers):
    content = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"x-api-key": KEYS[0], "content-type": "application/json", **headers}
    return httpx.post(f"{url}{path}", content=content, headers=headers, timeout=60)


def blocks(message):
    """Content without ids and space around texts."""
    listed = [block.to_dict() for block in message.content]
    return [
        {name: value.strip() if name == "text" else value for name, value in block.items() if name != "id"}
        for block in listed
    ]


def test_a_call_is_answered_and_its_result_is_read(client):
    called = client.messages.create(**BASE, tools=[ADD], system="w5")
    assert called.stop_reason == "tool_use" and called.stop_sequence is None and called.model == "scripted"
    call = {"type": "tool_use", "name": "add", "input": {"a": 2, "b": 3}}
    assert blocks(called) == [{"type": "text", "text": "Let_me_see."}, call]
    assert called.id.startswith("msg_") and called.content[1].id.startswith("toolu_")
    result = {"type": "tool_result", "tool_use_id": called.content[1].id, "content": [{"type": "text", "text": "5"}]}
    turns = [QUESTION, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    said = client.messages.create(**{**BASE, "messages": turns}, tools=[ADD], system="w5")
    assert blocks(said) == [{"type": "text", "text": "The sum is 5."}] and said.stop_reason == "end_turn"


def test_the_clients_own_runner_calls_tools(client):
    asked = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        asked.append((a, b))
        return str(a + b)

    for stream in (False, True):
        runner = client.beta.messages.tool_runner(**BASE, tools=[add], stream=stream)
        assert blocks(runner.until_done()) == [{"type": "text", "text": "The sum is 5."}]
    assert asked == [(2, 3)] * 2


@pytest.mark.parametrize("more", [{"tools": [ADD]}, SUM, {"max_tokens": 2}])
def test_a_stream_is_the_same_message(client, more):
    with client.messages.stream(**{**BASE, **more}) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    whole = client.messages.create(**{**BASE, **more})
    assert blocks(streamed) == blocks(whole) and streamed.stop_reason == whole.stop_reason
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    counts = [(said.usage.input_tokens + said.usage.cache_read_input_tokens) for said in (streamed, whole)]
    assert counts[0] == counts[1] and streamed.usage.output_tokens == whole.usage.output_tokens > 0


def test_events_on_the_wire_have_their_names(url):
    lines = post(url, {**BASE, "stream": True, "tools": [ADD]}).text.split("\n")
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in data] and names[:2] == ["message_start", "ping"]
    assert names.count("content_block_start") == names.count("content_block_stop") == 2
    assert data[-2]["usage"]["kv"]["method"] == "full" and "[DONE]" not in lines


def test_why_an_answer_ended(client):
    def end(**more):
        said = client.messages.create(**{**BASE, **SUM, **more})
        return said.stop_reason, said.stop_sequence, said.content[0].text

    assert end(stop_sequences=["w9", "is 5"]) == ("stop_sequence", "is 5", "The sum ")
    assert end(stop_sequences=["w9"]) == ("end_turn", None, "The sum is 5.")
    assert end(max_tokens=2) == ("max_tokens", None, "The sum")
    # More than the server gives is its limit.
    assert end(max_tokens=32_000)[0] == "end_turn"


def test_tokens_are_counted_as_they_are_read(client):
    given = {"model": "scripted", "messages": [QUESTION], "system": "w5 w6", "tools": [ADD]}
    counted = client.messages.count_tokens(**given).input_tokens
    usage = [client.messages.create(**given, max_tokens=1).usage for _ in range(2)]
    assert [each.input_tokens + each.cache_read_input_tokens for each in usage] == [counted] * 2
    assert usage[0].cache_creation_input_tokens == 0
    assert counted > client.messages.count_tokens(**{**given, "tools": []}).input_tokens
    assert client.beta.messages.count_tokens(**given, betas=["token-counting-2024-11-01"]).input_tokens == counted


def test_a_prompt_that_was_read_is_cached(client):
    long = {"role": "user", "content": "w7 " * 200}
    usage = [client.messages.create(**{**BASE, "messages": [long], "max_tokens": 1}).usage for _ in range(2)]
    assert usage[0].cache_read_input_tokens < 10 and usage[1].cache_read_input_tokens > 100
    assert len({each.input_tokens + each.cache_read_input_tokens for each in usage}) == 1


def test_options_of_kvsieve_reach_the_plan(client):
    said = client.messages.create(**BASE, extra_body={"kv": {"map": 3}})
    assert said.to_dict()["usage"]["kv"]["map"] == [1.0] * 3


# What a coding agent sends.
AGENT = {
    "model": "scripted",
    "max_tokens": 32_000,
    "temperature": 1,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.1; cch=fa690;"},
        {"type": "text", "text": "w5", "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}},
        {"type": "text", "text": "w6 w7"},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "w1"}, {"type": "text", "text": "w2"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "w8", "signature": "EuYBCkQ"},
                {"type": "text", "text": "w9"},
                {"type": "tool_use", "id": "toolu_01A", "name": "tool3", "input": {}, "caller": {"type": "direct"}},
                {"type": "tool_use", "id": "toolu_01B", "name": "tool4", "input": {"path": "w3"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_01A", "content": [{"type": "text", "text": "w4"}]},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_01B",
                    "content": "w5",
                    "is_error": True,
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "w6", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "tools": [
        {
            "name": f"tool{number}",
            "description": "w1",
            "input_schema": {"$schema": "http://json-schema.org/draft-07/schema#", **PARAMETERS},
            "eager_input_streaming": True,
        }
        for number in range(30)
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "metadata": {"user_id": "user_0_account__session_0"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}


def test_what_agents_send_is_answered(url):
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,context-management-2025-06-27",
    }
    for stream in (False, True):
        reply = post(url, {**AGENT, "stream": stream}, "/v1/messages?beta=true", **headers)
        assert reply.status_code == 200, reply.text
    assert post(url, AGENT).json()["usage"]["cache_read_input_tokens"] > 0


def user(*content):
    return {"messages": [{"role": "user", "content": list(content)}]}


def source(kind, **more):
    return {"type": kind, "source": more}


BAD = {
    "no max_tokens": ({"max_tokens": ...}, "max_tokens: Field required"),
    "a thread": ({"thread": {"type": "create"}}, "no conversation is held here"),
    "an unknown member": ({"seed": 3}, "seed: this server knows no such parameter"),
    "a member of a message": ({"messages": [{**QUESTION, "name": "x"}]}, "messages.0.name: this server knows no such"),
    "a number as text": ({"max_tokens": "5"}, 'got "5"'),
    "a temperature": ({"temperature": 3}, "temperature: "),
    "no messages": ({"messages": []}, "messages: "),
    "no content": (user(), "messages.0.content: expected one block"),
    "a number as content": ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: "),
    "no JSON": (b'{"model": ', "JSON"),
    "a server's tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    "no schema of a tool": ({"tools": [{"name": "add"}]}, "tools.0.input_schema: "),
    "a tool without its name": ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice: "),
    "a name beside another choice": (
        {"tools": [ADD], "tool_choice": {"type": "auto", "name": "add"}},
        "tool_choice: the type tool has a name",
    ),
    "servers of tools": ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers: "),
    "an edit": (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {}}]}},
        "'clear_tool_uses_20250919'",
    ),
    "a block of Anthropic's tools": (user({"type": "web_search_tool_result", "x": 1}), "'web_search_tool_result'"),
    "a member of another block": (user({"type": "text", "text": "w1", "name": "x"}), "no member 'name'"),
    "a text without text": (user({"type": "text"}), "messages.0.content.0: a block of type 'text' has no text"),
    "an image's address": (user(source("image", type="url", url="https://x")), "no address or file is fetched"),
    "an image for a model of text": (
        {"system": "w5", **user(source("image", type="base64", media_type="image/png", data="AAAA"))},
        "messages: images are not read here",
    ),
    "a PDF": (user(source("document", type="base64", media_type="application/pdf", data="")), "no PDF"),
    "citations": (
        user({**source("document", type="text", media_type="text/plain", data="w1"), "citations": {"enabled": True}}),
        "no citations",
    ),
    "a result of the assistant": ({"messages": [{**RESULT, "role": "assistant"}]}, "the assistant's blocks are"),
    "an answer to continue": ({"messages": [QUESTION, CALLED]}, "end with a message of the user"),
    "many stops": ({"stop_sequences": ["w1"] * 17}, "stop_sequences: at most 16"),
    "an empty stop": ({"stop_sequences": [""]}, "stop_sequences: "),
    "a form that takes too long": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}}},
        "output_config.format: ",
    ),
    "a plan": ({"kv": {"method": "none-such"}}, "none-such"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named_in_anthropics_form(url, what):
    change, words = BAD[what]
    body = change
    if isinstance(change, dict):
        body = {name: value for name, value in {**BASE, **change}.items() if value is not ...}
    reply = post(url, body)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], set(reply.json())) == (400, "invalid_request_error", {"type", "error"})
    assert words in error["message"] and "Value error" not in error["message"]


def test_errors_are_the_clients_classes(server, client, url, monkeypatch):
    with pytest.raises(anthropic.NotFoundError, match="this server has the model 'scripted'"):
        client.messages.create(**{**BASE, "model": "claude"})
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.batches.list()
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="seed"):
        client.messages.create(**BASE, extra_body={"seed": 1})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: the prompt has 6[0-9]{2} tokens"):
        client.messages.create(**{**BASE, "messages": [{"role": "user", "content": "w1 " * 600}]})
    with pytest.raises(anthropic.APIStatusError) as large:
        client.messages.create(**{**BASE, "messages": [{"role": "user", "content": "w1 " * 20_000}]})
    assert large.value.status_code == 413 and large.value.body["error"]["type"] == "request_too_large"

    def fails(error):
        def submit(*given):
            raise error

        monkeypatch.setattr(server[0].state.service.scheduler, "submit", submit)

    fails(BusyError("enough wait", 7))
    with pytest.raises(anthropic.RateLimitError, match="enough wait") as busy:
        client.messages.create(**BASE)
    assert busy.value.response.headers["retry-after"] == "7"
    fails(StoppedError("it has ended"))
    with pytest.raises(anthropic.InternalServerError, match="overloaded_error"):
        client.messages.create(**BASE)


def test_an_error_within_a_stream_is_an_event(client, monkeypatch):
    def add(*given):
        raise KvsieveError("no room is left")

    monkeypatch.setattr(ContentBlocks, "add", add)
    with pytest.raises(anthropic.APIStatusError, match="no room is left") as failed:
        list(client.messages.create(**BASE, stream=True))
    assert failed.value.body == {"type": "error", "error": {"type": "api_error", "message": "no room is left"}}


def test_either_header_has_the_key(url):
    for path, body in (("/v1/messages", BASE), ("/v1/chat/completions", BASE)):
        for headers, status in (
            ({"x-api-key": KEYS[1]}, 200),
            ({"Authorization": f"Bearer {KEYS[1]}"}, 200),
            ({"Authorization": "Basic dTpw", "x-api-key": KEYS[1]}, 200),
            ({"Authorization": KEYS[1]}, 401),
            ({"x-api-key": "third-key"}, 401),
            ({}, 401),
        ):
            assert httpx.post(f"{url}{path}", json=body, headers=headers, timeout=60).status_code == status
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(**BASE)
    keys = Keys(KEYS)
    assert keys.owner(f"Bearer {KEYS[0]}") == keys.owner(None, KEYS[0]) != keys.owner(None, KEYS[1])
    # Nothing sent is no key.
    assert Keys([""]).owner(None) is Keys([""]).owner("Bearer ", " ") is None


def test_replies_and_keys_are_in_the_schema(url):
    MessageReply.model_validate(post(url, {**BASE, "tools": [ADD]}).json())
    schema = httpx.get(f"{url}/openapi.json").json()
    route = schema["paths"]["/v1/messages"]["post"]
    assert route["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/MessageErrorReply")
    assert {name for way in route["security"] for name in way} == {"HTTPBearer", "APIKeyHeader"}
    assert {"MessagesRequest", "CountTokensRequest", "ContentBlock"} <= set(schema["components"]["schemas"])


def test_a_client_that_goes_away_frees_its_work():
    model = build("llama", max_position_embeddings=1 << 15)
    options = ServerOptions(limits=ServerLimits(max_tokens=1 << 15), store_memory="0")
    with application(model, chat_tokenizer(), options, "tiny") as app, listening(app) as url:
        scheduler = app.state.service.scheduler
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            body = {"model": "tiny", "max_tokens": 30_000, "messages": [QUESTION]}
            with client.messages.create(**body, stream=True) as stream:
                assert next(iter(stream)).type == "message_start"
        deadline = time.monotonic() + 60
        while not scheduler.counts["cancelled"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert scheduler.counts["cancelled"] == 1 and scheduler.state()["running"] == 0


# Reasons, then answers.
THOUGHT = ["[THINK]", "Hm.", "Sure.", "[/THINK]", "So:", "[EOS]"]
REASONING = (
    "{% for m in messages %}<{{ m.role }}> {% if m.reasoning_content %}[THINK] {{ m.reasoning_content }} [/THINK] "
    "{% endif %}{{ m.content }} [EOS] {% endfor %}{% if enable_thinking %}w20 {% endif %}{% if reasoning_effort %}w21 "
    "{% endif %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def test_reasoning_is_a_thinking_block():
    tokenizer = tools_tokenizer(REASONING, THOUGHT, ["[THINK]", "[/THINK]"])
    model = scripted(tokenizer, THOUGHT)
    with application(model, tokenizer, ServerOptions(), "scripted") as app, listening(app) as url:
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            said = client.messages.create(**BASE)
            with client.messages.stream(**BASE) as stream:
                streamed = stream.get_final_message()
            omitted = client.messages.create(**BASE, thinking={"type": "adaptive", "display": "omitted"})
            turns = [QUESTION, {"role": "assistant", "content": said.content}, QUESTION]
            bare = [QUESTION, {"role": "assistant", "content": said.content[1:]}, QUESTION]
            more = ({}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"output_config": {"effort": "max"}})
            given = [{**more, "messages": [QUESTION]} for more in more] + [{"messages": turns}, {"messages": bare}]
            counts = [client.messages.count_tokens(model="scripted", **body).input_tokens for body in given]
    thinking, text = blocks(said)
    assert (thinking["type"], thinking["thinking"], text["text"]) == ("thinking", "Hm. Sure.", "So:")
    assert blocks(streamed) == [thinking, text] and streamed.usage.output_tokens_details.thinking_tokens == 4
    assert blocks(omitted) == [{**thinking, "thinking": ""}, text]
    assert counts[1] == counts[2] == counts[0] + 1 and counts[3] == counts[4] + 4


def test_an_image_is_read_as_in_a_chat():
    reader = processor("llava")
    options = ServerOptions(limits=ServerLimits(max_tokens=16))
    image = file_of(picture(1))
    with application(build("llava"), reader.tokenizer, options, "tiny", reader) as app, listening(app) as url:
        chat = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": [part(image)]}]}
        media_type, _, data = data_url(image).removeprefix("data:").partition(";base64,")
        block = source("image", type="base64", media_type=media_type, data=data)
        read = post(url, {**chat, **user(block)}).json()
        answered = post(url, chat, "/v1/chat/completions").json()
        broken = source("image", type="base64", media_type="image/png", data="AAA")
        refused = post(url, {**chat, "system": "w5", **user(broken)}).json()["error"]
    # The chat that it becomes numbers messages in another way.
    assert refused["message"].startswith("messages: the image is no base64")
    assert read["content"][0]["text"] == answered["choices"][0]["message"]["content"]
    usage = read["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == answered["usage"]["prompt_tokens"] > 4
