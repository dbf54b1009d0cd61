"""API keys: who may ask, and whose requests are whose."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Iterable
from pathlib import Path

from kvsieve.errors import InputError

ENVIRONMENT = "KVSIEVE_API_KEYS"


class Keys:
    """Keys that requests come with, held as their digests.

    Args:
        keys: the keys.
        needed: requests need a key, also where there is none. Default None: where there is one.
    """

    def __init__(self, keys: Iterable[str] = (), needed: bool | None = None) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._needed = bool(self._digests) if needed is None else needed

    def __bool__(self) -> bool:
        """Tell whether requests need a key."""
        return self._needed

    def check(self) -> None:
        """Raise InputError where requests need a key and there is none."""
        if self._needed and not self._digests:
            raise InputError(
                f"{ENVIRONMENT} is set and has no key: write keys with commas between them, or unset it for a server "
                "without keys"
            )

    def owner(self, header: str | None) -> str | None:
        """Return a name for whose key an Authorization header has, "" where none is needed; None for a wrong one."""
        if not self._needed:
            return ""
        kind, _, key = (header or "").partition(" ")
        given = hashlib.sha256(key.strip().encode()).digest()
        # All are compared, so that the time tells nothing.
        found = [hmac.compare_digest(given, each) for each in self._digests]
        return given.hex()[:16] if kind.lower() == "bearer" and any(found) else None


def read_keys(path: str | None) -> Keys:
    """Read keys from a file with one a line, and from the environment (comma between them).

    A variable that is set and has no key lets nobody ask; see Keys.check.

    Raises InputError for a file that cannot be read or has none, and for a key that no header can carry.
    """
    named = os.environ.get(ENVIRONMENT)
    found = [key.strip() for key in (named or "").split(",") if key.strip()]
    if path is not None:
        try:
            # Some editors put a byte order mark before the first key.
            lines = Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--api-keys {path!r} cannot be read: {error}") from error
        listed = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not listed:
            raise InputError(f"--api-keys {path!r} has no key; write one a line")
        found += listed
    for number, key in enumerate(found):
        if not (key.isascii() and key.isprintable()):
            raise InputError(f"API key number {number + 1} cannot be sent in a header: write it in printable ASCII")
    return Keys(found, needed=named is not None or path is not None)


def is_local(host: str) -> bool:
    """Tell whether only this machine reaches an address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def check_reach(keys: Keys, host: str, is_open: bool, origins: Iterable[str]) -> None:
    """Raise InputError for a server that all can ask and are not said to, and for one that nobody can ask."""
    keys.check()
    if not (keys or is_open or is_local(host)):
        raise InputError(
            f"--host {host} lets other machines ask, and there are no API keys: name them with --api-keys FILE "
            f"or {ENVIRONMENT}, or let anyone ask with --open"
        )
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise InputError(f"--allow-origin {origin!r} is no origin; write it as https://example.org, or * for all")
