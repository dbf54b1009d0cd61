"""A GGUF file wherever a model's name is taken."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

import kvsieve
from kvsieve.models import ModelLoadError, ModelNotFoundError
from tiny_models import build
from toy_gguf import TOKENS, write_gguf

pytest.importorskip("gguf")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def toy():
    return build("llama", vocab_size=len(TOKENS), bos_token_id=1, eos_token_id=2, pad_token_id=0)


@pytest.fixture(scope="module")
def file(toy, tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "toy.gguf"
    write_gguf(toy, file)
    return file


def test_it_is_the_model_that_was_written(toy, file):
    model, tokenizer = kvsieve.models.load(file, torch.float32, "cpu")
    ids = tokenizer("ab cd a b", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "ab cd a b"
    assert tokenizer.padding_side == "left" and tokenizer.pad_token is not None
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, toy(ids).logits)
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=40, window=8)) as sieve:
        result = sieve.generate(torch.arange(3, 83)[None], max_new_tokens=3, do_sample=False)
    assert result.stats.applied and max(result.stats.kv_entries) == 40


def test_commands_take_it(cli, file):
    code, out, err = cli("run", file, "--prompt", "ab cd", "--method", "full", "--max-new-tokens", "2", "--json")
    assert code == 0 and json.loads(out)["results"][0]["stats"]["prompt_tokens"] > 2, err
    code, out, err = cli("estimate", file, "--context", "1k", "--json")
    assert code == 0 and json.loads(out)["model_type"] == "llama", err


def test_what_is_wrong_is_told(cli, file, tmp_path, monkeypatch):
    with pytest.raises(ModelNotFoundError, match="not a file here.*download it"):
        kvsieve.models.load("owner/name/model-Q4_K_M.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF?")
    with pytest.raises(ModelLoadError, match="bad.gguf cannot be loaded: its header goes on beyond its 5 bytes"):
        kvsieve.models.load(tmp_path / "bad.gguf")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else found(name))
    with pytest.raises(ModelLoadError, match=r"needs the package accelerate; run `pip install 'kvsieve\[gguf\]'`"):
        kvsieve.models.load(file)
