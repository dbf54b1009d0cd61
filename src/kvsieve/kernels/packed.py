"""Attention of one new token per row over encoded entries, decoded by the kernel as it reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsieve.kernels.decode import Entries, causal
from kvsieve.kernels.inputs import PackedBlocks, Queries
from kvsieve.kernels.launch import PER_SM, cdiv, fitting, multiprocessors, on, padded, power_of_two, precision
from kvsieve.kernels.packed_any import packed_kernel
from kvsieve.kernels.packed_planes import planes_kernel
from kvsieve.kernels.split import merge_kernel

# Bytes of the entries that a program decodes at a time, in float32; they are in shared memory.
_BYTES = 32 << 10
# Of `planes_kernel`: most entries of a step, and programs of a multiprocessor, with their warps and stages. On an H100
# the best of 24 settings for 2 bits, and within 1.02 and 1.08 of the best for 4 bits (32K and 128K entries).
BLOCK = 64
PROGRAMS = 4
WARPS = 4
STAGES = 2
# Least columns of a plane of values, padding or not.
_VALUE_COLUMNS = 32
# Planes of keys or values that it supports; with more, small products would dominate.
_PLANES = 16
# Queries of a KV row that a program takes.
_QUERIES = 32
# Parts of a KV row that are merged at a time.
_MERGED = 32


def exact_decode(
    asked: Queries, keys: Tensor, values: Tensor, *, length: Tensor | None = None, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention over the entries that are not encoded, the new tokens' among them; each sees itself, padding or not.

    Args:
        asked: queries [B * H, G, L, D], without sinks.
        keys: [B, H, N, D], possibly a view of a larger buffer.
        values: [B, H, N, Dv], possibly a view of a larger buffer.
        length: entries, one integer on the device; None for N.
        valid: bool [B, H or 1, N], False for padding; None if there is none.

    Returns:
        Output [B * H, G, L, Dv] and log-sum-exp float32 [B * H, G, L].
    """
    entries = Entries(keys.shape[2] if length is None else length, keys.shape[2])
    return causal(asked, asked.query, keys, values, entries, valid)


def packed_decode(
    query: Tensor,
    base: Tensor | None,
    table: Tensor,
    fills: Tensor,
    keys: PackedBlocks,
    values: PackedBlocks,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over encoded entries.

    Args:
        query: float32 [R, G, D], scaled, and rotated as the keys are.
        base: float32 [R, G], added to every logit of a query; None for nothing.
        table: int64 [R, M], blocks of each KV row.
        fills: int64 [R, M], entries of each block.
        keys: the pool of blocks.
        values: the pool of blocks.
        softcap: of the logits; None for none.

    Returns:
        Output float32 [R, G, Dv], rotated as the values are, and log-sum-exp float32 [R, G].
    """
    if query.shape[1] > _QUERIES:
        bases = [None] * -(-query.shape[1] // _QUERIES) if base is None else base.split(_QUERIES, 1)
        pairs = zip(query.split(_QUERIES, 1), bases, strict=True)
        found = [packed_decode(*pair, table, fills, keys, values, softcap) for pair in pairs]
        outs, norms = zip(*found, strict=True)
        return torch.cat(outs, 1), torch.cat(norms, 1)
    planes = _planes("KEY", keys) and _planes("VALUE", values)
    launch = _launch_planes if planes else _launch
    rows, groups, per_row = *query.shape[:2], table.shape[1]
    per = cdiv(rows * per_row, (PROGRAMS if planes else PER_SM) * multiprocessors(query.device))
    parts = cdiv(per_row, per)
    of_parts = query.new_empty(rows, parts, groups, values.dim)
    of_norms = query.new_empty(rows, parts, groups)
    inputs = query.contiguous(), base if base is None else base.contiguous(), table.contiguous(), fills.contiguous()
    with on(query):
        launch(inputs, keys, values, softcap, per, (of_parts, of_norms))
    return (of_parts[:, 0], of_norms[:, 0]) if parts == 1 else _merged(of_parts, of_norms)


def _launch(
    inputs: tuple[Tensor | None, ...],
    keys: PackedBlocks,
    values: PackedBlocks,
    softcap: float | None,
    per: int,
    outputs: tuple[Tensor, Tensor],
) -> None:
    """Run `packed_kernel`, which supports every format; inputs: query, base, table, fills."""
    rows, parts, groups, wide = outputs[0].shape
    sizes = {"PADDED_GROUPS": padded(groups), "PADDED_DIM": padded(keys.dim), "PADDED_VALUE_DIM": padded(wide)}
    packed_kernel[rows, parts](
        *inputs,
        *(keys.packed, keys.scale, keys.zero, keys.levels),
        *(values.packed, values.scale, values.zero, values.levels),
        *outputs,
        *_numbers(inputs, softcap, per),
        **_facts(inputs, keys, values, softcap),
        **_format("KEY", keys),
        **_format("VALUE", values),
        **sizes,
        BLOCK=fitting(_BYTES, (padded(keys.dim) + padded(wide)) * 4, padded(keys.packed.shape[1])),
        PRECISION=precision(torch.float32),
        num_warps=4,
        num_stages=2,
    )


def _launch_planes(
    inputs: tuple[Tensor | None, ...],
    keys: PackedBlocks,
    values: PackedBlocks,
    softcap: float | None,
    per: int,
    outputs: tuple[Tensor, Tensor],
) -> None:
    rows, parts, groups, _ = outputs[0].shape
    padded_groups = max(8, power_of_two(groups))
    # The number of logits does not depend on how many query heads share the entries.
    block = max(16, min(BLOCK * 8 // padded_groups, padded(keys.packed.shape[1])))
    planes_kernel[rows, parts](
        *inputs,
        *(keys.packed.view(torch.int16), keys.scale, keys.zero),
        *(values.packed.view(torch.int16), values.scale, values.zero),
        *outputs,
        *_numbers(inputs, softcap, per),
        **_facts(inputs, keys, values, softcap),
        **_planes("KEY", keys),
        **_planes("VALUE", values),
        ROWS=padded_groups,
        BLOCK=block,
        num_warps=WARPS,
        num_stages=STAGES,
    )


def _numbers(inputs: tuple[Tensor | None, ...], softcap: float | None, per: int) -> tuple[float, int, int]:
    table = inputs[2]
    assert table is not None
    return 1.0 if softcap is None else float(softcap), table.shape[1], per


def _facts(
    inputs: tuple[Tensor | None, ...], keys: PackedBlocks, values: PackedBlocks, softcap: float | None
) -> dict[str, int]:
    query, base = inputs[:2]
    assert query is not None
    facts = {"TOKENS": keys.packed.shape[1], "BASE": base is not None, "SOFTCAP": softcap is not None}
    return facts | {"GROUPS": query.shape[1], "DIM": keys.dim, "VALUE_DIM": values.dim}


def _planes(name: str, blocks: PackedBlocks) -> dict[str, int]:
    """Return the arguments of `planes_kernel` for keys or values; none if it does not support their format."""
    if blocks.bits not in (2, 4, 8) or blocks.levels is not None:
        return {}
    # An entry has as many bytes as channels at one bit position.
    size = blocks.dim * blocks.bits // 8
    group = blocks.group
    channels = min(size, group or size)
    if size % channels or group % channels or channels % 2 or 2 * blocks.dim // channels > _PLANES:
        return {}
    if blocks.packed.data_ptr() % 2:
        return {}
    facts = {"BITS": blocks.bits, "GROUP": group, "ZERO": blocks.zero is not None}
    # Warps share the columns of values; with fewer columns, every warp would do the same work.
    columns = channels // 2
    facts |= {"COLUMNS": columns, "PADDED": max(padded(columns), _VALUE_COLUMNS if name == "VALUE" else 0)}
    return {f"{name}_{fact}": value for fact, value in facts.items()}


def _merged(of_parts: Tensor, of_norms: Tensor) -> tuple[Tensor, Tensor]:
    """Merge parts [R, S, G, Dv] with log-sum-exp [R, S, G] into outputs [R, G, Dv] with log-sum-exp [R, G]."""
    rows, parts, groups, wide = of_parts.shape
    out = of_parts.new_empty(rows, groups, wide)
    norm = of_norms.new_empty(rows, groups)
    sizes = {"PADDED_PARTS": power_of_two(parts), "PADDED_VALUE_DIM": padded(wide), "BLOCK": _MERGED, "num_warps": 4}
    with on(out):
        merge_kernel[rows, groups](
            *(of_parts, of_norms, out, norm, None, parts, 1), GROUPS=groups, VALUE_DIM=wide, SINKS=False, **sizes
        )
    return out, norm


def _format(name: str, blocks: PackedBlocks) -> dict[str, object]:
    facts = {
        "BITS": blocks.bits,
        "BYTES": blocks.packed.shape[2],
        "GROUP": blocks.group,
        "ZERO": blocks.zero is not None,
        "LEVELS": blocks.levels is not None,
    }
    return {f"{name}_{fact}": value for fact, value in facts.items()}
