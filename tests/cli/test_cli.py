"""The command line: answers, JSON, exit codes, and one clear line for everything that is wrong."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys

import pytest

import kvsieve
from kvsieve.attention.choice import cpu_paths
from kvsieve.cli import demo, info, methods_table, models_table, run, run_tables
from kvsieve.cli.main import run_cli
from kvsieve.cli.specs import chosen_spec, compared_methods, make_run, split_specs
from kvsieve.devices import auto_dtype, cpu_kind
from kvsieve.errors import PlanError
from tiny_models import build
from toy_words import word_tokenizer
from unreadable import forbid


def save_tokenizer(folder, chat_template=None):
    word_tokenizer(chat_template).save_pretrained(folder)


@pytest.fixture(scope="module")
def refused_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recurrent_gemma")
    build("recurrent_gemma").save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture
def prompt_file(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(" ".join(f"w{i % 120}" for i in range(200)))
    return str(file)


def without_dtype(err: str) -> list[str]:
    """Lines of stderr but the one that tells what --dtype auto came to, which stands there once at most."""
    found = [line for line in err.splitlines() if not line.startswith("dtype ")]
    assert len(err.splitlines()) - len(found) <= 1
    return found


def lines(text: str, kind: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"{kind}:")]


def only_error(result, code: int) -> str:
    """The one error line of a call that must have failed with `code`."""
    got, out, err = result
    assert got == code, err
    assert len(lines(err, "error")) == 1 and len(without_dtype(err)) == 1, err
    assert out == ""
    return err


# run


def test_run_compares_methods(cli, model_dir, prompt_file):
    options = ["--prompt-file", prompt_file, "--set", "tsp_layer=1", "--set", "tsp_rate=0.3", "--budget", "20%"]
    code, out, err = cli("run", model_dir, *options, "--compare", "full,snapkv:window=16;kernel=5", "--json")
    assert code == 0 and without_dtype(err) == []
    data = json.loads(out)
    assert [each["method"] for each in data["results"]] == ["full", "snapkv", "fastkv"]
    full, snapkv, fastkv = (each["stats"] for each in data["results"])
    assert full["kv_entries"] == [200] * 4 and full["kv_asked"] is None
    assert snapkv["kv_entries"] == [40] * 4 and fastkv["kv_entries"] == [40] * 4
    assert fastkv["deep_tokens"] == 60 and full["deep_tokens"] == snapkv["deep_tokens"] == 200
    assert data["results"][1]["parameters"] == {
        "answer": None,
        "grows": False,
        "budget": "20%",
        "window": 16,
        "kernel": 5,
        "pooling": "avg",
        "per_query_head": False,
        "skip_layers": 0,
        "every": None,
        "floor": 0,
        "profile": None,
    }
    assert data["model"] == model_dir and data["environment"]["kvsieve"] == kvsieve.__version__


def test_run_prints_answers_and_one_table(cli, model_dir, prompt_file):
    code, out, err = cli("run", model_dir, "--prompt-file", prompt_file, "--method", "snapkv", "--compare", "full")
    assert code == 0 and without_dtype(err) == []
    assert out.startswith("full: ") and "\nsnapkv: " in out
    table = out.partition("as full")[2].splitlines()
    rows = [line for line in table if line[:1] == " " and line.strip()[:1].isalpha()]
    assert [row.split()[0] for row in rows] == ["full", "snapkv"] and "\nSnapKV: " in out


def test_compared_methods_share_a_prefill_and_answer_as_each_alone(cli, model_dir, prompt_file, monkeypatch):
    """An evictor, a propagator, a reader, one that observes every pass, and three that prefill by themselves."""
    from kvsieve.hf.runtime import AttachedModel

    methods = ["full", "snapkv:budget=40:window=8", "fastkv:budget=40:tsp_layer=1", "rocketkv-mt:budget=40"]
    methods += ["h2o:budget=40", "kivi:bits=4", "xattention", "gemfilter:budget=40"]
    given = ("run", model_dir, "--prompt-file", prompt_file, "--max-new-tokens", 6, "--chunk", 64, "--json")
    given += ("--protect", "0:3", "--find", "w41 w42", "--dtype", "float32")

    def results(*more):
        return json.loads(cli(*given, *more)[1])["results"]

    alone = [results("--method", each)[0] for each in methods]
    fed, feed = [], AttachedModel.feed
    monkeypatch.setattr(
        AttachedModel,
        "feed",
        lambda self, cache, ids, *a, **k: (fed.append(ids.shape[1]), feed(self, cache, ids, *a, **k))[1],
    )
    compared = results("--compare", ",".join(methods[:-1]), "--method", methods[-1])
    times = {"ttft_s", "tpot_s", "peak_bytes", "kv_bytes", "storage", "decoding", "notes"}
    for one, mine in zip(alone, compared, strict=True):
        for name in ("method", "label", "parameters", "answer", "tokens", "found"):
            assert one[name] == mine[name], (mine["label"], name)
        stats = [{name: value for name, value in each["stats"].items() if name not in times} for each in (one, mine)]
        assert stats[0] == stats[1], mine["label"]
        assert mine["stats"]["kv_bytes"] == pytest.approx(one["stats"]["kv_bytes"], rel=0.15), mine["label"]
        assert mine["differs_at"] == (None if one["tokens"] == alone[0]["tokens"] else mine["differs_at"])
        shares = mine["method"] not in ("kivi", "xattention", "gemfilter")
        assert (mine["shared_prefill_s"] is not None) == shares, mine["label"]
        assert any("prefills the whole prompt by itself" in each for each in mine["stats"]["notes"]) != shares
    assert compared[1]["differs_at"] >= 1
    # Four whole prompts of 200 tokens (GemFilter reads some again) and the window of five methods, and 16 to warm up.
    assert sum(fed) < 4 * 200 + 40 + 5 * 40 + 60


def test_compared_methods_take_a_prompt_from_the_store(cli, model_dir, prompt_file, tmp_path):
    given = (
        "run",
        model_dir,
        "--prompt-file",
        prompt_file,
        "--compare",
        "full",
        "--method",
        "fastkv:budget=40",
        "--json",
    )
    alone, *stored = (json.loads(cli(*given, *more)[1])["results"] for more in [(), *[("--store", tmp_path / "s")] * 2])
    assert [[each["answer"] for each in one] for one in stored] == [[each["answer"] for each in alone]] * 2
    notes = [["came from the store" in str(each["stats"]["notes"]) for each in one] for one in stored]
    assert notes == [[False, False], [True, True]]


def test_run_answers_what_generate_answers(cli, model_dir, prompt_file):
    _, out, _ = cli("run", model_dir, "--prompt-file", prompt_file, "--method", "full", "--dtype", "float32", "--json")
    model, tokenizer = kvsieve.models.load(model_dir, "checkpoint")
    with open(prompt_file) as file:
        ids = tokenizer(file.read(), return_tensors="pt")["input_ids"]
    ids = ids.to(model.device)
    expected = model.generate(ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=64, do_sample=False)
    answer = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True).strip()
    assert json.loads(out)["results"][0]["answer"] == answer


def test_run_with_drafts_gives_the_answers_without_and_tells_of_them(cli, model_dir, prompt_file):
    given = ("run", model_dir, "--prompt-file", prompt_file, "--max-new-tokens", 24, "--dtype", "float32")
    given += ("--compare", "full", "--method", "snapkv:budget=40:window=8")
    draft = ("--draft", "lookup:ngram=1:adapt=false")
    plain, drafted = (json.loads(cli(*given, *more, "--json")[1])["results"] for more in ((), draft))
    for one, other in zip(plain, drafted, strict=True):
        counts = other["stats"]["drafts"]
        assert one["tokens"] == other["tokens"] and one["stats"]["drafts"] is None
        assert counts["drafted"] and counts["passes"] + counts["accepted"] == len(other["tokens"]) - 1
    told = [line for line in cli(*given, *draft)[1].splitlines() if line.startswith("drafts: ")]
    assert [line.split(": ")[1] for line in told] == ["full", "snapkv:budget=40:window=8"]
    assert all(f"{one['stats']['drafts']['accepted']} of " in line for one, line in zip(drafted, told, strict=True))


def test_run_shows_what_was_kept(cli, model_dir, prompt_file, tmp_path):
    plan = ("--method", "fastkv", "--budget", "20%", "--set", "tsp_layer=1", "--set", "window=4", "--compare", "full")
    asked = ("run", model_dir, "--prompt-file", prompt_file, *plan, "--max-new-tokens", 2, "--find", "w41 w42")
    code, out, _ = cli(*asked, "--show", tmp_path / "kept.html", "--json")
    full, fastkv = (result["found"]["w41 w42"] for result in json.loads(out)["results"])
    assert code == 0 and [each["states"] for each in full] == [["whole"] * 4] * 2 and full[0]["share"] == 1
    assert [each["start"] for each in fastkv] == [each["start"] for each in full] and fastkv[0]["share"] < 1
    page = (tmp_path / "kept.html").read_text()
    assert "Kept under fastkv" in page and 'value="w41 w42"' in page
    code, out, _ = cli(*asked, "--show", "-")
    assert code == 0 and "full: 'w41 w42', tokens 41–42 (prompt): 100% held; layers 0–3 whole" in out
    assert "fastkv: held by layer and position" in out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--show", "kept.png"), "ends in .html"),
        (("--show", "no/kept.html"), "there is no directory"),
        (("--show", "-", "--json"), "name a page"),
        (("--find", ""), "--find is empty"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_a_model_is_loaded(cli, prompt_file, monkeypatch, options, told):
    monkeypatch.setattr(run, "load_model", lambda *given: pytest.fail("loaded"))
    code, out, err = cli("run", "--prompt-file", prompt_file, *options)
    assert code == 2 and told in out + err


def test_run_uses_the_chat_template_once(cli, tmp_path, prompt_file):
    build("llama").save_pretrained(tmp_path)
    save_tokenizer(tmp_path, "[BOS]{% for m in messages %} {{ m['content'] }}{% endfor %} w1 w2")
    options = ["--prompt-file", prompt_file, "--question", "w5 w6", "--system", "w7", "--method", "full"]
    _, out, _ = cli("run", tmp_path, *options, "--json")
    assert json.loads(out)["results"][0]["stats"]["prompt_tokens"] == 1 + 1 + 200 + 2 + 2


def test_run_protects_messages_and_spans(cli, tmp_path, prompt_file):
    build("llama").save_pretrained(tmp_path)
    ask = "{% if add_generation_prompt %}w1{% endif %}"
    save_tokenizer(tmp_path, "{% for m in messages %}[BOS] {{ m['content'] }} {% endfor %}" + ask)
    options = ["--prompt-file", prompt_file, "--system", "w7 w8", "--method", "streamingllm", "--budget", "110"]
    code, out, _ = cli("run", tmp_path, *options, "--protect", "system", "--protect", "100:120", "--json")
    assert code == 0 and json.loads(out)["results"][0]["stats"]["kv_entries"] == [110] * 4
    error = only_error(cli("run", tmp_path, *options, "--protect", "system", "--protect", "user"), 2)
    assert "hold 204 of the 205 tokens" in error and "its budget of 110 entries" in error
    error = only_error(cli("run", tmp_path, *options, "--protect", "200:206"), 2)
    assert "(200, 206) lies outside row 0, whose prompt has 205 tokens" in error


def test_a_template_that_refuses_is_bad_input(cli, tmp_path, prompt_file):
    build("llama").save_pretrained(tmp_path)
    save_tokenizer(tmp_path, "{{ raise_exception('no system role') }}")
    error = only_error(cli("run", tmp_path, "--prompt-file", prompt_file, "--system", "w1"), 2)
    assert "no system role" in error


def test_run_reads_stdin(cli, model_dir, monkeypatch):
    with open(os.devnull) as empty:
        monkeypatch.setattr("sys.stdin", empty)
        assert "the prompt is empty: stdin" in only_error(cli("run", model_dir, "--prompt-file", "-"), 2)


def test_a_prompt_shorter_than_the_window_warns_and_says_it_did_not_run(cli, model_dir, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("w1 w2 w3 w4 w5")
    code, out, err = cli("run", model_dir, "--prompt-file", short, "--method", "snapkv")
    assert code == 0
    assert len(lines(err, "warning")) == 1 == len(without_dtype(err))
    assert "5 tokens" in err and "window of 16" in err
    row = next(line.split() for line in out.splitlines() if line.split()[:2] == ["snapkv", "5"])
    assert row[-1] == "no" and "note: snapkv: nothing was evicted" in out
    _, out, _ = cli("run", model_dir, "--prompt-file", short, "--method", "snapkv", "--json")
    assert json.loads(out)["results"][0]["stats"]["applied"] is False


# bad input


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--method", "snapkv:window=32", "--budget", "5"], ["budget of 5 entries", "at least 33"]),
        (["--method", "snapkv", "--budget", "150%"], ["(0, 1]", "1.5"]),
        (["--method", "snapkv", "--budget", "0"], ["at least 1", "got 0"]),
        (["--method", "snapkv", "--budget", "plenty"], ["'plenty'", "20%"]),
        (["--method", "full", "--budget", "20%"], ["full takes no budget"]),
        (["--budget", "20%", "--set", "budget=10%"], ["given twice"]),
        (["--method", "snapvk"], ["'snapvk'", "did you mean 'snapkv'?"]),
        (["--compare", "fulll"], ["'fulll'", "did you mean 'full'?"]),
        (["--set", "tsp_rat=0.2"], ["'tsp_rat'", "did you mean 'tsp_rate'?"]),
        (["--compare", "snapkv:kernle=3"], ["'kernle'", "did you mean 'kernel'?"]),
        (["--set", "kernel=4"], ["kernel", "odd", "got 4"]),
        (["--set", "kernel"], ["name=value", "'kernel'"]),
        (["--set", "kernel=3", "--set", "kernel=5"], ["kernel is given twice"]),
        (["--compare", "snapkv:budget=10%:budget=20%"], ["budget is given twice"]),
        (["--codec", "kivi:bits=2:bits=4"], ["bits is given twice"]),
        (["--dtype", "int8"], ["bfloat16", "'int8'"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens must be at least 1, got 0"]),
        (["--protect", "0-40"], ["system, user or a span of tokens such as 0:40", "'0-40'"]),
        (["--protect", "system"], ["needs a system prompt", "--system"]),
        (["--question", " "], ["--question is empty"]),
        (["--system", ""], ["--system is empty"]),
        (["--chunk", "many"], ["--chunk", "tokens such as 7500 or 8k", "'many'"]),
        (["--colour"], ["--colour"]),
        (["--model", "x"], ["No such option: --model", "`kvsieve chat MODEL`"]),
        (["--draft", "lookp"], ["'lookp'", "did you mean 'lookup'?"]),
    ],
)
def test_bad_options_fail_before_a_model_is_loaded(cli, model_dir, prompt_file, monkeypatch, options, told):
    monkeypatch.setattr(kvsieve.models, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    error = only_error(cli("run", model_dir, "--prompt-file", prompt_file, *options), 2)
    for part in told:
        assert part in error


def test_bad_prompt_files_fail_before_a_model_is_loaded(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(kvsieve.models, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    assert "the prompt is empty" in only_error(cli("run", "--prompt-file", empty), 2)
    assert "not UTF-8" in only_error(cli("run", "--prompt-file", binary), 2)
    for command, option in (("run", "--prompt-file"), ("chat", "--file")):
        binary.rename(tmp_path / "a.pdf")
        assert "`kvsieve ask` reads PDF" in only_error(cli(command, option, tmp_path / "a.pdf"), 2)
        (tmp_path / "a.pdf").rename(binary)
    assert "No such file" in only_error(cli("run", "--prompt-file", tmp_path / "none.txt"), 2)
    assert "cannot read" in only_error(cli("run", "--prompt-file", tmp_path), 2)
    assert "--prompt-file" in only_error(cli("run"), 2)


def test_a_tsp_layer_outside_the_model(cli, model_dir, prompt_file):
    error = only_error(cli("run", model_dir, "--prompt-file", prompt_file, "--set", "tsp_layer=99"), 2)
    assert "TSP layer 99" in error and "4 layers" in error and "0..2" in error


def test_a_prompt_longer_than_the_context(cli, model_dir, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("w1 " * 600)
    error = only_error(cli("run", model_dir, "--prompt-file", file, "--method", "snapkv"), 2)
    assert "600 tokens" in error and "512" in error


def test_an_unsupported_model(cli, refused_dir, prompt_file):
    error = only_error(cli("run", refused_dir, "--prompt-file", prompt_file, "--method", "snapkv"), 1)
    assert "RecurrentGemmaForCausalLM cannot run 'snapkv'" in error and "outside the cache" in error


def test_what_is_no_model_directory(cli, tmp_path, prompt_file):
    assert "config.json" in only_error(cli("run", tmp_path, "--prompt-file", prompt_file), 2)
    assert "is not a directory" in only_error(cli("run", "./no/such/model", "--prompt-file", prompt_file), 2)
    assert "is not a directory" in only_error(cli("run", "~no_such_user/x", "--prompt-file", prompt_file), 2)


def test_a_model_that_may_not_be_read(cli, tmp_path, prompt_file, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    forbid(monkeypatch, tmp_path / "config.json")
    error = only_error(cli("run", tmp_path, "--prompt-file", prompt_file), 2)
    assert "Permission denied" in error and "no config.json" not in error


def test_errors_are_json_too(cli):
    code, out, err = cli("run", "--prompt-file", "no-such-file", "--json")
    assert code == 2 and len(lines(err, "error")) == 1
    assert "No such file" in json.loads(out)["error"]


def test_unexpected_errors_have_a_traceback_only_on_request(monkeypatch, capsys):
    monkeypatch.setattr(methods_table, "list_methods", lambda: 1 / 0)
    for arguments, shown in ((["methods"], False), (["--debug", "methods"], True), (["methods", "--debug"], True)):
        with pytest.raises(SystemExit) as left:
            run_cli(arguments)
        err = capsys.readouterr().err
        assert left.value.code == 1 and ("Traceback" in err) == shown
        assert "error: unexpected ZeroDivisionError: division by zero" in err


def test_the_store_alone_shows_its_commands(cli):
    code, out, err = cli("store")
    assert code == 0 and err == "" and "verify" in out


def test_a_report_without_its_facts_is_named(cli, tmp_path):
    (tmp_path / "r.json").write_text('{"lengths": {}, "batch": 1, "contenders": {}}')
    assert "`kvsieve bench --out` wrote" in only_error(cli("bench", "--show", tmp_path / "r.json"), 2)


def test_an_interrupt_exits_with_130(monkeypatch, cli):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(methods_table, "list_methods", interrupt)
    code, _, err = cli("methods")
    assert code == 130 and err == "interrupted\n"


def test_an_interrupt_while_the_command_is_imported_exits_with_130(monkeypatch, capsys):
    from kvsieve.__main__ import main

    class Interrupting:
        def find_spec(self, name, path=None, target=None):
            if name == "kvsieve.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "kvsieve.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130 and capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--version"], 0), (["report", "none"], 2), (["nonsense"], 2)],
)
@pytest.mark.slow
def test_exit_codes_of_the_process(arguments, code):
    done = subprocess.run([sys.executable, "-m", "kvsieve.cli.main", *arguments], capture_output=True, text=True)
    assert done.returncode == code
    assert "Traceback" not in done.stdout + done.stderr
    assert len(lines(done.stderr, "error")) == (code != 0)


# specs


def test_compared_methods_take_the_budget_unless_they_have_their_own():
    runs = compared_methods("full, snapkv ,knorm:budget=64", "10%")
    assert [(run.name, run.given) for run in runs] == [
        ("full", {}),
        ("snapkv", {"budget": "10%"}),
        ("knorm", {"budget": 64}),
    ]


@pytest.mark.parametrize(
    "text", ["snapkv:kernel=21:window=16", "snapkv:kernel=21;window=16", "snapkv: kernel=21 : window=16"]
)
def test_parameters_are_separated_by_what_a_shell_leaves_alone(text):
    (run,) = compared_methods(text, None)
    assert run.given == {"kernel": 21, "window": 16} and run.label == "snapkv:kernel=21:window=16"
    assert compared_methods(run.label, None)[0].given == run.given
    assert shlex.split(run.label) == [run.label] and not set(";&|<>()$*?[]{}!~ ") & set(run.label)


def test_a_colon_within_a_value_stays():
    assert split_specs("a:profile=C:/x/y.json:kernel=3,b:skip_layers=0/1/-1") == [
        ("a", {"profile": "C:/x/y.json", "kernel": 3}),
        ("b", {"skip_layers": "0/1/-1"}),
    ]
    with pytest.raises(PlanError, match="name=value"):
        split_specs("a:kernel=3;window")


def test_values_of_parameters():
    _, given = chosen_spec("snapkv", None, ["per-query-head=true", "budget=0.5", "window=16", "pooling=max"])
    assert given == {"per_query_head": True, "budget": 0.5, "window": 16, "pooling": "max"}
    with pytest.raises(PlanError, match="pooling must be one of"):
        make_run("snapkv", **chosen_spec("snapkv", None, ["pooling=3"])[1])


def test_parameters_of_one_method_stand_behind_its_name_or_in_options():
    assert chosen_spec("snapkv:kernel=21:window=16", "20%", ["pooling=max"])[1] == {
        "kernel": 21,
        "window": 16,
        "pooling": "max",
        "budget": "20%",
    }
    written = make_run("fastkv", **chosen_spec("fastkv", "20%", ["window=8"])[1])
    # What a run is called can be given again.
    assert make_run("fastkv", **chosen_spec(written.label, None, [])[1]).plan == written.plan
    for method, budget, settings, match in (
        ("snapkv:window=8", None, ["window=16"], "window is given twice"),
        ("snapkv:budget=5%", "20%", [], "the budget is given twice, as --budget 20% and in --method"),
        ("snapkv", "20%", ["budget=5%"], "the budget is given twice, as --budget 20% and --set budget=5%"),
        ("snapkv,full", None, [], "--method takes one method"),
        ("", None, [], "--method takes one method"),
    ):
        with pytest.raises(PlanError, match=match):
            chosen_spec(method, budget, settings)


# the other commands


def test_methods(cli):
    code, out, _ = cli("methods", "--json")
    assert code == 0 and [each["name"] for each in json.loads(out)] == kvsieve.list_methods()
    listed = {each["name"]: each["parameters"] for each in json.loads(out)}
    assert listed["specprefill"]["draft"] == "required" and listed["snapkv"]["budget"] == "20%"
    code, out, _ = cli("methods", "--markdown")
    assert code == 0 and out.startswith("# Methods\n") and "kvsieve methods --markdown" in out
    assert out.count("\n| `") == len(kvsieve.list_methods())


def test_methods_are_readable_in_a_narrow_terminal(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = cli("methods")
    lines = out.splitlines()
    assert code == 0 and max(map(len, lines)) <= 60
    for name in kvsieve.list_methods():
        about = kvsieve.method_info(name)
        (at,) = (place for place, line in enumerate(lines) if line.startswith(f"{name}: "))
        block = [lines[at], *itertools.takewhile(lambda line: line.startswith("    "), lines[at + 1 :])]
        text = " ".join(" ".join(block).split())
        assert about.summary in text and all(f" {each}=" in text for each in about.parameters)


def test_models(cli):
    code, out, err = cli("models", "--json")
    assert code == 0 and not err.strip()
    rows = {each["family"]: each for each in json.loads(out)["models"]}
    wanted = {"llama": "supported", "gemma3n_text": "eviction only", "mamba2": "refused", "t5": "refused"}
    wanted |= {"falcon_h1": "supported"}
    assert {name: rows[name]["status"] for name in wanted} == wanted
    assert {name: rows[name]["layers"] for name in wanted} == {
        "llama": "all 4 layers hold KV that grows",
        "gemma3n_text": "1 of 4 layers hold KV that grows, 1 has a sliding window, 2 share another layer's KV",
        "mamba2": "0 of 4 layers hold KV that grows, 4 are recurrent",
        "falcon_h1": "all 4 layers hold KV that grows, 4 also have recurrent state",
        "t5": "",
    }
    kinds = ["sliding window of 16", "full attention", "KV shared with layer 0", "KV shared with layer 1"]
    assert rows["gemma3n_text"]["layer_kinds"] == kinds
    code, out, _ = cli("models", "--markdown")
    assert code == 0 and " supported, " in out
    assert "| gemma3n_text | Gemma 3n, text part | window, full, KV shared |\n" in out
    assert "| falcon_h1 | Falcon-H1 | full and recurrent |\n" in out
    assert "| refused | it is an encoder-decoder | t5 (T5, Flan-T5) |" in out
    assert cli("models")[0] == 0


@pytest.mark.parametrize(
    "family, said",
    [
        ("qwen3_next", ("2 of 4 layers hold KV that grows, 2 are recurrent", "runs", "runs")),
        ("gemma3", ("2 of 4 layers hold KV that grows, 2 have a sliding window", "runs", "runs")),
    ],
)
def test_doctor_says_what_a_models_layers_hold_and_what_runs(cli, tmp_path, family, said):
    build(family).config.save_pretrained(tmp_path)
    data = json.loads(cli("doctor", str(tmp_path), "--json")[1])
    assert (data["layers"], data["eviction"], data["propagation"]) == said
    assert f"layers:                 {said[0]}" in cli("doctor", str(tmp_path))[1].splitlines()


def test_doctor_names_what_is_in_a_models_way(cli, tmp_path):
    build("mamba2").config.save_pretrained(tmp_path)
    code, out, err = cli("doctor", str(tmp_path), "--json")
    data = json.loads(out)
    assert code == 1 and data["layers"].endswith("4 are recurrent") and "eviction" not in data
    assert any("is not supported" in problem for problem in data["problems"])
    build("gemma3n_text").config.save_pretrained(tmp_path)
    data = json.loads(cli("doctor", str(tmp_path), "--json")[1])
    assert data["eviction"] == "runs" and "shares the KV of layer 0" in data["propagation"]


def test_a_family_that_another_transformers_lacks(cli, monkeypatch, tmp_path):
    table = json.loads(models_table.TABLE.read_text())
    for row, release in zip(table["models"], ({"since": "5.99"}, {"broken": "5.17.1"}), strict=False):
        row |= release
    monkeypatch.setattr(models_table, "TABLE", tmp_path / "models.json")
    models_table.TABLE.write_text(json.dumps(table))
    monkeypatch.setattr(models_table.metadata, "version", lambda name: "5.17.1")
    code, out, _ = cli("models", "--json")
    found = json.loads(out)
    first, second, third = found["models"][:3]
    assert code == 0 and found["transformers"] == table["transformers"]
    assert first["status"] == models_table.NOT_BUILT
    assert first["reason"] == "not in this transformers: needs 5.99 or later"
    assert second["reason"] == "not in this transformers: transformers 5.17.1 cannot run it itself"
    assert third["status"] == "supported" and set(third) == {*models_table.Row.__dataclass_fields__}
    assert "transformers 5.17.1 is installed: `kvsieve doctor MODEL`" in " ".join(cli("models")[1].split())


def test_doctor_says_what_is_missing_and_the_command(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("KVSIEVE_CACHE", str(tmp_path))
    monkeypatch.setattr("kvsieve.models.fetch.package_gguf", lambda: None)
    code, out, err = cli("doctor", "--json")
    data = json.loads(out)
    assert code == 1 and data["cache_directory"] == str(tmp_path)
    assert len(data["problems"]) == 1 and "kvsieve fetch-demo" in data["problems"][0]
    assert len(lines(err, "error")) == 1


def test_doctor_names_the_kind_of_cpu_and_how_attention_is_computed(cli):
    data = json.loads(cli("doctor", "--json")[1])
    if data["device"].startswith("CPU"):
        assert data["kind_of_CPU"] == cpu_kind()
        assert data["attention_in_torch"] == str(cpu_paths(auto_dtype("cpu").dtype))
        assert data["weights_in_blocks"].startswith("F32, F16, Q4_0, ") and "; C kernel: " in data["weights_in_blocks"]


@pytest.mark.parametrize("native", [True, False])
def test_doctor_and_run_tell_the_dtype_and_why(cli, model_dir, monkeypatch, native):
    monkeypatch.setattr("kvsieve.devices.cpu_has", lambda name: native and name == "avx512_bf16")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(info, "_demo_model", lambda: ("/here", None))
    told = {
        True: "bfloat16: the processor computes it natively (AVX-512 BF16); --dtype overrides",
        False: "float32: the processor has no native bfloat16 (AVX-512 BF16 or AMX); --dtype overrides",
    }[native]
    if platform.machine() == "x86_64":
        assert json.loads(cli("doctor", "--json")[1])["dtype"] == told
        assert f"dtype:                  {told}" in cli("doctor")[1].splitlines()
        _, out, err = cli("run", model_dir, "--prompt", "w1 w2 w3", "--method", "full", "--max-new-tokens", "1")
        assert err.splitlines() == [f"dtype {told}"] and "dtype" not in out
    given = ("run", model_dir, "--prompt", "w1 w2 w3", "--method", "full", "--max-new-tokens", "1")
    assert "dtype" not in cli(*given, "--dtype", "float32")[2]
    assert "dtype" not in cli(*given, "--dtype", "checkpoint")[2]


def test_doctor_does_not_contradict_itself(cli, monkeypatch):
    monkeypatch.setattr(info, "_demo_model", lambda: ("/here", None))
    monkeypatch.setattr(info, "_installed", lambda package: None if package in ("matplotlib", "datasets") else "1")
    code, out, err = cli("doctor")
    assert code == 0 and not lines(err, "error")
    assert "matplotlib:             not installed, optional: pip install 'kvsieve[eval]'" in out
    assert out.splitlines()[-1] == "all that kvsieve needs is here; optional and not here: matplotlib, datasets"
    monkeypatch.setattr(info, "_demo_model", lambda: ("not found", "fetch it"))
    code, out, err = cli("doctor")
    assert code == 1 and "is here" not in out and lines(err, "error") == ["error: fetch it"]


def test_fetch_demo_prints_the_path(cli, monkeypatch, tmp_path):
    monkeypatch.setattr(kvsieve.models, "fetch_demo", lambda larger: tmp_path / f"model-{larger}.gguf")
    assert json.loads(cli("fetch-demo", "--json")[1]) == {"path": str(tmp_path / "model-False.gguf")}
    assert json.loads(cli("fetch-demo", "--larger", "--json")[1]) == {"path": str(tmp_path / "model-True.gguf")}


def test_the_demo_explains_every_column():
    for header in run_tables.COLUMNS:
        assert re.search(rf"\b{re.sub(' (ms|s)$', '', header)}: ", demo.LEGEND), header


# the real model


@pytest.mark.slow
def test_demo_answers_right_three_ways(cli, real_model_in_float32):
    """Of a third of the document that `make demo` takes."""
    code, out, _ = cli("demo", "--tokens", "1500", "--json")
    data = json.loads(out)
    assert [each["method"] for each in data["results"]] == ["full", "snapkv", "fastkv"]
    for result in data["results"]:
        assert data["expected"] in result["answer"] and result["correct"]
    full, snapkv, fastkv = (each["stats"] for each in data["results"])
    prompt = full["prompt_tokens"]
    assert code == 0 and 1500 < prompt < 1700 and data["document_tokens"] == 1500
    assert set(full["kv_entries"]) == {prompt}
    assert set(snapkv["kv_entries"]) == set(fastkv["kv_entries"]) == {int(0.2 * prompt)}
    rate = data["results"][2]["parameters"]["tsp_rate"]
    assert rate == 0.3
    assert fastkv["deep_tokens"] == int(rate * prompt) and snapkv["deep_tokens"] == prompt
    assert fastkv["kv_bytes"] < 0.25 * full["kv_bytes"]


def test_run_generates_as_asked(cli, model_dir, prompt_file):
    given = ("run", model_dir, "--prompt-file", prompt_file, "--method", "snapkv", "--budget", "40", "--json")
    _, out, _ = cli(*given, "--decode", "fused")
    assert json.loads(out)["results"][0]["stats"]["decoding"]["engine"] == "fused"
    code, out, err = cli(*given, "--decode", "quick")
    assert code == 2 and "--decode must be one of auto, eager, fused, graph, got 'quick'" in err
    code, out, err = cli(*given, "--decode", "packed")
    assert code == 2 and "--decode 'packed' is gone" in err and "'fused'" in err
    assert "--decode 'compile' is gone: it was slower than 'fused'" in cli("run", "x", "--decode", "compile")[2]


@pytest.mark.parametrize(
    "given",
    [
        ("run", "--prompt", "w1 w2 w3", "--max-new-tokens", "2"),
        ("bench", "--methods", "knorm:budget=20", "--lengths", "40", "--rounds", "1", "--new-tokens", "2"),
    ],
    ids=lambda given: given[0],
)
def test_an_engine_that_cannot_run_here_is_told(cli, model_dir, given, monkeypatch):
    monkeypatch.setattr("kvsieve.lab.bench.roofline.READ_BYTES", 1 << 20)
    monkeypatch.setattr("kvsieve.lab.bench.roofline.LEAST_SECONDS", 0.0)
    command, *options = given
    code, _, err = cli(command, model_dir, *options, "--decode", "graph")
    assert code == 0 and err.count("warning: decode='graph' computes tokens eagerly here: a CUDA graph needs") == 1


def test_control_tokens_in_a_prompt_are_text(cli, model_dir, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("w1 [EOS] w2")
    tokens = []
    for options in ([], ["--parse-special"]):
        _, out, _ = cli("run", model_dir, "--prompt-file", file, "--method", "full", *options, "--json")
        tokens.append(json.loads(out)["results"][0]["stats"]["prompt_tokens"])
    # As text the toy tokenizer cuts it in two.
    assert tokens == [4, 3]
