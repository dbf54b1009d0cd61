"""Models whose weights stay in the blocks of a GGUF file."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

import kvsieve
from kvsieve.errors import KvsieveError, KvsieveWarning
from kvsieve.hf.persist.identity import model_identity
from kvsieve.hf.runtime import AttachedModel
from kvsieve.kernels.cpu.quantized import FORMATS
from kvsieve.models import ModelLoadError
from kvsieve.models.gguf.filling import names_of
from kvsieve.models.quantized import QuantizedEmbedding, QuantizedLinear
from kvsieve.models.source import keeps_blocks
from tiny_models import build
from toy_gguf import TOKENS, write_gguf

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

WORDS = {"vocab_size": len(TOKENS), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# Settings of families, where a file's keys say less than a configuration.
FAMILIES = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3_text": {"tie_word_embeddings": True},
    "phi3": {},
    "falcon": {"tie_word_embeddings": True, "num_kv_heads": 1},
    "stablelm": {},
    "gpt2": {"tie_word_embeddings": True, "max_position_embeddings": 1024},
    "starcoder2": {},
    "nemotron": {},
    "qwen3_moe": {"head_dim": 128},
}


def write(folder, family, kind, **settings):
    file = folder / f"{family}-{kind}.gguf".replace(", ", "-")
    write_gguf(build(family.split(",")[0], **WORDS, **FAMILIES[family], **settings), file, kind)
    return file


def loaded(file, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KvsieveWarning)
        return kvsieve.models.load(file, torch.float32, "cpu", **options)[0]


def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 43)[None]).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_dequantized_weights(family, tmp_path):
    file = write(tmp_path, family, "Q8_0")
    model, expanded = loaded(file), loaded(file, weights="expand")
    torch.testing.assert_close(logits(model), logits(expanded), rtol=1e-4, atol=1e-4)
    assert type(model) is type(expanded) and not model.training and model.dtype == torch.float32
    ours, theirs = model.config.to_dict(), expanded.config.to_dict()
    theirs.pop("quantization_config", None)
    assert ours == theirs and model.name_or_path == str(file)
    assert model.config._attn_implementation == expanded.config._attn_implementation
    assert model.generation_config.to_dict() == expanded.generation_config.to_dict()
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("family", [*FAMILIES, "bloom"])
def test_names_are_those_that_transformers_finds(family):
    model = build(family.split(",")[0])
    processor = TENSOR_PROCESSORS.get(model.config.model_type, TensorProcessor)()
    model.config.model_type = {"mistral": "llama"}.get(model.config.model_type, model.config.model_type)
    assert names_of(model, processor) == get_gguf_hf_weights_map(model, processor)


@pytest.mark.parametrize("kind", [*FORMATS, "IQ4_NL"])
def test_every_type(kind, tmp_path):
    file = write(tmp_path, "llama", kind, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    model = loaded(file)
    torch.testing.assert_close(logits(model), logits(loaded(file, weights="expand")), rtol=1e-4, atol=1e-4)
    down = model.model.layers[0].mlp.down_proj
    assert type(down) is (nn.Linear if kind in ("F32", "IQ4_NL") else QuantizedLinear)


@pytest.mark.parametrize(
    ("family", "dense"),
    [
        ("llama", set()),
        ("falcon", set()),
        ("gemma3_text", set()),
        ("phi3", set()),
        ("gpt2", {"c_attn.weight", "c_fc.weight", "c_proj.weight"}),
    ],
)
def test_matrices_stay_in_blocks(family, dense, tmp_path):
    model = loaded(write(tmp_path, family, "Q8_0"))
    names = {name for name, weight in model.named_parameters() if weight.ndim > 1}
    assert {".".join(name.split(".")[-2:]) for name in names} == dense
    assert isinstance(model.get_input_embeddings(), QuantizedEmbedding)


def test_weights_that_layers_cannot_read_in_blocks_are_named(tmp_path):
    with pytest.warns(KvsieveWarning, match="gpt2-Q8_0.gguf.*dequantized to float32 in memory: 16 of Q8_0"):
        kvsieve.models.load(write(tmp_path, "gpt2", "Q8_0"), torch.float32, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvsieve.models.load(write(tmp_path, "llama", "Q8_0"), torch.float32, "cpu")


def test_weights_are_the_file_mapped_once(tmp_path):
    file = write(tmp_path, "llama, tied", "Q8_0")
    model = loaded(file)
    matrices = [layer.matrix for layer in model.modules() if isinstance(layer, QuantizedLinear | QuantizedEmbedding)]
    storages = {matrix.data.untyped_storage().data_ptr(): matrix.data.untyped_storage() for matrix in matrices}
    assert [storage.nbytes() for storage in storages.values()] == [file.stat().st_size]
    assert model.lm_head.matrix is model.get_input_embeddings().matrix
    head = model.lm_head
    model.tie_weights()
    assert model.lm_head is head


def test_copies_share_the_file_and_pickles_hold_each_weight_once(tmp_path):
    file = write(tmp_path, "llama, tied", "Q8_0")
    model = loaded(file)
    copied = copy.deepcopy(model)
    assert copied.lm_head is not model.lm_head and copied.lm_head.matrix is model.lm_head.matrix
    written = pickle.dumps(model)
    assert len(written) < 2 * file.stat().st_size
    again = pickle.loads(written)
    assert again.lm_head.matrix is again.get_input_embeddings().matrix
    assert torch.equal(logits(again), logits(model))


def test_numbers_of_the_models_dtype_are_plain_parameters_in_the_mapped_file(tmp_path):
    model = loaded(write(tmp_path, "qwen2", "F32"))
    assert not any(isinstance(layer, QuantizedLinear | QuantizedEmbedding) for layer in model.modules())
    assert model.lm_head.weight.untyped_storage().nbytes() == (tmp_path / "qwen2-F32.gguf").stat().st_size
    model = kvsieve.models.load(write(tmp_path, "qwen2", "BF16"), torch.bfloat16, "cpu")[0]
    assert type(model.lm_head) is nn.Linear and model.dtype == torch.bfloat16


def test_plans_run_on_it(tmp_path):
    file = write(tmp_path, "qwen2", "Q8_0")
    ids = torch.arange(3, 83)[None]
    found = []
    for model in (loaded(file), loaded(file, weights="expand")):
        with kvsieve.attach(model, kvsieve.plan("snapkv", budget=40, window=8)) as sieve:
            found.append(sieve.generate(ids, max_new_tokens=8, do_sample=False).sequences)
    assert torch.equal(*found)


def test_files_of_one_architecture_have_identities_of_their_own(tmp_path):
    identities = set()
    for seed, kind in ((0, "Q8_0"), (1, "Q8_0"), (0, "Q4_0"), (0, "Q8_0")):
        file = tmp_path / "same.gguf"
        write_gguf(build("llama", seed=seed, **WORDS), file, kind)
        identities.add(model_identity(AttachedModel(loaded(file), kvsieve.plan("full")))["weights"])
    assert len(identities) == 3


def test_it_cannot_be_saved_or_written(tmp_path):
    file = write(tmp_path, "llama", "Q8_0")
    with pytest.raises(KvsieveError, match="cannot be saved.*weights='expand'"):
        loaded(file).save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    loaded(file, weights="expand").save_pretrained(tmp_path / "saved")


def test_what_cannot_be_honoured_is_refused(tmp_path):
    file = write(tmp_path, "llama", "Q8_0")
    with pytest.raises(ModelLoadError, match="float32 or bfloat16, got torch.float16.*weights='expand'"):
        kvsieve.models.load(file, torch.float16, "cpu")
    with pytest.raises(ModelLoadError, match="already quantized"):
        kvsieve.models.load(file, torch.float32, "cpu", weights="int8")
    with pytest.raises(ModelLoadError, match="weights must be None, 'expand', 'int8' or 'int4', got 'int2'"):
        kvsieve.models.load(None, torch.float32, "cpu", weights="int2")
    with pytest.warns(KvsieveWarning, match="cuda has no kernels for blocks"):
        assert not keeps_blocks(str(file), None, "cuda")
    assert keeps_blocks(str(file), None, "cpu") and not keeps_blocks(str(file), "expand", "cuda")


def test_tensors_that_do_not_fit_are_named(tmp_path):
    model = build("qwen2", **WORDS)
    model.model.norm.weight = nn.Parameter(torch.ones(32))
    write_gguf(model, tmp_path / "narrow.gguf")
    with pytest.raises(ModelLoadError, match=r"weight for model.norm.weight has shape \[32\], the model's is \[64\]"):
        kvsieve.models.load(tmp_path / "narrow.gguf", torch.float32, "cpu")
    del model.model.norm.weight
    write_gguf(model, tmp_path / "less.gguf")
    with pytest.raises(ModelLoadError, match="no tensor for model.norm.weight of Qwen2ForCausalLM"):
        kvsieve.models.load(tmp_path / "less.gguf", torch.float32, "cpu")
    write_gguf(build("llama", attention_bias=True, **WORDS), tmp_path / "more.gguf")
    with pytest.raises(ModelLoadError, match="attn_q.bias has no place in LlamaForCausalLM.*weights='expand'"):
        kvsieve.models.load(tmp_path / "more.gguf", torch.float32, "cpu")


def test_lora_adapters_train_on_it(tmp_path):
    peft = pytest.importorskip("peft")
    model = loaded(write(tmp_path, "llama", "Q8_0"))
    before = logits(model)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    torch.testing.assert_close(logits(tuned), before)
    tuned(torch.arange(3, 43)[None], labels=torch.arange(3, 43)[None]).loss.backward()
    trained = [weight for weight in tuned.parameters() if weight.requires_grad]
    assert trained and all(weight.grad is not None for weight in trained)
