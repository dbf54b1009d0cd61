"""The README's example is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import kvsieve
from kvsieve.cli.info import methods_command

ROOT = Path(__file__).parent.parent


def test_the_ten_lines_run(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block is not None
    names: dict = {}
    exec(compile(block.group(1), "README.md", "exec"), names)
    stats = names["result"].stats
    prompt = names["prompt"]["input_ids"].shape[1]
    assert stats.applied and stats.method == "fastkv"
    assert stats.kv_entries == [int(prompt * 0.2)] * 30
    assert stats.deep_tokens == int(prompt * 0.3)
    assert "Apache" in capsys.readouterr().out


def test_the_table_of_methods_is_complete():
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| (uniform|ragged) \|", (ROOT / "README.md").read_text(), re.M)
    listed = dict(rows)
    assert listed == {name: kvsieve.method_info(name).storage for name in kvsieve.list_methods()}


def test_the_document_of_methods_is_the_generated_one(capsys):
    methods_command(markdown=True)
    assert capsys.readouterr().out == (ROOT / "docs" / "methods.md").read_text()
