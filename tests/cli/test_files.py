"""Files and streams that go wrong: ~ in names, full disks, closed streams, encodings; no result is lost by them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from kvsieve.cli import methods_table
from kvsieve.cli.main import app

FULL = Path("/dev/full")
WORDS = " ".join(f"w{number % 60}" for number in range(80))
needs_full = pytest.mark.skipif(not FULL.exists(), reason="the system has no file that is always full")

# Commands with an option or argument that is a path; {} is the path.
PATHS = [
    "run --prompt w1 --store={}",
    "run --prompt w1 --json-schema={}",
    "ask a.txt --question w1 --store={}",
    "chat --store={}",
    "bench --out={}",
    "bench --plots={}",
    "bench --show={}",
    "eval --out={}",
    "report a --out={}",
    "report a --csv={}",
    "report {}",
    "calibrate --out={}",
    "calibrate --plot={}",
    "advise --plot={}",
    "store ls {}",
    "store verify {}",
    "store rm {}",
    "store export {} b.tar",
    "store export a {}",
    "store import {} b.tar",
    "store import a {}",
]


@pytest.mark.parametrize("line", PATHS)
def test_a_home_directory_is_found_where_the_shell_leaves_it(line, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("USERPROFILE", "/home/ann")
    name, *words = line.format("~/here").split()
    command = typer.main.get_command(app).commands[name]
    if name == "store":
        command = command.commands[words.pop(0)]
    given = [str(value) for value in command.make_context(name, words).params.values()]
    assert any("/home/ann" in value for value in given) and not any("~" in value for value in given)


def test_a_store_in_the_home_directory_is_made_there(cli, model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    given = ("--prompt", WORDS, "--method", "full", "--max-new-tokens", 2, "--store=~/prompts")
    code, _, err = cli("run", model_dir, *given)
    assert code == 0, err
    assert any((tmp_path / "home" / "prompts").glob("*.kv")) and not any((tmp_path / "work").iterdir())
    assert len(json.loads(cli("store", "ls", "~/prompts", "--json")[1])) == 1


@needs_full
@pytest.mark.parametrize("command", ["run", "ask --csv", "ask --html", "bench"])
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_results_are_printed_though_a_file_beside_them_cannot_be_written(
    command, as_json, cli, model_dir, tmp_path, monkeypatch
):
    document = tmp_path / "a.txt"
    document.write_text(WORDS)
    page = tmp_path / "page.html"
    page.symlink_to(FULL)
    name, *more = command.split()
    given = ["--max-new-tokens", 2]
    if name == "run":
        given += [model_dir, "--prompt-file", document, "--method", "knorm:budget=20", "--show", page]
    elif name == "ask":
        given += [document, "--model", model_dir, "--question", "w1", "--methods", "full", *more, page]
    else:
        report = tmp_path / "report.json"
        keys = {"model": "a", "dtype": "float32", "device": "cpu", "batch": 1, "new_tokens": 2, "rates": None}
        report.write_text(json.dumps({**keys, "lengths": {}, "contenders": {}}))
        given = ["--show", report, "--plots", tmp_path / "plots"]
        monkeypatch.setattr("kvsieve.report.plot_style.require_matplotlib", lambda: None)
        monkeypatch.setattr("kvsieve.lab.bench.plots.draw", lambda *given: FULL.write_text("a"))
        monkeypatch.setattr("kvsieve.lab.bench.tables.tables", lambda *given, **how: [("a title", ["a"], [["b"]])])
        monkeypatch.setattr("kvsieve.lab.bench.tables.notes", lambda *given: [])
        monkeypatch.setattr("kvsieve.lab.bench.tables.closing", lambda *given: [])
    code, out, err = cli(name, *given, *(["--json"] if as_json else []))
    assert code == 1 and "error: cannot write " in err and "No space left on device" in err
    if as_json:
        assert "error" not in json.loads(out)
    else:
        assert {"run": "knorm", "ask": "documents, prefilled once", "bench": "a title"}[name] in out


@pytest.mark.parametrize("given", ["run --prompt-file none", "run --prompts-file none", "chat --file none", "nonsense"])
def test_an_error_in_json_is_one_line(given, cli):
    code, out, _ = cli(*given.split(), "--json")
    assert code == 2 and out.count("\n") == 1 and set(json.loads(out)) == {"error"}


@pytest.mark.parametrize(
    "error",
    [MemoryError("no memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes")],
    ids=["python", "torch"],
)
def test_full_memory_is_named(error, cli, monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr(methods_table, "list_methods", fail)
    code, _, err = cli("methods")
    assert code == 1 and "error: out of memory: " in err and "--chunk" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("{} methods >/dev/full", 1),
        ("{} methods --json >/dev/full", 1),
        ("{} tasks --json | head -n 1", 0),
        ("{} methods >&-", 0),
        ("{} methods 2>&-", 0),
        ("{} run --prompt-file - <&-", 2),
        ("PYTHONIOENCODING=ascii {} tasks", 0),
        ("PYTHONIOENCODING=latin-1 {} run --prompt-file 漢", 2),
    ],
)
def test_streams_of_any_kind(line, code):
    if "/dev/full" in line and not FULL.exists():
        pytest.skip("the system has no file that is always full")
    called = line.format(f"'{sys.executable}' -m kvsieve")
    done = subprocess.run(called, shell=True, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"})
    assert done.returncode == code, done.stderr
    assert not [each for each in ("Traceback", "Exception ignored", "unexpected") if each in done.stderr]
    assert "/dev/full" not in line or "error: " in done.stderr
