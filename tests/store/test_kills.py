"""A writer that is killed loses nothing that was finished, and leaves nothing damaged that is served."""

from __future__ import annotations

import os

import pytest

import kvsieve
import store_kills
from tiny_models import build


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")
def test_a_writer_is_killed_again_and_again(tmp_path):
    with kvsieve.attach(build("llama"), kvsieve.plan("full")) as sieve:
        for number, wait in enumerate((0.0, 0.01, 0.03)):
            told = store_kills.kill_once(sieve, tmp_path, 100_000 * number, wait)
            counts = store_kills.check(sieve, tmp_path, told)
            assert counts.pop("finished") >= 1 and counts == {"lost": 0, "damaged": 0, "wrong": 0}
