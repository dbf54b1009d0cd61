"""The server's end: SIGTERM and Ctrl-C let answers finish, write the store and leave a sane status."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal

import httpx
import pytest

from forked import forked
from kvsieve.serve import run
from kvsieve.store import directory
from tiny_models import build
from toy_chats import chat_tokenizer

# A body for an answer of a few tokens.
SHORT = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}


def drained(tell):
    """What the command does with `--drain` of a time that no test waits for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run.serve(build("llama"), chat_tokenizer(), run.ServerOptions(port=0, drain=3600.0), "tiny", tell)


def test_a_drain_answers_requests_and_says_so_in_health_until_the_port_closes():
    with forked(drained) as (child, heard):
        url = re.search(r"http://\S+:\d+", heard.recv())[0]
        assert httpx.get(f"{url}/health", timeout=60).json() == {"status": "ok"}
        os.kill(child.pid, signal.SIGTERM)
        while (health := httpx.get(f"{url}/health", timeout=60)).status_code == 200:
            pass
        assert health.status_code == 503 and health.json() == {"status": "closing"}
        # A balancer that has not looked yet loses nothing.
        assert httpx.post(f"{url}/v1/completions", json=SHORT, timeout=60).status_code == 200
        # A Ctrl-C cuts the drain short.
        os.kill(child.pid, signal.SIGINT)
        child.join(60)
        assert child.exitcode is not None
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=60)


def serve(tell, folder, streamed):
    """What the command does, with a store that writes nothing until a stream has ended."""
    # Tests that run in the background of a shell, or under nohup, pass on that SIGINT or SIGHUP is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # A busy machine takes its time over an answer.
    run._GRACE = 600.0
    write = directory.write_cache

    def slow(*given, **how):
        streamed.wait()
        return write(*given, **how)

    directory.write_cache = slow
    options = run.ServerOptions(port=0, store=str(folder))
    run.serve(build("llama", max_position_embeddings=4096), chat_tokenizer(), options, "tiny", tell)


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
@pytest.mark.parametrize(
    "kind", [signal.SIGTERM, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_lets_streams_end_and_the_store_be_written(tmp_path, kind):
    streamed = multiprocessing.get_context("fork").Event()
    with forked(serve, tmp_path / "store", streamed) as (child, heard):
        # The address is told once it is listened at.
        url = re.search(r"http://\S+:\d+", heard.recv())[0]
        for first in range(3):
            body = {"model": "tiny", "prompt": [3 + first, *range(10, 110)], "max_tokens": 2, "ignore_eos": True}
            httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()
        nodes = httpx.get(f"{url}/v1/kv").json()["store"]["nodes"]
        long = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=600) as reply:
            lines = (line for line in reply.iter_lines() if line)
            told = [next(lines)]
            os.kill(child.pid, kind)
            told += lines
        if kind == signal.SIGINT:
            # Impatience costs nothing of the store.
            os.kill(child.pid, kind)
        streamed.set()
        child.join(600)
    assert told[-1] == "data: [DONE]" and json.loads(told[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert "".join(json.loads(each[6:])["choices"][0]["text"] for each in told[:-1]).count("w") > 200
    assert len(list((tmp_path / "store").rglob("*.kv"))) >= nodes >= 3
    assert child.exitcode == (1 if kind == signal.SIGINT else 0)
