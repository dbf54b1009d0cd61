"""Spans of a prompt's tokens: protected ones, those with a quota, and a chat's messages.

A span ``(start, end)`` is half-open and counts a row's tokens without padding, so that it is the same alone and in a
padded batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import InputError, PlanError, short
from kvsieve.planning.budget import Budget
from kvsieve.planning.turns import render, token_ids

Span = tuple[int, int]


def token_numbers(mask: Tensor | None, batch: int, length: int) -> Tensor:
    """Number each row's tokens.

    Args:
        mask: [B, N], 0 for padding; None for no padding.
        batch: B.
        length: N.

    Returns:
        int64 [B, N], -1 for padding.
    """
    if mask is None:
        return torch.arange(length).expand(batch, length)
    real = mask.cpu().bool()
    return (real.long().cumsum(-1) - 1).masked_fill(~real, -1)


def protected_columns(protect: Sequence[Any], numbers: Tensor) -> Tensor:
    """Mark protected tokens.

    Args:
        protect: a list of spans, or one such list per row.
        numbers: see `token_numbers`.

    Returns:
        bool [B, N].

    Raises:
        InputError: a span is outside the prompt.
    """
    out = torch.zeros_like(numbers, dtype=torch.bool)
    for row, spans in enumerate(_per_row(protect, len(numbers), _is_span, "protect", "[(0, 40), (100, 120)]")):
        for span in spans:
            out[row] |= _inside(span, numbers[row], row, "protect")
    return out


def quota_columns(quotas: Sequence[Any], numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Number the segments that have a quota.

    Args:
        quotas: ``(span, n)`` with n a number of entries or a share of the segment, in a list or one list per row.
        numbers: see `token_numbers`.

    Returns:
        Segment of each token, int32 [B, N], from 1 and 0 for none; entries that each must keep, int64 [B, S].

    Raises:
        InputError: a span is outside the prompt or overlaps another, or a quota exceeds its tokens.
    """
    rows = _per_row(quotas, len(numbers), _is_quota, "quotas", "[((0, 40), 10), ((40, 90), '20%')]")
    segments = torch.zeros_like(numbers, dtype=torch.int32)
    counts = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.int64)
    for row, spans in enumerate(rows):
        for place, (span, quota) in enumerate(spans):
            inside = _inside(span, numbers[row], row, "quotas")
            if bool((segments[row][inside] > 0).any()):
                raise InputError(f"quotas: the span {tuple(span)} of row {row} overlaps another; make them disjoint")
            try:
                count = Budget.parse(quota).entries(span[1] - span[0])
            except PlanError as error:
                raise InputError(f"quotas: {tuple(span)} of row {row}: {error}") from None
            if count > span[1] - span[0]:
                raise InputError(
                    f"quotas: {count} entries are asked of the span {tuple(span)} of row {row}, which has "
                    f"{span[1] - span[0]} tokens; ask for fewer, or for a share"
                )
            segments[row][inside] = place + 1
            counts[row, place] = count
    return segments, counts


def role_spans(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    roles: Sequence[str] = ("system",),
    *,
    add_generation_prompt: bool = True,
    parse_special: bool = False,
) -> tuple[Tensor, list[Span]]:
    """Render a chat and find the spans of its messages of some roles, for ``protect=``.

    A message's span includes the header and end that the tokenizer's chat template writes.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the chat, ``[{"role": "user", "content": "hi"}, ...]``.
        roles: roles of the wanted messages. Default: ``("system",)``.
        add_generation_prompt: write the header of an answer. Default True.
        parse_special: treat ``<|im_end|>`` and the like in messages as control tokens. Default False: they are text.

    Returns:
        The chat's token ids, int64 [1, N], and the spans.

    Raises:
        InputError: there is no template or no such message, or a message's tokens cannot be split from the next: the
            template refuses or rewrites the conversation so far, or a token spans both.
    """
    if isinstance(roles, str):
        roles = (roles,)
    if not isinstance(roles, (list, tuple)) or not all(isinstance(role, str) for role in roles):
        raise InputError(f"roles must be names such as ('system',), got {short(roles)}")
    if not isinstance(messages, (list, tuple)) or not all(isinstance(message, dict) for message in messages):
        raise InputError(f"messages must be a list like [{{'role': 'user', 'content': 'hi'}}], got {short(messages)}")
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"roles {', '.join(roles)}: the tokenizer has no chat template; give token spans instead")
    wanted = [place for place, message in enumerate(messages) if message.get("role") in roles]
    if not wanted:
        found = ", ".join(dict.fromkeys(str(message.get("role")) for message in messages)) or "none"
        raise InputError(f"no message has a role among {', '.join(roles)}: the roles are {found}")
    whole = _render(tokenizer, messages, add_generation_prompt, parse_special)
    ids = token_ids(tokenizer, whole)

    def end_of(count: int) -> int:
        """Return the tokens of the first `count` messages."""
        if count == 0:
            return 0
        text = _render(tokenizer, messages[:count], False, parse_special)
        part = token_ids(tokenizer, text)
        if not whole.startswith(text) or ids[: len(part)] != part:
            raise InputError(
                f"the chat template or tokenizer writes the first {count} messages differently when others follow, so "
                f"the tokens of a {messages[count - 1].get('role')} message cannot be found; give token spans instead"
            )
        return len(part)

    return torch.tensor([ids], dtype=torch.int64), [(end_of(place), end_of(place + 1)) for place in wanted]


def _render(tokenizer: Any, messages: Sequence[dict[str, Any]], ask: bool, parse_special: bool) -> str:
    try:
        return render(tokenizer, messages, ask, parse_special)
    except InputError as error:
        raise InputError(
            f"the chat template refuses the first {len(messages)} messages: {error.__cause__}; give token spans instead"
        ) from error


def _inside(span: Span, numbers: Tensor, row: int, name: str) -> Tensor:
    length = int(numbers.max()) + 1
    start, end = (operator.index(edge) for edge in span)
    if not 0 <= start < end <= length:
        raise InputError(
            f"{name}: the span {(start, end)} lies outside row {row}, whose prompt has {length} tokens; spans are "
            f"(start, end) with 0 <= start < end <= {length}, padding not counted"
        )
    return (numbers >= start) & (numbers < end)


def _per_row(value: Any, batch: int, is_one: Callable[[Any], bool], name: str, example: str) -> list[list[Any]]:
    """Return a list for each row, from one for all or one per row."""
    if isinstance(value, (list, tuple)):
        if all(is_one(part) for part in value):
            return [list(value)] * batch
        if all(isinstance(part, (list, tuple)) and all(is_one(one) for one in part) for part in value):
            if len(value) != batch:
                raise InputError(f"{name} has lists for {len(value)} rows, the prompt has {batch}: give one per row")
            return [list(part) for part in value]
    raise InputError(f"{name} is a list like {example}, or one such list per row; got {short(value)}")


def _is_whole(value: Any) -> bool:
    return hasattr(type(value), "__index__") and not isinstance(value, bool)


def _is_span(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_whole, value))


def _is_quota(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and _is_span(value[0]) and not _is_span(value[1])
