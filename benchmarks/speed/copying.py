"""Long documents with questions whose answers copy much of them, some, or nothing; for speculation.py.

Documents are modules of the Python that runs, kvsieve's help texts of Python, and generated tables; nothing is
downloaded. A task asks QUESTIONS questions about each document of its kind:

    edit        write a function of a source file again, with one parameter renamed
    quote       quote a paragraph
    table       turn some rows of a table into JSON
    summary     say what the text is about
    free        write a story that has nothing to do with the text
"""

from __future__ import annotations

import ast
import importlib.util
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsieve.lab.tasks.haystack import load_haystack
from kvsieve.planning.turns import render, token_ids

# Tasks by the kind of document that they ask about.
TASKS = {"code": ("edit",), "prose": ("quote", "summary", "free"), "table": ("table",)}
QUESTIONS = 4
# Tokens of a copied answer, and of the question with the chat template around it.
LEAST, MOST, ROOM = 110, 240, 160
MODULES = (
    "argparse optparse mailbox doctest tarfile difflib inspect subprocess logging smtplib imaplib configparser ftplib "
    "http.client urllib.request threading unittest.mock statistics pdb typing zipfile pathlib shutil socket tokenize "
    "traceback pprint gettext ipaddress calendar csv pickle"
).split()
SUMMARIES = (
    "Summarize the text above in about 120 words.",
    "What are the main points of the text above? Answer with a list.",
    "Explain to a beginner what the text above is about.",
    "Write an abstract of the text above.",
)
STORIES = "a lighthouse|a lost umbrella|two rival bakers|a train that never stops|a gardener on the moon".split("|")
PEOPLE = "a retired sailor|a curious child|a tired teacher|a talkative parrot".split("|")
COLUMNS = ("order", "customer", "city", "article", "pieces", "price", "date")
CUSTOMERS = "Lopez Tanaka Novak Okafor Larsen Moreau Rossi Schmidt Patel Silva Haddad Kowalski".split()
CITIES = "Lisbon Osaka Prague Lagos Bergen Lyon Turin Bremen Pune Recife Amman Gdansk".split()
ARTICLES = "desk lamp|garden hose|coffee grinder|bicycle bell|wool blanket|paper knife|oak shelf|tea kettle".split("|")


@dataclass(frozen=True)
class Document:
    """A long text. questions: of each task about it, QUESTIONS in number."""

    text: str
    questions: dict[str, list[str]]

    def prompts(self, tokenizer: Any, task: str) -> list[list[int]]:
        """Return the tokens of each question after the document, in the model's chat template."""
        messages = [[{"role": "user", "content": f"{self.text}\n\n{each}"}] for each in self.questions[task]]
        return [token_ids(tokenizer, render(tokenizer, message)) for message in messages]


def documents(kind: str, tokenizer: Any, length: int, count: int) -> list[Document]:
    """Return documents whose prompts have nearly `length` tokens.

    Raises SystemExit if there are not so many.
    """
    made = {"code": source_files, "prose": passages, "table": tables}[kind](tokenizer, length - ROOM)
    found = [document for document, _ in zip(made, range(count), strict=False)]
    if len(found) < count:
        raise SystemExit(f"error: {len(found)} documents of kind {kind!r} have {length} tokens, {count} are wanted")
    return found


def source_files(tokenizer: Any, tokens: int) -> Iterator[Document]:
    """Yield beginnings of modules, each with functions to write again."""
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.has_location:
            continue
        whole = Path(spec.origin).read_text()
        text = beginning(tokenizer, whole, tokens)
        if len(text) == len(whole):
            continue
        functions = [each for each in functions_of(whole) if each.end <= text.count("\n")]
        fit = [each for each in functions if LEAST <= count(tokenizer, each.source(whole)) <= MOST]
        if len(fit) >= QUESTIONS:
            edits = [each.question() for each in spread(fit)]
            yield Document(f"File {name.replace('.', '/')}.py:\n\n{text}", {"edit": edits})


@dataclass(frozen=True)
class Function:
    """A function of a source file. parameter: the one to rename. first, end: its lines, from 0, exclusive."""

    name: str
    parameter: str
    first: int
    end: int

    def source(self, text: str) -> str:
        return "\n".join(text.split("\n")[self.first : self.end])

    def question(self) -> str:
        return (
            f"Write the function `{self.name}` of this file again, with its parameter `{self.parameter}` renamed to "
            f"`new_{self.parameter}`. Change nothing else. Answer with the code of this function only."
        )


def functions_of(text: str) -> Iterator[Function]:
    """Yield functions that use a parameter besides `self`, each by a name that the file has once.

    The parameter used least is renamed.
    """
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    names = [node.name for node in nodes]
    for node in nodes:
        used = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
        parameters = [each.arg for each in node.args.args if each.arg in used and each.arg not in ("self", "cls")]
        if parameters and names.count(node.name) == 1 and node.end_lineno is not None:
            yield Function(node.name, min(parameters, key=used.count), node.lineno - 1, node.end_lineno)


def passages(tokenizer: Any, tokens: int) -> Iterator[Document]:
    """Yield parts of the help texts, with paragraphs to quote."""
    rest = load_haystack("topics")
    for number in range(len(rest)):
        text = beginning(tokenizer, rest, tokens)
        if len(text) == len(rest):
            return
        rest = rest[len(text) :]
        paragraphs = [each.strip("\n") for each in text.split("\n\n")]
        fit = [each for each in paragraphs if LEAST <= count(tokenizer, each) <= MOST]
        starts = {each: " ".join(each.split()[:8]) for each in fit}
        fit = [each for each in fit if [*starts.values()].count(starts[each]) == 1]
        if len(fit) < QUESTIONS:
            continue
        quotes = [
            f'Find the paragraph of the text above that begins with "{starts[each]}". Copy all of it word for word. '
            "Answer with the paragraph only."
            for each in spread(fit)
        ]
        subject = STORIES[number % len(STORIES)]
        stories = [f"Leave the text above aside. Write a short story about {subject} and {each}." for each in PEOPLE]
        yield Document(text, {"quote": quotes, "summary": list(SUMMARIES), "free": stories})


def tables(tokenizer: Any, tokens: int) -> Iterator[Document]:
    """Yield tables of orders, with rows to turn into JSON."""
    for number in range(1000):
        draw = random.Random(number)
        lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        for order in range(1000 * number % 9000 + 1000, 1000 * number % 9000 + 2000):
            cells = [order, draw.choice(CUSTOMERS), draw.choice(CITIES), draw.choice(ARTICLES), draw.randint(1, 40)]
            day = f"2024-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
            lines.append(f"| {' | '.join(map(str, cells))} | {draw.randint(100, 99999) / 100:.2f} | {day} |")
        text = beginning(tokenizer, "\n".join(lines), tokens)
        rows = text.split("\n")[2:]
        starts = [int(row.split("|")[1]) for row in spread(rows[4:-8])]
        questions = [
            f"Turn the rows of the orders {start} to {start + 2} of the table above into a JSON list with one object "
            "per row and the names of the columns as keys. Answer with the JSON only."
            for start in starts
        ]
        yield Document(text, {"table": questions})


def spread(items: list[Any]) -> list[Any]:
    """Return QUESTIONS items from all over a list."""
    return [items[(2 * number + 1) * len(items) // (2 * QUESTIONS)] for number in range(QUESTIONS)]


def count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def beginning(tokenizer: Any, text: str, tokens: int) -> str:
    """Return the first whole lines of a text that have at most so many tokens; the whole text if it is shorter."""
    # A token has fewer than 16 characters on average.
    ids = tokenizer(text[: 16 * tokens], add_special_tokens=False, verbose=False).input_ids
    if len(ids) <= tokens:
        return text
    size = len(tokenizer.decode(ids[:tokens]))
    return text[: text.rindex("\n", 0, size)]
