"""The `kvsieve` command: its subcommands, and the handling of errors."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from kvsieve.cli import (
    advise,
    ask,
    bench,
    calibrate,
    chat,
    demo,
    estimate,
    evaluate,
    info,
    methods_table,
    models_table,
    report,
    run,
    serve,
)
from kvsieve.cli.options import examples
from kvsieve.cli.output import one_line, printed_warnings
from kvsieve.cli.store import store_app
from kvsieve.errors import InputError, KvsieveError, PlanError, short
from kvsieve.version import __version__

app = typer.Typer(
    help="Long-context inference at less cost: less prefill compute, a smaller KV cache, answers that stay right.",
    epilog=examples("demo", 'run --prompt-file report.txt --question "Who signed?" --compare full'),
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Panels of commands.
_USE = "Use"
_MEASURE = "Measure"
_LOOK_UP = "Look up"
# Exit code of a command that Ctrl-C ended.
_INTERRUPTED = 130
# Of typer's error for `--model`, an option of `kvsieve ask` only.
_NO_MODEL = "No such option: --model"
# Of torch's error, a RuntimeError, where a CPU's memory is full.
_FULL = "can't allocate memory"


def _add(panel: str, name: str, command: Callable[..., Any], *lines: str) -> None:
    app.command(name, rich_help_panel=panel, epilog=examples(*lines))(command)


_add(
    *(_USE, "ask", ask.ask_command),
    'ask report.pdf --question "What was decided?" --question "Who paid?"',
    "ask notes.md mail.txt --questions q.txt --methods full,snapkv:budget=20%",
)
_add(
    *(_USE, "run", run.run_command),
    'run --prompt-file report.txt --question "Who signed?" --compare full',
    "run Qwen/Qwen3-4B --prompts-file q.jsonl --method snapkv --budget 20%",
)
_add(
    *(_USE, "chat", chat.chat_command),
    "chat --file report.txt --method snapkv --budget 20%",
    "chat Qwen/Qwen3-4B --system 'Answer briefly.' --save chat.kv",
)
_add(
    *(_USE, "serve", serve.serve_command),
    "serve Qwen/Qwen3-4B --store prefixes --allow snapkv,rocketkv-mt",
    "serve --host 0.0.0.0 --api-keys keys.txt --kv-memory 4GiB",
)
_add(_USE, "demo", demo.demo_command, "demo", "demo --tokens 2000 --depth 0.9")
_add(
    *(_MEASURE, "bench", bench.bench_command),
    "bench --methods snapkv:budget=10%,fastkv:budget=10% --lengths 4k,8k",
    "bench MODEL --server http://127.0.0.1:8000 --clients 1,8",
)
_add(
    *(_MEASURE, "eval", evaluate.eval_command),
    "eval --tasks needle,ruler --methods snapkv,fastkv --budgets 20% --out results",
    "eval --tasks kv --lengths 2k,4k --samples 50 --out results --resume",
)
_add(_MEASURE, "report", report.report_command, "report results", "report results other --baseline snapkv --out both")
_add(
    *(_MEASURE, "advise", advise.advise_command),
    "advise Qwen/Qwen3-4B --context 16k --memory 300MiB",
    "advise --context 8k --loss 0.01 --task report.txt",
)
_add(
    *(_MEASURE, "calibrate", calibrate.calibrate_command),
    "calibrate Qwen/Qwen3-4B --quick",
    "calibrate --parts pooling,tsp --text report.txt --out profile.json",
)
_add(
    *(_MEASURE, "estimate", estimate.estimate_command),
    "estimate Qwen/Qwen3-4B --context 8k,128k --method full,snapkv:budget=10%",
    "estimate --context 32k --memory 80GiB --matmul-tflops 400 --bandwidth 3000",
)
_add(_LOOK_UP, "methods", methods_table.methods_command, "methods", "methods --json")
_add(_LOOK_UP, "models", models_table.models_command, "models", "models --json")
_add(_LOOK_UP, "tasks", evaluate.tasks_command, "tasks", "tasks --json")
_add(_LOOK_UP, "doctor", info.doctor_command, "doctor", "doctor Qwen/Qwen3-4B")
_add(_LOOK_UP, "fetch-demo", info.fetch_demo_command, "fetch-demo", "fetch-demo --json")
app.add_typer(store_app, name="store", rich_help_panel=_USE)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvsieve {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of errors, also after a command (or KVSIEVE_DEBUG=1)")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def run_cli(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 fine, 1 something failed, 2 bad input, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    wanted = [word for word in words if word != "--debug"]
    debug = len(wanted) < len(words) or os.environ.get("KVSIEVE_DEBUG", "") not in ("", "0")
    _complete_streams()
    with printed_warnings(debug):
        code = _run(wanted, debug)
    sys.exit(code)


def _complete_streams() -> None:
    """Open closed standard streams as the null device, and escape characters that the terminal's encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = vars(sys)[name]
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _check_text(arguments: Sequence[str]) -> None:
    """Raise InputError for an argument with characters that no file name can have."""
    for argument in arguments:
        try:
            bad = "a null character" if b"\0" in os.fsencode(argument) else ""
        except UnicodeEncodeError:
            bad = "half of a surrogate pair"
        if bad:
            raise InputError(f"the argument {short(argument)} has {bad} in it; leave it out")


def _run(arguments: list[str], debug: bool) -> int:
    try:
        _check_text(arguments)
        result = app(args=arguments, prog_name="kvsieve", standalone_mode=False)
        sys.stdout.flush()
        if result == _INTERRUPTED:  # as some releases of typer return it
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        return 1
    except Exception as error:
        return _report(error, "--json" in arguments, debug)
    finally:
        _give_up_output()


def _give_up_output() -> None:
    """Drop output that nobody reads, or that a full disk does not take; Python would complain of it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: Exception, as_json: bool, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    message, code = _describe(error)
    print(f"error: {message}", file=sys.stderr)
    if as_json:
        # In one line, since some commands print one for each answer.
        with contextlib.suppress(OSError):
            print(json.dumps({"error": message}))
    return code


def _describe(error: Exception) -> tuple[str, int]:
    if hasattr(error, "format_message"):  # typer's own; which class depends on typer's version
        message = one_line(error.format_message())
        hint = "; the model is an argument, as in `kvsieve chat MODEL`" if _NO_MODEL in message else ""
        return message + hint, getattr(error, "exit_code", 2)
    if isinstance(error, (PlanError, InputError)):
        return one_line(error), 2
    if isinstance(error, (KvsieveError, OSError)):
        return one_line(error), 1
    if isinstance(error, OverflowError):
        return f"a number that was given is too large to count with ({one_line(error)}); give a smaller one", 2
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or _FULL in str(error):
        return f"out of memory: {one_line(error)}; give a smaller --chunk or --batch, a codec, or a shorter prompt", 1
    return f"unexpected {type(error).__name__}: {one_line(error)} (--debug shows where)", 1


if __name__ == "__main__":
    run_cli()
