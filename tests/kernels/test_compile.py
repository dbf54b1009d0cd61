"""Kernels compile for GPUs that are not here: the interpreter takes what the compiler refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

KERNELS = {
    "blocks_kernel",
    "channels_kernel",
    "entries_kernel",
    "split_kernel",
    "merge_kernel",
    "norm_kernel",
    "mass_kernel",
    "pool_kernel",
    "packed_kernel",
    "planes_kernel",
    "paged_kernel",
    "paged_choice_kernel",
    "scores_kernel",
    "update_kernel",
}
# Bytes of shared memory that a program may have.
MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
# Llama 3.1 on an H200; odd sizes, more heads and other types on older ones, each of which takes half of the launches.
TARGETS = ("90,,bfloat16,4,128,128", "89,0,float16,1,80,96", "80,1,float32,3,64,64")


def test_every_kernel_compiles_and_reads_wide():
    # Triton's own cache spares those that have not changed since an earlier run.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "compile_all.py"), *TARGETS],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    launches = {}
    for target in TARGETS:
        capability = int(target.partition(",")[0])
        mine = [line for line in lines if line["capability"] == capability]
        assert {line["name"] for line in mine} == KERNELS
        assert all(line["shared"] <= MEMORY[capability] for line in mine)
        launches[capability] = {(line["name"], line["launch"]) for line in mine}
    assert launches[89] | launches[80] == launches[90]
    # On an H200 keys, values and tables come in pieces of 16 bytes, not one number at a time.
    large = {"blocks_kernel", "split_kernel", "norm_kernel", "mass_kernel", "paged_kernel", "scores_kernel"}
    assert all(line["wide"] for line in lines if line["capability"] == 90 and line["name"] in large)
