"""A writer that is killed loses nothing that was finished, and leaves nothing damaged that is served."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

import kvsieve
from kvsieve.models.families import build

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "store_kills.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")
def test_a_writer_is_killed_again_and_again(tmp_path):
    spec = importlib.util.spec_from_file_location("store_kills", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with kvsieve.attach(build("llama"), kvsieve.plan("full")) as sieve:
        for number, wait in enumerate((0.0, 0.01, 0.03)):
            told = script.kill_once(sieve, tmp_path, 100_000 * number, wait)
            counts = script.check(sieve, tmp_path, told)
            assert counts.pop("finished") >= 1 and counts == {"lost": 0, "damaged": 0, "wrong": 0}
