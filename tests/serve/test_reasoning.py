"""Reasoning and calls between control tokens, over HTTP; variables of the chat template; forced calls."""

from __future__ import annotations

import json

import openai
import pytest

import call_templates as templates
from kvsieve.serve.anthropic.schema import MessagesRequest
from kvsieve.serve.anthropic.translate import chat_request as of_messages
from kvsieve.serve.responses.schema import ResponsesRequest
from kvsieve.serve.responses.translate import chat_request as of_response
from kvsieve.serve.run import ServerOptions, application
from kvsieve.serve.schema import ChatRequest
from served_apps import listening
from tiny_models import build
from toy_bytes import byte_level
from toy_tools import RESULT, TURN, scripted, tools_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
QUESTION = {"role": "user", "content": "w1 w2 w3"}
# Reasons, then calls between control tokens; each word follows another one.
SCRIPT = ["[THINK]", "Hm.", "Sure.", "[/THINK]", "So:", "[TOOL_CALLS]", "add", "[ARGS]", '{"a":2,', '"b":3}', "[EOS]"]
CONTROLS = ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.reasoning_content %}[THINK] {{ m.reasoning_content }} [/THINK] "
    "{% endif %}{{ m.content }} {% for c in m.tool_calls or [] %}[TOOL_CALLS] {{ c.function.name }} [ARGS] "
    "{{ c.function.arguments | tojson }} {% endfor %}[EOS] {% endfor %}{% if reasoning_effort %}w20 "
    "{{ reasoning_effort }} {% endif %}{% if enable_thinking is false and thinking is false %}w21 {% endif %}"
    "{% if words %}{{ words | join(' ') }} {% endif %}{% if add_generation_prompt %}"
    "{{ '" + RESULT + "' if messages[-1].role == 'tool' else '" + TURN + "' }} {% endif %}"
)


@pytest.fixture(scope="module")
def service():
    tokenizer = tools_tokenizer(TEMPLATE, SCRIPT, CONTROLS)
    options = ServerOptions()
    with application(scripted(tokenizer, SCRIPT), tokenizer, options, "scripted") as app, listening(app) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield app.state.service, client


def ask(service, messages=(QUESTION,), **more):
    return service[1].chat.completions.create(model="scripted", messages=list(messages), **more)


def test_reasoning_and_calls_between_control_tokens(service):
    choice = ask(service, tools=TOOLS).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.message.reasoning_content == "Hm. Sure." and choice.message.content == "So:"
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 2, "b": 3}
    assert choice.finish_reason == "tool_calls"
    usage = ask(service, tools=TOOLS).usage
    assert usage.completion_tokens_details.reasoning_tokens == 4 and usage.completion_tokens == len(SCRIPT)
    chunks = [chunk.choices[0] for chunk in ask(service, tools=TOOLS, stream=True)]
    thoughts = [chunk.delta.reasoning_content for chunk in chunks if "reasoning_content" in chunk.delta.model_extra]
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert "".join(thoughts) == "Hm. Sure." and len(thoughts) > 1 and len(parts) > 2
    assert "".join(chunk.delta.content or "" for chunk in chunks).strip() == "So:"
    assert json.loads("".join(part.function.arguments or "" for part in parts)) == {"a": 2, "b": 3}
    assert chunks[-1].finish_reason == "tool_calls"


def test_reasoning_is_an_item_of_a_response(service):
    client = service[1]
    tools = [{"type": "function", "strict": False, **TOOLS[0]["function"]}]
    asked = {"model": "scripted", "tools": tools, "reasoning": {"effort": "low"}}
    reply = client.responses.create(input="w1 w2 w3", **asked)
    reasoning, message, called = reply.output
    assert (reasoning.content[0].text, message.content[0].text.strip()) == ("Hm. Sure.", "So:")
    assert reply.usage.output_tokens_details.reasoning_tokens == 4
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "5"}
    continued = client.responses.create(input=[result], previous_response_id=reply.id, **asked)
    choice = ask(service, tools=TOOLS, reasoning_effort="low").choices[0]
    said = choice.message.model_dump(exclude_none=True)
    messages = [QUESTION, said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "5"}]
    chat = ask(service, messages, tools=TOOLS, reasoning_effort="low")
    assert continued.usage.input_tokens == chat.usage.prompt_tokens
    assert continued.output_text.strip() == chat.choices[0].message.content


def test_control_tokens_of_calls_are_hidden_without_tools(service):
    choice = ask(service).choices[0]
    assert choice.message.content == 'So: add {"a":2, "b":3}' and choice.message.reasoning_content == "Hm. Sure."
    cut = ask(service, tools=TOOLS, max_tokens=9).choices[0]
    (call,) = cut.message.tool_calls
    assert cut.finish_reason == "length" and call.function.arguments.strip() == '{"a":2,'


def test_earlier_reasoning_goes_to_the_template(service):
    answer = {"role": "assistant", "content": "w5"}
    prompt = [
        ask(service, [QUESTION, said, QUESTION]).usage.prompt_tokens
        for said in (
            answer,
            {**answer, "reasoning_content": "w6 w7"},
            {"role": "assistant", "reasoning_content": "w6 w7 w8"},
        )
    ]
    assert prompt[1] == prompt[0] + 4 and prompt[2] == prompt[0] + 4


def test_variables_of_the_template(service):
    plain = ask(service).usage.prompt_tokens
    assert ask(service, reasoning_effort="low").usage.prompt_tokens == plain + 2
    words = {"chat_template_kwargs": {"words": ["w1", "w2"], "unused": None}}
    assert ask(service, extra_body=words).usage.prompt_tokens == plain + 2
    # Control tokens in them are text.
    request = {"model": "scripted", "messages": [QUESTION]}
    ends = [
        service[0].preparer.chat(ChatRequest(**request, chat_template_kwargs=more), "").ids.count(3)
        for more in ({}, {"words": ["[EOS]"]})
    ]
    assert ends[0] == ends[1] > 0
    for name in ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "bos_token"):
        with pytest.raises(openai.BadRequestError, match=f"the server sets '{name}' itself"):
            ask(service, extra_body={"chat_template_kwargs": {name: 1}})
    for wrong in ({"a b": 1}, {f"v{number}": 1 for number in range(33)}, []):
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
            ask(service, extra_body={"chat_template_kwargs": wrong})


def by_chat(**more):
    return ChatRequest(model="scripted", messages=[QUESTION], **more)


def by_responses(effort):
    return of_response(ResponsesRequest(model="scripted", input="w1 w2 w3", reasoning={"effort": effort}))


def by_messages(kind):
    body = {"model": "scripted", "messages": [QUESTION], "max_tokens": 2, "thinking": {"type": kind}}
    return of_messages(MessagesRequest(**body), 64)


# Requests that turn reasoning off, and requests that do not.
OFF = {
    "chat": (by_chat(reasoning_effort="none"), by_chat(reasoning_effort="low")),
    "responses": (by_responses("none"), by_responses("low")),
    "messages": (by_messages("disabled"), by_messages("enabled")),
    "variables": (
        by_chat(chat_template_kwargs={"enable_thinking": False, "thinking": False}),
        by_chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}),
    ),
}


@pytest.mark.parametrize("protocol", OFF)
def test_every_protocol_turns_reasoning_off(service, protocol):
    preparer = service[0].preparer
    texts = [preparer.text(preparer.chat(request, "").ids) for request in OFF[protocol]]
    assert ["w21" in text for text in texts] == [True, False]


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Köln"]}, "hot": {"type": "boolean"}}}
FORCED = [
    {"type": "function", "function": {"name": name, "parameters": {**CITY, "required": ["city", "hot"]}}}
    for name in ("weather", "forecast")
]
NAMED = {"type": "function", "function": {"name": "forecast"}}


@pytest.fixture(scope="module", params=["QWEN_3", "QWEN_CODER", "DEEPSEEK_R1"])
def forcing(request):
    """A client of a random tiny model that writes bytes, under some template."""
    pytest.importorskip("llguidance")
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"eos_token": "<|eos|>", "additional_special_tokens": ["<｜tool▁sep｜>"]})
    tokenizer.chat_template = getattr(templates, request.param)
    model = build("llama", vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with application(model, tokenizer, ServerOptions(), "tiny") as app, listening(app) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client:
            # The template's reasoning is closed, or random letters would be endless.
            more = {"thinking": False, "enable_thinking": False}
            yield lambda **how: client.chat.completions.create(
                model="tiny",
                messages=[QUESTION],
                tools=FORCED,
                max_tokens=400,
                extra_body={"chat_template_kwargs": more},
                **how,
            )


def test_forced_calls_of_a_random_model_are_valid(forcing):
    for choice, names, finish in (("required", {"weather", "forecast"}, "tool_calls"), (NAMED, {"forecast"}, "stop")):
        for seed in range(3):
            one = forcing(tool_choice=choice, parallel_tool_calls=False, temperature=2, seed=seed).choices[0]
            (call,) = one.message.tool_calls
            values = json.loads(call.function.arguments)
            assert one.finish_reason == finish and call.function.name in names and one.message.content is None
            assert values["city"] in ("Rome", "Köln") and isinstance(values["hot"], bool)
    chunks = [chunk.choices[0] for chunk in forcing(tool_choice=NAMED, temperature=2, seed=5, stream=True)]
    parts = [part.function for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert json.loads("".join(part.arguments or "" for part in parts)).keys() == {"city", "hot"}
    assert parts[0].name == "forecast" and chunks[-1].finish_reason == "stop"


def test_an_answer_by_schema_may_be_a_call_too(forcing):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 7}}}
    for seed in range(3):
        one = forcing(response_format=schema, parallel_tool_calls=False, temperature=2, seed=seed).choices[0]
        assert one.message.content == "7" or json.loads(one.message.tool_calls[0].function.arguments)
    assert forcing(response_format=schema, tool_choice="none").choices[0].message.content == "7"


def test_a_template_without_a_form_cannot_be_forced(service):
    preparer = service[0].preparer
    forms, preparer._forms = preparer._forms, type(preparer._forms)()
    try:
        with pytest.raises(openai.BadRequestError, match="tool_choice: the model's chat template writes calls in no"):
            ask(service, tools=TOOLS, tool_choice="required")
    finally:
        preparer._forms = forms
