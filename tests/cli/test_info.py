"""What the command line says of this machine: extras, kernels, and files that cannot be read."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from kvsieve.cli import info
from kvsieve.kernels.cpu import build as kernels
from kvsieve.kernels.cpu import mass, prompt
from kvsieve.models import load_tokenizer
from tiny_models import build
from toy_gguf import TOKENS, write_gguf
from unreadable import forbid


def lines(text: str, kind: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"{kind}:")]


@pytest.mark.parametrize("name", ["model.safetensors", "weights.gguf"])
def test_weights_that_may_not_be_read_are_not_missing(cli, model_dir, tmp_path, monkeypatch, name):
    shutil.copytree(model_dir, tmp_path / "model")
    file = tmp_path / "model" / name
    file.touch()
    forbid(monkeypatch, file)
    for command in (("run", "--prompt", "w1 w2"), ("doctor",)):
        _, _, err = cli(command[0], file if name.endswith("gguf") else file.parent, *command[1:])
        error = lines(err, "error")[-1]
        assert name in error and "cannot be read" in error and "Permission denied" in error


def test_doctor_lists_every_extra(cli, monkeypatch):
    monkeypatch.setattr(info, "_installed", lambda package: None)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    out = cli("doctor")[1]
    for extra, needed in project["optional-dependencies"].items():
        assert f"pip install 'kvsieve[{extra}]'" in out
        # Those that work on kvsieve itself read the file.
        if extra not in ("docs", "dev"):
            packages = {re.split(r"[\[>=]", each)[0].replace("-", "_") for each in needed} - {"kvsieve"}
            listed = {package.replace("-", "_") for package, extras in info._EXTRAS.items() if extra in extras}
            assert listed == packages


def test_a_machine_without_kernels_is_told_once(cli, model_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "false")
    monkeypatch.delenv("KVSIEVE_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "_reasons", [])
    caches = (kernels.library, mass.reason, prompt.reason)
    for each in caches:
        each.cache_clear()
    try:
        code, _, err = cli(
            *("run", model_dir, "--prompt", "w1 w2 w3", "--method", "full", "--max-new-tokens", "2"),
            *("--codec", "kivi:bits=4", "--device", "cpu", "--dtype", "float32"),
        )
    finally:
        for each in caches:
            each.cache_clear()
    told = "warning: no compiled kernels, so plain torch computes more slowly (`kvsieve doctor`): false made no kernels"
    assert code == 0 and len(lines(err, "warning")) == 1 and lines(err, "warning")[0].startswith(told)


def test_doctor_tells_what_a_gguf_file_has_and_how_its_tokenizer_differs(cli, tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    toy = build("llama", vocab_size=len(TOKENS), bos_token_id=1, eos_token_id=2, pad_token_id=0)
    file = tmp_path / "toy.gguf"
    write_gguf(toy, file)
    data = json.loads(cli("doctor", file, "--json")[1])
    vectors = 2 * toy.config.num_hidden_layers + 1
    assert data["others_in_F32"].endswith(f"in {vectors} tensors, vectors, in the model's dtype")
    assert f"in {len(list(toy.parameters())) - vectors} tensors, read in blocks by" in data["weights_in_F32"]
    assert data["tokenizer"] == f"gpt2, {len(TOKENS)} tokens, split as llama-bpe"
    assert (data["end_tokens"], data["chat_template"], data["eviction"]) == ("</s>", "no", "runs")
    assert data["rotary_positions"] == f"default, rope_theta {toy.config.rope_parameters['rope_theta']:.10g}"
    assert data["original_tokenizer"].startswith("not compared: no checkpoint is beside the file; name one as")
    tokenizer = load_tokenizer(str(file))
    for folder, added in ((tmp_path, []), (tmp_path / "other", ["They"])):
        tokenizer.add_tokens(added)
        tokenizer.save_pretrained(folder)
        toy.config.save_pretrained(folder)
    rows = lines(cli("doctor", file)[1], "original tokenizer") + lines(
        cli("doctor", file, folder)[1], "original tokenizer"
    )
    assert rows[0].endswith(f"same as {tmp_path} on a test text")
    assert rows[1].endswith(f"differs from {folder} in: contractions")
    assert "compared with a .gguf file, got" in cli("doctor", tmp_path, folder)[2]


def test_doctor_finds_the_original_in_the_hubs_cache(tmp_path, monkeypatch):
    import huggingface_hub

    from kvsieve.cli import gguf_facts

    keys = {"general.source.url": "https://huggingface.co/owner/name", "general.base_model.0.repo_url": "elsewhere"}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *name: f"/cache/{'/'.join(name)}")
    assert gguf_facts._repository(keys) == "owner/name"
    assert gguf_facts._cached("owner/name") == "/cache/owner/name"
    assert gguf_facts._repository({"general.source.url": "https://huggingface.co/owner/name/tree"}) is None
    assert gguf_facts._cached(None) is None
