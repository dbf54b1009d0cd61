"""Damaged GGUF files: each loads, or is refused with a ModelLoadError.

    python tests/support/fuzz_gguf.py [--cases 200] [--seed 0] [--only NUMBER ...]

A case is a tiny model's file with one to three changes: bytes of its header, lengths, counts, values of keys, shapes,
types and places of tensors, its end. It is drawn by its number. A file that loads must compute. The script exits 1
where another exception comes, where memory grows by a gigabyte, or where a case takes 10 seconds; a crash ends it.
"""

from __future__ import annotations

import argparse
import random
import resource
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import kvsieve
from kvsieve.models import ModelLoadError
from kvsieve.models.gguf.file import GgufFile
from tiny_models import build
from toy_gguf import TOKENS, write_gguf

SOURCES = (("llama", "Q8_0"), ("qwen2", "Q4_0"), ("gemma2", "F16"), ("gpt2", "Q5_1"), ("phi3", "F32"))
EXTREMES = (0, 1, 2, 3, 7, 31, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1)
# Bytes that a process may grow by.
ROOM = 1 << 30
# Seconds that a case may take.
PATIENCE = 10.0


class Source:
    """A whole file. names: of its keys and tensors, as they are in its bytes."""

    def __init__(self, family: str, kind: str, folder: Path) -> None:
        path = folder / f"{family}.gguf"
        words = {"vocab_size": len(TOKENS), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        more = {"tie_word_embeddings": True} if family in ("gpt2", "gemma2") else {}
        write_gguf(build(family, **words, **more), path, kind)
        header = GgufFile(path)
        self.family = family
        self.data = path.read_bytes()
        self.end_of_header = min(tensor.start for tensor in header.tensors.values())
        self.keys = list(header)
        self.tensors = list(header.tensors)


def changed(source: Source, draw: random.Random) -> tuple[bytes, str]:
    """Return a file's bytes with some changes, and what these are."""
    data = bytearray(source.data)
    notes = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        change = draw.choice((_value, _value, _tensor, _tensor, _count, _byte, _number, _cut, _shift))
        notes.append(f"{change.__name__[1:]} {change(data, source, draw)}")
    return bytes(data), ", ".join(notes)


def _put(data: bytearray, start: int, form: str, number: int) -> None:
    packed = struct.pack(f"<{form}", number % (1 << (8 * struct.calcsize(form))))
    data[start : start + len(packed)] = packed[: max(0, len(data) - start)]


def _after(data: bytearray, name: str) -> int:
    return max(0, data.find(struct.pack("<Q", len(name)) + name.encode())) + 8 + len(name)


def _value(data: bytearray, source: Source, draw: random.Random) -> str:
    """Change the value of a key, or its type."""
    key, number = draw.choice(source.keys), draw.choice(EXTREMES)
    start = _after(data, key)
    if draw.random() < 0.2:
        _put(data, start, "I", number if draw.random() < 0.5 else draw.randrange(14))
        return f"type of {key}"
    _put(data, start + 4, "Q" if draw.random() < 0.1 else "I", number)
    return f"{key} = {number}"


def _tensor(data: bytearray, source: Source, draw: random.Random) -> str:
    """Change a tensor's dimensions, type or place."""
    name, number = draw.choice(source.tensors), draw.choice(EXTREMES)
    start = _after(data, name)
    dimensions = int.from_bytes(data[start : start + 1], "little")
    forms = ("I", *"Q" * min(4, max(1, dimensions)), "I", "Q")
    chosen = draw.randrange(len(forms))
    if forms[chosen] == "I" and chosen and draw.random() < 0.7:
        number = draw.randrange(45)
    _put(data, start + sum(struct.calcsize(form) for form in forms[:chosen]), forms[chosen], number)
    return f"{name}[{chosen}] = {number}"


def _count(data: bytearray, source: Source, draw: random.Random) -> str:
    """Change the version, or the number of tensors or keys."""
    start, form = draw.choice(((0, "I"), (4, "I"), (8, "Q"), (16, "Q")))
    number = draw.choice((*EXTREMES, len(source.tensors) + 1, len(source.keys) - 1))
    _put(data, start, form, number)
    return f"{start} = {number}"


def _byte(data: bytearray, source: Source, draw: random.Random) -> str:
    places = [draw.randrange(min(source.end_of_header, len(data)) or 1) for _ in range(draw.choice((1, 3, 20)))]
    for place in places:
        _put(data, place, "B", draw.randrange(256))
    return str(places)


def _number(data: bytearray, source: Source, draw: random.Random) -> str:
    place, number = draw.randrange(source.end_of_header), draw.choice(EXTREMES)
    _put(data, place, draw.choice("IQ"), number)
    return f"{place} = {number}"


def _cut(data: bytearray, source: Source, draw: random.Random) -> str:
    end = draw.choice((draw.randrange(source.end_of_header), draw.randrange(len(source.data)), len(source.data) - 1, 0))
    del data[end:]
    return str(end)


def _shift(data: bytearray, source: Source, draw: random.Random) -> str:
    place, size = draw.randrange(source.end_of_header), draw.choice((1, 4, 8, 40))
    if draw.random() < 0.5:
        del data[place : place + size]
    else:
        data[place:place] = draw.randbytes(size)
    return f"{place} by {size}"


def outcome(path: Path) -> str:
    """Load a file and compute with it; return "loads" or "refused". Raises what else is raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model: Any = kvsieve.models.load(path, torch.float32, "cpu")[0]
        except ModelLoadError as error:
            if path.name not in str(error):
                raise AssertionError(f"the error does not name the file: {error}") from error
            return f"refused: {str(error).partition(path.name)[2]}"
        with torch.no_grad():
            model(torch.arange(3, 11)[None])
    return "loads"


def run_case(number: int, sources: list[Source], folder: Path) -> tuple[str, str]:
    """Return what became of a case, and a note for a person; failures begin with "FAILED"."""
    draw = random.Random(number)
    source = draw.choice(sources)
    data, note = changed(source, draw)
    path = folder / "case.gguf"
    path.write_bytes(data)
    try:
        return outcome(path), f"{source.family}: {note}"
    except Exception as error:
        return "FAILED", f"{source.family}: {note}: {type(error).__name__}: {error}"


def main() -> int:
    """Run the cases that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = [Source(family, kind, folder) for family, kind in SOURCES]
        for source in sources:
            (folder / "whole.gguf").write_bytes(source.data)
            assert outcome(folder / "whole.gguf") == "loads", source.family
        limit_memory()
        for number in arguments.only or range(arguments.seed, arguments.seed + arguments.cases):
            began = time.monotonic()
            result, note = run_case(number, sources, folder)
            if time.monotonic() - began > PATIENCE:
                result, note = "FAILED", f"{note}: {time.monotonic() - began:.0f} s"
            found[result.partition(":")[0]] += 1
            if result == "FAILED" or arguments.only:
                print(f"{number}: {result}: {note}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in sorted(found.items())))
    return 1 if found["FAILED"] else 0


def limit_memory() -> None:
    """Let this process grow by ROOM."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, resource.RLIM_INFINITY))


if __name__ == "__main__":
    sys.exit(main())
