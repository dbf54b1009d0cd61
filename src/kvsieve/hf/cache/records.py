"""Records of a cache's conversation besides the entries: its state, and the events of this turn."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvsieve.errors import CacheStateError
from kvsieve.hf.cache.counts import Passes, PromptBlocks, Reads
from kvsieve.hf.cache.edits import EditRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvsieve.hf.cache.row_ends import RowEnds
    from kvsieve.hf.cache.short_prompt import ShortPrompt
    from kvsieve.planning.protection import ProtectedTokens

# Hidden states of a chunk that waits at the propagator's source layer, and the arguments of deeper layers.
DeferredChunk = tuple[Tensor, ...]


@dataclass
class TurnRecord:
    """Record of the plan's effect on the prompt of a turn.

    Attributes:
        prompt_tokens: true tokens of the conversation at the end of the prompt, of the longest row.
        kept: entries stored per layer at the end of the prompt.
        asked: the budget's entries, None without an evictor.
        raised_to: the evictor's minimum, if that is more.
        evicted: layers that dropped entries.
        propagated: tokens that reached the deepest layer, None if all did.
        report: the propagator's report on its choice.
        reduced: False if the plan must not act on the prompt.
        question: its last tokens, which were prefilled after the plan had acted, without eviction; `asked`,
            `raised_to`, `evicted` and `propagated` are about those before them.
        reread: tokens that were prefilled again, because rotary tables depend on the total length.
        reads: counts of its answer's reads.
        passes: counts of its passes.
        blocks: counts of the prompt's attention blocks, under sparse prefill.
    """

    prompt_tokens: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    asked: int | None = None
    raised_to: int | None = None
    evicted: set[int] = field(default_factory=set)
    propagated: int | None = None
    report: dict[str, Any] = field(default_factory=dict)
    reduced: bool = True
    question: int = 0
    reread: int = 0
    reads: Reads = field(default_factory=Reads)
    passes: Passes = field(default_factory=Passes)
    blocks: PromptBlocks = field(default_factory=PromptBlocks)


@dataclass(frozen=True)
class PropagatedTokens:
    """Tokens of a turn that continued after a layer.

    Attributes:
        layer: index of the layer that dropped the others.
        start: columns fed before the turn, padding included.
        end: columns fed once its prompt was complete.
        columns: int32 [B, K], those that continued, -1 for filler.
    """

    layer: int
    start: int
    end: int
    columns: Tensor

    def rows(self, rows: Tensor) -> PropagatedTokens:
        """Copy it with row ``rows[i]`` as row i."""
        return dataclasses.replace(self, columns=self.columns.index_select(0, rows.to(self.columns.device)))


@dataclass(frozen=True)
class ParallelDocuments:
    """Documents at the same positions, with entries of columns of their own.

    Attributes:
        start: first column.
        end: column after the last one.
        factor: of the log-sum-exp of their logits, before it is merged with that of the other entries.
    """

    start: int
    end: int
    factor: float


@dataclass
class Turn:
    """One turn of a conversation: its prompt, then its answer.

    Attributes:
        number: 0 for the first one.
        start: columns fed before it, padding included.
        reading: True until its prompt is complete.
        acts: True if the plan acts on the current tokens.
        prompt_end: columns once its prompt is complete; None without a driver, as in a plain call of the model.
        length: tokens of the longest row once its prompt is complete, for length-dependent rotary tables; None without
            a driver.
        new_tokens: tokens expected after the prompt, 0 if unknown.
        decoded: tokens generated since the prompt was complete.
        reordered: True once rows changed places, as beams do.
        rearranged: True once entries were edited, joined or adopted: the plan has no records of the prompt.
        deferred: chunks of the prompt that wait at the propagator's source layer for the last one.
        reduced_before: turns so far that began after an earlier one had dropped something, this one included.
        drafted: float [B, N], a draft model's scores of the prompt's tokens, until it is complete; -inf for padding.
        record: the plan's effect on its prompt.
    """

    number: int = 0
    start: int = 0
    reading: bool = True
    acts: bool = True
    prompt_end: int | None = None
    length: int | None = None
    new_tokens: int = 0
    decoded: int = 0
    reordered: bool = False
    rearranged: bool = False
    deferred: list[DeferredChunk] = field(default_factory=list)
    reduced_before: int = 0
    drafted: Tensor | None = None
    record: TurnRecord = field(default_factory=TurnRecord)

    def resume(self, prompt_end: int, new_tokens: int, acts: bool) -> None:
        """Continue a prompt with a prefilled beginning."""
        self.prompt_end = prompt_end
        self.new_tokens = new_tokens
        self.acts = acts
        self.record.reduced = acts

    def check_beams(self) -> None:
        """Raise CacheStateError for a turn answered by a beam search, with rows that are not the returned sequences."""
        if self.reordered:
            raise CacheStateError(
                "the cache is that of a beam search: its rows are the beams that were in progress, not the sequences "
                "that were returned; go on without it, or answer with num_beams=1 (rows that you order yourself go on "
                "after batch_select_indices())"
            )

    def room(self, end: int, size: int) -> int:
        """Return the entries to reserve when a buffer of `size` entries is allocated with `end` columns fed."""
        return max((self.prompt_end or 0) - end, 0) + min(self.new_tokens, max(64, size // 8))


@dataclass
class Conversation:
    """State of a batch of conversations; a saved cache has all of it.

    Attributes:
        num_seen: columns fed so far, padding included.
        batch: rows; 0 while empty.
        mask: attention mask of all columns fed so far, bool [B, num_seen]; None without padding.
        ends: rows with answers that ended before others; None without any.
        prompt_lengths: true tokens of each row when the turn's prompt was complete.
        short_prompt: the caller's prompt, under a plan that keeps a shorter one instead.
        protected: tokens that must not be evicted.
        ids: int64 [B, num_seen or more], token ids of the columns fed so far, under a plan that chooses by them; None
            for others.
        multi_axis_positions: True once tokens had positions on several axes, such as an image's: later positions do not
            simply count on.
        position_shift: position of a token less its index, after images or parallel documents; 0 for text.
        parallel: documents at the same positions; None for none.
        propagated: places where tokens were dropped between layers, in order.
        acted: (start, end) columns of the prompts that the plan has acted on, in order.
        tables: minimum and maximum length of the rotary tables used so far; None if tables do not depend on it.
        approximate: rules by which entries are approximate, such as "edit:window=32", sorted, each once; () if all are
            those of a prefill.
        edits: columns of these entries, and counts of the last edit.
        turn: the turn in progress, or the last one.
    """

    num_seen: int = 0
    batch: int = 0
    mask: Tensor | None = None
    ends: RowEnds | None = None
    prompt_lengths: tuple[int, ...] = ()
    short_prompt: ShortPrompt | None = None
    protected: ProtectedTokens | None = None
    ids: Tensor | None = None
    multi_axis_positions: bool = False
    position_shift: int = 0
    parallel: ParallelDocuments | None = None
    propagated: tuple[PropagatedTokens, ...] = ()
    acted: tuple[tuple[int, int], ...] = ()
    tables: tuple[int, int] | None = None
    approximate: tuple[str, ...] = ()
    edits: EditRecord = field(default_factory=EditRecord)
    turn: Turn = field(default_factory=Turn)

    @property
    def half_read(self) -> bool:
        """True in the middle of a prompt, which can be neither copied nor saved."""
        turn = self.turn
        return bool(turn.deferred) or (turn.reading and self.num_seen > turn.start)

    def begin_turn(self, prompt_end: int | None = None, new_tokens: int = 0, acts: bool = True) -> None:
        """Let the next pass start a prompt; see Turn."""
        before = self.turn
        begun = not before.reading or self.num_seen > before.start
        lacks = before.reduced_before > 0 or bool(before.record.evicted) or before.record.propagated is not None
        self.turn = Turn(
            number=before.number + begun,
            reduced_before=before.reduced_before + (begun and lacks),
            start=self.num_seen,
            reading=True,
            acts=acts,
            prompt_end=prompt_end,
            length=prompt_end,
            new_tokens=new_tokens,
            record=TurnRecord(reduced=acts),
        )

    @property
    def longest(self) -> int:
        """True tokens fed so far, of the longest row."""
        return self.num_seen if self.mask is None else int(self.mask.sum(-1).max())

    @property
    def table_lengths(self) -> tuple[int, int] | None:
        """Return the minimum and maximum length of tables used, including those of an answer's tokens."""
        if self.tables is None or not self.turn.decoded:
            return self.tables
        # Recorded passes note nothing.
        return min(*self.tables, self.longest), max(*self.tables, self.longest)

    def note_tables(self, length: int) -> None:
        """Record a length of rotary tables."""
        low, high = self.tables or (length, length)
        self.tables = min(low, length), max(high, length)

    def note_approximate(self, rules: Iterable[str]) -> None:
        """Record rules by which entries are approximate from now on."""
        self.approximate = tuple(sorted({*self.approximate, *rules}))

    def begin_question(self, tokens: int) -> None:
        """Let the next pass continue the turn's prompt with `tokens` last ones that the plan does not reduce."""
        self.turn.reading = True
        self.turn.acts = False
        self.turn.record.question = tokens

    def take_back(self, start: int, counts: Sequence[int], device: torch.device) -> None:
        """Mask the removed columns of a pass: those that no row keeps are deleted, others become padding in some rows.

        Args:
            start: columns before the pass.
            counts: tokens of the pass that each row keeps.
            device: of a new mask.
        """
        most = max(counts)
        self.edits = self.edits.up_to(start + most)
        mask = self.mask
        if mask is None and min(counts) == most:
            return
        if mask is None:
            mask = torch.ones(len(counts), start + most, dtype=torch.bool, device=device)
        kept = torch.arange(most) < torch.tensor(counts)[:, None]
        self.mask = torch.cat([mask[:, :start], mask[:, start : start + most] & kept.to(mask.device)], 1)

    def record_propagated(self, layer: int, end: int, columns: Tensor, count: int) -> None:
        """Record tokens of the turn that continued after a layer; see PropagatedTokens. count: of the longest row."""
        self.propagated += (PropagatedTokens(layer, self.turn.start, end, columns),)
        self.turn.record.propagated = count

    def caller_length_and_mask(self) -> tuple[int, Tensor | None]:
        """Return the number of the caller's columns, and their mask [B, columns], None without padding."""
        if self.short_prompt is None:
            return self.num_seen, self.mask
        return self.short_prompt.caller_length_and_mask(self.num_seen)

    def reorder(self, rows: Tensor) -> None:
        """Make row ``rows[i]`` row i."""
        self.batch = len(rows)
        if self.prompt_lengths:
            self.prompt_lengths = tuple(self.prompt_lengths[row] for row in rows.tolist())
        if self.mask is not None:
            self.mask = self.mask.index_select(0, rows.to(self.mask.device))
        if self.ids is not None:
            self.ids = self.ids.index_select(0, rows.to(self.ids.device))
        if self.ends is not None:
            self.ends = self.ends.rows(rows)
        if self.short_prompt is not None:
            self.short_prompt = self.short_prompt.rows(rows)
        if self.protected is not None:
            self.protected = self.protected.rows(rows)
        self.propagated = tuple(tokens.rows(rows) for tokens in self.propagated)
        turn = self.turn
        if turn.drafted is not None:
            turn.drafted = turn.drafted.index_select(0, rows.to(turn.drafted.device))
        turn.deferred = [
            tuple(part.index_select(0, rows.to(part.device)) if len(part) > 1 else part for part in chunk)
            for chunk in turn.deferred
        ]

    def copy(self) -> Conversation:
        """Copy the parts that later passes change; tensors are shared, because they are replaced, never written to."""
        turn = dataclasses.replace(self.turn, deferred=list(self.turn.deferred), record=copy.deepcopy(self.turn.record))
        return dataclasses.replace(self, turn=turn)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor."""
        yield from (part for part in (self.mask, self.ids) if part is not None)
        yield from (tokens.columns for tokens in self.propagated)
        for chunk in self.turn.deferred:
            yield from chunk
        for part in (self.ends, self.short_prompt, self.protected):
            yield from () if part is None else part.tensors()
