"""What a model with weights in blocks says of itself: sizes, state, copies."""

from __future__ import annotations

import copy
import os
import pickle
import shutil

import pytest
import torch

import kvsieve
from kvsieve.errors import KvsieveError
from kvsieve.kernels.cpu import quantized as kernel
from kvsieve.models import stored
from kvsieve.models.quantized import weight_bytes
from tiny_models import build
from toy_gguf import TOKENS, write_gguf
from toy_words import word_tokenizer

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

WORDS = {"vocab_size": len(TOKENS), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NO_STORED = not stored.IS_SUPPORTED or kernel.built().loaded is None
SHAPE = {"hidden_size": 256, "intermediate_size": 288, "num_hidden_layers": 2, "head_dim": 64}


@pytest.fixture(params=["gguf", "gguf, tied", "int8", "int4"])
def models(request, tmp_path, monkeypatch):
    """A model with weights in blocks, the same one without, and the way out of what it refuses."""
    form, _, tied = request.param.partition(", ")
    model = build("llama", tie_word_embeddings=bool(tied), **(WORDS if form == "gguf" else SHAPE))
    if form == "gguf":
        name, plain, way_out = tmp_path / "toy.gguf", "expand", "weights='expand'"
        write_gguf(model, name, "Q8_0")
    else:
        name, plain, way_out = tmp_path / "toy", None, f"without weights='{form}'"
        monkeypatch.setattr("kvsieve.models.packed.load.cache_dir", lambda: tmp_path / "cache")
        monkeypatch.setattr("kvsieve.models.fetch.cache_dir", lambda: tmp_path / "cache")
        model.save_pretrained(name)
        word_tokenizer().save_pretrained(name)
    forms = (None if form == "gguf" else form, plain)
    return *(kvsieve.models.load(name, torch.float32, "cpu", weights)[0] for weights in forms), way_out


def test_sizes_include_weights_in_blocks_and_the_state_is_refused(models):
    model, plain, way_out = models
    for found in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert found.num_parameters() == plain.num_parameters() > 0
        assert found.num_parameters(exclude_embeddings=True) == plain.num_parameters(exclude_embeddings=True)
        assert found.num_parameters(only_trainable=True) == sum(one.numel() for one in found.parameters())
        assert found.get_memory_footprint(return_buffers=False) == weight_bytes(found)
        with pytest.raises(KvsieveError, match=f"no form for weights in blocks: copy .*{way_out}"):
            found.state_dict()


@pytest.mark.parametrize("wrapped", [True, False])
def test_adapters_over_blocks_are_saved_and_loaded(models, wrapped, tmp_path):
    peft = pytest.importorskip("peft")
    model = models[0]
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    ids = torch.arange(3, 43)[None]
    other = copy.deepcopy(model)
    if wrapped:
        tuned = peft.get_peft_model(model, config)
        tuned.save_pretrained(tmp_path / "adapter")
        again = peft.PeftModel.from_pretrained(other, tmp_path / "adapter")
    else:
        tuned, again = model, other
        for one in (model, other):
            peft.inject_adapter_in_model(config, one)
        state = peft.get_peft_model_state_dict(model)
        assert state and all("lora" in name for name in state)
        peft.set_peft_model_state_dict(other, state)
    with torch.no_grad():
        assert torch.equal(tuned.eval()(ids).logits, again.eval()(ids).logits)


def test_states_are_not_loaded_into_blocks(models):
    model, plain, _ = models
    names = dict(model.named_parameters()).keys()
    state = plain.state_dict()
    for strict in (True, False):
        with pytest.raises(KvsieveError, match="cannot be written.*weights='expand'"):
            model.load_state_dict(state, strict=strict)
    model.load_state_dict({name: state[name] for name in names})


@pytest.mark.parametrize(
    "name",
    [
        "toy.gguf",
        pytest.param("model.safetensors", marks=pytest.mark.skipif(NO_STORED, reason="weights are expanded here")),
    ],
)
def test_a_file_written_to_is_not_computed_with(tmp_path, name):
    file = tmp_path / name
    if name == "toy.gguf":
        write_gguf(build("llama", **WORDS), file, "Q8_0")
    else:
        build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
        word_tokenizer().save_pretrained(tmp_path)
    model, _ = kvsieve.models.load(file if name == "toy.gguf" else tmp_path, torch.float32, "cpu")
    shutil.copy(file, tmp_path / "other")
    os.utime(file, ns=(0, 0))
    with pytest.raises(KvsieveError, match=f"{name} was written to.*load the model again"):
        kvsieve.attach(model, kvsieve.plan("full")).__enter__()
    # The mapped file is another one now, which leaves it as it was.
    os.replace(tmp_path / "other", file)
    with kvsieve.attach(model, kvsieve.plan("full")):
        pass
