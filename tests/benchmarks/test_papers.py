"""The table of papers: every registered method and every paper of the collection is in it."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import papers
from kvsieve.planning.registry import list_methods, method_info

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()


def test_every_registered_arxiv_id_is_in_the_tables():
    tables = papers.parts()
    for name in list_methods():
        for arxiv in papers.ARXIV.findall(method_info(name).paper):
            row = next(line for line in tables.splitlines() if re.search(rf"\|[^|]*{re.escape(arxiv)}[^|]*\|", line))
            assert f"`{name}`" in tables and ("`" in row), name


def test_every_paper_is_here_or_has_a_reason():
    listed = papers.papers()
    methods = papers.registered()
    assert [paper["id"] for paper in listed] == list(range(1, 147))
    assert len({paper["arxiv"] for paper in listed}) == len(listed)
    for paper in listed:
        assert set(paper) <= {"id", "name", "arxiv", "here", "missing", "part"}
        assert re.fullmatch(r"\d{4}\.\d{5}", paper["arxiv"])
        assert paper["arxiv"] in methods or "here" in paper or paper.get("missing"), paper
        assert not (paper["arxiv"] in methods and "missing" in paper), f"{paper['name']} is registered: use part="
        assert len(paper.get("missing", "").split()) <= 14, paper


def test_named_methods_and_tasks_exist():
    from kvsieve.lab.tasks import all_tasks
    from kvsieve.lab.tasks.public import public_tasks

    known = {*list_methods(), *all_tasks(), *(name for name, _ in public_tasks()), "system", "rest=", "chunk="}
    words = {
        "protect=",
        "quotas=",
        "sieve.edit",
        "chat.replace",
        "retry",
        "fork",
        "self:",
        "kvsieve-vllm",
        "scbench_...",
    }
    for paper in papers.papers():
        for code in re.findall(r"`([^`]+)`", f"{paper.get('here', '')} {paper.get('missing', '')}"):
            if not code.startswith("kvsieve ") and code not in words and code != "serve":
                assert code.partition(":")[0] in known, code


def test_the_page_ends_with_the_tables():
    assert PAGE.endswith(f"\n\n{papers.page_end()}\n"), "run make docs"
