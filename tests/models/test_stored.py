"""Checkpoints of 16 bits in float32 on a CPU: the file's own numbers, half of the bytes, and when they are expanded."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import kvsieve
from kvsieve.cli.estimate import make_report, model_config
from kvsieve.cli.specs import make_run
from kvsieve.errors import KvsieveError
from kvsieve.hf.persist.identity import model_identity
from kvsieve.hf.runtime import AttachedModel
from kvsieve.kernels.cpu import quantized as kernel
from kvsieve.kernels.cpu.build import Library
from kvsieve.lab.bench.footprint import footprint
from kvsieve.models import stored
from kvsieve.models.quantized import QuantizedEmbedding, QuantizedLinear, matrices_of, weight_bytes
from kvsieve.planning.drafts import as_draft
from tiny_models import build
from toy_words import word_tokenizer

pytestmark = [
    pytest.mark.skipif(kernel.built().loaded is None, reason="there is no C compiler"),
    pytest.mark.skipif(not stored.IS_SUPPORTED, reason="this transformers chooses dtypes itself"),
]

SHAPE = {"hidden_size": 96, "intermediate_size": 136, "num_hidden_layers": 2, "head_dim": 24}
# Layers over the file's numbers; a fused projection, biases, tied outputs, scaled embeddings, experts, Conv1D.
FAMILIES = {
    "llama": ({**SHAPE, "tie_word_embeddings": False}, 2 * 7 + 2),
    "qwen2": ({**SHAPE, "tie_word_embeddings": True}, 2 * 7 + 2),
    "phi3": ({**SHAPE, "tie_word_embeddings": False}, 2 * 4 + 2),
    "gemma3_text": ({**SHAPE, "layer_types": ["sliding_attention", "full_attention"]}, 2 * 7 + 2),
    "mixtral": (SHAPE, 2 * 4 + 2),
    "gpt2": ({"n_embd": 96, "n_layer": 2}, 2),
}
# Norms without weights, and forwards that read the weights of some layers.
OTHERS = {
    "olmo": ({**SHAPE, "tie_word_embeddings": False}, 0),
    "mamba": ({"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "tie_word_embeddings": False}, 3),
}
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
MAPS = Path("/proc/self/maps")
PROMPT = torch.arange(3, 83)[None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the directory of a family's checkpoint, which tests leave as it is."""
    root = tmp_path_factory.mktemp("checkpoints")

    def of(family="llama", kind="BF16", shards=1):
        folder = root / f"{family}-{kind}-{shards}"
        if not folder.exists():
            model = build(family, **(FAMILIES | OTHERS).get(family, ({},))[0])
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
            model.to(DTYPES[kind]).save_pretrained(folder, max_shard_size="1GB" if shards == 1 else "120KB")
            word_tokenizer().save_pretrained(folder)
        return folder

    return of


@pytest.fixture
def folder(saved, tmp_path):
    """Return the directory of a Llama's checkpoint that the test may change."""
    return shutil.copytree(saved(), tmp_path / "llama")


def load(folder, weights=None, dtype=torch.float32, **more):
    return kvsieve.models.load(folder, dtype, "cpu", weights, **more)[0]


def answer(model, plan, **more):
    with kvsieve.attach(model, plan, **more) as sieve:
        return sieve.generate(PROMPT, max_new_tokens=8, min_new_tokens=8, do_sample=False).sequences.tolist()


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_and_tokens_are_those_of_expanded_weights(saved, family, kind):
    folder = saved(family, kind)
    model, plain = load(folder), load(folder, "expand")
    kinds = [part.matrix.kind for part in model.modules() if isinstance(part, QuantizedLinear | QuantizedEmbedding)]
    assert set(kinds) == {kind} and len(kinds) == FAMILIES[family][1]
    assert {weight.dtype for weight in (*model.parameters(), *plain.parameters())} == {torch.float32}
    assert not matrices_of(plain) and model.dtype == plain.dtype == model.config.dtype
    halved = sum(matrix.nbytes for matrix in matrices_of(model))
    assert weight_bytes(plain) == weight_bytes(model) + halved
    with torch.no_grad():
        for tokens in (1, 7, 80):
            found, wanted = (one(PROMPT[:, :tokens]).logits for one in (model, plain))
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    plan = kvsieve.plan("full")
    assert answer(model, plan) == answer(plain, plan)


@pytest.mark.parametrize(("name", "given"), [("criticalkv", {"budget": 40}), ("fastkv", {"budget": 40})])
def test_plans_and_compiled_layers_run_on_it(saved, name, given):
    plan = kvsieve.plan(name, **given)
    assert answer(load(saved()), plan, decode="fused") == answer(load(saved(), "expand"), plan)


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not list a process's mapped files")
@pytest.mark.parametrize("shards", [1, 2])
def test_weights_are_the_mapped_file(saved, shards):
    folder = saved("llama", "BF16", shards)
    files = {str(file) for file in folder.glob("*.safetensors")}
    assert (len(files) == 1) == (shards == 1)
    assert {mapped_file(matrix.data.data_ptr()) for matrix in matrices_of(load(folder))} == files


def mapped_file(address):
    """Return the file that is mapped at an address, or None."""
    for line in MAPS.read_text().splitlines():
        place, *_, path = line.split(maxsplit=5)
        start, end = (int(number, 16) for number in place.split("-"))
        if start <= address < end:
            return path


def test_the_state_is_the_files_and_is_saved(saved, tmp_path):
    for family in ("llama", "qwen2"):
        model = load(saved(family))
        state = model.state_dict()
        for name, tensor in load_file(saved(family) / "model.safetensors").items():
            assert torch.equal(state[name].float(), tensor.float())
        model.save_pretrained(tmp_path / family)
        word_tokenizer().save_pretrained(tmp_path / family)
        again = load(tmp_path / family)
        assert weight_bytes(again) == weight_bytes(model) and matrices_of(again)
        with pytest.raises(KvsieveError, match="cannot be written over: save it into"):
            model.save_pretrained(saved(family))
        with torch.no_grad():
            assert torch.equal(again(PROMPT).logits, model(PROMPT).logits)


def test_sizes_copies_and_dtypes(saved):
    model, plain = load(saved("qwen2")), load(saved("qwen2"), "expand")
    with torch.no_grad():
        wanted = model(PROMPT).logits
    for found in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert found.num_parameters() == plain.num_parameters()
        assert found.get_memory_footprint(return_buffers=False) == weight_bytes(found)
        found.tie_weights()
        with torch.no_grad():
            assert torch.equal(found(PROMPT).logits, wanted)
    half = copy.deepcopy(model).to(torch.bfloat16)
    with torch.no_grad():
        expected = copy.deepcopy(plain).to(torch.bfloat16)(PROMPT).logits
        torch.testing.assert_close(half(PROMPT).logits, expected, rtol=0.05, atol=0.05)


def test_a_cache_belongs_to_both_forms(saved):
    both = (AttachedModel(load(saved(), weights), kvsieve.plan("full")) for weights in (None, "expand"))
    one, other = map(model_identity, both)
    assert one == other


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral", "olmo", "gemma3"])
def test_memory_is_counted_as_loaded(saved, family):
    name = str(saved(family))
    foot = footprint(model_config(name), "float32", "cpu", name)
    model = load(name)
    assert foot.weights == weight_bytes(model) and bool(foot.copies) == (family == "olmo")
    expanded = footprint(model_config(name), "float32", "cpu", name, "expand")
    assert expanded.copies and expanded.weights == weight_bytes(load(name, "expand"))
    for dtype, weights, size in (
        ("float32", None, foot.weights),
        ("float32", "expand", expanded.weights),
        ("bfloat16", None, expanded.weights // 2),
    ):
        report = make_report(name, [100], [make_run("full")], 1, dtype, weights)
        assert report["results"][0]["weight_bytes"] == size
        half = expanded.weights // 2
        assert report["weights"] == (["BF16"] if half < size < expanded.weights else dtype)


def wide(folder, *names):
    """Store weights in float32, with numbers that 16 bits do not have."""
    tensors = load_file(folder / "model.safetensors")
    for name in names or tensors:
        tensors[name] = tensors[name].float() * 1.0001
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def test_weights_in_float32_stay_exact_beside_others(folder):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = wide(folder, name)
    model = load(folder)
    assert torch.equal(model.get_parameter(name), tensors[name])
    assert len(matrices_of(model)) == FAMILIES["llama"][1] - 1


def as_bin(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


OTHERWISE = {
    "expand": (lambda folder, monkeypatch: None, {"weights": "expand"}),
    "images": (lambda folder, monkeypatch: None, {"images": True}),
    "bfloat16": (lambda folder, monkeypatch: None, {"dtype": torch.bfloat16}),
    "checkpoint": (lambda folder, monkeypatch: None, {"dtype": "checkpoint"}),
    "float32 file": (lambda folder, monkeypatch: wide(folder), {}),
    "pickled file": (lambda folder, monkeypatch: as_bin(folder), {}),
    "no compiler": (
        lambda folder, monkeypatch: monkeypatch.setattr(stored.kernel, "built", lambda: Library(None, "no gcc")),
        {},
    ),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_otherwise_weights_are_plain(folder, monkeypatch, case):
    prepare, options = OTHERWISE[case]
    prepare(folder, monkeypatch)
    model = load(folder, **options)
    assert not matrices_of(model) and len(list(model.parameters())) == 2 * 9 + 3
    assert model.dtype == (torch.bfloat16 if "dtype" in options else torch.float32)


@pytest.mark.parametrize("family", OTHERS)
def test_weights_that_cannot_stay_are_expanded(saved, family):
    model = load(saved(family))
    assert len(matrices_of(model)) == OTHERS[family][1] and model.dtype == torch.float32
    assert type(model.lm_head) is torch.nn.Linear and model.lm_head.weight.dtype == torch.float32


def test_an_error_is_raised_and_names_the_way_out(saved, monkeypatch):
    monkeypatch.setattr(stored, "layer_over", lambda *given: 1 / 0)
    with pytest.raises(kvsieve.models.ModelLoadError, match="division by zero.*weights='expand'"):
        load(saved())
    assert not matrices_of(load(saved(), "expand"))


def test_a_broken_file_is_read_once(folder, monkeypatch):
    calls = []
    once = AutoModelForCausalLM.from_pretrained
    spy = lambda *given, **options: calls.append(given) or once(*given, **options)  # noqa: E731
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    os.truncate(folder / "model.safetensors", 10_000)
    with pytest.raises(kvsieve.models.ModelLoadError, match="from its directory"):
        load(folder)
    assert len(calls) == 1


def test_a_damaged_checkpoint_has_the_errors_of_plain_weights(folder):
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"num_hidden_layers": 3}, "has no model.layers.2"),
        ({"intermediate_size": 64}, "has shape"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(kvsieve.models.ModelLoadError, match=message):
            load(folder)


def test_adapters_and_drafts(saved):
    peft = pytest.importorskip("peft")
    model, plain = load(saved()), load(saved(), "expand")
    found = []
    for base in (model, plain):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
        tuned = peft.get_peft_model(copy.deepcopy(base), config).eval()
        found.append(answer(tuned, kvsieve.plan("full")))
        if base is model:
            with pytest.raises(KvsieveError, match="cannot be written, nor adapters merged.*'expand'"):
                tuned.merge_and_unload()
    assert found[0] == found[1]
    always = dataclasses.replace(as_draft(plain), adapt=False)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        drafted = sieve.generate(PROMPT, max_new_tokens=8, min_new_tokens=8, do_sample=False, draft=always)
    assert drafted.sequences.tolist() == answer(model, kvsieve.plan("full"))
    assert drafted.stats.drafts.accepted > 0
