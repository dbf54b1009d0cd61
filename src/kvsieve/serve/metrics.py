"""Metrics of the server for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvsieve.serve.scheduler import Scheduler
from kvsieve.serve.ticket import Summary

_COUNTS = {
    "requests": "Requests that were taken",
    "answered": "Requests that were answered",
    "failed": "Requests that failed",
    "refused": "Requests that were refused because too many waited",
    "cancelled": "Requests whose client went away",
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Tokens of prompts that were found in the store",
    "edited": "Requests whose session was edited",
    "edited_tokens": "Tokens of edited sessions that were reused",
    "reread_tokens": "Tokens of edited sessions that were prefilled again or are new",
    "new_tokens": "Tokens generated",
    "late_tokens": "Gaps between tokens that a part of a layer made longer than they may be",
    "decode_passes": "Passes over the next tokens of all answers",
    "drafted_passes": "Passes of those with drafts",
    "drafted_tokens": "Tokens drafted",
    "accepted_tokens": "Drafted tokens that became part of an answer",
}
_GAUGES = {
    "queued": "Requests that wait",
    "reading": "Prompts that are prefilled or wait for it",
    "running": "Answers that are being generated",
    "kv_bytes": "Bytes reserved for conversations",
    "kv_limit": "Most bytes for conversations, 0 for no limit",
}
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics(Collector):
    """Counts of a scheduler and its store, read on demand, and times of its requests."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._queue = self._times("queue", "From a request to the begin of its prefill")
        self._ttft = self._times("ttft", "From a request to its first token")
        self._whole = self._times("request", "From a request to its end")

    def _times(self, name: str, text: str) -> Histogram:
        return Histogram(f"kvsieve_{name}_seconds", text, registry=self.registry, buckets=_SECONDS)

    def note(self, summary: Summary) -> None:
        self._queue.observe(summary.queued_s)
        self._ttft.observe(summary.ttft_s)
        self._whole.observe(summary.seconds)

    def collect(self) -> Iterator[Metric]:
        counts = self.scheduler.counts
        state = self.scheduler.state()
        for name, text in _COUNTS.items():
            yield CounterMetricFamily(f"kvsieve_{name}", text, value=counts[name])
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"kvsieve_{name}", text, value=state[name])
        for name, value in self.scheduler.prefixes.to_dict().items():
            yield GaugeMetricFamily(f"kvsieve_store_{name}", f"The store's {name.replace('_', ' ')}", value=value)

    def text(self) -> bytes:
        return generate_latest(self.registry)
