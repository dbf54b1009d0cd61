"""Base of readers: the token budget, the layers it applies to, and the parameters that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.kv_rows import ReadFacts
from kvsieve.methods.base import parse_layers, skipped
from kvsieve.planning.budget import Budget
from kvsieve.planning.roles import Layers, PageBudget, Reader

LEAST = 16


@dataclass(frozen=True)
class Setting:
    """A reader's parameters for some KV rows.

    tokens: t, the budget. count: entries read exactly. page: entries per page. channels: key channels read.
    """

    tokens: int
    count: int
    page: int = 1
    channels: int = 0


@dataclass(frozen=True, kw_only=True)
class BudgetReader(Reader):
    """A reader with a budget of t entries per step, layer and KV head; subclasses implement `parameters` and `choose`.

    budget: t, at least 16, including the reads needed to choose unless a method says otherwise; a share is one of the
    prompt and the tokens expected after it. KV rows of at most t entries are read whole. skip_layers: layers with dense
    attention; see ScoredEvictor. newest: always read the newest page, but only its newest entries up to half of the
    entries read. False: the query chooses all, and may miss the current token. sparse_questions: also prefill sparsely
    a question that the plan does not evict from; otherwise prefill is dense.
    """

    budget: Budget
    skip_layers: Layers = 0
    newest: bool = True
    sparse_questions: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        self.budget.refuse_bytes(type(self).__name__, "budget", "it is what a token reads, and everything stays stored")
        object.__setattr__(self, "skip_layers", parse_layers(self, self.skip_layers))
        self.budget.refuse_fewer(LEAST, type(self).__name__, "in each step")

    def parameters(self, tokens: int, facts: ReadFacts) -> Setting:
        raise NotImplementedError

    def setting(self, facts: ReadFacts) -> Setting | None:
        if skipped(self.skip_layers, facts.layer_idx, facts.num_layers):
            return None
        return self.parameters(self.budget.entries(facts.length + facts.new_tokens, LEAST), facts)

    def reads_all(self, setting: Setting, size: int) -> bool:
        return size <= setting.tokens

    def granularity(self, setting: Setting) -> int:
        return setting.page

    def page_budget(self, setting: Setting) -> PageBudget:
        """Return what a token reads of an engine's pages, for subclasses that are a PagedReader too."""
        return PageBudget(setting.count, setting.channels or None)
