"""The command's end: SIGTERM and Ctrl-C let answers finish, write the store and leave a sane status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from source_tree import SOURCE

CHILD = """
import signal, sys, time, torch
torch.set_num_threads(1)
from kvsieve.models.families import build
from kvsieve.serve import run
from kvsieve.store import directory
from toy_chats import chat_tokenizer

# Tests that run in the background of a shell, or under nohup, pass on that SIGINT or SIGHUP is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# A busy machine takes its time over an answer.
run._GRACE = 600.0
write = directory.write_cache

def slow(*given, **how):
    time.sleep(0.3)
    return write(*given, **how)

directory.write_cache = slow
model = build("llama", max_position_embeddings=4096)
options = run.ServerOptions(port=0, store=sys.argv[1])
run.serve(model, chat_tokenizer(), options, "tiny", lambda text: print(text, flush=True))
"""


@pytest.mark.parametrize(
    "kind", [signal.SIGTERM, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_lets_streams_end_and_the_store_be_written(tmp_path, kind):
    support = str(Path(__file__).parents[1] / "support")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((support, str(SOURCE.parent))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(tmp_path / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        # The address is told once it is listened at.
        url = re.search(r"http://\S+:\d+", child.stdout.readline())[0]
        for first in range(3):
            body = {"model": "tiny", "prompt": [3 + first, *range(10, 110)], "max_tokens": 2, "ignore_eos": True}
            httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()
        nodes = httpx.get(f"{url}/v1/kv").json()["store"]["nodes"]
        long = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=600) as reply:
            lines = (line for line in reply.iter_lines() if line)
            told = [next(lines)]
            child.send_signal(kind)
            told += lines
        if kind == signal.SIGINT:
            # Impatience costs nothing of the store.
            child.send_signal(kind)
        code = child.wait(600)
    assert told[-1] == "data: [DONE]" and json.loads(told[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert "".join(json.loads(each[6:])["choices"][0]["text"] for each in told[:-1]).count("w") > 200
    assert len(list((tmp_path / "store").rglob("*.kv"))) >= nodes >= 3
    assert code == (1 if kind == signal.SIGINT else 0)
