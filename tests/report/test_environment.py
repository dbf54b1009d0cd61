"""The stamp of numbers names the commit that was measured."""

from __future__ import annotations

import subprocess

from kvsieve.report import environment as stamps


def test_the_commit_is_that_of_the_whole_package(monkeypatch):
    asked, told = [], [""]

    def run(command, **options):
        asked.append(command[3:])
        return subprocess.CompletedProcess(command, 0, "abc\n" if "rev-parse" in command else told[0])

    monkeypatch.delenv("KVSIEVE_COMMIT", raising=False)
    monkeypatch.setattr(stamps.subprocess, "run", run)
    for status, commit in (("", "abc"), (" M core/pages.py\n", "abc+")):
        told[0] = status
        assert stamps.environment()["commit"] == commit
    monkeypatch.setenv("KVSIEVE_COMMIT", "def")
    assert stamps.environment()["commit"] == "def"


def test_changes_anywhere_in_the_package_count(monkeypatch):
    roots = []
    monkeypatch.delenv("KVSIEVE_COMMIT", raising=False)
    monkeypatch.setattr(
        stamps.subprocess, "run", lambda command, **_: roots.append(command[2]) or subprocess.CompletedProcess(0, 0, "")
    )
    stamps.environment()
    assert {root.rsplit("/", 1)[-1] for root in roots} == {"kvsieve"}
