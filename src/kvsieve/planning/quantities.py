"""Quantities in text: tokens (8192, 8k), memory (2GiB, 300MB) and times (50ms)."""

from __future__ import annotations

import re

from kvsieve.errors import InputError, PlanError, short

# Largest first, so that a size is written in the largest unit that gives a whole number.
_BINARY = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_DECIMAL = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1}
_UNITS = {name.lower(): size for name, size in {**_BINARY, **_DECIMAL}.items()}
_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
_SIZE = re.compile(rf"({_NUMBER})\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_TIME = re.compile(rf"({_NUMBER})\s*(ms|s)", re.IGNORECASE | re.ASCII)
_TOKENS = re.compile(r"(\d{1,18})([km]?)", re.IGNORECASE | re.ASCII)
_THOUSANDS = {"": 1, "k": 1024, "m": 1024**2}


def is_tokens(text: str) -> bool:
    """Return whether `parse_tokens` can read the text."""
    return _TOKENS.fullmatch(text.strip()) is not None


def parse_tokens(text: str, name: str) -> int:
    """Return a number of tokens: "8192", "8k" (8192) or "1M" (1048576).

    Args:
        text: the number.
        name: the option, such as "--chunk", for messages.

    Raises:
        InputError: the text is no whole number, optionally with k or M.
    """
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{name} takes tokens such as 7500, 8k or 128k, got {short(text)}")
    return int(match[1]) * _THOUSANDS[match[2].lower()]


def parse_lengths(text: str, name: str) -> list[int]:
    """Return lengths in tokens of a list like "8k,7500", each once; see `parse_tokens`. Raises InputError."""
    parts = text.split(",")
    if not all(is_tokens(part) and parse_tokens(part, name) for part in parts):
        raise InputError(f"{name} takes tokens such as 7500, 8k or 128k, comma between several, got {short(text)}")
    return list(dict.fromkeys(parse_tokens(part, name) for part in parts))


def parse_length(text: str, name: str) -> int:
    """Return one length in tokens, at least 1. Raises InputError."""
    found = parse_lengths(text, name)
    if len(found) != 1:
        raise InputError(f"{name} takes one number of tokens such as 7500 or 16k, got {short(text)}")
    return found[0]


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as "512MiB", "1.5 GB", "300kB" or "0".

    Raises:
        PlanError: the text is no size, or lacks a known unit.
    """
    match = _SIZE.fullmatch(text.strip())
    known = ", ".join([*_BINARY, *_DECIMAL])
    if match is None:
        raise PlanError(f"{short(text)} is no size in bytes; write a number and one of {known}, such as '512MiB'")
    number = match[1]
    unit = match[2]
    if not unit and not float(number):
        return 0
    if not unit:
        raise PlanError(f"{short(text)} has no unit; write {number}GiB or {number}MiB (units are {known})")
    size = _UNITS.get(unit.lower())
    if size is None:
        raise PlanError(f"{short(text)} has the unknown unit {unit!r}; known are {known}")
    return int(float(number) * size)


def is_size(text: str) -> bool:
    """Return whether a text is a number with a unit other than tokens', for `parse_bytes`."""
    match = _SIZE.fullmatch(text.strip())
    return match is not None and bool(match[2]) and not is_tokens(text)


def format_bytes(count: int) -> str:
    """Format a size for `parse_bytes`: "512MiB"."""
    units = {**_BINARY, **_DECIMAL}
    name = next(name for name, size in units.items() if count % size == 0)
    return f"{count // units[name]}{name}"


def parse_seconds(text: str, name: str) -> float:
    """Return the seconds of a time such as "50ms" or "0.1s". Raises InputError."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{name} takes a time per token with its unit, such as 50ms or 0.1s, got {short(text)}")
    return float(match[1]) * (0.001 if match[2].lower() == "ms" else 1.0)


def format_seconds(seconds: float) -> str:
    """Format a forecast with low precision, such as "40 seconds" or "5 minutes"."""
    return f"{max(10, 10 * round(seconds / 10))} seconds" if seconds < 100 else f"{round(seconds / 60)} minutes"
