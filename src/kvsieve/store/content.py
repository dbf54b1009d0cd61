"""A cache in the store's memory: packed as in a file, with common prefixes shared."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.records import Conversation, Turn
from kvsieve.hf.persist.packing import Packer, unpacked
from kvsieve.hf.persist.saved import made_cache, packed_cache
from kvsieve.hf.runtime import AttachedModel

# Tensors that passes write in place.
_WRITTEN = re.compile(r"layers\.\d+\.states?\b")


@dataclass(frozen=True)
class Stretch:
    """Keys and values of consecutive tokens, in the layers that store all tokens.

    Attributes:
        start: first token.
        end: end of the tokens, exclusive.
        parts: by the names of a file, [1, H, end - start, D].
        place: number of its memory, equal for all parts and for slices of it.
        size: bytes of that memory.
    """

    start: int
    end: int
    parts: Mapping[str, Tensor]
    place: int
    size: int

    @classmethod
    def of(cls, start: int, parts: Mapping[str, Tensor]) -> Stretch:
        """Return a stretch of tensors, each in memory of its own."""
        storages = [part.untyped_storage() for part in parts.values()]
        end = start + next(iter(parts.values())).shape[2]
        return cls(start, end, parts, storages[0].data_ptr(), sum(storage.nbytes() for storage in storages))

    def up_to(self, end: int) -> Stretch:
        """Return the tokens before `end`, on the same memory."""
        if end >= self.end:
            return self
        parts = {name: part[:, :, : end - self.start] for name, part in self.parts.items()}
        return dataclasses.replace(self, end=end, parts=parts)


@dataclass(frozen=True)
class StoredCache:
    """A cache in memory.

    Attributes:
        facts: "cache" and "layers" of a file's header.
        tensors: of the file, except those in `stretches`.
        stretches: entries of the layers that store all tokens, consecutive.
        mapped: True if everything is memory-mapped from a file.
    """

    facts: dict[str, Any]
    tensors: Mapping[str, Tensor]
    stretches: tuple[Stretch, ...]
    mapped: bool = False

    def all_tensors(self) -> Iterator[Tensor]:
        """Yield every tensor."""
        yield from self.tensors.values()
        for stretch in self.stretches:
            yield from stretch.parts.values()

    def places(self) -> dict[int, int]:
        """Return the bytes of each place in memory."""
        storages = (part.untyped_storage() for part in self.tensors.values())
        found = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
        return found | {stretch.place: stretch.size for stretch in self.stretches}

    def own(self) -> StoredCache:
        """Copy it to memory of its own."""
        tensors = {name: _own(part) for name, part in self.tensors.items()}
        stretches = (
            Stretch.of(stretch.start, {name: _own(part) for name, part in stretch.parts.items()})
            for stretch in self.stretches
        )
        return StoredCache(self.facts, tensors, tuple(stretches))

    def begins(self, common: int) -> tuple[Stretch, ...]:
        """Return stretches of the first `common` tokens."""
        return tuple(stretch.up_to(common) for stretch in self.stretches if stretch.start < common)


class Whole(Mapping[str, Tensor]):
    """The tensors of a file; stretches are joined, and token indices created, on access."""

    def __init__(self, content: StoredCache, end: int | None = None) -> None:
        self._content = content
        self._stretches = content.stretches if end is None else content.begins(end)
        parts = content.stretches[0].parts if content.stretches else ()
        indices = [layer["index"] for layer in content.facts["layers"] if isinstance(layer.get("index"), dict)]
        self._indices = {index["tensor"]: index["shape"] for index in indices if index["tensor"] not in content.tensors}
        self._names = [*content.tensors, *parts, *self._indices]

    def __getitem__(self, name: str) -> Tensor:
        if name in self._content.tensors:
            return self._content.tensors[name]
        if name in self._indices:
            batch, heads, size = self._indices[name]
            end = self._stretches[-1].end if self._stretches else size
            return torch.arange(end, dtype=torch.int32).expand(batch, heads, -1).contiguous()
        parts = [stretch.parts[name] for stretch in self._stretches]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def split(facts: dict[str, Any], tensors: dict[str, Tensor], seen: int) -> dict[str, Tensor]:
    """Move the entries of layers with all tokens out of `tensors`, drop their indices, and return the entries."""
    entries = {}
    for layer in facts["layers"]:
        keys = layer.get("keys")
        index = layer.get("index")
        if keys is None or "window" in layer or len(keys["shape"]) != 4 or layer["valid"] is not None:
            continue
        if keys["shape"][2] != seen or layer["lengths"] != {"tuple": [seen]}:
            continue
        for part in (keys, layer.get("values")):
            if part is not None:
                entries[part["tensor"]] = tensors.pop(part["tensor"])
        del tensors[index["tensor"]]
    return entries


def copied_content(
    cache: SieveCache, device: torch.device, known: tuple[Stretch, ...], *, certain: bool = False
) -> StoredCache:
    """Copy the content of a cache, except entries that equal those in `known` bit for bit.

    Args:
        cache: between two passes.
        device: of the model.
        known: stretches of a conversation with the same first tokens.
        certain: skip the comparison: the cache continues from these stretches. Default False.
    """
    facts, tensors = packed_cache(cache, None, device)
    parts = split(facts, tensors, cache.num_seen)
    if not all(stretch.parts.keys() == parts.keys() for stretch in known):
        known = ()
    if not certain:
        known = _shared(known, parts)
    start = known[-1].end if known else 0
    stretches = known
    if parts and start < cache.num_seen:
        rest = {name: _own(part[:, :, start:]) for name, part in parts.items()}
        stretches = (*known, Stretch.of(start, rest))
    return StoredCache(facts, {name: _own(part) for name, part in tensors.items()}, stretches)


def _shared(known: tuple[Stretch, ...], parts: Mapping[str, Tensor]) -> tuple[Stretch, ...]:
    """Return the first tokens of stretches, as far as their entries equal those in `parts` bit for bit."""
    shared = []
    for stretch in known:
        size = min(_equal(part, parts[name][:, :, stretch.start : stretch.end]) for name, part in stretch.parts.items())
        if size:
            shared.append(stretch.up_to(stretch.start + size))
        if size < stretch.end - stretch.start:
            break
    return tuple(shared)


def _equal(part: Tensor, other: Tensor) -> int:
    """Return the number of first tokens with equal entries, both [1, H, N, D]."""
    other = other.cpu()
    if torch.equal(part, other):
        return part.shape[2]
    return int((part != other).any(3).any(1)[0].int().argmax())


def _own(part: Tensor) -> Tensor:
    """Copy a tensor to memory of its own, without spare room."""
    return torch.empty(part.shape, dtype=part.dtype).copy_(part)


def mapped(facts: dict[str, Any], tensors: dict[str, Tensor]) -> StoredCache:
    """Return the content of a memory-mapped file."""
    seen = facts["cache"]["Conversation"]["dict"]
    seen = next(value for name, value in seen if name == "num_seen")
    entries = split(facts, tensors, seen)
    return StoredCache(facts, tensors, (Stretch.of(0, entries),) if entries else (), mapped=True)


def revived(content: StoredCache, model: AttachedModel) -> SieveCache:
    """Return a cache that continues from all of the content; memory not written in place is shared."""
    tensors = {name: part.clone() if _WRITTEN.match(name) else part for name, part in Whole(content).items()}
    return _made(content.facts, tensors, model)


def beginning(content: StoredCache, model: AttachedModel, tokens: int, finished: bool) -> SieveCache:
    """Return a cache of the first tokens of a content with all tokens in all layers.

    Args:
        content: of the same model and plan.
        model: of the new cache.
        tokens: their number.
        finished: True if they are a complete prompt, not the beginning of one.
    """
    turn = Turn(prompt_end=tokens, reading=not finished)
    conversation = Conversation(tokens, 1, turn=turn)
    edits = dict(content.facts["cache"]["Conversation"]["dict"]).get("edits")
    if edits is not None:
        conversation.edits = unpacked(edits, {}, torch.device("cpu"), model.plan).up_to(tokens)
    if finished:
        conversation.prompt_lengths = (tokens,)
        conversation.acted = ((0, tokens),)
        turn.record.prompt_tokens = tokens
    layers = []
    for layer in content.facts["layers"]:
        changed = {name: _cut(part, tokens) for name, part in layer.items()}
        if "num_seen" in changed:
            changed |= {"num_seen": tokens, "lengths": {"tuple": [tokens]}}
        layers.append(changed | ({"view": None} if "view" in layer else {}))
    facts = {"cache": Packer(None)(conversation, "cache"), "layers": layers}
    entries = {name: part for name, part in Whole(content, tokens).items() if name not in content.tensors}
    return _made(facts, entries, model)


def _cut(part: Any, tokens: int) -> Any:
    """Return the description of a tensor's first tokens."""
    if not isinstance(part, dict) or "tensor" not in part or len(part["shape"]) < 3:
        return part
    return part | {"shape": [*part["shape"][:2], tokens, *part["shape"][3:]]}


def _made(facts: dict[str, Any], tensors: dict[str, Tensor], model: AttachedModel) -> SieveCache:
    cache = made_cache({**facts, "ids": None, "extra": {}}, tensors, model).cache
    cache.conversation.edits = cache.conversation.edits.without_counts()
    layer: Any
    for layer in cache.all_layers:
        if layer.memory is not None:
            # Copied before the first write: it has no spare room.
            layer.store = layer.store.share()
    return cache
