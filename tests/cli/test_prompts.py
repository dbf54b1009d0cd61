"""`kvsieve run`: where prompts come from, many at once, sampling and devices."""

from __future__ import annotations

import io
import json

import pytest

import kvsieve
from kvsieve.hf.runtime import AttachedModel
from tiny_models import build
from toy_words import word_tokenizer

OPTIONS = ["--method", "snapkv", "--budget", "16", "--set", "window=4", "--max-new-tokens", "5", "--dtype", "float32"]


def words(count: int, start: int = 0) -> str:
    return " ".join(f"w{(start + 7 * i) % 120}" for i in range(count))


def rows(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def single(cli, model, text, *options):
    _, out, _ = cli("run", model, "--prompt", text, *OPTIONS, *options, "--json")
    return json.loads(out)["results"][0]


def test_a_prompt_on_the_command_line(cli, model_dir, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(words(40))
    _, out, _ = cli("run", model_dir, "--prompt-file", file, "--question", "w1 w2", *OPTIONS, "--json")
    found = single(cli, model_dir, words(40), "--question", "w1 w2")
    assert found["answer"] == json.loads(out)["results"][0]["answer"] and found["stats"]["prompt_tokens"] == 42


@pytest.mark.parametrize(
    "given", [[], ["--prompt", "w1", "--prompt-file", "x"], ["--prompts-file", "x", "--prompt", "w1"]]
)
def test_prompts_come_from_one_place(cli, given):
    code, out, err = cli("run", *given)
    assert (
        code == 2 and "give one of --prompt TEXT, --prompt-file FILE, --prompts-file FILE and --documents FILES" in err
    )


def test_a_byte_order_mark_is_no_part_of_a_prompt(cli, model_dir, tmp_path):
    alone, many, lines = (tmp_path / name for name in ("alone", "many", "lines"))
    alone.write_text(words(40), encoding="utf-8-sig")
    many.write_text(words(40) + "\n", encoding="utf-8-sig")
    lines.write_text(json.dumps({"prompt": words(40)}), encoding="utf-8-sig")
    wanted = single(cli, model_dir, words(40))["answer"]
    _, out, _ = cli("run", model_dir, "--prompt-file", alone, *OPTIONS, "--json")
    assert json.loads(out)["results"][0]["answer"] == wanted
    for file in (many, lines):
        assert [row["answer"] for row in rows(cli("run", model_dir, "--prompts-file", file, *OPTIONS)[1])] == [wanted]


def test_many_prompts_are_answered_as_each_alone(cli, model_dir, tmp_path):
    texts = [words(30), words(50, 3), words(20, 5), words(41, 8), words(33, 9)]
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(texts) + "\n")
    code, out, err = cli("run", model_dir, "--prompts-file", file, *OPTIONS, "--batch", "2", "--compare", "full")
    found = rows(out)
    assert code == 0 and err == "warning: budget 16 keeps 16 entries; for a share write 16%\n"
    assert [(row["index"], row["method"]) for row in found] == [(i, m) for m in ("full", "snapkv") for i in range(5)]
    for row in found[5:]:
        alone = single(cli, model_dir, texts[row["index"]])
        assert row["answer"] == alone["answer"] and row["parameters"] == alone["parameters"]
        assert row["stats"]["kv_entries"] == [16] * 4 and row["label"] == "snapkv:window=4:budget=16"


def test_long_prompts_share_their_prefills(cli, model_dir, tmp_path, monkeypatch):
    texts, fed = [words(90), words(120, 3)], []
    alone = [single(cli, model_dir, text)["answer"] for text in texts]
    (tmp_path / "prompts.txt").write_text("\n".join(texts))
    feed = AttachedModel.feed
    monkeypatch.setattr(
        AttachedModel,
        "feed",
        lambda self, cache, ids, *a, **k: fed.append(ids.shape[1]) or feed(self, cache, ids, *a, **k),
    )
    given = ("run", model_dir, "--prompts-file", tmp_path / "prompts.txt", *OPTIONS, "--compare", "full")
    for least, order in ((1024, [(0, 0), (1, 0), (0, 1), (1, 1)]), (100, [(0, 0), (0, 1), (1, 0), (1, 1)])):
        del fed[:]
        monkeypatch.setattr("kvsieve.cli.answers._LONG", least)
        found = rows(cli(*given)[1])
        assert [(row["index"], int(row["method"] == "snapkv")) for row in found] == order
        assert [row["answer"] for row in found if row["method"] == "snapkv"] == alone
        assert all(row.get("shared_prefill_s") for row in found) == (least == 100)
    # Each prompt once, and its last 32 tokens under both methods.
    assert sum(fed) <= 90 + 120 + 4 * 32 + 2 * 32


def test_prompts_as_lines_of_json(cli, tmp_path, monkeypatch):
    build("llama").save_pretrained(tmp_path)
    ask = "{% if add_generation_prompt %}w1{% endif %}"
    word_tokenizer("{% for m in messages %}[BOS] {{ m['content'] }} {% endfor %}" + ask).save_pretrained(tmp_path)
    lines = [
        {"prompt": words(30), "id": "a", "answer": "gold"},
        {"prompt": words(20), "system": "w7 w8", "question": "w3"},
        {"prompt": words(20), "system": None},
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(line) + "\n" for line in lines)))
    code, out, err = cli("run", tmp_path, "--prompts-file", "-", *OPTIONS, "--batch", 1, "--system", "w9")
    found = rows(out)
    assert code == 0 and [row["stats"]["prompt_tokens"] for row in found] == [2 + 31 + 1, 3 + 22 + 1, 21 + 1]
    assert found[0]["extra"] == {"id": "a", "answer": "gold"} and "extra" not in found[1]
    # Only what has a system prompt can have it protected.
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(lines[1]) + "\n"))
    assert cli("run", tmp_path, "--prompts-file", "-", *OPTIONS, "--protect", "system")[0] == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(lines[2]) + "\n"))
    assert cli("run", tmp_path, "--prompts-file", "-", *OPTIONS, "--protect", "system")[0] == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no text"),
        ('{"prompt": "w1"}\nw2\n', "line 2: expected a JSON object"),
        ('{"text": "w1"}\n', "line 1: expected a JSON object"),
        ('{"prompt": "w1", "system": 3}\n', "'system' must be a text"),
        ('{"prompt": "w1 \\ud800"}\n', "half a character"),
    ],
)
def test_bad_files_of_prompts_fail_before_a_model_is_loaded(cli, tmp_path, monkeypatch, text, told):
    monkeypatch.setattr(kvsieve.models, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    (tmp_path / "prompts").write_text(text)
    code, out, err = cli("run", "--prompts-file", tmp_path / "prompts")
    assert code == 2 and told in err and len(err.splitlines()) == 1


def test_none_is_answered_where_one_is_too_long(cli, model_dir, tmp_path):
    (tmp_path / "prompts").write_text(f"w1\n{words(600)}\n")
    code, out, err = cli("run", model_dir, "--prompts-file", tmp_path / "prompts", *OPTIONS, "--batch", "1")
    assert code == 2 and out == "" and "prompt 1 (counted from 0) has 600 tokens" in err


def test_sampling(cli, model_dir):
    text = words(40)
    greedy = single(cli, model_dir, text)["answer"]
    assert single(cli, model_dir, text, "--temperature", "0")["answer"] == greedy
    assert single(cli, model_dir, text, "--temperature", "9", "--top-k", "1")["answer"] == greedy
    sampled = [single(cli, model_dir, text, "--temperature", "5", "--seed", seed)["answer"] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    # Each method draws from the same numbers.
    same = ["--compare", "snapkv:window=4:budget=16", "--temperature", "5", "--top-p", "0.9", "--seed", "3"]
    answers = [
        each["answer"]
        for each in json.loads(cli("run", model_dir, "--prompt", text, *OPTIONS, *same, "--json")[1])["results"]
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--top-p", "0"], "--top-p"),
        (["--top-k", "0"], "--top-k"),
        (["--seed", "1"], "--seed is for sampling"),
        (["--temperature", "0", "--top-k", "3"], "--top-k is for sampling"),
        (["--temperature", "1", "--seed", "-1"], "--seed must be"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--prompt", " "], "the prompt is empty"),
        (["--prompt", "a\udc80"], "half a character"),
        (["--device", "abacus"], "--device must be cpu, cuda, or one by its number such as cuda:1, got 'abacus'"),
        (["--device", "cuda:99"], "--device 'cuda:99' cannot be used here"),
    ],
)
def test_bad_options_fail_before_a_model_is_loaded(cli, monkeypatch, options, told):
    monkeypatch.setattr(kvsieve.models, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    prompt = [] if "--prompt" in options else ["--prompt", "w1"]
    code, out, err = cli("run", *prompt, *options)
    assert code == 2 and told in err and len(err.splitlines()) == 1


def test_a_device_by_its_name(cli, model_dir, monkeypatch):
    devices, load = [], kvsieve.models.load
    monkeypatch.setattr(kvsieve.models, "load", lambda *a, **how: devices.append(how["device"]) or load(*a, **how))
    assert cli("run", model_dir, "--prompt", words(20), *OPTIONS, "--device", "cpu")[0] == 0 and devices == ["cpu"]


def test_compared_methods_are_told_by_their_parameters(cli, model_dir):
    kinds = "full,snapkv:window=4,snapkv:window=8:kernel=5"
    code, out, _ = cli("run", model_dir, "--prompt", words(60), *OPTIONS, "--compare", kinds)
    labels = ["full", "snapkv:window=4:budget=16", "snapkv:window=8:kernel=5:budget=16", "snapkv:window=4:budget=16"]
    assert code == 0 and [line.split(": ")[0] for line in out.splitlines()[:4]] == labels
    table = out.split("as full", 1)[1].split()
    for label in labels:
        assert all(part in table for part in label.split(":"))


def test_a_file_named_jsonl_has_objects(cli, model_dir, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w1"\n{"prompt": "w2"}\n')
    code, out, err = cli("run", model_dir, "--prompts-file", file)
    assert code == 2 and out == "" and "line 1: expected a JSON object" in err
