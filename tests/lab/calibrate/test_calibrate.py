"""A calibration as a whole: prompts, profile, command line, picture."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from pathlib import Path

import pytest
import torch

import kvsieve
from kvsieve.errors import InputError, PlanError
from kvsieve.hf.compat import CACHE
from kvsieve.lab.calibrate import (
    PARTS,
    Material,
    Options,
    Prompt,
    built_in_prompts,
    calibrate,
    forecast,
    measure,
    text_prompts,
)
from kvsieve.lab.tasks.prompter import Prompter
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning.budget import Budget
from kvsieve.planning.profiles import Fingerprint, load_profile
from kvsieve.report import plot_style
from tiny import tiny_model
from tiny_models import build
from toy_words import word_tokenizer

pytestmark = pytest.mark.slow

SMALL = Options(kernels=(3, 5), windows=(4, 8))


def some_prompts(count, length=90, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [Prompt(torch.randint(2, 120, (1, length), generator=generator)) for _ in range(count)]


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=6)


@pytest.fixture(scope="module")
def profile(model):
    return measure(model, some_prompts(2), some_prompts(1, seed=2)[0], (127,), SMALL, "tiny")


def test_a_profile_serves_its_methods(model, profile, tmp_path):
    assert profile.fingerprint == Fingerprint.of(model) and profile.name == "tiny" and profile.text["tokens"] == 180
    best = profile.measured["pooling"]
    assert best["kl"] <= 1.3 * min(each["kl"] for each in best["grid"]) and len(best["grid"]) == 8
    chosen = {name: best[name] for name in ("window", "kernel", "pooling")}
    found = profile.measured["tsp"]
    assert found["layers"] == [0, 1, 2, 3, 4] and {name: found[name] for name in chosen} == chosen
    assert profile.parameters["fastkv"] == {"tsp_layer": found["layer"], "tsp_rate": "20%", **chosen}
    assert profile.parameters["snapkv"] == chosen
    asl = profile.measured["asl"]
    assert profile.parameters["asl"] == {"first": asl["first"], "tau": asl["tau"], "observed": 3, **chosen}
    assert asl["not_before"] == found["layer"] and all(
        each is None or each >= found["layer"] for each in asl["selects_at"]
    )
    assert [len(layer) for layer in profile.heads] == [2] * 6
    assert torch.tensor(profile.q_filters).shape == (6, 2, 16)
    file = tmp_path / "tiny.json"
    profile.save(file)
    ids = some_prompts(1, seed=3)[0].ids
    for method in ("fastkv", "snapkv", "asl", "qfilters"):
        with kvsieve.attach(model, kvsieve.plan(method, profile=file, budget="30%")) as sieve:
            stats = sieve.generate(ids, max_new_tokens=2, do_sample=False).stats
        assert stats.applied or method == "asl"


def test_the_same_again(model, profile):
    again = measure(model, some_prompts(2), some_prompts(1, seed=2)[0], (127,), SMALL, "tiny")
    for part in ("parameters", "heads", "q_filters", "measured"):
        assert getattr(again, part) == getattr(profile, part)


def test_steps_are_counted_to_the_end(model):
    steps = []
    measure(model, some_prompts(1), some_prompts(1)[0], options=SMALL, progress=lambda *each: steps.append(each))
    assert [done for done, _, _ in steps] == list(range(len(steps))) and {total for _, total, _ in steps} == {
        len(steps) - 1
    }


def test_quick_chooses_the_layer_that_all_layers_give(model):
    """Under bounds that none, some and all keep; from the deepest on, it stops at the first layer that is not near."""
    every = measure(model, some_prompts(1), some_prompts(1)[0], options=Options(parts=("tsp",)))
    bounds = sorted(every.measured["tsp"]["relative"])
    counts = []
    for tolerance in (0.0, 1.001 * bounds[1], 1.001 * bounds[-1]):
        chosen = []
        for every_layer in (True, False):
            steps = []
            options = Options(parts=("tsp",), tolerance=tolerance, every_layer=every_layer)
            given = (model, some_prompts(1), some_prompts(1)[0])
            profile = measure(*given, options=options, progress=lambda *each, steps=steps: steps.append(each))
            found = profile.measured["tsp"]
            assert steps[-1][0] == steps[-1][1] == len(steps) - 1
            assert found["layers"] == sorted(found["layers"]) and len(found["relative"]) == len(found["layers"])
            chosen.append((found["layer"] if found["settled"] else None, found["settled"]))
            if not every_layer:
                counts.append(len(found["layers"]))
                at = every.measured["tsp"]["layers"].index(found["layers"][0])
                assert found["relative"] == every.measured["tsp"]["relative"][at:]
        assert chosen[0] == chosen[1]
    assert min(counts) == 1 < max(counts)
    with pytest.raises(PlanError, match="compares all layers"):
        Options(rule="argmin", every_layer=False)
    assert Options.quick(rule="argmin").every_layer and not Options.quick().every_layer


def test_the_time_is_forecast_before_anything_is_measured(model):
    said = []
    material = Material(" ".join(f"w{i % 120}" for i in range(500)), lengths=(100,), prompts=1)
    told = {"progress": lambda *each: said.append(each), "announce": said.append}
    calibrate(model, word_tokenizer(), material, options=SMALL, **told)
    assert isinstance(said[0], float) and said[0] > 0 and said[1][0] == 0
    # What is left out takes no time, and another prompt as much as the first.
    clock = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvsieve.lab.calibrate.run.time.perf_counter", lambda: float(next(clock)))
        all_parts = forecast(model, some_prompts(1), SMALL)
        assert forecast(model, some_prompts(2), SMALL) > 1.5 * all_parts
        for part in ("pooling", "tsp", "asl", "q_filters"):
            rest = tuple(each for each in SMALL.parts if each != part)
            assert forecast(model, some_prompts(1), dataclasses.replace(SMALL, parts=rest)) < all_parts


def test_answers_name_the_budget_from_which_on_they_are_right(model):
    """As full KV's most likely tokens, one by one; a budget that a later one contradicts does not count."""
    options = Options(parts=("answers",), budgets=("40%", "50%", "60%", "100%"))
    given = [dataclasses.replace(each, name=f"task{i}") for i, each in enumerate(some_prompts(3))]
    profile = measure(model, given, some_prompts(1)[0], (127,), options)
    seen = profile.measured["answers"]["prompts"]
    assert [each["task"] for each in seen] == ["task0", "task1", "task2"] and not profile.parameters
    wrong, own = 0, SnapKV(budget=Budget(ratio=0.5))
    for prompt, found in zip(given, seen, strict=True):
        assert found["prompt"] == 90 and list(found["same"]) == ["40%", "50%", "60%", "100%"]
        with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
            answer = sieve.generate(prompt.ids, max_new_tokens=80, do_sample=False, eos_token_id=127)
        answer = answer.sequences[:, 90:]
        assert found["tokens"] == answer.shape[1]
        for budget, share in found["same"].items():
            with kvsieve.attach(
                model, kvsieve.plan("snapkv", budget=budget, window=own.window, kernel=own.kernel, pooling=own.pooling)
            ) as sieve:
                cache = sieve.prefill(prompt.ids)
            with kvsieve.attach(model, kvsieve.plan("full")) as sieve, torch.no_grad():
                logits = model(input_ids=answer[:, :-1], **{CACHE: sieve.adopt(cache)}, use_cache=True).logits
            right = (logits.argmax(-1) == answer[:, 1:]).double().mean().item()
            assert share == pytest.approx(right, abs=1e-3)
            wrong += right < 1
        right = [budget for budget, share in found["same"].items() if share == 1]
        assert found["same"]["100%"] == 1
        assert found["from"] == next(
            budget
            for budget in right
            if all(share == 1 for share in list(found["same"].values())[list(found["same"]).index(budget) :])
        )
    assert wrong


@pytest.mark.parametrize("part", [part for part in PARTS if part != "anchors"])
def test_parts_can_be_measured_alone(model, part):
    options = Options(parts=(part,), kernels=(3,), windows=(4,), rule="argmin", max_layer=3, tsp_rate="50%")
    profile = measure(model, some_prompts(1), some_prompts(1, seed=2)[0], options=options)
    assert set(profile.measured) == {part}
    arrays = {name: getattr(profile, name) for name in ("heads", "q_filters", "q_centres", "head_budgets", "entropies")}
    assert {name for name, array in arrays.items() if array is not None} == {part} & arrays.keys()
    expected = {"pooling": {"snapkv", "fastkv", "asl"}, "tsp": {"fastkv"}, "asl": {"asl"}}.get(part, set())
    assert expected <= set(profile.parameters) and bool(expected) == bool(profile.parameters)
    if part == "tsp":
        # FastKV's eq. 3 with a bound; SnapKV's own window and pooling, which were not looked for.
        assert profile.measured["tsp"]["layers"] == [0, 1, 2, 3]
        assert profile.parameters["fastkv"]["window"] == 32


def test_ranks_of_nothing_are_left_out(model):
    options = Options(parts=("asl",), tsp_rate="20%")
    profile = measure(model, some_prompts(1), some_prompts(1)[0], options=options)
    assert "a window of 32 leave nothing to rank" in profile.measured["left_out"]["asl"] and not profile.parameters


def test_what_a_model_cannot_do_is_left_out():
    profile = measure(build("gemma3n_text"), some_prompts(1), some_prompts(1)[0], options=SMALL)
    assert {"tsp", "asl"} <= set(profile.measured["left_out"]) and "share" in profile.measured["left_out"]["tsp"]


def test_built_in_prompts_hold_facts_and_are_not_those_of_an_evaluation():
    prompter = Prompter(kvsieve.models.load_demo()[1], None)
    made = built_in_prompts(prompter, [400, 500], 4)
    assert [400 >= each.ids.shape[1] > 330 for each in made[:4]] == [True] * 4 and made[4].ids.shape[1] > 430
    texts = [prompter.decode(each.ids[0].tolist()) for each in made]
    assert "magic number" in texts[0] and "pass key" in texts[1] and len(set(texts)) == 8
    assert texts == [prompter.decode(each.ids[0].tolist()) for each in built_in_prompts(prompter, [400, 500], 4)]
    other = [prompter.decode(each.ids[0].tolist()) for each in built_in_prompts(prompter, [400], 4, seed=1)]
    assert not set(other) & set(texts)


def test_windows_of_a_text():
    prompter = Prompter(word_tokenizer(), 127)
    text = " ".join(f"w{i % 120}" for i in range(500))
    made = text_prompts(prompter, text, [100], 3)
    assert [each.ids.shape[1] for each in made] == [68] * 3 and [each.answer.shape[1] for each in made] == [32] * 3
    assert [int(each.ids[0, 0]) - 3 for each in made] == [0, 200 % 120, 400 % 120]
    assert int(made[0].answer[0, 0]) - 3 == 68
    with pytest.raises(InputError, match="the text has 500 tokens, windows of 600"):
        text_prompts(prompter, text, [600], 1)
    with pytest.raises(InputError, match="window of 40 tokens is too short"):
        text_prompts(prompter, text, [40], 1)


def test_lengths_must_suit_the_model(model):
    with pytest.raises(InputError, match="prompts of 500 tokens and answers of 80.*context of 512"):
        calibrate(model, word_tokenizer(), Material(lengths=(100, 500)))
    with pytest.raises(InputError, match="at least 1 prompt"):
        calibrate(model, word_tokenizer(), Material(prompts=0))


@pytest.fixture
def text_file(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(" ".join(f"w{i * i % 120}" for i in range(600)))
    return str(file)


def test_the_command_writes_a_profile_that_run_takes(cli, model_dir, text_file, tmp_path):
    out, plot = tmp_path / "p.json", tmp_path / "p.png"
    given = ("--text", text_file, "--lengths", "250", "--prompts", "1", "--dtype", "float32", "--out", out)
    code, printed, errors = cli("calibrate", model_dir, *given, "--plot", plot, "--tsp-rate", "30%")
    assert code == 0, errors
    profile = load_profile(out)
    assert f"layer {profile.measured['tsp']['layer']} of 0..2" in printed and "the profile is in" in printed
    assert profile.name == Path(model_dir).name and profile.text["source"] == "text.txt"
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size < 100_000
    run = ("run", model_dir, "--prompt-file", text_file, "--max-new-tokens", "2", "--json", "--profile", out)
    cut = tmp_path / "cut.txt"
    cut.write_text(" ".join(f"w{i}" for i in range(100)) + " w1" * 60)
    run = ("run", model_dir, "--prompt-file", cut, "--max-new-tokens", "2", "--json", "--profile", out)
    code, printed, errors = cli(*run, "--budget", "50%", "--compare", "full,knorm,snapkv,fastkv:window=9")
    assert code == 0, errors
    full, knorm, snapkv, compared, fastkv = json.loads(printed)["results"]
    assert (
        fastkv["parameters"]["tsp_layer"] == profile.measured["tsp"]["layer"] and "profile" not in knorm["parameters"]
    )
    assert snapkv["parameters"]["kernel"] == profile.measured["pooling"]["kernel"]
    assert (compared["parameters"]["window"], compared["parameters"]["tsp_rate"]) == (9, "30%")
    code, _, errors = cli(*run, "--method", "knorm")
    assert code == 2 and "knorm takes no profile" in errors
    code, printed, _ = cli("calibrate", model_dir, *given, "--parts", "tsp", "--json")
    assert code == 0 and json.loads(printed)["measured"]["tsp"]["rate"] == "20%"


@pytest.mark.parametrize(
    ("options", "native", "dtype"),
    [([], False, "float32"), ([], True, "bfloat16"), (["--dtype", "bfloat16"], False, "bfloat16")],
)
def test_a_profile_names_its_dtype_and_serves_in_another(
    cli, model_dir, text_file, tmp_path, monkeypatch, options, native, dtype
):
    monkeypatch.setattr("kvsieve.devices.cpu_has", lambda name: native and name == "avx512_bf16")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    given = ("--text", text_file, "--lengths", "250", "--prompts", "1", "--parts", "heads", "--device", "cpu")
    code, printed, _ = cli("calibrate", model_dir, *given, *options, "--out", tmp_path / "p.json", "--json")
    assert code == 0 and json.loads(printed)["text"]["dtype"] == dtype
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    asked = ("--prompt", "w1 w2 w3", "--max-new-tokens", "1", "--method", "duoattention", "--dtype", other)
    code, _, errors = cli("run", model_dir, *asked, "--profile", tmp_path / "p.json", "--set", "sinks=1")
    assert code == 0, errors


@pytest.mark.parametrize(
    "parts", ["pooling,tsp", "heads", "q_filters", "q_centres", "head_budgets", "entropies", "asl"]
)
def test_the_closing_hint_is_a_command_that_runs(cli, model_dir, text_file, tmp_path, parts):
    out = tmp_path / "a profile's file.json"
    given = ("--text", text_file, "--lengths", "250", "--prompts", "1", "--dtype", "float32", "--out", out)
    rate = ("--tsp-rate", "30%") if parts in ("pooling,tsp", "asl") else ()
    code, printed, said = cli("calibrate", model_dir, *given, *rate, "--quick", "--parts", parts)
    assert code == 0 and "this takes about 10 seconds" in said
    hints = [line for line in printed.splitlines() if line.startswith("    kvsieve run ")]
    if parts == "asl" and not load_profile(out).parameters:
        assert not hints
        return
    words = shlex.split(hints[0])
    assert words[0] == "kvsieve" and str(out) in words and model_dir in words
    code, printed, errors = cli(*words[1:], "--json")
    assert code == 0, errors
    assert str(out) == json.loads(printed)["results"][0]["parameters"]["profile"]


def test_without_a_file_the_profile_is_kept_where_attach_finds_it(cli, model_dir, text_file, tmp_path, monkeypatch):
    given = ("--text", text_file, "--lengths", "250", "--prompts", "1", "--dtype", "float32", "--parts", "pooling")
    code, _, errors = cli("calibrate", model_dir, *given)
    assert code == 2 and "cannot write to the profiles' directory" in errors and "--out" in errors
    monkeypatch.setenv("KVSIEVE_HOME", str(tmp_path))
    code, printed, errors = cli("calibrate", model_dir, *given)
    assert code == 0, errors
    (file,) = (tmp_path / "profiles").iterdir()
    assert f"the profile is in {file}; methods take their parameters from it" in printed
    found = load_profile(file).measured["pooling"]
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("w1 " * 200)
    run = ("run", model_dir, "--prompt-file", prompt, "--method", "snapkv", "--budget", "100", "--json")
    code, printed, errors = cli(*run, "--max-new-tokens", "2")
    assert code == 0, errors
    (result,) = json.loads(printed)["results"]
    assert {name: result["parameters"][name] for name in ("window", "kernel", "pooling")} == {
        name: found[name] for name in ("window", "kernel", "pooling")
    }
    assert f"from your profile {file.name}" in result["stats"]["notes"][-1]


def test_a_profile_of_another_model_is_refused_before_anything_runs(cli, model_dir, profile, tmp_path):
    file, prompt = tmp_path / "p.json", tmp_path / "prompt.txt"
    profile.save(file)
    prompt.write_text("w1 " * 80)
    code, _, errors = cli("run", model_dir, "--prompt-file", prompt, "--method", "snapkv", "--profile", file)
    assert code == 2 and "made for tiny (llama, 6 layers" in errors and "differ in layers" in errors


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--out", "nowhere/p.json"), "cannot write --out 'nowhere/p.json': there is no directory"),
        (("--out", "p.json", "--parts", "tps"), "unknown part 'tps'"),
        (("--out", "p.json", "--lengths", "many"), "--lengths takes tokens such as"),
        (("--out", "p.json", "--text", "none.txt"), "cannot read the text 'none.txt'"),
        (("--out", "p.json", "--plot", "p.png", "--parts", "heads"), "--plot draws the distances of the part tsp"),
        (("--out", "p.json", "--dtype", "int3"), "--dtype must be one of"),
    ],
    ids=lambda given: given[-1] if isinstance(given, tuple) else "",
)
def test_bad_input_is_one_line(cli, given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, errors = cli("calibrate", *given)
    assert code == 2 and message in errors and errors.count("\n") == 1


def test_a_missing_matplotlib_is_told_before_the_work(cli, tmp_path, monkeypatch):
    def missing():
        raise kvsieve.KvsieveError("pictures need matplotlib, which is missing; run `pip install 'kvsieve[eval]'`")

    monkeypatch.setattr(plot_style, "require_matplotlib", missing)
    code, _, errors = cli("calibrate", "--out", tmp_path / "p.json", "--plot", tmp_path / "p.png")
    assert code == 1 and "pip install 'kvsieve[eval]'" in errors
