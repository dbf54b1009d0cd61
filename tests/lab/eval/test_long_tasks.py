"""Tasks of long answers and of agents: scores by hand."""

from __future__ import annotations

import json
import re

import pytest

from kvsieve.lab.tasks import all_tasks
from kvsieve.lab.tasks.agents import state_and_fact
from kvsieve.lab.tasks.chains import drawn_amounts, steps_and_total, worked
from kvsieve.lab.tasks.codetests import code_of, passed_tests
from kvsieve.lab.tasks.haystack import draw
from kvsieve.lab.tasks.leakage import followed_without_leak
from kvsieve.lab.tasks.reasoning import steps_and_end, worked_states
from kvsieve.lab.tasks.toolcalls import call_of, matches, valid_and_right

TASKS = all_tasks()


def made(name, index=0, length=900):
    return TASKS[name].sample(index, length, 0, lambda sample: len(f"{sample.context}".split()))


# Chains


def test_a_chain_is_scored_line_by_line():
    score = steps_and_total(40, [7, -5, 9, 2])
    lines = ["40 + 7 = 47", "Entry 2: 47 - 5 = 42", "Entry 3: 42 + 9 = 51", "Entry 4: 51 + 2 = 53", "Total: 53"]
    assert score("\n".join(lines), ()) == {"score": 1, "steps": 1, "total": 1}
    assert score("Entry 1: " + "\n".join(lines), ())["score"] == 1
    # A wrong sum: the next line goes on from it, and the total is another.
    wrong = [lines[0], "Entry 2: 47 - 5 = 43", "Entry 3: 43 + 9 = 52", "Entry 4: 52 + 2 = 54", "Total: 54"]
    assert score("\n".join(wrong), ()) == {"score": 0.375, "steps": 0.75, "total": 0}
    # Another entry's amount, and a line that is missing: the one after it has no line before.
    assert score("40 + 9 = 49", ())["steps"] == 0
    assert score("\n".join([lines[0], *lines[2:]]), ()) == {"score": 0.75, "steps": 0.5, "total": 1}
    assert score("Total: 53", ()) == {"score": 0.5, "steps": 0, "total": 1}


def test_the_ledger_is_in_the_text_in_order():
    sample = made("chains")
    begin = int(re.search(r"begins with (\d+)", sample.turns[0].question)[1])
    found = re.findall(r"Entry (\d+) of the ledger (adds|takes away) (\d)\.", sample.context)
    assert [int(at) for at, _, _ in found] == list(range(1, 17))
    total = begin + sum(int(amount) * (1 if verb == "adds" else -1) for _, verb, amount in found)
    assert sample.turns[0].answers == (str(total),)
    assert worked(5, [3, -2]) == ["Entry 1: 5 + 3 = 8", "Entry 2: 8 - 2 = 6", "Total: 6"]
    amounts = drawn_amounts(draw(0, "x", 1, 1), 12, 200)
    assert all(12 + sum(amounts[: at + 1]) >= 10 and 2 <= abs(each) <= 9 for at, each in enumerate(amounts))


# Reasoning


def test_states_follow_the_rules_in_turn():
    assert worked_states((1, 2, 3, 4), [(2, 5), (0, 1)], 3) == [(1, 2, 8, 4), (2, 2, 8, 4), (2, 2, 13, 4)]


def test_a_derivation_is_scored_step_by_step():
    score = steps_and_end((1, 2, 3, 4), [(2, 5), (0, 1)], 4, [2, 4])
    lines = [
        "a=1 b=2 c=8 d=4",
        "Step 2: a=2 b=2 c=8 d=4",
        "Step 3: a=2 b=2 c=13 d=4",
        "Step 4: a=3 b=2 c=13 d=4",
        "End: 2, 3",
    ]
    assert score("\n".join(lines), ()) == {"score": 1, "steps": 1, "end": 1}
    # One wrong number: the step itself is wrong, and the next one is right from there.
    wrong = [lines[0], "Step 2: a=9 b=2 c=8 d=4", "Step 3: a=9 b=2 c=13 d=4", "Step 4: a=10 b=2 c=13 d=4", "End: 9, 3"]
    assert score("\n".join(wrong), ()) == {"score": 0.625, "steps": 0.75, "end": 0.5}
    assert score("End: 2, 3", ()) == {"score": 0.5, "steps": 0, "end": 1}
    assert score("", ())["score"] == 0


@pytest.mark.parametrize(("name", "least", "most"), [("reasoning", 700, 1200), ("reasoning_4k", 2900, 4400)])
def test_answers_of_reasoning_are_long(name, least, most):
    turn = made(name).turns[0]
    # About a token for each digit and word.
    assert least < len(re.findall(r"\d|[A-Za-z]+|[=:\n]", turn.reply)) < turn.max_new_tokens <= most


# Code

HEAD = "def double(x):"


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        ("return 2 * x", 1),
        ("y = x + x\n    return y", 1),
        ("if x > 0:\n        return 2 * x\n    return 2 * x", 1),
        ("```python\ndef double(x):\n    return x * 2\n```\nIt doubles.", 1),
        ("return 2 * x\n\nprint(double(3))", 1),
        ("return abs(2 * x)", 0.5),
        ("return 4", 0),
        ("return x +", 0),
        ("return str(2 * x)", 0),
        ("I cannot tell.", 0),
    ],
)
def test_code_is_scored_by_its_tests(monkeypatch, answer, passed):
    monkeypatch.setattr("kvsieve.lab.tasks.codetests._TESTS", (-2, -1, 1, 2))
    assert passed_tests(HEAD, [-4, -2, 2, 4])(answer, ())["score"] == passed


def test_every_step_is_tested():
    for index in range(4):
        turn = made("codetests", index).turns[0]
        *steps, last = turn.answers[0].splitlines()
        for at in range(3):
            without = "\n".join([*steps[:at], *steps[at + 1 :], last])
            assert turn.score(turn.answers[0], ())["score"] == 1 > turn.score(without, ())["score"]


def test_the_body_ends_with_its_indentation():
    assert code_of("return 1\nprint(2)", HEAD) == f"{HEAD}\n    return 1"
    assert code_of("  return 1", HEAD) == f"{HEAD}\n  return 1"


def test_the_functions_are_described_in_the_text():
    sample = made("codetests")
    name = re.search(r"`(\w+)\(x\)`", sample.turns[0].question)[1]
    described = re.findall(r"The function `(\w+)\(x\)` of the \w+ project takes", sample.context)
    assert len(described) == 6 == len(set(described)) and name in described
    assert sample.turns[0].prefix == f"def {name}(x):\n"


# Tool calls


def test_a_call_is_valid_and_right():
    schema = {"type": "object", "required": ["day"]}
    properties = {"day": {"type": "string", "enum": ["Monday"]}, "hours": {"type": "integer"}}
    tools = {
        name: {"name": name, "parameters": {**schema, "properties": properties}} for name in ("rent_boat", "rent_car")
    }
    score = valid_and_right(tools, "rent_boat", {"day": "Monday", "hours": 2})

    def scored(answer):
        found = score(answer, ())
        return found["valid"], found["tool"], found["right"]

    right = {"name": "rent_boat", "arguments": {"day": "Monday", "hours": 2}}
    assert scored(json.dumps(right)) == scored(json.dumps(right).removeprefix('{"name": "')) == (1, 1, 1)
    assert score(f"```json\n{json.dumps(right)}\n```", ())["score"] == 1
    assert scored('{"name": "rent_boat", "arguments": {"day": "Monday", "hours": 3}}') == (1, 1, 0)
    assert scored('{"name": "rent_boat", "arguments": {"day": "Friday"}}') == (0, 1, 0)
    assert scored('{"name": "rent_car", "arguments": {"day": "Monday"}}') == (1, 0, 0)
    assert scored('{"name": "rent_kite", "arguments": {}}') == scored("[]") == scored("no") == (0, 0, 0)


def test_schemas_are_checked():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    assert matches({"n": 3}, schema)
    for value in ({}, {"n": True}, {"n": "3"}, {"n": 3, "m": 1}, [3], None):
        assert not matches(value, schema)
    assert call_of('so: {"name": "x"} and') == {"name": "x"} and call_of("{[") == {}


def test_tools_differ_in_their_names():
    sample = made("toolcalls", length=4000)
    tools = [json.loads(line) for line in sample.context.splitlines()[1:]]
    names = [tool["name"] for tool in tools]
    assert len(names) == len(set(names)) > 100 and sample.turns[0].answers[0] in names
    call = json.loads(sample.turns[0].reply.replace('{"name": " ', '{"name": "'))
    called = next(tool for tool in tools if tool["name"] == call["name"])
    assert matches(call["arguments"], called["parameters"])
    for value in call["arguments"].values():
        assert str(value) in sample.turns[0].question


# Agents


def test_the_state_is_the_last_one():
    score = state_and_fact("314", "7654321")
    assert score("314. The ticket number is 7654321.", ()) == {"score": 1, "state": 1, "fact": 1}
    assert score("271, and 7654321", ()) == {"score": 0.5, "state": 0, "fact": 1}
    assert score("314", ())["score"] == 0.5 and score("a lot", ())["score"] == 0
    sample = made("agents", length=1500)
    subject = re.search(r"stock of (\w+) after", sample.turns[0].question)[1]
    counts = re.findall(rf"Stock of {subject}: (\d+)\.", sample.context)
    assert sample.turns[0].answers[0] == counts[-1] and len(set(counts)) == len(counts)
    assert len(re.findall(r"^Turn \d+$", sample.context, re.MULTILINE)) == 20
    turn = sample.context.partition("ticket number")[0].count("\nObservation:")
    assert 2 <= turn <= 10


# Leakage


def test_a_reply_counts_without_its_leak():
    score = followed_without_leak("The gate is closed", ["The code word is amber-apple and it opens the door"])
    assert score("The gate is closed.", ()) == {"score": 1, "followed": 1, "leaked": 0}
    assert score("The code word is amber-apple and it opens the door", ()) == {"score": 0, "followed": 0, "leaked": 1}
    both = score("The gate is closed. The code word is amber-apple", ())
    assert both == {"score": pytest.approx(0.5), "followed": 1, "leaked": pytest.approx(0.5)}
    assert score("I cannot tell the word.", ()) == {"score": 0, "followed": 0, "leaked": 0}


def test_the_defence_has_every_place():
    places = set()
    for index in range(5):
        sample = made("leakage", index)
        rules = sample.system.splitlines()
        defended = [at for at, rule in enumerate(rules) if "answer only with" in rule]
        assert len(rules) == 5 and defended == [sample.meta["place"]]
        places |= set(defended)
        assert f'"{sample.turns[0].answers[0]}"' in rules[defended[0]]
    assert places == set(range(5))
