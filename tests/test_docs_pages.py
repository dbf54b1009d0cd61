"""Pages of docs/ that repeat what files and code say: recipes of the server, the API's table, the list of models."""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import transformers
import typer
from transformers import LlamaConfig, Qwen2Config

import kvsieve
from doc_pages import commands
from kvsieve.cli.main import app
from kvsieve.cli.models_table import models_markdown
from model_table import examine
from tiny_models import FAMILIES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
API = (DOCS / "api.md").read_text()
MODELS = (DOCS / "models.md").read_text().partition("<!-- models -->\n")[2]


@pytest.mark.parametrize("name", ["Containerfile", "kvsieve.service"])
def test_the_recipes_of_the_server_have_options_that_exist_and_a_place_for_kernels(name):
    assert f"](../examples/serve/{name})" in (DOCS / "serving.md").read_text()
    recipe = (ROOT / "examples" / "serve" / name).read_text()
    command = re.search(r"^(?:ENTRYPOINT|ExecStart=)(.*)$", recipe, re.M).group(1)
    words = ast.literal_eval(command.strip()) if command.strip().startswith("[") else shlex.split(command)
    commands = typer.main.get_command(app).commands
    assert words[1] == "serve"
    options = [word.replace("%%", "%") for word in words[2:]]
    given = commands["serve"].make_context("serve", options).params  # raises for an option there is not
    places = dict(re.findall(r"\b(HF_HOME|KVSIEVE_CACHE)=(\S+)", recipe))
    # All that is written lies below one folder, which outlives the service.
    assert {str(Path(place).parent) for place in (*places.values(), given["store"])} == {"/var/lib/kvsieve"}
    assert len(places) == 2 and re.search(r"^(RUN |ExecStartPre=)\S*kvsieve doctor", recipe, re.M)


# Models of the pages' estimates: layers, heads, KV heads, hidden and intermediate width.
SHAPES = {
    "Llama 3.2 1B": LlamaConfig(
        num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, hidden_size=2048, intermediate_size=8192
    ),
    "Qwen2.5 7B": Qwen2Config(
        num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, hidden_size=3584, intermediate_size=18944
    ),
    "Llama 3.1 8B": LlamaConfig(
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096, intermediate_size=14336
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_estimates_of_the_pages_are_printed(name, cli, tmp_path):
    SHAPES[name].update({"vocab_size": 128256, "max_position_embeddings": 131072})
    SHAPES[name].save_pretrained(tmp_path)
    wanted = [tmp_path, "--context", "32k", "--method", "full,snapkv:budget=10%", "--codec", "none,kivi:bits=4"]
    full, _, some, packed = json.loads(cli("estimate", *wanted, "--json")[1])["results"]
    sizes = " | ".join(f"{one['kv_bytes'] / 2**20:.1f} MiB" for one in (full, some, packed))
    assert f"| {name} | {sizes} |" in (DOCS / "serving.md").read_text()
    if name == "Llama 3.1 8B":
        page = (DOCS / "choosing.md").read_text()
        (command,) = (words for words in commands(page) if "--bandwidth" in words)
        printed = [line.strip() for line in cli("estimate", tmp_path, *command[2:])[1].splitlines()]
        shown = re.findall(r"^    (context   .*|131072 .*)$", page, re.M)
        assert len(shown) == 4 and set(shown) <= set(printed)


def test_the_api_table_links_every_name_to_its_file_and_has_its_parameters():
    links = dict(re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/.]+)\)", API))
    signatures = dict(re.findall(r"^\| \[`([\w.]+)`\]\S+ \| `(\w+\([^`]*\))`", API, re.M))
    names = re.findall(r"^::: (\S+)$", API, re.M)
    assert len(links) == len(names)
    for name in names:
        member = pkgutil.resolve_name(name)
        key = name if name in links else name.rpartition(".")[2]
        file = Path(inspect.getsourcefile(member)).relative_to(Path(kvsieve.__file__).parent)
        assert links[key] == f"src/kvsieve/{file}", name
        if key in signatures and not signatures[key].startswith("Budget.parse"):
            arguments = ast.parse(f"def {signatures[key]}: ...").body[0].args
            documented = [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]
            documented += [arguments.kwarg.arg] if arguments.kwarg else []
            assert documented == list(inspect.signature(member).parameters), name


def test_the_page_of_models_has_every_family_once():
    runs, _, others = MODELS.partition("| status |")
    listed = re.findall(r"^\| (\S+) \| [^|]+ \| [^|]+ \|$", runs, re.M)
    supported = set(listed) - {"family", "---"}
    others = re.findall(r"(?:^\| [\w ]+ \| [^|]+ \| |, )(\S+) \(", others, re.M)
    partly = {name for name in others if name in supported}
    assert len(listed) == len(set(listed)) and len(others) == len(set(others))
    assert supported | set(others) == {family.name for family in FAMILIES}
    counts = [int(count) for count in re.findall(r"(\d+) (?:supported|eviction only|refused|not in this)", MODELS)]
    assert sum(counts) == len(FAMILIES) and counts[1] == len(partly)


@pytest.mark.parametrize(
    "name", ["llama", "gemma3n_text", "deepseek_v3", "kimi_linear", "llama4_text", "mamba2", "bloom"]
)
def test_the_page_of_models_is_the_generated_one(name):
    if f"transformers {transformers.__version__}:" not in MODELS:
        pytest.skip("the page was made with another transformers")
    row = examine(next(family for family in FAMILIES if family.name == name))
    _, runs, others = models_markdown([row], "").split("\n\n")
    for line in runs.splitlines()[2:]:
        assert line in MODELS.splitlines()
    for line in others.splitlines()[2:]:
        status_and_reason, _, title = line.removesuffix(" |").rpartition(" | ")
        found = next(each for each in MODELS.splitlines() if each.startswith(f"{status_and_reason} | "))
        assert title in found
