"""Marker words and their remedies; counts of them in Markdown and in docstrings, and of words per sentence.

By hand: `python tests/support/marker_words.py [FILE ...]` lists them in pages (by default README.md and all of docs)
and in the docstrings of Python files.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# A word or phrase, as a pattern, and its remedy. Readers of one language in ten stop at each of them.
MARKERS = {
    r"what|whatever|whichever|wherever|whoever": "name the thing: 'the bf16 copy used by the kernel', 'anyone'",
    r"told|tells?|telling": "describe, print, report, list, warn",
    r"whose|of whom|of which": "'with', or a second sentence",
    r"lies|lie|lay|stands|stand|stood": "is, are",
    r"go(?:es)? on|went on|going on": "continue",
    r"found again|finds? again": "a prefix hit, reused",
    r"held(?!-out)": "stored, kept",
    r"kept whole|left whole": "not evicted, all N entries kept",
    r"set aside|put aside": "quantized, reserved",
    r"asked (?:for|of)|is asked|are asked": "requested, request",
    r"gone": "evicted, deleted, removed",
    r"apart": "separate, separately",
    r"behind(?! (?:nginx|a (?:reverse )?proxy))": "after, below, in",
    r"alike|anyhow|afresh|anew|thereby|therein|thereof": "equally, in any case, again",
    r"not (?:less|fewer|more) than|no (?:less|fewer|more) than": "at least, at most",
    r"if left out|where left out": "default:",
    r"as one likes|as one wishes|by itself": "leave it out",
    r"reads? (?:a|the|its|long|every|each) prompts?|prompts? (?:is|are|was|were) read": "prefill",
}
# "Of requests that name none ...": the subject comes first.
OPENING = re.compile(r"(?:^|[.:;] )(Of (?!course)\w+)")
_MARKER = {re.compile(rf"\b(?:{pattern})\b", re.I): instead for pattern, instead in MARKERS.items()}
MOST_PER_1000 = 3
MOST_WORDS = 18

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_CODE = re.compile(r"(`+).*?\1", re.S)
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
_SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9`])")


@dataclass(frozen=True)
class Block:
    """A paragraph, a list item, a heading or a table's row, without code: its text and its first line's number."""

    text: str
    line: int
    is_prose: bool

    @property
    def words(self) -> int:
        return count(self.text)

    def sentences(self) -> list[str]:
        """Sentences of a paragraph or an item. Fragments, such as lists of names, end with no stop: they are none."""
        if not self.is_prose or not self.text.rstrip("\"')]*").endswith((".", "!", "?", ":", ";", ",")):
            return []
        return [each for each in _SENTENCE.split(self.text) if count(each) > 2]


def docstrings(tree: ast.Module) -> list[Block]:
    """Return the docstrings of a module, its classes and its functions, without code in backticks."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
    texts = ((ast.get_docstring(node), node.body[0].lineno) for node in nodes if ast.get_docstring(node))
    return [Block(_CODE.sub("`x`", text), line, True) for text, line in texts]


def count(text: str) -> int:
    """Words of a text; numbers are words, signs are not."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def blocks(markdown: str) -> list[Block]:
    """Blocks of a Markdown text. Code blocks, comments, pictures and targets of links are left out."""
    return [Block(text, line, prose) for text, line, prose in map(_cleaned, _raw(markdown)) if count(text)]


def _raw(markdown: str) -> Iterator[tuple[list[str], int, bool]]:
    lines: list[str] = []
    begin, fenced = 0, False
    for number, line in enumerate([*re.sub(r"<!--.*?-->", "", markdown, flags=re.S).splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        code = fenced or fence or (not lines and line.startswith("    "))
        single = line.startswith(("#", "|", ":::"))
        if lines and (code or single or not line.strip() or _ITEM.match(line)):
            yield lines, begin, True
            lines = []
        fenced ^= fence
        if code or not line.strip():
            continue
        if single:
            yield [] if line.startswith(":::") else [line], number, False
        else:
            begin = begin if lines else number
            lines.append(_ITEM.sub("", line, count=1))


def _cleaned(raw: tuple[list[str], int, bool]) -> tuple[str, int, bool]:
    lines, number, prose = raw
    text = _CODE.sub("`x`", " ".join(map(str.strip, lines)))
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\*\*|[#|]", " ", text).strip(), number, prose


def markers(parts: Iterable[Block], name: str) -> list[str]:
    """Return a line for each marker word: where it is, and what to write instead. Quoted texts are left out."""
    found = []
    for part in parts:
        text = re.sub(r"\"[^\"]*\"", '""', part.text)
        hits = [(hit, instead) for pattern, instead in _MARKER.items() for hit in pattern.finditer(text)]
        hits += [(hit, "the subject first") for hit in OPENING.finditer(text)]
        for hit, instead in hits:
            around = text[max(hit.start() - 30, 0) : hit.end() + 30]
            found.append(f"{name}:{part.line}: {hit.group().strip('.:; ')!r} in '...{around}...': {instead}")
    return found


def mean(sentences: Sequence[str]) -> float:
    """Mean words of a sentence; 0.0 of none."""
    return sum(map(count, sentences)) / max(len(sentences), 1)


def long_sentences(sentences: Iterable[str]) -> list[str]:
    """The longest ten sentences, each after the number of its words."""
    return [f"{count(each)}: {each}" for each in sorted(sentences, key=count, reverse=True)[:10]]


def main(names: Sequence[str]) -> None:
    root = Path(__file__).parents[2]
    for file in map(Path, names or [root / "README.md", *sorted((root / "docs").glob("**/*.md"))]):
        text = file.read_text(encoding="utf-8")
        parts = docstrings(ast.parse(text)) if file.suffix == ".py" else blocks(text)
        sentences = [each for part in parts for each in part.sentences()]
        found = markers(parts, file.name)
        words = sum(part.words for part in parts)
        print(f"{file.name}: {words} words, {len(found)} markers, {mean(sentences):.1f} words per sentence")
        print("\n".join(f"    {each}" for each in [*found, *long_sentences(sentences)[:3]]))


if __name__ == "__main__":
    main(sys.argv[1:])
