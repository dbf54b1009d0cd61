"""Checkpoints packed into blocks: their numbers, their file in the cache, and what is refused."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import kvsieve
from forked import forked
from kvsieve.errors import KvsieveError, KvsieveWarning
from kvsieve.models import ModelLoadError
from kvsieve.models.packed import packed_dir
from kvsieve.models.packed.blocks import pack
from kvsieve.models.packed.file import PackingPass
from kvsieve.models.quantized import QuantizedEmbedding, QuantizedLinear, weight_bytes
from tiny_models import build
from toy_words import word_tokenizer

gguf = pytest.importorskip("gguf")

# Rows of 256 and of 288 numbers, of which only the first are whole blocks of Q4_K.
SHAPE = {"hidden_size": 256, "intermediate_size": 288, "num_hidden_layers": 2, "head_dim": 64}
FAMILIES = {
    "llama": SHAPE,
    "qwen2": {**SHAPE, "tie_word_embeddings": True},
    "phi3": {**SHAPE, "tie_word_embeddings": False},
    "gemma2": {**SHAPE, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": SHAPE,
    "gpt2": {"n_embd": 256, "n_layer": 2},
}
PROMPT = torch.arange(3, 83)[None]


def keep_in(monkeypatch, folder):
    """Keep packed files in a folder; compiled kernels stay in the cache of all tests."""
    for module in ("packed.load", "fetch"):
        monkeypatch.setattr(f"kvsieve.models.{module}.cache_dir", lambda: folder)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    keep_in(monkeypatch, tmp_path / "cache")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the directory of a family's checkpoint, which tests leave as it is."""
    root = tmp_path_factory.mktemp("checkpoints")

    def of(family: str):
        if not (root / family).exists():
            model = build(family, **FAMILIES[family])
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
            model.save_pretrained(root / family)
            word_tokenizer().save_pretrained(root / family)
        return root / family

    return of


@pytest.fixture
def folder(saved, tmp_path):
    """Return the directory of a Llama's checkpoint that the test may change."""
    return shutil.copytree(saved("llama"), tmp_path / "llama")


def load(folder, weights="int4", dtype=torch.float32):
    return kvsieve.models.load(folder, dtype, "cpu", weights)[0]


def files():
    return sorted(packed_dir().glob("*")) if packed_dir().exists() else []


def dequantized(model, file):
    """Return a copy of a model with the weights of a packed file, dequantized by the package gguf."""
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    for tensor in gguf.GGUFReader(file).tensors:
        parameters[tensor.name].data = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
    model.tie_weights()
    return model


def error(weight, packed, kind):
    """Return the root of the mean squared error, relative to the weights."""
    numbers = gguf.dequantize(packed, gguf.GGMLQuantizationType[kind])
    return float((weight - torch.from_numpy(numbers)).norm() / weight.norm())


def weights(kind, rows=48, inner=512):
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(rows, inner, generator=generator)
    return {"normal": normal * 0.02, "outliers": normal**3 * 0.01, "one sign": -normal.abs() * 0.02 - 0.01}[kind]


@pytest.mark.parametrize("kind", ["normal", "outliers", "one sign"])
def test_q8_0_and_q5_0_are_the_bytes_of_the_package_gguf(kind):
    weight = weights(kind)
    weight[0] = 0
    weight[1] = torch.arange(512) - 255.5
    for name in ("Q8_0", "Q5_0"):
        expected = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[name])
        assert torch.equal(pack(weight, name), torch.from_numpy(expected))
        assert torch.equal(pack(weight.bfloat16(), name), pack(weight.bfloat16().float(), name))


@pytest.mark.parametrize("kind, most", [("normal", 0.072), ("outliers", 0.092), ("one sign", 0.055)])
def test_q4_k_is_as_close_as_its_bits_allow(kind, most):
    weight = weights(kind)
    packed = pack(weight, "Q4_K")
    assert packed.shape == (48, 2 * 144) and packed.dtype == torch.uint8
    found = error(weight, packed.numpy(), "Q4_K")
    # Q4_1 takes 5 bits a number, Q4_K 4.5.
    plain = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_1)
    assert found < most and found < error(weight, plain, "Q4_1")


def test_q4_k_of_rows_without_a_range():
    weight = torch.zeros(4, 256)
    weight[1] = 0.3
    weight[2] = -0.3
    weight[3, 7] = 5.0
    packed = pack(weight, "Q4_K").numpy()
    numbers = torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_K))
    torch.testing.assert_close(numbers, weight, rtol=1e-3, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
def test_logits_are_those_of_the_dequantized_weights(saved, family):
    folder = saved(family)
    original = AutoModelForCausalLM.from_pretrained(folder)
    for weights in ("int8", "int4"):
        model = load(folder, weights)
        file = next(file for file in files() if weights in file.name)
        with torch.no_grad():
            expected = dequantized(original, file)(PROMPT).logits
            torch.testing.assert_close(model(PROMPT).logits, expected, rtol=1e-4, atol=1e-4)
        assert not model.training and not any(p.is_meta for p in (*model.parameters(), *model.buffers()))


def test_formats_follow_the_rule(saved):
    kinds = {}
    for weights in ("int8", "int4"):
        model = load(saved("qwen2"), weights)
        layers = (QuantizedEmbedding, QuantizedLinear)
        kinds[weights] = {name: part.matrix.kind for name, part in model.named_modules() if isinstance(part, layers)}
        assert model.lm_head.matrix is model.model.embed_tokens.matrix
        assert model.model.layers[0].self_attn.q_proj.bias.abs().sum() > 0
    assert set(kinds["int8"].values()) == {"Q8_0"} and len(kinds["int8"]) == 2 * 7 + 2
    layer = "model.layers.1"
    expected = {"mlp.gate_proj": "Q4_K", "mlp.down_proj": "Q5_0", "self_attn.q_proj": "Q4_K"}
    assert {name: kinds["int4"][f"{layer}.{name}"] for name in expected} == expected
    assert kinds["int4"]["lm_head"] == kinds["int4"]["model.embed_tokens"] == "Q8_0"
    # 128 keys of 256 channels are more than a quarter; a single KV head's 64 are not.
    assert kinds["int4"][f"{layer}.self_attn.k_proj"] == "Q4_K"


def test_few_keys_and_values_stay_at_eight_bits(tmp_path):
    build("llama", **SHAPE, num_key_value_heads=1).save_pretrained(tmp_path / "one")
    word_tokenizer().save_pretrained(tmp_path / "one")
    attention = load(tmp_path / "one").model.layers[0].self_attn
    kinds = [part.matrix.kind for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert kinds == ["Q4_K", "Q8_0", "Q8_0"]


def test_the_second_load_reads_the_packed_file(folder, capsys):
    first = load(folder)
    (file,) = files()
    assert "packing" in capsys.readouterr().err
    with open(file, "r+b") as opened:
        tensor = next(t for t in gguf.GGUFReader(file).tensors if t.name == "lm_head.weight")
        opened.seek(tensor.data_offset)
        opened.write(bytes(tensor.n_bytes))
    second = load(folder)
    assert second(PROMPT).logits.abs().sum() == 0 < first.model(PROMPT).last_hidden_state.abs().sum()
    assert "packing" not in capsys.readouterr().err and files() == [file]


@pytest.mark.parametrize("known_by", ["times", "samples"])
def test_a_changed_checkpoint_is_packed_anew(folder, monkeypatch, known_by):
    if known_by == "times":
        monkeypatch.setattr("kvsieve.models.packed.load._SAMPLES", 0)
    before = load(folder)(PROMPT).logits
    facts = {path: path.stat() for path in folder.iterdir()}
    build("llama", **SHAPE, seed=1).save_pretrained(folder)
    for path, known in facts.items():
        assert path.stat().st_size == known.st_size
        if known_by == "samples":
            os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))
    assert not torch.equal(load(folder)(PROMPT).logits, before) and len(files()) == 2


@pytest.mark.parametrize("damage", ["cut off", "another model's"])
def test_a_damaged_file_is_packed_anew(folder, saved, damage):
    expected = load(folder)(PROMPT).logits
    (file,) = files()
    whole = file.read_bytes()
    if damage == "cut off":
        file.write_bytes(whole[:-100])
    else:
        load(saved("qwen2"))
        os.replace(next(other for other in files() if other != file), file)
    with pytest.warns(UserWarning, match="packing weights anew"):
        model = load(folder)
    assert torch.equal(model(PROMPT).logits, expected) and file.read_bytes() == whole


def test_a_killed_writer_leaves_nothing(folder, monkeypatch):
    write = PackingPass._write

    def killed(packing, name, tensor):
        if len(packing.written) == 5:
            os._exit(9)
        write(packing, name, tensor)

    def child(tell):
        monkeypatch.setattr(PackingPass, "_write", killed)
        load(folder)

    with forked(child) as (process, _):
        process.join()
    assert process.exitcode == 9 and files() == []
    load(folder)
    assert len(files()) == 1 and list(packed_dir().parent.glob(".tmp-*")) == []


def test_a_full_disk_and_a_closed_folder_are_told(folder, monkeypatch):
    def full(packing, name, tensor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PackingPass, "_write", full)
        with pytest.raises(ModelLoadError, match="No space left.*make room, or set KVSIEVE_CACHE"):
            load(folder)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
        with pytest.raises(ModelLoadError, match="GB are needed.*make room, or set KVSIEVE_CACHE"):
            load(folder)
    assert files() == []
    keep_in(monkeypatch, Path("/dev/null/nowhere"))
    with pytest.raises(ModelLoadError, match="cannot write to the cache directory"):
        load(folder)


def test_what_is_missing_or_not_finite_is_told(folder):
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name] / 0}, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"{name} has infinite numbers"):
        load(folder)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"no {name}"):
        load(folder)
    assert files() == []


def test_tied_weights_that_differ_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ModelLoadError, match="set tie_word_embeddings to false"):
        load(folder)


def test_what_cannot_be_packed_is_refused(folder, monkeypatch):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelLoadError, match=r"quantized already \(gptq\)"):
        load(folder)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="float32 or bfloat16, got dtype torch.float16"):
        load(folder, dtype=torch.float16)
    assert files() == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"package gguf; run `pip install 'kvsieve\[gguf\]'`"):
        load(folder)


@pytest.mark.parametrize(
    ("weights", "images", "message"),
    [
        ("int4", True, "weights='int4' packs the text part of a model only, got images=True"),
        ("blocks", False, "weights must be None, 'expand', 'int8' or 'int4', got 'blocks'"),
    ],
)
def test_a_form_that_would_have_no_effect_is_refused(folder, weights, images, message):
    for name in (folder, None):
        with pytest.raises(ModelLoadError, match=message):
            kvsieve.models.load(name, torch.float32, "cpu", weights, images)


def test_what_stays_as_it_is_is_told(saved):
    with pytest.warns(KvsieveWarning, match=r"stay in bfloat16, such as model.layers.0.mlp.experts"):
        model = load(saved("mixtral"), dtype=torch.bfloat16)
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.bfloat16
    with pytest.warns(KvsieveWarning, match=r"stay in float32, such as transformer.wpe"):
        load(saved("gpt2"))


def test_memory_falls(saved):
    plain = weight_bytes(build("llama", **SHAPE, dtype=torch.bfloat16))
    eight, four = (weight_bytes(load(saved("llama"), weights, torch.bfloat16)) for weights in ("int8", "int4"))
    assert four < 0.38 * plain and 0.5 * plain < eight < 0.55 * plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plans_run_on_it(saved, dtype):
    model = load(saved("llama"), "int4", dtype)
    for name, given in {"snapkv": {"window": 8}, "fastkv": {"window": 8}, "kivi": {}}.items():
        plan = kvsieve.plan(name, **given) if name == "kivi" else kvsieve.plan(name, budget=40, **given)
        with kvsieve.attach(model, plan) as sieve:
            result = sieve.generate(PROMPT, max_new_tokens=3, do_sample=False)
        assert result.stats.applied, name


def test_the_model_is_transformers_own_otherwise(saved, tmp_path):
    model, tokenizer = kvsieve.models.load(saved("llama"), "checkpoint", "cpu", "int8")
    plain = build("llama", **SHAPE)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert model.config.to_dict()["hidden_size"] == 256 and "quantization_config" not in model.config.to_dict()
    assert not model.is_quantized and tokenizer.padding_side == "left"
    assert model.dtype == torch.float32 and all(type(part) is not nn.Linear for part in model.modules())
    with pytest.raises(KvsieveError, match="cannot be saved"):
        model.save_pretrained(tmp_path / "copy")
