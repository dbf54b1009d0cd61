"""Types for editors: every method's parameters stand in the public API's stub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_stub_is_the_generated_one():
    spec = importlib.util.spec_from_file_location("stubs", ROOT / "benchmarks" / "stubs.py")
    stubs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stubs)
    assert stubs.stub() == (ROOT / "src" / "kvsieve" / "__init__.pyi").read_text(), "python -m benchmarks.stubs"
