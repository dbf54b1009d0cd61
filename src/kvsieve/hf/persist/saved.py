"""A conversation's cache as one file: safetensors with a JSON header, checked in every part before it is used.

The header tells the model, its dtype, the tokenizer and the plan, and what the cache knew; tensors are the used part of
what it held. Its `sha256` covers the header, and through the header's `tensors` every tensor. Nothing in a file is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvsieve.cache import DenseStore, RaggedStore, View
from kvsieve.cache.base import grown
from kvsieve.cache.ragged import whole
from kvsieve.errors import CacheFileError, CacheStateError, InputError, KvsieveError, short
from kvsieve.hf.cache.cache import Passes, Reads, SieveCache, SieveLayer, TurnRecord
from kvsieve.hf.compat import Cache, DynamicSlidingWindowLayer
from kvsieve.hf.persist.cache_file import (
    DTYPES,
    FORMAT,
    MARK,
    as_bytes,
    changed,
    copied,
    digest,
    header_digest,
    opened,
    replacing,
    write,
)
from kvsieve.hf.prompt.read import Restart
from kvsieve.plans import Plan
from kvsieve.profiles import Fingerprint
from kvsieve.protection import ProtectedTokens
from kvsieve.roles import ChunkedEvictor
from kvsieve.version import __version__

if TYPE_CHECKING:
    from kvsieve.hf.attach import Sieve

_RECORDS: dict[str, Any] = {kind.__name__: kind for kind in (TurnRecord, Reads, Passes, ProtectedTokens, Restart, View)}
# Of a cache and a layer: what is written apart, what says only that a prompt is half-read, what transformers notes.
_APART = {"layers", "owner", "passing", "_snapshots", "waiting", "own_plan", "in_flight", "more_chunks", "reordered"}
_APART |= {"_is_user_defined"}
_APART |= vars(Cache(layers=[])).keys()
_LAYER_APART = {"store", "_staged"}
# What decides where keys are turned to and how far a layer sees, and cannot be told from weights.
_POSITIONS = ("rope_parameters", "layer_types", "sliding_window", "no_rope_layers", "attention_chunk_size")
# Evenly spaced elements of each weight tensor that are hashed.
_SAMPLE = 64


@dataclass(frozen=True)
class Saved:
    """What `load_cache` read. ids: int64 [B, N], the conversation, None if it was saved without; extra: as saved."""

    cache: SieveCache
    ids: Tensor | None
    extra: dict[str, Any]


def save_cache(
    path: str | os.PathLike[str],
    sieve: Sieve,
    cache: SieveCache,
    *,
    tokenizer: Any = None,
    ids: Tensor | None = None,
    extra: Mapping[str, Any] | None = None,
    force: bool = False,
) -> None:
    """Write `cache`, made by `sieve`, to one file that `load_cache` reads, in place of one that was saved there.

    tokenizer: its vocabulary is then checked on loading. ids: int64 [B, N], the conversation's tokens. extra: anything
    JSON can hold. The file appears whole or not at all: on any failure what was at `path` is untouched. force: replace
    a file that is no saved cache too.

    Raises CacheStateError while a prompt is half-read, InputError for ids or extra that do not fit and a path where
    another file is, and CacheFileError for a state or plan that cannot be saved and where the file cannot be written.
    """
    _check_whole(sieve)
    sieve.check_cache(cache)
    if cache.owner.adopted:
        raise CacheStateError("two plans have read this cache, and a file speaks of one: read the conversation again")
    half_read = cache.awaits_prompt and cache.num_seen > cache.turn_start
    if cache.in_flight or cache.waiting or cache.more_chunks or cache.own_plan is not None or half_read:
        raise CacheStateError("the cache is in the middle of a prompt and cannot be saved; finish it first")
    if not isinstance(extra, Mapping | None):
        raise InputError(f"extra= is a dict of what JSON can hold, got a {type(extra).__name__}")
    pack = _Packer(sieve.model.device)
    header = {
        MARK: FORMAT,
        "kvsieve": __version__,
        "model": _model(sieve),
        "tokenizer": None if tokenizer is None else _vocabulary(tokenizer),
        "plan": _json(sieve.plan.to_dict(), f"the plan {sieve.plan.name!r}", CacheFileError),
        "cache": pack(_fields(cache, _APART), "cache"),
        "layers": [_packed_layer(layer, index) for index, layer in enumerate(cache.layers)],
        "ids": pack(_checked_ids(ids, cache), "ids"),
        "extra": _json(dict(extra or {}), "extra=", InputError),
    }
    tensors = pack.tensors
    for layer in header["layers"]:
        tensors.update(layer.pop("tensors"))
    header = json.loads(json.dumps(header))
    header["tensors"] = digest(tensors)
    header["sha256"] = header_digest(header)
    with replacing(path, force) as file:
        write(file, tensors, json.dumps(header))


def load_cache(path: str | os.PathLike[str], sieve: Sieve, *, tokenizer: Any = None) -> Saved:
    """The cache that `save_cache` wrote, on the model's device, to go on with under the same plan.

    Raises CacheFileError, before anything is built, for a file that cannot be read, is no such file, was cut or
    changed, is of another format, or was made with another model, dtype, tokenizer (where both are known) or plan.
    """
    _check_whole(sieve)
    with opened(path) as (header, file), understood(path):
        _check_model(path, header["model"], _model(sieve))
        mine = None if tokenizer is None else _vocabulary(tokenizer)
        theirs = header["tokenizer"]
        if mine is not None and theirs is not None and mine != theirs:
            raise CacheFileError(
                f"{path} was made with another tokenizer: its vocabulary has the hash {theirs[:12]}, "
                f"this one's {mine[:12]}; load it with the tokenizer it was made with"
            )
        _check_plan(path, header["plan"], json.loads(json.dumps(sieve.plan.to_dict())))
        _check_tensors(path, header, file)
        tensors = {name: copied(file.get_tensor(name)) for name in file.keys()}
        if digest(tensors) != header["tensors"]:
            raise changed(path, "its tensors do not match their checksum")
        return _made(header, tensors, sieve)


@contextlib.contextmanager
def understood(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever goes wrong in here is the fault of what the file says, which is known to be as it was written."""
    try:
        yield
    except (KvsieveError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CacheFileError(
            f"{path} cannot be read by kvsieve {__version__}: {short(error)}; use the version that wrote it, or "
            "read the conversation again"
        ) from error


def _check_tensors(path: Any, header: dict[str, Any], file: Any) -> None:
    """Before any of it is read: the file holds what its header speaks of, and no more."""
    told = {}
    parts = [header["cache"], header["layers"], header["ids"]]
    while parts:
        part = parts.pop()
        if isinstance(part, dict) and "tensor" in part:
            told[part["tensor"]] = part["dtype"], part["shape"]
        elif isinstance(part, (dict, list)):
            parts += part.values() if isinstance(part, dict) else part
    names = set(file.keys())
    for name in sorted(told.keys() | names):
        found = None
        if name in names:
            lies = file.get_slice(name)
            found = lies.get_dtype(), lies.get_shape()
        if found != told.get(name):
            wanted = _tensor(told.get(name))
            raise changed(path, f"it holds {_tensor(found)} as {short(name)}, and its header speaks of {wanted}")


def _tensor(kind: tuple[str, list[int]] | None) -> str:
    return "no tensor" if kind is None else f"{kind[0]} {kind[1]}"


def _check_whole(sieve: Sieve) -> None:
    if sieve.ranks.size > 1:
        raise CacheFileError(
            f"the model's heads are divided among {sieve.ranks.size} processes, and a file holds those of all: save "
            "and load with the model on one process, or read the conversation again"
        )


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The header of a saved cache: "kvsieve", "model", "tokenizer", "plan", "extra" and more, JSON's own types.

    Its checksum is verified, that of the tensors is not. Needs no model. Raises CacheFileError.
    """
    with opened(path) as (header, _):
        return header


class _Packer:
    """Values as JSON has them; their tensors are set aside. device: where tensors are expected to be."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Tensor):
            if value.dtype not in DTYPES or value.layout != torch.strided or value.is_meta:
                raise CacheFileError(
                    f"{where} is a tensor of {value.dtype}, {value.layout} on {value.device}: not saved"
                )
            name = where
            while name in self.tensors:
                name += "'"
            self.tensors[name] = value.detach()
            # Some scratch of methods is on the CPU whatever the model's device is.
            host = value.device.type == "cpu" and self.device != value.device
            return {"tensor": name, "host": host, "dtype": DTYPES[value.dtype], "shape": list(value.shape)}
        if type(value) is list:
            return [self(part, f"{where}.{place}") for place, part in enumerate(value)]
        if type(value) in (tuple, set):
            parts = sorted(value) if type(value) is set else value
            return {type(value).__name__: [self(part, f"{where}.{place}") for place, part in enumerate(parts)]}
        if type(value) is dict:
            return {"dict": [[self(key, f"{where} key"), self(part, f"{where}.{key}")] for key, part in value.items()]}
        if _RECORDS.get(type(value).__name__) is type(value):
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            if isinstance(value, Restart):
                del fields["plan"]
            return {type(value).__name__: self(fields, where)}
        raise CacheFileError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a file cannot hold (tensors, "
            "numbers, text, and lists, tuples, sets and dicts of them can): this cache cannot be saved"
        )


def _unpacked(value: Any, tensors: dict[str, Tensor], device: torch.device, reading: Plan) -> Any:
    """The inverse of `_Packer`. reading: the plan of a Restart."""
    if isinstance(value, list):
        return [_unpacked(part, tensors, device, reading) for part in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        tensor = tensors.pop(value["tensor"])
        return tensor if value["host"] else tensor.to(device)
    ((kind, parts),) = value.items()
    if kind == "dict":
        return {
            _unpacked(key, tensors, device, reading): _unpacked(part, tensors, device, reading) for key, part in parts
        }
    parts = _unpacked(parts, tensors, device, reading)
    if kind in ("tuple", "set"):
        return tuple(parts) if kind == "tuple" else set(parts)
    return _RECORDS[kind](**parts, **({"plan": reading} if kind == "Restart" else {}))


def _fields(owner: Any, apart: set[str]) -> dict[str, Any]:
    return {name: part for name, part in vars(owner).items() if name not in apart}


def _packed_layer(layer: Any, index: int) -> dict[str, Any]:
    """One layer as JSON has it, and under "tensors" what it holds."""
    parts: dict[str, Any]
    if isinstance(layer, SieveLayer):
        parts = {"kind": "stored", **_store_parts(layer.store), **_fields(layer, _LAYER_APART)}
    elif type(layer) is DynamicSlidingWindowLayer and not layer.record_past:
        parts = {"kind": "sliding", "window": layer.sliding_window, "seen": layer.cumulative_length}
        parts |= {"keys": layer.keys, "values": layer.values} if layer.is_initialized else {}
    else:
        raise CacheFileError(f"layer {index} is a {type(layer).__name__} in a state that is not known: not saved")
    pack = _Packer(parts["keys"].device if "keys" in parts else None)
    return {**{name: pack(part, f"layers.{index}.{name}") for name, part in parts.items()}, "tensors": pack.tensors}


def _store_parts(store: DenseStore | RaggedStore) -> dict[str, Any]:
    """What a store holds, without room to spare; what is derived from it is made again."""
    if store.is_empty:
        return {}
    parts: dict[str, Any] = {"lengths": store.lengths}
    if isinstance(store, DenseStore):
        return parts | {"keys": store.keys, "values": store.values, "index": store.index, "valid": store.valid}
    keys, values, index = (part[:, : store.size] for part in store._buffers())
    parts |= {"keys": keys, "values": values, "index": index, "visible": store._visible()}
    return parts | {"body": store._body, "counts": store._counts, "hides_newest": store.hides_newest}


def _store(parts: dict[str, Any]) -> DenseStore | RaggedStore:
    """The inverse of `_store_parts`."""
    if "keys" not in parts:
        return DenseStore()
    store: DenseStore | RaggedStore
    buffers = [parts[name] for name in ("keys", "values", "index")]
    if "counts" not in parts:
        store = DenseStore()
        store.size, store.valid_buffer = parts["keys"].shape[2], parts["valid"]
    else:
        store = RaggedStore()
        store.size, store._body = parts["keys"].shape[1], parts["body"]
        store._counts, store.hides_newest = parts["counts"], parts["hides_newest"]
        # Attention reads flat buffers up to a whole number of lanes.
        capacity = whole(store.size)
        visible = grown(parts["visible"], 2, store.size, capacity)
        bias = buffers[0].new_zeros(visible.shape)
        store.valid_buffer = bias.masked_fill_(~visible, torch.finfo(bias.dtype).min)
        if capacity > store.size:
            buffers = [grown(part, 1, store.size, capacity) for part in buffers]
    store._keys, store._values, store._index = buffers
    store.lengths = parts["lengths"]
    return store


def _made(header: dict[str, Any], tensors: dict[str, Tensor], sieve: Sieve) -> Saved:
    reading, device = _plan_of_reading(sieve.plan), sieve.model.device
    cache = sieve.new_cache()
    fields = _unpacked(header["cache"], tensors, device, reading)
    if fields.keys() != _fields(cache, _APART).keys() or len(cache.layers) != len(header["layers"]):
        raise ValueError("a cache of that version holds other facts")
    vars(cache).update(fields)
    for index, packed in enumerate(header["layers"]):
        layer: Any = cache.layers[index]
        where = _device(sieve, index)
        parts = {name: _unpacked(part, tensors, where, reading) for name, part in packed.items()}
        if (parts["kind"] == "stored") != isinstance(layer, SieveLayer):
            raise ValueError(f"layer {index} is of another kind there")
        if not isinstance(layer, SieveLayer):
            if parts["window"] != layer.sliding_window:
                raise ValueError(f"layer {index} has a window of {parts['window']} there, {layer.sliding_window} here")
            if "keys" in parts:
                layer.lazy_initialization(parts["keys"], parts["values"])
                layer.keys, layer.values = parts["keys"], parts["values"]
            layer.cumulative_length = parts["seen"]
            continue
        layer.store = _store(parts)
        for name in _fields(layer, _LAYER_APART):
            setattr(layer, name, parts[name])
    return Saved(cache, _unpacked(header["ids"], tensors, device, reading), header["extra"])


def _plan_of_reading(plan: Plan) -> Plan:
    """What passes over a prompt's shorter reading run under; see restart.py."""
    return Plan(evict=None if isinstance(plan.evict, ChunkedEvictor) else plan.evict, name=plan.name)


def _device(sieve: Sieve, index: int) -> torch.device:
    """Where a layer's keys and values are made."""
    weight = next(sieve.decoder.layers[index].parameters(), None)  # type: ignore[index, union-attr]
    return sieve.model.device if weight is None or weight.is_meta else weight.device


def _checked_ids(ids: Tensor | None, cache: SieveCache) -> Tensor | None:
    if ids is None:
        return None
    seen = cache.told()[0]
    whole_ids = isinstance(ids, Tensor) and ids.ndim == 2 and ids.dtype == torch.int64
    if not whole_ids or len(ids) != (cache.batch or len(ids)) or ids.shape[1] < seen:
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(
            f"ids must be the whole conversation, int64 [{cache.batch}, {seen} or more], got {got}; pass what was fed "
            "and generated, such as result.sequences"
        )
    return ids


def _json(value: Any, what: str, error: type[Exception]) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as problem:
        raise error(f"{what} cannot be written as JSON: {problem}") from None


def _model(sieve: Sieve) -> dict[str, Any]:
    config = sieve.model.config
    positions = {name: getattr(sieve.config, name, None) for name in _POSITIONS}
    return {
        "id": str(getattr(config, "_name_or_path", "") or ""),
        "revision": getattr(config, "_commit_hash", None),
        "class": type(sieve.model).__name__,
        "shape": dataclasses.asdict(Fingerprint.of(sieve.model)),
        "positions": _json(positions, "the model's configuration", CacheFileError),
        "dtype": str(sieve.model.dtype).removeprefix("torch."),
        "weights": _weights(sieve),
    }


def _weights(sieve: Sieve) -> str:
    """A hash of a few elements of every weight of the decoder, whatever they are called and in which order."""
    found = []
    for weight in sieve.decoder.parameters():
        if not weight.is_meta:
            # An odd step, so that not all elements are of one column.
            part = weight.detach().flatten()[:: max(1, weight.numel() // _SAMPLE) | 1][:_SAMPLE]
            found.append(hashlib.sha256(repr(tuple(weight.shape)).encode() + as_bytes(part)).digest())
    return hashlib.sha256(b"".join(sorted(found))).hexdigest()


def _vocabulary(tokenizer: Any) -> str:
    """A hash of what each token id stands for."""
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def _check_model(path: Any, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    both = f"{path} was made with {_named(theirs)}, this model is {_named(mine)}"
    shapes = [Fingerprint(**each["shape"]) for each in (theirs, mine)]
    differ = shapes[0].differences(shapes[1])
    if differ or theirs["class"] != mine["class"]:
        found = ", ".join([*([] if theirs["class"] == mine["class"] else ["class"]), *differ])
        raise CacheFileError(f"{both}; they differ in {found}. Its file: {shapes[0]}; here: {shapes[1]}")
    found = _differences(theirs["positions"], mine["positions"])
    if found:
        raise CacheFileError(f"{both}; their configurations differ: {found}")
    if theirs["dtype"] != mine["dtype"]:
        raise CacheFileError(
            f"{path} was made with {_named(theirs)} in {theirs['dtype']}, this model is in {mine['dtype']}; load the "
            f"model in {theirs['dtype']}"
        )
    if theirs["weights"] != mine["weights"]:
        raise CacheFileError(
            f"{both}, of the same shape, but with other weights; load the checkpoint that the cache was made with"
        )


def _named(model: dict[str, Any]) -> str:
    revision = f" at {model['revision'][:12]}" if model["revision"] else ""
    return f"{model['id'] or 'a model without a name'}{revision} ({model['class']})"


def _check_plan(path: Any, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    names = [each["name"] for each in (theirs, mine)]
    # What a plan and a profile are called says nothing of what they do.
    for each in (theirs, mine):
        each.pop("name")
        each.get("profile", {}).pop("name", None)
    found = _differences(theirs, mine)
    if found:
        raise CacheFileError(
            f"{path} was made under the plan {names[0]!r}, and this one, {names[1]!r}, differs: {found}; attach the "
            "plan it was made under"
        )


def _differences(theirs: Any, mine: Any) -> str:
    """The first few places where two JSON values differ, and what stands there in the file and here."""
    found = list(_differing(theirs, mine, ""))
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more


def _differing(theirs: Any, mine: Any, where: str) -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for name in sorted(theirs.keys() | mine.keys()):
            yield from _differing(theirs.get(name), mine.get(name), f"{where}.{name}" if where else name)
    elif theirs != mine:
        yield f"{where} is {_short(theirs)} in the file and {_short(mine)} here"


def _short(value: Any) -> str:
    if isinstance(value, dict) and "type" in value:
        return str(value["type"])
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


__all__ = ["FORMAT", "Saved", "load_cache", "read_header", "save_cache"]
