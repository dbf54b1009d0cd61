"""What dtype "auto" comes to, over faked processors and GPUs."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve import devices
from kvsieve.attention import choice
from kvsieve.devices import auto_dtype
from kvsieve.hf.generate.peak_memory import resident
from tiny_models import build
from toy_gguf import write_gguf

CPUS = {
    "avx512-bf16": (["avx512_bf16"], "AVX512", True, "bfloat16", "AVX-512 BF16", "AVX-512 BF16"),
    "amx": (["avx512_bf16", "amx_bf16"], "AVX512", True, "bfloat16", "AMX and AVX-512 BF16", "AMX"),
    "arm-bf16": (["bf16"], "SVE256", True, "bfloat16", "ARM bf16", "ARM with bfloat16"),
    "arm": ([], "DEFAULT", True, "float32", "no native bfloat16", "ARM"),
    "avx512": (["avx512_vnni"], "AVX512", True, "float32", "no native bfloat16", "AVX-512 without bfloat16"),
    "avx2": (["avx2"], "AVX2", True, "float32", "no native bfloat16", "AVX2"),
    "held": (["avx512_bf16", "amx_bf16"], "AVX2", True, "float32", "no more of the processor than AVX2", "AVX2"),
    "no-onednn": (["avx512_bf16"], "AVX512", False, "float32", "without oneDNN", "AVX-512 BF16"),
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing that was chosen for a faked processor is left, or for this one while it is faked; nothing holds it."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    choice._paths.cache_clear()
    yield
    choice._paths.cache_clear()


@pytest.mark.parametrize(("features", "capability", "onednn", "dtype", "reason", "kind"), CPUS.values(), ids=CPUS)
def test_of_processors(monkeypatch, features, capability, onednn, dtype, reason, kind):
    monkeypatch.setattr(devices.platform, "machine", lambda: "aarch64" if "ARM" in kind else "x86_64")
    monkeypatch.setattr(devices, "_cpu_features", lambda: dict.fromkeys(features, True))
    monkeypatch.setattr(devices.sys, "platform", "linux")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    chosen = auto_dtype("cpu")
    assert chosen.name == dtype and chosen.dtype == getattr(torch, dtype) and reason in chosen.reason
    assert devices.cpu_kind() == kind
    products = choice.faster_here(torch.zeros(1, dtype=torch.bfloat16))
    assert products == (kind == "AVX-512 BF16") and not choice.faster_here(torch.zeros(1))


@pytest.mark.parametrize(
    ("most", "kind", "dtype"),
    [
        ("AVX512_CORE_VNNI", "AVX-512 without bfloat16", "float32"),
        ("AVX512_CORE_BF16", "AVX-512 BF16", "bfloat16"),
        ("avx10_1_512", "AVX-512 BF16", "bfloat16"),
        ("AVX10_1_512_AMX", "AMX", "bfloat16"),
        ("ALL", "AMX", "bfloat16"),
    ],
)
def test_a_lesser_kind_by_the_environment(monkeypatch, most, kind, dtype):
    monkeypatch.setattr(devices, "_cpu_features", lambda: {"avx512_bf16": True, "amx_bf16": True})
    monkeypatch.setattr(devices.sys, "platform", "linux")
    monkeypatch.setattr(devices.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
    assert devices.cpu_kind() == kind and auto_dtype("cpu").name == dtype


def test_of_a_mac(monkeypatch):
    monkeypatch.setattr(devices, "_cpu_features", lambda: {"bf16": True})
    monkeypatch.setattr(devices.sys, "platform", "darwin")
    assert auto_dtype("cpu").dtype == torch.float32 and auto_dtype("mps").dtype == torch.float16


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((12, 0), torch.bfloat16)]
)
def test_of_gpus(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    choice = auto_dtype()
    assert choice.dtype == auto_dtype("cuda:1").dtype == dtype
    assert f"{capability[0]}.{capability[1]}" in choice.reason


def test_of_what_nobody_has_seen():
    assert auto_dtype("meta") == devices.DtypeChoice(torch.float32, "nothing is known about bfloat16 on meta")


def test_torch_that_does_not_list_its_features(monkeypatch):
    """As before torch 2.10."""
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(devices.platform, "machine", lambda: "x86_64")
    found = devices._cpu_features.__wrapped__()
    assert found == {"avx512_bf16": True, "amx_bf16": False}


@pytest.mark.parametrize("native", [True, False])
def test_load_follows(monkeypatch, model_dir, native):
    monkeypatch.setattr(devices, "cpu_has", lambda name: native and name == "avx512_bf16")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    model, _ = kvsieve.models.load(model_dir, device="cpu")
    assert model.dtype == (torch.bfloat16 if native else torch.float32)
    # The checkpoint itself is in float32.
    assert kvsieve.models.load(model_dir, "checkpoint", "cpu")[0].dtype == torch.float32
    assert kvsieve.models.load(model_dir, torch.float16, "cpu")[0].dtype == torch.float16


@pytest.mark.skipif(resident() is None, reason="the system does not report resident memory")
def test_freed_memory_goes_back_to_the_system():
    pieces = [bytes(1000) for _ in range(60_000)]
    # The last piece keeps what is freed before it from going back by itself.
    last = pieces[-1]
    del pieces[:-1]
    before = resident()
    devices.return_freed_memory()
    assert resident() < before - 20_000_000
    assert len(last) == 1000


def test_loading_gives_back_what_it_has_freed(tmp_path, monkeypatch):
    write_gguf(build("llama"), tmp_path / "toy.gguf")
    calls = []
    monkeypatch.setattr(devices, "return_freed_memory", lambda: calls.append(1))
    kvsieve.models.load(tmp_path / "toy.gguf", device="cpu")
    assert calls == [1]
