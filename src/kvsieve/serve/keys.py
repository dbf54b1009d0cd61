"""API keys: authorization, and ownership of requests."""

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
    """API keys, stored as digests.

    Args:
        keys: the keys.
        needed: requests need a key, even if there is none. Default None: if there is one.
    """

    def __init__(self, keys: Iterable[str] = (), needed: bool | None = None) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._needed = bool(self._digests) if needed is None else needed

    def __bool__(self) -> bool:
        return self._needed

    def check(self) -> None:
        if self._needed and not self._digests:
            raise InputError(
                f"{ENVIRONMENT} is set and has no key: write keys with commas between them, or unset it for a server "
                "without keys"
            )

    def owner(self, authorization: str | None, api_key: str | None = None) -> str | None:
        """Return an owner's name for a request's headers, "" if no key is needed; None for a wrong key.

        Args:
            authorization: the header Authorization, with a bearer token.
            api_key: the header x-api-key.
        """
        if not self._needed:
            return ""
        kind, _, token = (authorization or "").partition(" ")
        sent = [token.strip() if kind.lower() == "bearer" else "", (api_key or "").strip()]
        digests = [hashlib.sha256(key.encode()).digest() for key in sent if key]
        # All are compared, so that the time reveals nothing.
        found = [[hmac.compare_digest(digest, known) for known in self._digests] for digest in digests]
        return next((digest.hex()[:16] for digest, same in zip(digests, found, strict=True) if any(same)), None)


def read_keys(path: str | None) -> Keys:
    """Read keys from a file with one per line, and from the environment (comma-separated).

    A variable that is set but has no key authorizes no client; see Keys.check.

    Raises InputError for an unreadable or empty file, and for a key that no header can contain.
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
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def check_reach(keys: Keys, host: str, is_open: bool, origins: Iterable[str], hosts: Iterable[str] = ()) -> None:
    """Raise InputError for a server that is open to all without being declared so, or that no client can use."""
    keys.check()
    if not (keys or is_open or is_local(host)):
        raise InputError(
            f"--host {host} lets other machines ask, and there are no API keys: name them with --api-keys FILE "
            f"or {ENVIRONMENT}, or let anyone ask with --open"
        )
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise InputError(f"--allow-origin {origin!r} is no origin; write it as https://example.org, or * for all")
    for name in hosts:
        if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s/*:\[\]]+)(:\d+)?", name.strip()):
            raise InputError(f"--allow-host {name!r} is no host name; write it as llm.example.org, or [::1] for IPv6")
