"""Statistics of a generate call."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvsieve.attention.paged import compile_seconds
from kvsieve.cache.tensors import storage_bytes
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.counts import Passes, Reads
from kvsieve.hf.decode.engine import Engine
from kvsieve.hf.drafts.drafter import DraftCounts
from kvsieve.hf.generate.acted import codec_text, entries_after_prompt, executors_of, prompt_blocks, what_ran
from kvsieve.hf.generate.drafted import DraftedAnswer
from kvsieve.hf.generate.edited import EditedEntries, edited_entries
from kvsieve.hf.kinds import describe_kinds
from kvsieve.hf.runtime import AttachedModel
from kvsieve.report.display import html_table, mebibytes, percent


@dataclass(frozen=True)
class Traffic:
    """Entries and bytes that a token after the prompt read on average, counted from the tensors used.

    Not counted are reads of an evictor that acts while decoding, and spare room masked in passes of fixed shapes.

    Attributes:
        tokens: tokens counted, per row.
        entries: attended to, per layer and KV head.
        estimate_entries: read to choose them, in the bytes of as many entries.
        bytes: bytes attended to, per row, of all layers that kvsieve stores.
        estimate_bytes: bytes read to choose.
        upkeep_entries: read to build and update the metadata of the choice, such as bounds of pages.
        upkeep_bytes: the bytes of that.
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
    """Sizes of the cache's content at the end, in all rows and layers.

    Attributes:
        entries: per layer and KV head, on average over layers with growing KV, of the fullest row.
        bytes: keys and values, including spare room and sliding windows.
        metadata_bytes: token indices, masks, a reader's metadata, and methods' state.
        state_bytes: recurrent states, which do not grow.
    """

    entries: float
    bytes: int
    metadata_bytes: int
    state_bytes: int = 0


@dataclass(frozen=True)
class Decoding:
    """The engine that computed the tokens after the first.

    Attributes:
        engine: "eager", "fused" or "graph", by the majority of tokens.
        reason: why it was not the requested one, else None.
        captures: number of recordings of a pass.
        capture_s: seconds of recording.
        reading: execution of sparse reads: "compiled", or "torch" and the reason; None without any.
        compile_s: seconds of compiling C code in this process; 0 if it was cached, as in every process but a machine's
            first.
        fused_modules: norms, gated MLPs and attention with small operations fused into one compiled call each.
        linear_layers: linear layers with compiled products of few tokens.
        narrow_bytes: bytes of bfloat16 copies of float32 weights for such products.
    """

    engine: str
    reason: str | None
    captures: int
    capture_s: float
    reading: str | None = None
    compile_s: float = 0.0
    fused_modules: int = 0
    linear_layers: int = 0
    narrow_bytes: int = 0


@dataclass(frozen=True, repr=False)
class Stats:
    """Statistics of one generate call. If rows of a batch differ, numbers are those of the longest row.

    Printed as one line.

    Attributes:
        method: the plan's name.
        applied: True if every role of the plan acted on this prompt (full KV has none).
        prompt_tokens: true tokens of the conversation when the prompt was complete.
        deep_tokens: tokens of this turn that passed the deepest layer.
        kv_entries: entries per layer and KV head once the prompt was complete; 0 for a layer without entries.
        kv_asked: the budget's entries, None without one.
        kv_bytes: bytes of all cache tensors at the end.
        ttft_s: seconds to the first token.
        tpot_s: seconds per token after it, without `decoding.capture_s`; None with fewer than two tokens.
        new_tokens: tokens generated per row.
        peak_bytes: peak memory during the call, weights included; None unless measured.
        notes: deviations from the request, and parameters set by the model.
        report: a method's report on its choice, such as ASL's layer.
        traffic: reads of each token after the first one, None if there was none.
        storage: sizes of entries and metadata.
        decoding: execution of tokens after the first.
        compressed_layers: layers with fewer entries than under full KV once the prompt was complete.
        kv_share: share of full KV's entries stored then, over all layers.
        growing_layers: indices of the layers with growing KV, on which plans act. These three are None in a chat saved
            by an earlier version.
        codec: codec, and bits per number including scales, or None.
        prompt_density: share of the prompt's causal blocks that was computed; None for dense prefill.
        prompt_recall: share of the attention of sampled queries (one in 1024) in these blocks.
        executors: executors of attention to the "prompt" and of the "answer", with the number of layers.
        drafts: counts of drafted tokens; None without drafts.
        edited: entries that edits or a join left in the prompt; None without.
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
    growing_layers: list[int] | None = None
    codec: str | None = None
    prompt_density: float | None = None
    prompt_recall: float | None = None
    executors: dict[str, dict[str, int]] = field(default_factory=dict)
    drafts: DraftCounts | None = None
    edited: EditedEntries | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.method}: {', '.join(text for _, text in self.describe())}"

    def __repr__(self) -> str:
        return f"<Stats {self}>"

    def _repr_html_(self) -> str:
        return html_table(self.method, self.describe())

    def describe(self) -> list[tuple[str, str]]:
        """Return the lines of a summary, as names and self-explanatory texts."""
        seconds = f"TTFT {self.ttft_s:.2f} s"
        if self.tpot_s is not None:
            seconds += f", TPOT {1000 * self.tpot_s:.1f} ms"
        rows = [("entries kept", self._kept())]
        if self.deep_tokens < self.prompt_tokens:
            rows.append(("propagated", f"{self.deep_tokens} tokens through the last layer"))
        if self.traffic is not None and self.traffic.entries < 0.99 * self._mean():
            rows.append(("read", f"{self.traffic.entries:.0f} entries read per token"))
        if self.prompt_density is not None:
            rows.append(("prompt", self._prompt()))
        if self.codec is not None:
            rows.append(("codec", self.codec))
        rows += [
            ("memory", f"KV {mebibytes(self.kv_bytes)}"),
            ("time", seconds),
            ("answer", f"{self.new_tokens} tokens"),
        ]
        counts = (("drafts", self.drafts), ("edited", self.edited))
        rows += [(name, str(count)) for name, count in counts if count is not None]
        return rows + [("note", f"note: {note}") for note in self.notes]

    def _prompt(self) -> str:
        recall = "" if self.prompt_recall is None else f", about {percent(self.prompt_recall)} of its weight"
        return f"{percent(self.prompt_density or 0.0)} of the prompt's attention computed{recall}"

    def _growing(self) -> list[int]:
        """Entries of the layers that plans act on."""
        layers = range(len(self.kv_entries)) if self.growing_layers is None else self.growing_layers
        return [self.kv_entries[index] for index in layers]

    def _mean(self) -> float:
        return sum(self._growing()) / max(len(self._growing()), 1)

    def _kept(self) -> str:
        layers = len(self.kv_entries)
        grow = len(self._growing())
        text = f"{self._mean():.0f} of {self.prompt_tokens} entries"
        text += f" in {grow} of {layers} layers" if grow < layers else ""
        if not self.compressed_layers or self.kv_share is None:
            return text
        if self.compressed_layers < grow:
            return f"{self.compressed_layers} of {layers} layers compressed, {percent(self.kv_share)} of KV kept"
        return f"{text} ({percent(self.kv_share)}{' of KV' if grow < layers else ''})"


def stats_of(
    model: AttachedModel,
    cache: SieveCache,
    times: list[float],
    began: float,
    peak: int | None,
    answer: DraftedAnswer | None = None,
) -> Stats:
    """Return the statistics of a call.

    Args:
        model: the attached model.
        cache: after the call.
        times: when each token was chosen, in seconds.
        began: when the call began.
        peak: peak memory in bytes, None if not measured.
        answer: the loop with drafts; None without.
    """
    record = cache.turn.record
    plan = model.plan
    applied, notes = what_ran(plan, cache)
    kept, whole = entries_after_prompt(cache)
    compressed = sum(least < most for least, most in zip(kept, whole, strict=True))
    share = sum(kept) / max(sum(whole), 1)
    if plan.roles and len(cache.sieve_layers) < len(kept):
        notes.append(describe_kinds(model.kinds))
    notes += model.facts.tables.notes(cache.conversation.table_lengths, record.reread)
    if answer is not None:
        notes += answer.notes
    return Stats(
        method=plan.name,
        applied=applied,
        prompt_tokens=record.prompt_tokens,
        deep_tokens=record.propagated + record.question if record.propagated is not None else record.prompt_tokens,
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
        decoding=_decoding(model.engine, record.passes, record.reads),
        compressed_layers=compressed,
        kv_share=round(share, 4),
        growing_layers=list(cache.sieve_layers),
        codec=codec_text(plan, cache),
        executors=executors_of(record),
        drafts=None if answer is None else answer.counts,
        edited=edited_entries(cache),
        **prompt_blocks(plan, cache),
    )


def _decoding(engine: Engine, passes: Passes, reads: Reads) -> Decoding:
    asked = engine.asked
    refusal = engine.refusal
    failed = passes.eager > passes.fixed or (refusal is not None and not passes.fixed)
    ran = "eager" if failed else asked
    reason = None if ran == asked else refusal or passes.reason
    reading = None
    seconds = 0.0
    if reads.sparse and passes.fixed > passes.eager:
        reading = f"torch: passes of fixed shapes ({ran})"
    elif reads.sparse and reads.not_compiled is not None:
        reading = f"torch: {reads.not_compiled}"
    elif reads.sparse:
        reading = "compiled"
        seconds = compile_seconds()
    return Decoding(ran, reason, passes.captures, passes.capture_s, reading, seconds, *engine.fused)


def _traffic(cache: SieveCache) -> Traffic | None:
    reads = cache.turn.record.reads
    layers = cache.sieve_layers
    if not reads.tokens or not layers:
        return None
    tokens = reads.tokens * cache.conversation.batch
    shared = [layer.source for layer in cache.all_layers if layer.source in layers]
    heads = sum(layers[index].store.heads for index in [*layers, *shared] if index is not None)
    entries = reads.entries / (tokens * heads)
    entry_bytes = reads.entry_bytes / reads.entries
    return Traffic(
        tokens=reads.tokens,
        entries=round(entries, 2),
        estimate_entries=round(reads.estimate_bytes / entry_bytes / (tokens * heads), 2),
        bytes=round(reads.entry_bytes / tokens),
        estimate_bytes=round(reads.estimate_bytes / tokens),
        upkeep_entries=round(reads.upkeep_bytes / entry_bytes / (tokens * heads), 2),
        upkeep_bytes=round(reads.upkeep_bytes / tokens),
    )


def _storage(cache: SieveCache) -> Storage:
    entry_bytes = sum(layer.memory.entry_bytes() for layer in cache.all_layers if layer.memory is not None)
    states = storage_bytes(part for layer in cache.all_layers for part in layer.state_tensors())
    entries = [layer.store.entries for layer in cache.sieve_layers.values()]
    return Storage(
        entries=round(sum(entries) / max(len(entries), 1), 2),
        bytes=entry_bytes,
        metadata_bytes=cache.nbytes() - entry_bytes - states,
        state_bytes=states,
    )
