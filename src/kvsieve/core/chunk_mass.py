"""Attention of chunks of a prompt to themselves, without a causal mask, gathered over the passes of a prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsieve.core.scoring import score_dtype
from kvsieve.lazy import Tensor, torch
from kvsieve.types import LayerContext

# Weights of the chunks of one block, [Hq, chunks, chunk, chunk] in float32, stay under about 64 MiB.
_BLOCK_ELEMENTS = 1 << 24
_PENDING = ("query", "key", "token")


@dataclass
class ChunkedMass:
    """The mass that each token receives from the queries of its chunk.

    The state gets "mass" float32 [B, H, M] and "index" int32 [B, H, M], the token of each; -1 for filler. Queries and
    keys of an incomplete chunk wait in it. They are the last tokens fed, right-aligned in each row.

    Attributes:
        state: of a layer.
        chunk: tokens per chunk.
    """

    state: dict[str, Any]
    chunk: int

    def add(self, ctx: LayerContext, sinks: int, recent: int) -> None:
        """Add the tokens of a pass, and compute the chunks that are complete with `recent` tokens after them.

        The first `sinks` entries of a row are in no chunk. Every turn begins a chunk.
        """
        state = self.state
        new = ctx.query.shape[2]
        if "mass" not in state:
            shape = ctx.keys.shape
            state["mass"] = torch.zeros(*shape[:2], 0, dtype=score_dtype(ctx.keys.dtype), device=ctx.keys.device)
            state["index"] = ctx.index.new_zeros(*shape[:2], 0)
        elif ctx.step.start == ctx.step.turn_start or int(state["fed"][0]) != ctx.step.start:
            # Other tokens follow: the last chunk of an earlier turn ends here.
            self.finish(recent)
        real = torch.ones(len(ctx.keys), new, dtype=torch.bool, device=ctx.keys.device)
        counts = [new] * len(real)
        if ctx.valid is not None:
            real = ctx.valid[:, 0, -new:].expand(len(real), -1)
            counts = real.sum(-1).tolist()
        # A sink has fewer than `sinks` entries before it.
        early = [min(max(sinks - (stored - count), 0), count) for stored, count in zip(ctx.stored, counts, strict=True)]
        if any(early):
            first = torch.tensor(early).to(real.device, non_blocking=True)[:, None]
            real = real & (real.cumsum(-1) > first)
        pending = torch.tensor([count - left for count, left in zip(counts, early, strict=True)])
        token = ctx.index[:, :, -new:].masked_fill(~real[:, None], -1)
        parts = {"query": ctx.query, "key": ctx.keys[:, :, -new:], "token": token}
        if "query" in state:
            parts = {name: torch.cat([state[name], part], 2) for name, part in parts.items()}
            pending = pending + state["pending"]
        if ctx.valid is not None:
            parts = _closed_up(parts)
        state["fed"] = torch.full((len(real),), ctx.step.start + ctx.step.num_new)
        self._compute(parts, pending, [max(count - recent, 0) // self.chunk * self.chunk for count in pending.tolist()])

    def finish(self, recent: int) -> None:
        """Compute the chunk that is incomplete, without the last `recent` tokens."""
        if "query" in self.state:
            pending = self.state["pending"]
            parts = {name: self.state[name] for name in _PENDING}
            self._compute(parts, pending, [max(count - recent, 0) for count in pending.tolist()])
            for name in (*_PENDING, "pending"):
                del self.state[name]

    def _compute(self, parts: dict[str, Tensor], pending: Tensor, ready: list[int]) -> None:
        """Compute the first ``ready[b]`` of the pending tokens of row b; the others wait."""
        state = self.state
        size = parts["token"].shape[2]
        most = max(ready)
        if most:
            mass = state["mass"].new_zeros(*state["mass"].shape[:2], most)
            index = state["index"].new_full(mass.shape, -1)
            for row, (count, number) in enumerate(zip(pending.tolist(), ready, strict=True)):
                columns = slice(size - count, size - count + number)
                query, key = (parts[name][row, :, columns] for name in ("query", "key"))
                whole = number // self.chunk * self.chunk
                for first, last in ((0, whole), (whole, number)):
                    if first < last:
                        part = query[:, first:last], key[:, first:last]
                        mass[row, :, first:last] = self._mass(*part, mass.dtype)
                index[row, :, :number] = parts["token"][row, :, columns]
            state["mass"] = torch.cat([state["mass"], mass], 2)
            state["index"] = torch.cat([state["index"], index], 2)
        left = pending - torch.tensor(ready)
        start = size - int(left.max())
        if int(left.min()) < size - start:
            place = torch.arange(size, device=parts["token"].device)
            done = place < size - left.to(place.device, non_blocking=True)[:, None]
            parts["token"] = parts["token"].masked_fill(done[:, None], -1)
        # Copies, so that the whole prompt's queries are not kept.
        state.update({name: part[:, :, start:].clone() for name, part in parts.items()}, pending=left)

    def _mass(self, query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mass in each chunk, [H, T], of queries [Hq, T, D] and keys [H, T, D]: whole chunks, or a part."""
        heads, tokens, size = key.shape
        width = min(self.chunk, tokens)
        grouped = query.reshape(heads, -1, tokens // width, width, size)
        keys = key.reshape(heads, 1, tokens // width, width, size)
        block = max(1, _BLOCK_ELEMENTS // (len(query) * width * width))
        out = []
        for first in range(0, tokens // width, block):
            part = slice(first, first + block)
            logits = grouped[:, :, part].to(dtype) @ keys[:, :, part].to(dtype).transpose(-1, -2)
            out.append(logits.softmax(-1).sum(-2).mean(1).flatten(1))
        return torch.cat(out, 1)


def _closed_up(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move the tokens of each row to the right end, those of index -1 to the left."""
    order = (parts["token"][:, 0] >= 0).to(torch.uint8).argsort(dim=-1, stable=True)
    wide = {name: order.view(len(order), 1, -1, *[1] * (part.ndim - 3)) for name, part in parts.items()}
    return {name: part.gather(2, wide[name].expand(part.shape)) for name, part in parts.items()}
