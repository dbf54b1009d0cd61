"""Committed results and the pages that tell of them: every number has its stamp, every page agrees with its files."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvsieve.report.environment import UNRECORDED, stamps
from source_tree import needs_results

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What writes each result: a script, or the command of kvsieve. Every file is one of these, and none is without files.
WRITERS = {
    "advise_replay.json": "answers/advise_replay.py",
    "advise_trials.json": "answers/advise_trials.py",
    "bench/*.json": "kvsieve bench",
    "busy.json": "speed/busy.py",
    "codecs_*.json": "answers/codecs.py",
    "coverage.*": "answers/coverage.py",
    "cpu_kinds.json": "speed/cpu_kinds.py",
    "drafts_*.json": "speed/speculation.py",
    "drafts_passes.json": "speed/tentative.py",
    "edits*.json": "answers/edits.py",
    "floor.json": "answers/floor.py",
    "gpu.json": "speed/gpu.py",
    "gpu_128k.json": "speed/gpu.py",
    "gpu_kernels.json": "kernels/gpu_kernels.py",
    "joins*.json": "answers/joins.py",
    "paper/claims.md": "paper/claims.py",
    "paper/*/*/*": "paper/common.py",
    "peak_memory.json": "speed/peak_memory.py",
    "propagators.json": "answers/propagators.py",
    "qwen2.5-coder-*": "kvsieve eval",
    "reading/*.json": "speed/reading_cost.py",
    "serve*.json": "speed/serve.py",
    "serve_clients.json": "speed/serve_against.py",
    "shared_choice_*.json": "speed/shared_choice.py",
    "structured.json": "speed/structured.py",
    "sparse_prompts*.json": "answers/sparse_prompts.py",
    "store.json": "speed/store.py",
    "store_kills.json": "../tests/support/store_kills.py",
    "tool_calls.json": "answers/tool_calls.py",
    "toys_*.json": "toys/train.py",
    "vllm.json": "speed/vllm_plugin.py",
    "vllm_gpu.json": "speed/vllm_plugin.py",
    "weighted_*.json": "speed/weighted.py",
    "weights_*.json": "speed/weights.py",
    "weights_stored.json": "speed/stored.py",
}
MODELS = json.loads((ROOT / "benchmarks" / "models.json").read_text())
WEIGHTS = re.compile(r"4-bit \(?Q4_K_M\)?\s+GGUF\s+weights,?\s+dequantized\s+to\s+bfloat16")
QUANTITY = re.compile(
    r"\d[\d.,]*\s*(?:ms|s|seconds|minutes|MiB|TFLOP/s|tokens per second|times (?:faster|as))\b|\b\d+ of \d+\b"
)
pytestmark = needs_results


def committed() -> list[str]:
    """Results in git, relative to their folder; all of them outside a checkout."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        return [name for name in git("ls-files", "-z", cwd=RESULTS).split("\0") if name and (RESULTS / name).exists()]
    return [str(file.relative_to(RESULTS)) for file in RESULTS.rglob("*") if file.is_file()]


def git(*arguments: str, cwd: Path = ROOT) -> str:
    return subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=True).stdout


def pages() -> dict[Path, str]:
    return {page: page.read_text() for page in PAGES}


def cited(text: str) -> list[Path]:
    """Results that a page cites, in code or as a link, by their path or name."""
    names = re.findall(r"`([\w./*-]+\.json|[\w.-]+/[\w./-]+)`", text) + re.findall(
        r"\]\(([^)#]*results/[^)#]*)\)", text
    )
    found = []
    for name in names:
        short = re.sub(r"^(\.\./)?(benchmarks/)?(results/)?", "", name)
        if short.startswith("/") or short in ("run.json", "paper"):
            continue
        for place in (RESULTS, *(each for each in RESULTS.iterdir() if each.is_dir())):
            found += [file for file in place.glob(short) if file.exists()]
    return found


def stamps_of(place: Path) -> list[dict]:
    files = [place] if place.suffix == ".json" else sorted(place.rglob("run.json")) if place.is_dir() else []
    return [each for file in files for each in stamps(json.loads(file.read_text()))]


def test_every_result_carries_its_stamp():
    for file in RESULTS.rglob("*.json"):
        found = list(stamps(json.loads(file.read_text())))
        assert found, f"{file.name} says nothing of what was measured"
        for each in found:
            assert {"kvsieve", "commit", "processor", "torch", "weights"} <= each.keys(), file.name
            assert each["commit"], file.name
            # What pages say of a model's weights is true of these files alone.
            known = {model["weights"] for name, model in MODELS.items() if name in file.read_text()}
            if known and "sha256:" in str(each["weights"]):
                assert each["weights"] in known, f"{file.name} was measured with other weights than pages say"


def test_every_commit_that_was_measured_is_in_the_history():
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("no history here")
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("a part of the history is not here")
    history = set(git("rev-list", "HEAD").split())
    known = {commit[:length] for commit in history for length in (7, 12)}
    for file in RESULTS.rglob("*.json"):
        for each in stamps(json.loads(file.read_text())):
            commit = each["commit"].rstrip("+")
            assert commit == UNRECORDED or commit in known, f"{file.name} was measured at {commit}, which is gone"


def test_every_result_has_a_writer_and_a_reader():
    names = committed()
    texts = "\n".join(pages().values()) + "".join(
        file.read_text() for file in (ROOT / "benchmarks").rglob("*.py") if file.name in ("evidence.py", "pages.py")
    )
    for pattern, writer in WRITERS.items():
        mine = fnmatch.filter(names, pattern if "*" in pattern or "." in pattern else f"{pattern}/*")
        assert mine, f"nothing is called {pattern}"
        assert writer.startswith("kvsieve ") or (ROOT / "benchmarks" / writer).is_file(), writer
    # Patterns in code or in a string: `results/toys_*.json`, glob("serve_against*.json").
    patterns = re.findall(r"[`\"/]([\w.-]+\*[\w.]*)[`\"]", texts)
    for name in names:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in WRITERS), f"no script writes {name}"
        path = Path(name)
        # Of a directory of results its own name and the one around it, of a file also its script or page: coverage.md.
        shown = [f"{path.stem}."] if len(path.parts) == 1 else [path.parts[0], path.parts[-2]]
        is_cited = any(each in texts for each in shown) or any(fnmatch.fnmatch(path.name, each) for each in patterns)
        assert is_cited, f"no page tells of {name}"


@pytest.fixture(scope="module")
def generated():
    pytest.importorskip("matplotlib")
    from benchmarks import evidence, pages

    found = evidence.evidence()
    return pages, pages.pages(found), pages.pictures(found)


def test_the_pages_are_what_the_results_say(generated):
    module, parts, _ = generated
    for page, filled in parts.items():
        assert module.filled(page.read_text(), filled) == page.read_text(), "run python -m benchmarks.pages"


def test_the_pictures_show_what_the_results_say(generated):
    module, _, pictures = generated
    for name, panels in pictures.items():
        file = module.PICTURES / f"{name}.png"
        assert module.digest(panels).encode() in file.read_bytes(), f"{name}.png is old: run python -m benchmarks.pages"
        assert file.stat().st_size < 150_000
    assert {file.stem for file in module.PICTURES.iterdir()} == set(pictures)


@pytest.mark.parametrize(("name", "most"), [("choosing.md", 1900), ("performance.md", 1400)])
def test_the_pages_of_numbers_are_short(name, most):
    """Tables for who wants numbers do not count."""
    text = (ROOT / "docs" / name).read_text()
    text = re.sub(r"<!-- (numbers|provenance|speed) -->.*?<!-- end -->", "", text, flags=re.S)
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= most


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_agrees_with_the_files_it_cites(page):
    text = page.read_text()
    for name in re.findall(r"`(?:\.\./)?(benchmarks/[\w./-]+\.(?:py|json|md))`", text):
        assert (ROOT / name).is_file(), f"{page.name} cites {name}, which is gone"
    found = [each for place in cited(text) for each in stamps_of(place)]
    measured = {each["kvsieve"] for each in found}
    for version in re.findall(r"[Vv]ersion (\d+\.\d+\.\d+)", text):
        assert version in measured, f"{page.name} names {version}, measured was {measured}"
    qwen = re.search(r"Qwen2\.5-Coder-\d", text)
    if qwen and any(each["weights"] != "random" for each in found):
        assert WEIGHTS.search(text), f"{page.name} does not say what the weights are"


def test_numbers_of_the_readme_come_from_files():
    """Measured numbers stand in the generated table or in a paragraph that cites the file they come from."""
    text = (ROOT / "README.md").read_text()
    for generated in (
        r"<!-- (?:gains|measured) -->.*?<!-- end -->",
        r"```.*?```",
        r"^ {4}.*$",
        r"^\| `make .*$",
    ):
        text = re.sub(generated, "", text, flags=re.S if "?" in generated else re.M)
    for paragraph in text.split("\n\n"):
        measured = QUANTITY.findall(paragraph)
        assert not measured or cited(paragraph), f"{measured} of the README come from no file"


def test_a_further_model_is_taken_in_when_its_results_appear(generated, tmp_path):
    module, *_ = generated
    from benchmarks.evidence import MODELS, Evidence

    first, second = "Qwen2.5-Coder-0.5B-Instruct", "Qwen2.5-Coder-1.5B-Instruct"
    results = tmp_path / MODELS[second]["results"]
    results.mkdir()
    (results / "ruler").symlink_to(RESULTS / MODELS[first]["results"] / "ruler")
    (tmp_path / "bench").mkdir()
    report = json.loads((RESULTS / "bench" / "qwen2.5-coder-0.5b_8k.json").read_text())
    for rounds, name in ((7, second), (2, first)):
        made = {**report, "model": name, "rounds": rounds}
        (tmp_path / "bench" / f"{rounds}.json").write_text(json.dumps(made))
    one = Evidence(second, tmp_path)
    assert list(one.sets) == ["ruler"] and one.sets["ruler"].prompts == 112 and list(one.speeds) == [8192]
    assert f"**{second}**" in module.numbers_table(one) and "medians of 7 rounds" in module.speed_table(one)
    drawn = module.pictures([Evidence(first), one])
    assert sum(second in panel.title for panels in drawn.values() for panel in panels) == 3
