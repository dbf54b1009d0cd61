"""The `kvsieve` command: its subcommands, and what happens when one of them fails."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import kvsieve
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
    models_table,
    report,
    run,
    serve,
)
from kvsieve.cli.output import emit_json, one_line, printed_warnings
from kvsieve.cli.store import store_app
from kvsieve.errors import InputError, KvsieveError, PlanError, short

app = typer.Typer(
    help="Long-context inference at less cost: less prefill compute, a smaller KV cache, answers that stay right.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("ask")(ask.ask_command)
app.command("run")(run.run_command)
app.command("chat")(chat.chat_command)
app.command("serve")(serve.serve_command)
app.command("demo")(demo.demo_command)
app.command("bench")(bench.bench_command)
app.command("estimate")(estimate.estimate_command)
app.command("methods")(info.methods_command)
app.command("models")(models_table.models_command)
app.command("doctor")(info.doctor_command)
app.command("fetch-demo")(info.fetch_demo_command)
app.command("eval")(evaluate.eval_command)
app.command("advise")(advise.advise_command)
app.command("calibrate")(calibrate.calibrate_command)
app.command("tasks")(evaluate.tasks_command)
app.command("report")(report.report_command)
app.add_typer(store_app, name="store")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvsieve {kvsieve.__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere (or KVSIEVE_DEBUG=1).")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def run_cli(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 fine, 1 something failed, 2 bad input, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    wanted = [each for each in given if each != "--debug"]
    debug = len(wanted) < len(given) or os.environ.get("KVSIEVE_DEBUG", "") not in ("", "0")
    with printed_warnings(debug):
        code = _run(wanted, debug)
    sys.exit(code)


def _check_text(arguments: Sequence[str]) -> None:
    """Raise InputError for an argument that no system would pass on, and no file's name could be."""
    for each in arguments:
        try:
            bad = "a null character" if b"\0" in os.fsencode(each) else ""
        except UnicodeEncodeError:
            bad = "half of a surrogate pair"
        if bad:
            raise InputError(f"the argument {short(each)} has {bad} in it; leave it out")


def _run(arguments: list[str], debug: bool) -> int:
    try:
        _check_text(arguments)
        result = app(args=arguments, prog_name="kvsieve", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; without this Python would complain once more while it exits.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _report(error, "--json" in arguments, debug)


def _report(error: Exception, as_json: bool, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    message, code = _describe(error)
    print(f"error: {message}", file=sys.stderr)
    if as_json:
        emit_json({"error": message})
    return code


def _describe(error: Exception) -> tuple[str, int]:
    """One line for people, and the exit code."""
    if hasattr(error, "format_message"):  # typer's own; which class depends on typer's version
        return one_line(error.format_message()), getattr(error, "exit_code", 2)
    if isinstance(error, (PlanError, InputError)):
        return one_line(error), 2
    if isinstance(error, (KvsieveError, OSError)):
        return one_line(error), 1
    if isinstance(error, OverflowError):
        return f"a number that was given is too large to count with ({one_line(error)}); give a smaller one", 2
    return f"unexpected {type(error).__name__}: {one_line(error)} (--debug shows where)", 1


if __name__ == "__main__":
    run_cli()
