"""The Python of docs/editing.md runs, on a tiny model, and each example has edited or joined something."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import kvsieve
from kvsieve.store import PrefixStore
from toy_chats import chat_tokenizer

PAGE = (Path(__file__).parent.parent / "docs" / "editing.md").read_text()


def test_the_examples_run(model, capsys):
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(examples) == 3
    for example in examples:
        names = {"kvsieve": kvsieve, "torch": torch, "PrefixStore": PrefixStore}
        names |= {"model": model, "tokenizer": chat_tokenizer()}
        exec(compile(example, "docs/editing.md", "exec"), names)
        printed = capsys.readouterr().out
        assert printed.strip() and "None" not in printed
