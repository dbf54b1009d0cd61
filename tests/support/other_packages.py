"""Methods of other packages, as if one had been installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import kvsieve
from kvsieve.planning import loading, registry

# Has the methods own-evictor and own-reader.
OWN = Path(__file__).parent / "other_package"


def look_for_methods(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let methods be looked for anew, among the packages of a folder too; undone with the monkeypatch."""
    kvsieve.list_methods()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "own_methods", raising=False)
    monkeypatch.setattr(loading, "_loaded", False)
    monkeypatch.setattr(loading, "REGISTERED", dict(loading.REGISTERED))
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
