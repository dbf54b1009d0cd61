"""Prefill of prompts under many plans, with a document prefilled once for all plans and questions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.model.tables import RotaryTables
from kvsieve.hf.prompt.chunks import keeps_to_chunks
from kvsieve.hf.prompt.options import Progress, ReadOptions
from kvsieve.hf.reuse import PromptStore
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import ChunkedEvictor
from kvsieve.shared.prefix import PrefixNodes, SharedPrefix, read_prefix
from kvsieve.shared.prompt import read_alone, read_shared

# Last document tokens excluded from the shared prefill: this many, or the next multiple that covers every plan's
# observation window.
_WINDOW = 32
# Room for a question after a document; a longer one copies the buffers.
_ROOM = 512
# Note on a method without a shared prefill.
ALONE = "it prefills the whole prompt by itself, and its first token includes that"


@dataclass
class ReadState:
    """Conversations so far, one per row, each under its plan.

    Attributes:
        plans: one per row.
        cache: the rows.
        logits: [rows, V] after the last token fed.
        fed: int64 [1, N], the tokens fed to all of them.
        given: the full conversation, longer than `fed` if a plan processes only some of its tokens.
        order: indices of the plans in the request.
        unseen: last tokens of `given` that the plans did not act on.
    """

    plans: list[Plan]
    cache: SieveCache
    logits: Tensor
    fed: Tensor
    given: Tensor
    order: list[int]
    unseen: int = 0


@dataclass
class _Document:
    """A context and its prefilled states.

    Attributes:
        context: int64 [1, N].
        plans: all plans.
        going_on: plans that continue from `prefix`; others prefill every prompt fully.
        prefix: all but its last tokens; None if it cannot be prefilled in parts, or is too short.
        hidden: by the plan's number, its state after acting on the context alone, and its target number of entries.
    """

    context: Tensor
    plans: list[Plan]
    going_on: list[Plan]
    prefix: SharedPrefix | None
    hidden: dict[int, tuple[int | None, ReadState]] = field(default_factory=dict)


class DocumentReader:
    """Prefills prompts under many plans, and caches the states of the last context.

    Args:
        model: of transformers.
        chunk: see ReadOptions.
        store: kvsieve.store.PrefixStore for its prefills; None for none.
        tokenizer: of the model, for the store.
        room: tokens that buffers reserve after a context; longer prompts copy them.
    """

    def __init__(
        self, model: Any, chunk: int | None, store: PromptStore | None = None, tokenizer: Any = None, room: int = _ROOM
    ) -> None:
        self.model, self.chunk, self.tables, self.room = model, chunk, RotaryTables(model), room
        self.stored = None if store is None else PrefixNodes(store, tokenizer)
        self._document: _Document | None = None

    def forget(self) -> None:
        """Free the cached states."""
        self._document = None

    def after_context(self, plans: list[Plan], context: Tensor, expected: int) -> list[ReadState]:
        """Return every plan's state after acting on the context alone; to be forked before feeding.

        Args:
            plans: the first of them full KV.
            context: int64 [1, N].
            expected: tokens that may follow.
        """
        document = self._of(plans, context)
        # Some budgets depend on the tokens that may follow, and differ between questions.
        counts = [None if plan.evict is None else plan.evict.entries(context.shape[1], expected) for plan in plans]
        known = {i: count for i, (count, _) in document.hidden.items()}
        missing = {i: plan for i, plan in enumerate(plans) if i not in known or known[i] != counts[i]}
        if missing:
            for state in self._read(document, missing, context, expected):
                (i,) = state.order
                document.hidden[i] = counts[i], state
        return [document.hidden[i][1] for i in range(len(plans))]

    def after_prompt(
        self,
        plans: list[Plan],
        context: Tensor,
        question: Tensor,
        expected: int,
        only: Sequence[int] | None = None,
    ) -> list[ReadState]:
        """Return every plan's state after acting on context and question together.

        Args:
            plans: see `after_context`.
            context: see `after_context`.
            question: int64 [1, N].
            expected: see `after_context`.
            only: indices of the plans to prefill for; None for all.
        """
        wanted = {i: plan for i, plan in enumerate(plans) if only is None or i in only}
        return self._read(self._of(plans, context), wanted, torch.cat([context, question], 1), expected)

    def open(self, plans: list[Plan], context: Tensor, progress: Progress | None = None) -> None:
        """Prefill a context for later prompts; progress is called with (tokens done, total tokens)."""
        self._of(plans, context, progress)

    @property
    def prefix(self) -> SharedPrefix | None:
        """The shared prefix of prompts with the last context; None if each is prefilled fully."""
        return None if self._document is None else self._document.prefix

    def begin(self, sieve: AttachedModel, ids: Tensor) -> SieveCache | None:
        """Return a cache in the middle of a prompt that begins with the context; None if the plan prefills it fully.

        Only one such cache may be in use at a time.

        Args:
            sieve: the model with one of the plans attached.
            ids: int64 [1, N], the prompt.
        """
        plan = sieve.plan
        prefix = None if self._document is None else self._prefix(self._document, [plan], ids)
        if prefix is None or plan.shortens_prompt:
            return None
        return prefix.begins(sieve, plan.evict)

    def notes(self, plan: Plan) -> list[str]:
        """Return a note on a plan that prefills every prompt fully while others share a prefill."""
        document = self._document
        alone = document is not None and document.prefix is not None and plan not in document.going_on
        return [ALONE] if alone else []

    def _of(self, plans: list[Plan], context: Tensor, progress: Progress | None = None) -> _Document:
        known = self._document
        if known is None or known.plans != plans or not torch.equal(known.context, context):
            self._document = None
            window = -(-max(plan.window for plan in plans) // _WINDOW) * _WINDOW or _WINDOW
            sharing = [plan for plan in plans if _can_go_on(plan) and not self._keeps_to_chunks(plan)]
            going_on = [plan for plan in sharing if plan.queries(context.shape[1]) <= window]
            prefix = None
            if context.shape[1] >= 2 * window:
                prefix = read_prefix(
                    *(self.model, going_on, context, window),
                    chunk=self.chunk,
                    room=self.room,
                    progress=progress,
                    stored=self.stored,
                )
            self._document = known = _Document(context, plans, going_on, prefix)
        return known

    def _read(self, document: _Document, plans: dict[int, Plan], ids: Tensor, expected: int) -> list[ReadState]:
        """Prefill a prompt under plans, by their numbers; plans with equal propagation share one prefill."""
        states: dict[int, ReadState] = {}
        probing = ReadOptions(self.chunk, expected, probed={})
        for i, plan in plans.items():
            if not plan.acts_once or self._keeps_to_chunks(plan):
                prefix = self._prefix(document, [plan], ids)
                read = read_alone(self.model, plan, ids, torch.ones_like(ids), probing, prefix)
                states[i] = ReadState([plan], *read, ids, [i])
        together = {i: plan for i, plan in plans.items() if i not in states}
        for propagate in dict.fromkeys(plan.propagate for plan in together.values()):
            group = {i: plan for i, plan in together.items() if plan.propagate == propagate}
            # Propagators see to theirs as they read.
            window = max(plan.window if propagate else plan.queries(ids.shape[1]) for plan in group.values())
            shared = read_shared(
                self.model,
                propagate,
                ids,
                torch.ones_like(ids),
                window=window,
                evictors=[plan.evict for plan in group.values()],
                options=ReadOptions(self.chunk, expected),
                prefix=self._prefix(document, group.values(), ids),
            )
            for i, plan in group.items():
                states[i] = ReadState(
                    [plan], shared.reduced(plan.evict, plan.codec, plan.rest), shared.logits, ids, ids, [i]
                )
        return [states[i] for i in plans]

    def _keeps_to_chunks(self, plan: Plan) -> bool:
        """Return True for a plan that encodes after every chunk, with prompts in chunks."""
        return self.chunk is not None and keeps_to_chunks(plan)

    def _prefix(self, document: _Document, plans: Iterable[Plan], ids: Tensor) -> SharedPrefix | None:
        """Return the prefilled part of a prompt, for plans that may continue from there."""
        prefix = document.prefix
        if prefix is None:
            return None
        rest = ids.shape[1] - prefix.cache.num_seen
        if not self.tables.same(prefix.cache.conversation.table_lengths, ids.shape[1]):
            return None
        suits = all(plan in document.going_on and plan.queries(ids.shape[1]) <= rest for plan in plans)
        return prefix if suits else None


def _can_go_on(plan: Plan) -> bool:
    """Return True for a plan that may process the last tokens of a prompt after a full prefill of the others."""
    if plan.drafts or plan.prefill is not None or plan.scores_entries:
        return False
    return not (plan.when.chunks or isinstance(plan.evict, ChunkedEvictor))
