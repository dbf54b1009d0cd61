"""Kernels run on the CPU, under Triton's interpreter; where Triton does not exist (it is Linux's) nothing is tested."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]
if not collect_ignore_glob:
    from interpreted import interpreted

    # Kernels are defined when their modules are first imported, which the tests beside this file do.
    with interpreted():
        pass


@pytest.fixture(autouse=True)
def interpreter():
    with interpreted():
        yield
