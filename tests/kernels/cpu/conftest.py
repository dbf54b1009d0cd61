"""Kernels in C need no interpreter of Triton."""

from __future__ import annotations

import shutil
import tempfile

import pytest

from kvsieve.kernels.cpu import build


@pytest.fixture(autouse=True)
def interpreter():
    return None


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine on which no kernel was compiled; its folder has cache/ and tmp/. The compiler optimizes nothing."""
    for name in ("KVSIEVE_KERNELS", "CC"):
        monkeypatch.delenv(name, raising=False)
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("KVSIEVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(build, "_FLAGS", ("-O0", *build._FLAGS[1:]))
    monkeypatch.setattr(build, "library", build.library.__wrapped__)
    monkeypatch.setattr(build, "_reasons", [])
    return tmp_path


@pytest.fixture
def script(machine):
    """Write a compiler: a shell script, whose "$@" are its arguments; returns its path."""

    def write(text: str, name: str = "compiler") -> str:
        path = machine / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return write
