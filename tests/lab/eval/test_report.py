"""The report: complete, self-contained, and shown by a browser."""

from __future__ import annotations

import builtins
import json
import re
import subprocess
import sys

import numpy as np
import pytest

import fake_results as fake
from browser import chromium
from kvsieve.cli.main import run_cli
from kvsieve.errors import KvsieveError
from kvsieve.lab.eval.aggregate import cells, cost_cells, task_means
from kvsieve.lab.eval.comparison import compared
from kvsieve.lab.eval.merge import subjects
from kvsieve.lab.eval.plots import frontier
from kvsieve.lab.eval.results import load
from kvsieve.lab.eval.tables import significant

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Results with their report."""
    from kvsieve.lab.eval.report import write_report

    where = tmp_path_factory.mktemp("results")
    fake.write_results(where, tasks=2, labels=4, budgets=("10%", "20%"), lengths=(1024, 2048), samples=3, repeats=2)
    write_report(*compared(subjects([load(where)])))
    return where


@pytest.fixture(scope="module")
def page(folder):
    return (folder / "report.html").read_text()


def cli(*arguments):
    with pytest.raises(SystemExit) as stopped:
        run_cli([str(argument) for argument in arguments])
    return stopped.value.code


def test_runs_that_differ_in_time_and_command_are_one_environment(page):
    assert "Environment 1" in page and "Environment 2" not in page


def test_the_page_needs_nothing_else(page):
    assert "http://" not in page and "https://" not in page
    sources = re.findall(r"\bsrc\s*=\s*['\"]?([^'\">]{0,12})", page)
    assert len(sources) == 18 and all(source.startswith("data:image/") for source in sources)
    assert not re.search(r"@import|url\(|<link[^>]+href=\"(?!data:)|<iframe|<script", page)
    assert page.count("<img") == len(re.findall(r'alt="[^"]{20,}"', page))


def test_the_page_holds_every_number(folder, page):
    results = load(folder)
    for cell in cells(results.samples):
        assert f"{100 * cell.score:.1f} [{100 * cell.low:.0f}–{100 * cell.high:.0f}]" in page
    for cell in task_means(cells(results.samples)):
        assert f"{100 * cell.score:.1f} ± {100 * cell.half:.1f}" in page
        assert f"<td>{cell.kl:.4f}</td>" in page
    for cell in cost_cells(results.costs):
        ratio = "" if cell.label == "full" else f" ({cell.ratios['ttft_s']:.2f}×)"
        assert f"<td>{significant(cell.median('ttft_s'))}{ratio}</td>" in page
    for title in list(fake.TITLES.values())[:2]:
        assert title in page
    assert "db01fda121c7" in page and "AMD EPYC" in page


def test_answers_are_escaped(page):
    assert "<script>alert" not in page and "<b>bold" not in page
    assert "&lt;script&gt;alert(&#x27;no&#x27;)&lt;/script&gt; &amp; &lt;b&gt;bold" in page


def test_what_did_not_run_is_visible(page):
    assert "In 8 of 168 answers the method did not run as asked (h2o)" in page
    assert "the budget holds the whole prompt: nothing was dropped" in page and "†" in page


def test_markdown_tables(folder):
    text = (folder / "tables.md").read_text()
    for cell in cells(load(folder).samples):
        assert f"{100 * cell.score:.1f} ± {100 * cell.half:.1f}" in text
    assert "**" in text and "| method | budget | TTFT s |" in text
    rows = [line for line in text.splitlines() if line.startswith("| full ")]
    assert len(rows) == 2 + 4 + 4 + 2 + 2  # summary, differences, tasks, distance, costs


def test_pictures_are_written(folder):
    names = sorted(file.stem for file in (folder / "plots").glob("*.png"))
    assert names == sorted(file.stem for file in (folder / "plots").glob("*.svg")) and len(names) == 18
    assert {name.split("-")[0] for name in names} == {"accuracy", "tradeoff", "fidelity", "needle", "latency", "kept"}
    for file in (folder / "plots").glob("*.png"):
        assert colours(file) > 20, file.name


def test_reports_of_little(tmp_path):
    """One length, one task, samples or costs alone: whatever is there is shown."""
    small = {"tasks": 1, "labels": 2, "budgets": ("64",), "lengths": (1024,), "samples": 1, "repeats": 1}
    fake.write_results(tmp_path / "a", **small, questions=("hidden",))
    (tmp_path / "a" / "costs.jsonl").unlink()
    assert cli("report", tmp_path / "a", "--formats", "svg") == 0
    assert not list((tmp_path / "a" / "plots").glob("*.png"))
    fake.write_results(tmp_path / "b", **small)
    (tmp_path / "b" / "samples.jsonl").unlink()
    assert cli("report", tmp_path / "b", "--formats", "png") == 0
    assert {file.name for file in (tmp_path / "b" / "plots").iterdir()} == {"latency-1024.png", "kept-1024.png"}


def test_json(tmp_path, capsys):
    fake.write_results(tmp_path, tasks=1, labels=2, budgets=("10%",), lengths=(1024,), samples=1, repeats=1)
    assert cli("report", tmp_path, "--json", "--formats", "svg") == 0
    data = json.loads(capsys.readouterr().out)
    assert [len(data[name]) for name in ("cells", "means", "costs")] == [4, 4, 2]
    assert str(tmp_path / "report.html") in data["files"]


def test_bad_input_is_one_line(tmp_path, capsys):
    assert cli("report", tmp_path / "none") == 2
    assert "run `kvsieve eval --out" in capsys.readouterr().err
    fake.write_results(tmp_path, tasks=1, labels=2, budgets=("10%",), lengths=(1024,), samples=1, repeats=1)
    assert cli("report", tmp_path, "--formats", "pdf") == 2
    assert capsys.readouterr().err == "error: --formats must name some of png, svg, got pdf\n"


def test_without_matplotlib(folder, monkeypatch):
    from kvsieve.lab.eval.pictures import draw

    real = builtins.__import__

    def missing(name, *rest):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(KvsieveError, match=r"pip install 'kvsieve\[eval\]'"):
        draw(load(folder))


def test_matplotlib_is_imported_only_to_draw():
    program = (
        "import sys, kvsieve, kvsieve.cli.main, kvsieve.lab.eval.report; "
        "assert not any(name.startswith('matplotlib') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_frontier():
    assert frontier([(3, 0.9), (1, 0.5), (2, 0.4), (2, 0.7), (4, 0.9)]) == [1, 3, 0]


def colours(file):
    from matplotlib.image import imread

    pixels = (imread(file)[::3, ::3, :3] * 255).astype(np.uint32)
    return len(np.unique(pixels @ np.array([1, 256, 65536], np.uint32)))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Run headless Chromium with a fresh profile: what it printed."""
    found = chromium()

    def call(*arguments):
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                   "--disable-background-networking", "--disable-component-update", "--disable-sync",
                   f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]  # fmt: skip
        done = subprocess.run([found, *options, *arguments], capture_output=True, text=True, timeout=600, check=True)
        return done.stdout

    return call


@pytest.mark.parametrize("width", [1200, 480])
def test_a_browser_shows_the_page(browser, folder, tmp_path, width):
    file = tmp_path / "page.png"
    browser(f"--window-size={width},2500", f"--screenshot={file}", (folder / "report.html").as_uri())
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 30_000
    assert colours(file) > 200


def test_a_browser_decodes_every_picture(browser, folder, page, tmp_path):
    script = (
        "<script>addEventListener('load', () => { const all = [...document.images]; document.body.dataset.shown = "
        "all.filter(each => each.complete && each.naturalWidth > 0).length + ' of ' + all.length; "
        "document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth; })</script></body>"
    )
    copy = tmp_path / "copy.html"
    copy.write_text(page.replace("</body>", script))
    dom = browser("--window-size=480,2000", "--virtual-time-budget=5000", "--dump-dom", copy.as_uri())
    assert 'data-shown="18 of 18"' in dom
    assert 'data-wide="false"' in dom, "the page scrolls sideways; only tables and pictures may"
    table = re.search(r'<table id="summary-0">.*?</table>', dom, re.S).group()
    for cell in task_means(cells(load(folder).samples)):
        if cell.length == 2048:
            assert f"{100 * cell.score:.1f} ± " in table
