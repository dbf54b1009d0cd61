"""Errors and warnings. Every message says what was got, what was expected, and what to do."""

from __future__ import annotations

from typing import Any

from kvsieve.text import printable, shortened


class KvsieveError(Exception):
    """Base of all errors of kvsieve; messages name the value got, the value expected, and the remedy.

    Long quotations are shortened, and control characters are escaped.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(shortened(arg)) if isinstance(arg, str) else arg for arg in args))


class PlanError(KvsieveError, ValueError):
    """A method, parameter, budget or combination of roles that cannot be honoured."""


class InputError(KvsieveError, ValueError):
    """A prompt, mask or argument of a call that cannot be honoured."""


class UnsupportedModelError(KvsieveError, NotImplementedError):
    """A model with an architecture that kvsieve does not support."""


class UnsupportedOptionError(KvsieveError, NotImplementedError):
    """An option of ``generate`` or ``forward`` that cannot be honoured under a plan."""


class CacheStateError(KvsieveError, RuntimeError):
    """A cache used outside its session, or after a forward pass that failed half-way."""


class CacheFileError(KvsieveError):
    """A saved cache that cannot be written or read, or was made with another model, tokenizer or plan."""


class NotAttachedError(KvsieveError, AttributeError):
    """A call on ``attach(...)`` outside of ``with attach(...) as sieve:``."""


class MissingFileError(CacheFileError, InputError):
    """A saved cache's file that is missing or not readable."""


class KvsieveWarning(UserWarning):
    """A request was honoured in a changed form; the message says how."""


def short(value: Any, most: int = 120) -> str:
    """Quote a value in a message: its repr, at most `most` characters of it, on one line."""
    try:
        # A long text is cut before it is quoted, a large container is described by its size.
        text = repr(value[:most] + "…" if isinstance(value, str) and len(value) > most else value)
    except Exception:  # the repr of a caller's object may raise anything
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= most + 3 else f"{text[:most]}…"
