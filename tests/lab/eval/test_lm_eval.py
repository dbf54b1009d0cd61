"""lm-evaluation-harness under a plan, end to end on a tiny model and a task of our own."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

import lm_eval
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import kvsieve
from kvsieve.errors import KvsieveError, KvsieveWarning, PlanError, UnsupportedModelError, UnsupportedOptionError
from kvsieve.lab.eval import lm_eval_command, lm_eval_model
from kvsieve.lab.eval.lm_eval_model import KvsieveLM
from tiny_models import build

pytestmark = pytest.mark.slow

WORDS = ["[PAD]", "[BOS]", "[UNK]", *(f"w{i}" for i in range(124)), "[EOS]"]
TEMPLATE = "{% for m in messages %}w100 {{ m.content }} w101 {% endfor %}{% if add_generation_prompt %}w102{% endif %}"
SNAPKV = "method=snapkv,budget=20%,window=8,kernel=5"
LENGTHS = (120, 160, 90)


def prompt(index: int) -> str:
    return " ".join(f"w{(i * (index + 3)) % 99}" for i in range(LENGTHS[index]))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    build("llama").save_pretrained(folder)
    words = tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "bos_token": "[BOS]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, model_dir):
    """A folder of task files; what they expect are the harness's own answers under full KV."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = []
    for index, answer in enumerate(answers(HFLM(pretrained=model_dir, device="cpu"))):
        context, _, question = prompt(index).rpartition(" ")
        rows.append({"context": context, "question": question, "answer": answer})
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    for file in (Path(__file__).parent / "data").glob("toy_*.yaml"):
        text = file.read_text().replace("DATA", str(folder / "rows.jsonl")).replace("CACHE", str(folder / "cache"))
        (folder / file.name).write_text(text)
    return folder


class Request:
    task_name = "toy"

    def __init__(self, *args):
        self.args = args


def answers(lm, **options) -> list[str]:
    options = {"until": ["[EOS]"], "max_gen_toks": 8, **options}
    return lm.generate_until([Request(prompt(index), options) for index in range(len(LENGTHS))], disable_tqdm=True)


def make(model_dir, arguments, **options) -> KvsieveLM:
    return get_model("kvsieve").create_from_arg_string(
        f"pretrained={model_dir},{arguments}", {"device": "cpu"} | options
    )


def evaluate(model_dir, folder, arguments, model="kvsieve", task="kvsieve_toy", **options):
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model,
        model_args=f"pretrained={model_dir},{arguments}".strip(","),
        tasks=[task],
        device="cpu",
        task_manager=manager,
        bootstrap_iters=0,
        **options,
    )


def test_without_a_device_it_takes_the_cpu_where_there_is_no_gpu(model_dir, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for given in ({"device": None}, {}):
        lm = get_model("kvsieve").create_from_arg_string(f"pretrained={model_dir},method=full", given)
        assert lm.device == lm.model.device == torch.device("cpu")
    assert KvsieveLM(pretrained=model_dir, method="full", device=None).device == torch.device("cpu")


@pytest.mark.parametrize("batch_size", [1, 2])
def test_full_gives_the_harness_own_answers(model_dir, batch_size):
    own = answers(HFLM(pretrained=model_dir, device="cpu", batch_size=batch_size))
    assert answers(make(model_dir, "method=full", batch_size=batch_size)) == own
    assert len(set(own)) == 3 and all(own)


def test_a_task_runs_end_to_end(model_dir, tasks):
    full = evaluate(model_dir, tasks, "method=full")
    assert full["results"]["kvsieve_toy"]["exact_match,none"] == 1.0
    results = evaluate(model_dir, tasks, SNAPKV, batch_size=2)
    assert 0 <= results["results"]["kvsieve_toy"]["exact_match,none"] < 1
    note = json.loads(json.dumps(results["config"]["kvsieve"]))
    asked = kvsieve.plan("snapkv", budget="20%", window=8, kernel=5, pooling="avg").to_dict()
    assert note["plan"] == {name: part for name, part in asked.items() if name != "unset"}
    assert (note["batches"], note["batches_applied"], note["longest_prompt_tokens"]) == (2, 2, 160)
    assert note["mean_kv_share"] == pytest.approx(0.2) and note["version"] == kvsieve.__version__


@pytest.mark.parametrize("arguments", [SNAPKV, f"{SNAPKV},chunk=32"])
@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
def test_the_cache_really_shrinks(model_dir, batch_size, arguments):
    lm = make(model_dir, arguments, batch_size=batch_size, max_batch_size=4)
    got = answers(lm)
    assert [call.kv_entries for call in lm.calls] == [[32] * 4, [24] * 4, [18] * 4][: len(lm.calls)]
    assert len(lm.calls) == (3 if batch_size == 1 else 1) and all(call.applied for call in lm.calls)
    model, encode = lm.model, lm.tokenizer
    plan = kvsieve.plan("snapkv", budget="20%", window=8, kernel=5)
    with kvsieve.attach(model, plan) as sieve:
        for index, answer in enumerate(got):
            ids = encode(prompt(index), return_tensors="pt").input_ids
            alone = sieve.generate(ids, max_new_tokens=8, do_sample=False).sequences[0, ids.shape[1] :]
            assert encode.decode(alone, skip_special_tokens=True) == answer
    assert got != answers(HFLM(pretrained=model_dir, device="cpu"))


def test_propagation_runs_too(model_dir):
    lm = make(model_dir, "method=fastkv,budget=20%,tsp_layer=1,tsp_rate=0.3,window=8", batch_size=2)
    answers(lm)
    assert [call.deep_tokens for call in lm.calls] == [48, 27]


def test_sampling_and_beams_reach_generate(model_dir):
    lm = make(model_dir, SNAPKV)
    torch.manual_seed(0)
    sampled = answers(lm, do_sample=True, temperature=3.0)
    assert sampled != answers(lm) == answers(lm, temperature=0.0) == answers(lm, do_sample=False, temperature=0.7)
    assert answers(lm, num_beams=2)
    assert answers(lm, prompt_lookup_num_tokens=2) == answers(lm)


def test_the_model_is_left_as_it_was(model_dir):
    lm = make(model_dir, SNAPKV)
    before = lm.model.config._attn_implementation
    answers(lm)
    other = copy.deepcopy(lm.model)
    assert answers(lm, assistant_model=other) == answers(lm)
    # The harness copies what it is given, which a model under a plan refuses.
    with pytest.raises(KvsieveError, match="has a plan attached"):
        answers(lm, assistant_model=lm.model)
    assert lm.model.config._attn_implementation == before
    with pytest.raises(UnsupportedOptionError, match="inside generate_until"):
        lm._model_generate(torch.ones(1, 4, dtype=torch.long), 8, [])


def test_chat_template_is_the_harness_own(model_dir, tasks, monkeypatch):
    seen = []
    monkeypatch.setattr(
        KvsieveLM, "tok_batch_encode", lambda self, texts, **o: seen.extend(texts) or HFLM.tok_batch_encode(self, texts)
    )
    results = evaluate(model_dir, tasks, SNAPKV, apply_chat_template=True)
    assert len(seen) == 3 and all(text.startswith("w100 ") and text.endswith(" w101 w102") for text in seen)
    assert results["config"]["kvsieve"]["longest_prompt_tokens"] == 163


def test_a_plan_that_did_not_act_is_reported(model_dir):
    with pytest.warns(KvsieveWarning, match="snapkv acted on none of 3 batches.*longest such prompt: 160 tokens"):
        lm = make(model_dir, "method=snapkv,budget=400")
        answers(lm)
    assert lm.get_model_info()["kvsieve"]["batches_applied"] == 0
    with pytest.warns(KvsieveWarning, match="snapkv acted on 1 of 3 batches"):
        answers(make(model_dir, "method=snapkv,budget=130"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", KvsieveWarning)
        answers(make(model_dir, SNAPKV))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("device=cpu", "names no method; add method=..., one of full, "),
        ("method=snapvk", "did you mean 'snapkv'"),
        ("method=snapkv,kernal=5", "'kernal'; did you mean 'kernel'.*snapkv takes budget, window"),
        ("method=full,budget=20%", "neither full nor .* 'budget'"),
        ("method=snapkv,kernel=4", "odd"),
        ("method=snapkv,budget=0%", "budget"),
    ],
)
def test_wrong_model_args(model_dir, arguments, message):
    with pytest.raises(PlanError, match=message):
        get_model("kvsieve").create_from_arg_string(f"pretrained={model_dir},{arguments}")


def test_no_method_takes_an_argument_of_the_harness():
    theirs = {*inspect.signature(HFLM.__init__).parameters, "chunk", "method"} - {"kwargs"}
    for name in kvsieve.list_methods():
        assert not theirs & set(kvsieve.method_info(name).parameters), name


def test_a_model_the_plan_cannot_run_on_is_refused_at_once(model_dir):
    refused = build("doge")
    with pytest.raises(UnsupportedModelError):
        KvsieveLM(pretrained=refused, tokenizer=HFLM(pretrained=model_dir, device="cpu").tokenizer, method="snapkv")


CHOICES = (" w1 w7 w9", " w2 w4", " w3")
CONTEXTS = (prompt(0), prompt(1), prompt(2), "")


def scores(lm, choices=CHOICES, contexts=CONTEXTS) -> list[tuple[float, bool]]:
    asked = [Request(context, choice) for context in contexts for choice in choices]
    return lm.loglikelihood(asked, disable_tqdm=True)


@pytest.mark.parametrize("arguments", ["method=full", "method=snapkv,budget=100%"])
@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
def test_loglikelihoods_where_nothing_is_dropped_are_the_harness_own(model_dir, arguments):
    lm = make(model_dir, arguments)
    own = HFLM(pretrained=model_dir, device="cpu")
    greedy = [f" {answers(lm)[0]}"]
    for choices in (CHOICES, greedy):
        wanted = scores(own, choices)
        assert scores(lm, choices) == [(pytest.approx(value, abs=1e-4), same) for value, same in wanted]
    assert wanted[0][1] and not wanted[1][1]


def test_loglikelihoods_are_read_under_the_plan(model_dir, tasks):
    lm = make(model_dir, f"{SNAPKV},chunk=32")
    with warnings.catch_warnings():
        warnings.simplefilter("error", KvsieveWarning)
        got = scores(lm, contexts=[prompt(0), prompt(1)])
    # One reading of each context, the longest first.
    assert [call.prompt_tokens for call in lm.calls] == [160, 120] and all(call.applied for call in lm.calls)
    assert [call.kv_share for call in lm.calls] == [pytest.approx(0.2), pytest.approx(0.2)]
    whole = scores(HFLM(pretrained=model_dir, device="cpu"), contexts=[prompt(0), prompt(1)])
    # The first token comes from the whole context, as it does in generate; later ones read what is left of it.
    assert [abs(one - other) > 1e-4 for (one, _), (other, _) in zip(got, whole, strict=True)] == [True, True, False] * 2


@pytest.mark.filterwarnings("ignore::kvsieve.errors.KvsieveWarning")
def test_a_choice_task_under_a_plan_that_keeps_all_scores_as_the_harness_own(model_dir, tasks):
    choice = {"task": "kvsieve_toy_choice", "log_samples": True}
    own = evaluate(model_dir, tasks, "", "hf", **choice)
    kept = evaluate(model_dir, tasks, "method=snapkv,budget=100%", **choice)
    assert kept["results"] == own["results"] and "acc,none" in own["results"]["kvsieve_toy_choice"]
    assert (kept["config"]["kvsieve"]["batches"], kept["config"]["kvsieve"]["batches_applied"]) == (3, 0)


def test_a_plan_that_changed_no_likelihood_is_told(model_dir):
    with pytest.warns(KvsieveWarning, match="snapkv acted on 3 of 4 contexts.*longest such prompt: 1 tokens"):
        scores(make(model_dir, SNAPKV))
    with pytest.warns(KvsieveWarning, match="every continuation is one token, and snapkv first acts on the second"):
        scores(make(model_dir, SNAPKV), [" w3", " w4"], [prompt(0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", KvsieveWarning)
        scores(make(model_dir, "method=gemfilter,budget=20,layer=1"), [" w3", " w4"], [prompt(0)])


def test_rolling_loglikelihood_is_for_full_kv(model_dir):
    with pytest.raises(UnsupportedOptionError, match="toy asks for loglikelihood_rolling.*no context.*'snapkv'"):
        make(model_dir, SNAPKV).loglikelihood_rolling([Request(prompt(0))])
    own = HFLM(pretrained=model_dir, device="cpu").loglikelihood_rolling([Request(prompt(0))], disable_tqdm=True)
    assert make(model_dir, "method=full").loglikelihood_rolling([Request(prompt(0))], disable_tqdm=True) == own


def test_stored_answers_of_another_plan_are_refused(model_dir, tasks, tmp_path):
    store = str(tmp_path / "answers")
    first = evaluate(model_dir, tasks, SNAPKV, use_cache=store)
    again = evaluate(model_dir, tasks, SNAPKV, use_cache=store)
    assert again["results"] == first["results"] and again["config"]["kvsieve"]["batches"] == 0
    with pytest.raises(UnsupportedOptionError, match="--use_cache file holds answers of another plan"):
        evaluate(model_dir, tasks, "method=full", use_cache=store)


def test_the_demo_model_is_the_default(model_dir, monkeypatch):
    asked = []

    def load(name, dtype, device):
        asked.append((name, dtype, device))
        return build("llama"), HFLM(pretrained=model_dir, device="cpu").tokenizer

    monkeypatch.setattr(kvsieve.models, "load", load)
    for arguments in (SNAPKV, f"pretrained=demo,dtype=float32,{SNAPKV}"):
        lm = get_model("kvsieve").create_from_arg_string(arguments, {"device": "cpu", "batch_size": 1})
        assert answers(lm)
    assert asked == [(None, "auto", "cpu"), (None, torch.float32, "cpu")]


def test_command_line(model_dir, tasks, tmp_path, monkeypatch, capsys):
    command = f"lm-eval --model kvsieve --model_args pretrained={model_dir},{SNAPKV} --tasks kvsieve_toy --device cpu"
    options = f"--include_path {tasks} --batch_size 1 --output_path {tmp_path} --seed 0"
    monkeypatch.setattr(sys, "argv", [*command.split(), *options.split()])
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    # Reading the thousands of tasks that come with the harness takes longer than everything else here.
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", functools.partial(TaskManager, include_defaults=False))
    lm_eval_command.main()
    out = capsys.readouterr().out
    assert "kvsieve (" in out and "exact_match" in out
    saved = json.loads(next(tmp_path.rglob("results_*.json")).read_text())
    assert saved["config"]["kvsieve"]["plan"]["name"] == "snapkv"
    assert saved["config"]["kvsieve"]["batches_applied"] == 3


def test_without_the_harness_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    with pytest.raises(ImportError, match=r"pip install 'kvsieve\[lm-eval\]'"):
        runpy.run_path(lm_eval_model.__file__)


def test_the_entry_point_names_the_registered_class():
    """What a harness with entry points would load is what importing the module registers."""
    assert get_model("kvsieve") is lm_eval_model.KvsieveLM is KvsieveLM
