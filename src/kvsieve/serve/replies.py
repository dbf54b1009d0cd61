"""Answers in OpenAI's protocol."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from kvsieve.decoding.asked import ChosenToken, TokenLikelihood
from kvsieve.serve.ticket import Summary

TokenBytes = Callable[[int], bytes]
# Nothing in JSON is less likely.
_LEAST = -9999.0


class Envelope:
    """Head of all messages of a reply: id, time and model.

    Args:
        kind: "chatcmpl" or "cmpl".
        model: its name.
        stream: True for chunks.
    """

    def __init__(self, kind: str, model: str, stream: bool) -> None:
        name = "chat.completion" if kind == "chatcmpl" else "text_completion"
        chunk = ".chunk" if stream and kind == "chatcmpl" else ""
        self._head = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "object": f"{name}{chunk}",
            "created": int(time.time()),
            "model": model,
        }

    def with_choices(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head, "choices": choices, **more}


def usage(summaries: Sequence[Summary]) -> dict[str, Any]:
    prompt = sum(summary.prompt_tokens for summary in summaries)
    completion = sum(summary.new_tokens for summary in summaries)
    first = summaries[0]
    out: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(summary.cached_tokens for summary in summaries)},
    }
    reasoning = [summary.reasoning_tokens for summary in summaries if summary.reasoning_tokens is not None]
    if reasoning:
        out["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
    stats = first.stats
    if stats is not None:
        growing = stats.growing_layers or []
        entries = [stats.kv_entries[index] for index in growing]
        out["kv"] = {
            "method": stats.method,
            "applied": stats.applied,
            "entries": round(sum(entries) / max(len(entries), 1), 1),
            "prompt_tokens": stats.prompt_tokens,
            "share": stats.kv_share,
            "bytes": stats.kv_bytes,
            "notes": stats.notes,
            "queued_s": round(first.queued_s, 4),
            "ttft_s": round(first.ttft_s, 4),
            "seconds": round(first.seconds, 4),
        }
        if stats.drafts is not None:
            out["kv"]["drafted"] = {"tokens": stats.drafts.drafted, "accepted": stats.drafts.accepted}
        if stats.edited is not None:
            out["kv"]["edited"] = dataclasses.asdict(stats.edited)
        if first.documents is not None:
            out["kv"]["documents"] = dataclasses.asdict(first.documents)
        if first.kept:
            out["kv"]["map"] = list(first.kept)
    return out


def chat_logprobs(tokens: Sequence[ChosenToken], spelled: TokenBytes) -> dict[str, Any]:
    """Return log-probabilities of a chat's tokens. spelled: returns a token's bytes."""

    def likelihood(each: TokenLikelihood) -> dict[str, Any]:
        data = spelled(each.id)
        return {"token": _shown(data), "logprob": _finite(each.logprob), "bytes": list(data)}

    listed = [{**likelihood(token.own), "top_logprobs": [likelihood(top) for top in token.top]} for token in tokens]
    return {"content": listed, "refusal": None}


def completion_logprobs(tokens: Sequence[ChosenToken], spelled: TokenBytes) -> dict[str, Any]:
    """Return log-probabilities of a completion's tokens. spelled: returns a token's bytes."""

    def top(each: ChosenToken) -> dict[str, float]:
        # The likelier of two with the same text stays.
        return {_named(spelled(one.id)): _finite(one.logprob) for one in reversed(each.top)}

    return {
        "tokens": [_named(spelled(token.own.id)) for token in tokens],
        "token_logprobs": [_finite(token.own.logprob) for token in tokens],
        "top_logprobs": [top(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def json_text(data: Any, depth: int = 0) -> str:
    """Write JSON, the items of `depth` levels one by one: each call of the encoder blocks other threads."""
    if depth and isinstance(data, dict):
        return "{" + ",".join(f"{json_text(name)}:{json_text(value, depth - 1)}" for name, value in data.items()) + "}"
    if depth and isinstance(data, list):
        return "[" + ",".join(json_text(item, depth - 1) for item in data) + "]"
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def _shown(data: bytes) -> str:
    r"""Decode bytes, with incomplete characters as OpenAI writes them: ``\xf0\x9f``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


def _named(data: bytes) -> str:
    r"""Decode bytes, with incomplete characters marked as in completions: ``bytes:\xf0\x9f``."""
    text = _shown(data)
    return text if text.encode() == data else f"bytes:{text}"


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LEAST
