"""Contenders of a benchmark: plain transformers, a plan under kvsieve, another library in a separate interpreter."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvsieve.hf.attach import attach
from kvsieve.hf.generate.peak_memory import measure_peak
from kvsieve.lab.bench.peer_process import Peer
from kvsieve.lab.bench.plain import read_and_decode
from kvsieve.lab.bench.prompts import TokensPrompt
from kvsieve.lab.bench.work import Work
from kvsieve.lab.traffic import read_bytes
from kvsieve.planning.drafts import Draft
from kvsieve.planning.plans import Plan

BASELINE = "transformers"
_PEER = "kvpress "
Run = dict[str, Any]


class Contender(Protocol):
    """A contender. pads: it supports left-padded batches. here: it runs in this process, so its work can be counted."""

    name: str
    pads: bool
    here: bool

    def run(self, prompt: TokensPrompt, new_tokens: int, work: Work | None = None) -> Run:
        """Prefill one prompt or batch and generate exactly `new_tokens` (2 or more) per row greedily.

        Returns rows, ttft_s, tpot_s, kv_bytes at the end, kv_read_bytes per token of all rows, peak_bytes (None if
        unknown), applied, notes, and capture_s if recording or compiling took time that tpot_s excludes. work: stopped
        at the end of the prompt.
        """
        ...

    def describe(self) -> dict[str, Any]: ...


@dataclass
class Transformers:
    """transformers' own loop with its own cache: the baseline."""

    model: Any
    chunk: int | None = None
    name: str = BASELINE
    pads: bool = True
    here: bool = True

    def run(self, prompt: TokensPrompt, new_tokens: int, work: Work | None = None) -> Run:
        prompt = prompt.to(self.model.device)
        first = None if work is None else work.stop
        with measure_peak(self.model.device) as peak:
            run, _ = read_and_decode(self.model, prompt.ids, prompt.mask, new_tokens, chunk=self.chunk, first=first)
        return {**run, "peak_bytes": peak.bytes, "applied": True, "notes": []}

    def describe(self) -> dict[str, Any]:
        attention = self.model.config._attn_implementation
        return {"kind": "transformers", "cache": "DynamicCache", "attention": attention, "chunk": self.chunk}


@dataclass
class KvsieveMethod:
    """A plan under `kvsieve.attach` and `sieve.generate`.

    decode, tokenizer: see `attach`; draft: see `Sieve.generate`.
    """

    model: Any
    plan: Plan
    name: str
    chunk: int | None = None
    decode: str = "auto"
    draft: Draft | None = None
    tokenizer: Any = None
    pads: bool = True
    here: bool = True

    def run(self, prompt: TokensPrompt, new_tokens: int, work: Work | None = None) -> Run:
        prompt = prompt.to(self.model.device)
        mask = torch.ones_like(prompt.ids) if prompt.mask is None else prompt.mask
        criteria = [] if work is None else [_Stop(work)]
        with attach(self.model, self.plan, decode=self.decode, tokenizer=self.tokenizer) as sieve:
            result = sieve.generate(
                prompt.ids,
                mask,
                chunk=self.chunk,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList(criteria),
                measure=True,
                draft=self.draft or "none",
            )
        stats = result.stats
        run: Run = {name: getattr(stats, name) for name in ("ttft_s", "tpot_s", "kv_bytes", "peak_bytes", "applied")}
        run |= {"rows": len(prompt.ids), "kv_read_bytes": read_bytes(stats, result.cache)}
        # The report has the parameters filled in from the model.
        run["notes"] = [note for note in stats.notes if note != str(self.plan.filled)]
        assert stats.decoding is not None
        run |= {"capture_s": stats.decoding.capture_s, "decoding": asdict(stats.decoding)}
        if stats.drafts is not None:
            run["drafts"] = asdict(stats.drafts)
        if stats.decoding.reason is not None:
            run["notes"].append(f"decoded by {stats.decoding.engine}, not as asked: {stats.decoding.reason}")
        return run

    def describe(self) -> dict[str, Any]:
        draft = {} if self.draft is None else {"draft": str(self.draft)}
        return {"kind": "kvsieve", "plan": self.plan.to_dict(), "chunk": self.chunk, "decode": self.decode, **draft}


@dataclass
class PeerMethod:
    """A press of kvpress in another interpreter; "full" is none. It does not support padding, so no batches."""

    peer: Peer
    method: str
    budget: Any
    options: dict[str, Any]
    name: str
    chunk: int | None = None
    pads: bool = False
    here: bool = False

    def run(self, prompt: TokensPrompt, new_tokens: int, work: Work | None = None) -> Run:
        length = prompt.ids.shape[1]
        entries = None if self.budget is None else self.budget.entries(length)
        run = self.peer.run(prompt.ids.tolist(), new_tokens, self.method, entries, self.options)
        run.pop("tokens")
        acted = entries is None or entries < length
        return {
            **run,
            "applied": acted,
            "notes": [] if acted else [f"nothing was dropped: {entries} of {length} may stay"],
        }

    def describe(self) -> dict[str, Any]:
        budget = None if self.budget is None else str(self.budget)
        return {"kind": "kvpress", "method": self.method, "budget": budget, **self.options, **self.peer.versions}


def peer_name(method: str) -> str:
    return _PEER + method


def is_peer(name: str) -> bool:
    return name.startswith(_PEER)


class _Stop(StoppingCriteria):
    """Stopping criterion that only ends the counting, at the first token."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.work.stop()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def measure(contender: Contender, batch: TokensPrompt, rows: list[TokensPrompt], new_tokens: int) -> dict[str, Any]:
    """Run one round of one contender: the rows one by one, and as a batch if there are several and it can."""
    # Memory of the previous contender does not count for this one.
    gc.collect()
    alone = [contender.run(row, new_tokens) for row in rows]
    return {"batch": contender.run(batch, new_tokens) if len(rows) > 1 and contender.pads else None, "alone": alone}
