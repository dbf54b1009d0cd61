"""Scripts and the notebook of examples/ run, on a tiny model whose answers mean nothing, and print what they should."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

import kvsieve.planning.registry
from tiny_models import build
from toy_chats import chat_tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
# parallel.py runs under torchrun; tests/hf/test_parallel.py runs it.
SCRIPTS = {path.stem for path in EXAMPLES.glob("*.py")} - {"parallel"}
pytestmark = pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> str:
    """A checkpoint as `model_dir` is, with a chat template and room for the document."""
    folder = tmp_path_factory.mktemp("chats")
    build("llama", max_position_embeddings=4096).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def example(chat_model, capsys, monkeypatch, tmp_path):
    """Run a script of examples/ and return what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--model", chat_model, *arguments])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def numbers(pattern: str, text: str) -> list[tuple[int, ...]]:
    """Of each match in lines of `text`, its groups."""
    return [tuple(map(int, found.groups())) for found in re.finditer(pattern, text, re.M)]


def test_every_script_is_short_says_how_to_run_it_and_is_run_here():
    tested = set(re.findall(r'example\(\s*"(\w+)"', Path(__file__).read_text()))
    assert tested == SCRIPTS
    for name in SCRIPTS:
        text = (EXAMPLES / f"{name}.py").read_text()
        assert len(text.splitlines()) <= 50, name
        assert f"python examples/{name}.py [--model MODEL]" in text


def test_summarise_passes_fewer_tokens_on_and_keeps_fewer_entries(example):
    printed = example("summarise")
    assert re.findall(r"^(\w+): ", printed, re.M) == ["full", "fastkv"]
    (full, deep, kept), fast = numbers(
        r"(\d+) prompt tokens, (\d+) of them through the last layer; (\d+) entries", printed
    )
    assert full == deep == kept > 900
    assert fast == (full, int(full * 0.4), int(full * 0.4))


def test_the_long_chat_grows_and_its_cache_does_not(example):
    printed = example("long_chat", "--max-new-tokens", "40")
    parts = printed.split("lagkv > ", 1)
    full, lagkv = (numbers(r"(\d+) tokens so far, at most (\d+) entries", part) for part in parts)
    assert len(full) == len(lagkv) == printed.count("full > ") == printed.count("lagkv > ") == 5
    # The last token of an answer is fed with the next question.
    assert all(stored == tokens - 1 for tokens, stored in full)
    tokens, stored = zip(*lagkv, strict=True)
    assert tokens == tuple(sorted(tokens)) and tokens[-1] > 128 + 32
    # While a partition fills, LagKV holds up to `lag` more than its budget.
    assert max(stored) <= 128 + 32


def test_sparse_reading_reads_less_than_is_stored(example):
    printed = example("sparse_reading")
    stored, read = numbers(r"(\d+) of (\d+) entries stored", printed), numbers(r"(\d+) read per token", printed)
    (full, prompt), (rocket, _), (multi, _) = stored
    assert full == multi == prompt > rocket
    assert read[0][0] >= prompt and read[1][0] < 512 and read[2][0] < 512


def test_a_saved_cache_is_read_once_and_asked_again(example, tmp_path):
    first = example("saved_cache")
    assert numbers(r"read (\d+) tokens, saved", first)[0][0] > 900
    assert first.count("> ") == 4 and first.startswith("full KV, ")
    before = (tmp_path / "minutes.kv").read_bytes()
    again = example("saved_cache")
    # The second run reads no document and answers alike.
    assert again and first.endswith(again)
    assert (tmp_path / "minutes.kv").read_bytes() == before


def test_rows_of_the_padded_batch_answer_as_they_do_alone(example):
    printed = example("padded_batch")
    assert re.findall(r"^(\w+): ", printed, re.M) == ["full", "snapkv"]
    ((full, snapkv),) = [numbers(r"(\d+) entries kept at most", printed)]
    tokens = numbers(r"^    (\d+) tokens: ", printed)
    assert len(tokens) == 6 and tokens[0] > tokens[1] > tokens[2] and tokens[:3] == tokens[3:]
    assert full == tokens[0] and snapkv == (200,)
    assert printed.count("alone: the same answer") == 6


def test_a_method_of_ones_own_runs_beside_those_that_are_there(example, monkeypatch):
    monkeypatch.setattr(kvsieve.planning.registry, "_METHODS", dict(kvsieve.planning.registry._METHODS))
    printed = example("own_method")
    assert re.findall(r"^(\w+): ", printed, re.M) == ["full", "weighed", "snapkv", "knorm"]
    assert "weighed" in kvsieve.list_methods()


def test_methods_are_compared_with_full_kv(example):
    printed = example("compare_methods")
    rows = re.findall(r"^(\w+) +score +(\d+)%   KL from full KV ([\d.]+)   (\d+) entries", printed, re.M)
    assert [name for name, *_ in rows] == ["full", "snapkv", "streamingllm", "mine"]
    full, *others = [(float(distance), int(stored)) for _, _, distance, stored in rows]
    assert full[0] == 0 and full[1] > 900
    assert all(distance > 0 and stored <= 0.4 * full[1] for distance, stored in others)
    assert len(re.findall(r"^    (?:right|LOST ) ", printed, re.M)) == 4 * 3


def test_the_cells_of_the_tour_run_from_top_to_bottom(chat_model, capsys, monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    names: dict = {}
    printed = []
    for number, cell in enumerate(cells):
        source = "".join(cell["source"]).replace("MODEL = None", f"MODEL = {chat_model!r}")
        exec(compile(source, f"tour.ipynb, code cell {number}", "exec"), names)
        printed.append(capsys.readouterr().out)
    assert "fastkv" in printed[1]
    assert re.findall(r"^(\w+): ", printed[2], re.M) == ["full", "snapkv"]
    ((stored, read),) = numbers(r"(\d+) entries stored, (\d+) read per token", printed[3])
    assert read < 256 <= stored < names["prompt"]["input_ids"].shape[1]
    assert printed[5].count("> ") == 2
    assert not names["sieve"].attached
