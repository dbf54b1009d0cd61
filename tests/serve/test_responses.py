"""/v1/responses: OpenAI's own client, its framework of agents and plain requests against a live server."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from kvsieve.serve.keys import Keys
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.responses.kept import KeptResponses
from kvsieve.serve.responses.reply_schema import ItemsReply, ResponseReply
from kvsieve.serve.run import ServerOptions, application
from served_apps import listening
from tiny_models import build
from toy_images import data_url, file_of, picture, processor
from toy_tools import TURN, follows, scripted, tools_tokenizer

KEYS = ("first-key", "second-key")
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": False}
EVENT = TypeAdapter(ResponseStreamEvent)
# Longer than a chunk of the prefill.
LONG = " ".join(f"w{number}" for number in range(60))


@pytest.fixture(scope="module")
def url():
    tokenizer = tools_tokenizer()
    options = ServerOptions(limits=ServerLimits(chunk=24, max_tokens=64, messages=30), keys=Keys(KEYS))
    with application(scripted(tokenizer), tokenizer, options, "scripted") as app, listening(app) as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key=KEYS[0], max_retries=0, timeout=60) as made:
        yield made


def ask(client, question="w1 w2 w3", **more):
    return client.responses.create(model="scripted", input=question, **more)


def post(url, body, key=KEYS[0]):
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/responses", json={"model": "scripted", **body}, headers=headers, timeout=60)


def events_of(url, body):
    """The events of a stream, each valid by OpenAI's types."""
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    asked = {"model": "scripted", "stream": True, **body}
    with httpx.stream("POST", f"{url}/responses", json=asked, headers=headers, timeout=60) as reply:
        lines = [line for line in reply.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [EVENT.validate_python(event).type for event in events] == names
    return events


def kinds_of(events):
    """Types of events without repetitions."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]


TEXT_EVENTS = ["output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
CALL_EVENTS = ["function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


def test_a_reply_has_openais_members(url):
    body = {"input": "w1 w2", "instructions": "w5", "tools": [ADD], "metadata": {"a": "b"}, "temperature": 0.0}
    reply = post(url, {**body, "text": {"format": {"type": "text"}}}).json()
    ResponseReply.model_validate(reply)
    Response.model_validate(reply)
    message, call = reply["output"]
    assert message["content"][0]["text"].strip() == "Let_me_see." and call["name"] == "add"
    assert json.loads(call["arguments"]) == {"a": 2, "b": 3} and call["call_id"] != call["id"]
    assert (reply["instructions"], reply["metadata"], reply["tools"]) == ("w5", {"a": "b"}, [ADD])
    usage = reply["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] and usage["kv"]["method"] == "full"
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0


def test_members_of_openais_own_services_have_no_effect(url):
    plain = post(url, {"input": "w1 w2"}).json()
    more = {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "service_tier": "auto", "user": "u"}
    more |= {"truncation": "disabled", "background": False, "text": {"verbosity": "medium"}, "max_tool_calls": 3}
    reply = post(url, {"input": "w1 w2", **more, "reasoning": {"summary": "auto"}, "conversation": None}).json()
    assert reply["output"][0]["content"] == plain["output"][0]["content"] and reply["prompt_cache_key"] == "k"
    assert reply["usage"]["input_tokens"] == plain["usage"]["input_tokens"]


def test_a_stream_has_openais_events_and_is_the_whole_reply(url):
    events = events_of(url, {"input": "w1 w2", "tools": [ADD]})
    begins = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds_of(events) == [*begins, *TEXT_EVENTS, "output_item.added", *CALL_EVENTS, "completed"]
    reply, whole = events[-1]["response"], post(url, {"input": "w1 w2", "tools": [ADD]}).json()
    ResponseReply.model_validate(reply)
    assert [item["type"] for item in reply["output"]] == ["message", "function_call"]
    for name in ("text", "arguments"):
        (joined,) = {event[name] for event in events if name in event}
        deltas = [event["delta"] for event in events if event["type"].endswith(f"{name}.delta")]
        assert "".join(deltas) == joined
    assert [item["item"] for item in events if item["type"] == "response.output_item.done"] == reply["output"]
    assert reply["output"][0]["content"] == whole["output"][0]["content"]
    assert reply["usage"]["output_tokens"] == whole["usage"]["output_tokens"] > 0


def test_openais_helper_for_streams_follows(client):
    with client.responses.stream(model="scripted", input="w1 w2", tools=[ADD]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.output_text.delta" in kinds and final.status == "completed"
    assert [item.type for item in final.output] == ["message", "function_call"]


def test_a_cut_answer_is_incomplete(url, client):
    cut = ask(client, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[-1].status == "incomplete" and cut.usage.output_tokens == 2
    events = events_of(url, {"input": "w1 w2", "max_output_tokens": 2})
    assert events[-1]["type"] == "response.incomplete" and events[-1]["response"]["status"] == "incomplete"


def test_a_loop_over_tools_sends_items_back_or_names_the_response(client):
    called = ask(client, tools=[ADD])
    call = next(item for item in called.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    question = {"role": "user", "content": "w1 w2 w3"}
    # With all members that the client's types have, most of them null.
    dumped = [item.model_dump() for item in called.output]
    replies = [
        client.responses.create(model="scripted", input=[question, *called.output, result], tools=[ADD]),
        client.responses.create(model="scripted", input=[question, *dumped, result], tools=[ADD]),
        client.responses.create(model="scripted", input=[result], previous_response_id=called.id, tools=[ADD]),
    ]
    assert [reply.output_text for reply in replies] == ["The sum is 5."] * 3
    assert len({reply.usage.input_tokens for reply in replies}) == 1


def test_a_conversation_continues_on_the_stored_prefix_without_instructions(client):
    first = ask(client, LONG, instructions="w5 w6 w7")
    assert first.usage.input_tokens_details.cached_tokens == 0
    plain = ask(client, f"w9 {LONG}")
    second = ask(client, "w4", previous_response_id=plain.id)
    assert second.usage.input_tokens_details.cached_tokens >= 48
    third = ask(client, "w4", previous_response_id=first.id)
    said = {"role": "assistant", "content": first.output_text}
    messages = [{"role": "user", "content": LONG}, said, {"role": "user", "content": "w4"}]
    chat = client.chat.completions.create(model="scripted", messages=messages)
    assert third.usage.input_tokens == chat.usage.prompt_tokens and third.output_text == chat.choices[0].message.content
    fourth = ask(client, "w8", previous_response_id=third.id)
    assert fourth.usage.input_tokens > third.usage.input_tokens + third.usage.output_tokens


def test_stored_responses_are_listed_and_deleted(client, url):
    first = ask(client, "w1")
    items = [{"role": "user", "content": [{"type": "input_text", "text": "w2"}]}, {"role": "user", "content": "w3"}]
    second = client.responses.create(model="scripted", input=items, previous_response_id=first.id)
    assert client.responses.retrieve(second.id).model_dump() == second.model_dump()
    page = client.responses.input_items.list(second.id, order="asc", limit=1)
    assert [item.content[0].text for item in page] == ["w2", "w3"]
    raw = httpx.get(f"{url}/responses/{second.id}/input_items", headers={"Authorization": f"Bearer {KEYS[0]}"}).json()
    ItemsReply.model_validate(raw)
    ResponseItemList.model_validate(raw)
    assert [item["content"][0]["text"] for item in raw["data"]] == ["w3", "w2"] and not raw["has_more"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=r"not found"):
        client.responses.retrieve(first.id)
    # The conversation is with each of its responses.
    assert client.responses.create(model="scripted", input="w4", previous_response_id=second.id).status == "completed"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, previous_response_id=first.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_nothing_is_kept_of_a_response_that_is_not_stored(client):
    reply = ask(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply.id)
    with pytest.raises(openai.BadRequestError, match="was not stored"):
        ask(client, previous_response_id=reply.id)


def test_another_key_has_no_access(client, url):
    name = ask(client).id
    with openai.OpenAI(base_url=url, api_key=KEYS[1], max_retries=0, timeout=60) as other:
        for wanted in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                wanted(name)
        with pytest.raises(openai.BadRequestError, match="not found"):
            ask(other, previous_response_id=name)
    assert client.responses.retrieve(name).id == name
    assert httpx.get(f"{url}/responses/{name}").status_code == 401


def test_log_probabilities_come_with_the_text(client, url):
    include = ["message.output_text.logprobs"]
    (part,) = ask(client, include=include, top_logprobs=2).output[0].content
    assert "".join(token.token for token in part.logprobs).replace(" ", "") == part.text.replace(" ", "")
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in part.logprobs)
    events = events_of(url, {"input": "w1 w2 w3", "include": include})
    deltas = [token for event in events if event["type"].endswith("text.delta") for token in event["logprobs"]]
    assert [token["token"] for token in deltas] == [token.token for token in part.logprobs]


BAD = {
    "no input": ({"input": None}, "input", "at least one"),
    "no items": ({"input": []}, "input", "at least one"),
    "empty reasoning": ({"input": [{"type": "reasoning", "summary": []}]}, "input", "at least one"),
    "an input of no kind": ({"input": 5}, "input", "Input should be a valid array, got 5"),
    "an unknown member": ({"best": 3}, "best", "knows no such parameter"),
    "an unknown member of an item": ({"input": [{"role": "user", "content": "w1", "x": 1}]}, "input.0.x", "no such"),
    "a wrong role": ({"input": [{"role": "king", "content": "w1"}]}, "input.0.role", "king"),
    "no role": ({"input": [{"content": "w1"}]}, "input.0.role", "missing"),
    "no arguments": (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
        "input.0.arguments",
        "missing",
    ),
    "an output without a call": (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "5"}]},
        "input.0.call_id",
        "no function call before it",
    ),
    "an item's reference": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "'item_reference'"),
    "a file": ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input", "files are not read"),
    "an image that OpenAI has": (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input",
        "image_url",
    ),
    "encrypted reasoning": ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0", "encrypted"),
    "a tool that OpenAI runs": ({"tools": [{"type": "web_search"}]}, "tools", "'web_search' is not run here"),
    "a tool without a name": ({"tools": [{"type": "function"}]}, "tools.0.name", "required"),
    "work in the background": ({"background": True}, "background", "got true"),
    "truncation": ({"truncation": "auto"}, "truncation", "disabled"),
    "too many tokens": ({"max_output_tokens": 65}, "max_output_tokens", "at most 64"),
    "too many messages": ({"input": [{"role": "user", "content": "w1"}] * 31}, "input", "at most 30"),
    "likely tokens alone": ({"top_logprobs": 2}, "top_logprobs", "include"),
    "a schema that is none": (
        {"text": {"format": {"type": "json_schema", "name": "a"}}},
        "text.format.schema",
        "missing",
    ),
    "a schema of no kind": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "king"}}}},
        "text.format",
        "king",
    ),
    "a method that is not allowed": ({"kv": {"method": "h2o"}}, "kv", "h2o"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_refused_in_words(url, fault):
    members, param, words = BAD[fault]
    reply = post(url, {"input": "w1", **members})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param) and words in error["message"], error
    assert set(error) == {"message", "type", "param", "code"}


def test_a_conversation_too_large_to_store_is_refused(url, monkeypatch):
    tokenizer = tools_tokenizer()
    monkeypatch.setattr("kvsieve.serve.responses.routes.KeptResponses", lambda: KeptResponses(size=4_000))
    with application(scripted(tokenizer), tokenizer, ServerOptions(), "scripted") as app, listening(app) as address:
        body = {"input": "w1 " * 400}
        refused = post(f"{address}/v1", body)
        assert refused.status_code == 413 and "store false" in refused.json()["error"]["message"]
        assert post(f"{address}/v1", {**body, "store": False}).status_code == 200


def test_a_stream_that_fails_says_so_and_is_not_stored(url, client, monkeypatch):
    def broken(summaries):
        raise RuntimeError("no more memory")

    monkeypatch.setattr("kvsieve.serve.responses.reply.usage", broken)
    events = events_of(url, {"input": "w1"})
    assert kinds_of(events)[-2:] == ["error", "failed"]
    reply = events[-1]["response"]
    assert reply["status"] == "failed" and reply["error"]["code"] == "server_error"
    assert "no more memory" not in json.dumps(events)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply["id"])
    assert post(url, {"input": "w1"}).status_code == 500


def test_a_client_that_disconnects_frees_its_work():
    tokenizer = tools_tokenizer()
    script = tokenizer.convert_tokens_to_ids([TURN, "w1", "w2", "w1"])
    model = follows([script[:3], script[2:]])
    model.config.max_position_embeddings = 1 << 15
    options = ServerOptions(limits=ServerLimits(max_tokens=1 << 15), store_memory="0")
    with application(model, tokenizer, options, "scripted") as app, listening(app) as address:
        scheduler = app.state.service.scheduler
        body = {"model": "scripted", "input": "w1", "max_output_tokens": 30_000, "stream": True}
        with httpx.stream("POST", f"{address}/v1/responses", json=body, timeout=60) as reply:
            assert any("output_text.delta" in line for line in reply.iter_lines())
        deadline = time.monotonic() + 60
        while (scheduler.state()["running"] or not scheduler.counts["cancelled"]) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert scheduler.state()["running"] == 0 and scheduler.counts["cancelled"] == 1


def test_the_schema_has_bodies_and_replies(url):
    schema = httpx.get(f"{url.removesuffix('/v1')}/openapi.json").json()
    paths = schema["paths"]
    assert {"post"} == set(paths["/v1/responses"]) and {"get", "delete"} == set(paths["/v1/responses/{name}"])
    assert {"ResponsesRequest", "InputItem", "ResponseReply", "ItemsReply"} <= set(schema["components"]["schemas"])
    with pytest.raises(ValidationError):
        ResponseReply.model_validate({"id": "resp_1"})


@pytest.fixture
def adder():
    agents = pytest.importorskip("agents", reason="pip install openai-agents")
    agents.set_tracing_disabled(True)
    sums = []

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        sums.append((a, b))
        return str(a + b)

    def agent(connection, **settings):
        model = agents.OpenAIResponsesModel(model="scripted", openai_client=connection)
        settings = agents.ModelSettings(**settings)
        return agents.Agent(name="adder", instructions="w5 w6", model=model, tools=[add], model_settings=settings)

    return agents.Runner, agent, sums


def connection(url):
    return openai.AsyncOpenAI(base_url=url, api_key=KEYS[0], max_retries=0, timeout=60)


def test_an_agent_framework_runs_its_loop(url, adder):
    runner, agent, sums = adder
    result = runner.run_sync(agent(connection(url), store=False), "w1 w2")
    assert result.final_output == "The sum is 5." and sums == [(2, 3)]
    # Also where only new items are sent.
    again = runner.run_sync(agent(connection(url)), "w1 w2", auto_previous_response_id=True)
    assert again.final_output == "The sum is 5." and sums == [(2, 3)] * 2


def test_an_agent_framework_streams(url, adder):
    runner, agent, _ = adder

    async def run():
        async with connection(url) as link:
            running = runner.run_streamed(agent(link), "w1 w2")
            kinds = [event.name async for event in running.stream_events() if event.type == "run_item_stream_event"]
            return running.final_output, kinds

    said, kinds = asyncio.run(run())
    assert said == "The sum is 5." and "tool_called" in kinds and "tool_output" in kinds


def test_an_image_is_read_as_in_a_chat_and_stays_in_the_conversation():
    image, reader = data_url(file_of(picture(1))), processor("llava")
    with application(build("llava"), reader.tokenizer, ServerOptions(), "scripted", reader) as app:
        with listening(app) as address:
            part = {"type": "input_image", "image_url": image, "detail": "auto"}
            question = {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 4}
            first = post(f"{address}/v1", question).json()
            chat = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}
            body = {"model": "scripted", "messages": [chat], "max_tokens": 4}
            reference = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
            assert first["output"][0]["content"][0]["text"] == reference["choices"][0]["message"]["content"]
            assert first["usage"]["input_tokens"] == reference["usage"]["prompt_tokens"]
            more = {"input": "w1", "previous_response_id": first["id"], "max_output_tokens": 1}
            second = post(f"{address}/v1", more).json()
            assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + 4
            part["image_url"] = "https://example.org/a.png"
            error = post(f"{address}/v1", question).json()["error"]
            assert error["param"] == "input" and "no address is fetched" in error["message"]
