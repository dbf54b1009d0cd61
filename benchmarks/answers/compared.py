"""Greedy answers token by token, and how far another cache's distributions are from theirs; for edits.py and joins.py.

Answers begin with the call that a user makes, `sieve.generate`, for one token: the cache then ends where the prompt
ends, and the time to the first token is that of use.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvsieve
from kvsieve.hf.forward.request import PassRequest
from kvsieve.planning.named import plan_without_floor
from kvsieve.planning.specs import split_specs
from kvsieve.planning.turns import stop_ids
from kvsieve.report.environment import environment, write_result
from kvsieve.shared.prompt import answer_logits

CHUNK = 1024
# Tokens of a given answer in one pass.
PIECE = 64


def plan_named(text: str) -> kvsieve.Plan:
    ((name, parameters),) = split_specs(text)
    return plan_without_floor(name, **parameters)


def ends_of(model: Any, tokenizer: Any) -> list[int]:
    return sorted(stop_ids(tokenizer, model.generation_config.eos_token_id))


@dataclass(frozen=True)
class Prefilled:
    """A prompt in a cache.

    Attributes:
        cache: up to the prompt's end.
        logits: float32 [V], after its last token.
        seconds: to the first token.
    """

    cache: Any
    logits: Tensor
    seconds: float


def prefilled(sieve: Any, ids: Tensor, cache: Any = None, before: float = 0.0) -> Prefilled:
    """Prefill the new tokens of a prompt int64 [1, N].

    before: seconds that the cache took until now.
    """
    result = sieve.generate(
        ids,
        torch.ones_like(ids),
        cache=cache,
        chunk=CHUNK,
        max_new_tokens=1,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Prefilled(result.cache, result.output.logits[0][0].float(), before + result.stats.ttft_s)


def greedy(sieve: Any, begun: Prefilled, limit: int, ends: Iterable[int]) -> tuple[list[int], Tensor]:
    """Return a greedy answer of at most `limit` tokens, and its log-probabilities [T, V]; it goes into the cache."""
    logits, tokens, found = begun.logits, list[int](), list[Tensor]()
    stops = set(ends)
    with torch.no_grad():
        while True:
            tokens.append(int(logits.argmax()))
            found.append(logits.log_softmax(-1))
            if len(tokens) == limit or tokens[-1] in stops:
                return tokens, torch.stack(found)
            passed = sieve.feed(begun.cache, torch.tensor([tokens[-1:]]), None, PassRequest(phase="decode"), logits=1)
            logits = passed.logits[0, -1].float()


def along(sieve: Any, begun: Prefilled, tokens: list[int]) -> Tensor:
    """Return the log-probabilities [T, V] at each token of an answer that is given; the cache stays as it is."""
    found = begun.logits[None]
    if len(tokens) > 1:
        with torch.no_grad():
            cache = sieve.adopt(begun.cache.fork(share=True))
            more = answer_logits(sieve, cache, torch.tensor([tokens[:-1]], device=sieve.model.device))
        found = torch.cat([found, more[0].float()])
    return found.log_softmax(-1)


def feed_answer(sieve: Any, cache: Any, tokens: Tensor) -> None:
    """Feed a given answer, int64 [1, N], as if it was generated."""
    with torch.no_grad():
        for piece in tokens.split(PIECE, 1):
            sieve.feed(cache, piece, None, PassRequest(phase="decode"))


def distance(reference: Tensor, other: Tensor) -> dict[str, float]:
    """Return the mean divergence of distributions [T, V] from the reference, and that of the first."""
    kl = (reference.exp() * (reference - other)).sum(-1).clamp_min(0)
    return {"kl": round(float(kl.mean()), 6), "kl_first": round(float(kl[0]), 6)}


class Deadline:
    """An end of a run after some minutes; None for no end."""

    def __init__(self, minutes: float | None) -> None:
        self.end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def passed(self) -> bool:
        return self.end is not None and time.monotonic() > self.end


class Rows:
    """Rows of a result that a later run continues, by the fields that place them.

    Raises SystemExit if the file is of other settings.
    """

    def __init__(self, out: Path, settings: dict[str, Any], model: Any) -> None:
        self.out = out
        self.rows: list[dict[str, Any]] = []
        self.report: dict[str, Any] = {**settings, "environments": []}
        if out.exists():
            known = json.loads(out.read_text())
            different = [name for name in settings if known.get(name) != settings[name]]
            if different:
                raise SystemExit(f"error: {out} has another {', '.join(different)}; name another file with --out")
            self.report["environments"] = known["environments"]
            self.rows = known["rows"]
        self.report["environments"].append(environment(model))

    def of(self, **place: Any) -> list[dict[str, Any]]:
        return [row for row in self.rows if place.items() <= row.items()]

    def drop(self, **place: Any) -> None:
        self.rows = [row for row in self.rows if not place.items() <= row.items()]

    def add(self, rows: list[dict[str, Any]], summary: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        """Take in rows, and write the file."""
        self.rows += rows
        write_result(self.out, {**self.report, "summary": summary(self.rows), "rows": self.rows})
