"""Print the end of docs/methods.md: measured scores, papers of the collection, and papers of the other methods.

python -m benchmarks.papers >> docs/methods.md

Papers are in benchmarks/papers.toml, methods in the registry, and they meet by their arXiv ids.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.glance import part
from benchmarks.toys.tables import markdown
from kvsieve.planning.joins import join_info, list_joins
from kvsieve.planning.registry import list_methods, method_info

FILE = Path(__file__).with_name("papers.toml")
ARXIV = re.compile(r"\d{4}\.\d{5}")
BEGIN, END = "<!-- papers -->", "<!-- end -->"


def papers() -> list[dict[str, Any]]:
    """Return the collection, in its order."""
    return tomllib.loads(FILE.read_text())["papers"]


def registered() -> dict[str, list[str]]:
    """Return the names of methods and joins by arXiv id; a method of two papers has both."""
    found: dict[str, list[str]] = {}
    for name in list_methods():
        for arxiv in ARXIV.findall(method_info(name).paper):
            found.setdefault(arxiv, []).append(f"`{name}`")
    for name in list_joins():
        for arxiv in ARXIV.findall(join_info(name).paper):
            found.setdefault(arxiv, []).append(f"`--join {name}`")
    return found


def parts() -> str:
    """Return the tables, with their marks."""
    methods, listed = registered(), papers()
    rows, here, partly = [], 0, 0
    for paper in listed:
        names = methods.get(paper["arxiv"], [])
        found = ", ".join([*names, *([paper["here"]] if "here" in paper else [])])
        missing = paper.get("part" if names else "missing", "")
        here += bool(found) and not missing
        partly += bool(found and missing)
        rows.append([paper["name"], paper["arxiv"], found or "no", missing])
    known = {paper["arxiv"] for paper in listed}
    others = [
        [f"`{name}`", method_info(name).title, ", ".join(rest)]
        for name in list_methods()
        if (rest := [each for each in ARXIV.findall(method_info(name).paper) if each not in known])
    ]
    said = (
        f"{here} of {len(listed)} papers of the collection that kvsieve began with are here, {partly} in part. The "
        "last column has the reason, or the missing part."
    )
    return "\n".join(
        [
            *(BEGIN, "", "## Papers", "", said, ""),
            *(markdown(["paper", "arXiv", "here as", "missing"], rows), ""),
            *("Methods of other papers:", "", markdown(["method", "title", "arXiv"], others), "", END),
        ]
    )


def page_end() -> str:
    """Return all that follows the tables of `kvsieve methods --markdown`."""
    measured = part()
    return "\n\n".join([*([f"<!-- glance -->\n\n{measured}\n\n{END}"] if measured else []), parts()])


if __name__ == "__main__":
    print(f"\n{page_end()}")
