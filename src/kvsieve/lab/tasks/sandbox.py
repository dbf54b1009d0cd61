"""Code that a model wrote, run in a process of its own with limits on time, memory, files and network."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from kvsieve.errors import InputError

SECONDS = 2
MEMORY = 512 * 2**20
# Modules that the code may import; nothing else can be opened once it runs.
MODULES = ("bisect", "collections", "functools", "heapq", "itertools", "math", "re", "string")

# The program of the process. It limits itself before it compiles the code; the hook cannot be removed. Results are
# written to the descriptor that was the process's output, the code's own output is dropped.
_CHILD = r"""
import io, json, os, resource, sys
job = json.loads(sys.stdin.read())
out = os.dup(1)
for name in job["modules"]:
    __import__(name)
try:
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
except (AttributeError, OSError):
    pass
for limit, most in (
    (resource.RLIMIT_CPU, job["seconds"]), (resource.RLIMIT_AS, job["memory"]), (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_NOFILE, 16),
):
    resource.setrlimit(limit, (most, most))
ALLOWED = {"compile", "exec", "object", "code", "sys", "builtins", "array", "marshal", "time"}
def refuse(event, arguments):
    if event.partition(".")[0] not in ALLOWED:
        raise PermissionError(f"{event} is not allowed here")
    if event in ("sys.addaudithook", "sys.setprofile", "sys.settrace", "sys._current_frames"):
        raise PermissionError(f"{event} is not allowed here")
sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), io.StringIO()
sys.argv = ["code"]
write, dumps = os.write, json.dumps
sys.addaudithook(refuse)
results = []
try:
    names = {"__name__": "code"}
    exec(compile(job["code"], "code", "exec"), names)
    for arguments in job["calls"]:
        try:
            results.append({"value": names[job["function"]](*arguments)})
        except Exception as error:
            results.append({"error": type(error).__name__})
except BaseException as error:
    results = [{"error": type(error).__name__}] * len(job["calls"])
try:
    text = dumps(results)
except Exception as error:
    text = dumps([{"error": type(error).__name__}] * len(job["calls"]))
write(out, text.encode())
os._exit(0)
"""


def check_sandbox(task: str) -> None:
    """Raise InputError on systems without limits for a process."""
    if importlib.util.find_spec("resource") is None:
        raise InputError(
            f"{task} runs code that models write, under limits that this system does not have; run it on Linux or "
            "macOS, or leave it out of --tasks"
        )


def results_of(
    code: str, function: str, calls: Sequence[Sequence[Any]], *, seconds: int = SECONDS, memory: int = MEMORY
) -> list[Any]:
    """Return the results of calls of a function, None for a call that failed; the code runs in another process.

    The process has `seconds` of CPU time and `memory` bytes, can write no file, start no process, open no file or
    socket and import `MODULES` only. This stops mistakes of a model; it is no wall against an attacker.

    Args:
        code: Python source that defines `function`.
        function: name of the function.
        calls: arguments of each call, JSON-ready.
        seconds: CPU time; the wall time is at most 5 s longer.
        memory: bytes of address space.
    """
    job = {"code": code, "function": function, "calls": list(map(list, calls)), "seconds": seconds}
    text = json.dumps({**job, "memory": memory, "modules": MODULES})
    failed = [None] * len(calls)
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _CHILD],
                input=text.encode("utf-8", "replace"),
                capture_output=True,
                timeout=seconds + 5,
                cwd=folder,
                env={},
                check=False,
            )
            results = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, ValueError):
            return failed
    if not isinstance(results, list) or len(results) != len(calls):
        return failed
    return [result.get("value") if isinstance(result, dict) else None for result in results]
