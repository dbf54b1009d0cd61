"""Selections that carry keys, values or weights of the entries they keep: checks, and rows that do not act."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsieve.cache.written import parts_of
from kvsieve.core.checks import refuse
from kvsieve.core.selection import entries_at, pack_ragged
from kvsieve.errors import PlanError
from kvsieve.planning.roles import Evictor
from kvsieve.types import LayerContext, Selection


def check_written(evictor: Evictor, selection: Selection, dims: tuple[int, int]) -> None:
    """Raise PlanError for written parts without the trait, of another shape, or that are no finite numbers.

    dims: channels of a key and of a value.
    """
    name = type(evictor).__name__
    parts = parts_of(selection)
    if not parts:
        return
    if not evictor.traits.writes:
        raise PlanError(
            f"{name}.select returned {', '.join(parts)} of entries, and its class lacks the trait for that; give it "
            "the keyword writes=True"
        )
    places = tuple(selection.indices.shape)
    wanted = {"keys": (*places, dims[0]), "values": (*places, dims[1]), "log_weight": places}
    for part, numbers in parts.items():
        if numbers.shape != wanted[part]:
            raise PlanError(
                f"{name}.select returned {part} of shape {list(numbers.shape)}, expected {list(wanted[part])}: one for "
                "each of its indices"
            )
        _check_finite(name, part, numbers, selection)


def _check_finite(name: str, part: str, numbers: Tensor, selection: Selection) -> None:
    """Raise PlanError if numbers of real entries are NaN or infinite."""
    wrong = ~numbers.isfinite()
    real = selection.real_of_heads()
    if real is not None:
        wrong = wrong & (real if numbers.ndim == 3 else real[..., None])
    refuse(
        wrong.any(), lambda: PlanError(f"{name}.select returned {part} that are NaN or infinite; return finite numbers")
    )


def in_rows(selection: Selection, ctx: LayerContext, due: tuple[bool, ...]) -> Selection:
    """Return the selection in due rows; the others keep all real entries as they are."""
    real = selection.real_of_heads()
    indices = selection.indices
    shape = ctx.keys.shape
    real = torch.ones_like(indices, dtype=torch.bool) if real is None else real.expand_as(indices)
    stays = torch.zeros(*indices.shape[:2], shape[2], dtype=torch.int64, device=indices.device)
    stays = stays.scatter_add(2, indices, real.long()) > 0
    valid = torch.ones(1, 1, 1, dtype=torch.bool, device=stays.device) if ctx.valid is None else ctx.valid
    copies = stays.shape[1] // shape[1]
    whole = valid.expand(shape[0], shape[1], shape[2]).repeat_interleave(copies, 1)
    acts = torch.tensor(due, device=stays.device)[:, None, None]
    kept = pack_ragged(stays.where(acts, whole))
    if not selection.writes:
        return kept
    weights = torch.zeros_like(ctx.index, dtype=torch.float32) if ctx.log_weight is None else ctx.log_weight
    stored = {"keys": ctx.keys, "values": ctx.values, "log_weight": weights}
    parts = {
        name: entries_at(_at_slots(stored[name], part, indices, real & acts, copies), kept.indices)
        for name, part in parts_of(selection).items()
    }
    written = (parts.get(name) for name in ("keys", "values", "log_weight"))
    return Selection(kept.indices, kept.lengths, kept.head_lengths, *written)


def _at_slots(stored: Tensor, part: Tensor, slots: Tensor, real: Tensor, copies: int) -> Tensor:
    """Return stored [B, H', N, ...] with `part` [B, H', K, ...] at its slots where `real`."""
    whole = stored.repeat_interleave(copies, 1)
    row, head, place = real.nonzero(as_tuple=True)
    whole[row, head, slots[row, head, place]] = part[row, head, place].to(whole.dtype)
    return whole
