"""A slice of tests/support/fuzz_server.py, and that it would tell a defect."""

from __future__ import annotations

import pytest

import fuzz_server
from fuzz_server import judged
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.run import ServerOptions, application
from served_apps import listening
from tiny_models import build
from toy_bytes import byte_chats


@pytest.fixture(scope="module")
def server():
    """A server in this process, of which no memory is told."""

    class Here(fuzz_server.Server):
        def __init__(self, port: int) -> None:
            self.port = port

        def memory(self, what: str = "VmRSS") -> int:
            return 0

        def forget(self) -> None:
            pass

    limits = ServerLimits(max_tokens=16, kv_bytes=1 << 30)
    options = ServerOptions(codecs=True, others=("snapkv:window=4",), limits=limits, store_memory="16MiB")
    with application(build("llama", vocab_size=288), byte_chats(), options, "tiny") as app, listening(app) as url:
        yield Here(int(url.rpartition(":")[2]))


@pytest.mark.parametrize("first", [0, pytest.param(3000, marks=pytest.mark.slow)])
def test_malformed_bodies_are_refused_in_words(server, first):
    told, failures = fuzz_server.send_bodies(server, list(range(first, first + 100)), 1, shown=False)
    assert not failures, "\n".join(failures)
    assert "x 200" in told and "x 400" in told


def test_work_of_clients_that_leave_is_left_too(server):
    told, failures = fuzz_server.cut_connections(server, 4, 3, 1)
    assert not failures and "12 requests" in told


def test_a_number_stands_for_one_body():
    assert fuzz_server.body_case(7, 0) == fuzz_server.body_case(7, 0) != fuzz_server.body_case(8, 0)


def test_defects_are_told_apart():
    error = b'{"error":{"message":"no"}}'
    assert judged(400, error) is None and judged(503, error) is None
    assert judged(500, error) and judged(400, b"no") and judged(400, error + b" " * 30_000)
    assert judged(200, b"data: {}") is None and judged(200, b'data: {"error":{"type":"server_error"}}')
    anthropic = b'{"type":"error","error":{"message":"no"}}'
    assert judged(400, error, fuzz_server.COUNT) and judged(400, anthropic, fuzz_server.COUNT) is None
    assert judged(400, anthropic) and judged(200, b'data: {"error":{"type":"api_error"}}', fuzz_server.MESSAGES)


def test_bodies_are_of_all_protocols():
    paths = [fuzz_server.body_case(number, 0)[0] for number in range(300)]
    assert set(paths) == {*fuzz_server.LONGEST, fuzz_server.COUNT, fuzz_server.TOKENIZE}
