"""Types for editors: every method's parameters stand in the public API's stub."""

from __future__ import annotations

from pathlib import Path

import stubs

ROOT = Path(__file__).parent.parent


def test_the_stub_is_the_generated_one():
    assert stubs.stub() == (ROOT / "src" / "kvsieve" / "__init__.pyi").read_text(), "python tests/support/stubs.py"
