"""Folders for compiled kernels: not writable by other users, and executable."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from kvsieve.folders import cache_dir, make_private, temporary_dir, why_not_private


def cache_folder() -> Path:
    """Return the folder of files made once per machine, in `cache_dir`; it need not exist."""
    return cache_dir() / "kernels"


@dataclass(frozen=True)
class KernelFolders:
    """Folders that kernels may be loaded from, the preferred one first.

    Attributes:
        usable: `cache_folder`, then one among the user's temporary files, if they can be used.
        refused: a reason for each that cannot.
    """

    usable: tuple[Path, ...]
    refused: tuple[str, ...]

    def __str__(self) -> str:
        """Name the folder in use, and why it is not `cache_folder`."""
        folder = str(self.usable[0]) if self.usable else "none"
        return folder if folder == str(cache_folder()) else f"{folder}: {'; '.join(self.refused)}"


def kernel_folders() -> KernelFolders:
    usable = []
    refused = []
    for folder in dict.fromkeys((cache_folder(), temporary_dir() / "kernels")):
        try:
            make_private(folder)
            reason = why_not_private(folder) or _why_nothing_runs(folder)
        except OSError as error:
            reason = f"{folder} cannot be made: {error.strerror}"
        if reason is None:
            usable.append(folder)
        else:
            refused.append(reason)
    return KernelFolders(tuple(usable), tuple(refused))


def _why_nothing_runs(folder: Path) -> str | None:
    if sys.platform == "linux" and os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return f"{folder} is on a file system mounted noexec"
    return None
