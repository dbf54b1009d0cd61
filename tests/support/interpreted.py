"""Kernels on CPU tensors, under Triton's interpreter; `benchmarks/kernels/gpu_kernels.py --check` takes it too."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from kvsieve import kernels


@contextmanager
def interpreted() -> Iterator[None]:
    """Run kernels on CPU tensors; `kernels.usable` accepts them.

    Triton decides when a kernel is defined, so this process must not have used one on a GPU. If torch has imported
    Triton's own library, that is jitted, and its product of bfloat16 multiplies their bits (3.7); both are replaced.

    Raises:
        RuntimeError: kernels were made for a GPU in this process.
    """
    product = InterpreterBuilder.create_dot
    jitted = {name: each for name, each in vars(tl.standard).items() if isinstance(each, triton.JITFunction)}
    before = kernels._interpreted
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        modules = [importlib.import_module(f"kvsieve.kernels.{name}") for name in set(kernels._FUNCTIONS.values())]
        if any(isinstance(each, triton.JITFunction) for module in modules for each in vars(module).values()):
            raise RuntimeError("kernels were made for a GPU in this process before: interpret them in a new one")
        try:
            kernels._interpreted = True
            for name, each in jitted.items():
                _replace(name, InterpretedFunction(each.fn))
            InterpreterBuilder.create_dot = lambda self, a, b, *rest: product(
                self, _wide(self, a), _wide(self, b), *rest
            )
            yield
        finally:
            kernels._interpreted = before
            InterpreterBuilder.create_dot = product
            for name, each in jitted.items():
                _replace(name, each)


def _replace(name: str, function: object) -> None:
    for module in (tl, tl.standard):
        if hasattr(module, name):
            setattr(module, name, function)


def _wide(builder: Any, part: Any) -> Any:
    return builder.cast_impl(part, tl.float32) if part.dtype.scalar == tl.bfloat16 else part
