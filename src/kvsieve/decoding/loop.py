"""The loop that decodes: every answer gets its next token, in as few passes as their caches allow.

Drafts belong into `Rows`: `next_ids` returns the tokens to feed, and `take` decides by their logits how many of them
stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsieve.decoding.answer import Answer
from kvsieve.errors import CacheStateError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.compat import CACHE
from kvsieve.hf.forward.passes import open_rows
from kvsieve.hf.forward.rows import joins
from kvsieve.hf.prompt.reread import crosses
from kvsieve.hf.runtime import AttachedModel


@dataclass(eq=False)
class Rows:
    """Answers that decode in one cache, one per row.

    Attributes:
        model: attached under the plan that decodes the cache.
        cache: prompts and answers so far, without the last token of each.
        answers: one per row; ended ones are fed along with the others.
        reread: prefills prompt and answer again where rotary tables change with the next token, as generate does, and
            returns logits [B, V]; None to decode on regardless.
        dropped: True once nobody needs the answers.
    """

    model: AttachedModel
    cache: SieveCache
    answers: Sequence[Answer]
    reread: Callable[[Rows], Tensor] | None = None
    dropped: bool = False

    @property
    def going(self) -> int:
        """Answers that have not ended."""
        return 0 if self.dropped else sum(answer.finish is None for answer in self.answers)

    @property
    def at_border(self) -> bool:
        """True where generate would read everything again for the next token."""
        return crosses(self.model, self.cache)

    def next_ids(self) -> Tensor:
        """Return the tokens to feed next, int64 [B, 1]: the last one of each answer."""
        return torch.tensor([[answer.tokens[-1]] for answer in self.answers])

    def take(self, logits: Tensor) -> None:
        """Choose the next token of every answer by logits [B, V] on the CPU."""
        for answer, row in zip(self.answers, logits, strict=True):
            if answer.finish is None and not self.dropped:
                answer.add(row)


def _raise(rows: Rows, error: Exception) -> None:
    raise error


def step(
    model: AttachedModel, going: Sequence[Rows], failed: Callable[[Rows, Exception], None] = _raise
) -> tuple[int, int]:
    """Give answers their next token; return passes and tokens.

    Caches of one row share a pass, each under its own plan. A cache alone is run as its plan decodes.

    Args:
        model: attached, for passes over several caches.
        going: rows with answers that have not ended.
        failed: called with rows that a pass or a choice failed for; drops them.
    """
    alone = [rows for rows in going if not joins(rows.cache) or (rows.reread is not None and rows.at_border)]
    joint = [rows for rows in going if rows not in alone]
    parts = [joint, *([rows] for rows in alone)]
    passes = tokens = 0
    while parts:
        part = [rows for rows in parts.pop(0) if rows.going]
        if not part:
            continue
        try:
            logits = feed(model, part)
        except Exception as error:
            # Caches that the pass has not begun to change go on alone, where only the answer at fault fails again.
            left = [rows for rows in part if len(part) > 1 and rows.cache.status == "ready"]
            parts = [*([rows] for rows in left), *parts]
            for rows in part:
                if rows not in left:
                    failed(rows, error)
            continue
        passes += 1
        tokens += sum(rows.going for rows in part)
        for rows, found in zip(part, logits, strict=True):
            try:
                rows.take(found)
            except Exception as error:
                failed(rows, error)
    return passes, tokens


def feed(model: AttachedModel, part: Sequence[Rows]) -> Sequence[Tensor]:
    """Run one pass over the next tokens of some rows; logits [B, V] of each, on the CPU."""
    if len(part) > 1:
        ids = torch.cat([rows.next_ids() for rows in part])
        return feed_rows(model, [rows.cache for rows in part], ids[:, 0]).cpu().split(1)
    (rows,) = part
    if rows.reread is not None and rows.at_border:
        return [rows.reread(rows).cpu()]
    found = rows.model.feed(rows.cache, rows.next_ids(), None, logits=1).logits
    assert found is not None
    return [found[:, -1].cpu()]


def feed_rows(model: AttachedModel, caches: Sequence[SieveCache], ids: Tensor) -> Tensor:
    """Run one pass over the next token of several conversations, each under its own cache's plan.

    Linear layers take all rows together; every row attends and is reduced as it would be alone.

    Args:
        model: the attached model.
        caches: of this model and one row each, whose prompts are complete; `joins` (forward/rows.py) says which.
        ids: int64 [B], the next token of each.

    Returns:
        [B, V], the logits.
    """
    ids = ids.to(model.model.device)[:, None]
    for cache in caches:
        if cache.owner.decoder() is not model.decoder or cache.turn.reading or not joins(cache):
            raise CacheStateError("a row is a cache of this model whose prompt is complete, and of plain class")
    call: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": None,
        "position_ids": torch.tensor([[cache.num_seen] for cache in caches], device=ids.device),
        "use_cache": True,
    }
    model.check_call(call)
    session = open_rows(model.context, caches, ids)
    out = model.run_pass(session, {**call, CACHE: session.together}, 1)
    logits: Tensor = out.logits[:, -1]
    return logits
