"""Intervals hold as often as they say: the committed measurement, its script, and the page of the rules."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.answers import coverage
from benchmarks.answers.retained import ratio_interval
from benchmarks.paper import verdicts
from kvsieve.lab.eval import intervals

ROOT = Path(__file__).parents[2]

RULES = json.loads(coverage.RESULTS.read_text())["rows"] if coverage.RESULTS.exists() else []


def test_the_measured_rules_are_those_of_the_script():
    found = [coverage.measured(rule, 2) for rule in coverage.RULES]
    names = ("kind", "rule", "mean")
    assert not RULES or [[row[name] for name in names] for row in found] == [
        [row[name] for name in names] for row in RULES
    ]
    assert coverage.table(found).count("\n") == len(found) + 1


@pytest.mark.parametrize(
    ("ours", "low", "high"),
    [
        # 50 of 50, of which 40 are right: Tango's 0.0713 over 0.8.
        ([1.0] * 40 + [0.0] * 10, 91.1, 108.9),
        # Half of what the other has: the standard error of ours - theirs / 2 is a half's of 40 of 50.
        ([1.0] * 20 + [0.0] * 30, 33.8, 66.2),
        ([0.0] * 50, 0.0, 8.9),
    ],
)
def test_a_ratio_to_full_kv_has_an_interval(ours, low, high):
    theirs = np.array([1.0] * 40 + [0.0] * 10)
    assert ratio_interval(np.array(ours), theirs, range(50)) == pytest.approx((low, high), abs=0.4)


@pytest.mark.parametrize("row", RULES, ids=lambda row: f"{row['kind']}, {row['rule']}, {row['mean']:g}")
def test_measured_intervals_hold_and_verdicts_are_right(row):
    """95 of 100, give or take two; more where most outcomes are equal, so that no interval is as narrow."""
    least, most = min(row["coverage"].values()), max(row["coverage"].values())
    assert least >= 93
    assert max(row["false"].values(), default=0) <= 5.5
    assert most <= 97 or not row["kind"].startswith("normal")


def test_the_page_has_the_rules_numbers():
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "evaluation.md").read_text())
    rules = text[text.index("**Significance.**") : text.index("## Adding a task")]
    for words in (
        f"fewer than {intervals.FEWEST} samples",
        f"fewer than {intervals.FEWEST_DIFFERENT} samples or documents differ",
        f"at least {intervals.FEWEST_DIFFERENT} samples differ, p < {intervals.LEVEL:g}",
        f"{intervals.DRAWS:,} draws",
        f"±{intervals.tango(0, 0, 50)[1]:.2f} for 50 samples",
        f"above -{verdicts.MARGIN:g} | the interval is below -{verdicts.MARGIN:g}",
        f"fewer than {verdicts.FEW} samples are shown and not counted",
        f"less than {'half' if verdicts.ACTED == 0.5 else verdicts.ACTED} of them",
    ):
        assert words in rules, words
