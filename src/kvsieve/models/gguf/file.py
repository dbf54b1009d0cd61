"""Headers of GGUF files, checked before anything is built from them.

Every length is compared with the file before it is used: a damaged file is an error, never a long loop or a large
allocation. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsieve.errors import short
from kvsieve.models.fetch import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Words of a header without its vocabulary.
PLACEHOLDER = ("a", "b")
# Long lists that describe a tokenizer.
_VOCABULARY = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")
# Formats of numbers by their type in a file; texts and lists have no fixed size.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT = 8
_LIST = 9
# Entries of any list: keys, tensors, words of a vocabulary.
_MOST = 1 << 24
_MOST_DIMENSIONS = 4
# Least bytes of an entry: of a key with a value, of a tensor.
_LEAST_KEY = 13
_LEAST_TENSOR = 24


class GgufTensor(NamedTuple):
    """A tensor of a file. shape: as torch has it; kind: name of its type; start, nbytes: its place in the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    nbytes: int


class GgufFile:
    """Header of a GGUF file.

    Args:
        path: of the file.

    Attributes:
        path: absolute.
        tensors: by name, in the file's order.
        alignment: of tensors, in bytes.

    Raises:
        ModelLoadError: the file cannot be read, or its header is damaged or of another version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.expanduser(os.fspath(path))).absolute()
        self.tensors: dict[str, GgufTensor] = {}
        # By key: type and place of its value, place of the key and end of the value.
        self._places: dict[str, tuple[int, int, int, int]] = {}
        try:
            with open(self.path, "rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read the GGUF file {self.path}: {error}") from error
        self._at = 0
        self._read_header()

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key: a number, a text, or a list of one of these.

        Raises ModelLoadError for a text that is no UTF-8.
        """
        if key not in self._places:
            return default
        kind, self._at, _, _ = self._places[key]
        return self._value(key, kind)

    def count(self, key: str) -> int:
        """Return the length of a list without reading it; 0 for a key that the file lacks or that is no list."""
        kind, start, _, _ = self._places.get(key, (_TEXT, 0, 0, 0))
        return self._number("Q", start + 4) if kind == _LIST else 0

    @cached_property
    def architecture(self) -> str:
        """Name of the architecture, such as "llama". Raises ModelLoadError if the file has none."""
        found = self.get("general.architecture")
        if not isinstance(found, str):
            raise self._error(f"its key general.architecture is {short(found)}", "the name of an architecture")
        return found

    @cached_property
    def memory(self) -> Tensor:
        """All bytes of the file, uint8, mapped: pages are read when they are used, and writes stay in this process."""
        import torch

        return torch.frombuffer(self._bytes, dtype=torch.uint8)

    def rows(self, tensor: GgufTensor) -> Tensor:
        """Return a tensor's bytes, uint8 [*shape[:-1], bytes of a row], in the mapped file."""
        return self.memory[tensor.start : tensor.start + tensor.nbytes].view(*tensor.shape[:-1], -1)

    def write_header(self, path: Path) -> None:
        """Write a GGUF file of the same keys and tensor names, with PLACEHOLDER for a vocabulary and no weights.

        Keys of rotary scaling are left out: transformers reads them wrongly or not at all (`corrections`).
        """
        places = {key: place for key, place in self._places.items() if ".rope.scaling." not in key}
        keys = {key: self._bytes[start:end] for key, (_, _, start, end) in places.items()}
        keys |= {key: _texts(key, PLACEHOLDER) for key in _VOCABULARY if key in keys}
        names = [struct.pack("<Q", len(name.encode())) + name.encode() for name in self.tensors]
        header = [_MAGIC, struct.pack("<IQQ", _VERSIONS[-1], len(names), len(keys)), *keys.values()]
        header += [name + struct.pack("<IQIQ", 1, 1, 0, 0) for name in names]
        path.write_bytes(b"".join(header) + bytes(2 * self.alignment))

    def _read_header(self) -> None:
        magic = self._bytes[:4]
        if magic != _MAGIC:
            raise self._error(f"its first bytes are {magic!r}", f"{_MAGIC!r}: this is no GGUF file")
        self._at = 4
        version = self._next("I")
        if version not in _VERSIONS:
            swapped = struct.unpack(">I", struct.pack("<I", version))[0] in _VERSIONS
            raise self._error(
                f"its version is {version}",
                "little-endian numbers, it has big-endian ones" if swapped else "version 2 or 3",
            )
        tensors = self._checked(self._next("Q"), _LEAST_TENSOR, "tensors")
        keys = self._checked(self._next("Q"), _LEAST_KEY, "keys")
        for _ in range(keys):
            self._read_key()
        parts = self.get("split.count", 1)
        if not isinstance(parts, int) or parts > 1:
            raise self._error(
                f"it is one of {short(parts)} parts of a model",
                "all in one file: join them with llama-gguf-split --merge",
            )
        self._read_tensors(tensors)

    def _read_key(self) -> None:
        start = self._at
        name = self._text("a key")
        if name in self._places:
            raise self._error(f"the key {short(name)} is there twice", "keys that differ")
        kind = self._next("I")
        value = self._at
        if kind in _NUMBERS:
            self._skip(struct.calcsize(_NUMBERS[kind]))
        elif kind == _TEXT:
            self._skip(self._next("Q"))
        elif kind == _LIST:
            self._skip_list(name)
        else:
            raise self._error(f"the value of {short(name)} is of type {kind}", "a type from 0 to 12")
        self._places[name] = kind, value, start, self._at

    def _skip_list(self, name: str) -> None:
        kind = self._next("I")
        if kind in _NUMBERS:
            size = struct.calcsize(_NUMBERS[kind])
            self._skip(self._checked(self._next("Q"), size, f"numbers of {short(name)}") * size)
        elif kind == _TEXT:
            for _ in self._spans(self._checked(self._next("Q"), 8, f"texts of {short(name)}")):
                pass
        else:
            raise self._error(f"the list {short(name)} has entries of type {kind}", "numbers or texts")

    def _read_tensors(self, count: int) -> None:
        import gguf

        sizes = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
        found = []
        end_of_name = self._at
        for _ in range(count):
            name = self._text("a tensor's name")
            shape = self._shape(name)
            number = self._next("I")
            if number not in sizes:
                raise self._error(
                    f"the tensor {short(name)} is of type {number}",
                    f"a type that the package gguf {_version()} knows; a newer one may",
                )
            kind, block, nbytes = sizes[number]
            if shape[-1] % block:
                raise self._error(
                    f"the tensor {short(name)} has rows of {shape[-1]} numbers", f"a multiple of {block} ({kind})"
                )
            found.append(GgufTensor(name, shape, kind, self._next("Q"), prod(shape) // block * nbytes))
            end_of_name = self._at
        self._place_tensors(found, end_of_name)

    def _shape(self, name: str) -> tuple[int, ...]:
        dimensions = self._next("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._error(f"the tensor {short(name)} has {dimensions} dimensions", f"from 1 to {_MOST_DIMENSIONS}")
        shape = tuple(self._next("Q") for _ in range(dimensions))[::-1]
        # A number takes two bits and more.
        if not 0 < prod(shape) <= 4 * len(self._bytes):
            raise self._error(f"the tensor {short(name)} has shape {list(shape)}", "numbers that fit into the file")
        return shape

    def _place_tensors(self, found: list[GgufTensor], end: int) -> None:
        """Check the places of tensors. `end`: of the header."""
        alignment = self.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"its general.alignment is {short(alignment)}", "a power of two")
        self.alignment = alignment
        base = -(-end // alignment) * alignment
        for tensor in found:
            start = base + tensor.start
            if tensor.name in self.tensors:
                raise self._error(f"the tensor {short(tensor.name)} is there twice", "names that differ")
            if tensor.start % alignment:
                raise self._error(
                    f"the tensor {short(tensor.name)} lies at {tensor.start}", f"a multiple of {alignment}"
                )
            if start + tensor.nbytes > len(self._bytes):
                raise self._error(
                    f"the tensor {short(tensor.name)} ends at byte {start + tensor.nbytes}, the file has "
                    f"{len(self._bytes)} bytes",
                    "a whole file: it may be cut off, download it again",
                )
            self.tensors[tensor.name] = tensor._replace(start=start)
        ordered = sorted(self.tensors.values(), key=lambda tensor: tensor.start)
        for first, second in pairwise(ordered):
            if first.start + first.nbytes > second.start:
                raise self._error(
                    f"the tensors {short(first.name)} and {short(second.name)} overlap", "tensors one after another"
                )

    def _value(self, key: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._next(_NUMBERS[kind])
        if kind == _TEXT:
            return self._text(key)
        inner = self._next("I")
        count = self._next("Q")
        if inner == _TEXT:
            return [self._decoded(start, end, key) for start, end in self._spans(count)]
        return list(struct.unpack_from(f"<{count}{_NUMBERS[inner]}", self._bytes, self._at))

    def _text(self, what: str) -> str:
        size = self._next("Q")
        start = self._at
        self._skip(size)
        return self._decoded(start, self._at, what)

    def _spans(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield starts and ends of so many texts and skip them; without calls, for a vocabulary has many."""
        length = struct.Struct("<Q").unpack_from
        whole = self._bytes
        size = len(whole)
        end = self._at
        for _ in range(count):
            start = end + 8
            if start > size:
                break
            end = start + length(whole, end)[0]
            yield start, end
        else:
            start = end
        self._at = max(start, end)
        self._skip(0)

    def _decoded(self, start: int, end: int, what: str) -> str:
        try:
            return self._bytes[start:end].decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{short(what)} at byte {start} is no UTF-8 ({error.reason})", "text") from None

    def _next(self, form: str) -> Any:
        start = self._at
        self._skip(struct.calcsize(form))
        return self._number(form, start)

    def _number(self, form: str, start: int) -> Any:
        return struct.unpack_from(f"<{form}", self._bytes, start)[0]

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._bytes):
            raise self._error(
                f"its header goes on beyond its {len(self._bytes)} bytes",
                "a whole file: it may be cut off, download it again",
            )

    def _checked(self, count: int, least: int, what: str) -> int:
        """Return a count of entries of at least `least` bytes that can be in the file."""
        most = min(_MOST, (len(self._bytes) - self._at) // least)
        if count > most:
            raise self._error(
                f"it claims {count} {what}",
                f"at most {most} in a file of {len(self._bytes)} bytes: it may be cut off, download it again",
            )
        return int(count)

    def _error(self, found: str, expected: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} cannot be loaded: {found}, expected {expected}")


def _texts(key: str, words: Sequence[str]) -> bytes:
    """Return a key with a list of texts as a file has it."""
    counted = [struct.pack("<Q", len(word)) + word.encode() for word in (key, *words)]
    return counted[0] + struct.pack("<IIQ", _LIST, _TEXT, len(words)) + b"".join(counted[1:])


def _version() -> str:
    import importlib.metadata

    return importlib.metadata.version("gguf")
