"""Examples of docs/serving.md and of the clients' READMEs run, but for the server's address and the model's name."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from importlib import metadata
from pathlib import Path

import openai
import pytest

from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.run import ServerOptions, application
from served_apps import listening
from tiny_models import build
from toy_bytes import byte_chats

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
CALLS = re.compile(r"\.(chat\.completions|responses|messages)\.(\w+\.)?(create|stream|parse)\(")
# Other services of theirs, files that are not there, and packages that are not installed.
OTHERS = re.compile("Azure|workload_identity|image|aiohttp|DefaultHttpx|fine_tuning|audio|realtime|webhook|bedrock")


def examples(package: str) -> list[str]:
    """Code blocks of a package's README that ask for an answer."""
    text = str(metadata.metadata(package).get_payload())
    blocks = re.findall(r"^```py(?:thon)?\n(.*?)^```", text, re.M | re.S)
    return [block for block in blocks if CALLS.search(block) and not OTHERS.search(block)]


EXAMPLES = {
    f"{package}, {number}": code for package in ("openai", "anthropic") for number, code in enumerate(examples(package))
}


@pytest.fixture(scope="module")
def url():
    model = build("llama", vocab_size=288, max_position_embeddings=2048)
    # Examples set no length, or that of an essay.
    model.generation_config.max_new_tokens = 6
    options = ServerOptions(limits=ServerLimits(max_tokens=1024), store_memory="0")
    with application(model, byte_chats(), options, "tiny") as app, listening(app) as address:
        yield address


def run(code: str) -> None:
    """Run code that may await outside of functions; `client` is there where the code makes none."""
    compiled = compile(code, "README", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    awaits = bool(compiled.co_flags & inspect.CO_COROUTINE)
    names = {"__name__": "__main__", "client": openai.AsyncOpenAI() if awaits else openai.OpenAI()}
    found = eval(compiled, names)
    if awaits:
        asyncio.run(found)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_a_client_runs(url, monkeypatch, capsys, name):
    for variable, value in {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
    }.items():
        monkeypatch.setenv(variable, value)
    code, count = re.subn(r'model="[^"]+"', 'model="tiny"', EXAMPLES[name])
    run(code)
    assert count and ("print(" not in code or "except" in code or capsys.readouterr().out.strip())


def test_examples_of_every_protocol_are_found():
    codes = "\n".join(EXAMPLES.values())
    assert {"chat.completions", "responses", "messages"} <= {found[0] for found in CALLS.findall(codes)}
    assert "stream=True" in codes


def test_the_examples_of_the_servers_page_run(url, capsys):
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    given = {"schema": schema, "messages": [{"role": "user", "content": "Where?"}], "question": "Who paid?"}
    given |= {"model": "tiny", "first": "A ferry.", "second": "Ann paid.", "third": "A storm."}
    found: list[dict] = []
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        found.append({**given, **({"client": found[0]["client"]} if found else {})})
        code = block.replace("http://127.0.0.1:8000", url).replace("SmolLM2-135M-Instruct", "tiny")
        exec(compile(code, PAGE.name, "exec"), found[-1])
    answered, followed, structured, _ = found
    assert answered["reply"].choices[0].message.content and re.search(r" \d+\.0$", capsys.readouterr().out)
    assert followed["second"].previous_response_id == followed["first"].id
    assert structured["reply"].choices[0].message.content.startswith("{")
