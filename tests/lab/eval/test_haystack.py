"""Haystacks, hiding things in them, words to draw from, and prompts of a length."""

from __future__ import annotations

import random
import re

import pytest

from kvsieve.errors import InputError
from kvsieve.lab.tasks import haystack, words
from kvsieve.lab.tasks.fit import fit, fit_padded
from kvsieve.lab.tasks.haystack import draw, hide, load_haystack, noise_words, passage, text_digest
from kvsieve.lab.tasks.ruler import spread
from kvsieve.lab.tasks.samples import Sample

TEXT = "One two three. Four five! Six seven eight nine?\n\nTen eleven. Twelve.\n\nThirteen fourteen fifteen."


def test_noise_is_rulers():
    assert load_haystack("noise").startswith("The river is wide.")
    assert noise_words(5) == "The river is wide. The"
    assert noise_words(0) == ""


def test_topics_are_one_text_whatever_the_python():
    text = load_haystack("topics")
    assert len(text.split()) > 50_000
    assert text_digest(text) == "d9dc35bce5ab1a24"


def test_folder_is_read_in_the_order_of_names(tmp_path):
    for name, word in (("b.md", "second"), ("a.txt", "first"), ("sub/c.rst", "third"), ("d.py", "code")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{word} " * 20)
    found = load_haystack(str(tmp_path)).split()
    assert found == ["first"] * 20 + ["second"] * 20 + ["third"] * 20


def test_file_is_read_whatever_its_suffix(tmp_path):
    path = tmp_path / "book.text"
    path.write_text("Äpfel " * 60, encoding="utf-8")
    assert load_haystack(str(path)).split() == ["Äpfel"] * 60


@pytest.mark.parametrize("kind", ["missing", "empty folder", "short file", "not UTF-8", "unreadable"])
def test_unusable_haystack_is_refused_with_its_path(tmp_path, kind):
    path = tmp_path / "hay"
    if kind == "short file":
        path.write_text("word " * 49)
    elif kind == "not UTF-8":
        path.write_bytes(b"\xff\xfe\xe4 " * 60)
    elif kind == "empty folder":
        path.mkdir()
        (path / "notes.pdf").write_text("word " * 60)
    elif kind == "unreadable":
        (path / "folder.txt").mkdir(parents=True)
    with pytest.raises(InputError, match=re.escape(str(path))):
        load_haystack(str(path))


def test_passage_begins_a_paragraph_and_wraps_around():
    assert passage(TEXT, 0, 4) == ["One ", "two ", "three. ", "Four "]
    assert passage(TEXT, 0.5, 2) == ["Ten ", "eleven. "]
    assert passage(TEXT, 1.0, 5) == ["Thirteen ", "fourteen ", "fifteen.\n\n", "One ", "two "]
    assert "".join(passage(TEXT, 0, 15)).strip() == TEXT
    assert [word.strip() for word in passage(TEXT, 0, 40)] == (TEXT.split() * 3)[:40]


NEEDLES = ["The first needle is 17.", "A second needle is 18.", "Needle three is 19."]


@pytest.mark.parametrize("depths", [(0, 0, 0), (0, 0.5, 1), (1, 1, 1), (0.2, 0.3, 0.9), (1, 0.5, 0)], ids=str)
@pytest.mark.parametrize("source", [TEXT, "no end of a sentence anywhere " * 9, load_haystack("noise")])
def test_hide_keeps_the_text_and_holds_each_needle_once(source, depths):
    hay = passage(source, 0, 60)
    text = hide(hay, NEEDLES, depths)
    assert all(text.count(needle) == 1 for needle in NEEDLES)
    for needle in NEEDLES:
        assert re.search(rf"(^|\s){re.escape(needle)}(\s|$)", text)
        text = text.replace(needle, " ")
    assert text.split() == "".join(hay).split()


def test_hide_puts_needles_between_sentences_in_the_order_of_their_depths():
    hay = passage(TEXT, 0, 15)
    text = hide(hay, NEEDLES, (0.55, 0.2, 1))
    assert text == TEXT.replace("three.", f"three. {NEEDLES[1]}").replace("\n\nTen", f"\n\n{NEEDLES[0]} Ten") + (
        f"\n\n{NEEDLES[2]}"
    )


def test_hide_without_words_gives_the_needles():
    assert hide([], NEEDLES, (0, 0.5, 1)) == " ".join(NEEDLES)


def test_draws_are_the_same_everywhere():
    # Pinned: other draws make new results differ from all published ones.
    rng = draw(0, "needle", 1024, 3)
    assert [rng.randrange(1000) for _ in range(3)] == [786, 127, 287]
    assert len({draw(*each).random() for each in ((0, "a", 1, 1), (1, "a", 1, 1), (0, "b", 1, 1), (0, "a", 2, 1))}) == 4


def test_spread_takes_forty_places_in_ascending_order():
    rng = random.Random(0)
    for count in (1, 4, 39):
        depths = spread(rng, count)
        assert len(set(depths)) == count and depths == sorted(depths)
        assert all(0 <= depth <= 1 and abs(depth * 39 - round(depth * 39)) < 1e-9 for depth in depths)
    assert spread(rng, 40)[0] == 0 and spread(rng, 40)[-1] == 1


def test_words_numbers_and_uuids_differ_and_have_their_form():
    rng = random.Random(0)
    size = len(words.ADJECTIVES) * len(words.NOUNS)
    for count in (3, size + 7):
        keys = words.word_keys(rng, count)
        assert len(set(keys)) == count and all(re.fullmatch(r"[a-z]+-[a-z]+(-\d+)?", key) for key in keys)
    values = words.numbers(rng, 500)
    assert len(set(values)) == 500 and all(re.fullmatch(r"[1-9]\d{6}", value) for value in values)
    drawn = words.uuids(rng, 50)
    assert len(set(drawn)) == 50 and all(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", u) for u in drawn)


def test_lists_of_words_have_no_word_twice():
    for listed in (words.ADJECTIVES, words.NOUNS, words.FIRST_NAMES, words.LAST_NAMES, words.TOWNS, words.COUNTRIES):
        assert len(set(listed)) == len(listed)


COSTS = {
    "one each": lambda n: n + 20,
    "seven each": lambda n: 7 * n + 20,
    "every third": lambda n: n // 3 + 20,
    "in jumps": lambda n: n // 10 * 35 + 20,
    "ever more": lambda n: n * n // 50 + 20,
    "ever less": lambda n: int(30 * n**0.5) + 20,
}


@pytest.mark.parametrize("length", [20, 21, 55, 300, 4096])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_fit_finds_the_longest_that_fits(cost, length):
    sample, n = fit(lambda n: Sample("x" * n, ()), lambda sample: cost(len(sample.context)), length, "toy")
    assert len(sample.context) == n
    assert cost(n) <= length < cost(n + 1)


def test_fit_counts_seldom():
    asked = []

    def count(sample):
        asked.append(sample)
        return 20 + len(sample.context) * 7 // 5

    fit(lambda n: Sample("x" * n, ()), count, 100_000, "toy")
    assert len(asked) < 12


def test_fit_never_returns_what_is_too_long_even_if_the_count_jitters():
    def count(sample):
        return len(sample.context) + random.Random(len(sample.context)).randrange(5)

    for length in range(10, 300, 7):
        sample, _ = fit(lambda n: Sample("x" * n, ()), count, length, "toy")
        assert length - 10 <= count(sample) <= length


@pytest.mark.parametrize("length", [50, 51, 137, 1000])
def test_fit_padded_fills_up_with_noise(length):
    def make(units, filler):
        return Sample("start " + filler + " unit of thirty words" * units, ())

    def count(sample):
        return len(sample.context.split()) + 26 * sample.context.count("unit")

    sample = fit_padded(make, count, length, "toy")
    assert count(sample) == length
    assert sample.context.count("unit") == (length - 1) // 30


@pytest.mark.parametrize("search", ["fit", "fit_padded"])
def test_length_too_small_names_both_numbers(search):
    with pytest.raises(InputError, match=r"toy .*at least 20 .*length of 19;"):
        if search == "fit":
            fit(lambda n: Sample("x" * n, ()), lambda sample: 20 + len(sample.context), 19, "toy")
        else:
            fit_padded(lambda n, filler: Sample(filler, ()), lambda sample: 20 + len(sample.context), 19, "toy")


def test_noise_has_no_figures_that_could_pass_for_an_answer():
    assert not re.search(r"\d", haystack.NOISE[0])
