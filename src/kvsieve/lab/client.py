"""Client of OpenAI-compatible servers (kvsieve's, vLLM, llama.cpp's) for scoring and measuring them."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvsieve.errors import InputError, KvsieveError, short

if TYPE_CHECKING:
    import httpx

KEY = "OPENAI_API_KEY"
# Members of a request that a measurement sets, or that would put other text into its answer.
_OWN = ("prompt", "max_tokens", "stream", "n", "best_of", "echo", "suffix")


class ServerError(KvsieveError):
    """The server cannot be reached, or refuses a request. status: of its answer, or None."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Completed:
    """A completion, with the times of its pieces.

    Attributes:
        text: of the answer.
        began: time of the request, in seconds of `time.perf_counter`.
        times: of each piece of text.
        ended: time of the end.
        prompt_tokens: of the prompt, as counted by the server.
        new_tokens: of the answer, as counted by the server; else the number of pieces.
        cached_tokens: of the prompt, from a prefix cache; None if the server does not say.
        kept: `usage.kv` of kvsieve's server; None for others.
    """

    text: str
    began: float
    times: tuple[float, ...]
    ended: float
    prompt_tokens: int | None
    new_tokens: int
    cached_tokens: int | None
    kept: Mapping[str, Any] | None

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to the first piece."""
        return (self.times[0] if self.times else self.ended) - self.began

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        if self.new_tokens < 2 or len(self.times) < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.new_tokens - 1)


class ServerClient:
    """Requests completions of token ids, greedily and streamed. Thread-safe.

    Args:
        url: of the server, with or without /v1.
        model: its name there (default: the first that the server lists).
        extra: additional members of every request's body.
        timeout: seconds without any answer.

    Raises:
        InputError: httpx is not installed, or `extra` has members that a measurement sets.
        ServerError: the server cannot be reached, or has no models.
    """

    def __init__(
        self, url: str, model: str | None = None, extra: Mapping[str, Any] | None = None, timeout: float = 3600.0
    ) -> None:
        if importlib.util.find_spec("httpx") is None:
            raise InputError("asking a server needs httpx: run `pip install 'kvsieve[serve]'`")
        import httpx

        self.url = url.rstrip("/").removesuffix("/v1")
        self.extra = _checked(extra or {})
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Some servers silently close a connection after a stream, and the next request would be lost.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http: httpx.Client = httpx.Client(headers=headers, timeout=timeout, limits=limits)
        self.model = model or self._first_model()

    def close(self) -> None:
        self._http.close()

    def complete(self, prompt: Sequence[int] | str, max_tokens: int, **more: Any) -> Completed:
        """Request one completion. Raises ServerError."""
        body: dict[str, Any] = {"model": self.model, "prompt": prompt if isinstance(prompt, str) else list(prompt)}
        body |= {"max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **self.extra, **more}
        times = list[float]()
        pieces = list[str]()
        usage: dict[str, Any] = {}
        began = time.perf_counter()
        for chunk in self._chunks("/v1/completions", body):
            for choice in chunk.get("choices") or ():
                if choice.get("text"):
                    times.append(time.perf_counter())
                    pieces.append(choice["text"])
            usage = chunk.get("usage") or usage
        details = usage.get("prompt_tokens_details") or {}
        return Completed(
            text="".join(pieces),
            began=began,
            times=tuple(times),
            ended=time.perf_counter(),
            prompt_tokens=usage.get("prompt_tokens"),
            new_tokens=usage.get("completion_tokens") or len(pieces),
            cached_tokens=details.get("cached_tokens"),
            kept=usage.get("kv"),
        )

    def _chunks(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        import httpx

        try:
            with self._http.stream("POST", f"{self.url}{path}", json=body) as reply:
                if not reply.is_success:
                    reply.read()
                    raise self._refused(reply)
                for line in _lines(reply):
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    chunk = json.loads(data)
                    if chunk.get("error"):
                        raise ServerError(f"the server at {self.url} failed: {short(chunk['error'])}")
                    yield chunk
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(f"the server at {self.url} cannot be asked: {error or type(error).__name__}") from error

    def _first_model(self) -> str:
        import httpx

        try:
            reply = self._http.get(f"{self.url}/v1/models", timeout=30)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"no server answers at {self.url}: {error or type(error).__name__}") from error
        if not reply.is_success:
            raise self._refused(reply)
        try:
            return str(reply.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{self.url}/v1/models lists no model; is it an OpenAI-compatible server?") from error

    def _refused(self, reply: httpx.Response) -> ServerError:
        hint = f"; set {KEY}" if reply.status_code == 401 else ""
        message = f"the server at {self.url} answers {reply.status_code}: {short(reply.text)}{hint}"
        return ServerError(message, reply.status_code)


def _lines(reply: httpx.Response) -> Iterator[str]:
    """Yield the lines of a streamed reply; those of httpx end at Unicode's line breaks too, which texts may have."""
    rest = b""
    for data in reply.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode() for line in lines)
    yield rest.decode()


def parse_extra(text: str | None) -> dict[str, Any]:
    """Parse members of a request's body from a JSON object. Raises InputError for anything else."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"--extra is a JSON object, got {text!r}: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f'--extra is a JSON object such as \'{{"kv": {{"method": "full"}}}}\', got {text!r}')
    return _checked(found)


def _checked(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return additional members of requests. Raises InputError for those that a measurement sets."""
    own = [name for name in _OWN if name in extra]
    if own:
        raise InputError(
            f"extra members of a request cannot be {', '.join(own)}: a measurement sets these itself, for one streamed "
            "answer per prompt; leave them out"
        )
    return dict(extra)


def check_tokenizer_of(client: ServerClient, ids: Sequence[int], text: str, name: str) -> None:
    """Raise InputError if a server counts another number of tokens in a text than a tokenizer.

    Args:
        client: of the server.
        ids: the text's tokens, by the tokenizer.
        text: of some hundred tokens.
        name: of the tokenizer, for the message.
    """
    counted = client.complete(text, 1).prompt_tokens
    # A difference of one is a beginning-of-sequence token that one of them adds.
    if counted is not None and abs(counted - len(ids)) > 1:
        raise InputError(
            f"the server's {client.model} reads {counted} tokens where the tokenizer of {name} writes {len(ids)}: "
            "name the model that the server has, as the first argument"
        )
