"""The numbers that the layout of the source holds to, each by a test."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import kvsieve
from kvsieve.planning.roles.base import _CLASSES
from source_tree import PLUGIN, SOURCE, imports, modules

MEMORIES = {"DenseStore", "RaggedStore", "PackedStore", "LatentStore", "LayerMemory", "BufferedMemory"}
LAYERS = {"StoreLayer", "SieveLayer", "WindowLayer", "LatentLayer", "StateLayer", "EmptyLayer", "RecordedLayer"}
# Where attention is computed, and chosen how.
OF_ATTENTION = ("kvsieve.kernels", "kvsieve.core", "kvsieve.attention")
# Questions whether something computes a request, or faster.
ASKING = {"usable", "serves", "faster_here", "faster_for_token", "why_not_compiled", "why_not_kernel", "is_thin"}
# Functions of the table that may ask them, beside those that say why not.
ASKED_BY = {"attend", "explain", "measured", "has_kernel", "foresee", "compile", "_is_thin"}
# Loops that choose tokens by themselves, and why.
OTHER_LOOPS = {
    "lab/bench/plain.py": "transformers' own path, the baseline, which runs without kvsieve too",
    "hf/prompt/draft.py": "a part of reading a prompt: a draft model's tokens ask which of the prompt's matter",
    "methods/lookahead.py": "a part of reading a prompt: the method's own tokens ask which entries matter",
}
CHOOSING = {"argmax", "multinomial"}
FEEDING = {"model", "feed", "feed_rows", "next_logits", "run"}
# Rooms of kvsieve that the plugin for vLLM imports, beside the public API.
OF_THE_PLUGIN = {"attention", "errors", "kernels", "planning", "types"}


def unit(module: str) -> str:
    """The package or module at the root that a module belongs to."""
    return module.split(".")[1] if module.startswith("kvsieve.") else module


def outside(*names: str) -> list[tuple[str, ast.Module]]:
    return [(module, tree) for module, (_, tree) in modules().items() if not module.startswith(names)]


def test_few_outside_attention_know_what_a_model_adds_to_it():
    """A cap and learned sinks travel with the queries; 57 modules once handed them on."""
    found = set()
    for module, tree in outside(*OF_ATTENTION, "kvsieve_vllm"):
        for node in ast.walk(tree):
            names = [getattr(node, name, None) for name in ("attr", "arg", "id")]
            if {"softcap", "sinks_of"} & set(names) or (
                "sinks" in names and ast.unparse(node) in ("asked.sinks", "ctx.sinks")
            ):
                found.add(module)
    assert len(found) <= 8, found


def test_the_table_alone_asks_what_computes_attention():
    for module, tree in outside("kvsieve.kernels", "kvsieve.core", "kvsieve_vllm"):
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef) or "why_not" in function.name:
                continue
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            asks = {ast.unparse(call) for call in calls if ast.unparse(call).rpartition(".")[2] in ASKING}
            asks |= {name for name in map(ast.unparse, calls) if name in ("kernels.why_not", "native.why_not")}
            in_table = module.startswith("kvsieve.attention") and function.name in ASKED_BY
            assert in_table or not asks, (module, function.name, asks)


def test_one_policy_goes_on_from_stored_prefixes():
    """One module looks prefixes up and stores them, whoever reads the prompts."""
    verbs = [f"self.store.{name}" for name in ("find", "add", "add_prompt")]
    users = {
        module
        for module, (_, tree) in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in verbs
    }
    assert users == {"kvsieve.hf.reuse"}


def called(node: ast.AST) -> set[str]:
    """Names of functions and methods that are called within a node."""
    calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return {getattr(each, "attr", getattr(each, "id", "")) for each in calls}


def test_tokens_are_decoded_in_one_loop():
    found = set()
    for place, tree in modules().values():
        if called(tree) & CHOOSING:
            calls = [called(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            if any(names & CHOOSING and names & FEEDING for names in calls):
                found.add(place)
    assert found == set(OTHER_LOOPS)
    users = {modules()[name][0] for name, known in imports().items() if "kvsieve.decoding.loop" in known}
    assert users == {"serve/running.py", "serve/workload.py", "lab/eval/evaluator.py", "lab/calibrate/reading.py"}


def test_the_plugin_names_no_method_and_imports_what_methods_are_made_of():
    kvsieve.list_methods()
    methods = {kind.__name__ for kind in _CLASSES.values() if kind.__module__.startswith("kvsieve.methods")}
    assert {"SnapKV", "Quest", "HSA", "LagKV"} <= methods
    for file in PLUGIN.glob("*.py"):
        text = file.read_text()
        nodes = list(ast.walk(ast.parse(text)))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        assert {name.split(".")[1] for name in imported if name.startswith("kvsieve.")} <= OF_THE_PLUGIN, file.name
        assert not methods & set(re.findall(r"\w+", text)), file.name


ROOT = Path(__file__).parents[1]


def found(pattern: str, folder: Path, left_out: str = "") -> list[str]:
    """Python files of a folder, but for those below `left_out`, in which a line matches."""
    files = sorted(folder.rglob("*.py"))
    names = [str(file.relative_to(folder)) for file in files if re.search(pattern, file.read_text(), re.M)]
    return [name for name in names if not left_out or not name.startswith(left_out)]


def test_only_the_tests_of_benchmarks_import_them():
    assert found(r"^\s*(from|import) benchmarks\b|spec_from_file_loc[a-z]+", ROOT / "tests", "benchmarks/") == [
        # A hook of mkdocs, which is imported by its path, as mkdocs does.
        "test_docs_site.py",
    ]


def test_one_function_writes_files_whole_or_not_at_all():
    """What else renames: a compiler's output, and a damaged file that is put aside."""
    assert found(r"\bos\.(replace|rename)\(|\.(replace|rename)\((target|path|file|place)\)", SOURCE) == [
        "folders.py",
        "kernels/cpu/build.py",
        "models/demo.py",
        "models/packed/load.py",
        "store/directory.py",
    ]


def asked_kinds(known: set[str]) -> Iterator[str]:
    """Modules that ask by isinstance whether something is of a kind known by these names, once for each question."""
    for module, (_, tree) in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                names = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
                if names & known:
                    yield module


def test_nobody_outside_the_cache_asks_what_kind_of_memory_it_has():
    assert [module for module in asked_kinds(MEMORIES) if not module.startswith("kvsieve.cache")] == []


def test_few_ask_what_kind_of_layer_of_the_cache_it_is():
    assert len(list(asked_kinds(LAYERS))) <= 15


def test_private_fields_of_memories_and_layers_are_their_own():
    wrong = [
        f"{module}:{node.lineno} {ast.unparse(node)}"
        for module, (_, tree) in modules().items()
        if module.startswith(("kvsieve.cache", "kvsieve.hf.cache"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if ast.unparse(node.value) not in ("self", "cls", "super()")
    ]
    assert wrong == []


def room_of(module: str) -> str:
    """Return the package or top-level module of a module; the plugin is one."""
    package, *inner = module.split(".")
    return inner[0] if package == "kvsieve" and inner else package


def floors() -> dict[str, int]:
    """Return the floor of each room: one more than the highest that it imports."""
    below: dict[str, set[str]] = {room_of(module): set() for module in modules()}
    for module, targets in imports().items():
        below[room_of(module)] |= {room_of(target) for target in targets} - {room_of(module)}
    found: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in found:
            found[room] = 1 + max(map(floor, below[room]), default=0)
        return found[room]

    return {room: floor(room) for room in below}


@contextlib.contextmanager
def walked() -> Iterator[set[tuple[str, str]]]:
    """Note which of kvsieve's rooms calls which in the block; a generator expression is its consumer's."""
    steps: set[tuple[str, str]] = set()
    rooms: dict[CodeType, str | None] = {}
    names = {str(SOURCE / file): room_of(name) for name, (file, _) in modules().items()}

    def room(frame: FrameType) -> str | None:
        code = frame.f_code
        if code not in rooms:
            rooms[code] = None if code.co_name == "<genexpr>" else names.get(code.co_filename)
        return rooms[code]

    def note(frame: FrameType, event: str, given: Any) -> None:
        there = room(frame) if event == "call" else None
        back = frame.f_back
        while there is not None and back is not None and "<module>" not in (frame.f_code.co_name, back.f_code.co_name):
            here = room(back)
            if here is not None:
                steps.add((here, there))
                break
            back = back.f_back

    sys.setprofile(note)
    try:
        yield steps
    finally:
        sys.setprofile(None)


@pytest.mark.slow
def test_the_way_from_the_command_line_to_a_result_is_short(cli, model_dir, tmp_path):
    """Rooms that `kvsieve eval` passes through, and calls from one to a higher one."""
    grid = ["--tasks", "needle", "--lengths", "128", "--samples", "1", "--budgets", "20%", "--cost-samples", "0"]
    with walked() as steps:
        assert cli("eval", model_dir, *grid, "--dtype", "float32", "--out", tmp_path / "out")[0] == 0
    rooms = {room for step in steps for room in step}
    level = floors()
    climbs = {(here, there) for here, there in steps if level[there] > level[here]}
    # Methods are called by their roles, a prefix by what a pass leaves; progress is the command line's.
    assert {pair for pair in climbs if pair[1] not in ("methods", "shared", "kvsieve")} <= {("lab", "cli")}
    assert len(rooms) <= 20 and len(climbs) <= 4, (sorted(rooms), sorted(climbs))


def test_the_root_is_small():
    """Rooms are the packages and modules at the root, arrows the imports between them, floors their longest chain."""
    rooms = {unit(module) for module in modules() if not module.startswith("kvsieve_vllm")}
    named = {(unit(module), unit(target)) for module, targets in imports().items() for target in targets}
    arrows = {(here, there) for here, there in named if here != there and here in rooms}
    below = {room: {there for here, there in arrows if here == room} for room in rooms}

    @functools.cache
    def floor(room: str) -> int:
        return 1 + max(map(floor, below[room]), default=0)

    assert len(rooms) <= 26, sorted(rooms)
    assert max(map(floor, rooms)) <= 11
    assert len(arrows) <= 125


def test_plain_tiny_models_are_built_in_one_place():
    """`tiny.tiny_model` builds each configuration once; a test that changes a model builds its own."""
    plain = r'@pytest\.fixture.*\ndef \w+\(\):\n    return build\("llama"(, dtype=torch\.float64)?\)'
    assert found(plain, ROOT / "tests", "gpu/") == []


def test_an_assignment_makes_one_value():
    """A statement that assigns several unrelated values, `a, b = x, y`, is rare: swaps and the like."""
    assignments = [
        node
        for _, tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
    ]
    packed = [
        node
        for node in assignments
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    ]
    assert len(packed) <= 0.02 * len(assignments)


def test_variables_are_nouns():
    pronouns = {"told", "each", "made", "mine", "theirs", "ours", "gone"}
    found = [
        f"{file}:{node.lineno} {node.id}"
        for file, tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in pronouns
    ]
    assert len(found) <= 0, found
