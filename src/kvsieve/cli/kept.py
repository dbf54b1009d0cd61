"""Kept tokens on the command line: --show and --find of `kvsieve run`, /kept of `kvsieve chat`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsieve.cli.output import check_writable, show
from kvsieve.errors import InputError

if TYPE_CHECKING:
    from kvsieve.hf.kept_tokens.kept import Kept


def check_kept(page: str | None, find: Sequence[str] | None, prompts_file: str | None, as_json: bool) -> list[str]:
    """Return the texts to find. Raises InputError for unusable options, before a model is loaded."""
    texts = [*(find or [])]
    if prompts_file is not None and (page is not None or texts):
        raise InputError("--show and --find are of one prompt; give it with --prompt or --prompt-file")
    if not all(texts):
        raise InputError("--find is empty; write the text to look for")
    if page is None:
        return texts
    if page == "-":
        if as_json:
            raise InputError("--show - prints a map, and --json nothing but JSON; name a page, --show kept.html")
        return texts
    if Path(page).suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--show is a file that ends in .html, or - for the terminal, got {page!r}")
    check_writable("--show", page)
    return texts


def found_json(kept: Kept | None, texts: Sequence[str]) -> dict[str, Any]:
    if kept is None or not texts:
        return {}
    return {"found": {text: [{**asdict(place), "states": place.states} for place in kept.of(text)] for text in texts}}


def print_found(labels: Sequence[str], kept: Sequence[Kept], texts: Sequence[str]) -> None:
    for text in texts:
        for label, tokens in zip(labels, kept, strict=True):
            for line in found_lines(tokens, text):
                show(f"{label}: {line}")


def found_lines(kept: Kept, text: str) -> list[str]:
    found = kept.of(text)
    return [f"{text!r}, {place}" for place in found] or [f"{text!r} does not occur in what the model has read"]


def print_map(kept: Kept) -> None:
    show(kept.to_text(shutil.get_terminal_size((80, 24)).columns))
