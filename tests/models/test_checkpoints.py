"""Checkpoints that do not fit their config: transformers would make random weights, or ignore a damaged file."""

from __future__ import annotations

import json
import shutil

import pytest

from kvsieve import models
from kvsieve.models import ModelLoadError

HARMS = {
    "more layers": (("config.json", "num_hidden_layers", 6), r"no model\.layers\.4\..* such\): it is not complete"),
    "another width": (("config.json", "intermediate_size", 32), r"has shape \[\d+, \d+\], and config.json expects \["),
    "another output": (("config.json", "tie_word_embeddings", False), r"has no lm_head\.weight \(1 such\)"),
    "no JSON": (("generation_config.json", None, "{"), "generation_config.json is not JSON"),
}


@pytest.fixture
def checkpoint(model_dir, tmp_path):
    return shutil.copytree(model_dir, tmp_path / "model")


@pytest.mark.parametrize("harm", HARMS)
def test_a_checkpoint_that_does_not_fit_is_refused(harm, checkpoint, cli):
    (name, key, value), message = HARMS[harm]
    if harm == "another output":
        # Without an output layer of its own, as base models come.
        from safetensors.torch import load_file, save_file

        tensors = load_file(checkpoint / "model.safetensors")
        tensors.pop("lm_head.weight", None)
        save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    file = checkpoint / name
    file.write_text(value if key is None else json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(ModelLoadError, match=message):
        models.load(checkpoint)
    code, _, err = cli("run", checkpoint, "--prompt", "w1", "--max-new-tokens", 1)
    assert code == 1 and "error: cannot load " in err


def test_a_whole_checkpoint_loads(checkpoint):
    model, _ = models.load(checkpoint)
    assert model.config.num_hidden_layers == 4


def test_a_message_with_a_heading_is_quoted_beyond_it(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer_config.json").unlink()
    with pytest.raises(ModelLoadError, match="cannot load .*: .*: .*[^:]$"):
        models.load(checkpoint)
