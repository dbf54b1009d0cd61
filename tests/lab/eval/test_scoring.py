"""Scoring functions, by hand."""

from __future__ import annotations

import pytest

from kvsieve.lab.tasks import scoring
from kvsieve.lab.tasks.scoring import repeated_choices

KEY = "1234567890" * 6 + "1234"  # neighbours differ, so a dropped digit puts all that follow out of place


@pytest.mark.parametrize(
    ("answer", "all_of", "any_of"),
    [
        ("alpha, beta", 1.0, 1.0),
        ("ALPHA and Beta.", 1.0, 1.0),
        ("beta", 0.5, 1.0),
        ("alphabet", 0.5, 1.0),
        ("alph a", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
    ids=["both", "other case", "one", "inside a word", "broken up", "empty"],
)
def test_ruler_string_matches(answer, all_of, any_of):
    assert scoring.match_all(answer, ("Alpha", "beta")) == {"score": all_of}
    assert scoring.match_any(answer, ("Alpha", "beta")) == {"score": any_of}


def test_match_all_is_the_share_found():
    assert scoring.match_all("one three", ("one", "two", "three")) == {"score": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("answer", "partial", "exact", "first"),
    [
        (KEY, 1, 1, 1),
        (f"The pass key is {KEY}. Remember it.", 1, 1, 1),
        (KEY[:30] + "7" + KEY[31:], 63 / 64, 0, 1),
        (KEY[:10] + KEY[11:], 10 / 64, 0, 1),
        (KEY[:20], 20 / 64, 0, 1),
        ("9" + KEY[1:], 63 / 64, 0, 0),
        (KEY + "99", 1, 1, 1),
        (f"Of 2 numbers: {KEY}", 1, 1, 1),
        ("I do not know.", 0, 0, 0),
        ("", 0, 0, 0),
    ],
    ids=[
        "right",
        "after text",
        "wrong in the middle",
        "one dropped",
        "cut",
        "wrong first",
        "longer",
        "another before",
        "none",
        "empty",
    ],
)
def test_digits(answer, partial, exact, first):
    got = scoring.digits(answer, (KEY,))
    assert got == {"score": partial, "partial": partial, "exact": exact, "first_digit": first}


@pytest.mark.parametrize(
    ("answer", "score"),
    [("dax", 1), (" Dax.", 1), ('"DAX" it is', 1), ("wug, or dax", 0), ("daxes", 0), ("...", 0), ("", 0)],
)
def test_first_word(answer, score):
    assert scoring.first_word(answer, ("dax",)) == {"score": score}


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        ("12", "12", 1),
        (" 12.", "12", 1),
        ("It is 12, not 13", "12", 1),
        ("13, not 12", "12", 0),
        ("120", "12", 0),
        ("-3", "-3", 1),
        ("-3", "3", 0),
        ("3", "-3", 0),
        ("1,234,567 coins", "1234567", 1),
        ("007", "7", 1),
        ("3,4", "3", 1),
        ("twelve", "12", 0),
        ("", "0", 0),
    ],
)
def test_first_number(answer, expected, score):
    assert scoring.first_number(answer, (expected,)) == {"score": score}


def test_instructions_are_scored_one_by_one_and_together():
    score = scoring.instructions({"short": lambda text: len(text) < 9, "polite": lambda text: "please" in text})
    assert score("please", ()) == {"score": 1, "all": 1, "short": 1, "polite": 1}
    assert score("yes", ()) == {"score": 0.5, "all": 0, "short": 1, "polite": 0}
    assert score("certainly not", ()) == {"score": 0, "all": 0, "short": 0, "polite": 0}


def test_repeated_choices_are_compared_with_the_answers_own():
    score = repeated_choices(["Ann", "Bob", "Cleo"])
    first = "lion\nBob: sea horse\nCleo: Cat\n"
    right = score(f"{first}\nPart 2:\nBob: sea horse.\n- Cleo: cat\nAnn: lion", ())
    assert right == {"score": 1.0, "first_half": 1.0, "second_half": 1.0}
    # Another animal, a person who is left out, and one who comes again.
    assert score(f"{first}Part 2\nBob: dog\nAnn: lion\nBob: sea horse", ())["score"] == pytest.approx(1 / 3)
    # The first part once more is no second part.
    assert score(f"{first}Ann: {first}", ()) == {"score": 0.0, "first_half": 1.0, "second_half": 0.0}
    # One animal for all would be repeated by a model that remembers nothing.
    same = score("cat\nBob: cat\nCleo: owl\nPart 2:\nBob: cat\nCleo: owl\nAnn: cat", ())
    assert same == {"score": pytest.approx(1 / 3), "first_half": pytest.approx(1 / 3), "second_half": 1.0}
    assert score("", ()) == {"score": 0.0, "first_half": 0.0, "second_half": 0.0}
