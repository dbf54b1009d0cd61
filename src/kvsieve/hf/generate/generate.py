"""``generate`` under a plan, and the statistics of what really happened."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from kvsieve.display import html_table, mebibytes, percent
from kvsieve.errors import InputError, KvsieveError, UnsupportedOptionError, short
from kvsieve.hf.cache.cache import Passes, SieveCache, TurnRecord
from kvsieve.hf.compat import generate_arguments
from kvsieve.hf.generate.original_prompt import AsGiven
from kvsieve.hf.generate.peak_memory import measure_peak
from kvsieve.hf.inputs import check_callable
from kvsieve.hf.prompt.constraints import Wishes
from kvsieve.hf.prompt.read import read_prompt
from kvsieve.plans import Plan
from kvsieve.registry import did_you_mean

if TYPE_CHECKING:
    from kvsieve.hf.attach import Sieve

_log = logging.getLogger(__name__)
# The caches on which passes of a plain model.generate run, the last one only.
_PLAIN: ContextVar[list[SieveCache] | None] = ContextVar("kvsieve_plain_generate", default=None)

_REFUSED = {
    "assistant_model": "assisted decoding needs to take tokens back out of the cache",
    "prompt_lookup_num_tokens": "assisted decoding needs to take tokens back out of the cache",
    "assistant_early_exit": "assisted decoding needs to take tokens back out of the cache",
    "cache_implementation": "the plan brings its own cache",
    "prefill_chunk_size": "kvsieve chunks the prompt itself: use chunk=",
    "past_key_values": "pass it as cache=",
    "output_attentions": "attention weights are never formed",
    "custom_generate": "the plan could not tell whether it ran",
    "inputs": "pass the prompt as input_ids",
    "inputs_embeds": "pass the prompt as input_ids",
}
# Options that are numbers, and the least each may be.
_NUMBERS = {
    "max_new_tokens": 1,
    "min_new_tokens": 0,
    "max_length": 1,
    "min_length": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "pad_token_id": 0,
}

_ALL_WENT_ON = "every token went through all layers: the prompt is not longer than what may propagate"


@dataclass(frozen=True)
class Traffic:
    """What a token after the prompt read on average, counted from the tensors that were touched.

    entries: attended to, per layer and KV head; estimate_entries: read besides to choose them, in the bytes of as many
    entries; upkeep_entries: read besides to make and renew what is chosen by, such as bounds of pages, likewise. bytes,
    estimate_bytes, upkeep_bytes: the same in bytes per row, of all layers that kvsieve stores: together, all of keys,
    values and what is remembered of them that a token reads. tokens: how many read. What an evictor that acts while
    decoding reads to rank entries is not part of it, nor is room that passes of fixed shapes mask.
    """

    tokens: int
    entries: float
    estimate_entries: float
    bytes: int
    estimate_bytes: int
    upkeep_entries: float = 0.0
    upkeep_bytes: int = 0


@dataclass(frozen=True)
class Storage:
    """What the cache holds at the end, in all rows and layers.

    entries: per layer and KV head, on average over layers, of the fullest row. bytes: keys and values, room for further
    ones included. metadata_bytes: where they stood, which are real, what a reader keeps to choose among them, and what
    methods remember.
    """

    entries: float
    bytes: int
    metadata_bytes: int


@dataclass(frozen=True)
class Decoding:
    """How tokens after the first were computed.

    engine: "eager", "packed", "graph" or "compile", whichever ran most of them. reason: why it was not the one asked
    for, else None. captures: how often a pass was recorded or compiled; capture_s: the seconds that took.
    """

    engine: str
    reason: str | None
    captures: int
    capture_s: float


@dataclass(frozen=True, repr=False)
class Stats:
    """What one generate call did. Where rows of a batch differ, numbers are those of the longest row.

    method: the plan's name. applied: True when every role of the plan acted on this prompt (full KV has none).
    prompt_tokens: true tokens of the conversation when the prompt was complete. deep_tokens: of those of this turn,
    the ones that went through the deepest layer. kv_entries: entries per layer and KV head once the prompt was
    complete; kv_asked: the budget's entries, None without one. kv_bytes: bytes of all cache tensors held at the end.
    ttft_s, tpot_s: seconds to the first token, and per token after it (None with fewer than two), without what
    decoding.capture_s tells apart. new_tokens: tokens generated per row. peak_bytes: peak memory during the call,
    weights included (None where unknown). notes: what did not go as asked, and which parameters came
    with the model. report: what a method tells of its choice,
    such as ASL's layer. traffic: what each token after the first one read, None if there was none. storage: what is
    held, entries and metadata apart. decoding: how they were computed. compressed_layers: layers that held fewer
    entries than under full KV once the prompt was complete; kv_share: of the entries that all layers would have held
    then, the part that they did (both None in a chat that an earlier version saved).

    Printed, it is one line.
    """

    method: str
    applied: bool
    prompt_tokens: int
    deep_tokens: int
    kv_entries: list[int]
    kv_asked: int | None
    kv_bytes: int
    ttft_s: float
    tpot_s: float | None
    new_tokens: int
    peak_bytes: int | None
    notes: list[str] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    traffic: Traffic | None = None
    storage: Storage | None = None
    decoding: Decoding | None = None
    compressed_layers: int | None = None
    kv_share: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.method}: {', '.join(text for _, text in self._told())}"

    def __repr__(self) -> str:
        return f"<Stats {self}>"

    def _repr_html_(self) -> str:
        return html_table(self.method, self._told())

    def _told(self) -> list[tuple[str, str]]:
        """What is worth telling, as names and texts that need no name."""
        seconds = f"TTFT {self.ttft_s:.2f} s"
        if self.tpot_s is not None:
            seconds += f", TPOT {1000 * self.tpot_s:.1f} ms"
        told = [("entries kept", self._kept())]
        if self.deep_tokens < self.prompt_tokens:
            told.append(("propagated", f"{self.deep_tokens} tokens through the last layer"))
        if self.traffic is not None and self.traffic.entries < 0.99 * self._mean():
            told.append(("read", f"{self.traffic.entries:.0f} entries read per token"))
        told += [
            ("memory", f"KV {mebibytes(self.kv_bytes)}"),
            ("time", seconds),
            ("answer", f"{self.new_tokens} tokens"),
        ]
        return told + [("note", f"note: {note}") for note in self.notes]

    def _mean(self) -> float:
        return sum(self.kv_entries) / max(len(self.kv_entries), 1)

    def _kept(self) -> str:
        kept, layers = f"{self._mean():.0f} of {self.prompt_tokens} entries", len(self.kv_entries)
        if not self.compressed_layers or self.kv_share is None:
            return kept
        if self.compressed_layers < layers:
            return f"{self.compressed_layers} of {layers} layers compressed, {percent(self.kv_share)} of KV kept"
        return f"{kept} ({percent(self.kv_share)})"


@dataclass(repr=False)
class GenerateResult:
    """sequences: int64 [B, N + new]; output: what ``model.generate`` returned; cache: ready for the next turn.

    token_s: seconds of every token after the first, in order, capturing included; see stats.tpot_s.
    """

    sequences: Tensor
    stats: Stats
    cache: SieveCache
    output: Any
    token_s: list[float]

    def __repr__(self) -> str:
        return f"<GenerateResult {list(self.sequences.shape)} tokens, {self.stats}>"

    def _repr_html_(self) -> str:
        shape = " x ".join(map(str, self.sequences.shape))
        return html_table(f"{self.stats.method}: sequences of {shape} tokens", self.stats._told())


class _Clock(StoppingCriteria):
    """Never stops anything: notes when each token was chosen."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate(
    sieve: Sieve,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cache: SieveCache | None,
    *,
    chunk: int | None,
    progress: Callable[[int, int], None] | None,
    wishes: Wishes,
    **options: Any,
) -> GenerateResult:
    """See Sieve.generate."""
    sieve.last_stats = None
    for name, reason in _REFUSED.items():
        if options.get(name) is not None and options[name] is not False:
            raise UnsupportedOptionError(f"generate({name}=...) is not supported under a plan: {reason}")
    if options.get("use_cache") is False:
        raise UnsupportedOptionError("generate(use_cache=False) leaves nothing to reduce; leave it unset")
    check_options(sieve.model, options)
    cache = sieve.new_cache() if cache is None else cache
    clock = _Clock()
    criteria = list(options.pop("stopping_criteria", None) or [])
    config = options.get("generation_config") or sieve.model.generation_config
    wanted = {
        name: options.get(name, getattr(config, name, None)) or 1 for name in ("num_beams", "num_return_sequences")
    }
    copies = max(wanted.values())
    with measure_peak(sieve.model.device) as peak:
        began = time.perf_counter()
        ids, mask = read_prompt(
            sieve,
            input_ids,
            attention_mask,
            cache,
            chunk=chunk,
            new_tokens=options.get("max_new_tokens") or getattr(config, "max_new_tokens", None) or 0,
            pad_token_id=options.get("pad_token_id"),
            progress=progress,
            wishes=wishes,
        )
        # generate repeats rows for beams and samples, so what is cached already must be repeated with them.
        if copies > 1 and cache.num_seen:
            cache.batch_repeat_interleave(copies)
        elif copies > 1 and cache.held is not None:
            cache.held = cache.held.rows(torch.arange(len(ids)).repeat_interleave(copies))
        given = AsGiven(input_ids, ids.shape[1]) if cache.restart is not None else None
        if given is not None:
            options = given.options(options, config, sieve.model.generation_config)
            criteria = given.criteria(criteria)
            if copies > 1 and not cache.num_seen:
                cache.restart = cache.restart.rows(torch.arange(len(ids)).repeat_interleave(copies))
        seen = cache.num_seen
        try:
            output = sieve.own_generate(
                ids,
                attention_mask=mask,
                past_key_values=cache,
                stopping_criteria=StoppingCriteriaList([*criteria, clock]),
                **options,
            )
        except Exception as error:
            if isinstance(error, KvsieveError) or cache.num_seen != seen or cache.in_flight:
                raise
            # It did not come to a pass of the model: what it was told is at fault.
            raise _refusal(options, error) from error
        output = output if given is None else given.output(output)
        if progress is not None:
            total = cache.prompt_end - cache.turn_start + (0 if given is None else input_ids.shape[1])
            progress(total, total)
    sequences = output if isinstance(output, Tensor) else output.sequences
    stats = _stats(sieve, cache, clock, began, peak.bytes)
    token_s = [after - before for before, after in itertools.pairwise(clock.times)]
    sieve.last_stats = stats
    _log.info("%s", stats)
    return GenerateResult(sequences, stats, cache, output, token_s)


def check_values(options: Mapping[str, Any]) -> None:
    """Raise InputError for options of ``model.generate`` of the wrong kind, where kvsieve makes something of them."""
    for name, least in _NUMBERS.items():
        value = options.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise InputError(f"generate({name}=...) must be a whole number of at least {least}, got {short(value)}")
    for name, kind in (("stopping_criteria", "StoppingCriteria"), ("logits_processor", "LogitsProcessor")):
        parts = options.get(name)
        if parts is not None and not (isinstance(parts, (list, tuple)) and all(map(callable, parts))):
            raise InputError(f"generate({name}=...) must be a list of {kind} objects, got {short(parts)}")
    check_callable("generate(prefix_allowed_tokens_fn=...)", options.get("prefix_allowed_tokens_fn"))
    for name in ("put", "end"):
        if options.get("streamer") is not None and not callable(getattr(options["streamer"], name, None)):
            raise InputError(f"generate(streamer=...) must have put() and end(), got {short(options['streamer'])}")
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    if options.get("synced_gpus") and not grouped:
        raise InputError(
            "generate(synced_gpus=True) is for several processes, and no process group is there; leave it out"
        )
    config = options.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise InputError(f"generate(generation_config=...) must be a GenerationConfig, got {short(config)}")


def check_options(model: Any, options: Mapping[str, Any]) -> None:
    """Raise before anything is read for options of ``model.generate`` that are none, or of the wrong kind.

    Raises InputError for a value, UnsupportedOptionError for a name that neither generate nor the model has.
    """
    check_values(options)
    known = generate_arguments(model)
    for name, value in options.items():
        if value is not None and name not in known:
            raise UnsupportedOptionError(f"generate has no option {name!r}{did_you_mean(name, sorted(known), None)}")
    try:
        copy.deepcopy(options.get("generation_config") or model.generation_config).update(**options)
    except Exception as error:  # of comparing what it was given, whatever that may be
        raise _refusal(options, error) from error


def _refusal(options: Mapping[str, Any], error: Exception) -> InputError:
    given = ", ".join(f"{name}={short(value, 30)}" for name, value in options.items())
    return InputError(f"generate cannot use its options ({given}): {short(str(error), 400)}")


def with_stats(sieve: Sieve) -> Callable[..., Any]:
    """The model's own generate, which leaves ``sieve.last_stats``."""

    @functools.wraps(sieve.own_generate)
    def run(*args: Any, **options: Any) -> Any:
        sieve.last_stats = None
        clock = _Clock()
        # The fourth of generate's arguments, where it is given by position.
        given = args[3] if len(args) > 3 else options.pop("stopping_criteria", None)
        criteria = StoppingCriteriaList([*(given or []), clock])
        if len(args) > 3:
            args = (*args[:3], criteria, *args[4:])
        else:
            options["stopping_criteria"] = criteria
        caches: list[SieveCache] = []
        token = _PLAIN.set(caches)
        began = time.perf_counter()
        try:
            output = sieve.own_generate(*args, **options)
        finally:
            _PLAIN.reset(token)
        if caches and clock.times:
            sieve.last_stats = _stats(sieve, caches[-1], clock, began, None)
            _log.info("%s", sieve.last_stats)
        return output

    return run


def note_cache(cache: SieveCache) -> None:
    """Tell a plain generate that is running which cache its passes use."""
    caches = _PLAIN.get()
    if caches is not None:
        caches[:] = [cache]


def what_ran(plan: Plan, record: TurnRecord) -> tuple[bool, list[str]]:
    """Whether every role of the plan acted on the turn's prompt, and what did not go as asked."""
    if plan.roles and not record.reduced:
        return False, ["the plan did not act on this turn's prompt, as asked (reduce=False)"]
    notes = []
    if plan.evict is not None and not record.evicted:
        tokens = record.prompt_tokens - record.question
        notes.append(f"nothing was evicted: the prompt's {tokens} tokens fit what must or may be kept")
    if plan.propagate is not None and record.propagated is None:
        notes.append(record.report.get("idle") or _ALL_WENT_ON)
    if plan.read is not None and record.reads.tokens and not record.reads.sparse:
        notes.append("every token read all of what is stored: that is not more than the budget")
    applied = not notes
    reads = record.reads
    if reads.sparse and reads.all_bytes > reads.whole_bytes:
        notes.append(
            f"choosing what to read cost more than reading everything would have: {reads.all_bytes:,} bytes for "
            f"{reads.whole_bytes:,}; it pays with a smaller budget, a longer context, or entries dropped less often"
        )
    if record.raised_to is not None:
        notes.append(f"the budget of {record.asked} entries was raised to {record.raised_to}, the least it can keep")
    return applied, notes


def _stats(sieve: Sieve, cache: SieveCache, clock: _Clock, began: float, peak: int | None) -> Stats:
    record, plan = cache.record, sieve.plan
    applied, notes = what_ran(plan, record)
    kept = cache.entries()
    for index, entries in record.kept.items():
        kept[index] = entries
    whole = [record.prompt_tokens] * len(kept)
    for index in set(range(len(kept))) - set(cache.sieve_layers):
        # Layers that transformers keeps: a sliding window holds no more under full KV.
        kept[index] = whole[index] = min(kept[index], record.prompt_tokens)
    compressed = sum(least < most for least, most in zip(kept, whole, strict=True))
    share = sum(kept) / max(sum(whole), 1)
    others = len(kept) - len(cache.sieve_layers)
    if compressed and others:
        notes.append(
            f"{compressed} of {len(kept)} layers compressed, {percent(share)} of KV kept: {others} have a sliding "
            "window, which is left as it is"
        )
    times = clock.times
    turn_tokens = record.prompt_tokens
    return Stats(
        method=plan.name,
        applied=applied,
        prompt_tokens=record.prompt_tokens,
        deep_tokens=record.propagated + record.question if record.propagated is not None else turn_tokens,
        kv_entries=kept,
        kv_asked=record.asked,
        kv_bytes=cache.nbytes(),
        ttft_s=times[0] - began,
        tpot_s=(times[-1] - times[0] - record.passes.capture_s) / (len(times) - 1) if len(times) > 1 else None,
        new_tokens=len(times),
        peak_bytes=peak,
        notes=notes if plan.filled is None else [*notes, str(plan.filled)],
        report=record.report,
        traffic=_traffic(cache),
        storage=_storage(cache),
        decoding=_decoding(sieve, record.passes),
        compressed_layers=compressed,
        kv_share=round(share, 4),
    )


def _decoding(sieve: Sieve, passes: Passes) -> Decoding:
    asked, refusal = sieve.engine.asked, sieve.engine.refusal
    failed = passes.eager > passes.fixed or (refusal is not None and not passes.fixed)
    ran = "eager" if failed else asked
    reason = None if ran == asked else refusal or passes.reason
    return Decoding(ran, reason, passes.captures, passes.capture_s)


def _traffic(cache: SieveCache) -> Traffic | None:
    reads, layers = cache.record.reads, cache.sieve_layers
    if not reads.tokens or not layers:
        return None
    tokens = reads.tokens * cache.batch
    heads = sum(layer.store.heads for layer in layers.values())
    entries = reads.entries / (tokens * heads)
    each = reads.entry_bytes / reads.entries
    return Traffic(
        tokens=reads.tokens,
        entries=round(entries, 2),
        estimate_entries=round(reads.looked_bytes / each / (tokens * heads), 2),
        bytes=round(reads.entry_bytes / tokens),
        estimate_bytes=round(reads.looked_bytes / tokens),
        upkeep_entries=round(reads.upkeep_bytes / each / (tokens * heads), 2),
        upkeep_bytes=round(reads.upkeep_bytes / tokens),
    )


def _storage(cache: SieveCache) -> Storage:
    layers = cache.sieve_layers.values()
    held = sum(layer.store.entry_bytes() for layer in layers)
    entries = [layer.store.entries for layer in layers]
    return Storage(round(sum(entries) / max(len(entries), 1), 2), held, cache.nbytes() - held)
