"""Live servers for tests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from kvsieve.serve.connections import bounded_connections


@contextlib.contextmanager
def listening(app: Any, most: int = 200, **bounds: float) -> Iterator[str]:
    """The address of an application that listens at a free port, within bounds of connections."""
    protocol = bounded_connections(most, **bounds)
    server = uvicorn.Server(uvicorn.Config(app, port=0, http=protocol, ws="none", log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
