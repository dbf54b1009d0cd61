"""A server on a tiny random model, in this process, for scripts that ask it over HTTP."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from kvsieve.models.families import build
from kvsieve.serve.run import ServerOptions, application

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))


@contextlib.contextmanager
def listening(app: Any) -> Iterator[str]:
    """Let an application listen at a free port; its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def served(options: ServerOptions, family: str = "llama") -> Iterator[tuple[str, Any]]:
    """Serve a tiny model called "tiny"; the address and the application."""
    from toy_chats import chat_tokenizer

    with application(build(family), chat_tokenizer(), options, "tiny") as app, listening(app) as url:
        yield url, app
