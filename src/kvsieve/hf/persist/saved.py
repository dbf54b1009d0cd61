"""A conversation's cache as one file: safetensors with a JSON header, fully checked before use.

The header has the model, its dtype, the tokenizer, the plan, and the cache's facts; tensors are the used part of its
content. Its `sha256` covers the header, and through the header's `tensors` every tensor. Nothing in a file is executed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsieve.cache.parts import from_parts
from kvsieve.errors import CacheFileError, CacheStateError, InputError, KvsieveError, short
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.records import Conversation, Turn
from kvsieve.hf.persist.cache_file import FORMAT, MARK, changed, copied, digest, header_digest, opened, replacing, write
from kvsieve.hf.persist.identity import as_json, check_model, check_plan, model_identity, vocabulary_hash
from kvsieve.hf.persist.packing import Packer, packed_layer, unpacked
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import ChunkedEvictor
from kvsieve.version import __version__


@dataclass(frozen=True)
class Saved:
    """A cache loaded by `load_cache`.

    Attributes:
        cache: to continue with.
        ids: int64 [B, N], the conversation, None if it was saved without.
        extra: as saved.
    """

    cache: SieveCache
    ids: Tensor | None
    extra: dict[str, Any]


def save_cache(
    path: str | os.PathLike[str],
    model: AttachedModel,
    cache: SieveCache,
    *,
    tokenizer: Any = None,
    ids: Tensor | None = None,
    extra: Mapping[str, Any] | None = None,
    force: bool = False,
) -> None:
    """Write `cache`, made by `sieve`, to one file for `load_cache`, replacing an earlier one.

    tokenizer: its vocabulary is then checked on loading. ids: int64 [B, N], the conversation's tokens. extra: any JSON
    value. The file is written atomically: on any failure the file at `path` is untouched. force: replace even a file
    that is not a saved cache.

    Raises CacheStateError in the middle of a prompt, InputError for ids or extra that do not fit and a path with
    another file, and CacheFileError for a state or plan that cannot be saved, or a file that cannot be written.
    """
    _check_whole(model)
    model.check_cache(cache)
    if cache.owner.adopted:
        raise CacheStateError("two plans have read this cache, and a file speaks of one: read the conversation again")
    cache.check_copyable("saved")
    if not isinstance(extra, Mapping | None):
        raise InputError(f"extra= is a dict of what JSON can hold, got a {type(extra).__name__}")
    facts, tensors = packed_cache(cache, _checked_ids(ids, cache), model.model.device)
    header = {
        **identity_of(model, tokenizer),
        **facts,
        "extra": as_json(dict(extra or {}), "extra=", InputError),
    }
    write_cache(path, header, tensors, force)


def identity_of(model: AttachedModel, tokenizer: Any = None) -> dict[str, Any]:
    """Return the identity in a file's header: "model", "tokenizer" and "plan"."""
    return {
        "model": model_identity(model),
        "tokenizer": None if tokenizer is None else vocabulary_hash(tokenizer),
        "plan": as_json(model.plan.to_dict(), f"the plan {model.plan.name!r}", CacheFileError),
    }


def packed_cache(
    cache: SieveCache, ids: Tensor | None, device: torch.device
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return "cache", "layers" and "ids" of a file's header, and their tensors, which are not copied.

    Args:
        cache: between passes.
        ids: int64 [B, N], the conversation, or None.
        device: of the model.
    """
    pack = Packer(device)
    facts = {
        "cache": pack(cache.conversation, "cache"),
        "layers": [packed_layer(layer, index) for index, layer in enumerate(cache.all_layers)],
        "ids": pack(ids, "ids"),
    }
    for layer in facts["layers"]:
        pack.tensors.update(layer.pop("tensors"))
    return json.loads(json.dumps(facts)), pack.tensors


def write_cache(
    path: str | os.PathLike[str], header: dict[str, Any], tensors: Mapping[str, Tensor], force: bool = False
) -> None:
    """Write a file from the results of `identity_of` and `packed_cache`, and "extra"; see `save_cache`."""
    header = {MARK: FORMAT, "kvsieve": __version__, **header}
    header["tensors"] = digest(tensors)
    header["sha256"] = header_digest(header)
    with replacing(path, force) as file:
        write(file, tensors, json.dumps(header))


def load_cache(path: str | os.PathLike[str], model: AttachedModel, *, tokenizer: Any = None) -> Saved:
    """Load a file of `save_cache`, on the model's device, to continue under the same plan.

    Raises CacheFileError, before anything is built, for a file that is unreadable, invalid, truncated, changed, or of
    another format, model, dtype, tokenizer (if both are known) or plan.
    """
    _check_whole(model)
    with opened(path) as (header, file), understood(path):
        check_model(path, header["model"], model_identity(model))
        own_hash = None if tokenizer is None else vocabulary_hash(tokenizer)
        file_hash = header["tokenizer"]
        if own_hash is not None and file_hash is not None and own_hash != file_hash:
            raise CacheFileError(
                f"{path} was made with another tokenizer: its vocabulary has the hash {file_hash[:12]}, "
                f"this one's {own_hash[:12]}; load it with the tokenizer it was made with"
            )
        check_plan(path, header["plan"], json.loads(json.dumps(model.plan.to_dict())))
        return made_cache(header, checked_tensors(path, header, file, copied), model)


def checked_tensors(
    path: str | os.PathLike[str], header: dict[str, Any], file: Any, keep: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return all tensors of an opened file, with their checksum verified.

    Args:
        path: for messages.
        header: of the file.
        file: open in safetensors.
        keep: converts a memory-mapped tensor to the one that is verified and returned.

    Raises:
        CacheFileError: they do not match the header.
    """
    _check_tensors(path, header, file)
    tensors = {name: keep(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 (a file open in safetensors is no mapping)
    if digest(tensors) != header["tensors"]:
        raise changed(path, "its tensors do not match their checksum")
    return tensors


@contextlib.contextmanager
def understood(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn any error in this block into CacheFileError: the file is known to be unchanged."""
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
    """Check, before loading, that the file has exactly the header's tensors."""
    declared = {}
    parts = [header["cache"], header["layers"], header["ids"]]
    while parts:
        part = parts.pop()
        if isinstance(part, dict) and "tensor" in part:
            declared[part["tensor"]] = part["dtype"], part["shape"]
        elif isinstance(part, (dict, list)):
            parts += part.values() if isinstance(part, dict) else part
    names = set(file.keys())
    for name in sorted(declared.keys() | names):
        found = None
        if name in names:
            lies = file.get_slice(name)
            found = lies.get_dtype(), lies.get_shape()
        if found != declared.get(name):
            wanted = _tensor(declared.get(name))
            raise changed(path, f"it holds {_tensor(found)} as {short(name)}, and its header speaks of {wanted}")


def _tensor(kind: tuple[str, list[int]] | None) -> str:
    return "no tensor" if kind is None else f"{kind[0]} {kind[1]}"


def _check_whole(model: AttachedModel) -> None:
    size = model.context.ranks.size
    if size > 1:
        raise CacheFileError(
            f"the model's heads are divided among {size} processes, and a file holds those of all: save "
            "and load with the model on one process, or read the conversation again"
        )


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the header of a saved cache: "kvsieve", "model", "tokenizer", "plan", "extra" and more, JSON's own types.

    Its checksum is verified, that of the tensors is not. Needs no model. Raises CacheFileError.
    """
    with opened(path) as (header, _):
        return header


def made_cache(header: dict[str, Any], tensors: dict[str, Tensor], model: AttachedModel) -> Saved:
    """Return a cache from a header's facts, on the same tensors if they are on the model's device; consumes them."""
    reading = _plan_of_reading(model.plan)
    cache = model.new_cache()
    if len(cache.layers) != len(header["layers"]):
        raise ValueError("a cache of that version has other layers")
    conversation = unpacked(header["cache"], tensors, model.model.device, reading)
    if not isinstance(conversation, Conversation) or not isinstance(conversation.turn, Turn):
        raise ValueError("a cache of that version holds other facts")
    cache.conversation = conversation
    for index, packed in enumerate(header["layers"]):
        layer: Any = cache.layers[index]
        where = _device(model, index)
        parts = {name: unpacked(part, tensors, where, reading) for name, part in packed.items()}
        if parts["kind"] != type(layer).__name__:
            raise ValueError(f"layer {index} is a {parts['kind']} there, a {type(layer).__name__} here")
        if layer.window is not None and parts["window"] != layer.window:
            raise ValueError(f"layer {index} has another window there, {parts['window']}, than here, {layer.window}")
        if layer.memory is not None:
            layer.store = from_parts(parts, model.plan.codec, model.plan.rest)
        for name in layer.saved:
            setattr(layer, name, parts[name])
        if layer.has_state:
            layer.set_states(parts["states"])
    return Saved(cache, unpacked(header["ids"], tensors, model.model.device, reading), header["extra"])


def _plan_of_reading(plan: Plan) -> Plan:
    """Return the plan of passes over a short prompt; see hf/prompt/short.py."""
    evict = None if isinstance(plan.evict, ChunkedEvictor) else plan.evict
    return Plan(evict=evict, prefill=plan.prefill, codec=plan.codec, rest=plan.rest, name=plan.name)


def _device(model: AttachedModel, index: int) -> torch.device:
    """Return the device of a layer's keys and values."""
    weight = next(model.layers[index].parameters(), None)
    return model.model.device if weight is None or weight.is_meta else weight.device


def _checked_ids(ids: Tensor | None, cache: SieveCache) -> Tensor | None:
    if ids is None:
        return None
    seen = cache.conversation.caller_length_and_mask()[0]
    batch = cache.conversation.batch
    whole_ids = isinstance(ids, Tensor) and ids.ndim == 2 and ids.dtype == torch.int64
    if not whole_ids or len(ids) != (batch or len(ids)) or ids.shape[1] < seen:
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(
            f"ids must be the whole conversation, int64 [{batch}, {seen} or more], got {got}; pass what was fed "
            "and generated, such as result.sequences"
        )
    return ids
