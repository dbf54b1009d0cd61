"""Contract with vLLM's Triton backend, on CPU tensors: it attends to what the one for CPUs attends to.

The engine, its scheduler and our backend are those of a GPU; the kernel is vLLM's own under Triton's interpreter, which
is slow, or what it is documented to compute, in torch. Pages are chosen in plain torch, as on GPUs.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from engines_of_vllm import answers, assert_alike, metric, prompts_of

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment that has it")

LENGTHS = [40, 300, 129, 512, 7]


def store(key, value, key_cache, value_cache, slots, *scales) -> None:
    """Keys and values [rows, heads, dim] in caches [pages, page, heads, dim]; negative slots are padding."""
    at, size = slots[slots >= 0], key_cache.shape[1]
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache[at // size, at % size] = new[: len(slots)][slots >= 0]


def attend(q, k, v, out, cu_seqlens_q, seqused_k, block_table, softmax_scale, causal, window_size, **rest) -> None:
    """Causal attention of requests to the pages in their block tables, [pages, page, heads, dim]."""
    assert causal is True and window_size == (-1, -1) and rest["softcap"] == 0
    assert rest["max_seqlen_q"] >= int(cu_seqlens_q.diff().max()) and rest["max_seqlen_k"] >= int(seqused_k.max())
    rows, size = cu_seqlens_q.tolist(), k.shape[1]
    for number, length in enumerate(seqused_k.tolist()):
        pages = block_table[number, : -(-length // size)].long()
        asked = q[rows[number] : rows[number + 1]].unflatten(1, (k.shape[2], -1)).permute(1, 2, 0, 3)
        keys, values = (each[pages].flatten(0, 1)[:length].transpose(0, 1)[:, None] for each in (k, v))
        weights = asked @ keys.transpose(2, 3) * softmax_scale
        new = asked.shape[2]
        hidden = torch.ones(new, length, dtype=torch.bool).triu(length - new + 1)
        got = weights.masked_fill(hidden, float("-inf")).softmax(-1) @ values
        out[rows[number] : rows[number + 1]] = got.permute(2, 0, 1, 3).flatten(1, 2)


@pytest.fixture
def in_torch(monkeypatch):
    """The backend for GPUs in place of the one for CPUs, its two kernels in torch; counts the calls."""
    from vllm.v1.attention.backends import triton_attn

    from kvsieve_vllm import pages, plugin

    calls = []

    def attended(**given) -> None:
        calls.append(len(given["seqused_k"]))
        attend(**given)

    monkeypatch.setitem(plugin.BACKENDS, "CPU_ATTN", plugin.BACKENDS["TRITON_ATTN"])
    monkeypatch.setattr(triton_attn, "triton_reshape_and_cache_flash", store)
    monkeypatch.setattr(triton_attn, "unified_attention", attended)
    monkeypatch.setattr(pages, "usable", lambda bounds: False)
    return calls


@pytest.fixture
def interpreted_kernel(in_torch, monkeypatch):
    """vLLM's attention kernel, defined anew for Triton's interpreter: its CPU build defines it for nothing."""
    triton = pytest.importorskip("triton")
    import vllm.triton_utils
    from vllm.v1.attention.backends import triton_attn

    from interpreted import interpreted

    with interpreted():
        monkeypatch.setattr(vllm.triton_utils, "triton", triton)
        monkeypatch.setattr(vllm.triton_utils, "tl", triton.language)
        folder = "vllm.v1.attention.ops"
        for name in ("triton_attention_helpers", "triton_unified_attention"):
            monkeypatch.delitem(sys.modules, f"{folder}.{name}", raising=False)
        kernel = importlib.import_module(f"{folder}.triton_unified_attention").unified_attention
        calls = []

        def attended(**given) -> None:
            calls.append(len(given["seqused_k"]))
            kernel(**given)

        monkeypatch.setattr(triton_attn, "unified_attention", attended)
        yield calls


def of_cpus(engine, monkeypatch, plan: str | None, prompts, tokens: int = 24, **options):
    """Answers of the backend for CPUs."""
    from kvsieve_vllm import plugin

    with monkeypatch.context() as other:
        other.setitem(plugin.BACKENDS, "CPU_ATTN", "kvsieve_vllm.cpu_backend.SieveCPUBackend")
        with engine(plan, **options) as llm:
            return answers(llm, prompts, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("batched", [64, 1024])
def test_all_pages_read_is_dense_attention(engine, monkeypatch, in_torch, batched):
    prompts = prompts_of(LENGTHS)
    dense = of_cpus(engine, monkeypatch, None, prompts, max_num_batched_tokens=batched)
    with engine("quest:budget=64:page=32", self_test=True, max_num_batched_tokens=batched) as llm:
        assert_alike(answers(llm, prompts), dense)
    # Both KV heads of each request are requests of their own while decoding.
    assert in_torch.count(2 * len(prompts)) >= 3


@pytest.mark.parametrize(
    "plan",
    [
        "rocketkv:budget=128:window=16",
        "quest:budget=96:page=32:skip_layers=1",
        "quest:budget=96:page=8:means=true",
        "snapkv:budget=96:window=16:kernel=7:every=12",
        "hsa:budget=128",
        "lagkv:budget=96:lag=32:sinks=32",
    ],
)
def test_what_is_read_and_kept_is_what_it_is_on_cpus(engine, monkeypatch, in_torch, plan):
    prompts = prompts_of(LENGTHS, seed=2)
    options = {"max_num_batched_tokens": 300, "enable_prefix_caching": False}
    expected = of_cpus(engine, monkeypatch, plan, prompts, 40, **options)
    with engine(plan, **options) as llm:
        assert_alike(answers(llm, prompts, 40), expected)
        if "quest" not in plan and "hsa" not in plan:
            assert metric(llm, "kvsieve_blocks_freed") > 0
    assert in_torch


@pytest.mark.slow
def test_everything_packed_in_reverse_is_dense_attention(engine, monkeypatch, in_torch):
    prompts = prompts_of(LENGTHS)
    dense = of_cpus(engine, monkeypatch, None, prompts)
    with engine("snapkv:budget=10%", self_test=True) as llm:
        assert_alike(answers(llm, prompts), dense)


def test_vllms_kernel_itself_reads_heads_of_pages(engine, monkeypatch, interpreted_kernel):
    """Few tokens: the interpreter takes milliseconds for what one program of the kernel does."""
    prompts = prompts_of([70, 20])
    expected = of_cpus(engine, monkeypatch, "quest:budget=64:page=32", prompts, 3)
    with engine("quest:budget=64:page=32") as llm:
        assert_alike(answers(llm, prompts, 3), expected)
    assert interpreted_kernel


def test_on_a_gpu_the_backend_is_ours(monkeypatch):
    import vllm.config
    from vllm import platforms
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvsieve.errors import UnsupportedOptionError
    from kvsieve_vllm import plugin

    class Platform:
        device_type = "cuda"

        @classmethod
        def check_and_update_config(cls, vllm_config) -> None: ...

        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config=None) -> str:
            return (selected_backend or AttentionBackendEnum.FLASH_ATTN).get_path()

    given = {}
    monkeypatch.setattr(platforms, "current_platform", Platform(), raising=False)
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: SimpleNamespace(additional_config=given))
    plugin.register.__wrapped__()
    assert Platform.get_attn_backend_cls(None) == AttentionBackendEnum.FLASH_ATTN.get_path()
    given["kvsieve"] = "quest:budget=256"
    for chosen in (None, AttentionBackendEnum.TRITON_ATTN):
        assert Platform.get_attn_backend_cls(chosen) == "kvsieve_vllm.triton_backend.SieveTritonBackend"
    with pytest.raises(UnsupportedOptionError, match="--attention-backend"):
        Platform.get_attn_backend_cls(AttentionBackendEnum.FLASH_ATTN)


def test_vllm_lets_it_serve_models_of_full_attention():
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from kvsieve_vllm.triton_backend import SieveTritonBackend

    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        asked = AttentionSelectorConfig(128, dtype, "auto", 32, use_rswa=True)
        found = SieveTritonBackend.validate_configuration(device_capability=DeviceCapability(9, 0), **asked._asdict())
        assert found == []
    assert [each.name for each in SieveTritonBackend.supported_kv_cache_layouts()] == ["LBHNC"]


@pytest.fixture
def replayed(in_torch, monkeypatch):
    """Steps of generated tokens made once for each number of requests, and used again, as a CUDA graph would.

    Whatever another step changes must then come by tensors that are the same ones. Returns the steps' numbers of
    requests.
    """
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

    from kvsieve_vllm.graphs import ReplayedSteps

    made, steps, begin, again = {}, [], TritonAttentionMetadataBuilder.__init__, ReplayedSteps.round

    def begun(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        begin(self, kv_cache_spec, layer_names, vllm_config, device)
        self.decode_cudagraph_enabled = True
        vllm_config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 8]

    def replay(self, common, captured=False):
        found = again(self, common, captured)
        if found is None:
            return None
        steps.append(common.num_reqs)
        return made.setdefault((id(self), common.num_reqs), found)

    monkeypatch.setattr(TritonAttentionMetadataBuilder, "__init__", begun)
    monkeypatch.setattr(ReplayedSteps, "round", replay)
    return steps


@pytest.mark.parametrize(
    "plan",
    [
        "quest:budget=96:page=32:skip_layers=1",
        pytest.param("quest:budget=30%:page=8:means=true", marks=pytest.mark.slow),
        pytest.param("hsa:budget=128", marks=pytest.mark.slow),
    ],
)
def test_steps_that_are_replayed_read_what_others_read(engine, monkeypatch, replayed, plan):
    prompts = prompts_of(LENGTHS, seed=2)
    options = {"max_num_batched_tokens": 300, "enable_prefix_caching": False}
    expected = of_cpus(engine, monkeypatch, plan, prompts, 40, **options)
    assert not replayed
    with engine(plan, **options) as llm:
        assert_alike(answers(llm, prompts, 40), expected)
    # Requests come one after another, and are answered together.
    assert len(set(replayed)) > 1 and replayed.count(len(prompts)) > 20


def test_a_prompts_last_token_is_not_replayed(engine, monkeypatch, replayed):
    (prompt,) = prompts_of([301])
    options = {"max_num_batched_tokens": 300, "enable_prefix_caching": False}
    expected = of_cpus(engine, monkeypatch, "quest:budget=64:page=32", [prompt], 8, **options)
    with engine("quest:budget=64:page=32", **options) as llm:
        assert_alike(answers(llm, [prompt], 8), expected)
    assert replayed == [1] * 7


def test_generated_tokens_are_in_cuda_graphs_unless_something_is_evicted(caplog_vllm):
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport

    from kvsieve_vllm.plugin import settle_graphs
    from kvsieve_vllm.triton_backend import SieveTritonBuilder

    for plan, support in (
        ("quest:budget=256", "UNIFORM_SINGLE_TOKEN_DECODE"), ("hsa:budget=256", "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("snapkv:budget=256", "NEVER"), ("rocketkv:budget=256", "NEVER"),
    ):  # fmt: skip
        given = SimpleNamespace(additional_config={"kvsieve": plan})
        assert SieveTritonBuilder.get_cudagraph_support(given, None) == AttentionCGSupport[support]
    for before, after in (
        ("FULL_AND_PIECEWISE", "PIECEWISE"), ("FULL", "NONE"), ("FULL_DECODE_ONLY", "NONE"), ("PIECEWISE", "PIECEWISE"),
        ("NONE", "NONE"),
    ):  # fmt: skip
        for evicts, left in ((True, after), (False, before)):
            config = SimpleNamespace(cudagraph_mode=CUDAGraphMode[before], cudagraph_num_of_warmups=0)
            settle_graphs(config, evicts)
            assert config.cudagraph_mode == CUDAGraphMode[left]
            # Without a warm-up what is known of pages would be made, and emptied, by the graph.
            assert config.cudagraph_num_of_warmups == (1 if not evicts and "FULL" in before else 0)
    assert "PIECEWISE instead of FULL_AND_PIECEWISE" in caplog_vllm.text


def test_a_batch_in_which_a_prompt_ends_is_told_not_to_be_of_generated_tokens():
    from kvsieve_vllm.graphs import _prompts_aside

    determine = _prompts_aside(lambda self, **given: given)
    for plan, computed, uniform in (
        ("quest:budget=256", [30, 12, 0], None), ("quest:budget=256", [30, 11, 0], False), (None, [30, 11, 0], None),
    ):  # fmt: skip
        runner = SimpleNamespace(
            vllm_config=SimpleNamespace(additional_config={} if plan is None else {"kvsieve": plan}),
            input_batch=SimpleNamespace(
                num_computed_tokens_cpu=torch.tensor(computed), num_prompt_tokens=torch.tensor([20, 12, 9])
            ),
        )
        assert determine(runner, num_reqs=2).get("force_uniform_decode") is uniform
        # As given, where a graph is captured.
        assert determine(runner, num_reqs=2, force_uniform_decode=True)["force_uniform_decode"] is True
