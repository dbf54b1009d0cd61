"""Scripts and the notebook of examples/ succeed: on the demo model full KV and the methods they show answer."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

import kvsieve
from kvsieve.hf.sieve import Sieve
from kvsieve.models import ModelLoadError
from kvsieve.planning import budget

EXAMPLES = Path(__file__).parent.parent / "examples"
# What these show of the methods a document of half the length shows as well.
OF_HALF_THE_DOCUMENT = {"padded_batch", "saved_cache", "sparse_reading"}
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")]


@pytest.fixture(scope="module")
def demo():
    """The demo model in float32, whose answers do not depend on the processor."""
    try:
        return kvsieve.models.load(None, dtype=torch.float32, device="cpu")
    except ModelLoadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", autouse=True)
def answered_once():
    """Several examples ask the same question under the same plan: each answer is computed once."""
    known, generate = {}, Sieve.generate

    def remembered(self, inputs, *mask, **options):
        if mask:  # a chat's turn, which goes on with a cache
            return generate(self, inputs, *mask, **options)
        key = repr((self.plan, inputs["input_ids"].tolist(), options))
        if key not in known:
            known[key] = generate(self, inputs, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sieve, "generate", remembered)
        yield


def shorter(document: str) -> str:
    """Of paragraphs of more than three sentences the first two: half of the tokens, and all that is asked for."""
    paragraphs = []
    for paragraph in document.split("\n\n"):
        sentences = re.split(r"(?<=\.) (?=[A-Z])", paragraph)
        paragraphs.append(" ".join(sentences if len(sentences) <= 3 else sentences[:2]))
    return "\n\n".join(paragraphs)


@pytest.fixture(scope="module")
def short_examples(tmp_path_factory) -> Path:
    """The scripts beside a shorter document, which the model reads in half of the time."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
    (folder / "minutes.txt").write_text(shorter((EXAMPLES / "minutes.txt").read_text()))
    return folder


@pytest.fixture
def example(demo, capsys, monkeypatch, tmp_path, usual_floor, short_examples):
    """Run a script on the demo model and return what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kvsieve.models, "load", lambda *where, **how: demo)
    kvsieve.list_methods()
    monkeypatch.setattr(kvsieve.planning.registry, "_METHODS", dict(kvsieve.planning.registry._METHODS))

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        capsys.readouterr()
        folder = short_examples if name in OF_HALF_THE_DOCUMENT else EXAMPLES
        runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def answers(printed: str) -> dict[str, str]:
    """What stands behind each "name: " at the beginning of a line."""
    return {name: text for name, text in re.findall(r"^([\w-]+): (.*)$", printed, re.M)}


NUMBER = "7294163"


def test_a_method_of_ones_own_answers_as_full_kv_and_knorm_does_not(example):
    found = answers(example("own_method"))
    assert [NUMBER in found[name] for name in ("full", "weighed", "snapkv", "knorm")] == [True, True, True, False]


def test_the_tour_finds_the_number(demo, capsys, monkeypatch, usual_floor, short_examples):
    monkeypatch.chdir(short_examples)
    monkeypatch.setattr(kvsieve.models, "load", lambda *where, **how: demo)
    cells = [cell for cell in json.loads(Path("tour.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict = {}
    printed = []
    for cell in cells:
        exec("".join(cell["source"]), names)
        printed.append(capsys.readouterr().out)
    assert all(NUMBER in answers(printed[2])[name] for name in ("full", "snapkv")) and NUMBER in printed[3]
    # The conversation's answers, and full KV's.
    assert all(NUMBER in part and "Petrel" in part for part in printed[-2:])


def test_sparse_reading_finds_the_number(example):
    found = answers(example("sparse_reading"))
    assert [NUMBER in found[name] for name in ("full", "rocketkv", "rocketkv-mt")] == [True] * 3


def test_rows_of_the_padded_batch_answer(example):
    printed = example("padded_batch")
    for part in printed.split("snapkv: "):
        long, middle, short = re.findall(r"^    \d+ tokens: (.*)$", part, re.M)
        assert NUMBER in long and "pump" in middle and "Paris" in short
    assert printed.count("alone: the same answer") == 6


def test_what_streamingllm_loses_is_named(example):
    printed = example("compare_methods")
    scores = dict(re.findall(r"^(\w+) +score +(\d+)%", printed, re.M))
    assert scores["full"] == scores["snapkv"] == scores["mine"] == "100" and int(scores["streamingllm"]) < 100


def test_a_saved_cache_answers_as_full_kv_does(example, monkeypatch):
    # Of users' 512 entries too little would be evicted.
    monkeypatch.setattr(budget, "FLOOR", 256)
    full, saved = example("saved_cache").split("saved ")
    assert all(NUMBER in part and "Petrel" in part for part in (full, saved))


def test_the_long_chat_knows_both_capitals(example):
    full, lagkv = example("long_chat", "--max-new-tokens", "40").split("lagkv > ", 1)
    assert all("Paris" in part and "Rome" in part for part in (full, lagkv))


def test_both_summaries_name_the_terminal(example):
    found = answers(example("summarise"))
    assert all("approve the new ferry terminal" in found[name] for name in ("full", "fastkv"))
