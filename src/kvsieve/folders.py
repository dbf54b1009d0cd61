"""The user's folders: the cache, and folders safe to load code from, since no other user can write to them."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path


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
    for each in dict.fromkeys((path, real, *path.parents, *real.parents)):
        found = os.lstat(each)
        if found.st_uid not in trusted:
            return f"{each} belongs to the user with id {found.st_uid}"
        if stat.S_ISLNK(found.st_mode):
            continue
        on_the_way = each not in (path, real)
        if on_the_way and found.st_mode & stat.S_ISVTX:
            continue
        # Many systems give each user a group of the same number, which has no other members.
        own_group = on_the_way and found.st_gid == os.getuid() != 0
        if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not own_group):
            return f"others may write to {each}: its mode is {stat.S_IMODE(found.st_mode):o}"
    return None
