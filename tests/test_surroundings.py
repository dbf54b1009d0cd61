"""What is set around the tests does not reach them."""

from __future__ import annotations

import os

import surroundings


def test_variables_that_print_or_compute_otherwise_are_dropped(monkeypatch):
    given = {"FORCE_COLOR": "1", "CC": "cross-gcc", "COLUMNS": "37", "KVSIEVE_API_KEYS": "x", "KVSIEVE_DEBUG": "1"}
    monkeypatch.setattr(os, "environ", {"PATH": "p", "KVSIEVE_CACHE": "c", **given})
    surroundings.settle()
    assert os.environ == {
        "PATH": "p",
        "KVSIEVE_CACHE": "c",
        "KVSIEVE_HOME": os.devnull,
        "KVSIEVE_ATTENTION": "table",
        "COLUMNS": "80",
        "TERM": "xterm",
    }
