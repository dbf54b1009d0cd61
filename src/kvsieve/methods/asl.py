"""ASL: Adaptive Layer Selection for Layer-Wise Token Pruning in LLM Inference (section 4, D.2, algorithms 1-2).

Like FastKV, except that the layer after which only salient tokens are propagated depends on the input. Every layer
ranks the tokens by pooled window mass, summed over all heads. From layer L_min, V is the variance of the ranks over the
last L_obs layers, averaged over the union of their top tokens. The first layer with V, relative to its value at L_min,
below tau is the selection layer: its top tokens and the window are propagated. If there is none, all tokens are.

Every layer keeps `budget` entries (group-shared SnapKV with the same window), so that deep layers keep all tokens they
got; `full_before=True` evicts nothing ("full before selection").

`two_pass=True` is the variant with a first pass up to the selection layer, or the last layer if there is none, and a
prefill of the selected ids as a new prompt, as in GemFilter; `rule="gemfilter"` also selects by GemFilter's rule.

The defaults are the paper's: L_obs 8, tau 0.3, L_min a third of the depth (10 of 32, 9 of 28), window 32, kernel 7.

Differences from the reference: rows of a batch decide separately, and one that has selected waits with filler for the
others; variance zero at L_min selects where it stays zero; only L_obs rank vectors are stored; GemFilter's rule always
keeps the last token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvsieve.core.scoring import Kernel, Pool, pooled_mass, width
from kvsieve.core.selection import pack, top_mask
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import apply_protection, check_int, check_kernel
from kvsieve.methods.gemfilter import GemFilter
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning import defaults
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import Parameters, register_method
from kvsieve.planning.roles import Propagator
from kvsieve.types import LayerContext, Selection

Rule = Literal["asl", "gemfilter"]


@dataclass(frozen=True, kw_only=True)
class AdaptiveTSP(Propagator, heads="all", query_aware=True):
    """Token-selective propagation from the layer where ranks have settled.

    rate: tokens propagated, including the window; a Budget, a share or a number of the turn's prompt. tau: a layer with
    a relative variance below this selects. observed: L_obs, layers with compared ranks. first: L_min, None for a third
    of the depth, at least ``observed - 1``. window, kernel, pooling: as SnapKV's. two_pass: prefill the selected tokens
    as a new prompt. rule: selects them with two passes: "asl" or "gemfilter".
    """

    rate: Budget
    tau: float = 0.3
    observed: int = 8
    first: int | None = None
    window: int = 32
    kernel: Kernel = 7
    pooling: Pool = "avg"
    two_pass: bool = False
    rule: Rule = "asl"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", Budget.parse(self.rate, "rate"))
        if self.rule == "gemfilter" and not self.two_pass:
            raise PlanError("AdaptiveTSP: rule='gemfilter' chooses what is read again, so it needs two_pass=True")
        if not self.tau >= 0:
            raise PlanError(f"AdaptiveTSP: tau must be at least 0, got {self.tau!r}")
        check_int(self, "observed", self.observed, 2)
        check_int(self, "window", self.window, 1)
        check_kernel(self, self.kernel)
        if self.first is not None:
            check_int(self, "first", self.first, 0)
            if self.first < self.observed - 1:
                raise PlanError(f"AdaptiveTSP: first={self.first} must be at least observed - 1 = {self.observed - 1}")

    def source(self, num_layers: int) -> int:
        first = max(num_layers // 3, self.observed - 1) if self.first is None else self.first
        if first >= num_layers - 1:
            raise PlanError(
                f"ASL's first layer {first} is outside the model: it has {num_layers} layers, so it must lie in "
                f"{self.observed - 1}..{num_layers - 2}; set first= or a smaller observed="
            )
        return first

    def reread_tokens(self, length: int) -> int:
        """Return the tokens propagated, or prefilled again, of a prompt of `length`: at least the window plus one."""
        return min(length, self.rate.entries(length, self.window + 1))

    def select(self, ctx: LayerContext) -> Selection | None:
        offered = ctx.offered_counts
        rows = ctx.shared.setdefault("asl", [_RowTrace(n, self.reread_tokens(n)) for n in offered])
        open_rows = [row for row in rows if row.layer is None and row.kept < row.length]
        # No layer follows the last one; a second pass needs the last layer that can choose.
        last = ctx.layer_idx == (ctx.layers[-1] if ctx.layers else ctx.num_layers - 1)
        if not open_rows or (ctx.layer_idx == ctx.num_layers - 1 and not self.two_pass):
            return None
        first = ctx.keys.shape[2] - ctx.offered
        kernel = width(self.kernel, map(self.rate.entries, ctx.offered_counts))
        saliency = ctx.ranks.mean(pooled_mass(ctx, self.window, kernel, self.pooling).mean(1)[:, first:])
        window = ctx.offered - saliency.shape[1]
        chosen = []
        for index, row in enumerate(rows):
            if row in open_rows:
                scores = saliency[index, saliency.shape[1] - (row.length - window) :]
                if self._observe(row, scores, row.kept - window, ctx):
                    chosen.append(index)
                elif last and self.two_pass:
                    # A second pass needs a choice even if ranks have not settled.
                    row.layer = ctx.layer_idx
                    chosen.append(index)
        ctx.shared["report"] = _report(rows, self)
        if not chosen:
            return None
        mask = torch.zeros(len(rows), ctx.offered, dtype=torch.bool, device=ctx.keys.device)
        for index, count in enumerate(offered):
            mask[index, ctx.offered - count :] = True
        kept = tuple(row.kept for row in rows)
        if self.rule == "gemfilter":
            best, counts = GemFilter(budget=self.rate).best(ctx, kept)
        else:
            ranked = torch.nn.functional.pad(saliency, (0, window), value=float("inf"))
            # Protected tokens are propagated as well, beyond `rate` if necessary.
            ranking, counts = apply_protection(
                ctx, ranked.masked_fill(~mask, float("-inf"))[:, None], kept, insist=True
            )
            best = top_mask(ranking[:, 0], counts)
        for index in chosen:
            rows[index].tokens = best[index]
            rows[index].kept = counts[index]
        if self.two_pass and any(row.layer is None and row.kept < row.length for row in rows):
            return None
        # Columns of this layer: with two passes the prompt's, else of a row that selects here.
        for index in range(len(rows)) if self.two_pass else chosen:
            tokens = rows[index].tokens
            mask[index] = mask[index] if tokens is None else tokens
        lengths = tuple(row.kept if row.layer is not None else n for row, n in zip(rows, offered, strict=True))
        return pack(mask, lengths)

    def _observe(self, row: _RowTrace, scores: Tensor, top: int, ctx: LayerContext) -> bool:
        """Record a layer's ranks; return whether this layer selects."""
        ranks = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
        order = scores.argsort(descending=True, stable=True)
        ranks[order] = torch.arange(1.0, len(scores) + 1, device=scores.device)
        row.ranks = [*row.ranks, ranks][-self.observed :]
        if ctx.layer_idx < self.source(ctx.num_layers) or len(row.ranks) < self.observed:
            return False
        recent = torch.stack(row.ranks)
        variance = recent[:, (recent <= top).any(0)].double().var(0, correction=0).mean().item()
        row.base = variance if row.base is None else row.base
        relative = variance / row.base if row.base else (0.0 if variance == 0 else float("inf"))
        row.trace.append(relative)
        if relative >= self.tau:
            return False
        row.layer = ctx.layer_idx
        row.settled = True
        row.ranks = []
        return True


@dataclass(eq=False)
class _RowTrace:
    """State of one sequence.

    Attributes:
        length: tokens without padding.
        kept: tokens to propagate.
        ranks: of the last layers.
        base: the first variance, the unit of `trace`.
        trace: relative variances by layer.
        layer: the selection layer, None before.
        settled: ranks had settled there.
        tokens: for two passes, bool [length], the selected ones.
    """

    length: int
    kept: int
    ranks: list[Tensor] = field(default_factory=list)
    base: float | None = None
    trace: list[float] = field(default_factory=list)
    layer: int | None = None
    settled: bool = False
    tokens: Tensor | None = None


def _report(rows: list[_RowTrace], method: AdaptiveTSP) -> dict[str, object]:
    report: dict[str, object] = {
        "selection_layer": [row.layer for row in rows],
        "relative_variance": [row.trace for row in rows],
    }
    if method.two_pass:
        report["settled"] = [row.settled for row in rows]
    elif all(row.layer is None for row in rows):
        report["idle"] = f"every token went through all layers: the relative variance never fell below tau={method.tau}"
    return report


@register_method(
    "asl",
    title="ASL",
    paper="Taniguchi et al., Adaptive Layer Selection",
    phase="prefill, end of prompt",
    derive=defaults.asl,
)
@dataclass(frozen=True, kw_only=True)
class ASLParameters(Parameters):
    """FastKV with the layer chosen per prompt, by the variance of token ranks."""

    budget: Budget | str | int | float = 2048
    tau: float = 0.3
    observed: int = 8
    first: int | None = None
    window: int = 32
    kernel: Kernel = 7
    pooling: Pool = "avg"
    full_before: bool = False
    two_pass: bool = False
    rule: Rule = "asl"

    def plan(self) -> Plan:
        if self.two_pass and self.full_before:
            raise PlanError("ASL: full_before=True keeps what two_pass=True does not store; leave one of them out")
        whole = self.full_before or self.two_pass
        return Plan(propagate=self.role(AdaptiveTSP, rate=self.budget), evict=None if whole else self.role(SnapKV))
