"""FastKV's experiments (arXiv 2502.01068): where and how much may be propagated, and what that is worth.

    python -m benchmarks.paper.fastkv [--model MODEL] [--lengths 4096,8192] [--samples 16] [--only PART] [--forecast]

The paper: LLaMA-3.1-8B, 32 layers, TSP layer 15 (0-based, half the depth), TSP rate 20%, window 8, 10% of the entries
kept. Here half the depth, and shares of it for the sweep.
"""

from __future__ import annotations

from typing import Any

from benchmarks.paper.common import (
    Found,
    Part,
    Row,
    Shape,
    Study,
    Table,
    against,
    at_lengths,
    column_means,
    main,
    named,
    number,
    published,
)
from benchmarks.paper.verdicts import IMPOSSIBLE, Case, Verdict, compared, mean, no_worse, repeated
from kvsieve.core.scoring import pooled_mass
from kvsieve.lab.eval.cells import MethodSetting
from kvsieve.lab.eval.intervals import FEWEST_DIFFERENT
from kvsieve.shared.prompt import read_shared

DEPTHS = (1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6)
RATES = ("5%", "10%", "20%", "40%")
WINDOW = {"window": 8}
KEPT, RATE = "10%", "20%"
TASKS = ("ruler_niah_single_2", "ruler_niah_multikey_1", "kv")

# LongBench averages of table 2 (LLaMA-3.1-8B); the needle's of table 4; RULER's of table 3.
PAPER = {
    "full": "LongBench 50.19, needle 99.0, RULER 86.0",
    "snapkv 10%": "48.73, 99.0, 73.6",
    "streamingllm 10%": "42.85, 33.5, 18.6",
    "gemfilter 13/32, 10%": "38.61, 95.8, 69.6",
    "tsp at 1/2": "48.47, 99.9, 75.6",
}
# RULER at 8K and 16K, table 3.
PAPER_AS_RUN = {
    "fastkv 10%": (77.8, 77.3),
    "snapkv 10%": (75.6, 76.8),
    "gemfilter 10%": (69.7, 68.2),
    "streamingllm 10%": (15.0, 21.5),
}
PAPER_TIMES = {"tsp at 1/2": "TTFT 0.55 (1.82x), decoding 0.35 (2.87x), at 128K on an A100"}


def tsp(shape: Shape, depth: float, rate: str = RATE, kept: str = KEPT, label: str = "") -> MethodSetting:
    label = label or f"tsp at {share(depth)}"
    return named(label, "fastkv", budget=kept, tsp_layer=shape.at(depth), tsp_rate=rate, **WINDOW)


def gem(shape: Shape, depth: float, rate: str = RATE) -> MethodSetting:
    return named(f"gemfilter at {share(depth)}", "gemfilter", budget=rate, layer=shape.at(depth))


def share(depth: float) -> str:
    return next((f"{a}/{b}" for b in (2, 3, 4, 6, 8) for a in range(1, b) if abs(a / b - depth) < 1e-6), f"{depth:.2f}")


def layers(shape: Shape, length: int) -> list[MethodSetting]:
    return [
        named("snapkv 10%", "snapkv", budget=KEPT, **WINDOW),
        named("streamingllm 10%", "streamingllm", budget=KEPT),
        *(tsp(shape, depth) for depth in DEPTHS),
        tsp(shape, 1 / 2, kept="20%", label="tsp at 1/2, KV 20%"),
        *(gem(shape, depth) for depth in DEPTHS[1:4]),
        named("gemfilter 13/32, 10%", "gemfilter", budget=KEPT, layer=shape.layers * 13 // 32),
    ]


def rates(shape: Shape, length: int) -> list[MethodSetting]:
    swept = [tsp(shape, 1 / 2, rate, label=f"tsp rate {rate}") for rate in RATES]
    return [*swept, named("tsp rate 100%", "snapkv", budget=KEPT, **WINDOW)]


def as_run(shape: Shape, length: int) -> list[MethodSetting]:
    """Table 3 as the paper ran it: window 8, kernel 7 and max pooling, which its code gives SnapKV as well.

    H2O is left out: it reads attention that costs as much as the prompt again.
    """
    return [
        published("fastkv 10%", "fastkv", budget=KEPT, tsp_layer=shape.half, tsp_rate=RATE),
        published("snapkv 10%", "snapkv", budget=KEPT, **WINDOW),
        published("gemfilter 10%", "gemfilter", budget=KEPT, layer=shape.layers * 13 // 32),
        published("streamingllm 10%", "streamingllm", budget=KEPT),
    ]


def times(shape: Shape, length: int) -> list[MethodSetting]:
    extra = [each for each in rates(shape, length) if each.label != f"tsp rate {RATE}"]
    return [each for each in layers(shape, length) if "20%" not in each.label] + extra


def overlap(model: Any, ids: Any) -> Row:
    """Figure 1: how many of a layer's most attended tokens are another's, and how much mass they have.

    By the last 32 queries, mean over heads; 512 tokens, or an eighth of the prompt if that is less.
    """
    seen = read_shared(model, None, ids, window=32).seen
    masses = [pooled_mass(ctx, 32, 1, "avg")[0].float().mean(0) for _, ctx in sorted(seen.items())]
    top = min(512, len(masses[0]) // 8)
    best = [mass.topk(top).indices for mass in masses]
    sets = [set(each.tolist()) for each in best]
    common = [[round(len(one & other) / top, 3) for other in sets[i + 1 :]] for i, one in enumerate(sets)]
    mass = [round((mass[at].sum() / mass.sum()).item(), 4) for mass, at in zip(masses, best, strict=True)]
    return {"label": "overlap", "top": top, "overlap": common, "mass": mass, "tokens": len(masses[0])}


def by_distance(row: Row, late: bool) -> list[float]:
    """Mean overlap at each distance between two layers of the first or of the second half of the depth."""
    depth, pairs = len(row["overlap"]), row["overlap"]
    span = range(depth // 2, depth) if late else range(depth // 2)
    found = []
    for distance in range(1, len(span)):
        values = [pairs[at][distance - 1] for at in span if at + distance <= span[-1]]
        found.append(sum(values) / len(values))
    return found


def curves(found: Found, length: int) -> dict[str, list[float]]:
    rows = found.rows("overlap", length)
    halves = (("first half", False), ("second half", True))
    return {name: column_means(by_distance(row, late) for row in rows) for name, late in halves}


def tables(found: Found) -> list[Table]:
    rows = []
    for length in found.lengths("overlap"):
        for name, curve in curves(found, length).items():
            shown = [number(curve[at - 1]) if len(curve) >= at else "" for at in (1, 2, 4, 8)]
            rows.append([str(length), name, *shown])
    head = ["prompt tokens", "layers", *(f"distance {each}" for each in (1, 2, 4, 8))]
    return [("overlap of the most attended tokens between layers (figure 1a)", head, rows)]


def verdicts(found: Found) -> list[Verdict]:
    def differ(ours: str, theirs: str, part: str = "layers", metric: str = "score") -> dict[int, Case | None]:
        return found.differ(part, ours, theirs, metric)

    half, as_paper = "tsp at 1/2", "as the paper ran it"
    return [
        _faster(found, "ttft_s", "prefill up to 1.82x faster than full KV", "1.82x at 128K, A100"),
        _faster(found, "tpot_s", "decoding up to 2.87x faster than full KV", "2.87x at 128K, A100"),
        compared(
            "matches methods that only speed up decoding (SnapKV), 10% kept",
            "LongBench 48.47 against 48.73; RULER 75.6 against 73.6",
            differ(half, "snapkv 10%"),
            judge=no_worse,
            abstract=True,
        ),
        compared(
            f"matches methods that only speed up decoding (SnapKV), {as_paper}",
            against(PAPER_AS_RUN, "fastkv 10%", "snapkv 10%"),
            differ("fastkv 10%", "snapkv 10%", "published"),
            judge=no_worse,
            abstract=True,
        ),
        compared(
            "tying prefill to the KV budget (GemFilter) costs accuracy: FastKV is better at 10% kept",
            "48.47 against 38.61; RULER 75.6 against 69.6",
            differ(half, "gemfilter 13/32, 10%"),
            abstract=True,
        ),
        compared(
            f"tying prefill to the KV budget (GemFilter) costs accuracy, {as_paper}",
            against(PAPER_AS_RUN, "fastkv 10%", "gemfilter 10%"),
            differ("fastkv 10%", "gemfilter 10%", "published"),
            abstract=True,
        ),
        compared(
            f"table 3: outperforms other methods (SnapKV, StreamingLLM), {as_paper}",
            against(PAPER_AS_RUN, "fastkv 10%", "snapkv 10%", "streamingllm 10%"),
            found.differ_each(
                "published", {name: ("fastkv 10%", f"{name} 10%") for name in ("snapkv", "streamingllm")}
            ),
        ),
        _stable(found),
        compared("accuracy stays near full KV's", "48.47 of 50.19", differ(half, "full"), judge=no_worse),
        compared(
            "figure 3: at half the depth TSP is closer to full KV than GemFilter, the same tokens going on",
            "curve, no numbers",
            differ(half, "gemfilter at 1/2", metric="kl_last"),
        ),
        compared("figure 5b: an early TSP layer (1/6) costs accuracy", "curve", differ(half, "tsp at 1/6")),
        compared(
            "figure 5b: the score saturates at half the depth: no worse than at 5/6",
            "layer 15 of 32",
            differ(half, "tsp at 5/6"),
            judge=no_worse,
        ),
        compared(
            "figure 5a: a small TSP rate (5%) costs accuracy",
            "curve",
            differ("tsp rate 20%", "tsp rate 5%", "rates"),
        ),
        compared(
            "figure 5a: the score saturates at 20%: no worse than at 100%",
            "20%",
            differ("tsp rate 20%", "tsp rate 100%", "rates"),
            judge=no_worse,
        ),
        _sparse(found),
        *(
            compared(f"the same by KL over the answer: {claim}", "", differ(ours, theirs, part, "kl"))
            for claim, ours, theirs, part in (
                ("FastKV is closer to full KV than GemFilter", half, "gemfilter 13/32, 10%", "layers"),
                ("half the depth is closer than 1/6", half, "tsp at 1/6", "layers"),
                ("a TSP rate of 20% is closer than 5%", "tsp rate 20%", "tsp rate 5%", "rates"),
            )
        ),
    ]


def _faster(found: Found, quantity: str, claim: str, paper: str) -> Verdict:
    rule = f"time over full KV's below 1 in each of {FEWEST_DIFFERENT} repeats or more; factor at 128K {IMPOSSIBLE}"
    return repeated(claim, paper, found.ratios("tsp at 1/2", quantity), rule, lambda ratio: ratio < 1)


def _stable(found: Found) -> Verdict:
    cases = {}
    for length in found.lengths("overlap"):
        spread = [
            [sum(by_distance(row, late)[:4]) / 4 for late in (True, False)] for row in found.rows("overlap", length)
        ]
        cases[length] = mean([late - early for late, early in spread])
    claim = "figure 1a: important tokens are stabler in later layers: overlap at distances 1-4, second half less first"
    return compared(claim, "early layers fall sharply, later ones hardly", cases, abstract=True)


def _sparse(found: Found) -> Verdict:
    cases = {}
    for length in found.lengths("overlap"):
        rows = found.rows("overlap", length)
        means = column_means(row["mass"] for row in rows)
        least = means.index(min(means))
        cases[f"{length}, layer {least}"] = mean([row["mass"][least] - 0.5 for row in rows], (-0.5, 0.5))
    claim = "figure 1b: 512 tokens hold most of every layer's attention: the least layer's mean mass, less 0.5"
    return compared(claim, "more than half at 128K", cases)


STUDY = Study(
    "fastkv",
    "FastKV",
    (
        Part("layers", "TSP layers, GemFilter's layers and other methods at the same KV", TASKS, layers, paper=PAPER),
        Part(
            "published",
            "the paper's table of methods with its own kernel, window and pooling",
            TASKS,
            as_run,
            paper=at_lengths(PAPER_AS_RUN),
        ),
        Part("rates", "TSP rates at half the depth", TASKS, rates),
        Part("overlap", "overlap of important tokens between layers", (*TASKS, "ruler_qa_1"), measure=overlap),
        Part("times", "time to the first token of the sweeps", settings=times, times=True, paper=PAPER_TIMES),
    ),
    tables,
    verdicts,
)

if __name__ == "__main__":
    main(STUDY)
