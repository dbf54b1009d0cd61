"""A server on a tiny random model, in this process, for scripts that ask it over HTTP."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from kvsieve.serve.run import ServerOptions, application
from served_apps import listening
from tiny_models import build
from toy_chats import chat_tokenizer


@contextlib.contextmanager
def served(options: ServerOptions, family: str = "llama") -> Iterator[tuple[str, Any]]:
    """Serve a tiny model called "tiny"; the address and the application."""
    with application(build(family), chat_tokenizer(), options, "tiny") as app, listening(app) as url:
        yield url, app
