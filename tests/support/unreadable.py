"""Files that cannot be read."""

from __future__ import annotations

import os


def forbid(monkeypatch, path) -> None:
    """A file of mode 000, also where tests are run by root."""
    real = open

    def refuse(name, *given, **how):
        if os.fspath(name) == os.fspath(path):
            raise PermissionError(13, "Permission denied", name)
        return real(name, *given, **how)

    monkeypatch.setattr("builtins.open", refuse)
