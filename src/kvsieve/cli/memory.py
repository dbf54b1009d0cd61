"""`--memory`: choose the chunk, codec and context that keep a process below a size, before weights are loaded.

Budgets do not matter: the whole prompt is stored before an evictor drops any of it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated

import typer

from kvsieve.cli.loading import check_least
from kvsieve.cli.options import MEMORY, MODEL, option, options_given
from kvsieve.cli.output import say
from kvsieve.cli.specs import MethodRun, make_runs
from kvsieve.errors import InputError
from kvsieve.planning.quantities import format_bytes, parse_bytes
from kvsieve.report.display import bytes_text

MemoryOption = Annotated[
    int | None,
    option(
        MODEL,
        "Memory limit of the process, or of its GPU: 2GiB; sets chunk, codec and context to fit (default: none)",
        **MEMORY,
    ),
]
# Codecs to fall back to, mildest first, and the smallest chunk.
_CODECS = ("int8", "kivi:bits=4")
_LEAST_CHUNK = 64
# Chunks per pass of an otherwise idle server, and the largest prefix cache it chooses.
_JOINED = 8
_MOST_CACHED = 2 << 30
# Slack of the size that a refusal names.
_SPARE = 16 << 20


def check_memory(memory: int | None, store: str | None = None) -> None:
    """Raise InputError for an invalid limit, or for a store, which is not counted."""
    check_least(1, memory=memory)
    if memory is not None and store is not None:
        raise InputError("--memory does not count what --store holds in memory; leave one of them out")


@dataclass(frozen=True)
class Settings:
    """Settings, and the most tokens of each of `rows` that they have memory for. kv, work: bytes of all rows."""

    runs: list[MethodRun]
    chunk: int
    decode: str
    rows: int = 1
    tokens: int = 0
    kv: int = 0
    work: int = 0

    def __str__(self) -> str:
        codecs = {str(run.given.get("codec") or "none") for run in self.runs}
        batch = f", --batch {self.rows}" if self.rows > 1 else ""
        return f"--chunk {self.chunk}, --codec {','.join(sorted(codecs))}, --decode {self.decode}{batch}"


class Limit:
    """--memory of a command, which sets --chunk, --codec, --batch and --decode unless given."""

    def __init__(self, context: typer.Context, runs: list[MethodRun], *, codecs: bool = True) -> None:
        """Measure the process. codecs: the runs may get a codec. Raises InputError."""
        import kvsieve.hf.attach  # noqa: F401  (part of what the process takes)
        from kvsieve.cli.estimate import model_config
        from kvsieve.lab.bench.footprint import footprint
        from kvsieve.models import load_tokenizer

        self._given, self._fixed = params, fixed = context.params, options_given(context)
        for run in runs:
            if run.plan.drafts:
                raise InputError(f"--memory does not count the draft model of {run.label}; leave one of them out")
        self.size: int = params["memory"]
        self.tokenizer = load_tokenizer(params["model"])
        kept = (params[name] for name in ("dtype", "device", "model", "weights"))
        self.foot = footprint(model_config(params["model"]), *kept)
        self._runs = [runs]
        if codecs and "codec" not in fixed:
            specs = [(run.name, run.given) for run in runs]
            self._runs += [make_runs(specs, [codec]) for codec in _CODECS]
        self._chunks = [params["chunk"]] if "chunk" in fixed else list(_halves(params["chunk"], _LEAST_CHUNK))
        self._rows = [params.get("batch", 1)] if "batch" in fixed else list(_halves(params.get("batch", 1), 1))
        self._decodes = [params["decode"]]
        if self.foot.copies and "decode" not in fixed:
            self._decodes.append("fused")

    def choose(self, tokens: int | None, *, least: int | None = None, rows: int = 1) -> Settings:
        """Return and print the first settings with room for `tokens`, else those with room for most, at least `least`.

        Args:
            tokens: of the longest prompt and its answer; None for the model's context.
            least: default: all of them.
            rows: prompts in all.

        Raises:
            InputError: they do not fit.
        """
        from kvsieve.hf.model.support import why_unsupported

        tokens = tokens or self.foot.context
        best: Settings | None = None
        runnable = [runs for runs in self._runs if not any(why_unsupported(self.foot.model, run.plan) for run in runs)]
        for runs, decode, count, chunk in product(runnable or self._runs[:1], self._decodes, self._rows, self._chunks):
            choice = self._longest(Settings(runs, chunk, decode, min(count, rows)), tokens)
            if best is None or choice.tokens > best.tokens or not best.tokens:
                best = choice
            if choice.tokens == tokens:
                break
        assert best is not None
        least = tokens if least is None else least
        if best.tokens < least:
            raise self._refusal(best, least, sum(self._sizes(best, least)))
        self._say(best, f"at most {bytes_text(best.kv)} KV", tokens)
        return best

    def choose_server(self) -> tuple[Settings, str]:
        """Return a server's settings with the bytes for requests' KV, and the size of its prefix cache, and print them.

        Raises InputError.
        """
        from kvsieve.planning.plans import Plan

        foot = self.foot
        kv = self._given["kv_memory"]
        best = None
        cached = parse_bytes(self._given["store_memory"]) if "store_memory" in self._fixed else None
        for decode, chunk in product(self._decodes, self._chunks):
            passes = Settings(self._runs[0], _JOINED * chunk, decode)

            def free(tokens: int, passes: Settings = passes) -> int:
                """Return the bytes for KV and prefix cache with prompts of `tokens` tokens."""
                return self.size - foot.fixed(passes.decode) - self._sizes(passes, tokens)[1]

            def fails(tokens: int, passes: Settings = passes, free: Callable[[int], int] = free) -> bool:
                needed = foot.kv(Plan(), tokens, passes.chunk)
                kv_bytes = needed if kv is None else kv
                return needed > kv_bytes or kv_bytes + (kv_bytes // 3 if cached is None else cached) > free(tokens)

            tokens = bisect.bisect_left(range(1, foot.context + 1), True, key=fails)
            if best is None or tokens > best[0].tokens or not best[0].tokens:
                left = free(max(tokens, 1))
                spare = max(0, min(_MOST_CACHED, left // 4 if kv is None else left - kv)) if cached is None else cached
                best = Settings(passes.runs, chunk, decode, 1, tokens, left - spare if kv is None else kv), spare
            if tokens == foot.context:
                break
        assert best is not None
        choice, spare = best
        if choice.tokens < _LEAST_CHUNK:
            needed = (foot.kv(Plan(), _LEAST_CHUNK, _LEAST_CHUNK) if kv is None else kv) + (cached or 0)
            raise self._refusal(choice, _LEAST_CHUNK, needed + self._sizes(choice, _LEAST_CHUNK * _JOINED)[1])
        self._say(choice, f"{bytes_text(choice.kv)} KV, {bytes_text(spare)} prefix cache", foot.context)
        return choice, format_bytes(spare) if spare else "0"

    def _longest(self, settings: Settings, tokens: int) -> Settings:
        free = self.size - self.foot.fixed(settings.decode)
        most = bisect.bisect_right(range(1, tokens + 1), free, key=lambda count: sum(self._sizes(settings, count)))
        kv, work = self._sizes(settings, max(most, 1))
        return replace(settings, tokens=most, kv=kv, work=work)

    def _sizes(self, settings: Settings, tokens: int) -> tuple[int, int]:
        plans = [run.plan for run in settings.runs]
        kv = max(self.foot.kv(plan, tokens, settings.chunk) for plan in plans)
        work = max(self.foot.work(plan, tokens, settings.chunk) for plan in plans)
        return settings.rows * kv, settings.rows * work

    def _counted(self) -> str:
        weights = bytes_text(self.foot.weights)
        process = bytes_text(self.foot.process)
        return f"--memory {format_bytes(self.size)}: {weights} weights, {process} process"

    def _say(self, choice: Settings, kv: str, wanted: int) -> None:
        context = f", a context of {choice.tokens} tokens" if choice.tokens < wanted else ""
        say(f"{self._counted()}, {kv}; {choice}{context}")

    def _refusal(self, best: Settings, tokens: int, more: int) -> InputError:
        """Return the error for a limit below `tokens`; more: bytes that they need."""
        needed = -(-(self.foot.fixed(best.decode) + more + _SPARE) // 2**20)
        shorter = f"at most {best.tokens} tokens fit: send less, or give" if best.tokens else "give"
        return InputError(
            f"{self._counted()} and {bytes_text(more)} for {tokens} tokens under {best} are more; {shorter} "
            f"--memory {needed}MiB"
        )


def _halves(count: int, least: int) -> Iterator[int]:
    yield count
    while count > least:
        count = max(count // 2, least)
        yield count
