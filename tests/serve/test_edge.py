"""Who reaches the server, by which name, from which page and how many at once; streams and connections."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import socket
import threading
from pathlib import Path

import httpx
import pytest
from starlette.responses import Response

import kvsieve.models
from kvsieve.cli.main import run_cli
from kvsieve.errors import InputError, KvsieveWarning
from kvsieve.serve import events
from kvsieve.serve.app import create_app
from kvsieve.serve.events import EventStream
from kvsieve.serve.guards import Edge, host_name
from kvsieve.serve.keys import Keys, read_keys
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.memory import KVBytes
from kvsieve.serve.run import ServerOptions, application, check_reach, listening_socket
from served_apps import listening
from tiny_models import build
from toy_chats import chat_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples" / "serve"
PAGE = "https://page.example"
# An answer that goes on until it is ended.
ENDLESS = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 30_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def served():
    model, limits = build("llama", max_position_embeddings=1 << 15), ServerLimits(chunk=24, max_tokens=1 << 15)
    options = ServerOptions(limits=limits, store_memory="0", hosts=("Proxy.Example",), origins=(PAGE,))
    with application(model, chat_tokenizer(), options, "tiny") as app, listening(app) as url:
        yield url, app


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost.:8000", "localhost"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[::1]", "::1"),
        ("", ""),
    ],
)
def test_names_of_hosts(header, name):
    assert host_name(header) == name


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:9", 200),
        ("[::1]:9", 200),
        ("proxy.example", 200),
        ("PROXY.example.:443", 200),
        ("elsewhere.example", 400),
        ("proxy.example.elsewhere.example", 400),
        ("x" * 5000, 400),
    ],
)
def test_only_names_of_this_server_are_answered(served, host, status):
    reply = httpx.get(f"{served[0]}/health", headers={"Host": host})
    assert reply.status_code == status
    if status == 400:
        error = reply.json()["error"]
        assert error["code"] == "unknown_host" and "--allow-host" in error["message"] and len(reply.content) < 1000


def test_names_are_checked_where_others_may_ask_in_a_users_place():
    def hosts(**given):
        with application(build("llama"), chat_tokenizer(), ServerOptions(store_memory="0", **given), "tiny") as app:
            return app.state.service.hosts

    assert "localhost" in hosts() and "[::1]" in hosts(host="::1")
    assert hosts(host="0.0.0.0", open=True) == () == hosts(keys=Keys(["k"]))
    assert "a.example" in hosts(host="0.0.0.0", open=True, hosts=("a.example",))
    assert "a.example" in hosts(keys=Keys(["k"]), hosts=("a.example",))


@pytest.mark.parametrize(
    "path", ["/health", "/metrics", "/v1/models", "/v1/models/tiny", "/v1/kv", "/", "/openapi.json"]
)
def test_what_can_be_got_answers_head(served, path):
    head, got = httpx.head(f"{served[0]}{path}"), httpx.get(f"{served[0]}{path}")
    assert head.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]
    assert httpx.head(f"{served[0]}/v1/completions").status_code == 405


@pytest.mark.parametrize(
    ("path", "methods"), [("/v1/responses/x", {"DELETE", "GET"}), ("/v1/completions", {"POST"}), ("/", {"GET"})]
)
def test_a_method_that_a_path_does_not_have_is_refused_with_those_it_has(served, path, methods):
    refused = httpx.patch(f"{served[0]}{path}")
    assert refused.status_code == 405 and set(refused.headers["allow"].split(", ")) == methods
    assert refused.json()["error"]["message"] == f"{path!r} takes {refused.headers['allow']}, got PATCH"


def test_pages_that_are_allowed_may_ask(served):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for origin, allowed in ((PAGE, PAGE), ("https://other.example", None)):
        before = httpx.options(f"{served[0]}/v1/completions", headers={"Origin": origin, **asks})
        assert before.headers.get("access-control-allow-origin") == allowed
        assert before.is_success == (allowed is not None)
        for body in ({"model": "tiny", "prompt": "w1", "max_tokens": 1}, {}):
            reply = httpx.post(f"{served[0]}/v1/completions", json=body, headers={"Origin": origin})
            assert reply.headers.get("access-control-allow-origin") == allowed


# Headers of OpenAI's and Anthropic's clients in a browser.
OF_CLIENTS = (
    "anthropic-dangerous-direct-browser-access,anthropic-version,authorization,content-type,x-api-key,"
    "x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,x-stainless-retry-count,"
    "x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)


def test_clients_in_a_browser_may_send_their_headers_and_see_when_to_come_back(served):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": OF_CLIENTS}
    before = httpx.options(f"{served[0]}/v1/completions", headers={"Origin": PAGE, **asks})
    allowed = {name.strip().lower() for name in before.headers["access-control-allow-headers"].split(",")}
    assert before.status_code == 200 and allowed >= set(OF_CLIENTS.split(","))
    refused = httpx.post(f"{served[0]}/v1/completions", content=b"{}", headers={"Origin": PAGE})
    assert refused.status_code == 415 and refused.headers["access-control-expose-headers"] == "Retry-After"


def test_no_other_page_may_ask_by_default(served):
    app = create_app(dataclasses.replace(served[1].state.service, origins=()))
    with listening(app) as url:
        reply = httpx.post(f"{url}/v1/completions", json={}, headers={"Origin": PAGE})
        assert "access-control-allow-origin" not in reply.headers


def test_the_dashboard_names_metrics_that_there_are():
    dashboard = json.loads((EXAMPLES / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = set(re.findall(r"kvsieve_\w+", " ".join(queries)))
    with application(build("llama"), chat_tokenizer(), ServerOptions(), "tiny") as app:
        metrics = set(re.findall(r"^kvsieve_\w+", app.state.metrics.text().decode(), re.M))
    assert len(queries) > 10 and named <= metrics
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_more_requests_than_may_be_at_once_are_told_so():
    async def trial():
        begun, on = asyncio.Event(), asyncio.Event()

        async def app(scope, receive, send):
            if scope["path"] == "/slow":
                begun.set()
                await on.wait()
            await Response("fine")(scope, receive, send)

        transport = httpx.ASGITransport(Edge(app, most=1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            slow = asyncio.create_task(client.get("/slow"))
            await begun.wait()
            refused, healthy = await client.get("/other"), await client.get("/health")
            on.set()
            return await slow, refused, healthy, await client.get("/other")

    slow, refused, healthy, later = asyncio.run(trial())
    assert [each.status_code for each in (slow, healthy, later)] == [200] * 3
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    assert "try again later" in refused.json()["error"]["message"]


def _check_reach(options):
    check_reach(options.keys, options.host, options.open, options.origins, options.hosts)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"host": "0.0.0.0"}, "--open"),
        ({"host": "::"}, "--open"),
        ({"host": ""}, "--open"),
        ({"host": "192.168.0.7"}, "--open"),
        ({"host": "machine.example"}, "--open"),
        ({"keys": Keys(needed=True)}, "KVSIEVE_API_KEYS"),
        ({"host": "0.0.0.0", "open": True, "keys": Keys(needed=True)}, "KVSIEVE_API_KEYS"),
        ({"origins": ("page.example",)}, "--allow-origin"),
        ({"origins": ("https://page.example/path",)}, "--allow-origin"),
        ({"hosts": ("llm.example", "https://llm.example")}, "--allow-host 'https://llm.example' is no host name"),
        ({"hosts": ("*",)}, "--allow-host"),
        ({"hosts": ("*.example",)}, "--allow-host"),
        ({"hosts": ("",)}, "--allow-host"),
        ({"hosts": ("::1",)}, r"--allow-host.* or \[::1\] for IPv6"),
    ],
)
def test_servers_that_others_reach_by_mistake_do_not_start(given, words):
    with pytest.raises(InputError, match=words):
        _check_reach(ServerOptions(**given))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"host": "localhost"},
        {"host": "LocalHost"},
        {"host": "::1"},
        {"host": "127.0.0.2"},
        {"host": "0.0.0.0", "open": True},
        {"host": "0.0.0.0", "keys": Keys(["k"])},
        {"origins": ("https://page.example", "http://localhost:3000", "*")},
        {"hosts": ("llm.example", "LLM.example.", "llm.example:8443", "10.0.0.2", "köln.de")},
        {"hosts": ("[::1]", "[2001:db8::1]:8000")},
    ],
)
def test_servers_that_may_start(given):
    _check_reach(ServerOptions(**given))


def test_a_server_starts_with_memory_for_a_request_and_says_which_engine_cannot_run():
    model = build("llama")
    least = KVBytes(model).of_request(1, 1)
    for size in (1 << 10, least - 1):
        options = ServerOptions(limits=ServerLimits(kv_bytes=size))
        with pytest.raises(InputError, match=f"--kv-memory has {size:,} bytes .* needs {least:,}; raise it"):
            application(model, chat_tokenizer(), options, "tiny").__enter__()
    options = ServerOptions(limits=ServerLimits(kv_bytes=least), decode="graph")
    serving = application(model, chat_tokenizer(), options, "tiny")
    with pytest.warns(KvsieveWarning, match="decode='graph' computes tokens eagerly"), serving as app:
        with listening(app) as url:
            asked = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": [5], "max_tokens": 1})
    assert asked.status_code == 200


@pytest.mark.parametrize("value", ["", " , ", ",", "\n"])
def test_a_variable_without_a_key_opens_no_server(monkeypatch, value, capsys):
    monkeypatch.setenv("KVSIEVE_API_KEYS", value)
    keys = read_keys(None)
    assert keys and keys.owner(None) is None and keys.owner("Bearer ") is None
    with pytest.raises(SystemExit) as ended:
        run_cli(["serve", "none.gguf", "--host", "0.0.0.0", "--open"])
    assert ended.value.code == 2 and "KVSIEVE_API_KEYS is set and has no key" in capsys.readouterr().err
    monkeypatch.delenv("KVSIEVE_API_KEYS")
    assert not read_keys(None) and read_keys(None).owner(None) == ""


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("\ufeffone\r\ntwo\r\n", ("one", "two")),
        ("  # a comment\n\tone two \n", ("one two",)),
        ("# a comment\n  # another\n \n", None),
        ("schlüssel\n", None),
        ("one\ntwo\0\n", None),
    ],
)
def test_a_file_of_keys_has_those_that_can_be_sent(tmp_path, monkeypatch, text, keys):
    monkeypatch.delenv("KVSIEVE_API_KEYS", raising=False)
    (tmp_path / "keys").write_text(text, encoding="utf-8", newline="")
    if keys is None:
        with pytest.raises(InputError, match="has no key|printable ASCII"):
            read_keys(str(tmp_path / "keys"))
        return
    found = read_keys(str(tmp_path / "keys"))
    assert all(found.owner(f"Bearer {key}") for key in keys) and found.owner("Bearer # a comment") is None


@pytest.mark.parametrize("host", ["ä" * 100, "[::1]", "a.invalid"])
def test_an_address_that_is_none_is_told(host):
    with pytest.raises(InputError, match="cannot listen at"):
        listening_socket(host, 0)


def test_a_port_in_use_is_told_before_the_model_is_loaded(monkeypatch, capsys):
    monkeypatch.delenv("KVSIEVE_API_KEYS", raising=False)
    monkeypatch.setattr(kvsieve.models, "load", lambda *given, **more: pytest.fail("loaded"))
    with listening_socket("127.0.0.1", 0) as used:
        used.listen()
        with pytest.raises(SystemExit) as ended:
            run_cli(["serve", "--port", str(used.getsockname()[1])])
    assert ended.value.code == 2 and "cannot listen at 127.0.0.1, port" in capsys.readouterr().err


def test_the_command_does_not_open_a_server_by_itself(monkeypatch, capsys, tmp_path):
    (tmp_path / "none.gguf").touch()
    monkeypatch.delenv("KVSIEVE_API_KEYS", raising=False)
    with pytest.raises(SystemExit) as ended:
        run_cli(["serve", str(tmp_path / "none.gguf"), "--host", "0.0.0.0"])
    assert ended.value.code == 2 and "--open" in capsys.readouterr().err


def lines_of(reply) -> list[str]:
    return [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]


def test_a_stream_of_a_server_that_stops_ends_with_a_reason():
    model, limits = build("llama", max_position_embeddings=1 << 15), ServerLimits(chunk=24, max_tokens=1 << 15)
    options = ServerOptions(limits=limits, store_memory="0")
    with application(model, chat_tokenizer(), options, "tiny") as app, listening(app) as url:
        scheduler = app.state.service.scheduler
        with httpx.stream("POST", f"{url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=60) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            scheduler.stop(60)
            # What runs goes on, and so does what comes meanwhile; the operator sees what is up.
            late = httpx.post(f"{url}/v1/completions", json={**ENDLESS, "max_tokens": 2}, timeout=60)
            assert late.status_code == 200 and httpx.get(f"{url}/health").status_code == 503
            scheduler.stop(0)
            told = [line[6:] for line in lines if line.startswith("data: ")]
        assert told[-1] == "[DONE]" and json.loads(told[-2])["choices"][0]["finish_reason"] == "length"
        assert len(told) < ENDLESS["max_tokens"]
        refused = httpx.post(f"{url}/v1/completions", json=ENDLESS, timeout=60)
        assert refused.status_code == 503 and "closing" in refused.json()["error"]["message"]


async def broken_chunks(*_):
    yield {"choices": []}
    raise RuntimeError("no more memory")


def test_a_stream_that_fails_says_why_and_ends(served, monkeypatch):
    monkeypatch.setattr("kvsieve.serve.routes.completion_chunks", broken_chunks)
    with httpx.stream("POST", f"{served[0]}/v1/completions", json={**ENDLESS, "stream": True}, timeout=60) as reply:
        told = lines_of(reply)
    assert told[-1] == "[DONE]" and json.loads(told[-2])["error"]["type"] == "server_error"
    assert "no more memory" not in told[-2]


def test_a_silent_stream_sends_comments_and_is_left_with_its_client(monkeypatch):
    monkeypatch.setattr(events, "_SILENCE", 0.01)
    ended = threading.Event()

    async def silent():
        try:
            yield events.event("first")
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def app(scope, receive, send):
        await EventStream(silent())(scope, receive, send)

    with listening(app) as url:
        with httpx.stream("GET", url, timeout=60) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = [line for line, _ in zip((each for each in reply.iter_lines() if each), range(3), strict=False)]
        assert lines[0] == "data: first" and all(line.startswith(": ") for line in lines[1:])
        assert ended.wait(60)


def linked(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HT",
        b"GET / HTTP/1.1\r\nHost: a\r\nX-Header: ",
        # Nothing holds a connection behind a reply either, whatever comes of a body that was not read.
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n",
    ],
)
def test_connections_without_a_request_are_ended(said):
    async def app(scope, receive, send):
        await Response("fine")(scope, receive, send)

    with listening(app, patience=0.05) as url, linked(url) as link:
        link.sendall(said)
        while link.recv(1000):
            if said.startswith(b"POST"):
                link.sendall(b"x")


def test_a_connection_too_many_ends_the_one_that_waits_longest():
    async def app(scope, receive, send):
        await Response("fine")(scope, receive, send)

    with listening(app, most=2, patience=600) as url, linked(url) as first, linked(url) as second:
        second.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")
        assert httpx.get(url).text == "fine"
        assert first.recv(10) == b""


def test_a_client_that_reads_nothing_is_left():
    ended = threading.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        # More than all buffers on the way hold.
        for _ in range(400):
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        ended.set()

    with listening(app, reading=0.05) as url, linked(url) as link:
        link.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert ended.wait(60)
