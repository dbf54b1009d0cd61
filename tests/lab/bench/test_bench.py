"""`kvsieve bench`: what it counts, what its ratios come from, the peer's process, and what it refuses."""

from __future__ import annotations

import copy
import json
import statistics
import sys
from typing import ClassVar

import pytest
import torch

import kvsieve
from in_blocks import quantized
from kvsieve.attention.choice import cpu_paths
from kvsieve.devices import cpu_kind
from kvsieve.errors import KvsieveError
from kvsieve.hf.compat import AttentionInterface
from kvsieve.hf.kinds import LayerKind
from kvsieve.lab.bench import compare, roofline, spending
from kvsieve.lab.bench.compare import Limits, element_bytes, run_length
from kvsieve.lab.bench.contenders import KvsieveMethod, PeerMethod, Transformers
from kvsieve.lab.bench.estimate import estimate
from kvsieve.lab.bench.geometry import geometry, pairs
from kvsieve.lab.bench.peer_process import Peer
from kvsieve.lab.bench.plain import read_and_decode
from kvsieve.lab.bench.prompts import TokensPrompt, left_padded, lengths_of, make_rows, row_lengths
from kvsieve.lab.bench.roofline import Rates, measure_rates
from kvsieve.lab.bench.tables import closing, notes, tables
from kvsieve.planning.budget import Budget
from kvsieve.planning.drafts import as_draft
from kvsieve.planning.plans import Plan
from tiny import tiny_model, tiny_prompt
from toy_words import word_tokenizer

pytestmark = pytest.mark.slow

PLANS = {
    "full": kvsieve.plan("full"),
    "snapkv:budget=20%": kvsieve.plan("snapkv", budget="20%"),
    "fastkv": kvsieve.plan("fastkv", tsp_layer=1, tsp_rate=0.25, budget="10%"),
    "gemfilter": kvsieve.plan("gemfilter", layer=2, budget=60),
    "rocketkv:budget=4000": kvsieve.plan("rocketkv", budget=4000),
}
LENGTHS, NEW, ROUNDS, LAYERS = (160, 320), 4, 2, 4
# Keys and values of a layer and token: 2 heads of 16 in float32.
ENTRY = 2 * 2 * 16 * 4


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def model_dir(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text():
    return tiny_prompt(1, 700, seed=0, low=3)


def contenders(model, *left_out):
    return [
        Transformers(model),
        *(KvsieveMethod(model, plan, name) for name, plan in PLANS.items() if name not in left_out),
    ]


@pytest.fixture(scope="module")
def report(model, text):
    """Lengths -> what run_length gave last, two unequal rows."""
    limits = Limits(geometry(model.config), Rates(2e9, 3e9), element_bytes(model))
    entered = contenders(model, "full", "gemfilter")
    found = {
        str(length): [*run_length(entered, make_rows(text, length, 2), NEW, ROUNDS, model=model, limits=limits)][-1]
        for length in LENGTHS
    }
    return {"lengths": found, "batch": 2, "contenders": {}, "limits_unknown": None}


@pytest.fixture(scope="module")
def alone(model, text):
    """One row of 320 tokens."""
    limits = Limits(geometry(model.config), Rates(2e9, 3e9), element_bytes(model))
    (entry,) = run_length(contenders(model), make_rows(text, 320, 1), NEW, 1, model=model, limits=limits)
    return entry["summary"]


# What is measured


def test_prompts_are_unequal_and_do_not_overlap(text):
    assert row_lengths(320, 4) == [320, 280, 240, 200] and row_lengths(320, 9)[8] == 320
    rows = make_rows(text, 320, 3)
    assert torch.equal(rows[1].ids, text[:, 320:600])
    # The text starts again at its end.
    assert torch.equal(rows[2].ids, torch.cat([text[:, 600:], text[:, :140]], 1))
    batch = left_padded(rows, 0)
    assert batch.mask.sum(1).tolist() == [320, 280, 240] and batch.ids[1, 40:].equal(rows[1].ids[0])


@pytest.mark.parametrize("chunk", (None, 100))
def test_the_baseline_answers_what_generate_answers(model, text, chunk):
    rows = make_rows(text, 240, 2)
    batch = left_padded(rows, 0)
    _, tokens = read_and_decode(model, batch.ids, batch.mask, 6, chunk=chunk)
    for row, answer in zip(rows, tokens, strict=True):
        whole = model.generate(row.ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
        assert answer.tolist() == whole[0, 240 if row is rows[0] else 210 :].tolist()


def test_baseline_counts_the_bytes_its_tokens_read(model, text):
    run, _ = read_and_decode(model, text[:, :100], None, 5)
    # 4 passes after the prompt, over 101 to 104 entries.
    assert run["kv_bytes"] == LAYERS * 104 * ENTRY and run["kv_read_bytes"] == LAYERS * 102.5 * ENTRY
    assert run["ttft_s"] > 0 and run["tpot_s"] > 0


# Ratios and limits


@pytest.mark.parametrize("name", ("transformers", "snapkv:budget=20%", "fastkv"))
@pytest.mark.parametrize("length", LENGTHS)
def test_ratios_come_from_the_samples_of_a_round(report, name, length):
    entry = report["lengths"][str(length)]
    mine, base = entry["samples"][name], entry["samples"]["transformers"]
    assert len(mine) == len(base) == ROUNDS and len(mine[0]["alone"]) == 2
    row = entry["summary"][name]
    for metric in ("ttft_s", "tpot_s", "kv_bytes"):
        values = [sample["batch"][metric] for sample in mine]
        ratios = [value / sample["batch"][metric] for value, sample in zip(values, base, strict=True)]
        assert row[metric] == {"median": statistics.median(values), "min": min(values), "max": max(values)}
        assert row["ratios"]["transformers"][metric]["median"] == pytest.approx(statistics.median(ratios))
    gains = []
    for sample in mine:
        batch = 2 * NEW / (sample["batch"]["ttft_s"] + 3 * sample["batch"]["tpot_s"])
        gains.append(batch / (2 * NEW / sum(run["ttft_s"] + 3 * run["tpot_s"] for run in sample["alone"])))
    assert row["gain"]["median"] == pytest.approx(statistics.median(gains))
    decoding = [sum(run["tpot_s"] for run in sample["alone"]) / sample["batch"]["tpot_s"] for sample in mine]
    assert row["decode_gain"]["median"] == pytest.approx(statistics.median(decoding))


def test_limits_are_bytes_and_flops_over_the_rates(model, alone):
    found = geometry(model.config)
    for name, row in alone.items():
        assert row["ttft_limit_s"] == pytest.approx(row["prefill_flops"] / 3e9), name
        assert row["ttft_of_limit"] == pytest.approx(row["ttft_s"]["median"] / row["ttft_limit_s"])
        needed = 4 * found.read_parameters + row["kv_read_bytes"]["median"]
        assert row["tpot_limit_s"] == pytest.approx(needed / 2e9)
    # Passes of 321 to 323 entries; SnapKV stores 64 of the prompt's 320.
    assert alone["full"]["kv_read_bytes"]["median"] == alone["transformers"]["kv_read_bytes"]["median"]
    assert alone["transformers"]["kv_read_bytes"]["median"] == LAYERS * 322 * ENTRY
    assert alone["snapkv:budget=20%"]["kv_read_bytes"]["median"] == LAYERS * 66 * ENTRY


# Work that is counted


@pytest.mark.parametrize(
    "name, tokens",
    {
        "transformers": [320] * 4,
        "full": [320] * 4,
        "snapkv:budget=20%": [320] * 4,
        "fastkv": [320, 320, 80, 80],
        # The first pass ends in layer 2, and 60 tokens are read again.
        "gemfilter": [380, 380, 380, 60],
    }.items(),
)
def test_tokens_per_layer(alone, name, tokens):
    assert alone[name]["layer_tokens"] == tokens


@pytest.mark.parametrize("name", ("full", "fastkv"))
def test_flops_are_the_estimates_but_for_the_pair_of_a_token_with_itself(model, alone, name):
    found = geometry(model.config)
    expected = estimate(found, PLANS[name], 320, element_bytes=4)
    tokens = sum(alone[name]["layer_tokens"])
    diagonal = found.layers[0].pair_flops * tokens / 2
    assert alone[name]["prefill_flops"] == pytest.approx(expected.prefill_flops + diagonal)


def test_flops_of_a_prompt_read_twice(model, alone):
    found = geometry(model.config)
    layer, head = found.layers[0], found.head_parameters
    # Layer 2 is left in the middle of the first pass, after its attention.
    linear = 2 * layer.linear_parameters * (2 * 320 + 4 * 60)
    attention = layer.pair_flops * (3 * pairs(0, 320, LayerKind()) + 4 * pairs(0, 60, LayerKind()))
    assert alone["gemfilter"]["prefill_flops"] == pytest.approx(linear + attention + 2 * head)


def test_pairs_under_a_window_and_in_chunks():
    assert pairs(0, 4, LayerKind()) == 10 and pairs(3, 2, LayerKind()) == 9
    for before, new, span in ((0, 10, 4), (2, 5, 4), (9, 3, 4)):
        window, chunk = LayerKind("window", span=span), LayerKind("chunk", span=span)
        assert pairs(before, new, window) == sum(min(before + i, span) for i in range(1, new + 1))
        assert pairs(before, new, chunk) == sum((before + i) % span + 1 for i in range(new))


def test_kv_held_while_the_prompt_is_read(alone):
    whole = LAYERS * 320 * ENTRY
    full, snapkv, fastkv = (alone[name] for name in ("full", "snapkv:budget=20%", "fastkv"))
    assert alone["transformers"]["kv_peak_bytes"] == alone["transformers"]["kv_final_bytes"] == whole
    assert whole <= full["kv_final_bytes"] <= whole + LAYERS * NEW * ENTRY
    # Three layers have evicted, the last has not.
    assert snapkv["kv_final_bytes"] == LAYERS * (64 + NEW) * ENTRY
    assert snapkv["kv_peak_bytes"] == 3 * (64 + NEW) * ENTRY + 320 * ENTRY
    for row in (snapkv, fastkv, alone["gemfilter"]):
        assert row["kv_final_bytes"] < row["kv_peak_bytes"] <= row["kv_bound_bytes"] < whole
    assert snapkv["kv_bound_bytes"] == snapkv["kv_final_bytes"] + 320 * ENTRY


def test_time_goes_to_attention_products_and_the_rest(alone):
    for name in ("transformers", "full", "fastkv", "gemfilter"):
        shares = alone[name]["time_shares"]
        assert set(shares) == {"prompt", "token"}
        for part in shares.values():
            assert set(part) == {"attention", "weights", "rest"} and min(part.values()) > 0
            assert sum(part.values()) == pytest.approx(1)


def test_each_moment_is_charged_once(model, monkeypatch):
    """A clock that goes on by one with every look: products inside attention are not attention's."""
    now = iter(range(10**6))
    monkeypatch.setattr(spending.time, "perf_counter", lambda: float(next(now)))
    told = spending.Spending(model)
    linear = torch.nn.Linear(2, 2)
    monkeypatch.setattr(model, "modules", lambda: iter([linear]))
    told.start()
    told.close()
    before = dict(AttentionInterface())
    told = spending.Spending(model)
    told.start()
    ran = dict(AttentionInterface())["kvsieve"]
    assert ran is not before["kvsieve"]
    with monkeypatch.context() as patched:
        patched.setattr(told, "_functions", {})
        told._timed(lambda: linear(torch.zeros(1, 2)))()
        told.answer()
        linear(torch.zeros(1, 2))
    told.close()
    assert told.seconds == {
        "prompt": {"attention": 2.0, "weights": 1.0, "rest": 2.0},
        "token": {"attention": 0.0, "weights": 1.0, "rest": 2.0},
    }
    assert dict(AttentionInterface()) == before and not linear._forward_hooks and not linear._forward_pre_hooks


def test_one_line_per_method_at_the_end(report):
    lines = closing(report | {"lengths": dict(reversed(report["lengths"].items()))})
    assert [line.partition(", ")[0] for line in lines] == [
        "transformers",
        "snapkv:budget=20%",
        "fastkv",
        "rocketkv:budget=4000",
    ]
    row = report["lengths"][str(max(LENGTHS))]["summary"]["fastkv"]
    saved = 100 * (1 - row["ratios"]["transformers"]["kv_bytes"]["median"])
    assert f"{saved:.0f}% KV memory; prompt: attention " in lines[2]
    assert lines[2].startswith("fastkv, 320 tokens: saves ")
    assert f"rest {100 * row['time_shares']['token']['rest']:.0f}%, " in lines[2] and lines[2].endswith("x its limit")
    assert "saves" not in lines[0] and lines[3].endswith("did not act")


@pytest.mark.parametrize(
    ("lengths", "whole", "fitting", "then"),
    [
        ([300, 100], False, False, [100, 300]),
        ([100], True, False, [100, 1016]),
        ([], True, False, [1016]),
        ([500, 2048, 7500], False, True, [500, 1016]),
        ([500, 700], False, True, [500, 700]),
    ],
)
def test_lengths_of_any_checkpoint(model, lengths, whole, fitting, then):
    assert lengths_of(model, lengths, 8, whole=whole, fitting=fitting) == then


def test_counting_leaves_no_hooks(model, alone):
    modules = [model.get_decoder(), *model.get_decoder().layers]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


# What is shown


def test_a_plan_that_did_not_act_is_marked_and_has_no_ratios(report):
    assert not report["lengths"]["320"]["summary"]["rocketkv:budget=4000"]["applied"]
    times = tables(report)[0]
    row = next(row for row in times[2] if row[0].startswith("rocketkv"))
    assert "DID NOT ACT" in row[0] and "(" not in row[1]
    assert next(row for row in times[2] if row[0] == "fastkv")[1].endswith(")")
    first = notes(report)[0]
    assert first.startswith("DID NOT ACT") and "rocketkv:budget=4000" in first and "not more than the budget" in first


def test_tables_of_a_batch_and_of_growth(report):
    titles = [title for title, _, _ in tables(report)]
    assert any("2 rows as one batch" in title for title in titles) and titles[-1].startswith("growth")
    grown = compare.growth(report)["fastkv"]
    first, last = (report["lengths"][str(length)]["summary"]["fastkv"]["tpot_s"]["median"] for length in LENGTHS)
    assert grown == pytest.approx(last / first)


# The machine


def test_rates_are_measured_with_the_models_shapes(model, monkeypatch):
    monkeypatch.setattr(roofline, "READ_BYTES", 2**22)
    monkeypatch.setattr(roofline, "LEAST_SECONDS", 0.0)
    monkeypatch.setitem(roofline.ROWS, "cpu", 64)
    seen = set()
    linear = torch.nn.functional.linear
    monkeypatch.setattr(roofline.functional, "linear", lambda x, w: seen.add((len(x), *w.shape)) or linear(x, w))
    rates = measure_rates(model)
    assert 1e6 < rates.bandwidth < 1e13 and 1e6 < rates.matmul < 1e16
    assert {(1, 128, 64), (1, 96, 64), (64, 96, 64), (64, 64, 96), (64, 32, 64)} <= seen and (64, 128, 64) not in seen


def test_weights_in_blocks_are_read_as_they_are_stored(model, monkeypatch):
    monkeypatch.setattr(roofline, "READ_BYTES", 2**20)
    monkeypatch.setattr(roofline, "LEAST_SECONDS", 0.0)
    monkeypatch.setitem(roofline.ROWS, "cpu", 64)
    seen = []
    multiply = roofline.quantized.multiply
    monkeypatch.setattr(
        roofline.quantized, "multiply", lambda x, matrix, bias: seen.append(matrix.nbytes) or multiply(x, matrix, bias)
    )
    blocks, plain = quantized(model)
    rates = measure_rates(blocks)
    assert rates.bandwidth > 1e5 and rates.matmul > 1e5
    # In each of at least 4 runs: more bytes than caches hold, in copies of every weight but the embedding's table.
    assert sum(seen) >= 4 * 2**20 and set(seen) == {32 * 68, 64 * 68, 96 * 68, 64 * 102, 128 * 68}
    assert element_bytes(plain) == 4 and 34 / 32 < element_bytes(blocks) < 1.1
    assert not any(weight.ndim == 2 for weight in blocks.parameters())


def test_rates_measured_after_a_length_count_where_they_are_larger(report, model):
    """What ran faster than its limit shows that the rate was measured too low."""
    entry = copy.deepcopy(report["lengths"][str(LENGTHS[0])])
    row = entry["summary"]["fastkv"]
    row["ttft_of_limit"], row["tpot_of_limit"] = 0.5, 1.5
    (_, headers, rows), *_ = tables({**report, "lengths": {"100": entry}})
    at = [number for number, head in enumerate(headers) if head == "x limit"]
    (mine,) = (each for each in rows if each[0] == "fastkv")
    assert [mine[number] for number in at] == ["-", "1.5"]
    assert ", 0.5 x its limit" not in "".join(closing({"lengths": {"100": entry}}))
    rates = Rates(2e9, 3e9).best(Rates(1e9, 6e9))
    assert rates == Rates(2e9, 6e9)
    compare.limit(entry, Limits(geometry(model.config), rates, element_bytes(model)))
    before = report["lengths"][str(LENGTHS[0])]["summary"]["fastkv"]
    assert row["ttft_limit_s"] == pytest.approx(before["ttft_limit_s"] / 2)
    assert row["tpot_limit_s"] == pytest.approx(before["tpot_limit_s"])


# The peer

STUB = """
import contextlib, functools
print("noise on stdout")
class SnapKVPress:
    def __init__(self, compression_ratio, window_size=64):
        self.ratio, self.window = compression_ratio, window_size
    @contextlib.contextmanager
    def __call__(self, model):
        if self.window == 13:
            raise ValueError("an unlucky window")
        def cut(module, args, kwargs, output):
            layer = kwargs.get("cache", kwargs.get("past_key_values")).layers[module.layer_idx]
            kept = int(layer.keys.shape[2] * (1 - self.ratio))
            layer.keys, layer.values = layer.keys[:, :, -kept:].clone(), layer.values[:, :, -kept:].clone()
        hooks = [each.self_attn.register_forward_hook(cut, with_kwargs=True) for each in model.model.layers]
        yield
        for hook in hooks:
            hook.remove()
"""


def interpreter(folder, stub):
    """A python that finds `stub` as kvpress."""
    (folder / "stubs").mkdir()
    (folder / "stubs" / "kvpress.py").write_text(stub)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}/stubs" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_a_peer_measures_in_its_own_interpreter(model, model_dir, text, tmp_path):
    loaded = type(model).from_pretrained(model_dir)
    with Peer(interpreter(tmp_path, STUB), loaded) as peer:
        assert peer.versions["peer_torch"] == torch.__version__
        full = peer.run(text[:, :100].tolist(), 3, "full", None, {})
        kept = peer.run(text[:, :100].tolist(), 3, "snapkv", 29, {})
        with pytest.raises(KvsieveError, match=r"snapkv.*an unlucky window.*it wrote: .*ValueError"):
            peer.run(text[:, :100].tolist(), 3, "snapkv", 29, {"window_size": 13})
        again = peer.run(text[:, :100].tolist(), 3, "full", None, {})
    assert full["kv_bytes"] == LAYERS * 102 * ENTRY and kept["kv_bytes"] == LAYERS * 31 * ENTRY
    expected = read_and_decode(loaded, text[:, :100], None, 3)[1].tolist()
    assert full["tokens"] == again["tokens"] == expected


class FakePeer:
    """Answers at once, with a third of the time per token and a half of the first token's."""

    versions: ClassVar = {"peer_kvpress": "0"}

    def run(self, ids, new_tokens, method, kept, options):
        assert len(ids) == 1 and options == {"window_size": 8}
        run = {"rows": 1, "ttft_s": len(ids[0]), "tpot_s": 0.5, "kv_bytes": kept, "kv_read_bytes": kept}
        return {**run, "peak_bytes": None, "tokens": [[1]]}


@pytest.mark.parametrize("rows", (1, 2))
def test_the_peer_is_compared_row_by_row(model, text, rows):
    options = {"window_size": 8}
    peers = [
        PeerMethod(FakePeer(), "snapkv", Budget.parse(budget), options, f"kvpress {budget}") for budget in ("10%", 999)
    ]
    entered = [Transformers(model), *peers]
    (entry,) = run_length(entered, make_rows(text, 160, rows), 3, 1, model=model)
    summary, samples = entry["summary"], entry["samples"]
    ten, all_of_it = summary["kvpress 10%"], summary["kvpress 999"]
    assert ten["applied"] and not all_of_it["applied"] and "999 of 160 may stay" in all_of_it["notes"][0]
    mine = samples["transformers"][0]["alone"]
    ratios = summary["transformers"]["ratios"]["kvpress 10%"]
    if rows == 1:
        assert ten["kv_bytes"]["median"] == 16
        assert ratios["ttft_s"]["median"] == pytest.approx(mine[0]["ttft_s"] / 160)
        assert ratios["tpot_s"]["median"] == pytest.approx(mine[0]["tpot_s"] / 0.5)
    else:
        assert ten["ttft_s"] is None and samples["kvpress 10%"][0]["batch"] is None
        assert ratios["alone_decode_tokens_per_s"]["median"] == pytest.approx(1 / sum(run["tpot_s"] for run in mine))
    report = {"lengths": {"160": entry}, "batch": rows}
    title, headers, cells = tables(report)[-1]
    assert title.endswith("over the peer's, within each round") and headers[1:] == [
        "kvpress 10%",
        "kvpress 999 (DID NOT ACT)",
    ]
    assert [row[0] for row in cells] == ["transformers"] and "-" not in cells[0][1].split(", ")


@pytest.mark.parametrize("stub", ("raise SystemExit('kvpress is torn')", "import no_such_package"))
def test_a_broken_peer_says_why(model, tmp_path, stub):
    reason = "kvpress is torn" if "torn" in stub else "No module named 'no_such_package'"
    with pytest.raises(KvsieveError, match=rf"ended with code 1; it wrote: .*{reason}"):
        Peer(interpreter(tmp_path, stub), model)


# The command


def test_the_command_measures_writes_prints_and_draws(cli, model_dir, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("kvsieve.lab.bench.roofline.measure_rates", lambda model: Rates(1e9, 1e10))
    methods = "snapkv:paper=true:budget=20%,fastkv:tsp_layer=1:tsp_rate=0.2:budget=10%"
    out, options = tmp_path / "deep" / "r.json", ["--new-tokens", 3, "--rounds", 1, "--dtype", "float32"]
    options += ["--draft", "lookup:ngram=1"]
    code, printed, err = cli(
        "bench", model_dir, "--methods", methods, "--lengths", "200,100", *options, "--out", out, "--json"
    )
    assert code == 0, err
    assert "note: 200 tokens: full draft=lookup:ngram=1: drafts: " in err
    report = json.loads(printed)
    assert json.loads(out.read_text()) == report and list(report["lengths"]) == ["100", "200"]
    plain = ["full", "snapkv:budget=20%:pooling=max", "fastkv:tsp_layer=1:tsp_rate=0.2:budget=10%:window=16"]
    labels = ["transformers", *(label + more for label in plain for more in ("", " draft=lookup:ngram=1"))]
    assert list(report["contenders"]) == labels == list(report["lengths"]["200"]["summary"])
    assert list(report["plans"]) == plain and report["draft"] == "lookup:ngram=1"
    assert report["environment"]["kvsieve"] == kvsieve.__version__ and report["rates"]["matmul_tflops"] == 0.01
    assert Plan.from_dict(report["plans"][plain[1]]) == kvsieve.plan("snapkv", budget="20%", paper=True)
    assert report["parameters"][plain[2]]["window"] == 16, "what came with the model"
    assert report["cpu"]["kind"] == cpu_kind() and report["cpu"]["attention"] == str(cpu_paths(torch.float32))
    code, printed, err = cli("bench", "--show", out, "--markdown", "--plots", tmp_path / "plots")
    assert code == 0 and "| snapkv:budget=20%:pooling=max |" in printed and "growth" in printed
    assert f"{cpu_kind()}: prompts by " in printed and printed.splitlines()[-1].startswith(
        f"- {labels[-1]}, 200 tokens: "
    )
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {"latency.png", "scaling.png"}


def test_what_was_measured_before_a_failure_is_kept(cli, model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("kvsieve.lab.bench.roofline.measure_rates", lambda model: Rates(1e9, 1e10))
    run, runs = KvsieveMethod.run, []

    def failing(self, prompt, *more):
        runs.append(prompt.ids.shape[1])
        # The warm-up and the first of two rounds are over.
        if runs.count(200) == 3:
            raise OSError("power cut")
        return run(self, prompt, *more)

    monkeypatch.setattr(KvsieveMethod, "run", failing)
    out = tmp_path / "r.json"
    code, _, err = cli(
        "bench", model_dir, "--methods", "", "--lengths", "100,200", "--rounds", 2, "--new-tokens", 2, "--out", out
    )
    assert code == 1 and "error: power cut" in err
    kept = json.loads(out.read_text())["lengths"]
    assert [len(entry["samples"]["full"]) for entry in kept.values()] == [2, 1] and kept["200"]["summary"]["full"]
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    "options, said",
    (
        (["--methods", "snapkw"], "snapkw"),
        (["--methods", "snapkv:budget"], "name=value"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--new-tokens", "1"], "--new-tokens must be at least 2, got 1"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--lengths", "ten"], "--lengths takes tokens"),
        (["--lengths", "2000"], "the model's context of 1024"),
        (["--lengths", "context", "--new-tokens", "1024"], "leave nothing of the model's context of 1024"),
        (["--dtype", "int8"], "--dtype must be one of"),
        (["--device", "nowhere"], "--device must be cpu, cuda, or one by its number such as cuda:1, got 'nowhere'"),
        (["--peer-python", "/no/such/python"], "'/no/such/python' is no interpreter"),
        (["--peer-python", sys.executable, "--peer-methods", "h2o"], "--peer-methods knows snapkv"),
        (["--show", "/no/such/file"], "--show cannot read"),
    ),
)
def test_bad_input_is_one_line_and_exit_code_2(cli, model_dir, options, said):
    code, printed, err = cli("bench", model_dir, *options)
    assert code == 2 and said in err and printed == ""
    errors = [line for line in err.splitlines() if not line.startswith("dtype ")]
    assert len(errors) == 1 and errors[0].startswith("error: ")


def test_help_names_the_file_option_and_the_flag(cli):
    code, printed, _ = cli("bench", "--help")
    assert code == 0
    for option in ("--out", "--json", "--peer-python", "--plots", "--show", "--batch", "--rounds"):
        assert option in printed


def test_a_prompt_on_the_models_device(text):
    moved = TokensPrompt(text, torch.ones_like(text)).to(torch.device("meta"))
    assert moved.ids.is_meta and moved.mask.is_meta


def test_drafts_of_a_contender_are_counted(model, text):
    contender = KvsieveMethod(model, Plan(), "full", draft=as_draft("lookup:tokens=3:ngram=1:adapt=false"))
    (found,) = run_length([contender], make_rows(text, 60, 1), 12, 1, model=model)
    run = found["samples"]["full"][0]["alone"][0]
    assert run["drafts"]["drafted"] > 0 and contender.describe()["draft"] == "lookup:tokens=3:ngram=1:adapt=false"
    assert found["summary"]["full"]["notes"][-1].startswith("drafts: ")
