"""An attached model with caches that can be edited and joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kvsieve.errors import CacheStateError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.edit.editor import WINDOW, Editor
from kvsieve.hf.edit.layout import Window
from kvsieve.hf.inputs import check_callable
from kvsieve.hf.join.documents import JoinReader, checked_documents
from kvsieve.hf.join.join import Joined, Joining
from kvsieve.hf.prompt.checks import check_chunk
from kvsieve.hf.reuse import PromptStore, StoredPrefixes, check_servable, check_store
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.joins import Join, checked_spans, join_of


class EditingModel(AttachedModel):
    """A model with a plan attached, and edits and joins of its caches."""

    def edit(self, cache: SieveCache, input_ids: Tensor, *, window: Window = WINDOW) -> Editor:
        """Return an editor that cuts, replaces, inserts and moves tokens of a cache's conversation.

        Entries of tokens that stay are reused, at new positions; see docs/editing.md.

        Args:
            cache: of this plan on this model, between turns; one conversation without padding.
            input_ids: int64 [1, N], the N tokens that the cache has seen.
            window: tokens prefilled again after every edit, or "all" for those up to the end, which is exact.

        Raises:
            InputError: other ids, or several rows.
            UnsupportedOptionError: the plan or the model has entries that cannot move.
            CacheStateError: see `prefill`.
        """
        self._check_attached()
        self.check_cache(cache)
        return Editor(self, cache, input_ids, window)

    def join(
        self,
        documents: Sequence[Tensor | Sequence[int]],
        before: Tensor | Sequence[int] | None = None,
        *,
        kind: Join | str = "link",
        store: PromptStore | None = None,
        owner: str = "",
        chunk: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Joined:
        """Prefill documents alone, and return them in one cache, in order, for a question on all of them.

        Continue with ``sieve.generate(torch.cat([joined.ids, question], 1), cache=joined.cache)``. Entries are
        approximate for every kind but "full"; see docs/editing.md.

        A plan that does not depend on a question acts on every document alone, with its budget for each. Another acts
        on all of them at the end of the question.

        Args:
            documents: token ids of each, int64 [1, N] or a list; any order, repeats allowed.
            before: token ids before the first document, such as the system prompt; every document is prefilled after
                them.
            kind: "modules", "link:tokens=32" and others of `kvsieve.planning.joins.list_joins`; "full" for a plain
                prefill of everything.
            store: `kvsieve.store.PrefixStore` to find each document in, prefilled after `before`, and to add it to.
            owner: of the store's nodes.
            chunk: tokens per forward pass, None for all at once.
            progress: called with (tokens done, total tokens), those prefilled again included.

        Raises:
            InputError: documents that are no token ids, are empty or exceed the context together, or a store that
                cannot serve the plan.
            PlanError: an unknown kind, or parameters that it does not have.
            UnsupportedOptionError: the plan or the model has entries that cannot move.
        """
        self._check_attached()
        rule = join_of(kind)
        check_chunk(chunk)
        check_callable("progress", progress)
        check_store(store)
        if store is not None:
            check_servable(self, {})
        texts = checked_documents(self, documents, before)
        spans = checked_spans(rule, texts.sizes, texts.start)
        stored = None if store is None else StoredPrefixes(store, owner)
        reader = JoinReader(self, stored, chunk, ends=not self.plan.query_aware)
        return Joining(self, rule, texts, spans, reader, progress).run()

    def _check_attached(self) -> None:
        if not self.attached:
            raise CacheStateError(
                f"the `with` block that attached {self.plan.name!r} has ended, so the model runs without it: attach "
                "the plan again (with kvsieve.attach(model, plan) as sieve: ...); caches of the same plan go on there"
            )
