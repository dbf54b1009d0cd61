"""The Python of the pages for users runs as it stands, on a tiny model in place of the demo model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import kvsieve
from kvsieve.planning.profiles import load_profile
from tiny import tiny_model, tiny_prompt
from toy_chats import chat_tokenizer

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("index.md", "chats.md", "options.md", "codecs.md", "sparse.md", "speculation.md", "calibrate.md")
WORDS = " ".join(f"w{number % 60}" for number in range(300))
# Beginnings of blocks that need a model of real text, or a package that tests may lack.
LEFT_OUT = ('plan = kvsieve.plan("specprefill"', "schema = ")


def names() -> dict:
    """What the blocks take from before: a model, its tokenizer, prompts, and a plan that is attached."""
    tokenizer = chat_tokenizer()
    text = [WORDS[:90], WORDS[:60]]
    return {
        "kvsieve": kvsieve,
        "torch": torch,
        "Path": Path,
        "model": tiny_model(max_position_embeddings=8192),
        "tokenizer": tokenizer,
        "ids": tiny_prompt(size=1000),
        "inputs": tokenizer(WORDS[:90], return_tensors="pt"),
        "more": tiny_prompt(size=4),
        "context": tiny_prompt(size=100),
        "questions": [tiny_prompt(size=4, seed=seed) for seed in (1, 2)],
        "prompts": tokenizer(text, return_tensors="pt", padding=True, padding_side="left"),
        "messages": [{"role": "system", "content": "w1 w2"}, {"role": "user", "content": "w3 w4"}],
    }


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)
    assert blocks
    (tmp_path / "LICENSE").write_text(WORDS)
    load_profile("smollm2-135m-instruct").save(tmp_path / "profile.json")
    monkeypatch.setenv("KVSIEVE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    given = names()
    monkeypatch.setattr(kvsieve.models, "load_demo", lambda: (given["model"], given["tokenizer"]))
    space = dict(given)
    for block in blocks:
        if block.startswith(LEFT_OUT):
            continue
        space |= {name: given[name] for name in ("ids", "questions")}
        if "sequences, questions" in block:
            space["questions"] = tiny_prompt(rows=2, size=4)
        if "sieve." in block and "with " not in block:
            # A call of options.md, inside the block that the page opens with.
            with kvsieve.attach(
                space["model"], kvsieve.plan("snapkv", budget="20%"), tokenizer=space["tokenizer"]
            ) as sieve:
                exec(compile(block, page, "exec"), {**space, "sieve": sieve})
        else:
            exec(compile(block, page, "exec"), space)
