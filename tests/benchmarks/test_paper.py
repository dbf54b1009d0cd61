"""benchmarks/paper: every part of every study end to end on a tiny model, and verdicts on made-up results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.paper import asl, claims, common, fastkv, lagkv, remember, rocketkv, verdicts
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Words:
    """Two short answers on a context of words, whatever the task is called."""

    name: str
    title: str = "words"
    modes: tuple[str, ...] = ("visible", "hidden")

    def document(self, index: int) -> int:
        return index

    def sample(self, index: int, length: int, seed: int, count) -> Sample:
        words = " ".join(f"w{(index + 7 * at * at) % 120}" for at in range(length - 8))
        turn = QuestionAnswer("w1", ("w3",), lambda given, _: {"score": float("w3" in given), "exact": 0.0}, 2)
        several = self.name in ("multiturn", "shared")
        return Sample(words, (turn, turn) if several else (turn,), independent=self.name == "shared")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[int, str]:
    """By number of layers: ASL compares eight."""
    from tiny_models import build
    from toy_words import word_tokenizer

    made = {}
    for layers in (4, 9):
        folder = tmp_path_factory.mktemp("models") / "tiny"
        build("llama", num_hidden_layers=layers).save_pretrained(folder)
        word_tokenizer().save_pretrained(folder)
        made[layers] = str(folder)
    return made


@pytest.fixture
def checkpoint(checkpoints) -> str:
    return checkpoints[4]


@pytest.fixture
def few(monkeypatch):
    """One task each, few settings."""
    tasks = [name for study in claims.STUDIES for part in study.parts for name in part.tasks]
    monkeypatch.setattr(common, "all_tasks", lambda: {name: Words(name) for name in tasks})
    monkeypatch.setattr(common, "environment", lambda *_: {"kvsieve": "0", "commit": "c"})
    monkeypatch.setattr("kvsieve.lab.eval.store.environment", lambda *_: {"kvsieve": "0", "commit": "c"})
    monkeypatch.setattr(fastkv, "DEPTHS", (1 / 3, 1 / 2, 2 / 3))
    monkeypatch.setattr(fastkv, "RATES", ("10%", "20%"))
    monkeypatch.setattr(asl, "TAUS", (0.3, 0.6))
    monkeypatch.setattr(asl, "BUDGETS", ("20%",))
    monkeypatch.setattr(lagkv, "TIMES", (4, 8))
    monkeypatch.setattr(lagkv, "ROOM", 0)
    monkeypatch.setattr(lagkv, "KEPT", ("50%",))
    monkeypatch.setattr(rocketkv, "PARTS", (4,))
    monkeypatch.setattr(rocketkv, "COMPARED", (4,))
    monkeypatch.setattr(rocketkv, "TURNS_AT", (4,))
    monkeypatch.setattr(rocketkv, "TIMES_AT", (4,))
    monkeypatch.setattr(rocketkv, "SPLITS", (0.5,))
    monkeypatch.setattr(rocketkv, "SPLIT_AT", (4,))
    monkeypatch.setattr(rocketkv, "PAGES", (1, 8))
    monkeypatch.setattr(rocketkv, "PAGES_AT", 4)


def run(study, checkpoint: str, folder: Path) -> common.Found:
    """One sample of one task of every part but times."""
    tasks = ",".join({part.tasks[0] for part in study.parts if part.tasks})
    given = ["--model", checkpoint, "--lengths", "150", "--out", str(folder), "--tasks", tasks, "--samples", "1"]
    common.main(study, given)
    return common.Found(study.name, folder / study.name / "tiny")


@pytest.mark.parametrize("study", claims.STUDIES, ids=lambda study: study.name)
def test_every_part_runs_and_is_told(study, checkpoints, few, tmp_path, capsys):
    layers = 9 if study.name == "asl" else 4
    found = run(study, checkpoints[layers], tmp_path)
    for part in study.parts:
        rows = found.rows(part.name)
        assert bool(rows) != (part.times or part.least > 150)
        if part.measure is None and rows:
            labels = ["full", *(each.label for each in part.settings(common.Shape(layers, 32, 1e4, 2), 150))]
            assert [row["label"] for row in rows] == labels
    assert (found.folder / "tables.md").read_text().startswith(f"# {study.title}, tiny\n")
    told = capsys.readouterr().out
    assert told.count("| claim |") == 1 and "the paper" in told
    assert "| score, 150 | n | all right | KL | KL, first token | KV | the paper |" in told
    page = claims.page(tmp_path)
    assert f"### {study.title}, tiny" in page and "Not run yet: " in page and page.count("Nothing has run") == 3


def test_a_run_goes_on_where_it_stopped(checkpoint, few, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "show", lambda *_: None)
    folder = run(fastkv.STUDY, checkpoint, tmp_path).folder
    before = {file: file.read_bytes() for file in folder.rglob("*.jsonl*")}
    run(fastkv.STUDY, checkpoint, tmp_path)
    assert len(before) == 4 and {file: file.read_bytes() for file in before} == before


def test_a_forecast_counts_readings_and_runs_nothing(checkpoint, tmp_path, capsys):
    given = ["--model", checkpoint, "--lengths", "4096", "--samples", "3", "--out", str(tmp_path), "--forecast"]
    common.main(lagkv.STUDY, [*given, "--only", "grid,ruler"])
    told = capsys.readouterr().out
    # Every setting of these acts once on the whole prompt: one reading per sample and task.
    assert "| grid | 4096 | 3 | 21 | 3 |" in told and "| ruler | 4096 | 15 | 13 | 15 |" in told
    assert not list(tmp_path.iterdir())


def test_times_are_measured_for_every_setting(checkpoint, few, tmp_path, monkeypatch):
    monkeypatch.setattr("kvsieve.lab.eval.costs.NEW_TOKENS", 2)
    monkeypatch.setattr("kvsieve.lab.eval.costs.WARM_UP", 16)
    given = ["--model", checkpoint, "--lengths", "150", "--out", str(tmp_path), "--only", "times", "--samples", "1"]
    monkeypatch.setattr("kvsieve.lab.eval.costs.Needle", lambda text: Words("needle"))
    common.main(rocketkv.STUDY, given)
    found = common.Found("rocketkv", tmp_path / "rocketkv" / "tiny")
    assert found.ratios("full", "ttft_s") == {150: [1.0]} and len(found.ratios("rocketkv 1/4", "kv_bytes")[150]) == 1


def test_readings_that_share_layers_give_what_they_give_alone(checkpoint):
    import torch

    import kvsieve
    from kvsieve.shared.prompt import read_alone

    model, _ = kvsieve.models.load(checkpoint, torch.bfloat16)
    ids = torch.randint(3, 100, (1, 150))
    plans = [kvsieve.plan("fastkv", tsp_layer=layer, paper=True) for layer in (1, 2)]
    plans += [kvsieve.plan("gemfilter", budget="20%", layer=2), kvsieve.plan("snapkv", budget="20%", paper=True)]
    alone = [read_alone(model, plan, ids)[1] for plan in plans]
    memory = remember.Memory()
    with remember.remembering(model, memory):
        found = [read_alone(model, plan, ids)[1] for plan in plans]
        first = memory.hits
        read_alone(model, plans[0], ids)
    assert all(torch.equal(one, other) for one, other in zip(alone, found, strict=True))
    # The first plan's full layers, of which each has an MLP, four projections and its attention.
    assert first > 12 and memory.hits - first == 6 * 2
    assert "forward" not in vars(model.model.layers[0].mlp)


def pairs(won: int, lost: int, same: int, acted: int | None = None) -> verdicts.Case:
    """Samples that one setting alone has right, that the other has, and on which they agree."""
    ours = dict(enumerate([1.0] * won + [0.0] * (lost + same)))
    theirs = dict(enumerate([0.0] * won + [1.0] * lost + [0.0] * same))
    acts = None if acted is None else {key: key < acted for key in ours}
    return verdicts.paired(ours, theirs, acts=acts)


OUT, NOT, OPEN = verdicts.OUT, verdicts.NOT, verdicts.OPEN


@pytest.mark.parametrize(
    ("case", "better", "no_worse"),
    [
        (pairs(6, 0, 54), OUT, OUT),
        # Five of a kind happen by chance in more than 5 of 100.
        (pairs(5, 0, 55), OPEN, OUT),
        (pairs(0, 20, 40), NOT, NOT),
        # Lower, but by less than the margin as far as the interval shows.
        (pairs(0, 6, 54), OPEN, OPEN),
        # Higher on the whole, and by so much that a loss of the margin is out of the question.
        (pairs(12, 8, 40), OPEN, OPEN),
        (pairs(0, 0, 72), OPEN, OPEN),
        (pairs(0, 0, 73), OPEN, OUT),
        # Too few to count, however clear.
        (pairs(49, 0, 0), OPEN, OPEN),
        (pairs(50, 0, 0), OUT, OUT),
    ],
    ids=str,
)
def test_verdicts_follow_their_rules(case, better, no_worse):
    assert verdicts.compared("a", "", {"x": case}).verdict == better
    assert verdicts.compared("a", "", {"x": case}, judge=verdicts.no_worse).verdict == no_worse


def test_a_claim_in_several_cases_came_out_in_all_that_count():
    clear, open_, few = pairs(60, 0, 0), pairs(0, 0, 60), pairs(0, 40, 0)
    told = [
        verdicts.compared("a", "", dict(enumerate(cases))) for cases in ((clear, few), (clear, open_), (few,), (None,))
    ]
    assert [each.verdict for each in told] == [OUT, OPEN, OPEN, verdicts.LATER]
    assert told[0].evidence.endswith("n=40, few: not counted")
    # Of many cases one is lower by chance: each has its part of the 5%.
    lower = pairs(8, 24, 18)
    assert 0.05 / 100 < lower.found.p < 0.05 and lower.found.high < -0.05
    assert verdicts.compared("a", "", {"x": lower}).verdict == NOT
    assert verdicts.compared("a", "", {"x": lower, **dict.fromkeys(range(99), open_)}).verdict == OPEN


def test_a_verdict_is_refused_where_the_method_did_nothing():
    idle, active = pairs(60, 0, 0, acted=29), pairs(60, 0, 0, acted=30)
    refused = verdicts.compared("a", "", {4096: idle, 8192: idle})
    assert (refused.verdict, refused.acted) == ("refused: acted in 58 of 120", "58 of 120")
    counted = verdicts.compared("a", "", {4096: idle, 8192: active})
    assert (counted.verdict, counted.acted) == (OUT, "59 of 120")
    assert "4096: +1.000 [+0.880, +1.000], n=60, acted in 29: not counted" in counted.evidence
    assert "| a |  | came out | 59 of 120 |" in verdicts.verdict_table([counted])


def test_two_sets_are_compared_by_both_intervals():
    found = verdicts.apart([1.0] * 60, [0.0] * 80, (0, 1)).found
    assert (found.mean, found.n, found.high) == (1.0, 60, 1.0)
    assert found.low == pytest.approx(1 - (0.0596**2 + 0.0451**2) ** 0.5, abs=0.003)
    same = verdicts.apart([2.0] * 60, [1.0] * 60, None)
    assert verdicts.better(same) == OPEN and same.found.high == float("inf")


def test_costs_need_six_repeats_that_agree():
    def told(*ratios):
        return verdicts.repeated("a", "", {4096: [2.0], 8192: ratios}, "", lambda ratio: ratio < 1).verdict

    assert [told(*[0.9] * 6), told(*[1.1] * 6), told(*[0.9] * 5), told(*[0.9] * 6, 1.1), told()] == [
        OUT, NOT, OPEN, OPEN, verdicts.LATER
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "budget", "deep", "entries", "acted"),
    [
        ("asl", "20%", 1000, 200.0, False),
        ("asl", "20%", 200, 200.0, True),
        ("snapkv", "20%", 1000, 200.0, True),
        ("snapkv", "20%", 1000, 1000.0, False),
        ("hsa", "128", 1000, 1000.0, True),
        ("hsa", "1024", 1000, 1000.0, False),
        ("lag 128, 8x", "16 of 128", 1000, 300.0, True),
        ("full", None, 1000, 1000.0, False),
    ],
)
def test_a_method_acted_where_something_was_left_out(method, budget, deep, entries, acted):
    row = {"method": method, "budget": budget, "prompt_tokens": 1000, "deep_tokens": deep, "kv_entries": entries}
    assert common.acted(row) == acted


def test_a_layer_is_selected_where_the_variance_falls_below_tau():
    row = {"first": 8, "relative_variance": [1.0, 0.7, 0.28, 0.4]}
    assert [asl.selected(row, tau) for tau in (0.2, 0.3, 0.8)] == [None, 10, 9]
    assert asl.depth_of(row, 0.2) == 13 and asl.depth_of(row, 0.3) == 11


def test_one_reading_gives_the_variances_that_asl_sees(checkpoints):
    """Those of ASL's own trace, and the layer that each L_obs and L_min would select."""
    import torch

    import kvsieve

    model, _ = kvsieve.models.load(checkpoints[9])
    ids = torch.randint(3, 100, (1, 300), generator=torch.Generator().manual_seed(1))
    row = asl.lookback(model, ids)
    assert row["k"] == 64 and {name: len(each) for name, each in row["variance"].items()} == {"4": 5, "8": 1, "16": 0}
    plan = kvsieve.plan("asl", paper=True, budget=64, tau=0, observed=4, first=3)
    with kvsieve.attach(model, plan) as sieve:
        trace = sieve.generate(ids, max_new_tokens=1, do_sample=False).stats.report["relative_variance"][0]
    found = [each / row["variance"]["4"][0] for each in row["variance"]["4"]]
    assert found == pytest.approx(trace, rel=1e-3)
    row = {"variance": {"4": [8.0, 9.0, 2.0, 1.0]}}
    assert [asl.settles(row, 4, first) for first in (2, 3, 4, 5)] == [5, 5, 5, None]


def test_no_sample_starts_when_the_time_is_over(checkpoint, few, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "show", lambda *_: None)
    given = ["--model", checkpoint, "--lengths", "150", "--out", str(tmp_path), "--only", "overlap"]
    common.main(fastkv.STUDY, [*given, "--minutes", "0"])
    found = common.Found("fastkv", tmp_path / "fastkv" / "tiny")
    assert not found.rows("overlap")


def test_published_settings_are_the_papers():
    """FastKV 5.1; ASL C.2; LagKV 3.2 in kvpress; RocketKV A.3."""
    shape = common.Shape(32, 4096, 7e9, group=4)
    fast = {each.label: each.plan for each in fastkv.as_run(shape, 8192)}
    assert (fast["fastkv 10%"].propagate.layer, fast["fastkv 10%"].propagate.window) == (15, 8)
    snap = fast["snapkv 10%"].evict
    assert (snap.window, snap.kernel, snap.pooling) == (8, 7, "max") and fast["gemfilter 10%"].propagate.layer == 13
    adaptive = {each.label: each.plan for each in asl.as_run(shape, 16384)}
    assert {each.evict.budget.tokens for each in (adaptive["asl"], adaptive["snapkv"])} == {2048}
    assert (adaptive["fastkv"].propagate.window, adaptive["fastkv"].propagate.pooling) == (32, "avg")
    lag = {each.label: each.plan.evict for each in lagkv.as_run(shape, 16384)}
    assert (lag["lagkv 25%"].lag, lag["snapkv 25%"].window, lag["snapkv 25%"].kernel) == (128, 64, 5)
    rocket = {each.label: each.plan for each in rocketkv.as_run(shape, 16384)}
    assert not any(each.read.newest for each in rocket.values() if each.read is not None)
    assert (rocket["snapkv 1/64"].evict.budget.tokens, rocket["snapkv 1/64"].evict.per_query_head) == (64, True)
    assert "snapkv 1/64" not in {each.label for each in rocketkv.as_run(shape, 4096)}, "all of it is the window"
    turns = {each.label: each.plan for each in rocketkv.turns_as_run(shape, 4096)}
    assert (turns["rocketkv-mt 1/8"].evict.base.window, turns["rocketkv 1/8"].evict.window) == (128, 128)
    ours = lagkv.ruler(shape, 8192)[1].plan.evict
    assert (ours.kernel, ours.pooling) == ("auto", "avg"), "ours pools as before"


class Asked(common.Found):
    """Keeps what verdicts ask for: labels of every grid, at 16K."""

    def lengths(self, part: str) -> list[int]:
        return [] if part in ("trace", "lookback", "overlap") else [16384]

    def differ(self, part, ours, theirs, metric="score", acting=None):
        self.cache.setdefault("asked", []).append((part, {ours, theirs, acting or ours}))
        return {16384: None}


@pytest.mark.parametrize("study", claims.STUDIES, ids=lambda study: study.name)
def test_verdicts_ask_for_labels_that_parts_have(study, tmp_path):
    found = Asked(study.name, tmp_path, {part.name: [] for part in study.parts})
    study.verdicts(found)
    for part, labels in found.cache["asked"]:
        made = study.part(part).settings(common.Shape(24, 896, 1e8, group=2), 16384)
        assert labels <= {"full", *(each.label for each in made)}
    judged = {part for part, _ in found.cache["asked"]}
    assert judged >= {"published", *{"abstract", "turns"} & {part.name for part in study.parts}}


@pytest.mark.parametrize("study", claims.STUDIES, ids=lambda study: study.name)
def test_settings_of_all_lengths_fit_into_one_directory(study):
    """A directory knows a setting by label and budget: the parameters behind them are the same at every length."""
    shape = common.Shape(24, 896, 1e8, group=2)
    for part in (part for part in study.parts if part.settings is not None):
        held = {}
        for made in (made for length in (4096, 8192, 16384) for made in part.settings(shape, length)):
            assert held.setdefault((made.label, made.budget), made.parameters) == made.parameters, part.name


def answers(label: str, right: int, prompts: int = 50, **more) -> list[dict]:
    """Rows of prompts under one label, of which the first ones are right; a method leaves out nine of ten tokens."""
    row = {
        "label": label,
        "method": label.split()[0],
        "budget": "10%",
        "task": "kv",
        "question": "visible",
        "length": 8192,
    }
    row |= {"prompt_tokens": 8000, "deep_tokens": 800, "kv_entries": 800.0, "answers": ["1"]} | more
    return [
        row | {"sample": at, "score": float(at < right), "metrics": {"exact": float(at < right)}}
        for at in range(prompts)
    ]


@pytest.mark.parametrize(
    ("study", "part", "claim", "ours", "theirs"),
    [
        (fastkv, "published", "matches methods that only speed up decoding (SnapKV), as", "fastkv 10%", ["snapkv 10%"]),
        (
            fastkv,
            "published",
            "tying prefill to the KV budget (GemFilter) costs accuracy, as",
            "fastkv 10%",
            ["gemfilter 10%"],
        ),
        (asl, "published", "outperforms FastKV at the same budget", "asl", ["fastkv"]),
        (asl, "published", "outperforms FastKV with everything kept", "asl, full before", ["fastkv, full before"]),
        (asl, "published", "can be used with SnapKV", "asl", ["snapkv"]),
        (
            lagkv,
            "published",
            "RULER, question hidden: outperforms SnapKV in different compression ratios, as",
            "lagkv 25%",
            ["snapkv 25%"],
        ),
        (
            lagkv,
            "abstract",
            "64-digit number, lag 1024, 4x: more prompts",
            "lagkv 1024, 4x",
            ["h2o 25%", "h2o, as many entries"],
        ),
        (lagkv, "abstract", "the same by over 50 points", "lagkv 1024, 4x", ["h2o 25%"]),
        (
            rocketkv,
            "published",
            "better than SnapKV, Quest and SparQ at a low budget (1/16, 1/64), as",
            "rocketkv 1/64",
            ["quest 1/64"],
        ),
        (
            rocketkv,
            "turns",
            "RocketKV-MT consistently outperforms other methods in a conversation, as",
            "rocketkv-mt 1/8",
            ["hsa 1/8"],
        ),
        (
            rocketkv,
            "turns",
            "RocketKV-MT nearly on par with exact top-k in a conversation, as",
            "rocketkv-mt 1/8",
            ["exacttopk 1/8"],
        ),
    ],
)
def test_parts_as_papers_ran_them_have_verdicts(study, part, claim, ours, theirs, tmp_path):
    def verdict(ours_right, theirs_right, **more):
        rows = answers(ours, ours_right, **more)
        rows += [row for label in theirs for row in answers(label, theirs_right)]
        parts = {each.name: [] for each in study.STUDY.parts} | {part: rows}
        told = study.STUDY.verdicts(common.Found(study.STUDY.name, tmp_path, parts))
        (one,) = (each for each in told if each.claim.startswith(claim))
        return one.verdict

    assert (verdict(50, 0), verdict(0, 50)) == (OUT, NOT)
    assert verdict(50, 0, prompts=49) == OPEN
    idle = verdict(50, 0, deep_tokens=8000, kv_entries=8000.0)
    assert idle == "refused: acted in 0 of " + str(50 * (len(theirs) if "over 50" not in claim else 1))


def test_asl_settles_later_on_harder_tasks(tmp_path):
    """Where the variance falls at the last layer for key-value retrieval, at the first compared one for a question."""
    early, late = [8.0, 8.0, 1.0, *[8.0] * 13], [*[8.0] * 14, 1.0, 1.0]
    variance = {"kv": late, "ruler_qa_1": early, "ruler_niah_single_2": early}
    rows = [
        {"label": "lookback", "task": task, "length": 8192, "sample": at, "variance": {"4": [8.0] * 20, "8": each}}
        for task, each in variance.items()
        for at in range(50)
    ]

    def verdict(rows):
        parts = {part.name: [] for part in asl.STUDY.parts} | {"lookback": rows}
        told = asl.verdicts(common.Found("asl", tmp_path, parts))
        return next(each.verdict for each in told if each.claim.startswith("chooses the layer by the task"))

    assert asl.first_at(rows[0], 1 / 3) == 8 and asl.settles(rows[0], 8, 8) == 21
    assert (verdict(rows), verdict(rows[:49] + rows[50:]), verdict([])) == (OUT, OPEN, verdicts.LATER)
    never = [row | {"variance": {"4": [8.0] * 20, "8": [8.0] * 16}} if row["task"] == "kv" else row for row in rows]
    assert verdict(never) == "refused: acted in 0 of 50"


def test_overlap_by_distance_compares_layers_of_one_half():
    row = {"overlap": [[0.1, 0, 0], [0, 0], [0.9], []]}
    assert fastkv.by_distance(row, late=False) == [0.1] and fastkv.by_distance(row, late=True) == [0.9]


def test_budgets_below_the_window_are_left_out():
    assert rocketkv.parts(4096, rocketkv.PARTS) == [4, 8, 16, 32, 64] and rocketkv.parts(1024, (4, 16, 64)) == [4, 16]


def test_a_fixed_rate_leaves_what_the_paper_says():
    assert lagkv.left(4096, 128, 4) == 16 + 32 * 30 + 128 + 112
    assert lagkv.lags(4096) == [128, 512, 1024] and lagkv.lags(1024) == [32, 128]


def test_an_unknown_part_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="^error: no part gird; there are grid, ruler"):
        common.main(lagkv.STUDY, ["--only", "gird", "--out", str(tmp_path)])


def test_the_committed_page_is_what_the_committed_results_say():
    if not (common.RESULTS / "claims.md").exists():
        pytest.skip("nothing was committed")
    assert (common.RESULTS / "claims.md").read_text() == claims.page(common.RESULTS), (
        "run python -m benchmarks.paper.claims"
    )
