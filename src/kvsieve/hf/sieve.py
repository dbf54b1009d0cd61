"""A model with a plan attached, as its user sees it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from kvsieve.errors import CacheStateError, InputError, short
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.failures import undone_on_failure
from kvsieve.hf.chat.chat import Chat
from kvsieve.hf.edit.editor import WINDOW, Editor
from kvsieve.hf.edit.layout import Window
from kvsieve.hf.forward.passes import closing
from kvsieve.hf.generate.ask import Prompt, asked
from kvsieve.hf.generate.config import padding_token
from kvsieve.hf.generate.drafted import check_drafted, taken_draft
from kvsieve.hf.generate.generate import CallOptions, generate
from kvsieve.hf.generate.grammar import following
from kvsieve.hf.generate.options import checked_config
from kvsieve.hf.generate.result import GenerateResult
from kvsieve.hf.generate.stats import Stats
from kvsieve.hf.inputs import check_callable, check_path, check_tokenizer, prompt_of
from kvsieve.hf.join.documents import JoinReader, checked_documents, checked_question
from kvsieve.hf.join.join import Joined, Joining
from kvsieve.hf.kept import kept_of
from kvsieve.hf.kept_tokens.kept import Kept
from kvsieve.hf.persist.saved import Saved, load_cache, save_cache
from kvsieve.hf.prompt.checks import check_chunk, checked_beginning
from kvsieve.hf.prompt.chunks import read_beginning
from kvsieve.hf.prompt.constraints import PromptConstraints
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.prompt.read import read_prompt
from kvsieve.hf.reuse import PromptStore, StoredPrefixes, answer, check_servable, check_store
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.grammars import Grammar
from kvsieve.planning.joins import JOIN, Join, checked_spans, join_of
from kvsieve.planning.plans import Plan

# Names that completion shows of a Sieve; the rest is for drivers.
_PUBLIC = "ask begin chat edit generate join kept last_stats load model new_cache plan prefill save tokenizer".split()


class Sieve(AttachedModel):
    """A model with a plan attached. Made by `attach`.

    Attributes:
        last_stats: of the last generate call, plain ``model.generate`` included; None before, and after a failure.
    """

    def __init__(self, model: Any, plan: Plan, decode: str = "auto") -> None:
        super().__init__(model, plan, decode)
        self.own_generate: Callable[..., Any] = model.generate
        self.last_stats: Stats | None = None

    def __repr__(self) -> str:
        return (
            f"<Sieve {type(self.model).__name__}, {self.num_layers} layers, decode {self.engine.asked}, {self.plan!r}>"
        )

    def __dir__(self) -> list[str]:
        return _PUBLIC

    def prefill(
        self,
        input_ids: Tensor | Mapping[str, Any],
        attention_mask: Tensor | None = None,
        *,
        cache: SieveCache | None = None,
        chunk: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        protect: Sequence[Any] | None = None,
        quotas: Sequence[Any] | None = None,
        reduce: bool | None = None,
    ) -> SieveCache:
        """Prefill a prompt, apply the plan to it and return the cache, ready for a next turn.

        Args:
            input_ids: int64 [B, N], left-padded, or the output of ``tokenizer(..., return_tensors="pt")``; with a used
                `cache` the whole conversation; only new tokens are prefilled.
            attention_mask: [B, N], 1 for tokens and 0 for padding; None when nothing new is padding.
            cache: of this plan on this model; None for a new one.
            chunk: tokens per forward pass, None for all at once.
            progress: called with (tokens done, total tokens).
            protect: spans that are never evicted, ``[(0, 40)]``: half-open, in true tokens; one list, or one per row.
            quotas: spans with a minimum of entries per layer and head, ``[((0, 40), 10), ((40, 90), "20%")]``. Both
                count in the budget, and hold as long as the cache is used.
            reduce: False if the plan must not act on this turn's prompt. None for True, but False after joined
                documents under a plan that would feed them again (KVzip).

        Raises:
            InputError: an empty, too long or wrongly padded prompt, or a span outside it or larger than the budget.
            PlanError: the plan needs a tokenizer and has none; see `attach`.
            CacheStateError: the cache is of another plan or model, or the `with` block has ended.
        """
        self._check_attached()
        ids, mask = prompt_of(input_ids, attention_mask)
        cache = self.new_cache() if cache is None else cache
        constraints = PromptConstraints(protect, quotas, None, reduce)
        pad = padding_token(self.model.generation_config)
        reading = ReadOptions(chunk, pad_token_id=pad, progress=progress, leave_last=False, constraints=constraints)
        with closing(), undone_on_failure(cache):
            read_prompt(self, ids, mask, cache, reading)
        return cache

    def begin(
        self,
        input_ids: Tensor | Mapping[str, Any],
        *,
        cache: SieveCache | None = None,
        chunk: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> SieveCache:
        """Prefill the beginning of a prompt and return the cache, in the middle of that prompt.

        The next `prefill` or `generate` completes the prompt; it must contain the plan's observation window.

        Args:
            input_ids: int64 [1, N], one row without padding; with a used `cache`, the whole conversation so far.
            cache: of this plan on this model, between turns or in the middle of a prompt; None for a new one.
            chunk: see `prefill`.
            progress: see `prefill`; it may look at the cache, which is between two passes then.

        Raises:
            InputError, CacheStateError: see `prefill`; also for several rows.
            PlanError: a plan that reads a shorter prompt in place of the given one, which has no such beginning.
        """
        self._check_attached()
        cache = self.new_cache() if cache is None else cache
        ids = checked_beginning(self, input_ids, cache, chunk, progress)
        with closing(), undone_on_failure(cache):
            read_beginning(self, ids, cache, chunk, progress)
        return cache

    def edit(self, cache: SieveCache, input_ids: Tensor | Mapping[str, Any], *, window: Window = WINDOW) -> Editor:
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
        ids, _ = prompt_of(input_ids, None)
        return Editor(self, cache, ids, window)

    def join(
        self,
        documents: Sequence[Tensor | Sequence[int]],
        before: Tensor | Sequence[int] | None = None,
        *,
        kind: Join | str = JOIN,
        question: Tensor | Sequence[int] | None = None,
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
            kind: "modules", "link:shift=true" and others of `kvsieve.planning.joins.list_joins`; "full" for a plain
                prefill of everything.
            question: token ids after the documents, for kinds that choose by them: "prophet", "relevant"; the cache is
                without them.
            store: `kvsieve.store.PrefixStore` to find each document in, prefilled after `before`, and to add it to.
            owner: of the store's nodes.
            chunk: tokens per forward pass, None for all at once.
            progress: called with (tokens done, total tokens), those prefilled again included.

        Raises:
            InputError: documents or a question that are no token ids, are empty or exceed the context together, a
                kind that needs a question without one, or a store that cannot serve the plan.
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
        asked = checked_question(self, rule, question, texts.ids.shape[1])
        return Joining(self, rule, texts, asked, spans, reader, progress).run()

    def generate(
        self,
        input_ids: Tensor | Mapping[str, Any],
        attention_mask: Tensor | None = None,
        *,
        cache: SieveCache | None = None,
        chunk: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        protect: Sequence[Any] | None = None,
        quotas: Sequence[Any] | None = None,
        question_tokens: int | None = None,
        reduce: bool | None = None,
        measure: bool = False,
        draft: Any = None,
        grammar: Grammar | None = None,
        **options: Any,
    ) -> GenerateResult:
        """Run ``model.generate`` under the plan, with statistics.

        Args:
            input_ids: see `prefill`.
            attention_mask: see `prefill`.
            cache: see `prefill`.
            chunk: see `prefill`.
            progress: see `prefill`.
            protect: see `prefill`.
            quotas: see `prefill`.
            question_tokens: last tokens that are a question, prefilled after the plan has acted, without eviction.
            reduce: see `prefill`.
            measure: measure peak memory (which collects garbage), and wait for the GPU at every token.
            draft: source of drafts, verified several in a pass: "lookup", a smaller model, "self:PLAN"
                (docs/speculation.md); None for none.
            grammar: that every answer matches; needs the tokenizer. None for none.
            **options: generate's own (sampling, beams, num_return_sequences, stop strings, streamers ...).

        Returns:
            GenerateResult: `.text`, `.sequences` int64 [B, N + new], `.stats`, `.cache`, generate's own `.output`.

        Raises:
            InputError, PlanError, CacheStateError: see `prefill`; generate's own option `tokenizer` is one as well.
            UnsupportedOptionError: an option that cannot be honoured.
        """
        self._check_attached()
        ids, mask = prompt_of(input_ids, attention_mask)
        self.last_stats = None
        if not isinstance(measure, bool):
            raise InputError(f"measure is True, or False to leave memory alone; got {short(measure)}")
        if options.get("tokenizer") is not None:
            self.use_tokenizer(options["tokenizer"])
        source, options = taken_draft(self.model, draft, options)
        config = checked_config(self.model, options)
        if source is not None:
            check_drafted(config, options)
        matching = following(grammar, self.tokenizer, config)
        reading = ReadOptions(
            chunk=chunk,
            new_tokens=config.max_new_tokens or 0,
            pad_token_id=padding_token(config),
            progress=progress,
            constraints=PromptConstraints(protect, quotas, question_tokens, reduce),
        )
        cache = self.new_cache() if cache is None else cache
        with closing(), undone_on_failure(cache):
            asked = CallOptions(options, config, measure, source, matching)
            result = generate(self, self.own_generate, (ids, mask), cache, reading, asked)
        self.last_stats = result.stats
        return result

    def ask(
        self, prompt: Prompt, question: str | None = None, *, store: PromptStore | None = None, **options: Any
    ) -> GenerateResult:
        """Answer a text or a chat; ``.text`` of the result is the answer.

        Args:
            prompt: text of a user, or messages ``[{"role": "user", "content": ...}]``.
            question: text after the last message and a blank line.
            store: `kvsieve.store.PrefixStore` to find the prompt's prefix in, and to add it to.
            **options: of `generate`; by default 256 new tokens, greedy, in chunks of 1,024.

        Raises:
            InputError: no tokenizer, an empty prompt, a store that cannot serve the plan, or an error of `generate`.
        """
        self._check_attached()
        return answer(self, *asked(self, prompt, question, options), store)

    def kept(
        self, cache: SieveCache, input_ids: Tensor | Mapping[str, Any], *, row: int = 0, tokenizer: Any = None
    ) -> Kept:
        """Return the tokens that a cache still stores, by layer and head; docs/options.md.

        Args:
            cache: of this sieve, between turns.
            input_ids: int64 [B, N], the whole conversation as it was fed, padding included.
            row: of the batch.
            tokenizer: for the text of the tokens; None for that of `attach`.

        Raises CacheStateError for a half-read prompt or beams, InputError for other tokens or no such row.
        """
        self.check_cache(cache)
        ids, _ = prompt_of(input_ids, None)
        return kept_of(cache, ids, row, self.tokenizer if tokenizer is None else tokenizer)

    def save(
        self,
        cache: SieveCache,
        path: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        ids: Tensor | None = None,
        extra: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        """Write a cache of this sieve to one file (safetensors), which `load` reads; docs/chats.md.

        A failure leaves the file at `path` untouched.

        Args:
            cache: between turns.
            path: of the file.
            tokenizer: its vocabulary is then checked on loading.
            ids: int64 [B, N], the conversation's tokens, to continue with.
            extra: anything JSON can hold.
            force: replace a file there that kvsieve did not save.

        Raises CacheStateError for a half-read prompt, InputError for ids or extra that do not fit or another file at
        the path, CacheFileError if it cannot be written.
        """
        check_path(path)
        check_tokenizer(tokenizer)
        save_cache(path, self, cache, tokenizer=tokenizer, ids=ids, extra=extra, force=force)

    def load(self, path: str | os.PathLike[str], *, tokenizer: Any = None) -> Saved:
        """Load a file of `save`: `.cache` on the model's device, to continue with; `.ids`, `.extra`.

        Raises CacheFileError for a damaged file, or one of another model, dtype, tokenizer or plan.
        """
        check_path(path)
        check_tokenizer(tokenizer)
        return load_cache(path, self, tokenizer=tokenizer)

    def chat(
        self,
        tokenizer: Any,
        system: str | None = None,
        *,
        load: str | os.PathLike[str] | None = None,
        store: PromptStore | None = None,
        max_new_tokens: int = 512,
        chunk: int | None = 1024,
        **options: Any,
    ) -> Chat:
        """Begin a conversation on one cache: ``chat.ask(message)``, ``chat.stream(message)``, ``chat.messages``.

        Args:
            tokenizer: with a chat template.
            system: system prompt.
            load: file of ``chat.save(path)`` to continue.
            store: `kvsieve.store.PrefixStore` of prompts' beginnings.
            max_new_tokens: longest answer.
            chunk: prompt tokens per forward pass.
            **options: `max_context`, tokens in all (default: the model's); `retry=True` holds the state before the last
                turn for ``chat.retry``; and generate's, greedy by default.

        Raises InputError where the tokenizer has no chat template or the store cannot serve the plan,
        UnsupportedOptionError for beams.
        """
        self._check_attached()
        self.use_tokenizer(tokenizer)
        options |= {"max_new_tokens": max_new_tokens, "chunk": chunk}
        return Chat(self, tokenizer, system, load=load, store=store, **options)

    def _check_attached(self) -> None:
        if not self.attached:
            raise CacheStateError(
                f"the `with` block that attached {self.plan.name!r} has ended, so the model runs without it: attach "
                "the plan again (with kvsieve.attach(model, plan) as sieve: ...); caches of the same plan go on there"
            )
