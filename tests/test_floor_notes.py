"""Notes and warnings about shares of short prompts, budgets that may be meant in percent, and turns that go on."""

from __future__ import annotations

import httpx
import pytest

import kvsieve
from kvsieve.errors import PlanError
from kvsieve.planning.budget import percent_doubt
from paths import Ask, serving, words
from tiny import tiny_model
from toy_chats import chat_tokenizer

BLIND = "snapkv chose what to keep before it knew this turn's question"
DOUBT = "budget 20 keeps 20 entries; for a share write 20%"
SNAPKV = {"window": 4, "kernel": 3, "paper": True}


def model():
    return tiny_model(filled=True)


def turn_notes(plan, *messages):
    with kvsieve.attach(model(), plan) as sieve:
        chat = sieve.chat(chat_tokenizer(), max_new_tokens=2)
        return [chat.ask(message).stats.notes for message in messages]


def test_a_chat_is_told_once_that_earlier_turns_chose_without_its_question():
    long, short = words(30, seed=1), words(5, seed=2)
    notes = turn_notes(kvsieve.plan("snapkv", budget="30%", **SNAPKV), short, long, short, short)
    told = [[note for note in turn if note.startswith(BLIND)] for turn in notes]
    # The first turn is dropped from already, so the second one goes on from what is left.
    assert [len(turn) for turn in told] == [0, 1, 0, 0]
    assert "take rocketkv-mt" in told[1][0]


def test_it_is_told_where_something_is_gone_first():
    long, short = words(40, seed=1), words(5, seed=2)
    notes = turn_notes(kvsieve.plan("snapkv", budget="30%", floor=30, **SNAPKV), short, long, short, short)
    assert [sum(note.startswith(BLIND) for note in turn) for turn in notes] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    "plan",
    [
        kvsieve.plan("full"),
        kvsieve.plan("perturn", budget="30%", paper=True),
        kvsieve.plan("streamingllm", budget="30%", sinks=1),
        kvsieve.plan("knorm", budget="30%"),
        kvsieve.plan("snapkv", budget="30%", rest="2bit", **SNAPKV),
        kvsieve.plan("quest", budget=16),
        kvsieve.plan("gemfilter", budget=16, layer=1, paper=True),
        kvsieve.plan("snapkv", budget="30%", floor=512, window=4, kernel=3),
    ],
    ids=lambda plan: plan.name,
)
def test_plans_that_lose_nothing_by_it_are_not_told(plan):
    messages = [words(30, seed=seed) for seed in (1, 2, 3)]
    assert not any("chose what to keep" in note for turn in turn_notes(plan, *messages) for note in turn)


def post(url, text, **kv):
    body = {"model": "tiny", "max_tokens": 2, "messages": text, "kv": kv}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    return reply["choices"][0]["message"], reply["usage"]["kv"]["notes"]


def test_a_session_is_told_once_and_separate_requests_never():
    ask = Ask(model(), "", method="snapkv:window=4:kernel=3:paper=true", budget="30%")
    with serving(ask) as url:
        for session in ({"session": "one"}, {}):
            messages, seen = [], []
            for seed in (1, 2, 3):
                messages.append({"role": "user", "content": words(30, seed=seed)})
                answer, notes = post(url, messages, **session)
                messages.append({"role": "assistant", "content": answer["content"]})
                seen.append(sum(note.startswith(BLIND) for note in notes))
            assert seen == ([0, 1, 0] if session else [0, 0, 0])


def test_a_server_tells_of_the_floor_and_asks_back_about_small_numbers(usual_floor):
    ask = Ask(model(), "", method="snapkv:window=4", budget="30%")
    messages = [{"role": "user", "content": words(30, seed=1)}]
    with serving(ask) as url:
        _, notes = post(url, messages)
        assert "all 33 tokens kept: below the floor of 512" in notes
        for budget in (20, "20"):
            _, notes = post(url, messages, budget=budget)
            assert DOUBT in notes and not any("floor" in note for note in notes)
        assert not any("for a share" in note for note in post(url, messages, budget="20%")[1])


@pytest.mark.parametrize(
    "budget, doubt",
    [(20, DOUBT), ("20", DOUBT), (100, "budget 100 keeps 100 entries; for a share write 100%")]
    + [(fine, None) for fine in (101, "2048", "20%", 0.2, "0.2", "512MiB", None)],
)
def test_small_numbers_may_be_meant_in_percent(budget, doubt):
    assert percent_doubt(budget) == doubt


@pytest.mark.parametrize("name, budget", [("snapkv", 1), ("quest", 10), ("kvzip", 3), ("finch", 8)])
def test_numbers_too_small_for_a_method_ask_back_too(name, budget):
    """Where it is refused, the message asks."""
    with pytest.raises(PlanError, match=f"{budget} entries is too small, at least .*, or write {budget}% for a share"):
        kvsieve.plan(name, budget=budget, **kvsieve.method_info(name).example)


@pytest.fixture
def talk_in(cli, tmp_path, monkeypatch):
    """The command line on a checkpoint with a chat template."""
    import io
    import sys

    model().save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)

    def call(command, *arguments, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return cli(command, tmp_path, *arguments, "--max-new-tokens", 2)

    return call


@pytest.mark.parametrize("how", [["--method", "snapkv", "--budget", "20"], ["--method", "snapkv:budget=20"]])
@pytest.mark.parametrize("command", ["run", "chat"])
def test_commands_ask_back_about_small_numbers(talk_in, command, how):
    asked = ["--prompt", "w1 w2"] if command == "run" else []
    code, _, err = talk_in(command, *how, "--set", "window=4", *asked, stdin="w1 w2\n")
    assert code == 0 and err.count(f"warning: {DOUBT}") == 1
    code, _, err = talk_in(command, *(each.replace("20", "20%") for each in how), *asked, stdin="w1 w2\n")
    assert code == 0 and "for a share" not in err


def test_budgets_of_an_evaluation_ask_back():
    from kvsieve.cli.evaluate import budgets_of
    from kvsieve.errors import KvsieveWarning

    with pytest.warns(KvsieveWarning, match=DOUBT):
        assert budgets_of("10%,20") == ["10%", "20"]


def test_the_chat_command_tells_each_kind_of_note_once(talk_in, usual_floor):
    asked = f"{words(20, seed=1)}\n{words(9, seed=2)}\n"
    code, _, err = talk_in("chat", "--method", "snapkv", "--set", "window=4", stdin=asked)
    assert code == 0 and err.count("tokens kept: below the floor of 512") == 1
    code, _, err = talk_in("chat", "--method", "snapkv:window=4:floor=0:budget=30%", stdin=3 * asked)
    assert code == 0 and err.count(BLIND) == 1


def test_run_tells_of_the_floor_and_warns_of_nothing(talk_in, usual_floor):
    code, out, err = talk_in("run", "--prompt", "w1 w2 w3", "--method", "snapkv")
    assert code == 0 and "tokens kept: below the floor of 512" in out.replace("\n", " ") and "warning" not in err


def test_the_page_shows_notes():
    with serving(Ask(model(), "")) as url:
        script = httpx.get(f"{url}/page/answer.js").text
    assert "kv?.notes" in script
