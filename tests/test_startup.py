"""What is loaded when: the command line answers at once, and names of the package are loaded when they are used."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import kvsieve

pytestmark = pytest.mark.slow

HEAVY = ("torch", "transformers", "numpy", "matplotlib")


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_importing_loads_neither_torch_nor_transformers_and_names_come_on_demand():
    program = f"""
import sys
import kvsieve
from kvsieve.cli.main import app
heavy = [name for name in {HEAVY} if name in sys.modules]
assert not heavy, heavy
assert set(kvsieve.__all__) <= set(dir(kvsieve))
assert "snapkv" in kvsieve.list_methods() and kvsieve.method_info("h2o").name == "h2o"
assert "transformers" not in sys.modules and "torch._dynamo" not in sys.modules
assert kvsieve.methods.SnapKV is sys.modules["kvsieve.methods.snapkv"].SnapKV
assert kvsieve.models.load_demo.__module__ == "kvsieve.models.demo"
assert "torch._dynamo" not in sys.modules
assert callable(kvsieve.attach) and kvsieve.hf.attach.attach is kvsieve.attach
"""
    ran = python("-c", program)
    assert ran.returncode == 0, ran.stderr


def test_a_method_is_found_though_nothing_but_the_registry_was_imported():
    ran = python("-c", "from kvsieve.registry import method_info; print(method_info('snap-kv').name)")
    assert (ran.returncode, ran.stdout) == (0, "snapkv\n"), ran.stderr


def test_all_names_are_there_and_wrong_ones_are_not():
    assert all(getattr(kvsieve, name) is not None for name in kvsieve.__all__)
    assert kvsieve.plans.Plan is kvsieve.Plan
    for name in ("nothing", "_hidden", "__wrapped__"):
        assert not hasattr(kvsieve, name)
    with pytest.raises(AttributeError, match="module 'kvsieve' has no attribute 'nothing'"):
        kvsieve.nothing  # noqa: B018


def test_help_of_every_command_and_the_version_load_nothing_heavy():
    # One process for all; it has to be another one than this, which has loaded torch already.
    program = f"""
import contextlib, io, sys
import typer.main
from kvsieve.cli.main import app, run_cli
commands = [[name] for name in typer.main.get_command(app).commands]
assert ["calibrate"] in commands and ["run"] in commands
for arguments in [["--version"], ["--help"], [], *([*each, "--help"] for each in commands)]:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            run_cli(arguments)
    except SystemExit as leaving:
        assert leaving.code == 0, arguments
    assert ("kvsieve {kvsieve.__version__}\\n" == printed.getvalue()) == (arguments == ["--version"]), arguments
    assert ("Usage" in printed.getvalue()) == (arguments != ["--version"]), arguments
    heavy = [name for name in {HEAVY} if name in sys.modules]
    assert not heavy, (arguments, heavy)
"""
    ran = python("-c", program)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_python_m_kvsieve_is_the_command():
    ran = python("-m", "kvsieve", "--version")
    assert (ran.returncode, ran.stdout) == (0, f"kvsieve {kvsieve.__version__}\n"), ran.stderr
    ran = python("-m", "kvsieve", "--no-such-option")
    assert ran.returncode == 2 and "no-such-option" in ran.stderr


def test_tab_completes_commands_and_options():
    def completed(words: str, at: int) -> list[str]:
        ran = python(
            "-m", "kvsieve", _KVSIEVE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(at), COMP_LINE=words
        )
        return ran.stdout.split()

    assert completed("kvsieve cal", 1) == ["calibrate"]
    assert completed("kvsieve run --prompt-f", 2) == ["--prompt-file"]
    assert "--install-completion" in python("-m", "kvsieve", "--help", COLUMNS="120").stdout


# Arguments, and what the one line says that they are refused with.
REFUSED = {
    "a method": (["run", "--prompt", "w1", "--method", "snapvk"], "did you mean 'snapkv'?"),
    "a compared method": (["run", "--prompt", "w1", "--compare", "full,fastvk"], "did you mean 'fastkv'?"),
    "a parameter": (["chat", "--set", "kernle=3"], "has no parameter 'kernle'"),
    "a codec": (["serve", "--codec", "kivy"], "did you mean 'kivi'?"),
    "a codec that is none": (["run", "--prompt", "w1", "--codec", "snapkv"], "snapkv is no codec"),
    "a sparse prefill": (["bench", "--prefill", "xatention"], "did you mean 'xattention'?"),
    "a budget": (["run", "--prompt", "w1", "--budget", "ten"], "neither a share like '20%'"),
    "a share": (["run", "--prompt", "w1", "--budget", "150%"], "must lie in (0, 1]"),
    "a length": (["eval", "--out", "x", "--lengths", "two"], "--lengths takes tokens"),
    "a chunk": (["chat", "--chunk", "much"], "expected tokens such as 7500 or 8k"),
    "memory without a unit": (["advise", "--memory", "2"], "write 2GiB or 2MiB"),
    "a server's memory": (["serve", "--kv-memory", "4"], "write 4GiB or 4MiB"),
    "a server's store": (["serve", "--store-memory", "4"], "write 4GiB or 4MiB"),
    "a dtype": (["estimate", "--dtype", "int4"], "--dtype must be one of"),
    "an engine": (["run", "--prompt", "w1", "--decode", "quick"], "--decode must be one of"),
    "a task": (["eval", "--out", "x", "--tasks", "neddle"], "did you mean 'needle'"),
    "a missing prompt": (["run", "--prompt-file", "nowhere.txt"], "No such file"),
    "a missing chat": (["chat", "--load", "nowhere.kv"], "No such file"),
    "a missing text": (["calibrate", "--text", "nowhere.txt"], "cannot read the text"),
    "a missing task": (["advise", "--task", "nowhere.txt"], "is no file"),
    "missing results": (["report", "nowhere"], "is not a directory"),
    "a missing store": (["store", "ls", "nowhere"], "there is no store"),
    "a document": (["ask", "nowhere.txt", "--question", "w1"], "nowhere.txt"),
    "a missing model": (["run", "./nowhere", "--prompt", "w1"], "is not a directory"),
    "a model elsewhere": (["doctor", "owner/name"], "HF_HUB_OFFLINE is set; name a checkpoint's directory"),
    "a text as the model": (["run", "report.txt"], "'report.txt' was taken as the model: did you mean --prompt-file"),
    "a text to talk about": (["chat", "report.txt"], "did you mean --file report.txt?"),
    "a text to serve": (["serve", "report.txt"], "'report.txt' was taken as the model; it is a file and no checkpoint"),
}


def test_what_is_refused_or_looked_up_imports_no_torch(tmp_path):
    # One process for all; it has to be another one than this, which has loaded torch already.
    (tmp_path / "report.txt").write_text("w1 w2")
    program = f"""
import contextlib, io, sys
from kvsieve.cli.main import run_cli
def run(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_cli(arguments)
        except SystemExit as leaving:
            code = leaving.code
    assert not {{"torch", "transformers"}} & set(sys.modules), arguments
    return code, out.getvalue(), err.getvalue()
for what, (arguments, message) in {REFUSED!r}.items():
    code, out, err = run(*arguments)
    assert code in (1, 2) and message in err and err.count("\\n") == 1, (what, code, out, err)
for arguments in (["methods"], ["methods", "--json"], ["tasks"], ["tasks", "--json"]):
    code, out, err = run(*arguments)
    assert code == 0 and not err and ("snapkv" in out or "needle" in out), (arguments, err)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_models_prints_its_table_without_torch_where_transformers_is_the_tables():
    program = """
import json, sys
from importlib import metadata
from kvsieve.cli import models_table
if models_table.shipped_rows(metadata.version("transformers")) is not None:
    from kvsieve.cli.main import run_cli
    try:
        run_cli(["models", "--json"])
    finally:
        assert not {"torch", "transformers"} & set(sys.modules)
"""
    ran = python("-c", program)
    assert (ran.returncode, ran.stderr) == (0, "")
