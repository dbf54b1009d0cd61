"""Questions about several documents, for joins.py: passages of L-Eval's natural questions, and generated documents.

L-Eval's task has one article for several questions. An article is split at its paragraphs, without markup. Its
documents are the passages that share most rare words with its questions, in the article's order.

Generated documents are parts of the help texts that kvsieve ships, with facts from a seed: one half names the director
of a house in a town, the other half says when a person was born. Questions need one document, or two.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvsieve.lab.tasks.haystack import hide, load_haystack, passage
from kvsieve.lab.tasks.leval import leval
from kvsieve.lab.tasks.prompter import Prompter
from kvsieve.lab.tasks.samples import QuestionAnswer
from kvsieve.lab.tasks.scoring import match_all
from kvsieve.lab.tasks.words import FIRST_NAMES, LAST_NAMES, NOUNS, TOWNS
from kvsieve.planning.turns import escaped, render, token_ids

LEAD = "Below are documents. Answer the question that follows them from what they say."
COUNT = 20
# Characters of a passage, and words of a generated document's text.
CHARACTERS, WORDS = 720, 110
# Most tokens of an answer.
LIMIT = 40
_BORDER = re.compile(r"(?=<(?:P|H\d|Tr|Li|Table)>)")


@dataclass(frozen=True)
class DocumentSet:
    """Documents and questions about them. name: of their kind."""

    name: str
    documents: tuple[str, ...]
    questions: tuple[QuestionAnswer, ...]


@dataclass(frozen=True)
class Pieces:
    """A prompt's tokens, each int64 [1, N]: before the documents, each document, and the rest."""

    before: torch.Tensor
    documents: list[torch.Tensor]
    question: torch.Tensor

    @property
    def ids(self) -> torch.Tensor:
        return torch.cat([self.before, *self.documents, self.question], 1)


def pieces(tokenizer: Any, documents: tuple[str, ...], question: str) -> Pieces:
    """Return the tokens of a question in the model's chat template."""
    body = "".join(documents)
    text = render(tokenizer, [{"role": "user", "content": f"{LEAD}\n\n{body}{question}"}])
    before, found, after = text.partition(escaped(tokenizer, body))
    if not found:
        raise SystemExit("error: the model's chat template changes the text of a message")

    def ids(part: str) -> torch.Tensor:
        return torch.tensor([token_ids(tokenizer, part)], dtype=torch.int64)

    return Pieces(ids(before), [ids(escaped(tokenizer, each)) for each in documents], ids(after))


def natural(data: str, tokenizer: Any, count: int = COUNT) -> Iterator[DocumentSet]:
    """Yield the sets of L-Eval's natural questions. data: folder of its files."""
    task = leval("leval_natural_question", data)
    counter = Prompter(tokenizer).count
    articles: dict[int, tuple[str, list[QuestionAnswer]]] = {}
    for index in range(len(task)):
        sample = task.sample(index, 1 << 30, 0, counter)
        turn = replace(sample.turns[0], max_new_tokens=min(sample.turns[0].max_new_tokens, LIMIT))
        text = sample.context.partition("\n\n")[2]
        articles.setdefault(task.document(index), (text, []))[1].append(turn)
    for text, turns in articles.values():
        title = text.partition(" - ")[0]
        chosen = closest(passages(text), [turn.question for turn in turns], count)
        yield DocumentSet("natural", tuple(_document(title, each) for each in chosen), tuple(turns))


def passages(text: str, characters: int = CHARACTERS) -> list[str]:
    """Return an article's text in passages of about so many characters, without markup."""
    found = [""]
    for part in _BORDER.split(text):
        plain = " ".join(re.sub(r"<[^>]*>", " ", part).split())
        if found[-1] and len(found[-1]) + len(plain) > characters:
            found.append("")
        found[-1] = f"{found[-1]} {plain}".strip()[: 2 * characters]
    return [each for each in found if each]


def closest(texts: list[str], questions: list[str], count: int) -> list[str]:
    """Return `count` texts in their order: each question in turn takes the one that shares most rare words with it."""
    words = [set(re.findall(r"\w+", text.lower())) for text in texts]
    seen = Counter(word for known in words for word in known)
    rare = {word: math.log(len(texts) / times) for word, times in seen.items()}
    left = []
    for question in questions:
        asked = set(re.findall(r"\w+", question.lower()))
        shares = [(-sum(rare[word] for word in asked & known), at) for at, known in enumerate(words)]
        left.append(sorted(shares))
    chosen: set[int] = set()
    while len(chosen) < min(count, len(texts)):
        for order in left:
            at = next((at for _, at in order if at not in chosen), None)
            if at is not None and len(chosen) < count:
                chosen.add(at)
    return [texts[at] for at in sorted(chosen)]


def generated(number: int, count: int = COUNT) -> DocumentSet:
    """Return a set of generated documents, the same one for the same number."""
    draw = random.Random(f"documents {number}")
    half = count // 2
    towns, houses = draw.sample(TOWNS, half), draw.sample(NOUNS, half)
    names = zip(draw.sample(FIRST_NAMES, half), draw.sample(LAST_NAMES, half), strict=True)
    people = [" ".join(name) for name in names]
    years = draw.sample(range(1900, 2000), half)
    facts = [
        (f"Report on {town}", f"The director of the {house} museum in {town} is {person}.")
        for town, house, person in zip(towns, houses, people, strict=True)
    ]
    facts += [
        (f"Notes on {person}", f"{person} was born in the year {year}.")
        for person, year in zip(people, years, strict=True)
    ]
    draw.shuffle(facts)
    text = load_haystack("topics")
    documents = [
        _document(title, hide(passage(text, draw.random(), WORDS), [fact], [draw.random()])) for title, fact in facts
    ]
    questions = []
    for at in draw.sample(range(half), 4):
        ask = f"Who is the director of the {houses[at]} museum in {towns[at]}"
        answers: tuple[str, ...] = (people[at],)
        if len(questions) % 2:
            ask = f"{ask}, and in which year was that person born"
            answers += (str(years[at]),)
        questions.append(QuestionAnswer(f"{ask}? Answer in one short sentence.", answers, match_all, 32))
    return DocumentSet("generated", tuple(documents), tuple(questions))


def _document(title: str, text: str) -> str:
    return f"Document: {title}\n{text}\n\n"
