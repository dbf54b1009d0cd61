"""The documentation's site, without building it: its navigation, the API page's names, the pages' outward links."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvsieve

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SETTINGS = (ROOT / "mkdocs.yml").read_text()
GENERATED = ("methods.md", "models.md")
API = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.M)


def test_the_navigation_has_every_page_once():
    navigation = SETTINGS.partition("\nnav:\n")[2].partition("\n\n")[0]
    pages = re.findall(r"(\w+\.md)$", navigation, re.M)
    assert sorted(pages) == sorted(page.name for page in DOCS.glob("*.md"))


def written(page: Path) -> str:
    """The text of a page without its generated parts; the pages of methods and models have no other."""
    return "" if page.name in GENERATED else re.sub(r"<!-- \w+ -->\n.*?<!-- end -->", "", page.read_text(), flags=re.S)


def test_there_are_few_pages_and_few_words():
    words = {page.name: len(written(page).split()) for page in DOCS.glob("*.md")}
    assert len(words) <= 19 and sum(words.values()) <= 28_500, words
    assert words["architecture.md"] <= 2_500


def test_the_index_leads_to_every_other_page():
    linked = set(re.findall(r"\]\((\w+\.md)\)", (DOCS / "index.md").read_text()))
    assert linked == {page.name for page in DOCS.glob("*.md")} - {"index.md"}


@pytest.mark.parametrize("name", API)
def test_every_name_of_the_api_page_exists_and_is_described(name):
    assert pkgutil.resolve_name(name).__doc__


def test_the_api_page_has_the_public_names():
    documented = {name.removeprefix("kvsieve.") for name in API}
    # The errors' page has two of them, and modules and the version are not described there.
    assert documented >= set(kvsieve.__all__) - {"KvsieveError", "KvsieveWarning", "__version__", "methods", "models"}


@pytest.fixture
def hook():
    """The hook of mkdocs, which is imported by its path."""
    spec = importlib.util.spec_from_file_location("site_links", DOCS / "site_links.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_out_of_docs_lead_to_the_repository_and_pictures_are_shown(hook):
    config = {"extra": {"repository": "https://example.org/repo"}}
    text = "[a](../README.md#make) ![b](../benchmarks/b.png) [c](chats.md)"
    assert hook.on_page_markdown(text, None, config, None) == (
        "[a](https://example.org/repo/blob/main/README.md#make) ![b](benchmarks/b.png) [c](chats.md)"
    )


def test_a_link_to_no_file_fails_the_build(hook, caplog, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("[b](../b.md) [c](../c.md#d)")
    (tmp_path / "c.md").write_text("")
    page = SimpleNamespace(abs_src_path=str(tmp_path / "docs" / "a.md"), src_uri="a.md")
    hook.warn_of_missing([page], tmp_path)
    assert caplog.messages == ["a.md links to b.md, which does not exist"]


@pytest.mark.parametrize(
    ("html", "loaded"),
    [
        ('<script async src="https://example.org/a.js"></script>', "https://example.org/a.js"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "//example.org/a.css"),
        ('<script src="a.js"></script><a href="https://example.org">a</a>', None),
    ],
)
def test_a_page_that_loads_something_from_elsewhere_fails_the_build(hook, caplog, html, loaded):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
    assert hook.on_post_page(html, page, None) == html
    assert caplog.messages == ([] if loaded is None else [f"a.md loads {loaded}"])


def test_what_the_site_is_built_into_is_ignored():
    target = re.search(r"mkdocs build .*--site-dir (\w+)", (ROOT / "Makefile").read_text()).group(1)
    assert f"{target}/" in (ROOT / ".gitignore").read_text().splitlines()
