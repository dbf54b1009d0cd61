"""The distribution kvsieve-vllm: its version, that of vLLM, and its entry point."""

from __future__ import annotations

import tomllib
from pathlib import Path

import kvsieve
from kvsieve_vllm import engine, plugin

PLUGIN = Path(__file__).parents[2] / "plugins" / "vllm"
PROJECT = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]


def test_it_has_kvsieves_version_and_the_tested_one_of_vllm():
    assert PROJECT["version"] == kvsieve.__version__
    assert {f"kvsieve=={kvsieve.__version__}", f"vllm=={engine.TESTED[-1]}"} <= set(PROJECT["dependencies"])


def test_its_entry_point_and_backends_are_there():
    assert PROJECT["entry-points"]["vllm.general_plugins"] == {"kvsieve": f"{plugin.__name__}:register"}
    assert callable(plugin.register)
    for path in plugin.BACKENDS.values():
        assert (PLUGIN / f"{path.rpartition('.')[0].replace('.', '/')}.py").is_file()
