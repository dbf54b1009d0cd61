"""Headers of GGUF files, and damaged ones."""

from __future__ import annotations

import re
import struct

import pytest
import torch

import kvsieve
from fuzz_gguf import Source, outcome, run_case
from kvsieve.models import ModelLoadError
from kvsieve.models.gguf.file import GgufFile
from kvsieve.models.source import checkpoint_source
from tiny_models import build
from toy_gguf import TOKENS, write_gguf

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    words = {"vocab_size": len(TOKENS), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    write_gguf(build("llama", **words), file, "Q8_0")
    return file


def test_it_reads_what_the_package_gguf_reads(whole):
    file, reader = GgufFile(whole), gguf.GGUFReader(whole)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert {key: file.get(key) for key in file} == fields
    assert file.count("tokenizer.ggml.tokens") == len(TOKENS) and file.count("general.architecture") == 0
    assert "general.file_type" not in file and file.get("general.file_type", 7) == 7
    assert file.architecture == "llama" and list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        own = file.tensors[tensor.name]
        assert own.shape == tuple(tensor.shape[::-1]) and own.kind == tensor.tensor_type.name
        assert torch.equal(file.rows(own).flatten(), torch.from_numpy(tensor.data.copy()).view(torch.uint8).flatten())


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def put(data, name, offset, form, number):
    """Write a number at `offset` bytes after a name of the header."""
    start = data.index(text(name)) + len(text(name)) + offset
    return data[:start] + struct.pack(f"<{form}", number) + data[start + struct.calcsize(form) :]


def with_key(data, key, kind, value):
    """Write one key more."""
    keys = struct.unpack_from("<Q", data, 16)[0]
    more = text(key) + struct.pack(f"<I{kind[1]}", kind[0], value)
    # Whole multiples of the alignment, so that weights stay in place.
    padding = text("padding") + struct.pack("<IIQ", 9, 0, -(len(more) + 31) % 32) + bytes(-(len(more) + 31) % 32)
    return data[:16] + struct.pack("<Q", keys + 2) + more + padding + data[24:]


NORM, DOWN = "blk.0.attn_norm.weight", "blk.0.ffn_down.weight"
DAMAGE = {
    r"its first bytes are b'GGML', expected b'GGUF'": lambda data: b"GGML" + data[4:],
    r"version is 4, expected version 2 or 3": lambda data: data[:4] + struct.pack("<I", 4) + data[8:],
    r"expected little-endian numbers": lambda data: data[:4] + struct.pack(">I", 3) + data[8:],
    r"cannot mmap an empty file": lambda data: b"",
    r"header goes on beyond its 3500 bytes.*download it again": lambda data: data[:3500],
    r"ends at byte \d+, the file has \d+ bytes, expected a whole file": lambda data: data[:-40],
    r"claims 1152921504606846976 tensors.*download it again": lambda data: (
        data[:8] + struct.pack("<Q", 2**60) + data[16:]
    ),
    r"claims 1152921504606846976 keys": lambda data: data[:16] + struct.pack("<Q", 2**60) + data[24:],
    r"claims 1152921504606846976 texts": lambda data: put(data, "tokenizer.ggml.tokens", 8, "Q", 2**60),
    r"claims 1152921504606846976 numbers": lambda data: put(data, "tokenizer.ggml.token_type", 8, "Q", 2**60),
    r"token_type' has entries of type 9": lambda data: put(data, "tokenizer.ggml.token_type", 4, "I", 9),
    r"value of 'llama.block_count' is of type 13": lambda data: put(data, "llama.block_count", 0, "I", 13),
    r"attn_norm.weight' has 5 dimensions, expected from 1 to 4": lambda data: put(data, NORM, 0, "I", 5),
    r"has shape \[1152921504606846976\]": lambda data: put(data, NORM, 4, "Q", 2**60),
    r"has shape \[0\]": lambda data: put(data, NORM, 4, "Q", 0),
    r"attn_norm.weight' is of type 77, expected a type that": lambda data: put(data, NORM, 12, "I", 77),
    r"rows of 96 numbers, expected a multiple of 256 \(Q4_K\)": lambda data: put(data, DOWN, 20, "I", 12),
    r"lies at 33, expected a multiple of 32": lambda data: put(data, NORM, 16, "Q", 33),
    r"ends at byte \d{18}": lambda data: put(data, NORM, 16, "Q", 2**58),
    r"the tensors '.*' and '.*' overlap": lambda data: put(data, NORM, 16, "Q", 0),
    r"the key 'general.architecture' is there twice": lambda data: with_key(data, "general.architecture", (4, "I"), 1),
    r"general.alignment is 24, expected a power of two": lambda data: with_key(data, "general.alignment", (4, "I"), 24),
    r"one of 3 parts of a model.*llama-gguf-split --merge": lambda data: with_key(data, "split.count", (2, "H"), 3),
    r"key general.architecture is None": lambda data: data.replace(b"general.arch", b"general.Arch"),
    r"architecture 'lloma'.*not supported": lambda data: data.replace(b"llama.", b"lloma.").replace(
        text("llama"), text("lloma")
    ),
    r"block_count is 9, expected at most 4": lambda data: put(data, "llama.block_count", 4, "I", 9),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_named(message, whole, tmp_path):
    file = tmp_path / "damaged.gguf"
    file.write_bytes(DAMAGE[message](whole.read_bytes()))
    with pytest.raises(ModelLoadError, match=message) as caught:
        kvsieve.models.load(file, torch.float32, "cpu")
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("message", [message for message in DAMAGE if "claims" in message])
def test_transformers_never_sees_it(message, whole, tmp_path):
    file = tmp_path / "damaged.gguf"
    file.write_bytes(DAMAGE[message](whole.read_bytes()))
    with pytest.raises(ModelLoadError, match=message):
        checkpoint_source(str(file))


VALUES = {
    "a number": struct.pack("<II", 4, 2**31),
    "a fraction": struct.pack("<If", 6, 0.5),
    "a text": struct.pack("<I", 8) + text("x"),
    "numbers": struct.pack("<IIQ3I", 9, 4, 3, 1, 0, 7),
    "texts": struct.pack("<IIQ", 9, 8, 1) + text("x"),
}
TEMPLATES = ("tokenizer.chat_template", "tokenizer.chat_templates", "llama.rope.scaling.factor")


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_of_another_type_is_refused_by_name_or_harmless(kind, whole, tmp_path):
    data, file = whole.read_bytes(), tmp_path / "other.gguf"
    for key in (*GgufFile(whole), *TEMPLATES):
        own = data.replace(text(key), text("x" * len(key)))
        more = text(key) + VALUES[kind]
        gap = -len(more) % 32
        padding = text("padding.") + struct.pack("<IIQ", 9, 0, gap) + bytes(gap)
        count = struct.unpack_from("<Q", data, 16)[0] + 2
        file.write_bytes(own[:16] + struct.pack("<Q", count) + more + padding + own[24:])
        assert (len(more) + len(padding)) % 32 == 0 and outcome(file), key


def test_drawn_damage_is_refused_or_loads(tmp_path):
    sources = [Source("llama", "Q8_0", tmp_path), Source("gpt2", "Q5_1", tmp_path)]
    outcomes = [run_case(number, sources, tmp_path)[0] for number in range(12)]
    assert {re.sub(":.*", "", outcome, flags=re.DOTALL) for outcome in outcomes} <= {"loads", "refused"}
