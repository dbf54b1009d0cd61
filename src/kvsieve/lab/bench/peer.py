"""kvpress, measured in a separate interpreter: this file is a script for that interpreter (see peer_process.py).

It imports torch, transformers and kvpress, and only two files of kvsieve that need no more. Requests and answers are
JSON, one per line, on stdin and stdout. kvpress is used as in its own pipeline: with hooks during prefill only, and
position ids that continue from the prompt's.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import sys
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

# Our name -> kvpress's class; None for full KV, without a press.
PRESSES = {
    "full": None,
    "snapkv": "SnapKVPress",
    "adakv": "AdaKVPress",
    "streamingllm": "StreamingLLMPress",
    "knorm": "KnormPress",
    "lagkv": "LagKVPress",
}


def make_press(method: str, kept: int | None, length: int, options: dict[str, Any]) -> Any:
    """Return the press that keeps `kept` of `length` entries; None for full KV."""
    import kvpress

    name = PRESSES[method]
    if name is None or kept is None:
        return None
    # kvpress rounds down; half an entry more keeps floats from costing one.
    options = {**options, "compression_ratio": 1 - min(1.0, (kept + 0.5) / length)}
    if method == "adakv":
        return kvpress.AdaKVPress(kvpress.SnapKVPress(**options))
    return getattr(kvpress, name)(**options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    here = Path(__file__).resolve().parent
    # The files in this folder are not top-level modules; some are named like packages that transformers looks for.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import kvpress
    import torch
    import transformers

    plain = _load(here / "plain.py")
    memory = _load(here.parents[1] / "hf" / "generate" / "peak_memory.py")
    torch.set_num_threads(arguments.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype), attn_implementation="sdpa"
    )
    model = model.to(arguments.device).eval()

    def send(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    send({"kvpress": getattr(kvpress, "__version__", None) or _release("kvpress"), **versions})
    for line in sys.stdin:
        request = json.loads(line)
        gc.collect()
        try:
            ids = torch.tensor(request["ids"], device=model.device)
            press = make_press(request["method"], request["kept"], ids.shape[1], request["options"])
            with memory.measure_peak(model.device) as peak:
                run, tokens = plain.read_and_decode(
                    model, ids, None, request["new_tokens"], reading=None if press is None else press(model)
                )
            send({**run, "peak_bytes": peak.bytes, "tokens": tokens.tolist()})
        except Exception as error:
            traceback.print_exc()
            send({"error": f"{type(error).__name__}: {error}"})


def _load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"kvsieve_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _release(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
