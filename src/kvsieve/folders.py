"""The user's folders, folders safe to load code from, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# Neither through links nor waiting for the other end of a pipe, where the system knows of these.
_CAREFULLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
# Characters of a file's name that the name of its unfinished successor has in it.
_NAMED = 64
# The end of that name.
UNFINISHED = ".kvsieve-tmp"


def home() -> Path | None:
    """Return the user's home directory, or None without one: no HOME, and no entry in /etc/passwd."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def cache_dir() -> Path:
    """Return kvsieve's cache directory, which need not exist.

    ``$KVSIEVE_CACHE``, else ``$XDG_CACHE_HOME/kvsieve``, else ``~/.cache/kvsieve``, else, without a home directory,
    `temporary_dir`. An empty variable counts as unset, and so does a relative ``XDG_CACHE_HOME`` (its specification
    says to ignore one).
    """
    if own := os.environ.get("KVSIEVE_CACHE"):
        return Path(os.path.expanduser(own)).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):
        return Path(xdg) / "kvsieve"
    user = home()
    return temporary_dir() if user is None else user / ".cache" / "kvsieve"


def temporary_dir() -> Path:
    """Return the user's own folder among temporary files, the same in each process; it need not exist."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        # Nothing is writable; the caller that writes reports it.
        folder = "/tmp"
    user = "" if sys.platform == "win32" else f"-{os.geteuid()}"
    return Path(folder) / f"kvsieve{user}"


def make_private(folder: Path) -> None:
    """Create a folder that only this user may enter, and its parents likewise. Raises OSError."""
    if not folder.parent.exists():
        make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def why_not_private(path: Path) -> str | None:
    """Return why others could replace a file, or a folder's contents; None if only this user and root can.

    All parent folders count, except that a sticky folder such as /tmp protects each owner's files. Windows' permissions
    are not checked. Raises OSError for a path that does not exist.
    """
    if sys.platform == "win32":
        return None
    path = path.absolute()
    real = path.resolve(strict=True)
    # In a container whose root is another user outside, that user owns the root directory.
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    for place in dict.fromkeys((path, real, *path.parents, *real.parents)):
        found = os.lstat(place)
        if found.st_uid not in trusted:
            return f"{place} belongs to the user with id {found.st_uid}"
        if stat.S_ISLNK(found.st_mode):
            continue
        on_the_way = place not in (path, real)
        if on_the_way and found.st_mode & stat.S_ISVTX:
            continue
        # Many systems give each user a group of the same number, which has no other members.
        own_group = on_the_way and found.st_gid == os.getuid() != 0
        if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not own_group):
            return f"others may write to {place}: its mode is {stat.S_IMODE(found.st_mode):o}"
    return None


def write_whole(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write a file, text as UTF-8, so that it holds either what was there before or all of `data`. Raises OSError."""
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of `path` once it is complete and on the disk; links are followed.

    What killed processes have left of theirs is deleted. Raises OSError, and what was there before is then untouched.

    Args:
        path: its folder exists.
        mode: permissions of the new file, less the process's umask.
    """
    target = Path(os.path.realpath(path))
    _clean(target)
    temporary, file = _created(target, mode)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if os.name == "nt":  # which renames no open file, and has no locks to lose by closing it
                file.close()
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _created(target: Path, mode: int) -> tuple[Path, BinaryIO]:
    """Create a file beside `target`, locked for as long as it is open."""
    while True:
        name = target.with_name(f".{target.name[:_NAMED]}.{uuid.uuid4().hex[:12]}{UNFINISHED}")
        file = open(name, "xb", opener=lambda path, flags: os.open(path, flags, mode))  # noqa: SIM115
        # Between these two calls somebody may have taken it for a dead process's, and deleted it.
        if _locked(file.fileno()) is not False and os.fstat(file.fileno()).st_nlink:
            return name, file
        file.close()


def _clean(target: Path) -> None:
    """Delete leftover files of killed processes for their `target`; running processes lock theirs."""
    left = re.compile(rf"\.{re.escape(target.name[:_NAMED])}\.[0-9a-f]{{12}}{re.escape(UNFINISHED)}")
    for name in os.listdir(target.parent):
        if left.fullmatch(name):
            with contextlib.suppress(OSError):
                handle = os.open(target.parent / name, os.O_RDONLY | _CAREFULLY)
                try:
                    if _locked(handle):
                        os.unlink(target.parent / name)
                finally:
                    os.close(handle)


def _locked(handle: int) -> bool | None:
    """Lock an open file; False where another process has, None where the system has no such locks."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True
