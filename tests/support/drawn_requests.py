"""Random requests for attention, and the output that counts of them."""

from __future__ import annotations

import dataclasses
import random

import torch

from attend import asking
from kvsieve.attention import (
    AttentionRequest,
    ChosenBlocks,
    DenseEntries,
    EncodedEntries,
    FlatEntries,
    Latents,
    Near,
    ScaledPart,
    Shown,
    UpProjection,
    Window,
)
from kvsieve.attention.request import Foreseen
from kvsieve.cache import DenseStore, PackedStore
from kvsieve.core.blocks import BlockGrid
from kvsieve.core.kv_rows import Choice, DeviceLength, KVRows
from kvsieve.methods import Int8

KINDS = (
    "token",
    "prompt",
    "recorded",
    "flat",
    "encoded",
    "window",
    "mask",
    "scaled",
    "blocks",
    "latents",
    "rows",
    "chosen",
)
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclasses.dataclass
class Draw:
    """A random request of one kind, and where its output counts."""

    kind: str
    seed: int

    def __post_init__(self):
        self.dice = random.Random(f"{self.kind} {self.seed}")
        self.numbers = torch.Generator().manual_seed(self.seed)
        self.dtype = self.dice.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64))
        if self.kind == "encoded":
            self.dtype = torch.float32
        self.batch, self.heads, self.groups = (self.dice.choice(sizes) for sizes in ((1, 2), (1, 2, 3), (1, 2, 4)))
        self.dim, self.wide = self.dice.choice(((16, 16), (32, 32), (8, 24)))
        self.length = self.dice.choice((1, 7, 65, 150, 260))
        sizes = {"token": (1,), "flat": (1, 5), "encoded": (1, 5), "recorded": (5, 17)}.get(self.kind, (1, 5, 64, 80))
        self.new = min(self.length, self.dice.choice(sizes))

    def random(self, *shape):
        return torch.randn(shape, generator=self.numbers).to(self.dtype)

    def entries(self):
        # As a store has them: views of longer buffers.
        keys = self.random(self.batch, self.heads, self.length + 3, self.dim)[:, :, : self.length]
        return keys, self.random(self.batch, self.heads, self.length + 3, self.wide)[:, :, : self.length]

    def valid(self, heads):
        if self.dice.random() < 0.5:
            return None
        valid = torch.rand(self.batch, heads, self.length, generator=self.numbers) < 0.7
        valid[0, :, : self.length // 3] = False
        return valid

    def terms(self, *shape):
        softcap = self.dice.choice((None, None, 3.0))
        sinks = self.random(*shape) if self.dice.random() < 0.3 else None
        return softcap, sinks

    def request(self):
        if self.kind in ("rows", "chosen"):
            return self.kv_rows()
        asked = asking(
            self.random(self.batch, self.heads * self.groups, self.new, self.dim),
            0.3,
            self.terms(self.heads * self.groups),
        )
        stored, sees = getattr(self, self.kind)()
        if isinstance(stored, (DenseEntries, FlatEntries)):
            stored.log_weight = self.weights(stored.keys.shape[:-1])
            valid = getattr(stored, "valid", None)
            if stored.log_weight is not None and valid is not None:
                stored.log_weight.masked_fill_(~valid, 0)
        return AttentionRequest(asked, stored, sees)

    def weights(self, shape):
        if self.dice.random() < 0.6:
            return None
        # As a store has them: in a buffer as long as the keys'.
        room = 3 if len(shape) == 3 else 0
        return torch.randn(*shape[:-1], shape[-1] + room, generator=self.numbers)[..., : shape[-1]]

    def token(self):
        length = DeviceLength(torch.tensor(max(1, self.length - 2))) if self.dice.random() < 0.3 else None
        foreseen = None if length is None else Foreseen(1, self.dice.random() < 0.5)
        valid = self.valid(self.dice.choice((1, self.heads)))
        if length is not None and valid is not None:
            # A recorded token is no padding.
            valid[..., int(length.count) - 1] = True
        return DenseEntries(*self.entries(), valid, length, foreseen), None

    def prompt(self):
        return DenseEntries(*self.entries(), self.valid(self.dice.choice((1, self.heads)))), None

    def recorded(self):
        """Several tokens of a recorded pass, which are no padding; behind their entries there is room."""
        valid = self.valid(self.dice.choice((1, self.heads)))
        if valid is not None:
            valid[..., -self.new - 2 :] = True
        keys, values = self.entries()
        return DenseEntries(keys, values, valid, DeviceLength(torch.tensor(max(self.new, self.length - 2)))), None

    def flat(self):
        before = self.length + self.heads
        owner = torch.randint(0, self.heads + 1, (self.batch, before), generator=self.numbers)
        owner[:, : self.heads] = torch.arange(self.heads)
        # The tokens' own entries, and slots that are not in use.
        own = torch.arange(self.new * self.heads).expand(self.batch, -1) % self.heads
        owner = torch.cat([owner, own, owner.new_full((self.batch, 3), self.heads)], 1)
        padded = self.new > 1 and self.dice.random() < 0.3
        if padded:
            owner[-1, before + self.heads : before + 2 * self.heads] = self.heads
        bias = torch.zeros(self.batch, self.heads, owner.shape[1], dtype=self.dtype)
        bias.masked_fill_(owner[:, None] != torch.arange(self.heads)[:, None], torch.finfo(self.dtype).min)
        keys, values = (self.random(*owner.shape, size) for size in (self.dim, self.wide))
        return FlatEntries(keys, values, bias, used=before + own.shape[1], padded=padded), None

    def encoded(self):
        store = DenseStore()
        store.append(*self.entries(), torch.arange(self.length)[None].expand(self.batch, -1))
        return EncodedEntries(PackedStore.build(store, Int8(block=8, tail=8))), None

    def window(self):
        window = Window(self.dice.choice((4, 50, 400)), self.dice.random() < 0.3)
        gaps = torch.randint(1, 3, (self.batch, self.length), generator=self.numbers)
        return DenseEntries(*self.entries(), self.valid(1)), Near(window, gaps.cumsum(1))

    def mask(self):
        shape = self.batch, self.dice.choice((1, self.heads * self.groups)), self.new, self.length
        mask = torch.rand(shape, generator=self.numbers) < 0.5
        mask[..., 0] = True
        return DenseEntries(*self.entries()), Shown(mask)

    def scaled(self):
        stored, sees = self.mask()
        part = torch.rand(self.batch, self.dice.choice((1, self.heads)), self.length, generator=self.numbers) < 0.5
        return stored, ScaledPart(sees.mask, part, self.dice.choice((0.8, 1.0, 1.3)))

    def blocks(self):
        grid = BlockGrid(self.new, self.length, 16, self.dice.choice((8, 16)))
        sets = self.dice.choice((self.heads, self.heads * self.groups))
        chosen = torch.rand(self.batch, sets, grid.query_blocks, grid.key_blocks, generator=self.numbers) < 0.4
        shared = self.dice.choice((1, 1, 2, 3))
        if shared > 1:
            first = torch.arange(grid.query_blocks) // shared * shared
            own = torch.arange(grid.key_blocks) >= grid.first + first[:, None] * grid.own
            chosen = chosen[:, :, first] | own
        return DenseEntries(*self.entries()), ChosenBlocks(chosen, grid, shared)

    def latents(self):
        rank, plain = 12, self.dim - 4
        query_heads = self.heads * self.groups
        up = UpProjection(self.random(query_heads, plain, rank) / 4, self.random(query_heads, self.wide, rank) / 4)
        return Latents(self.random(self.batch, 1, self.length, rank + 4), up, self.valid(1)), None

    def kv_rows(self):
        rows = self.batch * self.heads
        flat = (self.random(rows * self.length, size) for size in (self.dim, self.wide))
        kv_rows = KVRows(*flat, None, torch.arange(rows) * self.length, 1, self.length)
        kv_rows.log_weight = self.weights((rows * self.length,))
        asked = asking(self.random(rows, self.groups, self.dim), 0.3, self.terms(rows, self.groups))
        if self.kind == "rows":
            kv_rows.length = DeviceLength(torch.tensor(max(1, self.length - 2)))
            return AttentionRequest(asked, kv_rows)
        sets = (rows, self.groups) if self.dice.random() < 0.3 else (rows,)
        order = torch.rand(*sets, self.length, generator=self.numbers).argsort(-1)
        blend = None
        if self.dice.random() < 0.4:
            weight = torch.rand(rows, self.groups, generator=self.numbers) * 0.8 + 0.1
            blend = weight.to(self.dtype), self.random(rows, self.wide)
        return AttentionRequest(asked, kv_rows, Choice(order[..., : max(1, self.length // 2)], blend))


def counted(request, out):
    """Output of queries that are no padding, which alone is defined."""
    stored = request.stored
    if isinstance(stored, FlatEntries) and stored.padded:
        heads = stored.bias.shape[1]
        own = stored.bias[:, 0, stored.used - request.asked.query.shape[2] * heads : stored.used : heads] == 0
        return out.transpose(1, 2)[own]
    valid = getattr(request.stored, "valid", None)
    new = request.asked.query.shape[2]
    if valid is None or (new == 1 and request.sees is None):
        return out
    real = valid[:, :, -new:].repeat_interleave(out.shape[1] // valid.shape[1], 1)
    return out[real]
