"""`kvsieve estimate`: what methods should cost on a model, before a weight is downloaded."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Annotated, Any

import typer

from kvsieve.cli.output import JsonOption, emit_json, print_table, show
from kvsieve.cli.specs import (
    BudgetOption,
    CodecsOption,
    MethodRun,
    PrefillsOption,
    RestsOption,
    compared_methods,
    parse_codecs,
    parse_prefills,
    parse_rests,
    spec,
    with_codecs,
)
from kvsieve.errors import InputError
from kvsieve.settled import told

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_HEADERS = ["context", "method", "KV", "of full", "TFLOP", "TTFT ratio", "TPOT ratio"]


def estimate_command(
    model: Annotated[
        str | None,
        typer.Argument(help="Hub id, directory with config.json or .gguf file; the demo model if left out."),
    ] = None,
    context: Annotated[str, typer.Option(help="Prompt tokens per row: 7500, 8k (8192), or a list: 8k,128k.")] = "8k",
    method: Annotated[
        str, typer.Option(help="Methods: full,snapkv:budget=10% or fastkv:tsp_layer=15:tsp_rate=0.2.")
    ] = "full,snapkv,fastkv",
    budget: BudgetOption = None,
    codec: CodecsOption = None,
    rest: RestsOption = None,
    prefill: PrefillsOption = None,
    batch: Annotated[int, typer.Option(help="Rows, all of the same length.")] = 1,
    dtype: Annotated[str, typer.Option(help=f"Of weights and KV: {', '.join(ELEMENT_BYTES)}.")] = "bfloat16",
    memory: Annotated[float | None, typer.Option(help="GiB for weights and KV: adds the largest batch.")] = None,
    matmul_tflops: Annotated[float | None, typer.Option(help="Achieved by linear layers: adds seconds.")] = None,
    attention_tflops: Annotated[
        float | None, typer.Option(help="Achieved by attention; as --matmul-tflops if left out.")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Achieved memory bandwidth, GB/s: adds ms per token.")] = None,
    as_json: JsonOption = False,
) -> None:
    """KV bytes, prefill FLOPs and predicted ratios to full KV, from the model's config alone."""
    if dtype not in ELEMENT_BYTES:
        raise InputError(f"--dtype must be one of {', '.join(ELEMENT_BYTES)}, got {dtype!r}")
    if batch < 1:
        raise InputError(f"--batch must be at least 1, got {batch}")
    positive = {"--memory": memory, "--matmul-tflops": matmul_tflops, "--attention-tflops": attention_tflops}
    for option, value in {**positive, "--bandwidth": bandwidth}.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f"{option} must be a positive number, got {value:g}")
    if attention_tflops is not None and matmul_tflops is None:
        raise InputError("--attention-tflops needs --matmul-tflops beside it; add that option")
    contexts = parse_contexts(context)
    runs = with_codecs(
        compared_methods(method, budget), parse_codecs(codec), parse_rests(rest), parse_prefills(prefill)
    )
    if not runs:
        raise InputError(f"--method names no method, got {method!r}; write e.g. full,snapkv:budget=10%")
    rates = (matmul_tflops, attention_tflops or matmul_tflops, bandwidth)
    report = make_report(model, contexts, runs, batch, dtype, memory, rates)
    if as_json:
        emit_json(report)
    else:
        _print(report)


def parse_contexts(text: str, option: str = "--context") -> list[int]:
    """``8k,7500`` -> [8192, 7500]; k is 1024 and m 1024 k. Raises InputError."""
    contexts = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)(k|m)?", part.strip().lower())
        if match is None:
            raise InputError(f"{option} takes tokens such as 7500, 8k or 128k, comma between several, got {text!r}")
        contexts.append(int(match[1]) * {None: 1, "k": 1024, "m": 1024**2}[match[2]])
    return contexts


def model_config(name: str | None) -> Any:
    """The transformers config of a directory, a hub id, or (None) the demo model.

    Raises ModelNotFoundError for one that is not there, ModelLoadError for one that cannot be read.
    """
    if name is None:
        return _demo_config()
    from huggingface_hub.utils import logging
    from transformers import AutoConfig

    from kvsieve.models import checkpoint_source, load_error

    logging.set_verbosity_error()
    source, options = checkpoint_source(name)
    try:
        return AutoConfig.from_pretrained(source, **options)
    except Exception as error:
        raise load_error(f"cannot read the config of {name!r}", options, error) from error


def _demo_config() -> Any:
    from transformers import AutoConfig

    from kvsieve.models import demo, fetch

    gguf = fetch.find_gguf()
    digest = fetch.gguf_sha256(gguf) if gguf else fetch.GGUF_SHA256
    checkpoint = fetch.cache_dir() / f"{fetch.MODEL_NAME}-{digest[:12]}-v{demo.CHECKPOINT_VERSION}"
    if demo.checkpoint_problem(checkpoint) is None:
        return AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    return demo.load_demo()[0].config


def make_report(
    name: str | None,
    contexts: list[int],
    runs: list[MethodRun],
    batch: int,
    dtype: str,
    memory_gib: float | None = None,
    rates: tuple[float | None, float | None, float | None] = (None, None, None),
) -> dict[str, Any]:
    """JSON-ready; units are in the key names. rates: TFLOP/s of linear layers and of attention, GB/s of memory."""
    from kvsieve.bench import estimate as costs
    from kvsieve.bench.geometry import geometry
    from kvsieve.hf.kinds import told_kinds
    from kvsieve.hf.model.memory import fit
    from kvsieve.models.fetch import MODEL_NAME
    from kvsieve.plans import Plan
    from kvsieve.profiles import Fingerprint

    config = model_config(name)
    shape = geometry(config)
    size = ELEMENT_BYTES[dtype]
    # The tokenizer, which no cost depends on much, is not loaded for this.
    fitted = [replace(run, plan=fit(run.plan, shape.shapes, size)) for run in runs]
    runs = [run.for_model(Fingerprint.of_config(config)) for run in fitted]
    results = []
    for tokens in contexts:
        full = costs.estimate(shape, Plan(), tokens, batch=batch, element_bytes=size)
        for run in runs:
            one = costs.estimate(shape, run.plan, tokens, element_bytes=size)
            whole = costs.estimate(shape, run.plan, tokens, batch=batch, element_bytes=size)
            results.append(_result(run, tokens, whole, full, rates))
            if memory_gib is not None:
                results[-1]["largest_batch"] = costs.largest_batch(one, memory_gib * 2**30)
    return {
        "model": name or MODEL_NAME,
        "model_type": config.model_type,
        "parameters": shape.parameters,
        "layers": len(shape.layers),
        "layers_hold": told_kinds(shape.kinds),
        "layer_kinds": [kind.words for kind in shape.kinds],
        "dtype": dtype,
        "batch": batch,
        "memory_gib": memory_gib,
        "matmul_tflops": rates[0],
        "attention_tflops": rates[1],
        "bandwidth_gb_per_s": rates[2],
        "results": results,
        "notes": _notes(config, contexts, dtype),
    }


def _result(run: MethodRun, tokens: int, one: Any, full: Any, rates: tuple[Any, Any, Any]) -> dict[str, Any]:
    matmul, attention, bandwidth = rates
    seconds = [each.prefill_seconds(matmul or 1, attention or 1) for each in (one, full)]
    result = {
        "method": run.name,
        "parameters": run.parameters,
        "given": {name: str(value) for name, value in told(run.name, run.given, run.plan.filled).items()},
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
    weights = _size(report["results"][0]["weight_bytes"])
    show(f"{report['model']}: {report['parameters'] / 1e9:.3f} B parameters, {report['layers']} layers")
    show(f"weights {weights} in {report['dtype']}, batch {report['batch']}")
    states = report["results"][0]["state_bytes"]
    of_them = f"; recurrent states {_size(states)}, in KV below, do not grow" if states else ""
    show(f"{report['layers_hold']}{of_them}")
    batches = ["max batch"] if report["memory_gib"] is not None else []
    print_table(_HEADERS + batches, [_row(each) for each in report["results"]], left=2)
    for note in report["notes"]:
        show(f"note: {note}")


def _row(result: dict[str, Any]) -> list[str]:
    seconds, milliseconds = result.get("ttft_s"), result.get("tpot_ms")
    batches = [str(result["largest_batch"])] if "largest_batch" in result else []
    return [
        str(result["context_tokens"]),
        spec(result["method"], result["given"]),
        _size(result["kv_bytes"]),
        f"{100 * result['kv_ratio']:.1f}%",
        _short(result["prefill_flops"] / 1e12),
        f"{result['ttft_ratio']:.3f}" + ("" if seconds is None else f" {_short(seconds)} s"),
        f"{result['tpot_ratio']:.3f}" + ("" if milliseconds is None else f" {_short(milliseconds)} ms"),
        *batches,
    ]


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
