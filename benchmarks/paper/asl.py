"""ASL's experiments (Taniguchi et al., Adaptive Layer Selection): tau, budgets, and which layers are selected.

    python -m benchmarks.paper.asl [--model MODEL] [--lengths 4096,8192] [--samples 16] [--only PART] [--forecast]

The paper: Llama-3.1-8B-UL and Qwen2.5-7B, a budget of 2048 entries at up to 128K, tau 0.3, the last 8 layers compared,
from a third of the depth on. Here budgets are shares of the prompt; at 4K, 20% are 819 entries.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import torch

import kvsieve
from benchmarks.paper.common import (
    Found,
    Part,
    Row,
    Shape,
    Study,
    Table,
    against,
    at_lengths,
    main,
    named,
    published,
)
from benchmarks.paper.verdicts import (
    LATER,
    NOT,
    OUT,
    SCORES,
    Case,
    Verdict,
    apart,
    compared,
    no_worse,
    paired,
    repeated,
)
from kvsieve.core.scoring import pooled_mass
from kvsieve.lab.eval.cells import MethodSetting
from kvsieve.lab.eval.intervals import FEWEST_DIFFERENT
from kvsieve.shared.prompt import read_shared

TAUS = (0.2, 0.3, 0.4, 0.5, 0.6)
BUDGETS = ("5%", "10%", "20%", "40%")
BUDGET = "20%"
LOOKBACK, FIRST = (4, 8, 16), (1 / 6, 1 / 3, 1 / 2)
TASKS = ("ruler_niah_single_2", "ruler_qa_1", "kv")
TRACE_TASKS = (*TASKS, "needle", "ruler_niah_multikey_1", "ruler_niah_single_3", "passkey64", "ruler_vt")

# RULER at 128K, Qwen2.5-7B, tables 3 and 9.
PAPER = {
    "full": "82.3",
    "snapkv 20%": "65.0",
    "fastkv 20%": "59.1",
    "fastkv 20%, full before": "59.1",
    "gemfilter 20%": "56.7",
    "asl 20%": "66.4",
    "asl 20%, full before": "74.2",
    "asl two passes 20%": "62.5",
}
PAPER_TAU = {
    0.2: (64.9, 78.2, 0.90),
    0.3: (66.5, 74.2, 0.83),
    0.4: (66.9, 70.5, 0.78),
    0.5: (65.8, 67.5, 0.75),
    0.6: (62.1, 63.3, 0.73),
}
PAPER_TAUS = {f"tau {tau}": f"{now}, TTFT {ttft}" for tau, (now, _, ttft) in PAPER_TAU.items()}
PAPER_TAUS |= {f"tau {tau}, full before": str(before) for tau, (_, before, _) in PAPER_TAU.items()}
# RULER at 8K and 16K, Qwen2.5-7B, table 3.
PAPER_AS_RUN = {
    "full": (93.0, 92.7),
    "asl": (77.5, 75.5),
    "fastkv": (79.7, 75.3),
    "snapkv": (77.9, 75.3),
    "asl, full before": (91.2, 88.0),
    "fastkv, full before": (80.6, 75.8),
    "asl two passes": (70.7, 67.9),
    "gemfilter": (67.7, 66.9),
}
# Tables 4 and 5, 128K.
PAPER_TIMES = {
    "fastkv 20%": "TTFT 0.54, TPOT 0.15",
    "asl 20%": "TTFT 0.81, TPOT 0.15",
    "gemfilter 20%": "TTFT 0.53, TPOT 0.11",
    "asl two passes 20%": "TTFT 0.95, TPOT 0.13",
    "snapkv 20%": "TTFT 1.01, TPOT 0.15",
}


def compare(shape: Shape, budget: str) -> list[MethodSetting]:
    """The methods of tables 2 and 3 at one budget: what goes on and what is kept are the same share."""
    fixed = {"tsp_layer": shape.half, "tsp_rate": budget, "window": 32}
    return [
        named(f"asl {budget}", "asl", budget=budget),
        named(f"asl {budget}, full before", "asl", budget=budget, full_before=True),
        named(f"fastkv {budget}", "fastkv", budget=budget, **fixed),
        named(f"fastkv {budget}, full before", "fastkv", budget="100%", **fixed),
        named(f"snapkv {budget}", "snapkv", budget=budget, window=32),
    ]


def two_pass(shape: Shape, budget: str) -> list[MethodSetting]:
    return [
        named(f"gemfilter {budget}", "gemfilter", budget=budget, layer=shape.half),
        named(f"asl two passes {budget}", "asl", budget=budget, two_pass=True),
    ]


def budgets(shape: Shape, length: int) -> list[MethodSetting]:
    return [*(each for budget in BUDGETS for each in compare(shape, budget)), *two_pass(shape, BUDGET)]


def taus(shape: Shape, length: int) -> list[MethodSetting]:
    return [
        named(f"tau {tau}{after}", "asl", budget=BUDGET, tau=tau, full_before=bool(after))
        for tau in TAUS
        for after in ("", ", full before")
    ]


def entries(length: int) -> int:
    """The paper's 2048 entries from 16K on, 5% of shorter prompts, at least 64: few enough for ranks to settle."""
    return 2048 if length >= 16384 else max(length // 20, 64)


def as_run(shape: Shape, length: int) -> list[MethodSetting]:
    """Tables 2 and 3 as the paper ran them (C.2): window 32, kernel 7 and average pooling, also FastKV and SnapKV."""
    budget = entries(length)
    pooled = {"window": 32, "kernel": 7, "pooling": "avg"}
    fixed = {"tsp_layer": shape.half, "tsp_rate": budget, **pooled}
    before = published("fastkv, full before", "fastkv", budget="100%", **fixed)
    return [
        published("asl", "asl", budget=budget),
        published("fastkv", "fastkv", budget=budget, **fixed),
        published("snapkv", "snapkv", budget=budget, **pooled),
        published("asl, full before", "asl", budget=budget, full_before=True),
        # A results directory tells settings apart by label and budget; this one's parameters differ by length.
        replace(before, budget=str(budget)),
        published("asl two passes", "asl", budget=budget, two_pass=True),
        published("gemfilter", "gemfilter", budget=budget, layer=shape.half),
    ]


def pyramid(shape: Shape, length: int) -> list[MethodSetting]:
    return [
        named(f"asl {BUDGET}", "asl", budget=BUDGET),
        named("pyramidinfer", "pyramidinfer", rate=0.9, budget=BUDGET),
    ]


def times(shape: Shape, length: int) -> list[MethodSetting]:
    swept = [each for each in taus(shape, length) if each.label != "tau 0.3"]
    made = [*compare(shape, BUDGET), *two_pass(shape, BUDGET), *swept]
    return [each for each in made if "before" not in each.label]


def trace(model: Any, ids: Any) -> Row:
    """Relative rank variance of every layer from ASL's first on: tau=0 never selects, and every tau can be read off."""
    plan = kvsieve.plan("asl", budget=BUDGET, tau=0, paper=True)
    with kvsieve.attach(model, plan) as sieve:
        report = sieve.generate(ids, max_new_tokens=1, do_sample=False).stats.report
    first = plan.propagate.source(model.config.get_text_config().num_hidden_layers)
    variances = [round(each, 4) for each in report["relative_variance"][0]]
    return {"label": "trace", "first": first, "relative_variance": variances}


def lookback(model: Any, ids: Any) -> Row:
    """Figure 8: rank variances of one reading for several L_obs, from which every L_min and tau can be read off.

    Window, kernel and pooling are the paper's, k is `entries`; variance[L_obs] starts at layer L_obs - 1.
    """
    seen = read_shared(model, None, ids, window=32).seen
    top, ranks = entries(ids.shape[1]) - 32, []
    # The last layer has none behind it.
    for _, ctx in sorted(seen.items())[:-1]:
        order = pooled_mass(ctx, 32, 7, "avg")[0].mean(0).argsort(descending=True, stable=True)
        ranks.append(torch.empty(len(order)).scatter_(0, order.cpu(), torch.arange(1.0, len(order) + 1)))
    variance: dict[str, list[float]] = {}
    for observed in LOOKBACK:
        windows = (torch.stack(ranks[at : at + observed]) for at in range(len(ranks) - observed + 1))
        each = [window[:, (window <= top).any(0)].double().var(0, correction=0).mean().item() for window in windows]
        variance[str(observed)] = [round(value, 2) for value in each]
    return {"label": "lookback", "k": top + 32, "variance": variance}


def settles(row: Row, observed: int, first: int, tau: float = 0.3) -> int | None:
    """The layer at which ranks have settled, by L_obs and L_min; None where they never do."""
    start = max(first - observed + 1, 0)
    variance = row["variance"][str(observed)][start:]
    return next((start + observed - 1 + at for at, each in enumerate(variance) if each < tau * variance[0]), None)


def layers_of(row: Row) -> int:
    """Layers that figure 8's ranks are of: all but the last."""
    return len(row["variance"][str(LOOKBACK[0])]) + LOOKBACK[0] - 1


def first_at(row: Row, share: float) -> int:
    """L_min at a share of the depth."""
    return round(layers_of(row) * share)


def _lookback_table(found: Found) -> Table:
    rows = []
    for length in found.lengths("lookback"):
        mine = found.rows("lookback", length)
        for observed in (each for each in LOOKBACK if mine[0]["variance"][str(each)]):
            layers = [[settles(row, observed, first_at(row, share)) for row in mine] for share in FIRST]
            rows.append([str(length), str(observed), str(len(mine)), *map(_median_layer, layers)])
    head = ["prompt tokens", "L_obs", "n", *(f"L_min {share:.2f} of the depth" for share in FIRST)]
    return "figure 8: layer at which ranks settle, tau 0.3: median (times), and how often none", head, rows


def selected(row: Row, tau: float) -> int | None:
    """The layer that a tau selects; None for none, where the last one cannot."""
    for at, variance in enumerate(row["relative_variance"]):
        if variance < tau:
            return int(row["first"]) + at
    return None


def depth_of(row: Row, tau: float) -> float:
    """Layers that read everything."""
    layer = selected(row, tau)
    return most_layers(row) if layer is None else layer + 1


def most_layers(row: Row) -> int:
    """All layers that there are to select from, and those before."""
    return len(row["relative_variance"]) + row["first"] + 1


def tables(found: Found) -> list[Table]:
    rows = []
    for length in found.lengths("trace"):
        of_length = found.rows("trace", length)
        for task in dict.fromkeys(row["task"] for row in of_length):
            mine = [row for row in of_length if row["task"] == task]
            layers = [[selected(row, tau) for row in mine] for tau in TAUS]
            rows.append([str(length), task, str(len(mine)), *map(_median_layer, layers)])
    head = ["prompt tokens", "task", "n", *(f"tau {tau}" for tau in TAUS)]
    return [("selected layers: median (times), and how often none", head, rows), _lookback_table(found)]


def _median_layer(layers: list[int | None]) -> str:
    found = [layer for layer in layers if layer is not None]
    none = len(layers) - len(found)
    return (f"{median(found):g} ({len(found)})" if found else "") + (f" none {none}" if none else "")


def verdicts(found: Found) -> list[Verdict]:
    def differ(ours: str, theirs: str, metric: str = "score") -> dict[int, Case | None]:
        # Two passes select the layer as one does, and always leave tokens: whether a layer settled shows in one.
        return found.differ("published", ours, theirs, metric, ours.replace(" two passes", ""))

    pairs = {
        "FastKV at the same budget": ("asl", "fastkv"),
        "FastKV with everything kept before the selection layer": ("asl, full before", "fastkv, full before"),
        "GemFilter with two passes": ("asl two passes", "gemfilter"),
    }
    return [
        _harder(found),
        _by_task(found),
        *(
            compared(
                f"outperforms {what}",
                against(PAPER_AS_RUN, ours, theirs),
                differ(ours, theirs),
                abstract=True,
            )
            for what, (ours, theirs) in pairs.items()
        ),
        _budget_met(found),
        _same(found, "tpot_s", "keeps FastKV's decoding speed", "TPOT 0.15 against 0.15"),
        _same(found, "kv_bytes", "keeps FastKV's KV reduction", "0.2 GB against 0.2 GB"),
        compared(
            "can be used with SnapKV: no worse than SnapKV alone",
            against(PAPER_AS_RUN, "asl", "snapkv"),
            differ("asl", "snapkv"),
            judge=no_worse,
            abstract=True,
        ),
        _tau_time(found),
        *(
            compared(f"the same by KL over the answer: closer to full KV than {what}", "", differ(*pair, "kl"))
            for what, pair in pairs.items()
        ),
    ]


# Key-value retrieval against a question and a single needle.
HARD, EASY = ("kv",), ("ruler_qa_1", "ruler_niah_single_2")


def _harder(found: Found) -> Verdict:
    losses = {}
    for length in found.lengths("budgets"):
        loss = []
        for tasks in (HARD, EASY):
            full, mine = (found.values("budgets", each, "score", length, tasks) for each in ("full", "fastkv 20%"))
            loss.append({key: full[key] - mine[key] for key in mine if key in full})
        acts = found.acts("budgets", "fastkv 20%", length)
        hard, easy = loss
        losses[length] = apart([*hard.values()], [*easy.values()], SCORES, sum(acts[key] for key in hard))
    return compared(
        "a fixed layer's accuracy varies with the task, worse for harder ones: FastKV (20%) loses more of full "
        "KV's score on key-value retrieval than on a question and a needle",
        "Retr.KV 1.0 of 66.4, En.QA 12.15 of 12.63",
        losses,
        abstract=True,
    )


def _by_task(found: Found) -> Verdict:
    """Layers that read everything, by figure 8's reading with the paper's tau, L_obs 8 and L_min a third."""
    cases = {}
    for length in found.lengths("lookback"):
        rows = [row for row in found.rows("lookback", length) if row["variance"]["8"]]
        layers = [(row["task"], settles(row, 8, first_at(row, 1 / 3)), layers_of(row) + 1) for row in rows]
        hard, easy = (
            [float(depth if layer is None else layer + 1) for task, layer, depth in layers if task in tasks]
            for tasks in (HARD, EASY)
        )
        settled = sum(layer is not None for task, layer, _ in layers if task in HARD)
        cases[length] = apart(hard, easy, (0, max((depth for *_, depth in layers), default=1)), settled)
    claim = "chooses the layer by the task: later for key-value retrieval than for a question and a needle (tau 0.3)"
    return compared(claim, "KV retrieval and code debugging deepest", cases, abstract=True)


def _budget_met(found: Found) -> Verdict:
    claim, rule = "meets the budget that was asked for", "no sample above it by more than an entry or the window"
    rows = [row for row in found.rows("budgets") if row["label"] in {f"asl {budget}" for budget in BUDGETS}]
    if not rows:
        return Verdict(claim, "exactly k per layer", LATER, "", rule, abstract=True)
    over = [
        row["kv_entries"] - max(float(row["label"].split()[1][:-1]) / 100 * row["prompt_tokens"], 33) for row in rows
    ]
    shown = f"most above: {max(over):.2f} entries, n={len(rows)}"
    return Verdict(claim, "exactly k per layer", OUT if max(over) <= 1 else NOT, shown, rule, abstract=True)


def _same(found: Found, quantity: str, claim: str, paper: str) -> Verdict:
    ratios = found.ratios("asl 20%", quantity, to="fastkv 20%")
    rule = f"over FastKV's: within 10% in each of {FEWEST_DIFFERENT} repeats or more at the longest prompt"
    return repeated(claim, paper, ratios, rule, lambda ratio: abs(ratio - 1) <= 0.1)


def _tau_time(found: Found) -> Verdict:
    cases = {}
    for length in found.lengths("trace"):
        mine = found.rows("trace", length)
        deep = {tau: {(row["task"], row["sample"]): depth_of(row, tau) for row in mine} for tau in (0.2, 0.6)}
        settled = {(row["task"], row["sample"]): selected(row, 0.6) is not None for row in mine}
        # A larger tau never selects a later layer.
        cases[length] = paired(deep[0.2], deep[0.6], (0, max(map(most_layers, mine))), settled)
    claim = "table 9: a larger tau is faster: layers that read everything at tau 0.2, less those at 0.6"
    return compared(claim, "TTFT 0.90 at 0.2, 0.73 at 0.6", cases)


STUDY = Study(
    "asl",
    "ASL",
    (
        Part("trace", "rank variance and selected layers per task", TRACE_TASKS, measure=trace),
        Part(
            "published",
            "the paper's tables with its kernel, 5% of a prompt or 2048 entries",
            TASKS,
            as_run,
            paper=at_lengths(PAPER_AS_RUN),
        ),
        Part("lookback", "rank variance by L_obs and L_min", TRACE_TASKS, measure=lookback),
        Part("budgets", "ASL and others at four budgets", TASKS, budgets, paper=PAPER),
        Part("taus", "tau at one budget", TASKS, taus, paper=PAPER_TAUS),
        Part("pyramid", "PyramidInfer beside ASL", TASKS, pyramid),
        Part("times", "time to the first token by tau and method", settings=times, times=True, paper=PAPER_TIMES),
    ),
    tables,
    verdicts,
)

if __name__ == "__main__":
    main(STUDY)
