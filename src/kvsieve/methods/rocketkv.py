"""RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression (arXiv 2502.14051).

Stage 1 evicts at the end of the prompt: SnapKV with one score per KV head, max-pooled over 63 entries. Stage 2 is
sparse attention over the rest during decode: hybrid sparse attention (hsa.py). The budget t is the number of entries
read per KV head and step, including estimates; it determines how the compression S / t is split between the stages
(`hsa.stored_entries`).

RocketKV-MT (section 3.4), for conversations, drops nothing: in each turn, stage 1 limits the entries that stage 2 may
read.

``paper=True``: no entry is forced (`newest=False`), and RocketKV-MT observes with 128 queries, as the paper does in
conversations (appendix A.3). RocketKV observes with its 32; in a conversation the paper gives it 128 as well
(`window=128`).

Differences from the reference: the first token after a prompt comes from dense attention; budgets follow the
conversation's length in every turn; contexts within the budget are read whole; the newest page is always read, unless
``paper=True``; attention weights are float32, ties go to the lower slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.scoring import Pool
from kvsieve.methods.adakv import GroupedSnapKV
from kvsieve.methods.hsa import HSA, stored_entries
from kvsieve.methods.per_turn import PerTurn
from kvsieve.methods.readers import LEAST
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import Parameters, register_method


@dataclass(frozen=True, kw_only=True)
class RocketEviction(GroupedSnapKV, heads="own", query_aware=True, fixed_counts=True):
    """Stage 1. budget: t, entries read per step; `stored_entries` minus the tokens to come are kept.

    It is at least 16; the window and one more entry are kept in any case.
    """

    kernel: int = 63

    def __post_init__(self) -> None:
        super().__post_init__()
        self.budget.refuse_bytes("RocketKV", "budget", "it is what a token reads, and what is stored follows from it")

    @property
    def least_budget(self) -> int:
        return LEAST

    @property
    def why_minimum(self) -> str:
        return "estimates and exact reads share them"

    def requested(self, length: int, new_tokens: int = 0) -> int:
        return self.entries(length, new_tokens)

    def entries(self, length: int, new_tokens: int = 0) -> int:
        tokens = self.budget.entries(length + new_tokens, LEAST)
        return max(stored_entries(length, new_tokens, tokens) - new_tokens, self.minimum, self.budget.floor)


@register_method("rocketkv", title="RocketKV", paper="arXiv 2502.14051", phase="decode")
@dataclass(frozen=True, kw_only=True)
class RocketKVParameters(Parameters):
    """Evict by SnapKV with wide pooling, then read few of the entries left per token; `budget` covers both."""

    budget: Budget | str | int | float = 512
    window: int = 32
    kernel: int = 63
    pooling: Pool = "max"
    skip_layers: int | tuple[int, ...] | str = 0
    newest: bool = True
    sparse_questions: bool = False

    def plan(self) -> Plan:
        return Plan(evict=self.role(RocketEviction), read=self.role(HSA, after_eviction=True))


@register_method("rocketkv-mt", title="RocketKV-MT", paper="arXiv 2502.14051", phase="decode")
@dataclass(frozen=True, kw_only=True)
class RocketKVMTParameters(RocketKVParameters):
    """RocketKV for conversations: evict nothing; each turn's first stage limits the entries it may read."""

    def plan(self) -> Plan:
        plan = super().plan()
        assert plan.evict is not None
        return Plan(evict=PerTurn(base=plan.evict), read=plan.read)
