"""``generate`` under a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from kvsieve.errors import KvsieveError, UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.failures import undone_on_failure
from kvsieve.hf.compat import CACHE, CACHE_NAMES, forget_positions
from kvsieve.hf.drafts.opened import check_draft
from kvsieve.hf.forward.own_generate import noting_caches
from kvsieve.hf.forward.resume import Resume, resuming
from kvsieve.hf.generate.config import check_config, config_in_effect, end_tokens
from kvsieve.hf.generate.drafted import DraftedAnswer, check_drafted, taken_draft, true_rows
from kvsieve.hf.generate.ends import begin_plain_turn, note_ends, plain_prompt, put_back
from kvsieve.hf.generate.grammar import FollowingProcessor
from kvsieve.hf.generate.options import check_plan_can, refusal
from kvsieve.hf.generate.original_prompt import OriginalPrompt, Streamer
from kvsieve.hf.generate.peak_memory import Peak, measure_peak
from kvsieve.hf.generate.result import GenerateResult
from kvsieve.hf.generate.stats import Stats, stats_of
from kvsieve.hf.hooks import refuse_foreign
from kvsieve.hf.inputs import check_ids
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.prompt.read import read_prompt
from kvsieve.hf.prompt.reread import read_again
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.drafts import Draft

_log = logging.getLogger(__name__)


class _Clock(StoppingCriteria):
    """A stopping criterion that never stops, and records the time of each token.

    exact: wait for the GPU before each record.
    """

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        if self.exact and input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True)
class CallOptions:
    """Options of an answer.

    Attributes:
        options: of generate.
        config: in effect for them.
        measure: record peak memory, and wait for the GPU at every token.
        draft: source of drafts; None for none.
        grammar: that the answers match; None for none.
    """

    options: dict[str, Any]
    config: GenerationConfig
    measure: bool = False
    draft: Draft | None = None
    grammar: FollowingProcessor | None = None


def generate(
    model: AttachedModel,
    own_generate: Callable[..., Any],
    prompt: tuple[Tensor, Tensor | None],
    cache: SieveCache,
    reading: ReadOptions,
    asked: CallOptions,
) -> GenerateResult:
    """Prefill a prompt and generate after it; see Sieve.generate.

    Args:
        model: the attached model.
        own_generate: the model's own generate.
        prompt: ids int64 [B, N], and their mask [B, N], None without padding.
        cache: to continue.
        reading: options of the prefill.
        asked: options of the answer.
    """
    input_ids, attention_mask = prompt
    options = asked.options
    config = asked.config
    check_plan_can(model, input_ids, cache, reading, options, config)
    if asked.draft is not None:
        answers = max(config.num_beams or 1, config.num_return_sequences or 1)
        check_draft(asked.draft, model, cache, len(input_ids) * answers if isinstance(input_ids, Tensor) else 1)
    clock = _Clock(exact=asked.measure)
    with measure_peak(model.model.device) if asked.measure else contextlib.nullcontext(Peak()) as peak:
        began = time.perf_counter()
        ids, mask = read_prompt(model, input_ids, attention_mask, cache, reading)
        if config.max_time is not None:
            # Time that reading the prompt took counts, as in generate's own call.
            left = max(config.max_time - (time.perf_counter() - began), 1e-9)
            asked = dataclasses.replace(asked, options={**options, "max_time": left})
        resume = _resume(model, ids, cache, reading)
        answer = None
        if asked.draft is not None:
            rows = true_rows(input_ids, attention_mask)
            answer = DraftedAnswer(model, cache, asked.draft, rows, resume, asked.grammar)
        with resuming(resume):
            output = _decode(model, own_generate, (input_ids, ids, mask), cache, clock, asked, answer)
        if reading.progress is not None:
            again = 0 if cache.conversation.short_prompt is None else input_ids.shape[1]
            total = (cache.turn.prompt_end or 0) - cache.turn.start + again
            reading.progress(total, total)
    sequences = output if isinstance(output, Tensor) else output.sequences
    if cache.conversation.ends is not None:
        put_back(sequences, input_ids)
    stats = stats_of(model, cache, clock.times, began, peak.bytes, answer)
    note_ends(cache, sequences, len(clock.times), config, criteria=bool(options.get("stopping_criteria")))
    token_s = [after - before for before, after in itertools.pairwise(clock.times)]
    _log.info("%s", stats)
    columns = input_ids.shape[1]
    ends = frozenset(end_tokens(config))
    return GenerateResult(sequences, stats, cache, output, token_s, cache.num_seen, model.tokenizer, columns, ends)


def _decode(
    model: AttachedModel,
    own_generate: Callable[..., Any],
    prompt: tuple[Tensor, Tensor, Tensor | None],
    cache: SieveCache,
    clock: _Clock,
    asked: CallOptions,
    answer: DraftedAnswer | None,
) -> Any:
    """Run the model's own generate after the prefill of all but the last chunk.

    Args:
        model: the attached model.
        own_generate: its own generate.
        prompt: the given ids, those to continue with, and their mask.
        cache: with the chunks before.
        clock: records the time of each token.
        asked: options of the answer.
        answer: the loop with drafts; None for generate's own.
    """
    given_ids, ids, mask = prompt
    options = asked.options
    config = asked.config
    # A growing cache was requested, and one is given: generate refuses both together.
    options = {**options, "cache_implementation": None} if config.cache_implementation else dict(options)
    criteria = list(options.pop("stopping_criteria", None) or [])
    copies = max(config.num_beams or 1, config.num_return_sequences or 1)
    conversation = cache.conversation
    repeated = torch.arange(len(ids)).repeat_interleave(copies)
    # generate repeats rows for beams and samples, so cached entries must be repeated with them.
    if copies > 1 and cache.num_seen:
        cache.batch_repeat_interleave(copies)
    elif copies > 1:
        if conversation.protected is not None:
            conversation.protected = conversation.protected.rows(repeated)
        if conversation.turn.drafted is not None:
            conversation.turn.drafted = conversation.turn.drafted[repeated]
    original = None
    if conversation.short_prompt is not None:
        original = OriginalPrompt(given_ids, ids.shape[1])
        options = original.rules(options, model.model, config)
        options = original.options(options, options.get("generation_config"), model.model.generation_config)
        criteria, options = original.criteria(criteria, options, config)
        if copies > 1 and not cache.num_seen:
            conversation.short_prompt = conversation.short_prompt.rows(repeated)
    seen = cache.num_seen
    streamer = Streamer(options.get("streamer"), original)
    if streamer.inner is not None:
        options["streamer"] = streamer
    if asked.grammar is not None:
        # Behind the rules about the prompt, which may ban what it allows.
        options["logits_processor"] = [*(options.get("logits_processor") or []), asked.grammar]
    if answer is not None:
        criteria, options = answer.joined(criteria, options, config)
    _count_on(model, cache)
    try:
        output = own_generate(
            ids,
            attention_mask=mask,
            stopping_criteria=StoppingCriteriaList([*criteria, clock]),
            **{CACHE: cache},
            **options,
        )
    except Exception as error:
        begun = cache.num_seen != seen or cache.status != "ready"
        known = (KvsieveError, MemoryError, torch.OutOfMemoryError)
        if begun or isinstance(error, known) or error is streamer.raised:
            raise
        # It did not come to a pass of the model: its arguments are at fault.
        raise refusal(options, error) from error
    return output if original is None else original.output(output)


def _count_on(model: AttachedModel, cache: SieveCache | None) -> None:
    """Let positions of text after a cache count on: transformers would shift them by the last image it has read."""
    if model.is_composite and cache is not None and cache.num_seen and not cache.conversation.multi_axis_positions:
        forget_positions(model.model)


def _resume(model: AttachedModel, prompt: Tensor, cache: SieveCache, reading: ReadOptions) -> Resume:
    """Return the function that continues a cache dropped by generate; see hooks.resuming.

    Args:
        model: the attached model.
        prompt: int64 [B, N] that generate continues with.
        cache: to continue.
        reading: options of the prefill.
    """

    def resume(ids: Tensor, mask: Tensor | None) -> SieveCache | None:
        size = prompt.shape[1]
        whole = prompt.repeat_interleave(max(len(ids) // len(prompt), 1), 0).to(ids.device)
        # A pass of guidance brings a mask of its own tokens.
        total = size if mask is None else mask.shape[-1]
        if cache.num_seen and ids.shape[1] < total:
            raise UnsupportedOptionError(
                f"transformers {version('transformers')} drops the cache at {cache.num_seen} tokens, where the model's "
                "rotary tables change, and does not read them again, so that the answer from there on is not the "
                "model's: install transformers 5.20 or newer, or ask for fewer tokens"
            )
        # Others are passes over another prompt, as those of guidance are.
        if ids.shape[1] <= cache.num_seen or not torch.equal(ids[:, :size], whole):
            return None
        if cache.num_seen:
            read_again(model, ids, mask, cache, reading, ids.shape[1] - size)
        return cache

    return resume


def with_stats(
    model: AttachedModel, own_generate: Callable[..., Any], done: Callable[[Stats | None], None]
) -> Callable[..., Any]:
    """Wrap the model's own generate: `done` gets None when a call begins, its statistics when it ends."""
    names = list(inspect.signature(own_generate).parameters)

    @functools.wraps(own_generate)
    def run(*args: Any, **options: Any) -> Any:
        done(None)
        options = {**dict(zip(names, args, strict=False)), **options}
        draft, options = taken_draft(model.model, None, options)
        config = config_in_effect(model.model, options)
        check_config(model.model, options, config)
        # One that is empty would pass for the cache that generate makes itself.
        for name in options.keys() & set(CACHE_NAMES):
            if options[name] is not None:
                refuse_foreign(options[name], model.plan.name)
        clock = _Clock()
        own_criteria = options.pop("stopping_criteria", None)
        cache = next((options[name] for name in CACHE_NAMES if options.get(name) is not None), None)
        answer = None
        with noting_caches() as caches, undone_on_failure(cache):
            began = time.perf_counter()
            options, ids = begin_plain_turn(model, cache, options, config)
            _count_on(model, cache)
            criteria = [*(own_criteria or []), clock]
            if draft is not None:
                check_drafted(config, options)
                check_draft(draft, model)
                given, given_mask = plain_prompt(options)
                check_ids(given, model.config.vocab_size)
                cache = model.new_cache() if cache is None else cache
                options[CACHE] = cache
                answer = DraftedAnswer(model, cache, draft, true_rows(given, given_mask))
                criteria, options = answer.joined(criteria, options, config)
            output = own_generate(stopping_criteria=StoppingCriteriaList(criteria), **options)
        sequences = output if isinstance(output, Tensor) else output.sequences
        if ids is not None:
            put_back(sequences, ids)
        if caches and clock.times:
            stats = stats_of(model, caches[-1], clock.times, began, None, answer)
            done(stats)
            target = caches[-1] if cache is None else cache
            note_ends(target, sequences, len(clock.times), config, criteria=bool(own_criteria))
            _log.info("%s", stats)
        return output

    return run
