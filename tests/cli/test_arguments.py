"""Arguments that no file, method or number could be: each is refused in the command's own words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from unreadable import forbid

PATHS = {
    "run": ["run", "{model}", "--prompt-file", "{bad}"],
    "run, the model": ["run", "{bad}", "--prompt", "w1"],
    "run, the store": ["run", "{model}", "--prompt", "w1", "--store", "{bad}"],
    "chat": ["chat", "{model}", "--load", "{bad}"],
    "chat, to save": ["chat", "{model}", "--save", "{bad}"],
    "serve": ["serve", "{model}", "--store", "{bad}"],
    "eval": ["eval", "{model}", "--out", "{bad}"],
    "eval, a server": ["eval", "{model}", "--out", "x", "--server", "{bad}"],
    "report": ["report", "{bad}"],
}


@pytest.mark.parametrize("command", PATHS)
@pytest.mark.parametrize(("bad", "reason"), [("/x\ud800y", "half of a surrogate pair"), ("a\0b", "a null character")])
def test_text_that_no_system_takes_is_refused(command, bad, reason, model_dir, cli):
    code, _, err = cli(*(each.format(model=model_dir, bad=bad) for each in PATHS[command]))
    assert code == 2 and f"has {reason} in it" in err


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
@pytest.mark.parametrize("how", [["--set", "method=x"], ["--method", "snapkv:method=x"]])
def test_a_parameter_called_as_the_method_is_refused(command, how, model_dir, cli):
    prompt = ["--prompt", "w1"] if command == "run" else []
    code, _, err = cli(command, model_dir, *prompt, *how)
    assert code == 2 and "has no parameter 'method' (it takes " in err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["bench", "--peer-methods", "snapkv"], "--peer-methods: only with --peer-python"),
        (["bench", "--show", "a.json", "--out", "b.json", "--rounds", "1"], "--out, --rounds: not with --show"),
        (["bench", "--clients", "3"], "--clients: only with --server"),
        (["bench", "--markdown", "--json"], "--markdown: not with --json"),
        (["serve", "--store-disk", "1GiB"], "--store-disk: only with --store DIR"),
        (["run", "--prompt", "w1", "--batch", "4"], "--batch: only with --prompts-file"),
        (["run", "--prompts-file", "{file}", "--batch", "4", "--store", "x"], "--batch: not with --store"),
        (["eval", "--out", "x", "--scbench-mode", "shared"], "--scbench-mode: only with a task scbench_..."),
        (["eval", "--out", "x", "--data", "x"], "--data: files of a public benchmark, but --tasks names none"),
        (["eval", "--out", "x", "--tasks", "leval_quality", "--haystack", "noise"], "--haystack: only with generated"),
        (["eval", "--out", "x", "--task", "{rows}", "--haystack", "noise"], "--haystack: only with generated tasks"),
        (["eval", "--out", "x", "--task", "{rows}", "--data", "x"], "--data: files of a public benchmark"),
        (["eval", "--out", "x", "--methods", "kivi", "--budgets", "10%"], "no method named takes the budget of --bu"),
        (["advise", "--methods", "snapkv:budget=5%", "--budgets", "10%"], "or all have their own; leave it out"),
        (["ask", "{file}", "--question", "w1", "--methods", "full", "--budget", "10%"], "the budget of --budget 10%"),
        (["estimate", "--method", "full,kivi", "--budget", "10%"], "no method named takes the budget of --budget 10%"),
        (["calibrate", "--parts", "heads", "--budget", "10%"], "--budget: only for the part pooling"),
        (["calibrate", "--parts", "pooling", "--tsp-rate", "30%"], "--tsp-rate: only for the part tsp or asl"),
        (["calibrate", "--parts", "asl", "--rule", "argmin"], "--rule: only for the part tsp"),
        (["calibrate", "--parts", "asl", "--tolerance", "0.1"], "--tolerance: only for the part tsp"),
        (["calibrate", "--parts", "heads", "--max-layer", "2"], "--max-layer: only for the part tsp or asl"),
        (["calibrate", "--text", "{file}", "--seed", "1"], "--seed: of generated prompts, not with --text"),
    ],
)
def test_an_option_without_effect_is_refused(given, message, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, rows = tmp_path / "a.txt", tmp_path / "a.jsonl"
    file.write_text("w1 w2")
    rows.write_text('{"context": "w1", "question": "w2", "answer": "w3"}')
    code, _, err = cli(*(part.format(file=file, rows=rows) for part in given))
    assert code == 2 and message in err


def test_a_number_too_large_to_count_with_is_refused(model_dir, cli):
    code, _, err = cli("estimate", model_dir, "--batch", "9" * 400)
    assert code == 2 and "too large to count with" in err


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("how", ["forbidden", "a link to nothing"])
def test_a_file_that_cannot_be_read_is_not_called_missing(name, how, model_dir, tmp_path, cli, monkeypatch):
    for file in (tmp_path.joinpath(model_dir)).iterdir():
        (tmp_path / file.name).symlink_to(file)
    if how == "forbidden":
        forbid(monkeypatch, tmp_path / name)
    else:
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(tmp_path / "nothing")
    code, _, err = cli("run", tmp_path, "--prompt", "w1", "--max-new-tokens", "2")
    reason = "Permission denied" if how == "forbidden" else "a link to a file that is not there"
    assert code in (1, 2) and name in err and "cannot be read" in err and reason in err


def test_the_harness_that_is_missing_is_named():
    code = "import sys; sys.modules['lm_eval'] = None\nfrom kvsieve.lab.eval.lm_eval_command import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "pip install 'kvsieve[lm-eval]'" in done.stderr
    assert "Traceback" not in done.stderr
