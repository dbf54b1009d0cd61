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
