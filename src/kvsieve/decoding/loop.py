"""The loop that decodes: every answer gets its next tokens, in as few passes as their caches allow.

A pass takes the newest token of each answer, and drafts of the tokens after it, if there are any. Every token is chosen
as without drafts; a draft is accepted if it is the token chosen at its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsieve.decoding.answer import Answer
from kvsieve.errors import CacheStateError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.compat import CACHE
from kvsieve.hf.drafts.drafter import RowDrafts
from kvsieve.hf.drafts.opened import open_drafts
from kvsieve.hf.forward.one_by_one import keeps_alike
from kvsieve.hf.forward.passes import open_rows
from kvsieve.hf.forward.request import PLAIN, PassRequest
from kvsieve.hf.forward.rows import joins
from kvsieve.hf.forward.tentative import Transaction
from kvsieve.hf.forward.transaction import AnswerSession, PassTransaction
from kvsieve.hf.prompt.reread import crosses, tokens_before_border
from kvsieve.hf.runtime import AttachedModel
from kvsieve.kernels.cpu.products import MOST_ROWS
from kvsieve.planning.drafts import MOST, Draft

# Logits [B, L, V] of a pass on the CPU, and what undoes its last tokens; None for passes over one token.
Fed = tuple[Tensor, Transaction | None]


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
        drafts: of each answer; none to decode token by token.
        drafted: tokens to feed behind the last one of each answer in the next pass; none without drafts.
    """

    model: AttachedModel
    cache: SieveCache
    answers: Sequence[Answer]
    reread: Callable[[Rows], Tensor] | None = None
    dropped: bool = False
    drafts: Sequence[RowDrafts] = ()
    drafted: list[list[int]] = field(default_factory=list, init=False)

    @property
    def going(self) -> int:
        """Answers that have not ended."""
        return 0 if self.dropped else sum(answer.finish is None for answer in self.answers)

    @property
    def drafts_alone(self) -> bool:
        """True if the rows of a shared pass could not keep different numbers of tokens, or would each need a pass."""
        return keeps_alike(self.cache, self.model.plan)

    @property
    def at_border(self) -> bool:
        """True where generate would read everything again for the next token."""
        return crosses(self.model, self.cache)

    def open_drafts(self, draft: Draft, conversations: Sequence[Sequence[int]]) -> None:
        """Draft from now on. conversations: tokens of each row so far, including the last one of its answer."""
        self.drafts = open_drafts(draft, self.model, self.cache, conversations)
        for answer, drafts in zip(self.answers, self.drafts, strict=True):
            drafts.counts = answer.drafts
            drafts.fits = None if answer.matcher is None else answer.matcher.allowed

    def close(self) -> None:
        """Close the drafts."""
        for drafts in self.drafts:
            drafts.close()

    def propose(self, room: int, together: int) -> int:
        """Choose the drafts of the next pass, and return its tokens.

        Args:
            room: most tokens of it.
            together: answers in it, including those of other caches.
        """
        self.drafted = []
        most = min(room // len(self.answers) - 1, tokens_before_border(self.model, self.cache, room) - 1)
        if self.drafts and together > 1 and self.drafts_alone:
            most = 0
        for answer, drafts in zip(self.answers, self.drafts, strict=bool(self.drafts)):
            left = 0 if answer.finish is not None else answer.limit - len(answer.tokens)
            drafts.length.rows = together
            self.drafted.append(drafts.next(min(most, left - 1)))
        return len(self.answers) * (1 + max(map(len, self.drafted), default=0))

    def next_ids(self) -> Tensor:
        """Return the tokens to feed next, int64 [B, 1 + k]: the last one of each answer, and its drafts.

        Rows with fewer drafts than others are filled with their last token, which is never accepted.
        """
        drafted = self.drafted or [[]] * len(self.answers)
        most = max(map(len, drafted))
        rows = zip((answer.tokens[-1] for answer in self.answers), drafted, strict=True)
        return torch.tensor([[last, *tokens, *[last] * (most - len(tokens))] for last, tokens in rows])

    def take(self, logits: Tensor, transaction: Transaction | None = None) -> None:
        """Choose the next tokens of every answer, and undo rejected drafts.

        After an interrupt the cache is as if the answers had ended there.

        Args:
            logits: [B, 1 + k, V] on the CPU, of the tokens fed.
            transaction: of their pass; None for a pass over one token.
        """
        drafted = self.drafted or [[]] * len(self.answers)
        self.drafted = []
        going = [answer.finish is None and not self.dropped for answer in self.answers]
        before = [len(answer.tokens) for answer in self.answers]
        try:
            for number, answer in enumerate(self.answers):
                if going[number]:
                    _choose(answer, logits[number], drafted[number])
        finally:
            if transaction is not None:
                taken = [len(answer.tokens) - count for answer, count in zip(self.answers, before, strict=True)]
                transaction.accept([count if goes else 1 for count, goes in zip(taken, going, strict=True)])
        for drafts, answer, count, goes in zip(self.drafts, self.answers, before, going, strict=False):
            if goes:
                drafts.took(answer.tokens[count:])


def _choose(answer: Answer, logits: Tensor, drafted: Sequence[int]) -> None:
    """Choose tokens by logits [1 + k, V] up to the first that is not the one drafted, or that ends the answer."""
    for row, draft in zip(logits, [*drafted, None], strict=False):
        answer.add(row)
        if answer.finish is not None or answer.tokens[-1] != draft:
            return


@dataclass
class StepCounts:
    """Counts of steps.

    Attributes:
        passes: of the model.
        tokens: that answers got.
        drafted_passes: passes with drafts.
        drafted: tokens drafted.
        accepted: those that became part of an answer.
    """

    passes: int = 0
    tokens: int = 0
    drafted_passes: int = 0
    drafted: int = 0
    accepted: int = 0


def _raise(rows: Rows, error: Exception) -> None:
    raise error


def step(model: AttachedModel, going: Sequence[Rows], failed: Callable[[Rows, Exception], None] = _raise) -> StepCounts:
    """Give answers their next tokens, and count.

    Caches of one row share a pass, each under its own plan. A cache alone is run as its plan decodes.

    Args:
        model: attached, for passes over several caches.
        going: rows with answers that have not ended.
        failed: called with rows that a pass or a choice failed for; drops them.
    """
    _propose(model, going)
    alone = [rows for rows in going if not joins(rows.cache) or (rows.reread is not None and rows.at_border)]
    joint = [rows for rows in going if rows not in alone]
    parts = [joint, *([rows] for rows in alone)]
    counts = StepCounts()
    while parts:
        part = [rows for rows in parts.pop(0) if rows.going]
        if not part:
            continue
        try:
            fed = feed(model, part)
        except Exception as error:
            # Caches that the pass has not begun to change go on alone, where only the answer at fault fails again.
            left = [rows for rows in part if len(part) > 1 and rows.cache.status == "ready"]
            parts = [*([rows] for rows in left), *parts]
            for rows in part:
                if rows not in left:
                    failed(rows, error)
            continue
        counts.passes += 1
        counts.drafted_passes += any(any(rows.drafted) for rows in part)
        for rows, found in zip(part, fed, strict=True):
            counts.drafted += sum(map(len, rows.drafted))
            before = sum(len(answer.tokens) for answer in rows.answers)
            passes = rows.going
            try:
                rows.take(*found)
            except Exception as error:
                failed(rows, error)
            tokens = sum(len(answer.tokens) for answer in rows.answers) - before
            counts.tokens += tokens
            counts.accepted += max(tokens - passes, 0)
    return counts


def _propose(model: AttachedModel, going: Sequence[Rows]) -> None:
    """Let rows draft; those that draft little leave their share of a pass to others."""
    # Products read a weight once for as many tokens.
    left = MOST + 1
    together = sum(len(rows.answers) for rows in going)
    if model.model.device.type == "cpu":
        left = MOST_ROWS.get(model.model.dtype, left)
        if len(going) > 1:
            # The others wait for them.
            lengths = [drafts.length for rows in going if not rows.drafts_alone for drafts in rows.drafts]
            left = min([left, *(together + one.most_shared(together) for one in lengths if one.adapt)])
    for number, rows in enumerate(going):
        left -= rows.propose(left // (len(going) - number), together)


def feed(model: AttachedModel, part: Sequence[Rows]) -> Sequence[Fed]:
    """Run one pass over the next tokens of some rows; logits [B, L, V] of each on the CPU, and its transaction."""
    if len(part) > 1:
        return feed_rows(model, [rows.cache for rows in part], [rows.next_ids() for rows in part])
    (rows,) = part
    if rows.reread is not None and rows.at_border:
        return [(rows.reread(rows)[:, None].cpu(), None)]
    ids = rows.next_ids()
    mask = rows.cache.conversation.mask
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(ids.shape)], 1)
    request = PassRequest(tentative=True) if ids.shape[1] > 1 else PLAIN
    result = rows.model.feed(rows.cache, ids, mask, request, logits=ids.shape[1])
    assert result.logits is not None
    return [(result.logits.cpu(), result.transaction)]


def feed_rows(model: AttachedModel, caches: Sequence[SieveCache], ids: Sequence[Tensor]) -> list[Fed]:
    """Run one pass over the next tokens of several conversations, each under its own cache's plan.

    Linear layers take all tokens together; every row attends and is reduced as it would be alone.

    Args:
        model: the attached model.
        caches: of this model and one row each, whose prompts are complete; `joins` (forward/rows.py) says which.
        ids: int64 [1, L], the next tokens of each. More than one are tentative.

    Returns:
        The logits [1, L, V] of each on the CPU, and its transaction; None for one token.
    """
    widths = [one.shape[1] for one in ids]
    for cache, width in zip(caches, widths, strict=True):
        if cache.owner.decoder() is not model.decoder or cache.turn.reading or not joins(cache):
            raise CacheStateError("a row is a cache of this model whose prompt is complete, and of plain class")
        if width > 1 and cache.has_state:
            raise CacheStateError("a row of several tokens shares no pass where layers have recurrent state")
    # Rows of one token are a batch; of more, their tokens lie side by side.
    beside = int(max(widths) > 1)
    seen = zip(caches, widths, strict=True)
    begins = ((cache.num_seen + cache.conversation.position_shift, width) for cache, width in seen)
    positions = [torch.arange(begin, begin + width)[None] for begin, width in begins]
    fed = torch.cat([*ids], beside).to(model.model.device)
    call: dict[str, Any] = {
        "input_ids": fed,
        "attention_mask": None,
        "position_ids": torch.cat(positions, beside).to(fed.device),
        "use_cache": True,
    }
    model.check_call(call)
    session = open_rows(model.context, caches, fed.split(widths if beside else 1, beside))
    out = model.run_pass(session, {**call, CACHE: session.together}, fed.shape[1])
    logits = out.logits.cpu().split(widths if beside else 1, beside)
    transactions = [PassTransaction(row) if isinstance(row, AnswerSession) else None for row in session.rows]
    return list(zip(logits, transactions, strict=True))
