"""README and docs: the examples run and print what stands there, every command, link and number exists."""

from __future__ import annotations

import functools
import itertools
import pkgutil
import re
import shutil
from pathlib import Path

import pytest
import typer

import kvsieve
from doc_pages import commands, inline_code, inline_commands, sections
from kvsieve.cli.main import app
from kvsieve.cli.methods_table import methods_command
from kvsieve.cli.specs import method_specs
from source_tree import HAS_RESULTS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GROUP = typer.main.get_command(app)
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.slow
def test_the_examples_print_what_the_readme_says(capsys, monkeypatch, tmp_path, real_model_in_float32, usual_floor):
    shutil.copy(ROOT / "LICENSE", tmp_path)
    monkeypatch.chdir(tmp_path)
    first, conversation = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict = {}
    exec(compile(first, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed == re.search(r"```text\n(.*?)```", README, re.S).group(1)
    answers = [line.partition(": ") for line in printed.splitlines()]
    assert [name for name, _, _ in answers] == ["full", "fastkv:budget=25%"]
    assert all("7294163" in answer for _, _, answer in answers)
    stats = names["result"].stats
    assert stats.applied and usual_floor < stats.kv_entries[0] < stats.prompt_tokens // 3
    assert stats.deep_tokens < stats.prompt_tokens // 4
    exec(compile(conversation, "README.md", "exec"), names)
    assert capsys.readouterr().out.splitlines() == re.findall(r"# (The capital .*)$", conversation, re.M)


def test_the_plans_of_the_quickstart_can_be_made():
    written = re.search(
        r"```python\nimport kvsieve\n(from kvsieve.methods.*?)```", (ROOT / "docs" / "index.md").read_text(), re.S
    ).group(1)
    names = {"kvsieve": kvsieve}
    imported, *plans = [line for line in written.splitlines() if line]
    exec(imported, names)
    made = [eval(line, names) for line in plans]
    assert [[role for role in ("propagate", "evict", "read", "codec") if getattr(plan, role)] for plan in made] == [
        ["evict", "codec"],
        ["propagate", "evict", "read"],
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_its_options_exist(page):
    for name, *arguments in commands(page.read_text()):
        assert name in GROUP.commands, name
        command = GROUP.commands[name]
        if name == "store":
            name, *arguments = arguments
            command = command.commands[name]
        context = command.make_context(name, arguments)  # raises for an option that there is not
        for option in ("methods", "compare"):
            if context.params.get(option):
                method_specs(context.params[option].replace("mynewmethod", "snapkv"))
        if method := context.params.get("method"):
            method_specs(method)


# Options of other programs that the pages name.
OTHERS = {
    "README.md": "--index-url",  # pip
    "evaluation.md": "--model_template_type --model_args --metadata --apply_chat_template --use_cache",
    "models.md": "--node-rank --master-addr --master-port --rdzv",  # torchrun
    "vllm.md": "--block-size --enable-dbo --attention-backend --max-model-len --gpu-memory-utilization",
    "weights.md": "--merge",  # llama-gguf-split
    "index.md": "--install-completion",  # typer's
}


def options_of(command) -> set[str]:
    """The options of a command, or of all commands of a group."""
    inner = [options_of(each) for each in getattr(command, "commands", {}).values()]
    return {"--help", *(name for parameter in command.params for name in parameter.opts)}.union(*inner)


def check_inline(file: Path) -> None:
    """Fail for a command or an option that a file names between backticks and that does not exist."""
    for name, *arguments in inline_commands(file.read_text()):
        found = {word for word in arguments if word.startswith("--")}
        assert found <= options_of(GROUP.commands[name]), (file.name, name, arguments)


@functools.cache
def options_of_scripts() -> set[str]:
    folders = (ROOT / "benchmarks", ROOT / "examples", ROOT / "tests" / "support")
    scripts = itertools.chain.from_iterable(folder.rglob("*.py") for folder in folders)
    return {name for script in scripts for name in re.findall(r'"(--[\w-]+)"', script.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_options_and_names_in_running_text_exist(page):
    check_inline(page)
    known = {*options_of(GROUP), *OTHERS.get(page.name, "").split(), *options_of_scripts()}
    for code in inline_code(page.read_text()):
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", code)) <= known, code
        if dotted := re.match(r"kvsieve(\.\w+)+", code):
            assert dotted[0] == "kvsieve.tasks" or pkgutil.resolve_name(dotted[0]), code


def test_commands_that_messages_name_exist():
    for file in (ROOT / "src").rglob("*.py"):
        check_inline(file)


def test_the_readme_counts_the_methods():
    tens = ("sixty", "seventy", "eighty", "ninety", "a hundred", "a hundred and ten")
    said = 60 + 10 * tens.index(re.search(r"More than ([a-z ]+) published methods", README).group(1))
    papers = [kvsieve.method_info(name).paper for name in kvsieve.list_methods()]
    published = [paper for paper in papers if paper not in ("-", "none", "the model itself")]
    assert said < len(published) <= said + 15


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_the_quickstart_shows_every_command():
    shown = {name for name, *_ in commands((ROOT / "docs" / "index.md").read_text())}
    assert shown == set(GROUP.commands)


def test_make_has_every_target_that_is_named():
    targets = set(re.findall(r"^([a-z]+(?:-[a-z]+)?):", (ROOT / "Makefile").read_text(), re.M))
    targets |= {f"paper-{each}" for each in ("fastkv", "asl", "lagkv", "rocketkv")}
    for page in PAGES:
        named = re.findall(r"(?:^    |`)make ([a-z-]+)", page.read_text(), re.M)
        assert set(named) <= targets, page.name
    assert set(re.findall(r"`make ([a-z-]+)`", (ROOT / "CONTRIBUTING.md").read_text())) == targets - {"clean"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not HAS_RESULTS and (file.suffix == ".png" or "results" in file.parts):
            continue
        assert file.is_file(), f"{page.name}: {target}"
        if anchor:
            assert anchor in sections(file.read_text()), f"{page.name}: {target}"


def test_the_readme_leads_to_every_page():
    linked = set(re.findall(r"\]\((docs/\w+\.md)\)", README))
    assert linked == {str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md")}


def test_the_document_of_methods_is_the_generated_one(capsys, usual_floor):
    methods_command(markdown=True)
    # Scores and papers follow it (tests/benchmarks/test_papers.py).
    written = (ROOT / "docs" / "methods.md").read_text().partition("\n<!-- ")[0]
    assert capsys.readouterr().out == written
