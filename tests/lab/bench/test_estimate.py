"""Predicted costs: by hand for known models, and against what tiny models really hold and compute."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, GPTNeoXConfig, LlamaConfig, Qwen2Config, T5Config

import kvsieve
from kvsieve.cache.tensors import tensors_in
from kvsieve.cli.estimate import model_config
from kvsieve.cli.main import run_cli
from kvsieve.errors import InputError, PlanError, UnsupportedModelError
from kvsieve.hf.cache.layer import StoreLayer
from kvsieve.hf.cache.states import StateLayer
from kvsieve.hf.compat import CACHE, cache_argument, decoder_of
from kvsieve.lab.bench.estimate import check_priced, estimate, largest_batch
from kvsieve.lab.bench.footprint import footprint
from kvsieve.lab.bench.geometry import geometry
from kvsieve.lab.bench.plain_geometry import plain_config, plain_geometry
from kvsieve.lab.bench.weight_sizes import weight_sizes
from kvsieve.methods import TSP, KNorm, SnapKV
from kvsieve.models.quantized import QuantizedLinear, weight_bytes
from kvsieve.planning.plans import Plan
from tiny_models import available, build
from toy_gguf import TOKENS, write_gguf

LONG = 131072
LLAMA_8B = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    head_dim=128,
    max_position_embeddings=LONG,
)
# Queries and outputs, keys and values, gated MLP.
LLAMA_LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336


@pytest.fixture(scope="module")
def llama():
    return geometry(LlamaConfig(**LLAMA_8B))


@pytest.fixture(scope="module")
def qwen():
    config = Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
    )
    return geometry(config)


def config_of(family, **overrides):
    return build(family, **overrides).config


def test_llama_8b_by_hand(llama):
    full = estimate(llama, Plan(), LONG)
    assert llama.parameters == 8_030_261_248
    assert full.weight_bytes == 2 * 8_030_261_248
    assert full.kv_bytes == 2 * 32 * LONG * 8 * 128 * 2 == 17_179_869_184
    assert estimate(llama, kvsieve.plan("snapkv", budget=2048), LONG).kv_bytes == 268_435_456
    pairs = LONG**2 / 2
    assert full.matmul_flops == 32 * 2 * LLAMA_LAYER * LONG + 2 * 4096 * 128256
    assert full.attention_flops == 32 * 4 * 32 * 128 * pairs
    # Everything but the embedding table is read for a token, and all entries.
    assert full.decode_bytes == full.weight_bytes - 2 * 4096 * 128256 + full.kv_bytes


def test_qwen_7b_by_hand(qwen):
    assert estimate(qwen, Plan(), LONG).kv_bytes == 7_516_192_768
    assert estimate(qwen, kvsieve.plan("snapkv", budget=2048), LONG).kv_bytes == 117_440_512


def test_ttft_of_propagation_is_the_closed_formula_and_has_its_limits(llama):
    plan = kvsieve.plan("fastkv", tsp_layer=15, tsp_rate=0.2)

    def ratio(n):
        return estimate(llama, plan, n).prefill_flops / estimate(llama, Plan(), n).prefill_flops

    def layer(n):
        return 2 * LLAMA_LAYER * n + 2 * 32 * 128 * n**2

    head = 2 * 4096 * 128256
    deep = int(0.2 * LONG)
    assert ratio(LONG) == pytest.approx((16 * layer(LONG) + 16 * layer(deep) + head) / (32 * layer(LONG) + head))
    assert ratio(10**9) == pytest.approx((16 + 16 * 0.2**2) / 32, rel=1e-3)
    assert ratio(500) == pytest.approx((16 + 16 * 0.2) / 32, rel=1e-2)
    assert estimate(llama, plan, LONG).deep_tokens == deep


def test_a_deep_layer_keeps_no_more_than_it_saw(llama):
    plan = kvsieve.plan("fastkv", tsp_layer=15, tsp_rate=0.05, budget="10%")
    entries = estimate(llama, plan, 10_000).kv_entries
    assert entries == (1000,) * 16 + (500,) * 16


def test_batch_element_size_rates_and_memory(llama):
    one, four = (estimate(llama, Plan(), 1000, batch=batch) for batch in (1, 4))
    assert four.kv_bytes == 4 * one.kv_bytes and four.prefill_flops == 4 * one.prefill_flops
    assert four.decode_bytes - one.decode_bytes == 3 * one.kv_bytes
    assert estimate(llama, Plan(), 1000, element_bytes=4).kv_bytes == 2 * one.kv_bytes
    assert one.decode_seconds(1000) == pytest.approx(one.decode_bytes / 1e12)
    assert one.prefill_seconds(100, 50) == pytest.approx((one.matmul_flops + 2 * one.attention_flops) / 1e14)
    assert largest_batch(one, one.weight_bytes + 2.5 * one.kv_bytes) == 2
    assert largest_batch(one, one.weight_bytes / 2) == 0


PLANS = {
    "full": Plan(),
    "snapkv": kvsieve.plan("snapkv", budget=40, window=8),
    "raised to the minimum": kvsieve.plan("snapkv", budget="10%", window=20),
    "per query head": kvsieve.plan("snapkv", budget="30%", window=8, per_query_head=True),
    "first layers skipped": kvsieve.plan("knorm", budget="25%", skip_layers=2),
    "named layers skipped": kvsieve.plan("knorm", budget="25%", skip_layers=(0, -1)),
    "streamingllm": kvsieve.plan("streamingllm", budget=500),
    "fastkv": kvsieve.plan("fastkv", tsp_layer=1, tsp_rate=0.2, budget="40%"),
    "propagation alone": Plan(propagate=TSP(rate=30, layer=0)),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_kv_bytes_are_those_a_model_holds(plan):
    assert_held("llama", plan, 2)


# One or two of every combination of layer kinds.
KINDS = (
    *("ministral", "gemma3_text", "gemma4_unified_text", "gpt_oss", "mimo_v2_flash"),
    *(
        "gemma3n_text",
        "gemma4_text",
        "qwen3_next",
        "olmo_hybrid",
        "lfm2",
        "lfm3",
        "bamba",
        "falcon_h1",
        "zamba2",
        "jamba",
    ),
)


@pytest.mark.parametrize("family", [family.name for family in available() if family.name in KINDS])
def test_bytes_of_every_kind_of_layer_are_those_a_model_holds(family):
    for plan in (Plan(), kvsieve.plan("snapkv", budget=40, window=8)):
        assert_held(family, plan, 2)


def test_bytes_of_a_propagating_plan_on_hybrid_models():
    assert_held("qwen3_next", kvsieve.plan("fastkv", tsp_layer=1, tsp_rate=0.3, budget=20), 2)
    # Tokens dropped on the way leave holes, so windows may hold less than can be told before.
    found = geometry(build("gemma3_text").config)
    one = estimate(found, kvsieve.plan("fastkv", tsp_layer=1, tsp_rate=0.3, budget=20), 120)
    assert one.kv_entries == (15, 20, 15, 20)


def assert_held(family, plan, batch):
    model = build(family)
    ids = torch.arange(batch * 120).view(batch, 120) % 100 + 2
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.prefill(ids)
    found = geometry(model.config)
    one = estimate(found, plan, 120, batch=batch, element_bytes=4)
    assert list(one.kv_entries) == cache.entries()
    stores = [layer.store for layer in cache.layers if isinstance(layer, StoreLayer)]
    held = sum(part.numel() * part.element_size() for store in stores for part in (store.keys, store.values))
    states = [part for layer in cache.layers if isinstance(layer, StateLayer) for part in layer.state_tensors()]
    assert one.state_bytes == sum(part.nbytes for part in states)
    assert one.kv_bytes == held + one.state_bytes
    # Beside them the cache has room for tokens to come, positions of entries, and what the method remembers.
    room = sum(store.entry_bytes() for store in stores) - held
    beside = sum(part.nbytes for store in stores for part in store.all_tensors()) + 16384
    assert one.kv_bytes <= cache.nbytes() <= one.kv_bytes + room + beside


@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3", "kimi_linear", "mamba2", "llama4_text", "falcon"])
def test_full_kv_is_priced_where_no_plan_runs(family):
    """Against what transformers itself holds: 15 tokens, one less than a window or chunk would drop."""
    if family not in {family.name for family in available()}:
        pytest.skip(f"this transformers has no {family}")
    model = build(family)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(1, 16)[None], **{cache_argument(decoder_of(model)): cache}, use_cache=True)
    one = estimate(geometry(model.config), Plan(), 15, element_bytes=4)
    held = [part for layer in cache.layers for part in tensors_in(vars(layer)) if part.is_floating_point()]
    assert one.kv_bytes == sum(part.nbytes for part in held)


def test_latent_entries_serve_all_heads_and_attention_is_priced_expanded():
    found = geometry(config_of("deepseek_v3"))  # rank 24, 16 rotary; heads of 16 + 16 and 16
    assert {layer.kv_elements for layer in found.layers} == {24 + 16}
    assert estimate(found, Plan(), 100).attention_flops == 4 * 2 * 4 * (32 + 16) * 100**2 / 2


@pytest.mark.parametrize("plan", [Plan(), kvsieve.plan("snapkv", budget=40, window=8)], ids=["full", "snapkv"])
def test_bytes_of_latent_entries_are_those_a_model_holds(plan):
    model = build("deepseek_v3")
    with kvsieve.attach(model, plan) as sieve:
        cache = sieve.prefill(torch.arange(240).view(2, 120) % 100 + 2)
    one = estimate(geometry(model.config), plan, 120, batch=2, element_bytes=4)
    assert list(one.kv_entries) == cache.entries()
    room = sum(layer.store.capacity - layer.store.size for layer in cache.layers) * 2 * (24 + 16) * 4
    assert one.kv_bytes == sum(layer.store.entry_bytes() for layer in cache.layers) - room


def test_states_do_not_grow_and_are_told():
    found = geometry(config_of("qwen3_next"))
    short, long = (estimate(found, Plan(), n) for n in (100, 10_000))
    # Two layers: a convolution of 96 channels and 4 steps in bfloat16, a state of 2 x 16 x 16 in float32.
    assert short.state_bytes == long.state_bytes == 2 * (96 * 4 * 2 + 2 * 16 * 16 * 4)
    assert long.kv_bytes - long.state_bytes == 100 * (short.kv_bytes - short.state_bytes)
    assert long.kv_entries == (0, 10_000, 0, 10_000)
    assert estimate(found, Plan(), 100, batch=3).state_bytes == 3 * short.state_bytes


def test_layers_that_only_the_last_token_passes():
    found = geometry(config_of("gemma4_text"))
    assert [layer.reads for layer in found.layers] == [0, 1, 0, 1]
    late = found.layers[2:]
    if not late[0].last_token_only:
        pytest.skip("this transformers sends every token through them")
    more = estimate(found, Plan(), 200).matmul_flops - estimate(found, Plan(), 100).matmul_flops
    early = sum(2 * layer.linear_parameters for layer in found.layers[:2])
    assert more == 100 * (early + 2 * found.outside_parameters)


def test_a_composite_model_holds_all_its_parts_and_reads_the_decoder():
    model = build("gemma3")
    found, alone = geometry(model.config), geometry(model.config.get_text_config(decoder=True))
    assert found.parameters == sum(p.numel() for p in model.parameters()) > alone.parameters
    assert found.read_parameters == alone.read_parameters
    assert found.outside_parameters == alone.outside_parameters
    assert found.layers == alone.layers


@pytest.mark.parametrize("family", ["llama", "phi", "phi3", "mixtral", "qwen2_moe", "dots1", "ministral", "opt"])
def test_parameters_bytes_and_flops_are_those_of_the_model(family):
    model = build(family)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(1, 41)[None], **{CACHE: cache}, logits_to_keep=1)
    found = geometry(model.config)
    one = estimate(found, Plan(), 40, element_bytes=4)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert one.kv_bytes == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    # Attention is priced by the pairs it needs; batched products also make rotary tables in some releases.
    flops = counter.get_flop_counts()["Global"].items()
    counted = sum(count for name, count in flops if "attention" not in str(name) and "bmm" not in str(name))
    assert one.matmul_flops == counted


def test_only_the_experts_a_token_takes_are_read():
    found = geometry(config_of("mixtral"))
    assert found.expert_parameters == 4 * 4 * 3 * 64 * 96 and found.active_share == 0.5
    dense = found.parameters - found.expert_parameters - 128 * 64
    assert found.weights_read(1) == dense + found.expert_parameters / 2
    assert found.weights_read(2) == dense + found.expert_parameters * 3 / 4


def test_tied_embeddings_are_counted_once_and_read_as_the_output_layer():
    tied, untied = (geometry(config_of("llama", tie_word_embeddings=tie)) for tie in (True, False))
    assert untied.parameters - tied.parameters == 128 * 64
    assert untied.read_parameters == tied.read_parameters
    assert untied.head_parameters == tied.head_parameters == 128 * 64


def test_fused_projections_without_grouped_heads():
    config = GPTNeoXConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    assert estimate(geometry(config), Plan(), 10).kv_bytes == 2 * 2 * 10 * 64 * 2


def test_a_sliding_window_bounds_entries_and_attention():
    found = geometry(config_of("ministral"))  # local, global, local, global; a window of 16
    one = estimate(found, Plan(), 100)
    assert one.kv_entries == (15, 100, 15, 100)
    assert one.attention_flops == 4 * 4 * 16 * (2 * 100**2 / 2 + 2 * (16 * 100 - 16**2 / 2))
    assert estimate(found, Plan(), 10).kv_entries == (10,) * 4


def test_layers_that_share_entries_store_none_but_read_them():
    found = geometry(config_of("gemma3n_text"))  # local and global, then the same again on their entries
    assert [layer.reads for layer in found.layers] == [0, 1, 0, 1]
    one = estimate(found, Plan(), 100)
    assert one.kv_entries == (15, 100, 0, 0)
    assert one.kv_bytes == (15 + 100) * 2 * 2 * 16 * 2
    assert one.decode_bytes == 2 * found.weights_read(1) + 2 * one.kv_bytes


@pytest.mark.parametrize(
    "family, reason",
    [
        ("deepseek_v4", "indexed"),
        ("minimax", "without weights"),
        ("recurrent_gemma", "outside transformers' cache"),
        ("dbrx", "how many of its experts"),
        ("gpt2", "without weights"),
    ],
)
def test_what_cannot_be_priced_is_refused(family, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        geometry(config_of(family))


def test_encoder_decoders_are_refused():
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        geometry(T5Config())


def test_plans_the_model_cannot_run_or_nobody_can_price_are_refused(llama):
    with pytest.raises(UnsupportedModelError, match="shares the KV"):
        estimate(geometry(config_of("gemma3n_text")), kvsieve.plan("fastkv", tsp_layer=1), 100)
    with pytest.raises(PlanError, match="outside the model"):
        estimate(llama, kvsieve.plan("fastkv", tsp_layer=40), 100)
    with pytest.raises(InputError, match="at least 1"):
        estimate(llama, Plan(), 0)

    class Pyramid(SnapKV):
        def select(self, ctx, counts):
            return None

    with pytest.raises(PlanError, match="Pyramid selects in its own way"):
        estimate(llama, Plan(evict=Pyramid(budget=100)), 1000)
    later = SimpleNamespace(roles=("evict", "read"), name="quest", propagate=None, evict=KNorm(budget=1))
    with pytest.raises(PlanError, match="not read"):
        check_priced(later)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("config")
    LlamaConfig(**LLAMA_8B).save_pretrained(path)
    return str(path)


@pytest.fixture
def cli(capsys):
    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_cli(["estimate", *arguments])
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return call


def test_table(cli, folder):
    method = "full,snapkv:budget=2048,fastkv:tsp_layer=15:tsp_rate=0.2"
    code, out, err = cli(folder, "--context", "8k,128k", "--method", method, "--memory", "80GiB")
    assert code == 0 and err == ""
    rows = [line.split() for line in out.splitlines() if line.strip().startswith(("8192", "131072"))]
    assert [row[1].partition(":")[0] for row in rows] == ["full", "snapkv", "fastkv"] * 2
    assert rows[3][:4] == ["131072", "full", "16.00", "GiB"] and rows[3][-3:] == ["1.000", "1.000", "4"]
    assert rows[4][0] == "131072" and rows[4][2:4] == ["256.00", "MiB"]
    assert rows[4][1] == "snapkv:budget=2048:pooling=max", "the paper's values: this is a shape it ran on"
    assert "8.030 B parameters, 32 layers" in out


def test_json_has_units_in_its_keys(cli, folder):
    rates = ["--matmul-tflops", "400", "--attention-tflops", "200", "--bandwidth", "3000"]
    code, out, err = cli(
        folder, "--context", "128k", "--method", "fastkv:tsp_layer=15", "--budget", "2048", "--json", *rates
    )
    assert code == 0 and err == ""
    report = json.loads(out)
    one = report["results"][0]
    assert one["context_tokens"] == LONG and one["kv_bytes"] == 268_435_456
    assert one["parameters"]["budget"] == "2048" and one["deep_tokens"] == int(0.2 * LONG)
    seconds = one["prefill_matmul_flops"] / 400e12 + one["prefill_attention_flops"] / 200e12
    assert one["ttft_s"] == pytest.approx(seconds)
    assert one["tpot_ms"] == pytest.approx(one["decode_bytes_per_token"] / 3e9)
    assert report["parameters"] == 8_030_261_248 and report["notes"] == []


@pytest.mark.parametrize("family", [family.name for family in available()])
def test_geometry_by_arithmetic_is_that_of_the_built_model(family, tmp_path):
    config = config_of(family)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    plain = plain_config(str(tmp_path))
    assert (plain is not None) >= (family in ("llama", "qwen2", "qwen3", "phi3"))
    if plain is not None:
        assert plain_geometry(plain) == geometry(config)
        assert plain_geometry(plain).parameters == sum(p.numel() for p in build(family).parameters())


def test_tied_weights_are_counted_once_by_arithmetic_too(tmp_path):
    for tied in (True, False):
        config = config_of("qwen3", tie_word_embeddings=tied)
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
        assert plain_geometry(plain_config(str(tmp_path))) == geometry(config)


def test_what_the_layers_hold_is_told(cli, tmp_path):
    config_of("qwen3_next").save_pretrained(tmp_path)
    code, out, _ = cli(str(tmp_path), "--context", "100", "--method", "full")
    assert code == 0 and "2 of 4 layers hold KV that grows, 2 are recurrent; recurrent states 0.01 MiB" in out
    code, out, _ = cli(str(tmp_path), "--context", "100", "--method", "full", "--json")
    report = json.loads(out)
    assert report["layer_kinds"] == ["recurrent", "full attention"] * 2
    assert report["results"][0]["state_bytes"] == 2 * (96 * 4 * 2 + 2 * 16 * 16 * 4)


def test_a_prompt_beyond_the_models_context_is_noted(cli, folder):
    code, out, _ = cli(folder, "--context", "256k", "--method", "full")
    assert code == 0 and f"note: 262144 tokens are more than the model's context of {LONG}" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--context", "lots"], "--context takes tokens such as"),
        (["--method", "snapvk"], "snapkv"),
        (["--method", "snapkv:colour=3"], "colour"),
        (["--method", ","], "names no method"),
        (["--method", "fastkv:tsp_layer=99"], "outside the model"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--dtype", "int4"], "--dtype must be one of"),
        (["--memory", "80"], "80' has no unit; write 80GiB or 80MiB"),
        (["--memory", "0"], "--memory must be at least 1"),
        (["--attention-tflops", "100"], "needs --matmul-tflops"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(cli, folder, arguments, message):
    code, out, err = cli(folder, *arguments)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_a_model_that_cannot_be_estimated_or_is_not_there(cli, tmp_path):
    config_of("deepseek_v4").save_pretrained(tmp_path / "indexed")
    (tmp_path / "empty").mkdir()
    wrong = (("indexed", 1, "indexed attention"), ("empty", 2, "config.json"), ("gone", 2, "gone"))
    for name, expected, message in wrong:
        code, out, err = cli(str(tmp_path / name))
        assert (name, code) == (name, expected) and out == "" and err.count("\n") == 1 and message in err, err


# Weights in blocks


def test_packed_weights_by_hand(llama):
    """Norms stay 16 bits; Q8_0 takes 8.5 bits a number and Q4_K 4.5, but not for table, output, keys and values."""
    norms, ends, small = 65 * 4096, 2 * 4096 * 128256, 32 * 2 * 4096 * 1024
    packed = 8_030_261_248 - norms
    expected = {
        "int8": packed * 8.5 / 8,
        "int4": (packed - ends - small) * 4.5 / 8 + (ends + small) * 8.5 / 8,
    }
    for form, size in expected.items():
        sizes = weight_sizes(llama, 2, None, form)
        assert sizes.total == size + norms * 2
        assert sizes.buffer == 3 * 2 * 4096 * 14336
        assert sizes.kinds == (("Q8_0",) if form == "int8" else ("Q4_K", "Q8_0"))
        one = estimate(llama, Plan(), 1000, weights=sizes)
        assert one.weight_bytes == sizes.total and one.kv_bytes == estimate(llama, Plan(), 1000).kv_bytes
        read = (8_030_261_248 - 4096 * 128256) / 8_030_261_248
        assert one.decode_bytes == pytest.approx(sizes.total * read + one.kv_bytes, rel=1e-6)


def test_packed_weights_are_those_that_are_loaded(model_dir, tmp_path, monkeypatch):
    for module in ("packed.load", "fetch"):
        monkeypatch.setattr(f"kvsieve.models.{module}.cache_dir", lambda: tmp_path)
    for form in ("int8", "int4"):
        model, _ = kvsieve.models.load(model_dir, torch.float32, "cpu", weights=form)
        assert weight_sizes(geometry(model.config), 4, None, form).total == weight_bytes(model)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    model = build("llama", vocab_size=len(TOKENS), bos_token_id=1, eos_token_id=2, pad_token_id=0)
    file = tmp_path_factory.mktemp("gguf") / "toy.gguf"
    write_gguf(model, file)
    return str(file)


def test_a_files_weights_are_those_that_are_loaded(toy):
    model, _ = kvsieve.models.load(toy, torch.bfloat16, "cpu")
    shape = geometry(model.config)
    sizes = weight_sizes(shape, 2, toy)
    assert sizes.total == weight_bytes(model) > 2 * shape.parameters
    assert sizes.number == pytest.approx(sizes.total / shape.parameters)
    assert sizes.buffer == 3 * 2 * max(
        part.out_features * part.in_features for part in model.model.modules() if isinstance(part, QuantizedLinear)
    )
    assert weight_sizes(shape, 2, toy, "expand").total == 2 * shape.parameters
    foot = footprint(model_config(toy), "checkpoint", "cpu", toy)
    norms = sum(weight.numel() for weight in model.parameters())
    assert (foot.element, foot.weights, foot.buffer) == (4, sizes.total + 2 * norms, 2 * sizes.buffer)


def test_the_command_prices_forms_of_weights(cli, toy, folder):
    code, out, _ = cli(toy, "--context", "100", "--method", "full")
    assert code == 0 and "in F32, computing in bfloat16" in out
    for name, form, kinds in ((toy, "expand", "bfloat16"), (folder, "int8", ["Q8_0"])):
        code, out, _ = cli(name, "--context", "100", "--method", "full", "--weights", form, "--json")
        report = json.loads(out)
        size = report["results"][0]["weight_bytes"] / report["parameters"]
        assert (
            code == 0
            and report["weights"] == kinds
            and size == pytest.approx(2 if form == "expand" else 8.5 / 8, rel=1e-3)
        )
