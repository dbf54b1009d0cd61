"""Evictors that let the model repeat its context before they choose, as in KVzip (arXiv 2505.23416)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor
from kvsieve.planning.roles import ProbePasses, ProbingEvictor


@dataclass(frozen=True, kw_only=True)
class RepeatingEvictor(ProbingEvictor):
    """An evictor that feeds the conversation again after prefill, with a request to repeat it.

    repeat_ids: token ids of the request. answer_ids: the chat template's header of an answer; () for nothing. None is
    filled in by `repeat_requests` with a tokenizer.
    """

    repeat_ids: tuple[int, ...] | None = None
    answer_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, ids in self.requests.items():
            if ids is not None:
                object.__setattr__(self, name, self._parsed(name, ids))

    @property
    def requests(self) -> dict[str, tuple[int, ...] | None]:
        """The texts that are fed, by field."""
        return {"repeat_ids": self.repeat_ids, "answer_ids": self.answer_ids}

    @property
    def lacks_tokenizer(self) -> bool:
        return None in self.requests.values()

    def for_tokenizer(self, tokenizer: Any) -> Self:
        missing = [name for name, ids in self.requests.items() if ids is None]
        texts: dict[str, Any] = {**repeat_requests(tokenizer)} if missing else {}
        return replace(self, **{name: texts[name] for name in missing})

    def _parsed(self, name: str, value: Any) -> tuple[int, ...]:
        if isinstance(value, Sequence) and all(type(token) is int and token >= 0 for token in value):
            return tuple(value)
        raise PlanError(
            f"{type(self).__name__}: {name} must be token ids such as (12, 7), got {value!r}; see repeat_requests"
        )


def side_by_side(rows: list[Tensor], passes: ProbePasses) -> tuple[Tensor, Tensor]:
    """Return token rows of different lengths as ids and mask [B, L] to feed to a branch.

    Filler comes last: between a row and the fed tokens, it would count as part of sliding windows.
    """
    size = max(map(len, rows))
    ids = passes.ids.new_zeros(len(rows), size)
    real = passes.real.new_zeros(len(rows), size)
    for row, fed in enumerate(rows):
        ids[row, : len(fed)], real[row, : len(fed)] = fed, True
    return ids, real


def repeat_requests(tokenizer: Any) -> dict[str, tuple[int, ...]]:
    """Return KVzip's texts as token ids: ``plan("kvzip", **repeat_requests(tokenizer))``.

    For a prompt that is an open user message, or plain text.
    """
    answer = ""
    if getattr(tokenizer, "chat_template", None):
        mark = "kvsieve-mark-of-the-message"
        message = [{"role": "user", "content": mark}]
        answer = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False).rpartition(mark)[2]
    texts = {
        "repeat_ids": "\n\nRepeat the previous context exactly.",
        "go_on_ids": "\n\nRepeat the part of the previous context exactly, starting with",
        "answer_ids": answer or "\n",
    }
    return {name: tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for name, text in texts.items()}
