"""Drafts of edits that are made again, and of values that an answer takes from the text before it."""

from __future__ import annotations

import json
import re

import pytest

from kvsieve.hf.drafts.drafter import RowDrafts
from kvsieve.hf.drafts.length import DraftLength
from kvsieve.hf.drafts.lookup import LookupDrafter

NAMES = ("number", "name", "town", "thing", "price")
ROWS = [
    (str(310 + 7 * at), name, town, thing, f"{at}.{37 * at % 90 + 10}")
    for at, (name, town, thing) in enumerate(
        zip(
            "Lopez Tanaka Novak Okafor Larsen Moreau Rossi Schmidt".split(),
            "Lisbon Osaka Prague Lagos Bergen Lyon Turin Bremen".split(),
            "lamp|garden hose|old bell|knife|oak shelf|kettle|blue wool hat|chair".split("|"),
            strict=True,
        )
    )
]
MARKDOWN = "\n".join(f"| {' | '.join(row)} |" for row in (NAMES, ["---"] * 5, *ROWS))
CSV = "\n".join(",".join(row) for row in (NAMES, *ROWS))
FUNCTION = """
def total_of_all_lines(rate, lines):
    total = 0
    for line in lines:
        if line > rate:
            total = total + line * rate
        else:
            total = total + line
    if total > 0 and len(lines) > 1:
        return total / len(lines)
    return total + rate if total else 0
"""
PROSE = """
The statement is used when a name is to be bound
again in the scope around it, which a plain
assignment never does. Every listed name must
exist there when the module is compiled, and each
of them is found before any line of the body
runs, so that no order of calls can change it.
"""


class Words:
    """A tokenizer of words with the space before them, digits, and signs with the newlines after them."""

    def __init__(self):
        self.tokens = []

    def __call__(self, text, add_special_tokens=False):
        pieces = re.findall(r" ?[A-Za-z_]+|\d| ?[^\w\s]+\n*|\n+|\s+(?!\S)|\s", text)
        assert "".join(pieces) == text
        self.tokens += [piece for piece in dict.fromkeys(pieces) if piece not in self.tokens]
        return {"input_ids": [self.tokens.index(piece) for piece in pieces]}

    def decode(self, ids, **options):
        return "".join(self.tokens[index] for index in ids)


def passes(prompt, answer, tokenizer):
    """Passes that an answer takes, by the drafter's proposals of up to 15 tokens."""
    words = Words()
    given, tokens = (words(text)["input_ids"] for text in (prompt, answer))
    drafts = RowDrafts(LookupDrafter(2, words if tokenizer else None), DraftLength(15, 0.07), [*given, tokens[0]])
    rest = tokens[1:]
    while rest:
        found = drafts.next(15)
        count = next((at for at, pair in enumerate(zip(found, rest, strict=False)) if pair[0] != pair[1]), len(found))
        drafts.took(rest[: count + 1])
        rest = rest[count + 1 :]
    assert drafts.note is None
    return drafts.counts.passes, len(tokens)


def objects(rows, **options):
    return json.dumps([dict(zip(NAMES, row, strict=True)) for row in rows], **options)


def renamed(text):
    return re.sub(r"\btotal\b", "sum_of_them", text)


@pytest.mark.parametrize(
    ("prompt", "answer", "gain"),
    [
        (MARKDOWN, objects(ROWS[2:6], indent=2), 1.7),
        (MARKDOWN, objects(ROWS[2:6]), 1.6),
        (MARKDOWN, objects(ROWS[1::2], indent=2), 1.5),
        (CSV, objects(ROWS[2:6], indent=2), 1.4),
        (CSV, "".join(f"- {' '.join(f'{n}: {v}' for n, v in zip(NAMES, row, strict=True))}\n" for row in ROWS), 2),
        (objects(ROWS, indent=2), MARKDOWN, 1.5),
        (FUNCTION, renamed(FUNCTION), 1.2),
        (PROSE, PROSE.replace("\n", " "), 1.3),
        (PROSE, PROSE.replace("\n", "\n    "), 1.3),
    ],
    ids=["table", "one line", "some rows", "csv", "csv as list", "json as table", "name", "lines joined", "indented"],
)
def test_what_an_answer_changes_is_expected_again(prompt, answer, gain):
    plain, _ = passes(prompt, answer, False)
    found, tokens = passes(prompt, answer, True)
    assert found * gain < plain
