"""Methods of other packages: registered by entry point, known wherever kvsieve's own are, and never in the way."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

import kvsieve
from kvsieve import loading, registry
from kvsieve.cli.main import run_cli
from kvsieve.cli.specs import method_specs
from kvsieve.errors import KvsieveWarning, PlanError
from kvsieve.eval.cells import settings
from kvsieve.models.families import build

VNORM = '''
from dataclasses import dataclass

from kvsieve.budget import Budget
from kvsieve.methods.base import ScoredEvictor
from kvsieve.plans import Plan
from kvsieve.registry import register_method


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

    kvsieve.list_methods()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(loading, "_loaded", False)
    monkeypatch.setattr(loading, "REGISTERED", dict(loading.REGISTERED))
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
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
        ids = torch.randint(0, 100, (1, 40), generator=torch.Generator().manual_seed(0))
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
    for kind in ("os:system", "subprocess:Popen", "kvsieve.plans:Plan", "kvsieve.methods.snapkv:Budget", "nothing:at"):
        with pytest.raises(PlanError, match="not a role class"):
            kvsieve.Plan.from_dict({**data, "evict": {"type": kind}})


def test_every_plan_of_ours_is_read_back():
    for name in kvsieve.list_methods():
        info = kvsieve.method_info(name)
        plan = kvsieve.plan(name, **info.example)
        assert kvsieve.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan, name
