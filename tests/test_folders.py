"""Where the user's folders are, also for a user who has none."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

import kvsieve.models
from kvsieve import folders
from kvsieve.errors import InputError, PlanError
from kvsieve.kernels.cpu.folder import cache_folder
from kvsieve.planning.profiles import load_profile, profiles_dir
from tiny_models import build

VARIABLES = ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "KVSIEVE_CACHE", "KVSIEVE_HOME")


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """A user without HOME and without an entry in /etc/passwd, as of a container with an arbitrary id."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def unknown(*given):
        raise KeyError("uid not found")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_without_a_home_caches_are_temporary_files(homeless):
    assert folders.home() is None
    assert folders.cache_dir() == folders.temporary_dir() == kvsieve.models.cache_dir()
    assert folders.cache_dir().parent == homeless and cache_folder() == folders.cache_dir() / "kernels"


def test_without_a_home_there_are_no_own_profiles(homeless, monkeypatch):
    with pytest.raises(InputError, match="no HOME.*set KVSIEVE_HOME"):
        profiles_dir()
    # Which is no reason not to run.
    with kvsieve.attach(build("llama"), kvsieve.plan("snapkv", budget=40)):
        pass
    monkeypatch.setenv("KVSIEVE_HOME", str(homeless))
    assert profiles_dir() == homeless / "profiles"


def test_a_path_of_a_home_that_is_nowhere_is_refused_as_a_path(homeless):
    with pytest.raises(PlanError, match="~/mine.json"):
        load_profile("~/mine.json")


@pytest.mark.parametrize("home", ["/home/me", "/root/"])
def test_both_caches_are_in_one_folder(monkeypatch, home):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home)
    for name, value, wanted in (
        ("XDG_CACHE_HOME", "relative", Path(home) / ".cache/kvsieve"),
        ("XDG_CACHE_HOME", "/xdg", Path("/xdg/kvsieve")),
        ("KVSIEVE_CACHE", "~/mine", Path(home) / "mine"),
        ("KVSIEVE_CACHE", "mine", Path.cwd() / "mine"),
    ):
        monkeypatch.setenv(name, value)
        assert cache_folder() == wanted / "kernels" and kvsieve.models.cache_dir() == wanted


def test_where_nothing_can_be_written_a_folder_is_named_all_the_same(homeless, monkeypatch):
    def none():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert folders.cache_dir().parent == Path("/tmp")


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path, monkeypatch):
    target, link = tmp_path / "a.json", tmp_path / "link"
    link.symlink_to(target)
    folders.write_whole(link, "één")
    assert link.is_symlink() and target.read_bytes() == "één".encode() and target.stat().st_mode & 0o600 == 0o600
    with pytest.raises(KeyboardInterrupt), folders.replacing(target) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    monkeypatch.setattr(os, "replace", lambda *paths: os.stat(tmp_path / "gone"))
    with pytest.raises(OSError, match="gone"):
        folders.write_whole(target, b"other")
    assert target.read_text() == "één" and {file.name for file in tmp_path.iterdir()} == {"a.json", "link"}
