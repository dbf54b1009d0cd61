"""`kvsieve eval --server` and `kvsieve bench --server` against a server of our own."""

from __future__ import annotations

import json

import pytest
import torch

from kvsieve.cli.main import run_cli as exits
from kvsieve.errors import InputError
from kvsieve.lab.bench.load import LoadTest, load_test
from kvsieve.lab.client import ServerClient, ServerError, check_tokenizer_of, parse_extra
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.eval.grid import Grid
from kvsieve.lab.eval.served import score_server
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.planning.named import plan
from kvsieve.serve.keys import Keys
from kvsieve.serve.run import ServerOptions, application
from served_apps import listening
from tiny_models import build
from toy_chats import chat_tokenizer
from toy_words import WORDS

SNAPKV = {"kv": {"method": "snapkv:window=4:paper=True", "budget": 24}}


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def model_dir(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    build("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def url(tokenizer):
    options = ServerOptions(others=("snapkv:window=4:paper=True",), keys=Keys(["key"]))
    with application(build("llama"), tokenizer, options, "tiny") as app, listening(app) as address:
        yield address


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")


def run_cli(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        exits(arguments)
    return ended.value.code or 0


def share(answer, expected):
    """Of the words that are in the expected ones."""
    words = answer.split()
    return {"score": sum(word in expected for word in words) / max(len(words), 1)}


class Words:
    """A task of two turns, scored by the words of the answers."""

    name, title, modes = "words", "Words", ("visible",)

    def sample(self, index, length, seed, count):
        context = " ".join(WORDS[3 + (7 * at + index) % 110] for at in range(length))
        turns = tuple(QuestionAnswer(f"w{index + 3} w{turn}", tuple(WORDS[3:60]), share, 6) for turn in range(2))
        return Sample(context, turns, meta={"depth": 0.5})

    def document(self, index):
        return index


def test_a_server_is_scored_as_the_library_scores(url, tokenizer, tmp_path):
    task = Words()
    grid = Grid([task], [40, 70], ("visible",), 2, [], cost_samples=0)
    evaluator = Evaluator(build("llama"), tokenizer, chunk=128)
    for extra, given in (({}, plan("full")), (SNAPKV, plan("snapkv", budget=24, window=4, paper=True))):
        report = score_server(grid, ServerClient(url, extra=extra), tokenizer, tmp_path / given.name, {}, clients=2)
        first = {(row["length"], row["sample"]): row["answers"][0] for row in report["rows"]}
        for (length, index), answer in first.items():
            sample = task.sample(index, length, 0, evaluator.prompter.count)
            alone = evaluator.run(sample, [plan("full"), given], "visible")[1]
            assert answer == alone.answers[0]
            row = next(each for each in report["rows"] if (each["length"], each["sample"]) == (length, index))
            if given.name == "full":
                assert (row["answers"], row["metrics"]["score"]) == (alone.answers, alone.metrics["score"])
        assert [(each["length"], each["samples"]) for each in report["means"]] == [(40, 2), (70, 2)]


def test_a_run_goes_on_where_it_ended(url, tokenizer, tmp_path):
    run = {"seed": 0, "server_model": "tiny", "data": {"words": "a"}}
    first = score_server(Grid([Words()], [40], ("visible",), 2, []), ServerClient(url), tokenizer, tmp_path, run)
    more, asked = Grid([Words()], [40], ("visible",), 3, []), []
    with pytest.raises(InputError, match="--resume"):
        score_server(more, ServerClient(url), tokenizer, tmp_path, run)
    with pytest.raises(InputError, match="results of words on another text .a. than --haystack has .b."):
        score_server(more, ServerClient(url), tokenizer, tmp_path, {**run, "data": {"words": "b"}}, resume=True)
    with pytest.raises(InputError, match="server_model 'tiny'"):
        score_server(more, ServerClient(url), tokenizer, tmp_path, {**run, "server_model": "other"}, resume=True)
    client = ServerClient(url)
    complete = client.complete
    client.complete = lambda *given, **more: asked.append(1) or complete(*given, **more)
    both = score_server(more, client, tokenizer, tmp_path, run, resume=True)
    assert both["rows"][:2] == first["rows"] and len(both["rows"]) == 3 and len(asked) == 2
    assert json.loads((tmp_path / "server.json").read_text()) == both


def test_load_is_measured(url, tokenizer):
    text = torch.arange(3, 120).repeat(9)[None]
    test = LoadTest(ServerClient(url), text, 6, start=5)
    *_, by_length = load_test(test, [60], [1, 3], 2, lambda part: None)
    found = by_length["60"]
    assert [(each["clients"], each["requests"], each["new_tokens"]) for each in found] == [(1, 2, 12), (3, 6, 36)]
    for each in found:
        assert 0 < each["ttft_s"]["median"] <= each["ttft_s"]["p95"] and each["tpot_s"]["median"] > 0
        assert each["tokens_per_s"] == pytest.approx(each["new_tokens"] / each["seconds"], rel=0.01)
    *_, by_length = load_test(test, [(20, 60)], [3], 2, lambda part: None)
    assert by_length["20-60"][0]["prompt_tokens"] == 40
    # A prompt is another stretch each time, and found again when it is asked again.
    assert found[0]["cached_tokens"] < 8 and found[0]["again"]["cached_tokens"] >= 56


def test_a_server_without_ignore_eos_is_asked_without():
    class Strict:
        def complete(self, prompt, tokens, **more):
            if more:
                raise ServerError("the server answers 400: unknown member ignore_eos", 400)
            return tuple(prompt)

    test = LoadTest(Strict(), torch.arange(50)[None], 4, start=48)
    assert test.ask(test.prompt(5)) == (48, 49, 0, 1, 2)
    assert test.ask(test.prompt(3)) == (3, 4, 5) and len(test.notes) == 1


def test_the_commands(url, model_dir, tmp_path, capsys):
    common = [model_dir, "--server", f"{url}/v1", "--lengths", "60"]
    out = tmp_path / "bench.json"
    assert run_cli(["bench", *common, "--clients", "1,2", "--rounds", "1", "--new-tokens", "4", "--out", str(out)]) == 0
    assert "TTFT" in capsys.readouterr().out and json.loads(out.read_text())["lengths"]["60"][1]["clients"] == 2
    capsys.readouterr()
    assert run_cli(["eval", *common[:-1], "300", "--tasks", "kv", "--samples", "2", "--out", str(tmp_path / "r")]) == 0
    told = capsys.readouterr()
    assert "kv" in told.out and "KL" in told.err


WRONG = {
    "an option of models": (["bench", "--server", "URL", "--methods", "snapkv"], "--methods: not with --server"),
    "a server's without one": (["bench", "--clients", "3"], "--clients: only with --server"),
    "no clients": (["bench", "--server", "URL", "--clients", "0"], "--clients is a number"),
    "no JSON": (["bench", "--server", "URL", "--extra", "{kv"], "--extra is a JSON object"),
    **{
        f"its member, {command}": (
            [command, "--server", "URL", "--out", "x", "--extra", '{"n": 2}'],
            "cannot be n:",
        )
        for command in ("bench", "eval")
    },
    "nobody there": (["bench", "--server", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
    "no gap to read in": (["serve", "--gap", "1"], "--gap must be more than 1, got 1.0"),
    "a hidden question": (["eval", "--server", "URL", "--question", "hidden", "--out", "x"], "visibly only"),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_input_of_the_commands(what, url, model_dir, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given, message = WRONG[what]
    assert run_cli([given[0], model_dir, *(url if each == "URL" else each for each in given[1:])]) != 0
    assert message in capsys.readouterr().err


def test_refusals_are_told(url, tokenizer, monkeypatch):
    client = ServerClient(url)
    with pytest.raises(ServerError, match="answers 400: .*unknown.*no such parameter") as refused:
        client.complete([5], 1, unknown=1)
    assert refused.value.status == 400
    with pytest.raises(InputError, match="name the model that the server has"):
        check_tokenizer_of(client, [1] * 9, "w1 w2 w3", "another")
    check_tokenizer_of(client, [1] * 3, "w1 w2 w3", "its own")
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with pytest.raises(ServerError, match="set OPENAI_API_KEY"):
        ServerClient(url)
    with pytest.raises(InputError, match="cannot be n, echo"):
        ServerClient(url, extra={"echo": True, "n": 2, "stop": "."})
    assert parse_extra('{"a": 1}') == {"a": 1}
    with pytest.raises(InputError, match="JSON object"):
        parse_extra("[1]")
