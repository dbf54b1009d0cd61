"""API keys: who may ask, and whose requests are whose."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from kvsieve.errors import InputError

ENVIRONMENT = "KVSIEVE_API_KEYS"


class Keys:
    """Keys that requests come with, held as their digests.

    Args:
        keys: none for a server that everyone may ask.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, header: str | None) -> str | None:
        """Return a name for whose key an Authorization header has, "" where none is needed; None for a wrong one."""
        if not self._digests:
            return ""
        kind, _, key = (header or "").partition(" ")
        given = hashlib.sha256(key.strip().encode()).digest()
        # All are compared, so that the time tells nothing.
        found = [hmac.compare_digest(given, each) for each in self._digests]
        return given.hex()[:16] if kind.lower() == "bearer" and any(found) else None


def read_keys(path: str | None) -> Keys:
    """Read keys from a file with one a line, and from the environment (comma between them).

    Raises InputError for a file that cannot be read or has none.
    """
    found = [key.strip() for key in os.environ.get(ENVIRONMENT, "").split(",") if key.strip()]
    if path is not None:
        try:
            lines = Path(path).expanduser().read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--api-keys {path!r} cannot be read: {error}") from error
        listed = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not listed:
            raise InputError(f"--api-keys {path!r} has no key; write one a line")
        found += listed
    return Keys(found)
