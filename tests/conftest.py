"""What all tests share: threads, garbage, and the real model."""

from __future__ import annotations

import gc
import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two processes of two threads each on two cores slow each other tenfold. Subprocesses inherit this.
    os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

import surroundings
from kvsieve.planning import budget

surroundings.settle()
# Prompts of tests are short, and shares of them are to evict; tests/test_floor.py goes by the floor that users have.
USUAL_FLOOR, budget.FLOOR = budget.FLOOR, 0

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="every test once, with its first parameters; none marked slow"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under --quick, leave one case of each test, and none that is marked slow."""
    if not config.getoption("--quick"):
        return
    chosen: dict[str, pytest.Item] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            chosen.setdefault(item.nodeid.partition("[")[0], item)
    config.hook.pytest_deselected(
        items=[item for item in items if chosen.get(item.nodeid.partition("[")[0]) is not item]
    )
    items[:] = list(chosen.values())


@pytest.fixture(scope="module", autouse=True)
def frozen_garbage():
    """Keep the collector from looking at imports and collected tests again and again.

    `generate` collects garbage to measure memory, which would take most of a second each time. What lives here lives
    to the session's end, so it is never handed back: the next module's collection would look at all of it once more.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter free at its end what `frozen_garbage` froze."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory():
    """What kvsieve takes from torch without filling it is NaN in tests; reading it before it is written then shows."""
    from poison import poison

    with poison():
        yield


@pytest.fixture
def usual_floor(monkeypatch) -> int:
    """Make plans by name with the floor that users have, which tests otherwise do without."""
    monkeypatch.setattr(budget, "FLOOR", USUAL_FLOOR)
    return USUAL_FLOOR


@pytest.fixture(scope="session")
def model():
    """A tiny random Llama in float64, which tests leave as it is; see tiny.tiny_model for others."""
    from tiny import tiny_model

    return tiny_model()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> str:
    """A checkpoint of a tiny random model whose tokens are words; what must differ a file makes itself."""
    from tiny_models import build
    from toy_words import word_tokenizer

    folder = tmp_path_factory.mktemp("llama")
    build("llama").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def cli(capsys, monkeypatch):
    """Run the command line in this process: (exit code, stdout, stderr)."""
    from kvsieve.cli.main import run_cli

    # Where there is no compiler the first test of a process would be warned of it, and no other.
    monkeypatch.setattr("kvsieve.kernels.cpu.build._reasons", ["in tests"])

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            run_cli([str(each) for each in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return left.value.code, captured.out, captured.err

    return call


@pytest.fixture
def real_model_in_float32(monkeypatch) -> None:
    """Load the demo model in float32, whose answers do not depend on the processor and which none of them emulates."""
    import kvsieve.models
    from kvsieve.models import demo

    load = demo.load_demo
    for module in (demo, kvsieve.models):
        monkeypatch.setattr(module, "load_demo", lambda *given: load(torch.float32))
