"""Checkpoints that do not fit their config: transformers would make random weights, or ignore a damaged file."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch import nn

from kvsieve import models
from kvsieve.models import ModelLoadError
from kvsieve.models.source import check_complete

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


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        # Buffers of layers of GPTQ and AWQ, and state of bitsandbytes, which are no parameters.
        (("q_proj.g_idx", "q_proj.scales", "q_proj.qzeros", "v_proj.SCB", "v_proj.weight.absmax"), None),
        (("norm.weight", "q_proj.g_idx"), r"has no norm\.weight \(1 such\)"),
        (("v_proj.weight",), r"has no v_proj\.weight"),
    ],
)
def test_of_other_libraries_layers_only_parameters_must_be_in_the_checkpoint(missing, message):
    """As transformers reports them: every name of the state dict that the checkpoint did not set."""
    model = nn.Module()
    model.q_proj, model.v_proj, model.norm = nn.Module(), nn.Module(), nn.LayerNorm(4, bias=False)
    for name in ("qweight", "qzeros", "scales", "g_idx"):
        model.q_proj.register_buffer(name, torch.zeros(4, dtype=torch.int32))
    model.v_proj.weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    info = {"missing_keys": set(missing), "unexpected_keys": {"v_proj.weight.quant_map"}, "mismatched_keys": set()}
    if message is None:
        check_complete("quantized", model, info)
        return
    with pytest.raises(ModelLoadError, match=message):
        check_complete("quantized", model, info)
