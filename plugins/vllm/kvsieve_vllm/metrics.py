"""Counts of blocks freed by eviction, in vLLM's own statistics."""

from __future__ import annotations

import contextlib
import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

# Keys of the counts in a dict that vLLM passes unchanged from the scheduler's process.
_PREFIX = "kvsieve_"
_HELP = {
    "requests": "Evictions: requests whose blocks were freed.",
    "blocks_freed": "KV cache blocks that eviction freed.",
    "entries_kept": "KV entries per head that stayed, summed over evictions.",
}


class FreedCounts:
    """Sums since the last `take`."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(_HELP, 0)
        self._last: tuple[str, int] | None = None

    def add(self, moment: tuple[str, int], blocks: int, entries: int) -> None:
        """Count one request's eviction, once for all groups of layers.

        Args:
            moment: the request, and its processed tokens.
            blocks: freed.
            entries: per KV head in its other blocks.
        """
        counted = moment == self._last
        self._last = moment
        for name, count in zip(self._sums, (0, blocks, 0) if counted else (1, blocks, entries), strict=True):
            self._sums[name] += count

    def take(self) -> dict[str, int]:
        """Return the sums that are not 0, and reset them."""
        taken = {name: count for name, count in self._sums.items() if count}
        self._sums = dict.fromkeys(_HELP, 0)
        return taken


COUNTS = FreedCounts()


@functools.cache
def install() -> None:
    """Let vLLM's scheduler send the counts, and its Prometheus registry export them; once per process."""
    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    manager = importlib.import_module("vllm.v1.metrics.loggers").StatLoggerManager
    scheduler.make_stats = _with_counts(scheduler.make_stats)
    manager.record = _recorded(manager.record)


def _with_counts(make_stats: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make_stats)
    def made(*args: Any, **kwargs: Any) -> Any:
        stats = make_stats(*args, **kwargs)
        if stats is not None:
            stats.num_kv_fetch_reqs_by_stage.update({_PREFIX + name: n for name, n in COUNTS.take().items()})
        return stats

    return made


def _recorded(record: Callable[..., Any]) -> Callable[..., Any]:
    counters: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(record)
    def recorded(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in counters:
            counters[self] = _counters()
        stages = {} if scheduler_stats is None else scheduler_stats.num_kv_fetch_reqs_by_stage
        for name in [stage for stage in stages if stage.startswith(_PREFIX)]:
            counters[self][name.removeprefix(_PREFIX)].inc(stages.pop(name))
        return record(self, scheduler_stats, *args, **kwargs)

    return recorded


def _counters() -> dict[str, Any]:
    """Create the counters again: vLLM unregisters all with its prefix when an engine starts."""
    from prometheus_client import REGISTRY, Counter

    for counter in _registered.values():
        with contextlib.suppress(KeyError):
            REGISTRY.unregister(counter)
    _registered.update({name: Counter(f"vllm:{_PREFIX}{name}", text) for name, text in _HELP.items()})
    return dict(_registered)


_registered: dict[str, Any] = {}
