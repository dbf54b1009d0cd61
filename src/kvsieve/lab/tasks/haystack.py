"""Long texts to hide facts in: repeated noise, help texts shipped with kvsieve, or the files of a folder."""

from __future__ import annotations

import functools
import gzip
import hashlib
import os
import random
import re
from collections.abc import Sequence
from pathlib import Path

from kvsieve.errors import InputError

NOISE = (
    "The river is wide. The hills are green. The road goes on and on. Here we turn, and there we turn back again.",
)
SUFFIXES = (".txt", ".md", ".rst")


def load_haystack(source: str) -> str:
    """Return the text named `source`: "topics" (help texts of Python 3.11.7), "noise", or the user's folder or file.

    A folder's .txt, .md and .rst files are read in the order of their names. Raises InputError if there is no text.
    """
    if source == "noise":
        return NOISE[0] + " "
    if source == "topics":
        return _topics()
    path = Path(os.path.expanduser(source))
    if not path.exists():
        raise InputError(
            f"haystack {source!r} is neither 'topics' nor 'noise' nor an existing folder or text file; check the path"
        )
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    text = "\n\n".join(map(_read, files))
    if len(text.split()) < 50:
        raise InputError(
            f"the haystack {source!r} has {len(text.split())} words in {len(files)} {'/'.join(SUFFIXES)} files, at "
            "least 50 are needed; put text there"
        )
    return text


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read {file} of the haystack as UTF-8 text: {error}; mend it or move it away"
        ) from error


@functools.cache
def _topics() -> str:
    """Return the shipped text; the running Python's help differs between releases."""
    return gzip.decompress(Path(__file__).with_name("topics.txt.gz").read_bytes()).decode()


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=4)
def _pieces(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return words with the white space after them, and the indices that begin a paragraph."""
    words = tuple(re.findall(r"\S+\s*", text.strip() + "\n\n"))
    return words, (0, *(i + 1 for i, word in enumerate(words[:-1]) if "\n\n" in word))


def passage(text: str, start: float, count: int) -> list[str]:
    """Return `count` words with their white space, from the paragraph nearest to the share `start` of the text.

    The text repeats after its end.
    """
    words, starts = _pieces(text)
    first = starts[min(int(start * len(starts)), len(starts) - 1)]
    return [words[(first + i) % len(words)] for i in range(count)]


def hide(words: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> str:
    """Return the words as text, with each needle as a sentence after the sentence end nearest to its depth.

    depths: shares of the words, 0 the beginning, 1 the end; one per needle.
    """
    ends = [0, *(i + 1 for i, word in enumerate(words) if _ends_sentence(word)), len(words)]
    places = [min((abs(end - depth * len(words)), end) for end in ends)[1] for depth in depths]
    parts = []
    last = 0
    for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: pair[0]):
        parts += ["".join(words[last:place]).rstrip(" "), needle]
        last = place
    parts.append("".join(words[last:]))
    text = ""
    for part in parts:
        if not part.strip():
            continue
        joint = "" if not text or text.endswith("\n") else " "
        text += joint + (part if not joint else part.lstrip(" "))
    return text.strip()


def _ends_sentence(word: str) -> bool:
    return "\n\n" in word or word.rstrip().endswith((".", "!", "?"))


def noise_words(count: int) -> str:
    """Return `count` words of noise, to fill a prompt up to its length."""
    return "".join(passage(NOISE[0], 0, count)).strip()


def draw(seed: int, task: str, length: int, index: int) -> random.Random:
    return random.Random(f"{seed}/{task}/{length}/{index}")
