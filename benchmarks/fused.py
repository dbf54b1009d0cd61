"""Time of prompts and per token with what `decode="fused"` replaces and without, taking turns in one process.

    python benchmarks/fused.py [MODEL] [--lengths 2048,7500] [--rounds 12] [--prompts 2048,7500]
        [--dtypes bfloat16,float32] [--out FILE]

A token is generated on the same cache in every way there is: `torch` replaces nothing; `operations` are the small
operations of layers in compiled calls; `fused` adds compiled products with weights; `narrow`, in float32, reads these
from copies in bfloat16, as "auto" does; `packed`, in bfloat16, is `fused` with weights that oneDNN has packed, which
take their memory again. Told are medians of rounds of four tokens, and of the ratios of what "auto" does to each of the
others within a round, of the clock and of the processor's time, which is the steadier one on a busy machine. Prompts,
three rounds, are read in full and, in bfloat16, sparsely.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import kvsieve
from kvsieve.bench.prompts import text_ids
from kvsieve.hf.compat import CACHE
from kvsieve.hf.decode.fused_modules import FusedModules
from kvsieve.hf.decode.linears import Linears
from kvsieve.kernels.cpu import products as kernel
from kvsieve.report.environment import environment

PLANS = {"full": kvsieve.plan("full"), "snapkv 10%": kvsieve.plan("snapkv", budget="10%", paper=True)}
TOKENS, WARM = 4, 1
OURS = {torch.bfloat16: "fused", torch.float32: "narrow"}


class Packed:
    """A weight as oneDNN wants it, a copy, in place of the kernel's."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias, self.width = bias, weight.shape[0]
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)


def multiply_packed(given: Tensor, packed: Packed) -> Tensor:
    """Stand in for the kernel."""
    return torch.ops.mkldnn._linear_pointwise.default(given, packed.weight, packed.bias, "none", [], "")


def with_packed() -> contextlib.ExitStack:
    """While it is open, products are those with packed weights."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(kernel, "Weight", Packed))
    stack.enter_context(mock.patch.object(kernel, "multiply", multiply_packed))
    return stack


class Ways:
    """The ways of computing a token: what each installs, and what is open while it computes."""

    def __init__(self, model: Any) -> None:
        decoder, output = model.get_decoder(), model.get_output_embeddings()
        operations = FusedModules(decoder)
        names = ("fused", "packed") if model.dtype == torch.bfloat16 else ("fused", "narrow")
        linears = {name: Linears(decoder, output, narrow=name == "narrow") for name in names}
        self.parts: dict[str, list[Any]] = {"torch": [], "operations": [operations]}
        self.parts |= {name: [operations, each] for name, each in linears.items()}
        self.around: dict[str, Callable[[], Any]] = dict.fromkeys(self.parts, contextlib.nullcontext)
        if "packed" in self.parts:
            self.around["packed"] = with_packed

    @contextlib.contextmanager
    def use(self, name: str) -> Any:
        """Have things as one of the ways has them."""
        with self.around[name]():
            for part in self.parts[name]:
                part.install()
            yield
        # Copies of weights stay, so that they are made once.
        for part in self.parts[name]:
            if isinstance(part, Linears):
                for layer in part.layers:
                    layer.__dict__.pop("forward", None)
            else:
                part.remove()


@torch.no_grad()
def measure(model: Any, plan: kvsieve.Plan, ids: Tensor, rounds: int, ways: Ways) -> dict[str, Any]:
    """Milliseconds per token of each way, and ratios of what "auto" does to the others."""
    mine = OURS[model.dtype]
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways.parts}
    with kvsieve.attach(model, plan, decode="eager") as sieve:
        cache, token = sieve.prefill(ids), ids[:, :1]
        for turn in range(rounds + 1):
            for name in ways.parts:
                with ways.use(name):
                    for _ in range(WARM):
                        model(token, **{CACHE: cache})
                    began = time.perf_counter(), time.process_time()
                    for _ in range(TOKENS):
                        model(token, **{CACHE: cache})
                    if turn:
                        spent[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    found: dict[str, Any] = {
        f"{name}_ms": round(1e3 * statistics.median(each[0] for each in times) / TOKENS, 2)
        for name, times in spent.items()
    }
    for at, kind in enumerate(("ratio", "processor_ratio")):
        for name, times in spent.items():
            if name != mine:
                ratios = [ours[at] / theirs[at] for ours, theirs in zip(spent[mine], times, strict=True)]
                found[f"{kind} to {name}"] = round(statistics.median(ratios), 3)
    return found


@torch.no_grad()
def read(model: Any, plan: kvsieve.Plan, ids: Tensor) -> dict[str, float]:
    """Seconds for a prompt, and the ratio within a round."""
    fused = FusedModules(model.get_decoder())
    spent: dict[str, list[float]] = {"torch": [], "fused": []}
    with kvsieve.attach(model, plan, decode="eager") as sieve:
        for turn in range(4):
            for name, switch in (("torch", fused.remove), ("fused", fused.install)):
                switch()
                began = time.perf_counter()
                sieve.prefill(ids)
                if turn:
                    spent[name].append(time.perf_counter() - began)
        fused.remove()
    ratios = [after / before for before, after in zip(spent["torch"], spent["fused"], strict=True)]
    medians = {f"{name}_s": round(statistics.median(each), 2) for name, each in spent.items()}
    return {**medians, "ratio": round(statistics.median(ratios), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--lengths", default="2048,7500", help="of the KV that tokens are generated behind")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--prompts", default="2048,7500", help="lengths of prompts whose time is told; empty for none")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fused.json")
    given = parser.parse_args()
    report: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    for kind in given.dtypes.split(","):
        model, tokenizer = kvsieve.models.load(given.model, getattr(torch, kind))
        text = text_ids(tokenizer)
        name = "SmolLM2-135M-Instruct" if given.model is None else Path(given.model).name
        rows = report.setdefault(f"{name}, {kind}", {})
        rows |= {"environment": environment(), "rounds": given.rounds}
        for length in map(int, filter(None, given.prompts.split(","))):
            for prefill in (None, "xattention") if kind == "bfloat16" else (None,):
                found = read(model, kvsieve.plan("full", prefill=prefill), text[:, :length])
                rows.setdefault("prompts", {})[f"{prefill or 'full'}, {length} tokens"] = found
                print(length, prefill, kind, found, flush=True)
        ways = Ways(model)
        for length in map(int, given.lengths.split(",")):
            for told, plan in PLANS.items():
                found = rows[f"{told}, {length} tokens"] = measure(model, plan, text[:, :length], given.rounds, ways)
                print(name, kind, told, length, found, flush=True)
                given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
