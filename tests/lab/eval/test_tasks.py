"""The generated tasks: length, reproducibility, and that each question follows from its context."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter

import pytest

from kvsieve.errors import InputError
from kvsieve.lab.tasks import all_tasks, chosen_tasks, shots
from kvsieve.lab.tasks import words as lists
from kvsieve.lab.tasks.prompter import Prompter
from kvsieve.lab.tasks.words import COUNTRIES, TOWNS

TASKS = all_tasks()
RULER = [name for name in TASKS if name.startswith("ruler_")]
UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
INDICES = range(6)

# Right answers that are computed from the context, or written by its description.
COMPUTED = {"arithmetic", "chains", "codetests", "reasoning", "reasoning_4k"}

each_task = pytest.mark.parametrize("name", TASKS)


def words(sample):
    return len(f"{sample.system or ''} {sample.context} {sample.turns[0].question}".split())


@functools.cache
def made(name, index=0, length=600, seed=0, haystack="topics"):
    """A sample of so many words, which needs no tokenizer."""
    return all_tasks(haystack)[name].sample(index, length, seed, words)


def content(sample):
    turns = [(turn.question, turn.answers, turn.prefix, turn.max_new_tokens) for turn in sample.turns]
    return sample.system, sample.context, turns, dict(sample.meta), sample.independent


def asked(sample):
    return sample.system, [(turn.question, turn.answers) for turn in sample.turns]


def right_answer(turn):
    return turn.reply.removeprefix(turn.prefix).strip()


@pytest.fixture(scope="module")
def prompter(demo_tokenizer):
    return Prompter(demo_tokenizer)


@each_task
@pytest.mark.parametrize("length", [1024, 2048, 4096])
def test_prompt_is_as_long_as_asked_and_leaves_room_for_the_answer(prompter, demo_tokenizer, name, length):
    sample = TASKS[name].sample(3, length, 0, prompter.count)
    assert 0.98 * length <= prompter.encode(sample).prompt.shape[1] <= length
    for turn in sample.turns:
        tokens = demo_tokenizer(f" {right_answer(turn)}", add_special_tokens=False)["input_ids"]
        assert len(tokens) + 1 <= turn.max_new_tokens


@each_task
def test_too_short_a_length_is_refused(name):
    with pytest.raises(InputError, match=rf"{name} needs prompts of at least \d+ tokens, got a length of 5;"):
        TASKS[name].sample(0, 5, 0, words)


@each_task
def test_same_arguments_give_the_same_sample_and_others_another(name):
    one = TASKS[name].sample(1, 600, 0, words)
    assert content(all_tasks()[name].sample(1, 600, 0, words)) == content(one)
    for index, length, seed in ((2, 600, 0), (1, 601, 0), (1, 600, 1)):
        assert asked(made(name, index, length, seed)) != asked(one)
        assert made(name, index, length, seed).context != one.context


@each_task
def test_answers_stand_in_the_context_and_not_in_the_question(name):
    for index in INDICES:
        sample = made(name, index)
        for turn in sample.turns:
            assert turn.answers and len(set(turn.answers)) == len(turn.answers)
            for answer in turn.answers:
                if name not in COMPUTED:
                    assert answer.lower() not in f"{turn.question} {turn.prefix}".lower()
                    assert re.search(rf"\b{re.escape(answer)}\b", f"{sample.system or ''} {sample.context}")


@each_task
def test_right_answer_scores_one_and_others_less(name):
    for index in INDICES:
        for turn in made(name, index).turns:
            assert turn.score(right_answer(turn), turn.answers)["score"] == 1
            assert turn.score("", turn.answers)["score"] == 0
            assert turn.score("I cannot tell.", turn.answers)["score"] == 0


@each_task
def test_names_titles_and_modes(name):
    task = TASKS[name]
    assert task.name == name and task.title
    assert task.modes == (("hidden",) if made(name).independent else ("visible", "hidden"))
    assert json.loads(json.dumps(dict(made(name).meta))) == made(name).meta
    assert TASKS[name].document(7) == 7


def test_titles_differ():
    assert len({task.title for task in TASKS.values()}) == len(TASKS)


# Needles


@pytest.mark.parametrize("haystack", ["topics", "noise"])
@pytest.mark.parametrize("name", ["needle", "passkey64"])
def test_grid_goes_from_the_beginning_to_the_end(name, haystack):
    for index in range(11):
        sample = made(name, index, length=2400, haystack=haystack)
        assert sample.meta == {"depth": index / 10}
        needle = re.search(r"(The special magic number|The pass key is) .*?\.( Remember.*?\.)?", sample.context)
        place = needle.start() / (len(sample.context) - len(needle.group()))
        assert place == pytest.approx(index / 10, abs=0.1)
    assert made(name, 11).meta == {"depth": 0}


def test_needle_is_a_number_of_seven_digits_said_once():
    for index in INDICES:
        sample = made("needle", index)
        (code,) = sample.turns[0].answers
        assert re.fullmatch(r"[1-9]\d{6}", code) and sample.context.count(code) == 1


def test_passkey_has_64_digits_and_is_said_twice():
    for index in INDICES:
        sample = made("passkey64", index)
        assert re.findall(r"\b\d{64}\b", sample.context) == list(sample.turns[0].answers) * 2


# RULER

NEEDLE = re.compile(r"One of the special magic (number|uuid)s for (\S+) is: (\S+)\.")
KINDS = {"words": r"[a-z]+-[a-z]+", "numbers": r"[1-9]\d{6}", "uuids": UUID}
NIAH = {  # keys, values of each, keys asked for, kind of key, kind of value
    "single_1": (1, 1, 1, "words", "numbers"),
    "single_2": (1, 1, 1, "words", "numbers"),
    "single_3": (1, 1, 1, "words", "uuids"),
    "multikey_1": (4, 1, 1, "words", "numbers"),
    "multikey_2": (None, 1, 1, "words", "numbers"),
    "multikey_3": (None, 1, 1, "uuids", "uuids"),
    "multivalue": (1, 4, 1, "words", "numbers"),
    "multiquery": (4, 1, 4, "words", "numbers"),
}


@pytest.mark.parametrize("name", NIAH)
def test_niah_has_rulers_needles(name):
    keys, values, queries, key_kind, value_kind = NIAH[name]
    for index in INDICES:
        sample = made(f"ruler_niah_{name}", index)
        (turn,) = sample.turns
        found = NEEDLE.findall(sample.context)
        asked_for = re.findall(rf"\b(?:{KINDS[key_kind]})\b", turn.question)
        assert {noun for noun, _, _ in found} == {value_kind.removesuffix("s")}
        assert all(re.fullmatch(KINDS[key_kind], key) and re.fullmatch(KINDS[value_kind], v) for _, key, v in found)
        assert len(set(asked_for)) == len(asked_for) == queries
        assert all(key in turn.prefix for key in asked_for)
        assert len(turn.answers) == queries * values
        assert Counter(value for _, key, value in found if key in asked_for) == Counter(turn.answers)
        if keys is not None:
            assert Counter(key for _, key, _ in found) == Counter({key: values for _, key, _ in found})
            assert len({key for _, key, _ in found}) == keys
        else:
            assert len(found) > 20


@pytest.mark.parametrize("name", ["multikey_2", "multikey_3"])
def test_distractors_are_the_whole_haystack(name):
    for index in INDICES:
        sample = made(f"ruler_niah_{name}", index)
        rest = NEEDLE.sub("", sample.context).partition("asked about them.")[2].split()
        assert len(rest) < 12  # one needle's worth of noise, to hit the length
        assert all(word in "The river is wide. The hills are green. The road goes on and on." for word in rest)


def test_noise_is_the_haystack_of_the_first_niah_and_text_of_the_others():
    for name in ("single_2", "single_3", "multikey_1", "multivalue", "multiquery"):
        assert "The hills are green." not in made(f"ruler_niah_{name}").context
    assert made("ruler_niah_single_1").context.count("The hills are green.") > 10


def test_needles_stand_at_different_places():
    places = [NEEDLE.search(made("ruler_niah_single_2", index).context).start() for index in range(12)]
    assert max(places) > 3 * min(places) + 500


def test_variables_are_found_by_following_the_chain():
    for index in INDICES:
        sample = made("ruler_vt", index)
        (turn,) = sample.turns
        (value,) = re.findall(r"\d+", turn.question)
        holds = {}
        for line in re.finditer(r"VAR (\w+) = (?:VAR )?(\w+)\.", sample.context):
            name, source = line.groups()
            assert name not in holds
            holds[name] = holds.get(source, source)
        # The chain and the one of the example, in the order of the text.
        assert len(holds) == 10 and len(set(holds.values())) == 2
        assert [name for name in holds if holds[name] == value] == list(turn.answers)
        assert len(turn.answers) == 5


@pytest.mark.parametrize("haystack", ["topics", "noise"])
@pytest.mark.parametrize(("length", "often"), [(150, None), (600, None), (2000, 30)])
def test_common_words_are_the_most_frequent(haystack, length, often):
    for index in range(3):
        sample = made("ruler_cwe", index, length, haystack=haystack)
        listed = re.findall(r"(\d+)\. (\S+)", sample.context)
        assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
        counts = Counter(word for _, word in listed)
        expected = sample.turns[0].answers
        assert len(expected) == 10
        others = [n for word, n in counts.items() if word not in expected]
        assert min(counts[word] for word in expected) > max(others, default=2)
        if often:
            assert {counts.pop(word) for word in expected} == {often} and set(counts.values()) == {3}


@pytest.mark.parametrize("length", [150, 600, 2000])
def test_frequent_words_are_so_apart_from_the_dots(length):
    for index in range(3):
        sample = made("ruler_fwe", index, length)
        counts = Counter(sample.context.partition("\n\n")[2].split())
        dots = counts.pop("...")
        ranked = counts.most_common(4)
        assert tuple(word for word, _ in ranked[:3]) == sample.turns[0].answers
        assert dots > ranked[0][1] > ranked[1][1] > ranked[2][1] > ranked[3][1]


def documents(sample):
    """Bodies by title, a list each."""
    parts = re.split(r"\n\nDocument (\d+): ", sample.context)
    assert parts[1::2] == [str(i + 1) for i in range(len(parts) // 2)]
    found = {}
    for document in parts[2::2]:
        title, _, body = document.partition("\n")
        found.setdefault(title, []).append(body)
    return found


def born(body):
    return re.search(r" was born in (\w+) in \d{4}\.", body).group(1)


@pytest.mark.parametrize("hops", [1, 2])
def test_documents_answer_the_question_in_one_way(hops):
    for index in range(12):
        sample = made(f"ruler_qa_{hops}", index)
        (turn,) = sample.turns
        (answer,) = turn.answers
        (person,) = re.search(r"(?:was|where) ([A-Z]\w+ [A-Z]\w+)", turn.question).groups()
        found = documents(sample)
        (about,) = found[person]
        town = born(about)
        naming = [title for title, bodies in found.items() if any(town in f"{title} {body}" for body in bodies)]
        if hops == 1:
            assert answer == town in TOWNS
            assert naming == [person]
        else:
            (place,) = found[town]
            assert re.search(r" is a town in (\w+) ", place).group(1) == answer in COUNTRIES
            assert sorted(naming) == sorted([person, town])
            assert answer not in about
        assert len(found) > 10


def test_two_hops_lie_apart():
    gaps = []
    for index in range(12):
        sample = made("ruler_qa_2", index, 1500)
        person = re.search(r"where ([A-Z]\w+ [A-Z]\w+)", sample.turns[0].question).group(1)
        titles = list(documents(sample))
        gaps.append(abs(titles.index(person) - titles.index(born(documents(sample)[person][0]))) / len(titles))
    assert min(gaps) > 0.3


# The others


def test_key_values_are_a_json_object_with_the_answer():
    for index in INDICES:
        sample = made("kv", index)
        (turn,) = sample.turns
        (key,) = re.findall(r'"(.+?)"', turn.question)
        assert json.loads(sample.context[sample.context.index("{") :])[key] == turn.answers[0]
        assert sample.context.count(f'"{key}":') == sample.context.count(turn.answers[0]) == 1
        pairs = re.findall(r'"[a-z]+-[a-z]+": "\d{7}"', sample.context)
        assert len(pairs) > 100
        place = next(i for i, pair in enumerate(pairs) if key in pair) / len(pairs)
        assert place == pytest.approx(sample.meta["depth"], abs=0.02)


@pytest.mark.parametrize("name", ["multiturn", "shared"])
def test_facts_are_asked_one_by_one(name):
    orders = set()
    for index in INDICES:
        sample = made(name, index)
        assert sample.independent == (name == "shared")
        facts = re.findall(r"The special magic number of the (\S+) is (\d{7})\.", sample.context)
        answers = {re.search(r"of the (\S+) mentioned", turn.question).group(1): turn for turn in sample.turns}
        assert len(facts) == len(answers) == len(sample.turns) == 4
        assert {key: turn.answers for key, turn in answers.items()} == {key: (value,) for key, value in facts}
        assert all(key in turn.prefix for key, turn in answers.items())
        order = [facts.index((key, turn.answers[0])) for key, turn in answers.items()]
        by_depth = sorted(range(4), key=lambda i: sample.meta["depths"][i])
        assert [order[i] for i in by_depth] == [0, 1, 2, 3]
        orders.add(tuple(order))
    assert len(orders) > 1


def test_many_shots_show_one_label_for_each_topic():
    for index in INDICES:
        sample = made("manyshot", index)
        (turn,) = sample.turns
        sentence = re.match(r"Sentence: (.+)\nWhich label\?", turn.question).group(1)
        shots = re.findall(r"Sentence: (.+)\nLabel: (\w+)", sample.context)
        labels = {}
        for shown, label in shots:
            assert labels.setdefault(shown, label) == label
        assert len(set(labels.values())) == 4 and len(shots) > 40
        assert sentence not in labels
        # The same pattern with another word stands under the same label.
        pattern = [shown for shown in labels if len(set(shown.split()) ^ set(sentence.split())) <= 2]
        assert pattern and {labels[shown] for shown in pattern} == set(turn.answers)


def value_of(term):
    first, sign, second = term.split()
    return int(first) + int(second) * {"+": 1, "-": -1}[sign]


def test_sums_are_right_and_the_one_asked_is_not_shown():
    signs = set()
    for index in INDICES:
        sample = made("arithmetic", index)
        (turn,) = sample.turns
        term = turn.prefix.removesuffix(" =")
        signs.add(term.split()[1])
        assert [str(value_of(term))] == list(turn.answers)
        assert turn.question not in sample.context
        shown = re.findall(r"(\d+) (gets|gives|\w+ and gets|\w+ and gives) ?(?:away )?(\d+).*now\? (.+) = (\d+)\.", (
            sample.context
        ))  # fmt: skip
        assert len(shown) == sample.context.count("How many") > 20
        for first, verb, second, shown_term, result in shown:
            assert shown_term == f"{first} {'+' if verb.endswith('gets') else '-'} {second}"
            assert value_of(shown_term) == int(result) >= 0
    assert signs == {"+", "-"}


@pytest.mark.parametrize("name", ["ruler_niah_multikey_2", "kv"])
def test_no_distractor_has_the_key_asked_for(monkeypatch, name):
    monkeypatch.setattr(lists, "ADJECTIVES", ("red", "blue", "pink"))
    monkeypatch.setattr(lists, "NOUNS", ("cat", "dog", "cow"))
    for index in INDICES:
        sample = TASKS[name].sample(index, 500, 0, words)
        (key,) = re.findall(r"\b(?:red|blue|pink)-(?:cat|dog|cow)\b", sample.turns[0].question)
        assert len(re.findall(rf"{key}\b", sample.context)) == 1


def test_the_sum_asked_for_is_no_example(monkeypatch):
    monkeypatch.setattr(shots, "FIRST_NAMES", ("Ann",))
    monkeypatch.setattr(shots, "_THINGS", ("nuts",))
    for index in INDICES:
        sample = TASKS["arithmetic"].sample(index, 3000, 0, words)
        assert sample.turns[0].question not in sample.context


@pytest.mark.parametrize("name", ["instructions", "system"])
def test_instructions_stand_before_the_text(demo_tokenizer, name):
    for index in INDICES:
        sample = made(name, index)
        (turn,) = sample.turns
        person, town = turn.answers
        rules = f"Your name is {person}. You live in {town}."
        assert (sample.system or sample.context).startswith(rules)
        assert (sample.system is not None) == (name == "system")
        assert f"{sample.system} {sample.context}".count(rules) == 1
        answer = f"My name is {person} and I live in {town}."
        assert turn.score(answer, turn.answers) == {"score": 1, "all": 1, "name": 1, "town": 1}
        assert turn.score(f"I live in {town.upper()}.", turn.answers) == {"score": 0.5, "all": 0, "name": 0, "town": 1}
        assert len(demo_tokenizer(answer)["input_ids"]) < turn.max_new_tokens


def test_own_haystack_is_used(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("Zebras graze here. " * 30)
    tasks = all_tasks(str(path))
    for name in ("needle", "ruler_niah_single_2", "multiturn", "system"):
        assert tasks[name].sample(0, 200, 0, words).context.count("Zebras graze here.") > 30
    assert "Zebras" not in tasks["ruler_niah_single_1"].sample(0, 200, 0, words).context


# Choosing


def test_groups_and_names():
    assert len(RULER) == 13
    assert [task.name for task in chosen_tasks(["ruler"])] == RULER
    assert [task.name for task in chosen_tasks(["all"])] == list(TASKS)
    assert [task.name for task in chosen_tasks(["kv", "needle", "kv"])] == ["kv", "needle"]
    assert len(chosen_tasks(["ruler_vt", "ruler"])) == 13


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["needel"], "unknown task 'needel'; did you mean 'needle'?"),
        (["ruler_niah_single1"], "did you mean 'ruler_niah_single_1'?"),
        (["rulr"], "did you mean 'ruler'?"),
        (["kv", ""], "unknown task ''"),
        ([], "no task was named"),
    ],
    ids=str,
)
def test_unknown_task_is_refused_with_a_suggestion(names, message):
    with pytest.raises(InputError, match=re.escape(message)):
        chosen_tasks(names)


def test_missing_haystack_is_refused():
    with pytest.raises(InputError, match="/no/such/folder"):
        chosen_tasks(["needle"], "/no/such/folder")


def test_the_long_answer_names_the_same_people_twice():
    for index in INDICES:
        sample = made("longanswer", index)
        (turn,) = sample.turns
        people = re.search(r"People: (.+)\.", sample.context)[1].split(", ")
        again = re.search(r"in this order: (.+)\.", turn.question)[1].split(", ")
        assert len(people) == 12 and people == again
        pairs = re.findall(r"^(\w+): (\w+)", turn.reply, re.MULTILINE)
        assert [name for name, _ in pairs] == [*people, *again] and turn.spread
        assert dict(pairs) == dict(zip(people, turn.answers, strict=True))
