"""RocketKV's experiments (arXiv 2502.14051): budgets down to 1/64, how the compression is split, and conversations.

    python -m benchmarks.paper.rocketkv [--model MODEL] [--lengths 4096,8192] [--samples 16] [--only PART] [--forecast]

The paper: Llama3.1-8B and others, budgets of 256 to 4096 entries per step and KV head of prompts of up to 109K tokens
(1/400), what is read to estimate included. Here budgets are shares of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.paper.common import (
    Found,
    Part,
    Shape,
    Study,
    Table,
    custom,
    labels,
    main,
    named,
    number,
    published,
)
from benchmarks.paper.verdicts import IMPOSSIBLE, LATER, MARGIN, OUT, Case, Verdict, compared, no_worse, of_all
from kvsieve.core.kv_rows import ReadFacts
from kvsieve.lab.eval.cells import MethodSetting
from kvsieve.methods import HSA
from kvsieve.methods.hsa import hsa_setting
from kvsieve.methods.readers import LEAST, Setting
from kvsieve.methods.rocketkv import RocketEviction
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan

PARTS = (4, 8, 16, 32, 64)
COMPARED = (4, 16, 64)
SPLITS = (0.3, 0.4, 0.5, 0.6, 0.7)
SPLIT_AT = (16, 64)
PAGES = (1, 2, 4, 8, 16)
PAGES_AT = 16
TURNS_AT = (8, 32)
TIMES_AT = (16, 64)
FEWEST = 36
TASKS = ("ruler_niah_single_2", "ruler_niah_multikey_1", "ruler_niah_single_3")
OTHERS = ("snapkv", "quest", "sparq", "hsa", "exacttopk")
TURNED = ("rocketkv-mt", "rocketkv", "snapkv", "exacttopk", "hsa")

# RULER at 16K, Llama3.1-8B, table 6: 256 entries are 1/64, 1024 are 1/16, 4096 are 1/4. Full KV 91.3.
PAPER = {
    "full": "91.3",
    **{f"rocketkv 1/{c}": s for c, s in ((64, "86.3"), (32, "88.6"), (16, "90.6"), (8, "91.4"), (4, "91.9"))},
    **{f"snapkv 1/{c}": s for c, s in ((64, "26.3"), (16, "56.8"), (4, "70.7"))},
    **{f"quest 1/{c}": s for c, s in ((64, "5.3"), (16, "64.6"), (4, "88.7"))},
    **{f"sparq 1/{c}": s for c, s in ((64, "8.7"), (16, "86.5"), (4, "92.2"))},
    **{f"hsa 1/{c}": s for c, s in ((64, "69.0"), (16, "89.5"), (4, "92.3"))},
    **{f"exacttopk 1/{c}": s for c, s in ((64, "90.4"), (16, "91.5"), (4, "90.8"))},
}
# SCBench averages, table 4, budgets of 4096 and 1024 of 128K: 1/32 and 1/128; full KV 49.9.
PAPER_TURNS = {
    "full": "49.9",
    **{f"{name} 1/32": s for name, s in (("rocketkv-mt", "47.8"), ("rocketkv", "31.5"), ("snapkv", "19.9"))},
    **{f"{name} 1/32": s for name, s in (("exacttopk", "48.7"), ("hsa", "38.6"))},
    **{f"{name} 1/8": s for name, s in (("rocketkv-mt", "50.5"), ("rocketkv", "39.5"), ("snapkv", "23.8"))},
    **{f"{name} 1/8": s for name, s in (("exacttopk", "50.8"), ("hsa", "50.0"))},
}


def static_entries(length: int, new_tokens: int, tokens: int, split: float) -> int:
    """Entries that may be stored where the first stage compresses by c^split; see `hsa.stored_entries`."""
    total = length + new_tokens
    ratio = max(1.0, total / tokens)
    return max(int(total / ratio**split), min(2 * new_tokens, total))


@dataclass(frozen=True, kw_only=True)
class StaticEviction(RocketEviction, heads="own"):
    """The first stage with a split factor that does not depend on the compression."""

    split: float

    def entries(self, length: int, new_tokens: int = 0) -> int:
        tokens = self.budget.entries(length + new_tokens, LEAST)
        return max(static_entries(length, new_tokens, tokens, self.split) - new_tokens, self.minimum)


@dataclass(frozen=True, kw_only=True)
class StaticHSA(HSA, static_shapes=True):
    """The second stage behind `StaticEviction`."""

    split: float

    def parameters(self, tokens: int, facts: ReadFacts) -> Setting:
        return hsa_setting(static_entries(facts.length, facts.new_tokens, tokens, self.split), tokens, facts.dim)


@dataclass(frozen=True, kw_only=True)
class PagedHSA(HSA, static_shapes=True):
    """HSA with pages of `size` tokens, and as many channels as leave the traffic of the estimate the same."""

    size: int

    def parameters(self, tokens: int, facts: ReadFacts) -> Setting:
        ratio = max(1.0, (facts.length + facts.new_tokens) / tokens)
        channels = min(max(int(facts.dim * self.size / ratio), 1), facts.dim)
        return Setting(tokens, max(tokens // 2, 1), self.size, channels)


def parts(length: int, wanted: tuple[int, ...]) -> list[int]:
    """Those that leave more than SnapKV's window."""
    return [part for part in wanted if length // part >= FEWEST]


def at(method: str, length: int, part: int) -> MethodSetting:
    window = {"window": 32} if method in ("snapkv", "rocketkv", "rocketkv-mt") else {}
    return named(f"{method} 1/{part}", method, budget=length // part, **window)


def budgets(shape: Shape, length: int) -> list[MethodSetting]:
    rocket = [at("rocketkv", length, part) for part in parts(length, PARTS)]
    others = [at(method, length, part) for part in parts(length, COMPARED) for method in OTHERS]
    return [*rocket, *others]


def as_run(shape: Shape, length: int) -> list[MethodSetting]:
    """Table 6 as the paper ran it (A.3): nothing forced, SnapKV per query head with the group's budget shared out."""
    made = []
    for part in parts(length, COMPARED):
        budget = length // part
        readers = ("rocketkv", "hsa", "exacttopk")
        made += [published(f"{method} 1/{part}", method, budget=budget) for method in readers]
        made += [named(f"{method} 1/{part}", method, budget=budget, newest=False) for method in ("quest", "sparq")]
        made += _snapkv(shape, part, budget, 32)
    return made


def turns_as_run(shape: Shape, length: int) -> list[MethodSetting]:
    """Table 4 as the paper ran it (A.3): windows of 128 queries, nothing forced."""
    made = []
    for part in parts(length, TURNS_AT):
        budget = length // part
        made.append(published(f"rocketkv-mt 1/{part}", "rocketkv-mt", budget=budget))
        made.append(published(f"rocketkv 1/{part}", "rocketkv", budget=budget, window=128))
        made += [published(f"{method} 1/{part}", method, budget=budget) for method in ("exacttopk", "hsa")]
        made += _snapkv(shape, part, budget, 128)
    return made


def _snapkv(shape: Shape, part: int, budget: int, window: int) -> list[MethodSetting]:
    """SnapKV as the paper ran it; none where a query head's share of the budget is its window's alone."""
    shared = budget // shape.group
    if shared <= window:
        return []
    return [published(f"snapkv 1/{part}", "snapkv", budget=shared, window=window, per_query_head=True)]


def splits(shape: Shape, length: int) -> list[MethodSetting]:
    made = []
    for part in parts(length, SPLIT_AT):
        made.append(at("rocketkv", length, part))
        budget = Budget(tokens=length // part)
        for split in SPLITS:
            plan = Plan(evict=StaticEviction(budget=budget, split=split), read=StaticHSA(budget=budget, split=split))
            made.append(custom(f"split {split}, 1/{part}", plan, str(budget), split=split))
    return made


def pages(shape: Shape, length: int) -> list[MethodSetting]:
    budget = Budget(tokens=length // PAGES_AT)
    made = [
        custom(f"pages of {page}", Plan(read=PagedHSA(budget=budget, size=page)), str(budget), page=page)
        for page in PAGES
    ]
    return [*made, *(at(method, length, PAGES_AT) for method in ("hsa", "quest", "sparq"))]


def turns(shape: Shape, length: int) -> list[MethodSetting]:
    return [at(method, length, part) for part in parts(length, TURNS_AT) for method in TURNED]


def times(shape: Shape, length: int) -> list[MethodSetting]:
    methods = ("rocketkv", "rocketkv-mt", "snapkv", "hsa")
    return [at(method, length, part) for part in parts(length, TIMES_AT) for method in methods]


def tables(found: Found) -> list[Table]:
    rows = []
    for name in labels(found.rows("multiturn")):
        rows.append([name, *(number(found.mean("multiturn", name, f"turn_{turn}")) for turn in range(1, 5))])
    return [("multiturn, by turn, all lengths", ["setting", "turn 1", "turn 2", "turn 3", "turn 4"], rows)]


def verdicts(found: Found) -> list[Verdict]:
    def cases(
        part: str, ours: str, theirs: tuple[str, ...], parts: tuple[int, ...], metric: str = "score"
    ) -> dict[str, Case | None]:
        pairs = {f"{name} 1/{each}": (f"{ours} 1/{each}", f"{name} 1/{each}") for name in theirs for each in parts}
        return found.differ_each(part, pairs, metric)

    low, as_paper = "better than SnapKV, Quest and SparQ at a low budget", "as the paper ran it"
    three = ("snapkv", "quest", "sparq")
    made = [
        _compression(found, "budgets", PARTS),
        _compression(found, "published", COMPARED, f", {as_paper}"),
        _costs(found),
        compared(f"{low} (1/64)", "RULER 16K 86.3 against 26.3, 5.3, 8.7", cases("budgets", "rocketkv", three, (64,))),
        compared(
            f"{low} (1/16, 1/64), {as_paper}",
            "RULER 16K 90.6 against 56.8, 64.6, 86.5; 86.3 against 26.3, 5.3, 8.7",
            cases("published", "rocketkv", three, (16, 64)),
        ),
        compared(
            "the same by KL over the answer: closer to full KV than SnapKV, Quest and SparQ (1/64)",
            "",
            cases("budgets", "rocketkv", three, (64,), "kl"),
        ),
    ]
    for part, what in (
        ("multiturn", "in a conversation"),
        ("shared", "with a shared context"),
        ("turns", f"in a conversation, {as_paper}"),
    ):
        made += [
            compared(
                f"RocketKV-MT consistently outperforms other methods {what}: RocketKV, SnapKV, HSA",
                "1/32: 47.8 against 31.5, 19.9, 38.6",
                cases(part, "rocketkv-mt", ("rocketkv", "snapkv", "hsa"), TURNS_AT),
                abstract=True,
            ),
            compared(
                f"RocketKV-MT nearly on par with exact top-k {what}",
                "47.8 against 48.7",
                cases(part, "rocketkv-mt", ("exacttopk",), TURNS_AT),
                judge=no_worse,
                abstract=True,
            ),
        ]
    pages = {f"pages of {page}": (f"hsa 1/{PAGES_AT}", f"pages of {page}") for page in (1, 16)}
    return [
        *made,
        compared(
            "figure 8: HSA is better than Quest and SparQ at equal traffic (KL, 1/16)",
            "89.5 against 64.6 and 86.5",
            cases("pages", "hsa", three[1:], (16,), "kl"),
        ),
        compared(
            f"figure 8: HSA is better than Quest and SparQ at equal traffic (1/16, 1/64), {as_paper}",
            "89.5 against 64.6 and 86.5; 69.0 against 5.3 and 8.7",
            cases("published", "hsa", three[1:], (16, 64)),
        ),
        compared(
            "a page size between the extremes (as HSA sets it) is better than pages of 1 and of 16 (KL)",
            "two dimensions beat one",
            found.differ_each("pages", pages, "kl"),
        ),
        _adaptive(found),
    ]


def _compression(found: Found, results: str, tried: tuple[int, ...], how: str = "") -> Verdict:
    claim, paper = f"up to 400x compression with negligible loss of accuracy{how}", "NIAH 100% at 1/400 of 109K"
    rule = f"the most compression where RocketKV is no worse than full KV by {MARGIN:g}, at most 64x tried"
    cases = {part: found.differ(results, f"rocketkv 1/{part}", "full") for part in tried}
    shown = [f"1/{part}, {at}: {case}" for at in found.lengths(results) for part in tried if (case := cases[part][at])]
    if not shown:
        return Verdict(claim, paper, f"{IMPOSSIBLE} (400x); up to 64x {LATER}", "", rule, abstract=True)
    outcomes = {part: of_all(list(each.values()), no_worse)[0] for part, each in cases.items()}
    best = max((part for part in tried if outcomes[part] == OUT), default=0)
    found_here = f"{best}x {OUT}" if best else "not shown at any budget"
    verdict = f"400x {IMPOSSIBLE} (contexts are too short); {found_here}"
    acted = of_all([case for each in cases.values() for case in each.values()], no_worse)[1]
    return Verdict(claim, paper, verdict, "; ".join(shown), rule, abstract=True, acted=acted)


def _costs(found: Found) -> Verdict:
    claim = "3.7x end-to-end speed of decoding and 32.6% less memory on an A100"
    shown = []
    for part in TIMES_AT:
        speed, stored, read = (
            found.ratios(f"rocketkv 1/{part}", each) for each in ("tpot_s", "kv_bytes", "kv_read_bytes")
        )
        shown += [
            f"1/{part}, {length}: {1 / median(each):.2f}x tokens per second on this processor, "
            f"{median(stored[length]):.3f} of the KV stored, {median(read[length]):.3f} read per token, n={len(each)}"
            for length, each in speed.items()
            if each
        ]
    return Verdict(claim, "3.7x, 32.6%", IMPOSSIBLE, "; ".join(shown), "needs that GPU", abstract=True)


def _adaptive(found: Found) -> Verdict:
    """Against the best static factor of each budget and length, by mean KL."""
    cases: dict[str, Any] = {}
    for length in found.lengths("splits"):
        for part in SPLIT_AT:
            kl = {s: found.mean("splits", f"split {s}, 1/{part}", "kl", length) for s in SPLITS}
            seen = {s: value for s, value in kl.items() if value is not None}
            if seen:
                best = min(seen, key=lambda s: seen[s])
                both = found.differ("splits", f"rocketkv 1/{part}", f"split {best}, 1/{part}")
                cases[f"best is {best}, 1/{part}, {length}"] = both[length]
    claim = "figure 9: the adaptive split is comparable to the best static one"
    if not cases:
        return Verdict(claim, "curve", LATER)
    return compared(claim, "curve, in most cases", cases, judge=no_worse)


STUDY = Study(
    "rocketkv",
    "RocketKV",
    (
        Part("budgets", "budgets down to 1/64, beside others at equal traffic", TASKS, budgets, paper=PAPER),
        Part(
            "published",
            "budgets as the paper ran them: nothing forced, SnapKV per query head",
            TASKS,
            as_run,
            paper=PAPER,
        ),
        Part(
            "turns",
            "conversations as the paper ran them: windows of 128",
            ("multiturn",),
            turns_as_run,
            answer=60,
            paper=PAPER_TURNS,
        ),
        Part("multiturn", "four questions in one conversation", ("multiturn",), turns, answer=60, paper=PAPER_TURNS),
        Part(
            "shared",
            "four questions, each on its own copy of the context",
            ("shared",),
            turns,
            "hidden",
            answer=60,
            paper=PAPER_TURNS,
        ),
        Part("splits", "how the compression is split between the stages", TASKS, splits),
        Part("pages", "page size against channels at equal traffic", TASKS, pages),
        Part("times", "times, KV stored and read", settings=times, times=True),
    ),
    tables,
    verdicts,
)

if __name__ == "__main__":
    main(STUDY)
