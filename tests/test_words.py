"""README, docs, help texts, the changelog and the API's docstrings: few marker words, short sentences."""

from __future__ import annotations

import ast
import functools
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from kvsieve.cli.main import app
from marker_words import MOST_PER_1000, MOST_WORDS, Block, blocks, docstrings, long_sentences, markers, mean
from source_tree import modules

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("**/*.md"))
API = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
DESCRIBED = (types.FunctionType, property, classmethod, staticmethod, functools.cached_property)


def newest_changes() -> str:
    """The changelog's two newest sections: that of the next release begins empty."""
    return "".join(re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1:3])


def helps() -> Iterator[tuple[str, Block]]:
    """Texts of every command's help by the command's words."""
    root = typer.main.get_command(app)
    commands = {"kvsieve": root, **root.commands}
    for name, command in [*commands.items(), *root.commands["store"].commands.items()]:
        for text in (inspect.cleandoc(command.help or ""), *(each.help for each in command.params)):
            if text:
                yield name, Block(text, 0, True)


def openings() -> Iterator[tuple[str, Block]]:
    """First sentences of the docstrings of the public API: of its names, and of public members of its classes."""
    for name in API:
        thing = pkgutil.resolve_name(name)
        members = vars(thing) if isinstance(thing, type) else {}
        public = {f"{name}.{key}": value for key, value in members.items() if not key.startswith("_")}
        described = {key: value for key, value in public.items() if isinstance(value, DESCRIBED)}
        for where, member in {name: thing, **described}.items():
            if text := inspect.getdoc(member):
                yield where, Block(re.split(r"(?<=[.:])\s", text, maxsplit=1)[0], 0, True)


KINDS = {
    "README": lambda: [("README.md", part) for part in blocks(README.read_text())],
    "docs": lambda: [(str(page.relative_to(ROOT)), part) for page in DOCS for part in blocks(page.read_text())],
    "help": lambda: list(helps()),
    "changes": lambda: [("CHANGELOG.md, newest sections", part) for part in blocks(newest_changes())],
    "docstrings": lambda: list(openings()),
}


# Marker words per 1,000 words of a package's docstrings.
MOST_IN_DOCSTRINGS = 4


def package_docstrings() -> dict[str, list[tuple[str, Block]]]:
    """Docstrings with their files, by package of src/kvsieve, and those of the plugin."""
    found: dict[str, list[tuple[str, Block]]] = {}
    for module, (file, tree) in modules().items():
        package, *rest = Path(file).parts if "/" in file else ("",)
        if package in ("lab", "planning") and len(rest) > 1:
            package += f"/{rest[0]}"
        if module.startswith("kvsieve_vllm"):
            package = "kvsieve_vllm"
        found.setdefault(package, []).extend((file, text) for text in docstrings(tree))
    return found


def test_docstrings_of_packages_have_few_marker_words():
    packages = package_docstrings()
    worse = {}
    for package, texts in packages.items():
        found = [line for file, text in texts for line in markers([text], file)]
        rate = 1000 * len(found) / sum(text.words for _, text in texts)
        if rate > MOST_IN_DOCSTRINGS:
            worse[package] = "\n".join([f"{rate:.1f} per 1,000 words", *found])
    assert not worse, "\n".join(f"{package}: {lines}" for package, lines in worse.items())


def test_docstrings_are_found():
    tree = ast.parse('"""What."""\n\n\nclass A:\n    """Held."""\n\n    def f(self):\n        """See `what`."""\n')
    assert [(part.line, part.text) for part in docstrings(tree)] == [(1, "What."), (5, "Held."), (8, "See `x`.")]
    assert len(markers(docstrings(tree), "a.py")) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_there_are_few_marker_words(kind):
    parts = KINDS[kind]()
    found = [line for where, part in parts for line in markers([part], where)]
    words = sum(part.words for _, part in parts)
    assert words > 100 and len(found) <= MOST_PER_1000 * words / 1000, "\n".join(found)


@pytest.mark.parametrize("page", [README, *DOCS], ids=lambda page: page.name)
def test_sentences_of_a_page_are_short(page):
    sentences = [each for part in blocks(page.read_text()) for each in part.sentences()]
    assert mean(sentences) <= MOST_WORDS, "\n".join(long_sentences(sentences))


def test_sentences_of_the_help_are_short():
    sentences = [part.text for _, part in helps()]
    assert mean(sentences) <= MOST_WORDS, "\n".join(long_sentences(sentences))


TEXT = """# What it does

One sentence of six words here. It stands [behind a door](what.md) with `what` in
it, and "what was told" besides.

    what is code

```python
what = code
```

- kivi, hqq
- Run it behind nginx.
- Of requests that name none, this holds:

| what | <!-- told --> |
|---|---|
"""


def test_words_are_counted_and_found():
    parts = blocks(TEXT)
    assert [part.line for part in parts] == [1, 3, 12, 13, 14, 16]
    sentences = [each for part in parts for each in part.sentences()]
    assert [len(each.split()) for each in sentences] == [6, 14, 4, 7]
    assert mean(sentences) == 7.75
    found = [re.match(r"a\.md:(\d+): '([\w ]+)'", line).groups() for line in markers(parts, "a.md")]
    assert found == [("1", "What"), ("3", "stands"), ("3", "behind"), ("14", "Of requests"), ("16", "what")]
