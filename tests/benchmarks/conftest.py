"""Tests of what is in benchmarks/; no others import it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
collect_ignore = [] if importlib.util.find_spec("triton") else ["test_gpu_kernels.py"]
