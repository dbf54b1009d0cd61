"""The folder of compiled kernels: what others could have written is not loaded, and another folder is taken."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from kvsieve import folders
from kvsieve.kernels.cpu import build
from kvsieve.kernels.cpu.folder import cache_folder, kernel_folders

pytestmark = pytest.mark.skipif(os.name == "nt", reason="there are no modes")


def of_another(monkeypatch, path: Path) -> None:
    """Let another user own a file."""
    real = os.lstat

    def lstat(name, **how):
        found = real(name, **how)
        return os.stat_result((*found[:4], 54321, *found[5:])) if str(name) == str(path) else found

    monkeypatch.setattr(folders.os, "lstat", lstat)


def planted(folder: Path) -> Path:
    """A library at the place of the kernels of layers, which are compiled for that."""
    assert build.library("layers").compiled
    (file,) = folder.glob("layers-*.so")
    file.unlink()
    file.write_bytes(b"planted")
    return file


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_folders_and_libraries_are_private_whatever_the_umask(machine, mask):
    before = os.umask(mask)
    try:
        assert build.library("layers").reason is None
    finally:
        os.umask(before)
    made = [machine / "cache", machine / "cache/kernels", *(machine / "cache/kernels").glob("*.so")]
    assert [oct(path.stat().st_mode & 0o777) for path in made] == ["0o700"] * 3


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(machine, mode):
    cache_folder().mkdir(parents=True)
    cache_folder().chmod(mode)
    (reason,) = kernel_folders().refused
    assert str(cache_folder()) in reason and f"{mode:o}" in reason
    (other,) = kernel_folders().usable
    assert other.parent.parent == machine / "tmp" and str(kernel_folders()) == f"{other}: {reason}"
    assert build.library("layers").compiled and not list(cache_folder().iterdir())
    assert not build.library("layers").compiled


@pytest.mark.parametrize("where", ["folder", "parent", "link"])
def test_a_folder_that_another_owns_is_refused(machine, monkeypatch, where):
    cache_folder().mkdir(parents=True)
    if where == "link":
        cache_folder().rename(machine / "real")
        cache_folder().symlink_to(machine / "real")
    of_another(monkeypatch, cache_folder().parent if where == "parent" else cache_folder())
    (reason,) = kernel_folders().refused
    assert "belongs to the user with id 54321" in reason and len(kernel_folders().usable) == 1


@pytest.mark.parametrize(("mode", "refused"), [(0o777, True), (0o1777, False), (0o755, False)])
def test_a_folder_above_it(machine, mode, refused):
    cache_folder().mkdir(parents=True)
    cache_folder().chmod(0o700)
    (machine / "cache").chmod(mode)
    assert bool(kernel_folders().refused) == refused


def test_the_users_own_group_may_write_above(machine, monkeypatch):
    """As with the umask of many systems, 002."""
    cache_folder().mkdir(parents=True, mode=0o700)
    (machine / "cache").chmod(0o775)
    os.chown(machine / "cache", -1, os.getgid())
    monkeypatch.setattr(folders.os, "getuid", os.getgid)
    assert bool(kernel_folders().refused) == (os.getgid() == 0)


@pytest.mark.parametrize("how", ["owner", "mode", "link"])
def test_a_library_that_others_could_have_written_is_compiled_anew(machine, monkeypatch, how):
    file = planted(cache_folder())
    loaded = []
    real = ctypes.CDLL
    monkeypatch.setattr(build.ctypes, "CDLL", lambda name: (loaded.append(Path(name).read_bytes()[:7]), real(name))[1])
    if how == "owner":
        of_another(monkeypatch, file)
    elif how == "mode":
        file.chmod(0o766)
    else:
        file.rename(machine / "elsewhere")
        file.symlink_to(machine / "elsewhere")
    assert build.library("layers").compiled and b"planted" not in loaded


def test_no_folder_is_left(machine, monkeypatch):
    monkeypatch.setenv("KVSIEVE_CACHE", "/dev/null/nowhere")
    (machine / "tmp").chmod(0o777)
    with pytest.warns(UserWarning, match="have no folder"):
        reason = build.library("layers").reason
    assert "/dev/null" in reason and "others may write" in reason and str(kernel_folders()).startswith("none: ")


def counted(script, monkeypatch) -> Path:
    compiler = script('echo run >> "$0.runs"; exec gcc "$@"')
    monkeypatch.setenv("CC", compiler)
    return Path(f"{compiler}.runs")


def test_a_folder_mounted_noexec_is_not_compiled_in(machine, script, monkeypatch):
    real = os.statvfs

    def statvfs(name):
        found = real(name)
        return os.statvfs_result((*found[:8], found[8] | os.ST_NOEXEC, *found[9:])) if "cache" in str(name) else found

    monkeypatch.setattr(os, "statvfs", statvfs)
    compilers = counted(script, monkeypatch)
    assert "noexec" in str(kernel_folders())
    assert build.library("layers").compiled and not list(cache_folder().iterdir())
    before = compilers.read_text()
    assert not build.library("layers").compiled and compilers.read_text() == before


def test_a_folder_that_nothing_loads_from_is_tried_once(machine, script, monkeypatch):
    """Some systems forbid it without the mount's flag."""
    real = ctypes.CDLL

    def load(name):
        if str(name).startswith(str(machine / "cache")):
            raise OSError(f"{name}: failed to map segment from shared object")
        return real(name)

    monkeypatch.setattr(build.ctypes, "CDLL", load)
    compilers = counted(script, monkeypatch)
    assert build.library("layers").compiled
    before = compilers.read_text()
    found = build.library("layers")
    assert found.reason is None and not found.compiled and compilers.read_text() == before
