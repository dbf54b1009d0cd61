"""Comparison of contenders: rounds in rotating order, medians and spread, ratios within a round, and the limit."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvsieve.hf.drafts.drafter import DraftCounts
from kvsieve.lab.bench.contenders import BASELINE, Contender, Run, is_peer, measure
from kvsieve.lab.bench.geometry import Geometry
from kvsieve.lab.bench.prompts import TokensPrompt, left_padded
from kvsieve.lab.bench.roofline import Rates
from kvsieve.lab.bench.spending import Spending
from kvsieve.lab.bench.work import Work
from kvsieve.models.quantized import matrices_of, weight_bytes

Samples = dict[str, list[dict[str, Any]]]
Progress = Callable[[str], None]

# Of one prompt or of the batch; with a batch, also of its rows one by one.
METRICS = (
    "ttft_s",
    "tpot_s",
    "decode_tokens_per_s",
    "tokens_per_s",
    "kv_bytes",
    "kv_read_bytes",
    "peak_bytes",
    "capture_s",
)
ALONE = ("alone_decode_tokens_per_s", "alone_tokens_per_s")
# The batch over its rows one by one, in tokens per second: after the first tokens, and from the beginning.
GAINS = ("decode_gain", "gain")


@dataclass(frozen=True)
class Limits:
    """Inputs of the limits. rates: measured in this run. element_bytes: of a number of the weights."""

    geometry: Geometry
    rates: Rates
    element_bytes: float


def run_length(
    contenders: Sequence[Contender],
    rows: list[TokensPrompt],
    new_tokens: int,
    rounds: int,
    *,
    model: Any,
    limits: Limits | None = None,
    filler: int = 0,
    progress: Progress = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """Measure all contenders on the same prompts: a warm-up round that counts work, then `rounds` timed ones.

    rows: prompts of one row each, also measured as one left-padded batch, filled with the token `filler`; or a single
    prompt of any number of rows.
    limits: None omits limits and counted work. progress: called with a line for each step.

    Returns, JSON-ready, `prompt_tokens` per row, `samples` per contender and round, the counted `work`, and the
    `summary` of both.
    """
    batch = left_padded(rows, filler)
    counted: dict[str, dict[str, Any]] = {}
    for contender in contenders:
        progress(f"warm-up: {contender.name}")
        prompt = batch if contender.pads else rows[0]
        if limits is None or not contender.here:
            contender.run(prompt, new_tokens)
            continue
        counted[contender.name] = _counted(contender, prompt, new_tokens, model, limits)
    samples: Samples = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            samples[contender.name].append(measure(contender, batch, rows, new_tokens))
        progress(f"round {turn + 1} of {rounds}")
        yield {
            "prompt_tokens": [row.ids.shape[1] for row in rows],
            "samples": samples,
            "work": counted,
            "summary": summarise(samples, new_tokens, counted, limits),
        }


def _counted(contender: Contender, prompt: TokensPrompt, new_tokens: int, model: Any, limits: Limits) -> dict[str, Any]:
    """Count the work of a run and the time by part; the latter not for recorded passes."""
    decode = contender.describe().get("decode")
    spending = None if decode == "graph" or model.device.type == "cuda" else Spending(model)
    work = Work(model, limits.geometry, prompt.ids.shape[1], len(prompt.ids), spending)
    work.start()
    if spending is not None:
        spending.start()
    try:
        contender.run(prompt, new_tokens, work)
    finally:
        work.close()
        if spending is not None:
            spending.close()
    return work.to_dict() | {"time_shares": {} if spending is None else spending.shares()}


def summarise(
    samples: Samples, new_tokens: int, work: dict[str, dict[str, Any]], limits: Limits | None
) -> dict[str, dict[str, Any]]:
    """Summarise each contender's rounds.

    Returns:
        Per contender: each metric's median, min and max over rounds; the same for its ratios, taken within a round, to
            the baseline, to our own full KV and to every contender of the peer; work counted, limits, and medians over
            them.
    """
    values = {name: [metrics(sample, new_tokens) for sample in runs] for name, runs in samples.items()}
    references = [name for name in samples if name in (BASELINE, "full") or is_peer(name)]
    out: dict[str, dict[str, Any]] = {}
    for name, runs in values.items():
        ran = [run for sample in samples[name] for run in _runs(sample)]
        row: dict[str, Any] = {
            "applied": all(run["applied"] for run in ran),
            "notes": [*dict.fromkeys(note for run in ran for note in run["notes"]), *_drafts(ran)],
        }
        for metric in (*METRICS, *ALONE, *GAINS):
            row[metric] = _spread(run.get(metric) for run in runs)
        row["ratios"] = {reference: _ratios(runs, values[reference]) for reference in references}
        row |= work.get(name, {})
        main = _main(samples[name][0])
        if limits is not None and main is not None:
            row |= _limited(row, main["rows"], limits)
        out[name] = row
    return out


def _drafts(ran: Sequence[Run]) -> list[str]:
    """Return a line on the drafts of all runs; none without drafts."""
    total = DraftCounts()
    for run in ran:
        total.add(DraftCounts(**run.get("drafts", {})))
    return [f"drafts: {total}"] if total.passes else []


def limit(entry: dict[str, Any], limits: Limits) -> None:
    """Recompute the limits in a length's entry for rates that turned out larger."""
    for name, row in entry["summary"].items():
        main = _main(entry["samples"][name][0])
        if main is not None:
            row |= _limited(row, main["rows"], limits)


def _ratios(rows: list[dict[str, Any]], reference: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = list(zip(rows, reference, strict=True))
    return {name: _spread(_over(a.get(name), b.get(name)) for a, b in pairs) for name in (*METRICS, *ALONE)}


def metrics(sample: dict[str, Any], new_tokens: int) -> dict[str, float | None]:
    """Return the numbers of one round of one contender, by METRICS, ALONE and GAINS, if measured."""
    out: dict[str, float | None] = {}
    alone = sample["alone"]
    run = _main(sample)
    if run is not None:
        rows = run["rows"]
        out |= {name: run[name] for name in METRICS if name in run}
        out |= {
            "decode_tokens_per_s": rows / run["tpot_s"],
            "tokens_per_s": rows * new_tokens / _seconds(run, new_tokens),
        }
    if len(alone) > 1:
        decoding = sum(row["tpot_s"] for row in alone)
        whole = sum(_seconds(row, new_tokens) for row in alone)
        out |= {
            "alone_decode_tokens_per_s": len(alone) / decoding,
            "alone_tokens_per_s": len(alone) * new_tokens / whole,
        }
        if run is not None:
            out["decode_gain"] = _over(out["decode_tokens_per_s"], out["alone_decode_tokens_per_s"])
            out["gain"] = _over(out["tokens_per_s"], out["alone_tokens_per_s"])
    return out


def _main(sample: dict[str, Any]) -> Run | None:
    """Return the batch, or the single prompt; None for a contender that does not support the batch."""
    return sample["alone"][0] if len(sample["alone"]) == 1 else sample["batch"]


def _seconds(run: Run, new_tokens: int) -> float:
    return run["ttft_s"] + run["tpot_s"] * (new_tokens - 1) + run.get("capture_s", 0.0)


def _runs(sample: dict[str, Any]) -> list[Run]:
    return [*sample["alone"], *([sample["batch"]] if sample["batch"] else [])]


def _over(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else value / other


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    found = [value for value in values if value is not None]
    return {"median": statistics.median(found), "min": min(found), "max": max(found)} if found else None


def _limited(row: dict[str, Any], rows: int, limits: Limits) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if "prefill_flops" in row:
        out["ttft_limit_s"] = limits.rates.prefill_seconds(row["prefill_flops"])
        out["ttft_of_limit"] = row["ttft_s"]["median"] / out["ttft_limit_s"]
    out["tpot_limit_s"] = limits.rates.decode_seconds(
        limits.geometry, rows, row["kv_read_bytes"]["median"], limits.element_bytes
    )
    out["tpot_of_limit"] = row["tpot_s"]["median"] / out["tpot_limit_s"]
    return out


def growth(report: dict[str, Any]) -> dict[str, float]:
    """Return each contender's time per token at the longest length over that at the shortest, of medians."""
    lengths = sorted(report["lengths"], key=int)
    first, last = (report["lengths"][length]["summary"] for length in (lengths[0], lengths[-1]))
    times = {name: (first[name]["tpot_s"], last[name]["tpot_s"]) for name in first if name in last}
    return {name: after["median"] / before["median"] for name, (before, after) in times.items() if before and after}


def element_bytes(model: Any) -> float:
    """Return the mean bytes of a number of a model's weights."""
    numbers = sum(parameter.numel() for parameter in model.parameters())
    numbers += sum(matrix.width * matrix.inner for matrix in matrices_of(model))
    return weight_bytes(model) / numbers
