"""`kvsieve estimate`: predicted costs of methods on a model, without downloading weights."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from kvsieve.cli.loading import WeightsOption, check_dtype, check_least, check_model_name, refuse_text
from kvsieve.cli.options import MEMORY, METHOD, MODEL, PROMPT, ModelArgument, option
from kvsieve.cli.output import JsonOption, emit_json, print_table, show
from kvsieve.cli.specs import (
    BudgetOption,
    CodecsOption,
    MethodRun,
    PrefillsOption,
    RestsOption,
    check_budget_used,
    compared_specs,
    make_runs,
    method_specs,
    parse_parts,
    spec,
)
from kvsieve.errors import InputError
from kvsieve.planning.quantities import parse_lengths
from kvsieve.planning.settled import label_parameters
from kvsieve.report.display import bytes_text

if TYPE_CHECKING:
    from kvsieve.planning.plans import Plan

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MACHINE = "Machine"
_HEADERS = ["context", "method", "KV", "of full", "TFLOP", "TTFT ratio", "TPOT ratio"]


def estimate_command(
    model: ModelArgument = None,
    context: Annotated[str, option(PROMPT, "Prompt lengths in tokens: 7500, 8k, or 8k,128k")] = "8k",
    batch: Annotated[int, option(PROMPT, "Batch size, all rows of the same length")] = 1,
    method: Annotated[
        str, option(METHOD, "Methods: full,snapkv:budget=10%,fastkv:tsp_layer=15:tsp_rate=0.2")
    ] = "full,snapkv,fastkv",
    budget: BudgetOption = None,
    codec: CodecsOption = None,
    rest: RestsOption = None,
    prefill: PrefillsOption = None,
    dtype: Annotated[str, option(MODEL, f"Dtype of weights and KV cache: {', '.join(ELEMENT_BYTES)}")] = "bfloat16",
    weights: WeightsOption = None,
    memory: Annotated[
        int | None,
        option(MACHINE, "Memory for weights and KV cache: 80GiB, adds the largest batch (default: none)", **MEMORY),
    ] = None,
    matmul_tflops: Annotated[
        float | None, option(MACHINE, "TFLOP/s achieved by linear layers, adds seconds (default: none)")
    ] = None,
    attention_tflops: Annotated[
        float | None, option(MACHINE, "TFLOP/s achieved by attention (default: that of --matmul-tflops)")
    ] = None,
    bandwidth: Annotated[
        float | None, option(MACHINE, "Memory bandwidth achieved in GB/s, adds ms per token (default: none)")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate KV memory, prefill FLOPs and speed ratios to full KV from the model's config alone."""
    check_dtype(dtype, tuple(ELEMENT_BYTES))
    refuse_text(model)
    check_least(1, batch=batch, memory=memory)
    positive = {"--matmul-tflops": matmul_tflops, "--attention-tflops": attention_tflops}
    for name, value in {**positive, "--bandwidth": bandwidth}.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f"{name} must be a positive number, got {value:g}")
    if attention_tflops is not None and matmul_tflops is None:
        raise InputError("--attention-tflops needs --matmul-tflops beside it; add that option")
    contexts = parse_lengths(context, "--context")
    specs = compared_specs(method, budget)
    parts = parse_parts(codec, rest, prefill)
    if not specs:
        raise InputError(f"--method names no method, got {method!r}; write e.g. full,snapkv:budget=10%")
    check_budget_used("--budget", budget, method_specs(method))
    check_model_name(model, weights)
    runs = make_runs(specs, *parts)
    rates = (matmul_tflops, attention_tflops or matmul_tflops, bandwidth)
    report = make_report(model, contexts, runs, batch, dtype, weights, memory, rates)
    if as_json:
        emit_json(report)
    else:
        _print(report)


def model_config(name: str | None) -> Any:
    """Return the transformers config of a directory, a hub id, or (None) the demo model.

    Raises ModelNotFoundError for a missing model, ModelLoadError for an unreadable one.
    """
    from huggingface_hub.utils import logging
    from transformers import AutoConfig

    from kvsieve.models import checkpoint_source, demo, load_error
    from kvsieve.models.gguf.config import make_config, read_settings
    from kvsieve.models.gguf.file import GgufFile

    logging.set_verbosity_error()
    source, options = checkpoint_source(str(demo.demo_checkpoint()) if name is None else name)
    if "gguf_file" in options:
        file = GgufFile(os.path.join(source, options["gguf_file"]))
        return make_config(read_settings(file), file)
    try:
        return AutoConfig.from_pretrained(source, **options)
    except Exception as error:
        raise load_error(f"cannot read the config of {name!r}", options, error) from error


def make_report(
    name: str | None,
    contexts: list[int],
    runs: list[MethodRun],
    batch: int,
    dtype: str,
    weights: str | None = None,
    memory: int | None = None,
    rates: tuple[float | None, float | None, float | None] = (None, None, None),
) -> dict[str, Any]:
    """Return a report with units in the key names.

    weights: their form. rates: TFLOP/s of linear layers and attention, GB/s of memory.
    """
    from kvsieve.hf.shape import describe_kinds
    from kvsieve.lab.bench import estimate as costs
    from kvsieve.lab.bench.weight_sizes import weight_sizes
    from kvsieve.models.fetch import MODEL_NAME
    from kvsieve.planning.plans import Plan
    from kvsieve.planning.profiles import Fingerprint

    wide = dtype == "float32"
    config, shape = _geometry(name, runs, wide or weights is not None)
    size = ELEMENT_BYTES[dtype]
    sizes = weight_sizes(shape, size, name, weights, config if wide else None)
    # Costs hardly depend on the tokenizer, so it is not loaded.
    runs = [_fitted(run, shape, size).for_model(Fingerprint.of_config(config)) for run in runs]
    results = []
    for tokens in contexts:
        full = costs.estimate(shape, Plan(), tokens, batch=batch, element_bytes=size, weights=sizes)
        for run in runs:
            one = costs.estimate(shape, run.plan, tokens, element_bytes=size, weights=sizes)
            whole = costs.estimate(shape, run.plan, tokens, batch=batch, element_bytes=size, weights=sizes)
            results.append(_result(run, tokens, whole, full, rates))
            if memory is not None:
                results[-1]["largest_batch"] = costs.largest_batch(one, memory)
    return {
        "model": name or MODEL_NAME,
        "model_type": config.model_type,
        "parameters": shape.parameters,
        "layers": len(shape.layers),
        "layers_hold": describe_kinds(shape.kinds),
        "layer_kinds": [kind.words for kind in shape.kinds],
        "dtype": dtype,
        "weights": list(sizes.kinds) or dtype,
        "batch": batch,
        "memory_gib": None if memory is None else memory / 2**30,
        "matmul_tflops": rates[0],
        "attention_tflops": rates[1],
        "bandwidth_gb_per_s": rates[2],
        "results": results,
        "notes": _notes(config, contexts, dtype),
    }


def _geometry(name: str | None, runs: list[MethodRun], needed: bool) -> tuple[Any, Any]:
    """Return a model's config and geometry, without importing torch if the model itself is not needed."""
    from kvsieve.lab.bench.plain_geometry import plain_config, plain_geometry

    needed = needed or any(_needs_model(run.plan) for run in runs)
    config = None if needed else plain_config(name)
    if config is not None:
        return config, plain_geometry(config)
    from kvsieve.lab.bench.geometry import geometry

    config = model_config(name)
    return config, geometry(config)


def _needs_model(plan: Plan) -> bool:
    """Return whether a plan needs the model itself to know that it runs."""
    parts = plan.codec, plan.rest, plan.prefill, plan.read, plan.profile
    needs = plan.evict is not None and bool(plan.evict.traits.needs)
    return needs or any(part is not None for part in parts)


def _fitted(run: MethodRun, shape: Any, element_bytes: int) -> MethodRun:
    if not run.plan.budgets_in_bytes:
        return run
    from kvsieve.hf.model.memory import fit

    return replace(run, plan=fit(run.plan, shape.shapes, element_bytes))


def _result(run: MethodRun, tokens: int, one: Any, full: Any, rates: tuple[Any, Any, Any]) -> dict[str, Any]:
    matmul, attention, bandwidth = rates
    seconds = [estimate.prefill_seconds(matmul or 1, attention or 1) for estimate in (one, full)]
    result = {
        "method": run.name,
        "parameters": run.parameters,
        "given": {name: str(value) for name, value in label_parameters(run.name, run.given, run.plan.filled).items()},
        "context_tokens": tokens,
        "deep_tokens": one.deep_tokens,
        "kv_entries_per_layer": list(one.kv_entries),
        "kv_bytes": one.kv_bytes,
        "state_bytes": one.state_bytes,
        "kv_ratio": one.kv_bytes / full.kv_bytes,
        "weight_bytes": one.weight_bytes,
        "prefill_matmul_flops": one.matmul_flops,
        "prefill_attention_flops": one.attention_flops,
        "prefill_flops": one.prefill_flops,
        "ttft_ratio": seconds[0] / seconds[1],
        "decode_bytes_per_token": one.decode_bytes,
        "tpot_ratio": one.decode_bytes / full.decode_bytes,
    }
    if matmul is not None:
        result["ttft_s"] = seconds[0]
    if bandwidth is not None:
        result["tpot_ms"] = 1000 * one.decode_seconds(bandwidth)
    return result


def _notes(config: Any, contexts: list[int], dtype: str) -> list[str]:
    from kvsieve.hf.model.context import context_of

    notes = []
    longest = context_of(config)
    if longest is not None and max(contexts) > longest:
        notes.append(f"{max(contexts)} tokens are more than the model's context of {longest}: it would refuse them")
    if getattr(config, "quantization_config", None):
        notes.append(f"the checkpoint is quantised; its weights are counted as {dtype}")
    if config.get_text_config(decoder=True) is not config:
        notes.append("estimates are of text; weights of the model's other parts are held but not read")
    return notes


def _print(report: dict[str, Any]) -> None:
    weights = bytes_text(report["results"][0]["weight_bytes"])
    show(f"{report['model']}: {report['parameters'] / 1e9:.3f} B parameters, {report['layers']} layers")
    blocks = "" if report["weights"] == report["dtype"] else f"{', '.join(report['weights'])}, computing in "
    show(f"weights {weights} in {blocks}{report['dtype']}, batch {report['batch']}")
    states = report["results"][0]["state_bytes"]
    of_them = f"; recurrent states {bytes_text(states)}, in KV below, do not grow" if states else ""
    show(f"{report['layers_hold']}{of_them}")
    batches = ["max batch"] if report["memory_gib"] is not None else []
    print_table(_HEADERS + batches, [_row(result) for result in report["results"]], left=2)
    for note in report["notes"]:
        show(f"note: {note}")


def _row(result: dict[str, Any]) -> list[str]:
    seconds = result.get("ttft_s")
    milliseconds = result.get("tpot_ms")
    batches = [str(result["largest_batch"])] if "largest_batch" in result else []
    return [
        str(result["context_tokens"]),
        spec(result["method"], result["given"]),
        bytes_text(result["kv_bytes"]),
        f"{100 * result['kv_ratio']:.1f}%",
        _short(result["prefill_flops"] / 1e12),
        f"{result['ttft_ratio']:.3f}" + ("" if seconds is None else f" {_short(seconds)} s"),
        f"{result['tpot_ratio']:.3f}" + ("" if milliseconds is None else f" {_short(milliseconds)} ms"),
        *batches,
    ]


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
