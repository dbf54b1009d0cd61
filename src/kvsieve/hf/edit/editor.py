"""Edits of a conversation's cache.

Entries of tokens that stay are kept. Their keys are rotated to their new positions; what their values say of removed
or changed tokens stays. So a window of tokens after every edit is prefilled again at its columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import CacheStateError, InputError, UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.failures import undone_on_failure
from kvsieve.hf.cache.layer import SieveLayer
from kvsieve.hf.cache.records import Turn, TurnRecord
from kvsieve.hf.edit.difference import pieces_between
from kvsieve.hf.edit.layout import Arrangement, Window, check_place, check_span, check_window
from kvsieve.hf.edit.moved import MovedEntries
from kvsieve.hf.edit.positions import why_not_moved
from kvsieve.hf.forward.passes import closing
from kvsieve.hf.inputs import check_ids, row_of_ids
from kvsieve.hf.model.context import context_of
from kvsieve.hf.prompt.options import Progress
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan

# Tokens after an edit that are prefilled again by default.
WINDOW = 32


@dataclass(frozen=True)
class Edited:
    """An edit's effect.

    Attributes:
        ids: int64 [1, N], the conversation after it.
        reused: tokens with unchanged entries, or entries at other positions.
        moved: those of them after the edit, which were not prefilled again: their entries are approximate.
        reread: tokens prefilled, new ones included.
    """

    ids: Tensor
    reused: int
    moved: int
    reread: int


class Editor:
    """Edits one cache; made by ``sieve.edit(cache, ids)``.

    Every edit takes effect at once; a refused, failed or interrupted one leaves the cache as it was. The next token
    begins a turn, even a single one, under a plan that acts on an answer by records of its prompt.

    Attributes:
        ids: int64 [1, N], the conversation in the cache.
        window: tokens prefilled again after every edit, or "all".

    Args:
        model: the attached model.
        cache: see ``Sieve.edit``.
        ids: int64 [1, N], the tokens that the cache has seen.
        window: see above.
        chunk: tokens per forward pass, None for those of an edit's place at once.
        progress: called between passes with (tokens done, tokens to prefill) of an edit.
    """

    def __init__(
        self,
        model: AttachedModel,
        cache: SieveCache,
        ids: Tensor,
        window: Window = WINDOW,
        *,
        chunk: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._model = model
        self._chunk = chunk
        self._progress = progress
        self._cache = cache
        self.window = check_window(window)
        self.ids = ids
        _check(model, cache, ids)

    def cut(self, span: tuple[int, int]) -> Edited:
        """Remove the tokens of a half-open span."""
        start, end = check_span(span, self.ids.shape[1])
        return self._apply([(0, start), (end, self.ids.shape[1])])

    def replace(self, span: tuple[int, int], ids: Tensor | Sequence[int]) -> Edited:
        """Put other tokens, int64 [M], in place of a half-open span."""
        start, end = check_span(span, self.ids.shape[1])
        return self._apply([(0, start), self._tokens(ids), (end, self.ids.shape[1])])

    def insert(self, at: int, ids: Tensor | Sequence[int]) -> Edited:
        """Put tokens, int64 [M], before the token of column `at`."""
        check_place(at, self.ids.shape[1])
        return self._apply([(0, at), self._tokens(ids), (at, self.ids.shape[1])])

    def move(self, span: tuple[int, int], to: int) -> Edited:
        """Move the tokens of a half-open span before the token of column `to`, counted before the move."""
        size = self.ids.shape[1]
        start, end = check_span(span, size)
        check_place(to, size)
        if start < to < end:
            raise InputError(f"the span {span} cannot move to {to}, which lies within it; give a place outside")
        if to <= start:
            return self._apply([(0, to), (start, end), (to, start), (end, size)])
        return self._apply([(0, start), (end, to), (start, end), (to, size)])

    def rewrite(self, pieces: Sequence[tuple[int, int] | Tensor]) -> Edited:
        """Make the conversation of these pieces, in order: half-open spans of it, ascending or moved, or new tokens.

        Several edits at once: what follows them is rotated once.
        """
        size = self.ids.shape[1]
        checked: list[tuple[int, int] | Tensor] = []
        used = torch.zeros(size, dtype=torch.int)
        for piece in pieces:
            if isinstance(piece, Tensor):
                checked.append(self._tokens(piece))
                continue
            start, end = check_span(piece, size)
            used[start:end] += 1
            checked.append((start, end))
        if int(used.max() if size else 0) > 1:
            raise InputError("spans of one edit overlap; name every token once")
        return self._apply(checked)

    def become(self, ids: Tensor) -> Edited:
        """Make the conversation `ids`, int64 [1, M], reusing what both have in common in order."""
        return self._apply(pieces_between(self.ids[0].cpu(), self._tokens(ids, "the conversation")))

    def _tokens(self, ids: Any, name: str = "new text") -> Tensor:
        return row_of_ids(ids, self._model.config.vocab_size, name)

    def _apply(self, pieces: list[tuple[int, int] | Tensor]) -> Edited:
        cache = self._cache
        model = self._model
        if not model.attached:
            raise CacheStateError(
                f"the `with` block that attached {model.plan.name!r} has ended: attach the plan again, and take an "
                "editor of the cache there"
            )
        model.check_cache(cache)
        _check(model, cache, self.ids)
        layout = Arrangement.of(self.ids[0].cpu()).rewritten(pieces)
        _check_size(model, layout)
        if layout.is_unchanged:
            return Edited(self.ids, layout.before, 0, 0)
        _check_protected(cache, layout)
        runs = layout.runs(self.window)
        reread = sum(end - start for start, end in runs)
        moved = len(layout.ids) - layout.first - reread
        note = self._progress
        done = None if note is None else lambda tokens: note(tokens, reread)
        # Tokens that a plan has dropped stay dropped, whatever is prefilled again.
        is_exact = not moved and not model.plan.roles
        before = cache.snapshot()
        with undone_on_failure(cache):
            try:
                with closing():
                    _rewrite(model, cache, layout, runs, self._chunk, done)
                conversation = cache.conversation
                conversation.edits = conversation.edits.edited(layout.source, layout.before, layout.first, runs)
                if not is_exact:
                    conversation.note_approximate([f"edit:window={self.window}"])
                elif not conversation.edits.spans:
                    # All approximate entries are removed, or prefilled again.
                    conversation.approximate = ()
            except BaseException:
                cache.rollback(before)
                raise
        self.ids = layout.ids[None].to(self.ids.device)
        return Edited(self.ids, len(layout.ids) - reread, moved, reread)


def _check(model: AttachedModel, cache: SieveCache, ids: Tensor) -> None:
    """Raise KvsieveError unless the conversation in a cache can be edited."""
    cache.check_ready()
    check_ids(ids, model.config.vocab_size)
    conversation = cache.conversation
    if conversation.half_read:
        raise CacheStateError("the cache is in the middle of a prompt and cannot be edited; finish it first")
    reason = (
        why_not_edited(model.plan, cache)
        or model.facts.why_missing(("rotary",), cache.sieve_layers)
        or why_not_moved(model)
    )
    if reason is not None:
        raise UnsupportedOptionError(f"this conversation cannot be edited: {reason}; prefill it again")
    padded = conversation.mask is not None or conversation.ends is not None
    if len(ids) != 1 or conversation.batch != 1 or padded:
        raise InputError(
            f"edits take one conversation without padding, got ids of shape {tuple(ids.shape)} and a cache of "
            f"{conversation.batch} rows{' with padding' * padded}; prefill rows one by one, in caches of their own"
        )
    if ids.shape[1] != conversation.num_seen:
        raise InputError(
            f"ids are the {conversation.num_seen} tokens that the cache has seen, got {ids.shape[1]}; the last token "
            "of an answer is not in it until the next turn"
        )


def why_not_edited(plan: Plan, cache: SieveCache) -> str | None:
    """Return a clause why the conversation of a cache cannot be edited under a plan, or None."""
    return why_not_rearranged(plan, cache) or of_evictor(
        plan, None if plan.evict is None else plan.evict.why_not_edited
    )


def of_evictor(plan: Plan, reason: str | None) -> str | None:
    """Return an evictor's reason as a clause of its own."""
    return None if reason is None else f"of {type(plan.evict).__name__}, {reason}"


def why_not_rearranged(plan: Plan, cache: SieveCache) -> str | None:
    """Return a clause why entries of a cache cannot go to other columns, whatever the plan's evictor says, or None."""
    conversation = cache.conversation
    if cache.forgets:
        return "the model has recurrent layers, or layers with a window, which do not go back"
    if any(not isinstance(layer, SieveLayer) for layer in cache.all_layers if layer.memory is not None):
        return "the model has layers with entries of another form"
    if any(layer.is_latent for layer in cache.all_layers):
        return "the model has latent attention, with positions in a part of each entry"
    if conversation.short_prompt is not None:
        return f"{plan.name} keeps a shorter prompt in its place"
    if conversation.parallel is not None:
        return "its documents are at the same positions"
    if conversation.multi_axis_positions or conversation.position_shift:
        return "it has images, with positions of their own"
    if plan.scores_entries:
        return f"{plan.name} has scored entries by the queries after them"
    if plan.rest is not None:
        return "rest= keeps evicted entries in blocks of their own"
    if any(layer.store.log_weight is not None for layer in cache.sieve_layers.values()):
        return f"{plan.name} has merged tokens into weighted entries"
    return None


def _check_size(model: AttachedModel, layout: Arrangement) -> None:
    """Raise InputError for an edit that leaves no token, or makes more than the model's context."""
    size = len(layout.ids)
    if not size:
        raise InputError("the edit removes every token of the conversation; take a new cache instead")
    context = context_of(model.config)
    if context is not None and size > max(context, layout.before):
        raise InputError(
            f"the conversation would have {size} tokens, the model's context ends at {context}; insert fewer, or cut "
            "others in the same edit"
        )


def _check_protected(cache: SieveCache, layout: Arrangement) -> None:
    """Raise InputError for an edit that removes protected tokens."""
    protected = cache.conversation.protected
    if protected is None:
        return
    removed = (layout.target < 0)[None]
    looked_up, quotas = protected.to(torch.device("cpu")).at(torch.arange(layout.before)[None, None], None)
    lost = looked_up is not None and bool((looked_up[:, 0] & removed).any())
    if lost or (quotas is not None and bool(((quotas.segment[:, 0] > 0) & removed).any())):
        raise InputError("the edit removes tokens that protect= or quotas= keeps; leave them, or prefill again")


def _rewrite(
    model: AttachedModel,
    cache: SieveCache,
    layout: Arrangement,
    runs: list[tuple[int, int]],
    chunk: int | None,
    done: Callable[[int], None] | None,
) -> None:
    """Give a cache the conversation of a layout: entries move, and `runs` of columns are prefilled.

    chunk, done: see MovedEntries.prefill.
    """
    turn = cache.conversation.turn
    known = cache.conversation.ids
    entries = MovedEntries.of(model, [(cache, layout.target)], layout.source < 0)
    cache.touch()
    # A new conversation for a store, which knows entries of the one before.
    conversation = cache.conversation = cache.conversation.copy()
    conversation.turn = dataclasses.replace(
        turn, reading=True, acts=False, deferred=[], record=TurnRecord(reduced=False)
    )
    entries.prefill(model, cache, layout.ids, runs, chunk, done)
    entries.finish(model, cache, len(layout.ids))
    conversation.ids = None if known is None else layout.ids[None].to(known.device)
    _move_records(cache, turn, layout.target, len(layout.ids))


def _move_records(cache: SieveCache, turn: Turn, target: Tensor, size: int) -> None:
    """Give the records of a conversation the columns after an edit."""
    conversation = cache.conversation
    ends = torch.cat([target, torch.tensor([size])])

    def place(column: int) -> int:
        """Return the first new column of a token from `column` on that stays."""
        later = ends[column:]
        return int(later[later >= 0].min())

    start = place(min(turn.start, len(target)))
    conversation.turn = dataclasses.replace(turn, start=start, prompt_end=None, rearranged=True)
    conversation.prompt_lengths = tuple(place(min(length, len(target))) for length in conversation.prompt_lengths)
    conversation.acted = tuple((place(start), place(end)) for start, end in conversation.acted)
    conversation.propagated = tuple(
        dataclasses.replace(
            tokens,
            start=place(tokens.start),
            end=place(tokens.end),
            columns=target.to(tokens.columns.device)[tokens.columns.long().clamp_min(0)]
            .masked_fill(tokens.columns < 0, -1)
            .to(tokens.columns.dtype),
        )
        for tokens in conversation.propagated
    )
    if conversation.protected is not None:
        source = torch.full((1, size), -1)
        stays = target >= 0
        source[0, target[stays]] = torch.arange(len(target))[stays]
        conversation.protected = conversation.protected.reindexed(source)
