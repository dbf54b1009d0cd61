"""A GGUF file of 7 billion random weights on 8 GB of address space: what a prompt takes beyond the file and its KV.

    python benchmarks/soak/large_file.py --folder DIR [--shape mistral-7b] [--prompt 512] [--new-tokens 16]
        [--address-space 8GB] [--threads 2] [--keep] [--out FILE]

The file has the shapes of Mistral-7B in the types of Q4_K_M (Q4_K; Q6_K for the output, and for half of the value and
down projections), and the tokenizer of the demo's GGUF file; it is written layer by layer into the folder, which must
have room, and removed in the end. A process whose address space is limited (RLIMIT_AS) loads it and answers a prompt of
random tokens. Its resident peak may be 1.15 times the file and the KV. Exits 1 if it is more.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gguf_files import opened_like, random_blocks
from kvsieve.planning.quantities import parse_bytes
from kvsieve.report.environment import environment, write_result

RESULTS = Path(__file__).parents[1] / "results" / "weights_large.json"
MOST = 1.15


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model. inner: of the feed-forward layers."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int

    def fields(self) -> dict[str, int]:
        """Return the values of GGUF fields."""
        return {
            "llama.block_count": self.layers,
            "llama.embedding_length": self.width,
            "llama.feed_forward_length": self.inner,
            "llama.attention.head_count": self.heads,
            "llama.attention.head_count_kv": self.kv_heads,
            "llama.rope.dimension_count": self.width // self.heads,
        }

    def tensors(self, words: int) -> Iterator[tuple[str, int, int, str]]:
        """Yield name, rows, columns and type of every weight. words: of the vocabulary."""
        kv = self.kv_heads * self.width // self.heads
        yield "token_embd", words, self.width, "Q4_K"
        for layer in range(self.layers):
            # Layers at both ends, and every third one between, get more bits.
            eighth = self.layers // 8
            outer = layer < eighth or layer >= self.layers - eighth
            more = "Q6_K" if outer or (layer - eighth) % 3 == 2 else "Q4_K"
            yield f"blk.{layer}.attn_norm", 0, self.width, "F32"
            yield f"blk.{layer}.attn_q", self.width, self.width, "Q4_K"
            yield f"blk.{layer}.attn_k", kv, self.width, "Q4_K"
            yield f"blk.{layer}.attn_v", kv, self.width, more
            yield f"blk.{layer}.attn_output", self.width, self.width, "Q4_K"
            yield f"blk.{layer}.ffn_norm", 0, self.width, "F32"
            yield f"blk.{layer}.ffn_gate", self.inner, self.width, "Q4_K"
            yield f"blk.{layer}.ffn_up", self.inner, self.width, "Q4_K"
            yield f"blk.{layer}.ffn_down", self.width, self.inner, more
        yield "output_norm", 0, self.width, "F32"
        yield "output", words, self.width, "Q6_K"


SHAPES = {"mistral-7b": Shape(32, 4096, 14336, 32, 8), "small": Shape(2, 256, 512, 4, 2)}


def row_bytes(columns: int, kind: str) -> int:
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return columns // size * nbytes


def write_random(shape: Shape, like: Path, target: Path) -> None:
    """Write a file of random weights.

    Args:
        shape: of the model.
        like: GGUF file of a Llama model, of which tokenizer and other metadata are taken.
        target: path of the new file.

    Raises SystemExit if the disk has no room for it.
    """
    reader = gguf.GGUFReader(like)
    words = len(reader.fields["tokenizer.ggml.tokens"].data)
    tensors = list(shape.tensors(words))
    total = sum(max(rows, 1) * row_bytes(columns, kind) for _, rows, columns, kind in tensors)
    free = shutil.disk_usage(target.parent).free
    if free < 1.05 * total:
        sys.exit(f"error: {target.parent} has {free:,} free bytes, the file takes {total:,}: name another --folder")
    writer = opened_like(reader, target, "Q4_K_M", shape.fields())
    for name, rows, columns, kind in tensors:
        raw = gguf.GGMLQuantizationType[kind]
        size = (rows, columns) if rows else (columns,)
        nbytes = max(rows, 1) * row_bytes(columns, kind)
        writer.add_tensor_info(f"{name}.weight", size, np.dtype(np.float32), nbytes, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    draw = np.random.default_rng(50)
    for _, rows, columns, kind in tensors:
        ones = np.ones(columns, np.float32)
        writer.write_tensor_data(random_blocks(draw, rows, columns, kind) if rows else ones)
    writer.close()


def work(file: Path, limit: int, prompt: int, new_tokens: int) -> dict[str, Any]:
    """Answer a prompt in this process, its address space limited, and return what it took."""
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    import torch

    import kvsieve
    from kvsieve.hf.generate.peak_memory import resident

    model, _ = kvsieve.models.load(file, torch.bfloat16, "cpu")
    loaded = resident("VmHWM")
    ids = torch.randint(100, 20_000, (1, prompt), generator=torch.Generator().manual_seed(50))
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
        result = sieve.generate(ids, **options)
    return {
        "loaded_bytes": loaded,
        "peak_bytes": resident("VmHWM"),
        "address_space_bytes": resident("VmPeak"),
        "kv_bytes": result.stats.kv_bytes,
        "tokens": result.sequences[0, prompt:].tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="for the file, which has 4.4 GB")
    parser.add_argument("--like", type=Path, help="GGUF file with the tokenizer (default: the demo's)")
    parser.add_argument("--shape", choices=SHAPES, default="mistral-7b")
    parser.add_argument("--prompt", type=int, default=512, help="tokens (default: 512)")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--address-space", default="8GB", help="limit (default: 8GB)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--keep", action="store_true", help="leave the file, which a next run takes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        limit = parse_bytes(arguments.address_space)
        print(json.dumps(work(arguments.work, limit, arguments.prompt, arguments.new_tokens)))
        return
    if arguments.folder is None:
        parser.error("--folder names the folder for the file")
    from kvsieve.models.fetch import find_gguf

    file = arguments.folder / f"{arguments.shape}-random.gguf"
    if not file.exists():
        part = file.with_suffix(".part")
        write_random(SHAPES[arguments.shape], arguments.like or find_gguf(), part)
        part.rename(file)
    command = [sys.executable, __file__, "--work", str(file), "--address-space", arguments.address_space]
    command += ["--prompt", str(arguments.prompt), "--new-tokens", str(arguments.new_tokens)]
    child = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    )
    size = file.stat().st_size
    if not arguments.keep:
        file.unlink()
    if child.returncode:
        sys.exit(f"error: the process ended with code {child.returncode}")
    found = json.loads(child.stdout.splitlines()[-1])
    allowed = int(MOST * size + found["kv_bytes"])
    row = {"shape": arguments.shape, "file_bytes": size, "limit_bytes": parse_bytes(arguments.address_space), **found}
    row |= {"prompt": arguments.prompt, "allowed_bytes": allowed, "within": found["peak_bytes"] <= allowed}
    write_result(arguments.out, {"environment": environment(), "threads": arguments.threads, **row})
    print(json.dumps(row, indent=1))
    sys.exit(not row["within"])


if __name__ == "__main__":
    main()
