"""Base of readers: the token budget, the layers it applies to, and the parameters that follow from it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from kvsieve.core.kv_rows import ReadFacts
from kvsieve.errors import PlanError, short
from kvsieve.methods.base import parse_layers, skipped
from kvsieve.planning.budget import Budget
from kvsieve.planning.roles import Layers, PageBudget, Reader, check_layers

LEAST = 16


@dataclass(frozen=True)
class Setting:
    """A reader's parameters for some KV rows.

    tokens: t, the budget. count: entries read exactly. page: entries per page. channels: key channels read. dense: the
    layer chooses for others only, and attends to everything.
    """

    tokens: int
    count: int
    page: int = 1
    channels: int = 0
    dense: bool = False


@dataclass(frozen=True, kw_only=True)
class BudgetReader(Reader):
    """A reader with a budget of t entries per step, layer and KV head; subclasses implement `parameters` and `choose`.

    budget: t, at least 16, including the reads needed to choose unless a method says otherwise; a share is one of the
    prompt and the tokens expected after it. KV rows of at most t entries are read whole. skip_layers: layers with dense
    attention; see ScoredEvictor. newest: always read the newest page, but only its newest entries up to half of the
    entries read. False: the query chooses all, and may miss the current token. sparse_questions: also prefill sparsely
    a question that the plan does not evict from; otherwise prefill is dense.

    share: layers that read one choice, made by the first of them: 4 for every four layers, or the layers that choose,
    e.g. (0, 4, 9), as text "0/4/9". Layers that share keep no metadata. After an evictor, entries of the same token
    correspond, and the others in their order; a layer with another number of entries chooses for itself.
    """

    budget: Budget
    skip_layers: Layers = 0
    newest: bool = True
    sparse_questions: bool = False
    share: Layers = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        self.budget.refuse_bytes(type(self).__name__, "budget", "it is what a token reads, and everything stays stored")
        object.__setattr__(self, "skip_layers", parse_layers(self, self.skip_layers))
        self.budget.refuse_fewer(LEAST, type(self).__name__, "in each step")
        object.__setattr__(self, "share", parse_share(self, self.share))

    def check(self, num_layers: int) -> None:
        check_layers(self, "skip_layers", self.skip_layers, num_layers)
        if isinstance(self.share, tuple):
            check_layers(self, "share", self.share, num_layers)

    @property
    def shares(self) -> bool:
        return self.share != 1

    def anchor(self, layer_idx: int, num_layers: int) -> int:
        return anchors(self.share, self.skip_layers, num_layers)[layer_idx]

    def attends_to_all(self, setting: Setting) -> bool:
        return setting.dense

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


def parse_share(owner: object, value: Any) -> int | tuple[int, ...]:
    """Parse `share`: how many layers share a choice, or which layers choose. Raises PlanError."""
    layers: Any = value
    try:
        if isinstance(value, str):
            layers = tuple(int(layer) for layer in value.split("/") if layer.strip())
        if isinstance(layers, (list, tuple)) and layers and all(type(layer) is int and layer >= 0 for layer in layers):
            return tuple(sorted(set(layers)))
    except ValueError:
        pass
    if type(value) is int and value >= 1:
        return value
    raise PlanError(
        f"{type(owner).__name__}: share must be a number of layers, at least 1, or the layers that choose, such as "
        f"(0, 4, 9), as text '0/4/9'; got {short(value)}"
    )


@functools.lru_cache(maxsize=64)
def anchors(share: int | tuple[int, ...], skip: int | tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Return the layer whose choice each layer reads; layers in `skip` do not count."""
    found = list(range(num_layers))
    if isinstance(share, tuple):
        for layer in found:
            found[layer] = max((anchor for anchor in share if anchor <= layer), default=layer)
        return tuple(found)
    sparse = [layer for layer in found if not skipped(skip, layer, num_layers)]
    for number, layer in enumerate(sparse):
        found[layer] = sparse[number - number % share]
    return tuple(found)
