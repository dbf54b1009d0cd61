"""Linear layers of kvsieve's blocks beside those of torchao on a CPU: milliseconds per product.

    pip install torchao && python benchmarks/kernels/torchao_linear.py [--out benchmarks/results/torchao.json]

Each product reads another weight, of so many that no cache holds them. Errors are relative to the bfloat16 weight's
output. torchao is compiled by torch.compile where its documentation asks for that ("compiled").
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvsieve.kernels.cpu.quantized import QuantizedMatrix
from kvsieve.models.packed.blocks import pack
from kvsieve.models.quantized import QuantizedLinear
from kvsieve.report.environment import environment, write_result
from kvsieve.report.tables import markdown_table

# Outputs and inputs: the MLP of Qwen2.5 0.5B.
SHAPES = ((4864, 896), (896, 4864))
ROWS = (1, 512)
WEIGHTS = 10
ROUNDS = 9
RESULTS = Path(__file__).parents[1] / "results" / "torchao.json"
Layers = list[nn.Module]


def in_blocks(kind: str) -> Callable[[Layers], Layers]:
    def convert(layers: Layers) -> Layers:
        weights = [layer.weight.detach() for layer in layers]
        return [QuantizedLinear(QuantizedMatrix(pack(w, kind), kind), None, torch.bfloat16) for w in weights]

    return convert


def by_torchao(config: Any) -> Callable[[Layers], Layers]:
    from torchao.quantization import quantize_

    def convert(layers: Layers) -> Layers:
        layers = copy.deepcopy(layers)
        for layer in layers:
            quantize_(nn.Sequential(layer), config)
        return layers

    return convert


def variants(inner: int) -> dict[str, tuple[Callable[[Layers], Layers], bool]]:
    """Return by name what converts layers, and whether they are compiled."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    four = "Q4_K" if inner % 256 == 0 else "Q5_0"
    int8, int4 = Int8WeightOnlyConfig(), PrototypeInt4WeightOnlyConfig(group_size=32)
    return {
        "torch bfloat16": (list, False),
        "kvsieve Q8_0": (in_blocks("Q8_0"), False),
        f"kvsieve {four}": (in_blocks(four), False),
        "torchao int8": (by_torchao(int8), False),
        "torchao int8, compiled": (by_torchao(int8), True),
        "torchao int8, dynamic int8 inputs, compiled": (by_torchao(Int8DynamicActivationInt8WeightConfig()), True),
        "torchao int4 in groups of 32": (by_torchao(int4), False),
        "torchao int4 in groups of 32, compiled": (by_torchao(int4), True),
    }


def products(layers: Layers, given: Tensor) -> list[Tensor]:
    return [layer(given) for layer in layers]


def measure(width: int, inner: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    plain: Layers = [nn.Linear(inner, width, bias=False, dtype=torch.bfloat16).eval() for _ in range(WEIGHTS)]
    found: list[dict[str, Any]] = []
    inputs = {rows: torch.randn(rows, inner, dtype=torch.bfloat16) for rows in ROWS}
    runs: dict[tuple[str, int], Callable[[], list[Tensor]]] = {}
    for name, (convert, compiled) in variants(inner).items():
        torch.compiler.reset()
        for rows, given in inputs.items():
            row = {"layer": name, "width": width, "inner": inner, "rows": rows}
            try:
                run = torch.compile(products) if compiled else products
                layers = convert(plain)
                output = run(layers, given)[0].float()
            except Exception as error:
                found.append(row | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]})
                continue
            expected = plain[0](given).float()
            found.append(row | {"deviation": ((output - expected).norm() / expected.norm()).item()})
            runs[name, rows] = lambda run=run, layers=layers, given=given: run(layers, given)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for _ in range(ROUNDS):
        for key, run in runs.items():
            begun = time.perf_counter()
            run()
            times[key].append((time.perf_counter() - begun) / WEIGHTS * 1e3)
    for row in found:
        if measured := times.get((row["layer"], row["rows"])):
            row |= {"ms": statistics.median(measured), "fastest_ms": min(measured)}
    return found


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    try:
        import torchao
    except ImportError:
        sys.exit(
            "this compares with torchao, which is not installed: pip install torchao, beside the torch that is here"
        )
    warnings.filterwarnings("ignore")
    with torch.inference_mode():
        rows = [row for shape in SHAPES for row in measure(*shape)]
    headers = ["layer", "width", "inner", "rows", "ms", "fastest_ms", "deviation", "error"]
    print(markdown_table(headers, [[_cell(row.get(name, "")) for name in headers] for row in rows]))
    write_result(arguments.out, {"environment": environment() | {"torchao": torchao.__version__}, "rows": rows})


if __name__ == "__main__":
    main()
