"""What is loaded when: the command line answers at once, and names of the package are loaded when they are used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

import kvsieve

pytestmark = pytest.mark.slow

HEAVY = ("torch", "transformers", "numpy", "matplotlib")


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        # A shell's background jobs, such as this process, may ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_importing_loads_neither_torch_nor_transformers_and_names_come_on_demand():
    program = f"""
import sys
import kvsieve
from kvsieve.cli.main import app
heavy = [name for name in {HEAVY} if name in sys.modules]
assert not heavy, heavy
assert set(kvsieve.__all__) <= set(dir(kvsieve))
assert "snapkv" in kvsieve.list_methods() and kvsieve.method_info("h2o").name == "h2o"
for name in kvsieve.list_methods():
    kvsieve.plan(name, **kvsieve.method_info(name).example)
assert not [name for name in {HEAVY} if name in sys.modules]
from kvsieve.core import scoring, selection
assert selection.top_mask(selection.torch.tensor([[[1.0, 3.0, 2.0]]]), (1,)).tolist() == [[[False, True, False]]]
torch = sys.modules["torch"]
assert (scoring.torch, scoring.Tensor, scoring.F) == (torch, torch.Tensor, torch.nn.functional)
assert "transformers" not in sys.modules and "torch._dynamo" not in sys.modules
assert kvsieve.methods.SnapKV is sys.modules["kvsieve.methods.snapkv"].SnapKV
assert kvsieve.models.load_demo.__module__ == "kvsieve.models.demo"
assert "torch._dynamo" not in sys.modules
assert callable(kvsieve.attach) and kvsieve.hf.attach.attach is kvsieve.attach
"""
    ran = python("-c", program)
    assert ran.returncode == 0, ran.stderr


def test_a_method_is_found_though_nothing_but_the_registry_was_imported():
    ran = python("-c", "from kvsieve.planning.registry import method_info; print(method_info('snap-kv').name)")
    assert (ran.returncode, ran.stdout) == (0, "snapkv\n"), ran.stderr


def test_all_names_are_there_and_wrong_ones_are_not():
    assert all(getattr(kvsieve, name) is not None for name in kvsieve.__all__)
    assert kvsieve.planning.plans.Plan is kvsieve.Plan
    for name in ("nothing", "_hidden", "__wrapped__"):
        assert not hasattr(kvsieve, name)
    with pytest.raises(AttributeError, match="module 'kvsieve' has no attribute 'nothing'"):
        kvsieve.nothing  # noqa: B018


def test_help_of_every_command_and_the_version_load_nothing_heavy():
    # One process for all; it has to be another one than this, which has loaded torch already.
    program = f"""
import contextlib, io, sys
import typer.main
from kvsieve.cli.main import app, run_cli
commands = [[name] for name in typer.main.get_command(app).commands]
assert ["calibrate"] in commands and ["run"] in commands
for arguments in [["--version"], ["--help"], [], *([*each, "--help"] for each in commands)]:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            run_cli(arguments)
    except SystemExit as leaving:
        assert leaving.code == 0, arguments
    assert ("kvsieve {kvsieve.__version__}\\n" == printed.getvalue()) == (arguments == ["--version"]), arguments
    assert ("Usage" in printed.getvalue()) == (arguments != ["--version"]), arguments
    heavy = [name for name in {HEAVY} if name in sys.modules]
    assert not heavy, (arguments, heavy)
"""
    ran = python("-c", program)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_python_m_kvsieve_is_the_command():
    ran = python("-m", "kvsieve", "--version")
    assert (ran.returncode, ran.stdout) == (0, f"kvsieve {kvsieve.__version__}\n"), ran.stderr
    ran = python("-m", "kvsieve", "--no-such-option")
    assert ran.returncode == 2 and "no-such-option" in ran.stderr


def test_tab_completes_commands_and_options():
    def completed(words: str, at: int) -> list[str]:
        ran = python(
            "-m", "kvsieve", _KVSIEVE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(at), COMP_LINE=words
        )
        return ran.stdout.split()

    assert completed("kvsieve cal", 1) == ["calibrate"]
    assert completed("kvsieve run --prompt-f", 2) == ["--prompt-file"]
    assert "--install-completion" in python("-m", "kvsieve", "--help", COLUMNS="120").stdout


# Of Llama 3.2 1B.
SHAPE = {
    **{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
}

# Arguments, and what the one line says that they are refused with: what was got, and what to write.
REFUSED = {
    "a method": (["run", "--prompt", "w1", "--method", "snapvk"], "did you mean 'snapkv'?"),
    "a compared method": (["run", "--prompt", "w1", "--compare", "full,fastvk"], "did you mean 'fastkv'?"),
    "a parameter": (["chat", "--set", "kernle=3"], "has no parameter 'kernle'"),
    "a parameter's kind": (
        ["run", "--prompt", "w1", "--method", "snapkv:window=abc"],
        "snapkv: window must be a whole number, got 'abc'",
    ),
    "a parameter's range": (["chat", "--method", "snapkv:window=0"], "window must be a whole number of at least 1"),
    "a parameter's word": (["serve", "--method", "snapkv:pooling=mean"], "one of 'avg', 'max', got 'mean'"),
    "a parameter's share": (["eval", "--out", "x", "--methods", "fastkv:tsp_rate=0%"], "must lie in (0, 1]"),
    "parameters that do not go together": (["run", "--prompt", "w1", "--method", "xattention:block=48"], "multiple of"),
    "a set value": (["chat", "--method", "snapkv", "--set", "kernel=4"], "an odd whole number from 1"),
    "a wrapped method": (["estimate", "--method", "chunkkv:base=snapvk"], "did you mean 'snapkv'?"),
    "layers": (["run", "--prompt", "w1", "--method", "snapkv:skip_layers=first"], "skip_layers must be a number"),
    "a switch": (["run", "--prompt", "w1", "--method", "snapkv:paper=2"], "paper must be True or False"),
    "a floor": (["run", "--prompt", "w1", "--method", "snapkv:floor=-1"], "floor must be a whole number"),
    "a profile": (["run", "--prompt", "w1", "--method", "snapkv", "--profile", "nowhere.json"], "nowhere.json"),
    "a compared method's profile": (
        ["run", "--prompt", "w1", "--compare", "snapkv", "--profile", "no.json"],
        "no.json",
    ),
    "an allowed method": (["serve", "--allow", "full,snapkv:window=x"], "snapkv: window must be"),
    "a benched method": (["bench", "--methods", "snapkv:budget=0%"], "must lie in (0, 1]"),
    "an advised method": (["advise", "--methods", "snapkv:window=x"], "snapkv: window must be"),
    "an asked method": (
        ["ask", "report.txt", "--question", "w1", "--methods", "full,snapkv:window=x"],
        "snapkv: window",
    ),
    "a codec": (["serve", "--codec", "kivy"], "did you mean 'kivi'?"),
    "a codec that is none": (["run", "--prompt", "w1", "--codec", "snapkv"], "snapkv is no codec"),
    "a codec's parameter": (["run", "--prompt", "w1", "--codec", "kivi:bits=5"], "bits"),
    "a rest": (["chat", "--method", "snapkv", "--rest", "9bit"], "bits"),
    "a sparse prefill": (["bench", "--prefill", "xatention"], "did you mean 'xattention'?"),
    "a prefill's parameter": (["chat", "--prefill", "xattention:threshold=2"], "threshold must be above 0"),
    "a budget": (["run", "--prompt", "w1", "--budget", "ten"], "neither a share like '20%'"),
    "a share": (["run", "--prompt", "w1", "--budget", "150%"], "must lie in (0, 1]"),
    "a budget below the window": (["chat", "--method", "snapkv:window=32", "--budget", "5"], "at least 33 are needed"),
    "an evaluated budget": (["eval", "--out", "x", "--budgets", "10%,0%"], "must lie in (0, 1]"),
    "a budget of memory": (["run", "--prompt", "w1", "--budget", "2GX"], "unknown unit 'GX'"),
    "a calibrated budget": (["calibrate", "--budget", "0"], "at least 1 entry"),
    "a length": (["eval", "--out", "x", "--lengths", "two"], "--lengths takes tokens"),
    "a benched length": (["bench", "--lengths", "8q"], "--lengths takes tokens"),
    "a context": (["advise", "--context", "0"], "--context takes"),
    "a measured length": (["advise", "--context", "4k", "--measure-at", "8k"], "is more than --context 4096"),
    "a chunk": (["chat", "--chunk", "much"], "expected tokens such as 7500 or 8k"),
    "no samples": (["advise", "--samples", "1"], "--samples must be at least 2, got 1"),
    "a question mode": (["advise", "--question", "seen"], "must be visible or hidden, got 'seen'"),
    "a loss": (["advise", "--loss", "-1"], "--loss must be more than 0, got -1"),
    "a time": (["advise", "--tpot", "50"], "--tpot takes a time per token with its unit"),
    "a limit of memory": (["run", "--prompt", "w1", "--memory", "2"], "write 2GiB or 2MiB"),
    "a store beside it": (["chat", "--memory", "2GiB", "--store", "x"], "--memory does not count what --store holds"),
    "memory without a unit": (["advise", "--memory", "2"], "write 2GiB or 2MiB"),
    "a server's memory": (["serve", "--kv-memory", "4"], "write 4GiB or 4MiB"),
    "a server's store": (["serve", "--store-memory", "4"], "write 4GiB or 4MiB"),
    "a port": (["serve", "--port", "70000"], "--port must be from 0 to 65535, got 70000"),
    "an open address": (["serve", "--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines ask"),
    "an origin": (["serve", "--allow-origin", "page.example"], "--allow-origin 'page.example' is no origin"),
    "missing keys": (["serve", "--api-keys", "nowhere.txt"], "--api-keys 'nowhere.txt' cannot be read"),
    "seconds": (["serve", "--seconds", "nan"], "--seconds must be more than 0, got nan"),
    "a dtype": (["estimate", "--dtype", "int4"], "--dtype must be one of"),
    "a short dtype": (["chat", "--dtype", "bf16"], "got 'bf16'; did you mean 'bfloat16'?"),
    "an engine": (["run", "--prompt", "w1", "--decode", "quick"], "--decode must be one of"),
    "a draft's parameter": (["run", "--prompt", "w1", "--draft", "lookup:token=8"], "lookup has no parameter 'token'"),
    "a draft's tokens": (["run", "--prompt", "w1", "--draft", "lookup:tokens=0"], "a whole number from 1 to"),
    "a draft's view": (["chat", "--draft", "self:snapvk"], "did you mean 'snapkv'?"),
    "a draft model": (["run", "--prompt", "w1", "--draft", "./nowhere"], "'./nowhere' is not a directory"),
    "a draft model's memory": (
        ["chat", "--memory", "2GiB", "--draft", "demo"],
        "does not count what --draft demo stores",
    ),
    "a temperature": (["chat", "--temperature", "-1"], "--temperature must be 0 (greedy) or a positive number, got -1"),
    "a seed for nothing": (["chat", "--seed", "3"], "--seed is for sampling, and answers are greedy here"),
    "a protected span": (["chat", "--protect", "9:3"], "a span of tokens such as 0:40, got '9:3'"),
    "a protected role": (["run", "--prompt", "w1", "--protect", "sytem"], "got 'sytem'"),
    "protection of nothing": (["chat", "--protect", "system"], "needs a system prompt"),
    "a task": (["eval", "--out", "x", "--tasks", "neddle"], "did you mean 'needle'"),
    "a score": (["eval", "--out", "x", "--task", "rows.jsonl", "--score", "f2"], "did you mean 'f1'?"),
    "a haystack": (["eval", "--out", "x", "--haystack", "nowhere"], "nowhere"),
    "a part": (["calibrate", "--parts", "poling"], "did you mean 'pooling'?"),
    "a rule": (["calibrate", "--rule", "best"], "rule must be one of settled, argmin, got 'best'"),
    "a server": (["bench", "--server", "127.0.0.1:8000"], "--server is a URL such as http://127.0.0.1:8000"),
    "clients": (["eval", "--out", "x", "--server", "http://x", "--clients", "many"], "got 'many'"),
    "more of a request": (["eval", "--out", "x", "--server", "http://x", "--extra", "{"], "--extra is a JSON object"),
    "a press": (["bench", "--peer-python", "python3", "--peer-methods", "snapvk"], "got 'snapvk'"),
    "formats": (["report", ".", "--formats", "jpg"], "got jpg"),
    "a missing prompt": (["run", "--prompt-file", "nowhere.txt"], "No such file"),
    "a missing chat": (["chat", "--load", "nowhere.kv"], "No such file"),
    "what is no chat": (["chat", "--load", "report.txt"], "is no chat that kvsieve saved"),
    "a file to keep": (["chat", "--save", "report.txt"], "--force to replace it"),
    "a store that is a file": (["chat", "--store", "report.txt"], "--store 'report.txt' is a file; name a directory"),
    "results in a file": (["eval", "--out", "report.txt"], "--out 'report.txt' is a file; name a directory"),
    "a report nowhere": (["bench", "--out", "report.txt/a/b.json"], "there is no directory"),
    "a page nowhere": (["run", "--prompt", "w1", "--show", "no/kept.html"], "there is no directory"),
    "a table nowhere": (["ask", "report.txt", "--question", "w1", "--csv", "no/a.csv"], "there is no directory"),
    "a picture nowhere": (["advise", "--plot", "no/a.png"], "there is no directory"),
    "a profile nowhere": (["calibrate", "--out", "no/a.json"], "there is no directory"),
    "a missing text": (["calibrate", "--text", "nowhere.txt"], "cannot read the text"),
    "a missing task": (["advise", "--task", "nowhere.txt"], "is no file"),
    "too few questions": (["advise", "--task", "rows.jsonl"], "too few questions to choose a plan"),
    "too few samples": (["advise", "--samples", "1"], "--samples must be at least 2"),
    "missing results": (["report", "nowhere"], "is not a directory"),
    "a missing store": (["store", "ls", "nowhere"], "there is no store"),
    "a key": (["store", "rm", ".", "first"], "got 'first'"),
    "a missing export": (["store", "import", "prefixes", "nowhere.tar"], "there is no file 'nowhere.tar'"),
    "a document": (["ask", "nowhere.txt", "--question", "w1"], "nowhere.txt"),
    "a missing model": (["run", "./nowhere", "--prompt", "w1"], "is not a directory"),
    "a model elsewhere": (["doctor", "owner/name"], "HF_HUB_OFFLINE is set; name a checkpoint's directory"),
    "an estimate's method": (["estimate", "--method", "snapvk"], "did you mean 'snapkv'?"),
    "an estimate's context": (["estimate", "--context", "lots"], "--context takes tokens"),
    "a text as the model": (["run", "report.txt"], "'report.txt' was taken as the model: did you mean --prompt-file"),
    "a text to talk about": (["chat", "report.txt"], "did you mean --file report.txt?"),
    "a text to serve": (["serve", "report.txt"], "'report.txt' was taken as the model; it is a file and no checkpoint"),
    **{
        f"a device of {name}": ([name, *more, "--device", "gpu"], "got 'gpu'; did you mean 'cuda'?")
        for name, more in {
            "run": ("--prompt", "w1"),
            "chat": (),
            "serve": (),
            "ask": ("report.txt", "--question", "w1"),
            "eval": ("--out", "x"),
            "bench": (),
            "advise": (),
            "calibrate": (),
        }.items()
    },
}


def test_what_is_refused_or_looked_up_imports_no_torch(tmp_path):
    # One process for all; it has to be another one than this, which has loaded torch already.
    (tmp_path / "report.txt").write_text("w1 w2")
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "rows.jsonl").write_text('{"context": "w1", "question": "w2", "answer": "w3"}\n')
    program = f"""
import contextlib, io, sys
from kvsieve.cli.main import run_cli
def run(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_cli(arguments)
        except SystemExit as leaving:
            code = leaving.code
    assert not {{"torch", "transformers"}} & set(sys.modules), arguments
    return code, out.getvalue(), err.getvalue()
for what, (arguments, message) in {REFUSED!r}.items():
    code, out, err = run(*arguments)
    assert code in (1, 2) and message in err and err.count("\\n") == 1, (what, code, out, err)
looked_up = [["methods"], ["methods", "--json"], ["tasks"], ["tasks", "--json"]]
for arguments in [*looked_up, ["estimate", "shape"], ["estimate", "shape", "--memory", "80GiB", "--json"]]:
    code, out, err = run(*arguments)
    assert code == 0 and not err and ("snapkv" in out or "needle" in out), (arguments, err)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_models_prints_its_table_without_torch_where_transformers_is_the_tables():
    program = """
import json, sys
from importlib import metadata
from kvsieve.cli import models_table
if models_table.shipped_rows(metadata.version("transformers")) is not None:
    from kvsieve.cli.main import run_cli
    try:
        run_cli(["models", "--json"])
    finally:
        assert not {"torch", "transformers"} & set(sys.modules)
"""
    ran = python("-c", program)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("at", ["kvsieve.errors", "kvsieve.planning.loading", "kvsieve.cli.main", "typer"])
@pytest.mark.parametrize("how", ["python -m kvsieve", "kvsieve"])
def test_an_interrupt_while_the_command_is_imported_is_quiet(at, how, tmp_path):
    """As long as Python has not yet begun with the package, it prints its own traceback."""
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
""")
    script = tmp_path / "kvsieve"
    script.write_text("from kvsieve.__main__ import main\nmain()\n")
    command = ["-m", "kvsieve"] if how == "python -m kvsieve" else [str(script)]
    places = os.pathsep.join([str(tmp_path), os.path.dirname(os.path.dirname(kvsieve.__file__))])
    ran = python(*command, "--version", PYTHONPATH=places)
    # A shell has 130 of a process that the signal ended, too.
    assert ran.returncode in (130, -signal.SIGINT) and ran.stdout == "", ran.stdout
    assert ran.stderr in ("", "interrupted\n")


def test_other_programs_keep_their_interrupts():
    program = "import signal, kvsieve; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    assert python("-c", program).returncode == 0
