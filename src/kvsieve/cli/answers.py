"""Prompts as tokens, and their answers under one method after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvsieve.cli.output import prefill_progress
from kvsieve.cli.prompts import TextPrompt
from kvsieve.cli.specs import MethodRun
from kvsieve.cli.store import opened_store
from kvsieve.detokenize import text_of
from kvsieve.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from kvsieve.hf.generate.result import GenerateResult
    from kvsieve.hf.reuse import PromptStore

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as tokens. ids: int64 [1, N]. protect: spans of tokens that no method may evict."""

    ids: Tensor
    protect: list[tuple[int, int]]


def encode(
    tokenizer: Any,
    prompt: TextPrompt,
    roles: Sequence[str] = (),
    spans: Sequence[tuple[int, int]] = (),
    parse_special: bool = False,
) -> EncodedPrompt:
    """A prompt through the chat template where there is one; with roles, the spans of their messages are protected.

    Control tokens that the prompt spells are text, unless parse_special. Raises InputError.
    """
    import torch

    from kvsieve.segments import role_spans
    from kvsieve.turns import prompt_ids

    protect = [*spans]
    if roles:
        protect += role_spans(tokenizer, prompt.messages, roles, parse_special=parse_special)[1]
    ids = prompt_ids(tokenizer, prompt.messages, parse_special)
    return EncodedPrompt(torch.tensor([ids], dtype=torch.int64), protect)


def check_lengths(model: Any, asked: Sequence[EncodedPrompt]) -> None:
    """Raises InputError where a prompt of many is longer than the context: none of them is answered then."""
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
    """Options of answering.

    Attributes:
        chunk: prompt tokens per forward pass.
        max_new_tokens: longest answer.
        decode: engine of the decoding steps; see `kvsieve.attach`.
        sampling: options of generate, greedy by default.
        seed: set before each method; None leaves torch's random state alone.
        kept: also tell which tokens the cache still holds; of one prompt at a time.
        store: directory of a store of prompts, which are then read one at a time; None without one.
    """

    chunk: int
    max_new_tokens: int
    decode: str = "auto"
    sampling: dict[str, Any] = field(default_factory=lambda: {"do_sample": False})
    seed: int | None = None
    kept: bool = False
    store: str | None = None


def run_methods(
    model: Any, tokenizer: Any, asked: EncodedPrompt, runs: list[MethodRun], how: Generation
) -> list[dict[str, Any]]:
    """Answers under each method, in order: ``{"method", "label", "parameters", "answer", "stats"}``, "kept" if asked.

    Raises what `run_batches` does.
    """
    results = list(run_batches(model, tokenizer, [asked], runs, 1, how, warm=True))
    return [{name: part for name, part in each.items() if name != "index"} for each in results]


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
    """Answers, method by method and `batch` prompts at a time, with the statistics of the batch.

    Each is ``{"index", "method", "label", "parameters", "answer", "stats"}``.

    warm: for times that are compared, read a few tokens first.

    Raises UnsupportedModelError or PlanError, before anything runs, when the model cannot run one of them.
    """
    import torch

    import kvsieve
    from kvsieve.hf.generate.config import check_single_answer
    from kvsieve.hf.model.support import check_model
    from kvsieve.hf.model.tables import RotaryTables

    alone = how.store is None and not how.kept
    check_single_answer(model, how.sampling, beams=alone)
    runs = [each.for_model(model, tokenizer) for each in runs]
    for each in runs:
        check_model(model, each.plan)
    if warm:
        _warm_up(model, asked[0].ids)
    # Rows of a batch would share the rotary tables of the longest.
    batch = batch if how.store is None and not RotaryTables(model).depend else 1
    options = {"chunk": how.chunk, "max_new_tokens": how.max_new_tokens, **how.sampling}
    for run in runs:
        if how.seed is not None:
            torch.manual_seed(how.seed)
        attached = kvsieve.attach(model, run.plan.for_tokenizer(tokenizer), decode=how.decode)
        with opened_store(how.store) as store, attached as sieve:
            if store is not None:
                sieve.use_tokenizer(tokenizer)
            for first in range(0, len(asked), batch):
                rows = asked[first : first + batch]
                place = f", prompts {first} to {first + len(rows) - 1} of {len(asked)}" if len(asked) > 1 else ""
                with prefill_progress(f"{run.label}{place}") as progress:
                    answers, result = _answer(sieve, tokenizer, rows, store, progress=progress, **options)
                facts = {"method": run.name, "label": run.label, "parameters": run.parameters}
                more = {"kept": result.kept.with_tokenizer(tokenizer)} if how.kept else {}
                for index, answer in enumerate(answers, first):
                    yield {"index": index, **facts, "answer": answer, "stats": result.stats, **more}


def _warm_up(model: Any, prompt: Tensor) -> None:
    """Without this the first method's time would include what a process does only once."""
    import kvsieve

    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        ids = prompt[:, :_WARM_UP_TOKENS].to(model.device)
        sieve.generate(ids, ids.new_ones(ids.shape), max_new_tokens=2, do_sample=False)


def _answer(
    sieve: Any, tokenizer: Any, rows: Sequence[EncodedPrompt], store: PromptStore | None, **options: Any
) -> tuple[list[str], GenerateResult]:
    """Answers to prompts that are padded on the left to one batch."""
    from kvsieve.hf.reuse import Stored
    from kvsieve.turns import stop_ids

    longest = max(each.ids.shape[1] for each in rows)
    filler = tokenizer.pad_token_id or 0
    ids = rows[0].ids.new_full((len(rows), longest), filler)
    # A pad token in a prompt's text is no padding.
    mask = ids.new_zeros(ids.shape)
    for row, each in enumerate(rows):
        ids[row, longest - each.ids.shape[1] :] = each.ids[0]
        mask[row, longest - each.ids.shape[1] :] = 1
    ids, mask = ids.to(sieve.model.device), mask.to(sieve.model.device)
    ends, answers = stop_ids(tokenizer, sieve.model.generation_config.eos_token_id), []
    options |= {"eos_token_id": sorted(ends) or None, "pad_token_id": filler}
    stored = None if store is None else Stored(store)
    if stored is not None and stored.suits(sieve, options):
        result = stored.generate(sieve, ids, measure=True, **options)
    else:
        result = sieve.generate(ids, mask, protect=[each.protect for each in rows], measure=True, **options)
    for made in result.sequences[:, longest:].tolist():
        # Rows that ended earlier are filled up.
        end = next((at for at, token in enumerate(made) if token in ends), len(made))
        answers.append(text_of(tokenizer, made[:end]).strip())
    return answers, result
