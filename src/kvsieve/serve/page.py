"""The chat page: its files, served under a policy that blocks loading from other servers."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI, Response

from kvsieve.serve.failures import Failure

_WEB = files("kvsieve.serve").joinpath("web")
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_POLICY = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"


def add_page(app: FastAPI) -> None:
    """Add the page at `/` and its style sheets and scripts below `/page/`."""
    found = {file.name: file.read_bytes() for file in _WEB.iterdir() if file.name.rpartition(".")[2] in _KINDS}

    def reply(name: str) -> Response:
        headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
        return Response(found[name], media_type=_KINDS[name.rpartition(".")[2]], headers=headers)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return reply("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        if name not in found:
            raise Failure(404, f"the page has no part called {name!r}")
        return reply(name)
