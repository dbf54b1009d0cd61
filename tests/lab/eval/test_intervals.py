"""Intervals and tests of means against published values and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvsieve.lab.eval import intervals
from kvsieve.lab.eval.intervals import estimate, gaffke, share_interval, sign_flip, student, tango

# Heights of Darwin's maize, crossed less self-fertilised, in eighths of an inch (Fisher, Design of Experiments, 1935).
DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
# Hours of sleep gained under one drug over another (Student, 1908).
SLEEP = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]


@pytest.mark.parametrize(
    ("better", "worse", "n", "low", "high"),
    [
        # Airway hyper-responsiveness before and after transplantation (Bentur et al., 2009, in Fagerland et al., 2014).
        (1, 7, 21, -0.517, -0.026),
        # Equal outcomes: z**2 / (n + z**2) may differ unseen.
        (0, 0, 50, -0.0713, 0.0713),
        (0, 0, 73, -0.05, 0.05),
        (20, 0, 20, 0.6777, 1.0),
        (0, 20, 20, -1.0, -0.6777),
    ],
)
def test_tangos_interval(better, worse, n, low, high):
    assert tango(better, worse, n) == pytest.approx((low, high), abs=5e-4)
    assert tango(worse, better, n) == pytest.approx((-high, -low), abs=5e-4)


def test_tangos_example(monkeypatch):
    """Disinfection of contact lenses, one of 44 pairs discordant: the 90% interval's lower end is -0.096."""
    monkeypatch.setattr(intervals, "_Z", 1.6448536)
    assert tango.__wrapped__(0, 1, 44)[0] == pytest.approx(-0.096, abs=5e-4)


@pytest.mark.parametrize(
    ("count", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.3085),
        (1, 10, 0.0025, 0.4450),
        (5, 10, 0.1871, 0.8129),
        (10, 10, 0.6915, 1.0),
        (2, 50, 0.0049, 0.1371),
    ],
)
def test_clopper_and_pearsons_interval(count, n, low, high):
    assert share_interval(count, n) == pytest.approx((low, high), abs=5e-5)
    values = np.array([1.0] * count + [0.0] * (n - count))
    assert gaffke(values, (0, 1)) == pytest.approx((low, high), abs=0.012)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (9, 2.262), (30, 2.042), (1000, 1.962)])
def test_students_quantile(freedom, quantile):
    assert student(freedom) == pytest.approx(quantile, abs=5e-4)


def test_signs_are_enumerated():
    assert sign_flip(np.array(DARWIN, float)) == pytest.approx(1726 / 2**15, abs=1e-12)
    # Six pairs of six on one side, of whatever size.
    assert sign_flip(np.ones(6)) == sign_flip(np.array([1.0, 2, 3, 4, 5, 9])) == 2 / 2**6
    # McNemar's exact test of 1 and 7 discordant pairs.
    assert sign_flip(np.array([1.0] + [-1.0] * 7 + [0.0] * 13)) == pytest.approx(2 * (1 + 8) / 2**8)
    assert sign_flip(np.zeros(20)) == 1.0
    many = np.random.default_rng(0).normal(0.3, 1, 40)
    assert 0.01 < sign_flip(many) < 0.2 and sign_flip(many) == sign_flip(-many)


def test_means_have_students_interval():
    found = estimate(SLEEP, within=None)
    assert (found.low, found.high) == pytest.approx((0.700, 2.460), abs=5e-4)
    assert (found.n, found.different, found.p) == (10, 9, 2 / 2**9) and found.verdict == "higher"
    assert estimate([0.1] * 20, within=None).high == float("inf"), "equal distances say nothing of others"


@pytest.mark.parametrize("n", [1, 2, 10, 50])
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, -1.0])
@pytest.mark.parametrize("documents", [False, True])
def test_equal_outcomes_have_an_interval(n, value, documents):
    found = estimate([value] * n, [number // 2 for number in range(n)] if documents else None)
    assert found.mean == value and found.high - found.low > 0.06 and -1 <= found.low <= value <= found.high <= 1


def test_few_that_differ_say_little_of_those_that_were_not_seen():
    few, enough = ([-0.5] * count + [0.0] * (50 - count) for count in (5, 6))
    assert (estimate(few).low, estimate(few).high) == gaffke(np.array(few), (-1, 1))
    found = estimate(enough)
    half = student(49) * np.std(enough, ddof=1) / 50**0.5
    assert (found.low, found.high) == pytest.approx((-0.06 - half, -0.06 + half))
    assert estimate(few).low < found.low and estimate(few).high > 0.03 > found.high


def test_documents_count_once():
    """Four equal questions about a document are as one."""
    values = [1.0, 0.0, 0.0, -1.0, 0.0, 1.0, 1.0, 0.5, -0.5, 1.0, 0.25, 0.75]
    one = estimate(values)
    four = estimate(np.repeat(values, 4).tolist(), np.repeat(np.arange(12), 4).tolist())
    assert (four.mean, four.low, four.high, four.p) == pytest.approx((one.mean, one.low, one.high, one.p))
    assert (four.n, four.clusters, four.different) == (48, 12, 9)


def test_tasks_have_a_spread_of_their_own():
    """The interval of a mean over tasks is Student's with the spread within tasks and Satterthwaite's freedom."""
    first, second = SLEEP, [value + 100 for value in SLEEP + SLEEP]
    found = estimate([*first, *second], tasks=[0] * 10 + [1] * 20, within=None)
    variances = [np.var(each, ddof=1) / len(each) / 4 for each in (first, second)]
    freedom = sum(variances) ** 2 / (variances[0] ** 2 / 9 + variances[1] ** 2 / 19)
    half = student(round(freedom, 3)) * sum(variances) ** 0.5
    assert (found.mean, found.high - found.mean) == pytest.approx((51.58, half))
    # Tasks that are all lost and all level have no spread.
    found = estimate([-1.0] * 10 + [0.0] * 30, tasks=[0] * 10 + [1] * 30)
    assert found.mean == -0.5 and found.low < -0.55 and found.high > -0.45
    # One sample of a task has no spread: the interval is then of all together.
    assert estimate([0.0, 0.5, -0.5] * 4, tasks=[0] + [1] * 11).high > 0.1


@pytest.mark.parametrize(
    ("won", "lost", "same", "verdict"),
    [
        (6, 0, 44, "higher"),
        (5, 0, 45, "few"),
        (0, 6, 4, "lower"),
        (0, 0, 50, "level"),
        (8, 2, 40, "level"),
        (9, 0, 0, "few"),
    ],
)
def test_six_samples_that_differ_and_a_sign_flip_make_a_verdict(won, lost, same, verdict):
    assert estimate([1.0] * won + [-1.0] * lost + [0.0] * same).verdict == verdict


def test_as_scipy_has_it():
    stats = pytest.importorskip("scipy.stats")
    for count, n in ((3, 17), (40, 51), (1, 200)):
        assert share_interval(count, n) == pytest.approx(
            tuple(stats.binomtest(count, n).proportion_ci(method="exact")), abs=1e-9
        )
    for freedom in (1.5, 7, 49.3):
        assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-9)
