"""A .gguf file stays in blocks by whatever command it is loaded, and is dequantized with --weights expand."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
import torch

import kvsieve
from in_blocks import quantized
from kvsieve.models import ModelLoadError
from kvsieve.models.quantized import matrices_of
from kvsieve.serve import memory
from paths import Ask, chat_reply, plain, serving, streamed, words
from small import fill
from tiny_models import build
from toy_gguf import TOKENS, write_gguf

pytest.importorskip("gguf")

TEXT = " ".join(TOKENS[3:90])
# What the system says about its memory.
TABLE = "MemTotal: 9000 kB\nMemAvailable: 2000 kB\n"
# Options besides the model's and --dtype; {text} and {out} are paths.
COMMANDS = {
    "run": ["--prompt-file", "{text}", "--method", "snapkv", "--budget", "40%", "--max-new-tokens", "2"],
    "chat": ["--max-new-tokens", "2"],
    "ask": ["--question", "ab", "--methods", "full,snapkv:budget=40%", "--max-new-tokens", "2"],
    "serve": ["--port", "0"],
    "eval": ["--task", "{rows}", "--methods", "knorm", "--budgets", "40%", "--cost-samples", "0", "--out", "{out}"],
    "bench": ["--methods", "knorm:budget=40%", "--lengths", "100", "--rounds", "1", "--new-tokens", "2"],
    "advise": [
        "--task",
        "{rows}",
        "--context",
        "300",
        "--methods",
        "knorm",
        "--budgets",
        "40%",
        "--samples",
        "2",
        "--cost-samples",
        "0",
    ],
    "calibrate": ["--text", "{text}", "--lengths", "250", "--prompts", "1", "--parts", "heads", "--out", "{out}"],
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = build("llama", vocab_size=len(TOKENS), max_position_embeddings=4096, **ids)
    # The suffix may be in any case.
    file = tmp_path_factory.mktemp("gguf") / "Toy.GGUF"
    write_gguf(model, file)
    return file


@pytest.fixture
def command(cli, file, tmp_path, monkeypatch):
    """Call a command with the file: (exit code, stderr)."""
    (tmp_path / "text.txt").write_text(f"{TEXT} " * 4)
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"context": "{TEXT}", "question": "{word}", "answer": "ab"}}\n' for word in ("ab", "cd", "a"))
    )
    places = {"text": tmp_path / "text.txt", "rows": tmp_path / "rows.jsonl", "out": tmp_path / "out"}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab cd\n")))
    monkeypatch.setattr("kvsieve.lab.bench.roofline.READ_BYTES", 1 << 20)
    monkeypatch.setattr("kvsieve.lab.bench.roofline.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("kvsieve.serve.run.serve", lambda *given: None)
    monkeypatch.setattr("kvsieve.lab.advise.material.PROBES", ("ruler_niah_single_3",))

    def call(name, *more):
        options = [option.format(**places) for option in COMMANDS[name]]
        model = [places["text"], "--model", file] if name == "ask" else [file]
        code, _, err = cli(name, *model, *options, "--dtype", "bfloat16", "--device", "cpu", *more)
        return code, err

    return call


@pytest.fixture
def loaded(monkeypatch):
    """Models that were loaded."""
    found = []
    load = kvsieve.models.load

    def spy(*given, **more):
        model, tokenizer = load(*given, **more)
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
        found.append(model)
        return model, tokenizer

    monkeypatch.setattr(kvsieve.models, "load", spy)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_computes_with_the_blocks_of_a_file(name, command, loaded):
    code, err = command(name)
    assert (code == 0 or (name == "advise" and "recommended: none" in err)) and "in blocks of " in err, err
    assert matrices_of(loaded[0])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_expands_a_file_where_it_is_asked_to(name, command, monkeypatch):
    given = []

    def stop(*arguments, **more):
        given.append(more["weights"])
        raise ModelLoadError("stopped")

    monkeypatch.setattr(kvsieve.models, "load", stop)
    assert command(name, "--weights", "expand") == (1, "error: stopped\n")
    assert given == ["expand"]


def test_the_library_does_both(file):
    blocks, _ = kvsieve.models.load(file, torch.bfloat16, "cpu")
    plain, _ = kvsieve.models.load(file, torch.bfloat16, "cpu", weights="expand")
    assert matrices_of(blocks) and not matrices_of(plain)


def test_a_draft_model_stays_in_blocks(cli, model_dir, file, loaded):
    prompt = ["--prompt", "w1 w2", "--method", "full", "--max-new-tokens", "2", "--dtype", "bfloat16"]
    code, _, err = cli("run", model_dir, *prompt, "--draft", file)
    assert code == 0 and [bool(matrices_of(model)) for model in loaded] == [False, True], err


@pytest.mark.parametrize("name", ["run", "estimate"])
@pytest.mark.parametrize(
    ("weights", "model", "reason"),
    [
        ("int3", None, "--weights must be one of expand, int8, int4, got 'int3'; did you mean 'int8'?"),
        ("blocks", None, "a .gguf file stays in blocks without the option"),
        ("int4", "{file}", "is in blocks already: leave --weights out to use them, or give --weights expand"),
    ],
)
def test_forms_that_do_not_fit_are_refused_before_anything_is_loaded(
    name, weights, model, reason, cli, file, model_dir, monkeypatch
):
    monkeypatch.setattr(kvsieve.models, "load", lambda *given, **more: pytest.fail("loaded"))
    models = [] if model is None else [model.format(file=file, folder=model_dir)]
    prompt = ["--prompt", "w1"] if name == "run" else []
    code, _, err = cli(name, *models, *prompt, "--weights", weights)
    assert code == 2 and reason in err and err.count("\n") == 1


def test_a_server_answers_from_blocks_as_from_the_same_weights_dequantized():
    blocks, plain_model = quantized(fill(build("llama", dtype=torch.float32)))
    ask = Ask(blocks, words(50, seed=3))
    expected = plain(replace(ask, model=plain_model))
    with serving(ask) as url:
        assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == ["tiny"]
        assert chat_reply(url, ask) == expected == streamed(url, ask)


def test_mapped_weights_do_not_count_as_free_memory(monkeypatch):
    blocks, plain_model = quantized(build("llama"))
    monkeypatch.setattr(memory, "Path", lambda name: SimpleNamespace(exists=lambda: True, read_text=lambda: TABLE))
    size = sum(matrix.nbytes for matrix in matrices_of(blocks))
    assert memory.free_bytes(plain_model) == 2000 * 1024 // 2
    assert memory.free_bytes(blocks) == (2000 * 1024 - size) // 2


@pytest.mark.parametrize(("form", "kinds"), [("int8", "Q8_0"), ("int4", "Q5_0, Q8_0")])
def test_a_checkpoint_is_packed_once_and_mapped(form, kinds, cli, model_dir, tmp_path, monkeypatch):
    for module in ("packed.load", "fetch"):
        monkeypatch.setattr(f"kvsieve.models.{module}.cache_dir", lambda: tmp_path)
    command = ["run", model_dir, "--prompt", "w1", "--method", "full", "--max-new-tokens", "2", "--weights", form]
    said = [cli(*command, "--device", "cpu") for _ in range(2)]
    assert all(code == 0 and f", in blocks of {kinds}\n" in err for code, _, err in said)
    assert ["packing" in err for _, _, err in said] == [True, False]
