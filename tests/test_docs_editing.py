"""The Python of docs/editing.md runs, on a tiny model, and each example has edited or joined something."""

from __future__ import annotations

import re
from pathlib import Path

import kvsieve
from toy_chats import chat_tokenizer

PAGE = (Path(__file__).parent.parent / "docs" / "editing.md").read_text()


def test_the_examples_run(model, capsys, monkeypatch):
    monkeypatch.setattr(kvsieve.models, "load_demo", lambda: (model, chat_tokenizer()))
    names: dict = {}
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, "docs/editing.md", "exec"), names)
        printed = capsys.readouterr().out
        assert printed.strip() and "None" not in printed
