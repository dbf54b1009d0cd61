"""Measurements of weights in blocks: benchmarks/gguf_files.py, speed/weights.py, soak/large_file.py and their page."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch

from benchmarks import gguf_files, pages
from benchmarks.answers import identical_weights
from benchmarks.soak import large_file
from benchmarks.speed import llama_worker, weights
from kvsieve.report.environment import environment
from tiny_models import build
from toy_gguf import TOKENS, write_gguf

BLOCKS = {"ttft_s": 2.0, "tpot_s": 0.01}
OTHER = {"ttft_s": 4.0, "tpot_s": 0.02}


@pytest.fixture(scope="module")
def random_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_gguf(build("llama"), folder / "like.gguf")
    large_file.write_random(large_file.SHAPES["small"], folder / "like.gguf", folder / "random.gguf")
    return folder / "random.gguf"


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_random_blocks_are_weights_of_a_model(kind):
    blocks = gguf_files.random_blocks(np.random.default_rng(0), 64, 512, kind)
    values = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert values.shape == (64, 512)
    assert abs(values.mean()) < 1e-3 and 0.015 < values.std() < 0.025


def test_a_random_file_has_the_shapes_and_the_tokenizer_of_another(random_file):
    reader = gguf.GGUFReader(random_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["llama.block_count"] == 2 and fields["llama.embedding_length"] == 256
    assert fields["llama.rope.dimension_count"] == 64 and fields["tokenizer.ggml.tokens"] == TOKENS
    tensors = {tensor.name: (tensor.shape.tolist(), tensor.tensor_type.name) for tensor in reader.tensors}
    assert tensors["blk.1.attn_k.weight"] == ([256, 128], "Q4_K")
    assert tensors["output.weight"] == ([256, len(TOKENS)], "Q6_K")
    assert tensors["output_norm.weight"] == ([256], "F32")
    described = gguf_files.described_file(random_file)
    assert described["kind"] == "Q4_K_M" and set(described["types"]) == {"Q4_K", "Q6_K", "F32"}
    assert sum(described["types"].values()) < described["bytes"] == random_file.stat().st_size


def test_half_of_the_layers_have_more_bits():
    kinds = [kind for name, *_, kind in large_file.SHAPES["mistral-7b"].tensors(49152) if "ffn_down" in name]
    assert kinds[:4] == ["Q6_K"] * 4 and kinds.count("Q6_K") == 16


def test_a_file_larger_than_the_disk_is_not_written(random_file, tmp_path, monkeypatch):
    monkeypatch.setattr(large_file.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(SystemExit, match="1,000 free bytes"):
        large_file.write_random(large_file.SHAPES["small"], random_file, tmp_path / "none.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_converted_file_has_the_same_numbers_in_another_type(random_file, tmp_path):
    before = gguf.GGUFReader(random_file)
    after = gguf.GGUFReader(gguf_files.converted(random_file, tmp_path / "eight.gguf", "Q8_0"))
    assert gguf_files.described_file(tmp_path / "eight.gguf")["kind"] == "Q8_0"
    own = {name for name in before.fields if not name.startswith("GGUF.")} - {"general.file_type"}
    assert all(before.fields[name].contents() == after.fields[name].contents() for name in own)
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert new.tensor_type.name == ("F32" if old.tensor_type.name == "F32" else "Q8_0")
        values = gguf.dequantize(old.data, old.tensor_type)
        assert np.abs(values - gguf.dequantize(new.data, new.tensor_type)).max() <= np.abs(values).max() / 200


def test_ratios_are_medians_within_a_round():
    rounds = [
        {"bfloat16": OTHER, "blocks": BLOCKS},
        {"bfloat16": {"ttft_s": 40.0, "tpot_s": 0.2}, "blocks": {"ttft_s": 36.0, "tpot_s": 0.05}},
        {"bfloat16": {"ttft_s": 1.0, "tpot_s": 0.1}, "blocks": {"ttft_s": 1.0, "tpot_s": 0.1}},
    ]
    memory = {"bfloat16": {"peak_bytes": 4 << 20}, "blocks": {"peak_bytes": 1 << 20}}
    first, second = weights.summary({"rounds": {"1024": rounds}, "memory": {"1024": memory}})
    assert (first["engine"], first["rounds"], first["tokens"]) == ("bfloat16", 3, 1024)
    assert (first["ttft_s"], first["ttft_s_blocks"], first["tpot_s_blocks"]) == (4.0, 0.9, 0.5)
    assert first["peak_bytes_blocks"] == 0.25 and second["tpot_s_blocks"] == 1.0
    text = weights.table([first, second])
    assert "0.50 (wanted: 0.65)" in text and "4 MiB" in text and text.count("wanted") == 2


PROCESS = """
    import json, mmap, sys
    file = open(sys.argv[1], "rb")
    weights = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    print("a line of a library", flush=True)
    print(json.dumps({"build": "fake"}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        own, seen = b"x" * (32 << 20), sum(weights[::4096])
        del own
        print(json.dumps({"ttft_s": len(request["ids"]), "tpot_s": 0.5, "kv_bytes": request["new_tokens"]}), flush=True)
"""


def test_memory_of_a_process_has_its_parts(tmp_path):
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"y" * (24 << 20))
    worker = weights.Worker([sys.executable, "-c", textwrap.dedent(PROCESS), str(file)], 1)
    assert worker.answer([1, 2, 3], 2)["ttft_s"] == 3
    found = worker.weighed([1], 7, file.name)
    worker.close()
    assert found["kv_bytes"] == 7 and found["build"] == "fake"
    assert found["file_bytes"] == 24 << 20 <= found["mapped_bytes"]
    assert found["peak_bytes"] > 56 << 20
    with pytest.raises(SystemExit, match="ended with code 3"):
        weights.Worker([sys.executable, "-c", "raise SystemExit(3)"], 1)


class Engines(SimpleNamespace):
    """Engines whose workers answer in fixed times."""

    def start(self, name, tokens):
        self.started.append((name, self.settings.get(name), tokens))
        seconds = {(0, 512): 1.0}.get(self.settings.get(name), 3.0)
        row = {"ttft_s": seconds, "tpot_s": 0.01, "tokens": [1], "kv_bytes": 5}
        return SimpleNamespace(
            hello={"build": "fake"},
            answer=lambda ids, new_tokens: row,
            weighed=lambda ids, new_tokens, file: {"peak_bytes": len(ids)},
            close=lambda: None,
        )


def test_a_run_that_was_interrupted_goes_on(random_file, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "environment", lambda model: environment())
    arguments = argparse.Namespace(
        checkpoint=tmp_path, new_tokens=4, threads=1, chunk=None, lengths=[8, 16], rounds=2, out=tmp_path / "out.json"
    )
    text = torch.arange(1000)[None]

    def run(**changed):
        names = ["bfloat16", "blocks", "llama.cpp"]
        given = argparse.Namespace(**{**vars(arguments), **changed})
        engines = Engines(arguments=given, names=names, llama={"llama.cpp": "python"}, settings={}, started=[])
        engines.file = random_file
        report = weights.Report(given, random_file)
        weights.choose_settings(engines, report, [1] * 8)
        weights.measure_times(engines, report, text)
        weights.measure_memory(engines, report, text)
        return engines, report

    engines, report = run()
    assert engines.settings["llama.cpp"] == (0, 512), "the fastest of four"
    assert len(engines.started) == 4 + 3 + 6
    saved = json.loads(arguments.out.read_text())["files"]["Q4_K_M"]
    assert [len(saved["rounds"][length]) for length in ("8", "16")] == [2, 2]
    assert saved["rounds"]["8"][0]["llama.cpp"] == {"ttft_s": 1.0, "tpot_s": 0.01, "kv_bytes": 5}
    assert saved["memory"]["16"]["blocks"] == {"peak_bytes": 16}
    again, _ = run()
    assert again.started == [] and again.settings["llama.cpp"] == (0, 512)
    longer, _ = run(rounds=3)
    assert len(longer.started) == 3
    with pytest.raises(SystemExit, match="other settings"):
        run(new_tokens=5)


def test_prompts_are_parts_of_the_text():
    text = torch.arange(500)[None]
    first, second = weights.prompt(text, 20, 0), weights.prompt(text, 20, 1)
    assert first == list(range(first[0], first[0] + 20)) and first != second
    assert first == weights.prompt(text, 20, 0)


def test_times_of_its_server_leave_out_the_first_token():
    times = {"prompt_ms": 1500.0, "predicted_ms": 90.0, "predicted_n": 10}
    engine = object.__new__(llama_worker.ItsServer)
    found = {"timings": times, "choices": [{"text": "a"}]}
    engine.server = SimpleNamespace(handle_completions=lambda request: found)
    assert engine.answer([1, 2], 10) == {"ttft_s": 1.5, "tpot_s": 0.01, "text": "a"}


def test_answers_of_two_models_are_compared():
    prompts = identical_weights.questions(None, 20)
    assert len(set(prompts)) == 20 and all(200 < len(text) < 1700 for text in prompts)
    with pytest.raises(SystemExit, match="name L-Eval's files"):
        identical_weights.questions(None, 500)
    model, other = build("llama"), build("llama")
    ids = torch.randint(3, 100, (1, 80), generator=torch.Generator().manual_seed(0))
    row = identical_weights.compared([model, other], "snapkv:budget=25%:window=16", ids)
    assert row == {"tokens": identical_weights.NEW_TOKENS, "accepted": 0}
    with torch.no_grad():
        other.get_output_embeddings().weight.neg_()
    assert identical_weights.compared([model, other], "full", ids)["difference"]["position"] == 0


def test_the_page_tells_what_was_measured_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    one = SimpleNamespace(folder=tmp_path / "model")
    assert pages.weights_measured(one) == "Not measured."
    rounds = {"4096": [{"blocks": BLOCKS, "llama.cpp": OTHER}], "1024": [{"blocks": BLOCKS, "bfloat16": OTHER}]}
    found = {"rounds": rounds, "memory": {"4096": {name: {"peak_bytes": 3 << 20} for name in ("blocks", "llama.cpp")}}}
    found["summary"] = weights.summary(found)
    report = {"model": "Qwen", "threads": 2, "environments": [environment()], "files": {"Q4_K_M": found}}
    (tmp_path / "weights_speed.json").write_text(json.dumps(report))
    row = {"case": "full", "prompts": 50, "tokens": 2400, "differences": []}
    (tmp_path / "weights_identical.json").write_text(json.dumps({"rows": {"a": row}}))
    large = {"file_bytes": 4e9, "limit_bytes": 8e9, "peak_bytes": 4.5e9, "kv_bytes": 1e8, "prompt": 512}
    (tmp_path / "weights_large.json").write_text(json.dumps(large))
    text = pages.weights_measured(one)
    assert "|4,096|Q4_K_M|kvsieve, file in blocks|2.0|10|3||||" in text
    assert "|4,096|Q4_K_M|llama.cpp, compiled for this processor|4.0|20|3|0.50|0.50|1.00|" in text
    assert "|1,024|Q4_K_M|kvsieve, expanded to bfloat16|4.0|20||0.50|0.50||" in text
    assert "50 under `full`: 2,400 tokens. Answers that differ: 0" in text
    assert "4.50 GB at the peak, 1.10 times the file besides its KV" in text


def test_scores_of_blocks_are_those_of_the_same_prompts(monkeypatch):
    def sample(label, task, score):
        return {"label": label, "task": task, "sample": 0, "score": score}

    found = {
        "weights_blocks": [
            sample("full", "ruler_vt", 1.0),
            sample("full", "needle", 0.5),
            sample("full", "leval_a", 1),
        ],
        "weights_expanded": [sample("full", "ruler_vt", 0.0), sample("full", "needle", 0.5)],
    }
    monkeypatch.setattr(pages, "samples_of", lambda folder: found[folder.name])
    text = pages.weights_scores(pages.Evidence("Qwen2.5-Coder-0.5B-Instruct"))
    assert text.splitlines()[2:] == ["|`full`|RULER|2|75.0|25.0|1|"]
