"""Prompts as tokens, and their answers under several methods."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvsieve.cli.joined import EncodedDocuments, join_facts
from kvsieve.cli.output import prefill_progress
from kvsieve.cli.prompts import TextPrompt
from kvsieve.cli.specs import MethodRun
from kvsieve.cli.store import opened_store
from kvsieve.detokenize import text_of
from kvsieve.errors import InputError
from kvsieve.planning.drafts import Draft
from kvsieve.planning.grammars import Grammar

if TYPE_CHECKING:
    from torch import Tensor

    from kvsieve.hf.generate.result import GenerateResult
    from kvsieve.hf.reuse import PromptStore
    from kvsieve.lab.eval.reading import DocumentReader

_WARM_UP_TOKENS = 16
# Tokens of an answer that a shared prefill reserves room for, as a separate one does.
_ROOM = 64
# Mean tokens of prompts from which methods share the prefill of each, and are not run on batches of them.
_LONG = 1024


@dataclass(frozen=True)
class EncodedPrompt:
    """Tokens of a prompt.

    Attributes:
        ids: int64 [1, N].
        protect: spans of tokens that no method may evict.
        documents: those that are prefilled alone, or None.
    """

    ids: Tensor
    protect: list[tuple[int, int]]
    documents: EncodedDocuments | None = None


def encode(
    tokenizer: Any,
    prompt: TextPrompt,
    roles: Sequence[str] = (),
    spans: Sequence[tuple[int, int]] = (),
    parse_special: bool = False,
    join: str = "full",
) -> EncodedPrompt:
    """Apply the chat template, if any, and tokenize; with roles, the spans of their messages are protected.

    Control tokens in the prompt are text, unless parse_special. join: of the prompt's documents. Raises InputError.
    """
    import torch

    from kvsieve.planning.documents import document_prompt
    from kvsieve.planning.segments import role_spans
    from kvsieve.planning.turns import prompt_ids

    if prompt.documents:
        parts = document_prompt(tokenizer, prompt.messages, prompt.documents, parse_special)
        documents = EncodedDocuments(parts.before, parts.documents, parts.question, join)
        return EncodedPrompt(torch.tensor([parts.ids], dtype=torch.int64), [*spans], documents)
    protect = [*spans]
    if roles:
        protect += role_spans(tokenizer, prompt.messages, roles, parse_special=parse_special)[1]
    ids = prompt_ids(tokenizer, prompt.messages, parse_special)
    return EncodedPrompt(torch.tensor([ids], dtype=torch.int64), protect)


def check_lengths(model: Any, asked: Sequence[EncodedPrompt]) -> None:
    """Raise InputError if any of several prompts exceeds the context, before one is answered."""
    from kvsieve.hf.model.context import context_of

    context = context_of(model.config)
    longest = max(range(len(asked)), key=lambda index: asked[index].ids.shape[1])
    if context is not None and asked[longest].ids.shape[1] > context:
        raise InputError(
            f"prompt {longest} (counted from 0) has {asked[longest].ids.shape[1]} tokens, the model's context ends at "
            f"{context}; shorten it or leave it out"
        )


@dataclass(frozen=True)
class Generation:
    """Options of generation.

    Attributes:
        chunk: prompt tokens per forward pass.
        max_new_tokens: longest answer.
        decode: engine of the decoding steps; see `kvsieve.attach`.
        sampling: options of generate, greedy by default.
        seed: set before each method; None does not change torch's random state.
        kept: also return the tokens in the cache; for one prompt at a time.
        store: directory of a prefix cache, with which prompts are prefilled one at a time; None without.
        share: prefill a prompt once for all methods that can continue from it, unless it is one of many short ones.
        draft: source of tokens that passes verify; None for one token per pass.
        grammar: that answers match; None for none.
    """

    chunk: int
    max_new_tokens: int
    decode: str = "auto"
    sampling: dict[str, Any] = field(default_factory=lambda: {"do_sample": False})
    seed: int | None = None
    kept: bool = False
    store: str | None = None
    share: bool = False
    draft: Draft | None = None
    grammar: Grammar | None = None


def run_methods(
    model: Any, tokenizer: Any, asked: EncodedPrompt, runs: list[MethodRun], how: Generation
) -> list[dict[str, Any]]:
    """Return the answers under each method, in order; see `run_batches`, also for errors.

    If full KV is among them, each has "differs_at", the number of its first token that differs from full KV's, or None.
    """
    from kvsieve.lab.eval.ask import differs_at

    results = list(run_batches(model, tokenizer, [asked], runs, 1, how, warm=True))
    full = next((result["tokens"] for result in results if result["label"] == "full"), None) if len(runs) > 1 else None
    for result in results:
        del result["index"]
        result |= {} if full is None else {"differs_at": differs_at(full, result["tokens"])}
    return results


def run_batches(
    model: Any,
    tokenizer: Any,
    asked: Sequence[EncodedPrompt],
    runs: list[MethodRun],
    batch: int,
    how: Generation,
    *,
    warm: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield answers, with the statistics of the batch: by method and `batch` prompts at a time, or prompt by prompt.

    Methods share the prefill of each prompt if `how` says so and prompts are long; see `_shares`.

    Each is ``{"index", "method", "label", "parameters", "answer", "tokens", "stats"}``, with "kept" if requested. If
    methods share a prefill, "shared_prefill_s" is its seconds, None for a method that does not use it. "join" has the
    numbers of the join of a prompt's documents.

    warm: run a few tokens first, so that times can be compared.

    Raises UnsupportedModelError or PlanError, before anything runs, if the model cannot run one of them.
    """
    import torch

    from kvsieve.hf.attach import attach
    from kvsieve.hf.generate.config import check_single_answer
    from kvsieve.hf.model.support import check_model
    from kvsieve.hf.model.tables import RotaryTables
    from kvsieve.lab.eval.reading import DocumentReader

    check_single_answer(model, how.sampling, beams=how.store is None and not how.kept)
    runs = [run.for_model(model, tokenizer) for run in runs]
    for run in runs:
        check_model(model, run.plan)
    if warm:
        _warm_up(model, asked[0].ids)
    # Rows of a batch would share the rotary tables of the longest.
    batch = batch if how.store is None and not RotaryTables(model).depend else 1
    options: dict[str, Any] = {"chunk": how.chunk, "max_new_tokens": how.max_new_tokens, "grammar": how.grammar}
    options |= {"draft": how.draft or "none", **how.sampling}
    with opened_store(how.store) as store:
        reader = None
        if _shares(asked, batch, how):
            reader = DocumentReader(model, how.chunk, store, tokenizer, room=min(how.max_new_tokens, _ROOM))
        groups = [(0, asked)] if reader is None else [(number, [prompt]) for number, prompt in enumerate(asked)]
        for start, prompts in groups:
            if reader is not None:
                with prefill_progress(f"prompt{_place(start, 1, asked)}") as progress:
                    reader.open([run.plan for run in runs], prompts[0].ids.to(model.device), progress)
            for run in runs:
                if how.seed is not None:
                    torch.manual_seed(how.seed)
                with attach(model, run.plan, decode=how.decode) as sieve:
                    sieve.use_tokenizer(tokenizer)
                    for first in range(0, len(prompts), batch):
                        rows = prompts[first : first + batch]
                        with prefill_progress(f"{run.label}{_place(start + first, len(rows), asked)}") as progress:
                            answers, result, joined = _answer(sieve, rows, store, reader, progress=progress, **options)
                        for index, tokens in enumerate(answers, start + first):
                            yield {"index": index, **_facts(run, tokenizer, tokens, result, how, reader), **joined}


def _shares(asked: Sequence[EncodedPrompt], batch: int, how: Generation) -> bool:
    """Return True if methods share a prefill of each prompt, which is answered alone then; short ones go in batches."""
    tokens = sum(prompt.ids.shape[1] for prompt in asked)
    return how.share and (len(asked) == 1 or batch == 1 or tokens >= _LONG * len(asked))


def _place(first: int, count: int, asked: Sequence[EncodedPrompt]) -> str:
    """Return which of several prompts are prefilled."""
    return f", prompts {first} to {first + count - 1} of {len(asked)}" if len(asked) > 1 else ""


def _facts(
    run: MethodRun,
    tokenizer: Any,
    tokens: list[int],
    result: GenerateResult,
    how: Generation,
    shared: DocumentReader | None,
) -> dict[str, Any]:
    """Return an answer with what it cost; see `run_batches`."""
    from kvsieve.lab.eval.reading import ALONE

    more: dict[str, Any] = {"kept": result.kept} if how.kept else {}
    if shared is not None and shared.prefix is not None:
        more["shared_prefill_s"] = None if ALONE in result.stats.notes else shared.prefix.seconds
    facts = {"method": run.name, "label": run.label, "parameters": run.parameters}
    return {**facts, "answer": text_of(tokenizer, tokens).strip(), "tokens": tokens, "stats": result.stats, **more}


def _warm_up(model: Any, prompt: Tensor) -> None:
    """Keep one-time costs of the process out of the first method's time."""
    from kvsieve.hf.attach import attach
    from kvsieve.planning.plans import Plan

    with attach(model, Plan()) as sieve:
        ids = prompt[:, :_WARM_UP_TOKENS].to(model.device)
        sieve.generate(ids, ids.new_ones(ids.shape), max_new_tokens=2, do_sample=False, draft="none")


def _answer(
    sieve: Any, rows: Sequence[EncodedPrompt], store: PromptStore | None, shared: DocumentReader | None, **options: Any
) -> tuple[list[list[int]], GenerateResult, dict[str, Any]]:
    """Return the tokens of the answers to prompts, padded on the left to one batch, and "join" if there was one.

    shared: the shared prefill of a single prompt, or None.
    """
    from kvsieve.hf.reuse import ReadPrefix, answer
    from kvsieve.lab.eval.reading import ALONE
    from kvsieve.planning.turns import stop_ids

    longest = max(prompt.ids.shape[1] for prompt in rows)
    filler = sieve.tokenizer.pad_token_id or 0
    ids = rows[0].ids.new_full((len(rows), longest), filler)
    # A pad token in a prompt's text is not padding.
    mask = ids.new_zeros(ids.shape)
    for row, prompt in enumerate(rows):
        ids[row, longest - prompt.ids.shape[1] :] = prompt.ids[0]
        mask[row, longest - prompt.ids.shape[1] :] = 1
    ids = ids.to(sieve.model.device)
    mask = mask.to(sieve.model.device)
    ends = stop_ids(sieve.tokenizer, sieve.model.generation_config.eos_token_id)
    options |= {"eos_token_id": sorted(ends) or None, "pad_token_id": filler, "measure": True}
    cache = None if shared is None else shared.begin(sieve, ids)
    documents = rows[0].documents
    facts: dict[str, Any] = {}
    if documents is not None:
        joined = documents.join(sieve, store, options)
        cache = joined.cache
        facts["join"] = join_facts(joined, len(documents.documents))
    if cache is None and store is not None:
        result = answer(sieve, ids, options, store)
    else:
        result = sieve.generate(ids, mask, cache=cache, protect=[prompt.protect for prompt in rows], **options)
    if documents is not None:
        stats = ReadPrefix(joined.found, took=joined.seconds).with_reuse(result.stats)
        # The join's own peak is not measured.
        result = replace(result, stats=replace(stats, peak_bytes=None))
    elif shared is not None and shared.prefix is not None:
        stats = result.stats
        if cache is None:
            stats = replace(stats, notes=[*stats.notes, ALONE])
        else:
            stats = ReadPrefix(shared.prefix.stored, shared.prefix.seconds).with_reuse(stats)
        # The shared prefill is in memory too, so the peak does not belong to one method.
        result = replace(result, stats=replace(stats, peak_bytes=None))
    # Rows that ended earlier are padded.
    answers = result.sequences[:, longest:].tolist()
    return [[*itertools.takewhile(lambda token: token not in ends, row)] for row in answers], result, facts
