"""Errors in OpenAI's protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import NoneType
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from kvsieve.errors import InputError, KvsieveError, PlanError, UnsupportedModelError, UnsupportedOptionError
from kvsieve.serve.ticket import BusyError, ClosingError, StoppedError, TooLargeError

# Most characters of a message and of a parameter's name, which clients can make long.
_MESSAGE = 1000
_PARAM = 200
# Characters of a refused value beyond which it is not repeated.
_SHORT = 40

# Path of Anthropic's protocol, and its types of errors.
ANTHROPIC = "/v1/messages"
_ANTHROPIC_TYPES = {
    **dict.fromkeys((400, 405, 408, 415, 422), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_KIND = re.compile(r"^(str|int|float|bool|ImageURL)$|^constrained-|[\[(]")


class Failure(Exception):
    """An error as sent to the client: status, OpenAI's code and the parameter at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(_cut(message, _MESSAGE))
        self.status = status
        self.code = code
        self.retry = retry
        self.param = None if param is None else _cut(param, _PARAM)
        self._headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the error in the form of a path's protocol: Anthropic's below /v1/messages, else OpenAI's."""
        if path != ANTHROPIC and not path.startswith(f"{ANTHROPIC}/"):
            return self.body
        # Agents that find these words shorten their conversation.
        words = "prompt is too long: " if self.code == "context_length_exceeded" else ""
        error = {"type": _ANTHROPIC_TYPES.get(self.status, "api_error"), "message": f"{words}{self}"}
        details = {} if self.code is None else {"details": {"error_code": self.code}}
        return {"type": "error", "error": {**error, **details}}

    @property
    def headers(self) -> dict[str, str]:
        out = {**self._headers} if self.retry is None else {"Retry-After": str(self.retry)}
        return {**out, "WWW-Authenticate": "Bearer"} if self.status == 401 else out


def failure_of(error: Exception) -> Failure:
    """Return the failure for an error; errors that are not kvsieve's get no details."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, HTTPException):
        return Failure(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, (ValidationError, RequestValidationError)):
        return _invalid(error)
    if isinstance(error, ClosingError):
        return Failure(503, str(error), code="server_closing", retry=error.retry_after)
    if isinstance(error, BusyError):
        return Failure(429, str(error), code="server_busy", retry=error.retry_after)
    if isinstance(error, StoppedError):
        return Failure(503, str(error), code="server_stopped")
    if isinstance(error, TooLargeError):
        return Failure(413, str(error), code="context_length_exceeded")
    if isinstance(error, (PlanError, UnsupportedModelError)):
        return Failure(400, str(error), code="unsupported_plan", param="kv")
    if isinstance(error, (InputError, UnsupportedOptionError)):
        message = str(error)
        name = message.partition(":")[0]
        long = "model's context" in message
        code = "context_length_exceeded" if long else "invalid_value"
        return Failure(
            400, message, code=code, param=name if name.replace("_", "").replace(".", "").isalpha() else None
        )
    if isinstance(error, KvsieveError):
        return Failure(500, str(error))
    return Failure(500, "the server failed at this request; its log says more")


def renamed(error: InputError | UnsupportedOptionError | Failure, names: Mapping[str, str]) -> Exception:
    """Return an error about a member of a chat request with a protocol's own name for it.

    Args:
        error: whose message begins with the member.
        names: of a protocol, by the chat's, and of a part 'image_url'; a message's number is left out, because
            protocols number them differently.
    """
    member, colon, rest = str(error).partition(":")
    name = names.get(member.partition(".")[0])
    if not (name and colon):
        return error
    if "image_url" in names:
        rest = rest.replace("'image_url'", repr(names["image_url"]))
    message = f"{name}{colon}{rest}"
    if isinstance(error, Failure):
        return Failure(error.status, message, code=error.code, param=name, retry=error.retry)
    return type(error)(message)


def _invalid(error: ValidationError | RequestValidationError) -> Failure:
    if isinstance(error, ValidationError):
        first: Any = error.errors(include_url=False, include_context=False)[0]
    else:
        first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query")]
    if first["type"] != "extra_forbidden":
        # Types of a union, and names of a dict's keys, are pydantic's.
        place = [part for part in place if not _KIND.search(part)]
    param = ".".join(place) or None
    if first["type"] == "extra_forbidden":
        return Failure(
            400, f"{param}: this server knows no such parameter; leave it out", code="unknown_parameter", param=param
        )
    if first["type"] == "none_required":
        return Failure(400, f"{param}: not supported here; leave it out", code="unsupported_parameter", param=param)
    message = f"{param}: {first['msg']}" if param else str(first["msg"])
    return Failure(400, f"{message}{_got(first)}", code="invalid_value", param=param)


def _got(fault: Mapping[str, Any]) -> str:
    """Return which number, truth value or short text was refused; "" for others."""
    value = fault["input"]
    if fault["type"] in ("json_invalid", "missing") or not isinstance(value, (bool, int, float, str, NoneType)):
        return ""
    if isinstance(value, str) and len(value) > _SHORT:
        return ""
    return f", got {json.dumps(value)}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
