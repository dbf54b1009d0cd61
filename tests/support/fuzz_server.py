"""Malformed requests to a server, and clients that cut their connections: what they cost others, and what stays.

    python tests/support/fuzz_server.py [--bodies 3000] [--clients 32] [--cuts 20] [--seed 0] [--only NUMBER ...]

The server is `kvsieve serve`'s, of a tiny random model, in a process of its own at this machine's loopback address.
First `--bodies` bodies are sent one after the other: valid ones changed in their types, members, sizes, nesting, bytes
and headers, up to the 8 MiB that a body may have. Then `--clients` clients at once make `--cuts` requests each, and
leave in the middle of a head, of a body or of a reply, or send nothing more. All the while a bystander looks at
/health and has a short answer streamed. A case is drawn by its number, by which `--only` sends it again and shows it.

The script exits 1 for a reply of status 500 or more (503 for a server that is full is none), for an error that is not
in the form of its protocol or repeats what was sent, for a hang, for memory that a body takes (200 MiB) or that stays
of the second half of the bodies and of the cuts (64 MiB), and for work that stays. Latency is printed, not judged: it
is the machine's as well.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from tiny_models import build
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.run import ServerOptions, serve
from toy_bytes import byte_chats
options = ServerOptions(
    port=0, codecs=True, others=("snapkv:window=4", "streamingllm"), store_memory="16MiB",
    limits=ServerLimits(max_tokens=16, seconds=30, kv_bytes=1 << 30),
)
serve(build("llama", vocab_size=288), byte_chats(), options, "tiny", lambda text: print(text, flush=True))
"""
SUPPORT = str(Path(__file__).parent)
CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
# Name of the member that bounds an answer, for paths that have answers.
LONGEST = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
# What an error of the server's own says in a stream, by protocol.
FAILED = (b'"type":"server_error"', b'"type":"api_error"', b'"code":"server_error"')
PEAK, GROWTH, REPLY = 200 << 20, 64 << 20, 20_000
LIMIT = 8 << 20

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
FORM = {"type": "json_schema", "json_schema": {"name": "sum", "schema": PARAMETERS}}
VALID: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "w1 w2 w3", "stop": ["w9"], "logprobs": 2, "echo": False, "seed": 3}),
    (COMPLETIONS, {"prompt": [5, 6, 7], "logit_bias": {"5": 1.5}, "temperature": 0.5, "top_p": 0.9, "n": 2}),
    (COMPLETIONS, {"prompt": [[5, 6], [7, 8]], "stream": True, "stream_options": {"include_usage": True}}),
    (COMPLETIONS, {"prompt": "w1 " * 60, "kv": {"method": "snapkv:window=4", "budget": "50%", "map": 4}}),
    (CHAT, {"messages": [{"role": "system", "content": "w5"}, {"role": "user", "content": "w1"}], "tools": [TOOL]}),
    (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "w1"}, {"type": "text", "text": "w2"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "w3"},
            ],
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
            "metadata": {"a": "b"},
        },
    ),
    (CHAT, {"messages": [{"role": "user", "content": "w1 w2"}], "kv": {"session": "s", "codec": "kivi:bits=4"}}),
    (
        CHAT,
        {
            "messages": [{"role": "system", "content": "w1 " * 40}, {"role": "user", "content": "w2"}],
            "kv": {"protect": [0], "question": True},
        },
    ),
    (CHAT, {"messages": [{"role": "user", "content": "w1"}], "response_format": FORM}),
    (TOKENIZE, {"prompt": "w1 w2 w3", "add_special_tokens": False, "count_only": True}),
    (RESPONSES, {"input": "w1 w2", "instructions": "w3", "stream": True, "metadata": {"a": "b"}}),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "w1"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "w2"}]},
                {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "call_1", "output": "w3"},
            ],
            "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS}],
            "text": {"format": {"type": "text"}},
            "reasoning": {"summary": "auto"},
            "store": False,
        },
    ),
    (RESPONSES, {"input": "w1", "previous_response_id": "resp_1", "kv": {"method": "streamingllm"}}),
    (MESSAGES, {"messages": [{"role": "user", "content": "w1 w2"}], "system": "w3", "stream": True, "top_k": 3}),
    (
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "w1", "cache_control": {"type": "ephemeral"}}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "add", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "w3"}]},
            ],
            "tools": [{"name": "add", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["w9"],
            "metadata": {"user_id": "u"},
        },
    ),
    (CHAT, {"messages": [{"role": "user", "content": "w1"}], "kv": {"documents": ["w2 w3", "w4"], "join": "modules"}}),
    (COUNT, {"messages": [{"role": "user", "content": "w1 " * 20}], "system": [{"type": "text", "text": "w2"}]}),
]
# Values as JSON writes them, or nearly.
ODD = """
    null true false 0 -1 1.5 1e308 1e999 -0.0 NaN Infinity -Infinity 9223372036854775808 -9223372036854775809 "" " " "x"
    "\\u0000" "\\ud800" "\\ud83d\\ude00" "\\ue000\\u0031\\ue001" "[EOS]" "9" "nan%" "-5%" "20%" "1e400%" [] {} [null]
    [[]] [{}] {"":1} {"role":"user"} [0,-1] [1e3] ["w1",5] "../x" "snapkv" "snapkv:budget=9" "kivi:bits=99999999999"
""".split()
MEMBERS = "best messages prompt kv n response_format tools logit_bias input system tool_choice text grammar".split()
KINDS = ("application/json", "Application/JSON; charset=utf-8", "text/plain", "application/json, text/plain", "")


def nodes(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Places of all parts of a body."""
    yield at
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from nodes(value[key], (*at, key))


def written(value: Any, spliced: dict[tuple[Any, ...], str], at: tuple[Any, ...] = ()) -> str:
    """A body as JSON, with other text in some places."""
    if at in spliced:
        return spliced[at]
    if isinstance(value, dict):
        members = (f"{json.dumps(key)}:{written(each, spliced, (*at, key))}" for key, each in value.items())
        return f"{{{','.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(written(each, spliced, (*at, number)) for number, each in enumerate(value))}]"
    return json.dumps(value)


def large(draw: random.Random) -> str:
    """A value of many parts, deep or long; up to a megabyte or so, and now and then as large as may be."""
    size = draw.choice([100, 5000, 100_000, 1_000_000]) if draw.random() < 0.9 else LIMIT - 500
    part = draw.choice(["null", "1", '""', "{}", "[]", '{"role":"user","content":"w1"}', "9" * 4000, '"w1"', "[5,6]"])
    made: list[Callable[[], str]] = [
        lambda: f"[{','.join([part] * (size // (len(part) + 1)))}]",
        lambda: "[" * (size // 2) + "]" * (size // 2),
        lambda: '{"a":' * (size // 6) + "1" + "}" * (size // 6),
        lambda: "{" + ",".join(f'"{number}":{number % 3}' for number in range(size // 10)) + "}",
        lambda: f'"{"w1 w2 w3 " * (size // 9)}"',
        lambda: f'"{"x" * size}"',
        lambda: f'"{"é😀" * (size // 6)}"',
        lambda: '"' + '\\"' * (size // 2) + '"',
        lambda: f'"{"[EOS]" * (size // 5)}"',
        lambda: f'{{"{"k" * size}":1}}',
        lambda: json.dumps('{"a":' * (size // 12) + "1" + "}" * (size // 12)),
        lambda: json.dumps('{"a":[' + "1," * (size // 4) + "1]}"),
        lambda: "9" * size,
        lambda: f"0.{'1' * size}",
    ]
    return draw.choice(made)()


def body_case(number: int, seed: int) -> tuple[str, bytes, dict[str, str]]:
    """A path, a body and headers."""
    draw = random.Random(f"{seed}/{number}")
    path, given = draw.choice(VALID)
    body = {"model": "tiny", **({LONGEST[path]: 4} if path in LONGEST else {}), **given}
    places, spliced = list(nodes(body)), {}
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        spliced[draw.choice(places)] = large(draw) if draw.random() < 0.15 else draw.choice(ODD)
    text = written(body, spliced)
    if draw.random() < 0.2:
        name = draw.choice([*MEMBERS, ""])
        text = f"{text[:-1]},{json.dumps(name)}:{draw.choice(ODD)}}}"
    data = bytearray(text.encode(errors="surrogatepass"))
    change = draw.random()
    if change < 0.1:
        del data[draw.randrange(len(data)) :]
    elif change < 0.2:
        for _ in range(draw.choice([1, 3, 20])):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif change < 0.25:
        data[draw.randrange(len(data)) :] = draw.randbytes(draw.choice([1, 100, 5000]))
    elif change < 0.3:
        data = bytearray(draw.choice([b"\xef\xbb\xbf" + data, text[:5000].encode("utf-16"), b"", b"null", data * 2]))
    kind = KINDS[0] if draw.random() < 0.95 else draw.choice(KINDS)
    return path, bytes(data), {"Content-Type": kind} if kind else {}


class Server:
    """The server's process."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", "-c", SERVER, SUPPORT]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r"http://[^:]+:(\d+)", self.process.stdout.readline())
        assert found is not None
        self.port = int(found[1])

    def memory(self, what: str = "VmRSS") -> int:
        """Bytes that it holds; VmHWM: the most since `forget`."""
        found = re.search(rf"{what}:\s*(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) << 10

    def forget(self) -> None:
        """Let the most begin at what it holds now."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def ask(self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(link):
            # What is refused early may be answered before all is sent.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                link.request("GET" if body is None else "POST", path, body, headers or {})
            reply = link.getresponse()
            return reply.status, reply.read()

    def work(self) -> int:
        """Requests that wait or run, and bytes that they hold."""
        state = json.loads(self.ask("/v1/kv")[1])["state"]
        return sum(state[each] for each in ("queued", "reading", "running", "kv_bytes"))


class Bystander(threading.Thread):
    """Whoever else asks: seconds of /health, and between the parts of a streamed answer."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server, self.health, self.gaps, self.failures = server, list[float](), list[float](), list[str]()
        self.over = threading.Event()

    def run(self) -> None:
        body = json.dumps({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 16, "ignore_eos": True, "stream": True})
        link = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        while not self.over.wait(0.02):
            began = time.perf_counter()
            link.request("GET", "/health")
            if link.getresponse().read() != b'{"status":"ok"}':
                self.failures.append("/health is not ok")
            self.health.append(time.perf_counter() - began)
            link.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
            reply = link.getresponse()
            reply.readline()
            last = time.perf_counter()
            while reply.readline():
                self.gaps.append(time.perf_counter() - last)
                last = time.perf_counter()

    def end(self) -> str:
        self.over.set()
        self.join(120)
        if self.is_alive():
            self.failures.append("the bystander hangs")
        sizes = [f"{name} {middle(each):.3f} s, at most {max(each):.2f} s" for name, each in self._named()]
        return f"bystander: {', '.join(sizes)} ({len(self.health)} rounds)"

    def _named(self) -> list[tuple[str, list[float]]]:
        return [("/health", self.health), ("parts of an answer", self.gaps)]


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def judged(status: int, reply: bytes, path: str = CHAT) -> str | None:
    """What is wrong with a reply."""
    if status >= 500 and status != 503:
        return f"status {status}: {reply[:300]!r}"
    if status != 200:
        protocol, kind = ("Anthropic", "error") if path.startswith(MESSAGES) else ("OpenAI", None)
        try:
            error = json.loads(reply)
            words = error["error"]["message"] if error.get("type") == kind else None
        except (ValueError, KeyError, TypeError, AttributeError):
            words = None
        if not words or len(reply) > REPLY:
            return f"status {status}, {len(reply)} bytes, no error in {protocol}'s form: {reply[:300]!r}"
    elif any(words in reply for words in FAILED):
        return f"a stream that fails: {reply[-300:]!r}"
    return None


def send_bodies(server: Server, numbers: list[int], seed: int, shown: bool) -> tuple[str, list[str]]:
    """Send bodies one after the other; a line of numbers, and one for each defect."""
    statuses: collections.Counter[int] = collections.Counter()
    failures, peaks, slowest = [], [0], (0.0, 0)
    for number in numbers:
        path, data, headers = body_case(number, seed)
        before, began = server.memory(), time.perf_counter()
        if len(data) > 1 << 20:
            server.forget()
        try:
            status, reply = server.ask(path, data, headers)
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"body {number}: {type(error).__name__}: {error}")
            continue
        slowest = max(slowest, (time.perf_counter() - began, number))
        statuses[status] += 1
        wrong = judged(status, reply, path)
        if len(data) > 1 << 20:
            peaks.append(server.memory("VmHWM") - before)
            wrong = wrong or (f"{len(data)} bytes took {peaks[-1] >> 20} MiB" if peaks[-1] > PEAK else None)
        if wrong or shown:
            failures.append(f"body {number} to {path}, {data[:200]!r}: {wrong or (status, reply[:500])}")
    text = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    longest = f"{slowest[0]:.1f} s (number {slowest[1]})"
    return f"bodies: {text}; at most {longest}, and {max(peaks) >> 20} MiB for one", failures


def cut(server: Server, draw: random.Random) -> None:
    """Begin a request, and leave it."""
    path, given = draw.choice([(path, given) for path, given in VALID if path in LONGEST])
    more = {"ignore_eos": True} if path in (CHAT, COMPLETIONS) else {}
    data = json.dumps({"model": "tiny", LONGEST[path]: 16, **more, **given}).encode()
    if draw.random() < 0.2:
        data = data[:-1] + b" " * draw.choice([100_000, 4_000_000]) + b"}"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sent = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    how = draw.choice(["head", "body", "reply", "reply", "all", "silent"])
    until = {"head": draw.randrange(len(head)), "body": len(head) + draw.randrange(len(data))}.get(how, len(sent))
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as link:
        if draw.random() < 0.5:
            # Gone without a word of it, rather than closed.
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.sendall(sent[:until])
        if how == "silent":
            time.sleep(draw.random())
        elif how == "reply":
            link.recv(draw.choice([1, 200, 2000]))


def cut_connections(server: Server, clients: int, cuts: int, seed: int) -> tuple[str, list[str]]:
    """Let many clients begin requests and leave them; a line of numbers, and one for each defect."""
    failures: list[str] = []

    def client(number: int) -> None:
        draw = random.Random(f"{seed}/client/{number}")
        for _ in range(cuts):
            try:
                cut(server, draw)
            except TimeoutError:
                failures.append(f"client {number} waits")
            except OSError:
                # The server may have left first.
                pass

    server.forget()
    before = server.memory()
    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    deadline = time.monotonic() + 60
    while (left := server.work()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        failures.append(f"work of {left} is left of clients that have gone")
    taken = server.memory("VmHWM") - before
    return f"cuts: {clients} clients, {clients * cuts} requests; at most {taken >> 20} MiB at once", failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bodies", type=int, default=3000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of bodies to send again and show")
    given = parser.parse_args()
    server, began = Server(), time.perf_counter()
    try:
        if given.only is not None:
            print(*send_bodies(server, given.only, given.seed, shown=True)[1], sep="\n")
            return 0
        bystander = Bystander(server)
        bystander.start()
        # Plans, kinds of requests and sizes of buffers have been met by half of the bodies; what grows then stays.
        warm = max(given.bodies // 2, 1)
        first, failures = send_bodies(server, list(range(warm)), given.seed, shown=False)
        held = server.memory()
        bodies, more = send_bodies(server, list(range(warm, given.bodies)), given.seed, shown=False)
        cuts, late = cut_connections(server, given.clients, given.cuts, given.seed)
        latency = bystander.end()
        growth = server.memory() - held
        failures += [*more, *late, *bystander.failures]
        if growth > GROWTH:
            failures.append(f"{growth >> 20} MiB stay")
    finally:
        server.process.terminate()
        code = server.process.wait(60)
    if code:
        failures.append(f"the server ends with status {code}")
    print(*failures, f"first {first}", bodies, cuts, latency, sep="\n")
    print(f"memory: {growth >> 20} MiB more than after {warm} bodies; {time.perf_counter() - began:.0f} s in all")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
