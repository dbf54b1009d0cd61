"""LongBench, InfiniteBench, RULER's files and NoLiMa, from stand-ins of their published formats, and their scores."""

from __future__ import annotations

import json

import pytest

from kvsieve.errors import InputError
from kvsieve.lab.tasks import chosen_tasks, metrics
from kvsieve.lab.tasks import infinitebench as infinite
from kvsieve.lab.tasks import longbench as long
from kvsieve.lab.tasks.nolima import DEPTHS, NoLiMa
from kvsieve.lab.tasks.public import is_public, public_task, public_tasks
from kvsieve.lab.tasks.ruler_files import ruler_file

LONGBENCH = {"input": "Who?", "context": "A long text.", "answers": ["Ann", "Anna"], "length": 3, "dataset": "qasper",
             "language": "en", "all_classes": None, "_id": "1"}  # fmt: skip
INFINITE = {"id": 0, "context": "A long text.", "input": "Who?", "answer": ["Bob"],
            "options": ["Ann", "Bob", "Cid", "Dan"]}  # fmt: skip
RULER = {"index": 0, "input": "Remember.\nThe number of x is 12.\nWhat is the number of x?", "outputs": ["12"],
         "length": 20, "answer_prefix": " The number of x is"}  # fmt: skip
NEEDLE = {"id": "0401", "reasoning_type": "commonsense", "system_prompt": "Be brief.",
          "task_template": "A book:\n\n{haystack}\n\nQuestion: {question}\n\nOnly the name.",
          "needle": "{CHAR} lives next to {1}.", 
          "questions": {"onehop": "Who has been to {1}?", "twohop": "Who saw {2}?"},
          "character_set": ["Yuki", "Megan"], "tests": {"T1": {"input_args": ["the Opera", "Dresden"]}}}  # fmt: skip


def words(sample):
    """Stands for the tokenizer: one token per word of the prompt."""
    return len(f"{sample.system or ''} {sample.context} {sample.turns[0].question}".split())


def put(folder, name, *rows):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def test_longbench(tmp_path):
    others = [{**LONGBENCH, "input": "Where?"}, {**LONGBENCH, "context": "Another."}]
    task = public_task("longbench_qasper", put(tmp_path, "data/qasper.jsonl", LONGBENCH, *others))
    first, second, third = (task.sample(i, 1000, 0, words) for i in range(3))
    turn = first.turns[0]
    assert [task.document(i) for i in range(3)] == [0, 1, 0] and first.context == third.context
    assert first.context.startswith("You are given a scientific article") and first.context.endswith("A long text.")
    assert turn.question.endswith("Question: Who?\n\nAnswer:") and turn.max_new_tokens == 128 and turn.reply == "Ann"
    assert turn.score("anna", turn.answers)["score"] == 1
    text = " ".join(f"w{i:03}" for i in range(900))
    task = long.longbench(
        "longbench_lcc_e", put(tmp_path, "lcc_e.jsonl", {**LONGBENCH, "context": text, "dataset": "lcc"})
    )
    cut = task.sample(0, 300, 0, words)
    assert words(cut) == 300 and cut.meta["cut"] == 610 and cut.turns[0].question == "Next line of code:\n"
    assert "w000" in cut.context and "w899" in cut.context and "w450" not in cut.context


def test_longbench_classes_and_first_lines(tmp_path):
    row = {**LONGBENCH, "dataset": "trec", "answers": ["City"], "all_classes": ["City", "Number", "Other number"]}
    turn = long.longbench("longbench_trec", put(tmp_path, "trec.jsonl", row)).sample(0, 99, 0, words).turns[0]
    assert turn.score("City\nNumber", turn.answers) == {"score": 1.0}
    assert turn.score("City, Number", turn.answers) == {"score": 0.5}
    assert turn.score("Town", turn.answers) == {"score": 0.0}
    assert metrics.one_of(("Number", "Other number"))("Other number", ("Other number",)) == {"score": 1.0}


def test_every_longbench_prompt_has_its_places():
    for name, dataset in long._DATASETS.items():
        assert dataset.prompt.count("{context}") == 1, name
        assert "{{" not in dataset.prompt and dataset.max_new_tokens in (32, 64, 128, 512)


def test_infinitebench(tmp_path):
    key = {**INFINITE, "answer": ["71432"], "input": "What is the pass key?"}
    first = infinite.infinitebench("infinitebench_passkey", put(tmp_path, "passkey.jsonl", key)).sample(0, 99, 0, words)
    turn = first.turns[0]
    assert first.context.endswith("\n\nA long text.") and turn.question == "What is the pass key?"
    assert (turn.prefix, turn.max_new_tokens) == ("The pass key is", 6)
    assert [turn.score(each, turn.answers)["score"] for each in ("71432.", "714321")] == [1, 0]
    choice = {**INFINITE, "answer": ["Bob"]}
    task = infinite.infinitebench(
        "infinitebench_longbook_choice_eng", put(tmp_path, "longbook_choice_eng.jsonl", choice)
    )
    turn = task.sample(0, 99, 0, words).turns[0]
    assert turn.question == "Question: Who?\nA. Ann\nB. Bob\nC. Cid\nD. Dan" and turn.answers == ("B",)
    run = {**INFINITE, "input": "Please give me the value of func_7(-3).", "answer": [4]}
    sample = infinite.infinitebench("infinitebench_code_run", put(tmp_path, "code_run.jsonl", run)).sample(
        0, 99, 0, words
    )
    assert sample.context.startswith("There is a function called func_7 in") and sample.turns[0].answers == ("4",)
    assert sample.turns[0].prefix == "The value of func_7(-3) is"
    find = {
        **INFINITE,
        "input": "One number only. The largest number of the list is:",
        "answer": [9],
        "context": [3, 9],
    }
    sample = infinite.infinitebench("infinitebench_math_find", put(tmp_path, "math_find.jsonl", find)).sample(
        0, 99, 0, words
    )
    assert sample.context == "What is the largest number in the following list?\n\n[3, 9]"


def test_ruler_files(tmp_path):
    task = ruler_file("rulerfile_niah_single_1", put(tmp_path, "4096/niah_single_1/validation.jsonl", RULER))
    sample = task.sample(0, 100, 0, words)
    turn = sample.turns[0]
    assert sample.context == "Remember.\nThe number of x is 12." and turn.question == "What is the number of x?"
    assert (turn.prefix, turn.answers, turn.max_new_tokens) == ("The number of x is", ("12",), 128)
    with pytest.raises(InputError, match="prompt of 13 tokens, more than the length of 9; raise --lengths"):
        task.sample(0, 9, 0, words)
    qa = ruler_file("rulerfile_qa_1", put(tmp_path, "qa_1.jsonl", {**RULER, "outputs": ["12", "twelve"]}))
    turn = qa.sample(0, 100, 0, words).turns[0]
    assert turn.score("twelve", turn.answers)["score"] == 1 and turn.max_new_tokens == 32


@pytest.fixture
def nolima(tmp_path):
    for number in range(3):
        lines = "\n".join(f"b{number} line {i} of this book." for i in range(200))
        (tmp_path / "haystack" / "rand_shuffle").mkdir(parents=True, exist_ok=True)
        (tmp_path / "haystack" / "rand_shuffle" / f"rand_book_{number}.txt").write_text(lines)
    (tmp_path / "needlesets").mkdir()
    (tmp_path / "needlesets" / "needle_set.json").write_text(json.dumps([NEEDLE]))
    return tmp_path


def test_nolima(nolima):
    task = public_task("nolima", nolima)
    sample = task.sample(0, 200, 0, words)
    turn = sample.turns[0]
    assert len(task) == 2 * DEPTHS * 3 and task.document(7) == 7 and sample.system == "Be brief."
    assert (
        turn.question == "Question: Who has been to the Opera?\n\nOnly the name."
        and turn.answers[0] in NEEDLE["character_set"]
    )
    assert f"{turn.answers[0]} lives next to the Opera." in sample.context.split("\n") and 190 < words(sample) <= 200
    assert turn.score(f"It was {turn.answers[0]}.", turn.answers)["score"] == 1
    assert task.sample(1, 200, 0, words).turns[0].question.startswith("Question: Who saw Dresden?")
    whole = task.sample(0, 100_000, 0, words)
    assert "line 199" in whole.context and task.sample(0, 200, 0, words) == sample
    seen = set()
    for index in range(len(task)):
        sample = task.sample(index, 10**6, 0, words)
        line = next(i for i, each in enumerate(sample.context.split("\n")[2:]) if "lives" in each)
        assert line == pytest.approx(200 * sample.meta["depth"], abs=3)
        seen.add((sample.meta["needle"], sample.meta["depth"], "b0" in sample.context, "b1" in sample.context))
    assert len(seen) == len(task)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"questions": None}, "needle 1: 'questions' is None, expected a filled object"),
        ({"tests": {"T1": {}}}, "the test 0401_T1_onehop has no 'input_args'"),
        ({"character_set": []}, "'character_set' of 0401_T1_onehop is missing or empty"),
        ({"task_template": "{question}{haystack}"}, "'task_template' must have"),
        ({"distractors": {}}, "'distractors' are not supported"),
    ],
)
def test_bad_needle_sets_are_named(nolima, change, told):
    (nolima / "needlesets" / "needle_set.json").write_text(json.dumps([{**NEEDLE, **change}]))
    with pytest.raises(InputError) as error:
        NoLiMa("nolima", nolima)
    assert told in str(error.value) and "needle_set.json" in str(error.value)


@pytest.mark.parametrize(
    ("name", "row", "told"),
    [
        ("longbench_qasper", {**LONGBENCH, "dataset": "trec"}, "'dataset' is 'trec', expected 'qasper'"),
        ("longbench_qasper", {**LONGBENCH, "answers": []}, "'answers' must be a list of texts, at least one"),
        ("longbench_trec", {**LONGBENCH, "dataset": "trec"}, "'all_classes' must be a list of texts"),
        ("longbench_qasper", INFINITE, "'answers' is missing (this is a row of InfiniteBench)"),
        ("infinitebench_passkey", {**INFINITE, "answer": []}, "'answer' is empty"),
        ("infinitebench_passkey", RULER, "'id' is missing (this is a row of RULER)"),
        ("infinitebench_code_debug", {**INFINITE, "options": []}, "'options' must be a list of four"),
        ("infinitebench_code_debug", {**INFINITE, "answer": "Eve"}, "'answer' is 'Eve', expected one of the options"),
        ("infinitebench_code_run", INFINITE, "'input' has no call"),
        ("infinitebench_math_find", INFINITE, "'input' names no number to find"),
        ("rulerfile_vt", {**RULER, "outputs": []}, "'outputs' must be a list of texts"),
        ("rulerfile_vt", {**RULER, "input": "One line"}, "'input' has one line only"),
        ("rulerfile_vt", {**RULER, "input": "<|im_start|>user\nx"}, "--model_template_type base"),
        ("rulerfile_vt", {"index": 0, "input": "x"}, "'outputs' is missing"),
    ],
)
def test_bad_rows_are_named(tmp_path, name, row, told):
    good = {"longbench": LONGBENCH, "infinitebench": INFINITE, "rulerfile": RULER}[name.split("_")[0]]
    fixed = {"dataset": name.split("_")[1], "all_classes": ["x"]} if good is LONGBENCH else {}
    fixed |= {"input": "The first number: f(1)"} if good is INFINITE else {}
    stem = name.split("_", 1)[1]
    with pytest.raises(InputError) as error:
        public_task(name, put(tmp_path, f"{stem}.jsonl", {**good, **fixed}, row))
    assert told in str(error.value) and f"{stem}.jsonl, line 2" in str(error.value)


def test_unknown_names_and_files():
    with pytest.raises(InputError, match="did you mean 'qasper'"):
        public_task("longbench_qaspr", "x")
    with pytest.raises(InputError, match="did you mean 'passkey'"):
        public_task("infinitebench_paskey", "x")
    with pytest.raises(InputError, match="unknown task 'levl_quality'; did you mean 'leval_quality'"):
        chosen_tasks(["levl_quality"])
    assert all(is_public(name) for name, _ in public_tasks()) and not is_public("ruler_vt")


@pytest.mark.parametrize(
    ("score", "answer", "expected", "value"),
    [
        (metrics.first_integer, "It is 0123, not 4", ("0123",), 1.0),
        (metrics.first_integer, "It is 123", ("0123",), 0.0),
        (metrics.last_integer, "it returns `-4`.", ("-4",), 1.0),
        (metrics.last_integer, "4 times", ("4",), 0.0),
        (metrics.leading_numbers, "[1, 4, 8]", ("1", "4", "9", "3"), 0.5),
        (metrics.leading_numbers, "", ("1",), 0.0),
        (metrics.whole_word, "Likely ANN.", ("Ann",), 1.0),
        (metrics.whole_word, "Anne", ("Ann",), 0.0),
        (metrics.number_share, "Paragraph 3, or 4", ("Paragraph 3",), 0.5),
        (metrics.number_share, "none", ("Paragraph 3",), 0.0),
        (metrics.number_share, "段落3", ("段落3",), 1.0),
        (metrics.code_similarity, "```python\n# a\nx = 1\ny", ("x = 1",), 1.0),
        (metrics.code_similarity, "", ("x = 1",), 0.0),
        (metrics.code_similarity, "abcd", ("abxd",), 0.75),
        (metrics.chinese_word_f1, "北京。", ("北京",), 1.0),
        (metrics.chinese_word_f1, "南京", ("北京",), 0.0),
    ],
)
def test_scores(score, answer, expected, value):
    assert score(answer, expected) == {"score": value}


def test_rouge_of_lines_and_of_chinese_words():
    assert (
        metrics.rouge_lsum("c d\na b", ("a b\nc d",))["score"]
        == 1.0
        > metrics.rouge_l("c d\na b", ("a b\nc d",))["score"]
    )
    assert metrics.chinese_rouge_l("我爱北京", ("我爱北京",))["score"] == 1.0
    assert 0 < metrics.chinese_rouge_l("我爱北京", ("我爱南京",))["score"] < 1
