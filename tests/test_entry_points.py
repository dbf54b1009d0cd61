"""Methods of other packages: registered by entry point, known wherever kvsieve's own are, and never in the way."""

from __future__ import annotations

import json
import warnings

import pytest

import kvsieve
from kvsieve.cli.main import run_cli
from kvsieve.cli.specs import method_specs
from kvsieve.errors import KvsieveWarning, PlanError
from kvsieve.lab.eval.cells import settings
from kvsieve.lab.tasks import all_tasks
from kvsieve.planning import loading
from other_packages import look_for_methods
from tiny import tiny_prompt
from tiny_models import build

VNORM = '''
from dataclasses import dataclass

from kvsieve.planning.budget import Budget
from kvsieve.methods.base import ScoredEvictor
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method


@dataclass(frozen=True, kw_only=True)
class VNorm(ScoredEvictor):
    def scores(self, ctx):
        return ctx.values.float().norm(dim=-1)


@register_method("v-norm", title="V-norm", paper="example", phase="end of prompt", query_aware=False)
def vnorm(budget="20%"):
    """Largest value norms."""
    return Plan(evict=VNorm(budget=Budget.parse(budget)))
'''
BROKEN = {
    "raising": ("raises_broken_now", "raise RuntimeError('needs another version')", "raises_broken_now"),
    "absent": ("is_there", "", "is_not_there"),
    "silent": ("registers_nothing", "", "registers_nothing"),
    "snapkv": ("says_it_is_snapkv", "", "says_it_is_snapkv"),
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a package with one module and one entry point; methods are then looked for anew."""

    def install(package: str, method: str, module: str, code: str, value: str | None = None) -> None:
        (tmp_path / f"{module}.py").write_text(code)
        about = tmp_path / f"{package}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[kvsieve.methods]\n{method} = {value or module}\n")

    look_for_methods(monkeypatch, tmp_path)
    return install


def test_a_method_of_another_package_is_known_everywhere(installed, capsys):
    installed("kvsieve-vnorm", "v-norm", "vnorm_for_kvsieve", VNORM)
    assert "v-norm" in kvsieve.list_methods()
    assert [each.label for each in settings(method_specs("vnorm"), ["10%"])] == ["full", "v-norm"]
    with pytest.raises(SystemExit, match="0"):
        run_cli(["methods", "--json"])
    assert "v-norm" in [each["name"] for each in json.loads(capsys.readouterr().out)]
    plan = kvsieve.plan("vnorm", budget=16)
    again = kvsieve.Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and type(again.evict) is type(plan.evict)
    with kvsieve.attach(build("llama"), plan) as sieve:
        ids = tiny_prompt(1, 40, seed=0, low=0, high=100)
        assert sieve.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0).stats.kv_entries == [16] * 4


@pytest.mark.parametrize("method", BROKEN)
def test_a_broken_one_is_left_out_with_a_warning_that_names_its_package(installed, method):
    module, code, value = BROKEN[method]
    own = [name for name in kvsieve.list_methods() if name != "v-norm"]
    loading._loaded = False
    installed("kvsieve-bad", method, module, code, value)
    with pytest.warns(KvsieveWarning, match=f"method '{method}' of the package 'kvsieve-bad' is left out: {value}"):
        assert kvsieve.list_methods() == own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kvsieve.list_methods() == own and kvsieve.plan("snapkv").name == "snapkv"


def test_a_saved_plan_names_only_classes_of_modules_that_registered_a_method():
    data = kvsieve.plan("snapkv", budget=64).to_dict()
    for kind in (
        "os:system",
        "subprocess:Popen",
        "kvsieve.planning.plans:Plan",
        "kvsieve.methods.snapkv:Budget",
        "nothing:at",
    ):
        with pytest.raises(PlanError, match="not a role class"):
            kvsieve.Plan.from_dict({**data, "evict": {"type": kind}})


def test_every_plan_of_ours_is_read_back():
    for name in kvsieve.list_methods():
        info = kvsieve.method_info(name)
        plan = kvsieve.plan(name, **info.example)
        assert kvsieve.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan, name


HIDDEN_WORD = """
from dataclasses import dataclass

from kvsieve.lab.tasks.base import Generated
from kvsieve.lab.tasks.fit import fit
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.lab.tasks.scoring import match_any


@dataclass(frozen=True)
class HiddenWord(Generated):
    name: str = "hidden-word"
    title: str = "A word in a text"

    def build(self, rng, index, length, count):
        word = f"w{rng.randrange(100)}"
        turn = QuestionAnswer("Which word?", (word,), match_any, 4)
        return fit(lambda n: Sample(" ".join([word, *["w7"] * n]), (turn,)), count, length, self.name)[0]


def other(text):
    return HiddenWord(text, name="another")


def nothing(text):
    return text


def needle(text):
    return HiddenWord(text, name="needle")
"""


@pytest.fixture
def task_package(tmp_path, monkeypatch):
    """Install a package whose entry point of a task is given."""

    def install(name: str, value: str) -> None:
        (tmp_path / "hidden_word_task.py").write_text(HIDDEN_WORD)
        about = tmp_path / "hidden_word-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hidden-word\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[kvsieve.tasks]\n{name} = {value}\n")

    monkeypatch.syspath_prepend(tmp_path)
    return install


def test_a_task_of_another_package_is_evaluated(task_package, cli, model_dir, tmp_path):
    task_package("hidden-word", "hidden_word_task:HiddenWord")
    listed = json.loads(cli("tasks", "--json")[1])
    assert {"name": "hidden-word", "title": "A word in a text", "question": "visible or hidden"} in listed
    grid = ["--tasks", "hidden-word", "--lengths", 60, "--samples", 2, "--methods", "knorm", "--cost-samples", 0]
    code, out, err = cli("eval", model_dir, *grid, "--budgets", "20%", "--out", tmp_path / "out", "--json")
    assert code == 0, err
    assert {(cell["task"], cell["n"]) for cell in json.loads(out)["cells"]} == {("hidden-word", 2)}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("hidden-word", "not_there:HiddenWord", "not_there:HiddenWord raises ModuleNotFoundError"),
        ("hidden-word", "hidden_word_task:other", "hidden_word_task:other returns a task named 'another'"),
        ("hidden-word", "hidden_word_task:nothing", "hidden_word_task:nothing returns .*, expected a task with name"),
        ("needle", "hidden_word_task:needle", "kvsieve has a task of that name"),
    ],
)
def test_a_task_that_cannot_be_used_is_left_out_with_a_warning(task_package, name, value, why):
    known = list(all_tasks())
    task_package(name, value)
    with pytest.warns(KvsieveWarning, match=f"the task '{name}' of the package 'hidden-word' is left out: {why}"):
        assert list(all_tasks()) == known
