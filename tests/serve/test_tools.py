"""Tool calls over HTTP: the template is told of tools, calls are told of, and what comes of them is read."""

from __future__ import annotations

import json
import shutil
import subprocess

import openai
import pytest

from kvsieve.serve.run import ServerOptions, application
from served_apps import listening
from toy_tools import scripted, tools_tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]
QUESTION = {"role": "user", "content": "w1 w2 w3"}


@pytest.fixture(scope="module")
def url():
    tokenizer = tools_tokenizer()
    with application(scripted(tokenizer), tokenizer, ServerOptions(), "scripted") as app, listening(app) as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(client, messages, **more):
    return client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS, **more)


def test_a_call_is_told_and_its_result_is_read(client):
    called = ask(client, [QUESTION]).choices[0]
    (call,) = called.message.tool_calls
    assert (called.finish_reason, called.message.content, call.function.name) == ("tool_calls", "Let_me_see.", "add")
    given = json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])}
    said = ask(client, [QUESTION, called.message.model_dump(exclude_none=True), result])
    assert said.choices[0].message.content == "The sum is 5." and said.choices[0].finish_reason == "stop"
    # The definition of the tool, the call and the result were part of the prompt.
    assert said.usage.prompt_tokens > 15
    plain = client.chat.completions.create(model="scripted", messages=[QUESTION]).usage.prompt_tokens
    assert ask(client, [QUESTION]).usage.prompt_tokens == plain + 2


def test_a_stream_tells_the_call_and_no_text_of_it(client):
    chunks = [each.choices[0] for each in ask(client, [QUESTION], stream=True)]
    parts = [part for each in chunks for part in each.delta.tool_calls or ()]
    arguments = "".join(part.function.arguments or "" for part in parts)
    assert {part.index for part in parts} == {0} and json.loads(arguments) == {"a": 2, "b": 3}
    call_id, name = parts[0].id, parts[0].function.name
    assert name == "add" and not any(part.id or part.function.name for part in parts[1:])
    assert "".join(each.delta.content or "" for each in chunks).strip() == "Let_me_see."
    assert chunks[-1].finish_reason == "tool_calls" and len(call_id) == 9 and call_id.isalnum()
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call_id, "content": "5"}
    told = [each.choices[0] for each in ask(client, [QUESTION, called, result], stream=True)]
    assert "".join(each.delta.content or "" for each in told) == "The sum is 5." and told[-1].finish_reason == "stop"


def test_without_tools_what_looks_like_a_call_is_text(client):
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        told = client.chat.completions.create(model="scripted", messages=[QUESTION], **more).choices[0]
        assert told.message.tool_calls is None and '{"name":"add",' in told.message.content
        assert told.finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="tool_choice: a call is forced, and the request has no tools"):
        client.chat.completions.create(model="scripted", messages=[QUESTION], tool_choice="required")
    with pytest.raises(openai.BadRequestError, match="none of the request's tools is named 'sub'"):
        ask(client, [QUESTION], tool_choice={"type": "function", "function": {"name": "sub"}})


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_curl_gets_the_same(url):
    body = json.dumps({"model": "scripted", "messages": [QUESTION], "tools": TOOLS})
    command = ["curl", "-sS", f"{url}/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    told = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    assert told["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"


def test_an_agent_framework_runs_its_loop(url):
    agents = pytest.importorskip("agents", reason="pip install openai-agents")

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        done.append((a, b))
        return str(a + b)

    done: list[tuple[int, int]] = []
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
    model = agents.OpenAIChatCompletionsModel(model="scripted", openai_client=client)
    agent = agents.Agent(name="adder", instructions="w5 w6", model=model, tools=[add])
    assert agents.Runner.run_sync(agent, "w1 w2").final_output == "The sum is 5."
    assert done == [(2, 3)]


def test_an_agent_framework_streams(url):
    agents = pytest.importorskip("agents", reason="pip install openai-agents")
    import asyncio

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    async def run() -> tuple[str, list[str]]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            model = agents.OpenAIChatCompletionsModel(model="scripted", openai_client=client)
            running = agents.Runner.run_streamed(agents.Agent(name="adder", model=model, tools=[add]), "w1 w2")
            kinds = [event.name async for event in running.stream_events() if event.type == "run_item_stream_event"]
            return running.final_output, kinds

    agents.set_tracing_disabled(True)
    said, kinds = asyncio.run(run())
    assert said == "The sum is 5." and "tool_called" in kinds and "tool_output" in kinds
