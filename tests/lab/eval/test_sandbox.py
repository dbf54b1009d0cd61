"""Code of models runs in a process of its own, and cannot do much there."""

from __future__ import annotations

import time

import pytest

from kvsieve.errors import InputError
from kvsieve.lab.tasks import sandbox
from kvsieve.lab.tasks.sandbox import check_sandbox, results_of


def ran(body: str, *calls, **limits):
    return results_of(f"def f(*x):\n{body}", "f", calls or [[]], **limits)


def test_calls_return_their_results():
    assert ran("    import math\n    return math.factorial(x[0])", [3], [5]) == [6, 120]
    assert ran("    return [1, {'a': None}]") == [[1, {"a": None}]]
    assert ran("    print('noise')\n    return 1 / x[0]", [0], [2]) == [None, 0.5]
    assert results_of("f = 1 +", "f", [[], []]) == [None, None]
    assert results_of("pass", "f", [[]]) == [None]


@pytest.mark.parametrize(
    "body",
    [
        "open('/etc/hostname').read()",
        "open('new', 'w').write('1')",
        "__import__('os').system('true')",
        "__import__('sys').modules['os'].system('true')",
        "__import__('sys').modules['os'].listdir('/')",
        "__import__('sys').modules['os'].remove('x')",
        "__import__('sys').modules['os'].fork()",
        "__import__('subprocess').run(['true'])",
        "__import__('socket').create_connection(('127.0.0.1', 80))",
        "__import__('ctypes')",
        "__import__('sys').modules['resource'].setrlimit(0, (1, 1))",
        "exit(3)",
        "object()",
    ],
)
def test_what_is_not_allowed_fails(body):
    assert ran(f"    r = {body}\n    return r if isinstance(r, int) else r") == [None]


def test_time_and_memory_end():
    began = time.monotonic()
    assert ran("    while True: pass", seconds=1) == [None]
    assert time.monotonic() - began < 6
    assert ran("    return len(bytearray(2 ** 31))") == [None]
    assert ran("    return f(*x)") == [None]


def test_the_wall_time_ends_too(monkeypatch):
    import subprocess

    real = subprocess.run
    monkeypatch.setattr(sandbox.subprocess, "run", lambda *a, timeout, **k: real(*a, timeout=0.5, **k))
    assert ran("    while True: pass", seconds=4) == [None]


def test_results_that_the_code_forges_do_not_count():
    forged = "    import sys\n    sys.modules['os'].write(1, b'[{\"value\": 7}]')\n    return 1"
    assert ran(forged) == [None]


def test_systems_without_limits_refuse(monkeypatch):
    monkeypatch.setattr(sandbox.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="codetests runs code that models write"):
        check_sandbox("codetests")
