"""Commands and headings of the Markdown pages."""

from __future__ import annotations

import re
import shlex


def commands(text: str) -> list[list[str]]:
    """The arguments of each line of a page's code blocks that calls kvsieve, optional ones included but MODEL."""
    lines = re.findall(
        r"^(?: {4}|> )?(?:.*\| )?kvsieve ([a-z].*)$", "\n".join(code_lines(text.replace("\\\n", " "))), re.M
    )
    return [_words(line) for line in lines]


def inline_commands(text: str) -> list[list[str]]:
    """The arguments of each call of kvsieve in a page's running text, as `commands` has them."""
    return [_words(line) for line in re.findall(r"^kvsieve ([a-z].*)$", "\n".join(inline_code(text)), re.M)]


def inline_code(text: str) -> list[str]:
    """What stands between single backticks in a page's running text."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def _words(line: str) -> list[str]:
    return shlex.split(re.sub(r"[][]", "", line.replace("[MODEL]", "")), comments=True)


def code_lines(text: str) -> list[str]:
    lines, fenced = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            lines.append(line)
    return lines


def anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def sections(text: str) -> dict[str, str]:
    """Each section with its anchor, subsections included; "" is the page up to its first section."""
    out, places = {"": re.split(r"^##+ ", text, maxsplit=1, flags=re.M)[0]}, []
    # Comments in code look like headings: blanked, at their length.
    plain = re.sub(r"^```.*?^```", lambda code: " " * len(code[0]), text, flags=re.M | re.S)
    for found in re.finditer(r"^(#+) (.*)$", plain, re.M):
        places.append((len(found[1]), found[2], found.start()))
    for at, (depth, heading, start) in enumerate(places):
        end = next((place for level, _, place in places[at + 1 :] if level <= depth), len(text))
        out[anchor(heading)] = text[start:end]
    return out
