"""Packing of a cache's facts as JSON and named tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvsieve.attention import Window
from kvsieve.cache import View
from kvsieve.errors import CacheFileError
from kvsieve.hf.cache.counts import Passes, PromptBlocks, Reads
from kvsieve.hf.cache.edits import EditRecord
from kvsieve.hf.cache.records import Conversation, ParallelDocuments, PropagatedTokens, Turn, TurnRecord
from kvsieve.hf.cache.row_ends import RowEnds
from kvsieve.hf.cache.short_prompt import ShortPrompt
from kvsieve.hf.cache.states import CacheLayer
from kvsieve.hf.persist.cache_file import DTYPES
from kvsieve.planning.plans import Plan
from kvsieve.planning.protection import ProtectedTokens

_RECORDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Conversation,
        Turn,
        TurnRecord,
        EditRecord,
        PropagatedTokens,
        ParallelDocuments,
        Reads,
        Passes,
        PromptBlocks,
        ProtectedTokens,
        RowEnds,
        ShortPrompt,
        View,
        Window,
    )
}


class Packer:
    """Converts values to JSON, and collects their tensors.

    Attributes:
        device: expected device of tensors.
        tensors: by name.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Tensor):
            if str(value.dtype) not in DTYPES or value.layout != torch.strided or value.is_meta:
                raise CacheFileError(
                    f"{where} is a tensor of {value.dtype}, {value.layout} on {value.device}: not saved"
                )
            name = where
            while name in self.tensors:
                name += "'"
            self.tensors[name] = value.detach()
            # Some state of methods is on the CPU for any model device.
            host = value.device.type == "cpu" and self.device != value.device
            return {"tensor": name, "host": host, "dtype": DTYPES[str(value.dtype)], "shape": list(value.shape)}
        if type(value) is list:
            return [self(part, f"{where}.{place}") for place, part in enumerate(value)]
        if type(value) in (tuple, set):
            parts = sorted(value) if type(value) is set else value
            return {type(value).__name__: [self(part, f"{where}.{place}") for place, part in enumerate(parts)]}
        if type(value) is dict:
            return {"dict": [[self(key, f"{where} key"), self(part, f"{where}.{key}")] for key, part in value.items()]}
        if _RECORDS.get(type(value).__name__) is type(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            if isinstance(value, ShortPrompt):
                del fields["plan"]
            return {type(value).__name__: self(fields, where)}
        raise CacheFileError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a file cannot hold (tensors, "
            "numbers, text, and lists, tuples, sets and dicts of them can): this cache cannot be saved"
        )


def unpacked(value: Any, tensors: dict[str, Tensor], device: torch.device, reading: Plan) -> Any:
    """Return the inverse of `Packer`.

    Args:
        value: as JSON has it.
        tensors: by name; those used are taken out.
        device: to put them on.
        reading: the plan of a ShortPrompt.
    """
    if isinstance(value, list):
        return [unpacked(part, tensors, device, reading) for part in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        tensor = tensors.pop(value["tensor"])
        return tensor if value["host"] else tensor.to(device)
    ((kind, parts),) = value.items()
    if kind == "dict":
        return {
            unpacked(key, tensors, device, reading): unpacked(part, tensors, device, reading) for key, part in parts
        }
    parts = unpacked(parts, tensors, device, reading)
    if kind in ("tuple", "set"):
        return tuple(parts) if kind == "tuple" else set(parts)
    facts = {**parts, "plan": reading} if kind == "ShortPrompt" else parts
    fields = {field.name: field for field in dataclasses.fields(_RECORDS[kind])}
    later = {
        "Conversation": {"acted", "tables", "ends", "position_shift", "ids", "approximate", "edits", "parallel"},
        "Turn": {"length", "rearranged"},
        "TurnRecord": {"blocks", "reread"},
        "EditRecord": {"alone"},
    }.get(kind, set())
    if not fields.keys() - later <= facts.keys() <= fields.keys():
        raise ValueError(f"a {kind} of that version holds other facts")
    return _RECORDS[kind](**facts)


def packed_layer(layer: CacheLayer, index: int) -> dict[str, Any]:
    """Return one layer as JSON, with its tensors under "tensors"."""
    parts: dict[str, Any] = {"kind": type(layer).__name__}
    if layer.memory is not None:
        parts |= layer.memory.parts()
    parts |= {name: vars(layer)[name] for name in layer.saved}
    if layer.has_state:
        parts["states"] = layer.states()
    keys = parts.get("exact", parts).get("keys")
    pack = Packer(None if keys is None else keys.device)
    return {**{name: pack(part, f"layers.{index}.{name}") for name, part in parts.items()}, "tensors": pack.tensors}
