"""One prompt on a model whose heads are divided among processes (tensor parallelism); docs/models.md.

    torchrun --standalone --nproc-per-node 2 examples/parallel.py MODEL prompt.txt --method fastkv --set tsp_layer=15

Every process runs the same program and generates the same tokens; the first one prints the answer.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import kvsieve
from kvsieve.cli.specs import chosen_spec, make_run


def load(checkpoint: str, dtype: str) -> tuple[Any, Any]:
    """This process's part of the model, on its device, and the tokenizer."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if size > 1:
        options["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=size)
    return AutoModelForCausalLM.from_pretrained(checkpoint, **options).eval(), AutoTokenizer.from_pretrained(checkpoint)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub id or directory of a checkpoint, the same on every node.")
    parser.add_argument("prompt", type=Path, help="A text file, the same on every node.")
    parser.add_argument("--method", default="snapkv", help="A name of `kvsieve methods`.")
    parser.add_argument(
        "--budget", help="Entries kept per layer and KV head: 20%% or 1024; the method's own if left out."
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="A parameter of the method.")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--chunk", type=int, help="Prompt tokens per forward pass; all at once if left out.")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="Of sampling, the same in every process.")
    given = parser.parse_args(arguments)
    name, parameters = chosen_spec(given.method, given.budget, given.set)
    plan = make_run(name, **parameters).plan
    model, tokenizer = load(given.model, given.dtype)
    ids = tokenizer(given.prompt.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"].to(model.device)
    torch.manual_seed(given.seed)
    with kvsieve.attach(model, plan) as sieve:
        result = sieve.generate(ids, chunk=given.chunk, max_new_tokens=given.max_new_tokens)
    if not dist.is_initialized() or dist.get_rank() == 0:
        stats = result.stats
        print(tokenizer.decode(result.sequences[0, ids.shape[1] :], skip_special_tokens=True))
        entries = f"at most {max(stats.kv_entries)} entries kept per layer and head"
        cost = f"{stats.kv_bytes / 1e6:.1f} MB of cache on this process, {stats.ttft_s:.2f} s to the first token"
        print(f"{stats.method}: {stats.prompt_tokens} prompt tokens, {entries}, {cost}")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
