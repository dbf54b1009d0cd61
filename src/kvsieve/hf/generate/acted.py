"""Effects of a plan on a turn's prompt, from its cache."""

from __future__ import annotations

from collections import Counter

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.records import TurnRecord
from kvsieve.planning.plans import Plan

_ALL_WENT_ON = "every token went through all layers: the prompt is not longer than what may propagate"
# Noted once per conversation, at the first turn that continues from entries of an earlier one.
_BLIND = (
    "{} chose what to keep before it knew this turn's question, which may need what is gone: for conversations take "
    "rocketkv-mt, which drops nothing, kvzip, which looks at no question, or full"
)
# Noted in every turn after a join.
_ALONE = "{} compressed the joined documents without a question, and left this turn's tokens whole"


def what_ran(plan: Plan, cache: SieveCache) -> tuple[bool, list[str]]:
    """Return True if every role of the plan acted on the turn's prompt, and notes on deviations from the request."""
    record = cache.turn.record
    left_whole = bool(plan.roles) and not record.reduced
    alone = plan.probes and cache.conversation.edits.alone
    if left_whole and not alone:
        return False, ["the plan did not act on this turn's prompt, as asked (reduce=False)"]
    evicted = bool(record.evicted) or (left_whole and cache.turn.reduced_before > 0)
    notes = _idle(plan, record, evicted)
    if plan.prefill is not None and record.blocks.computed == record.blocks.causal:
        notes.append(
            "the prompt was read in full: it, or each pass over it, is too short to skip blocks, or all were chosen"
        )
    if plan.codec is not None and not any(layer.store.is_encoded for layer in cache.sieve_layers.values()):
        notes.append(
            f"nothing was encoded: the newest entries stay exact, and the others do not fill a block of "
            f"{plan.codec.block}"
        )
    applied = not notes
    if left_whole and evicted:
        notes.append(_ALONE.format(plan.name))
    if _goes_on_blindly(plan) and cache.turn.reduced_before == 1:
        notes.append(_BLIND.format(plan.name))
    reads = record.reads
    if reads.sparse and reads.all_bytes > reads.whole_bytes:
        notes.append(
            f"choosing what to read cost more than reading everything would have: {reads.all_bytes:,} bytes for "
            f"{reads.whole_bytes:,}; it pays with a smaller budget, a longer context, or entries dropped less often"
        )
    if record.raised_to is not None:
        notes.append(f"the budget of {record.asked} entries was raised to {record.raised_to}, the least it can keep")
    return applied, notes


def _goes_on_blindly(plan: Plan) -> bool:
    """Return True if later turns continue from entries that were chosen for an earlier question."""
    return plan.drops and plan.query_aware and plan.rest is None and not plan.shortens_prompt


def _idle(plan: Plan, record: TurnRecord, evicted: bool) -> list[str]:
    """Return which roles had no effect on the turn's prompt and its answer's reads, and why.

    evicted: entries of the prompt were dropped.
    """
    tokens = record.prompt_tokens - record.question
    notes = []
    if plan.evict is not None and not evicted:
        notes.append(f"nothing was evicted: the prompt's {tokens} tokens fit what must or may be kept")
    if plan.propagate is not None and record.propagated is None:
        notes.append(record.report.get("idle") or _ALL_WENT_ON)
    if plan.read is not None and record.reads.tokens and not record.reads.sparse:
        notes.append("every token read all of what is stored: that is not more than the budget")
    # One reason for all of them.
    return [f"all {tokens} tokens kept: below the floor of {plan.floor}"] if notes and tokens <= plan.floor else notes


def entries_after_prompt(cache: SieveCache) -> tuple[list[int], list[int]]:
    """Return the entries per layer at the end of the turn's prompt, and those of full KV."""
    record = cache.turn.record
    kept = cache.entries()
    for index, entries in record.kept.items():
        kept[index] = entries
    whole = [record.prompt_tokens] * len(kept)
    for index in set(range(len(kept))) - set(cache.sieve_layers):
        # Layers that no plan acts on have the same entries under full KV.
        kept[index] = whole[index] = min(kept[index], record.prompt_tokens)
    return kept, whole


def prompt_blocks(plan: Plan, cache: SieveCache) -> dict[str, float | None]:
    """Return the density of the prompt's attention and its recall; see Stats."""
    if plan.prefill is None:
        return {}
    blocks = cache.turn.record.blocks
    recall = round(blocks.recall / blocks.sampled, 4) if blocks.sampled else None
    return {"prompt_density": round(blocks.computed / max(blocks.causal, 1), 4), "prompt_recall": recall}


def codec_text(plan: Plan, cache: SieveCache) -> str | None:
    """Return the codec's name and its bits per number, averaged over keys and values."""
    codec = plan.codec
    if codec is None:
        return None
    stores = [layer.store for layer in cache.sieve_layers.values() if layer.store.is_encoded]
    if not stores:
        return f"{type(codec).__name__}, nothing encoded yet"
    dims = stores[0].dims
    forms = codec.keys(dims[0]), codec.values(dims[1])
    bits = sum(dim * form.bits_per_number(dim, codec.block) for dim, form in zip(dims, forms, strict=True)) / sum(dims)
    return f"{type(codec).__name__} at {bits:.2f} bits a number"


def executors_of(record: TurnRecord) -> dict[str, dict[str, int]]:
    """Return, for prompt and answer, the number of layers with growing KV by executor and its reason."""
    phases = {"prompt": record.blocks.executors, "answer": record.reads.executors}
    return {phase: dict(Counter(executors.values())) for phase, executors in phases.items()}
