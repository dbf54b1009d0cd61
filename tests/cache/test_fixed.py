"""Entries of a packed store at fixed places: a recorded pass reads what the store holds, blocks to come among it."""

from __future__ import annotations

import pytest
import torch

from attend import AttentionTerms, packed_attention
from kvsieve.cache import DenseStore, FixedEntries, PackedStore, keep
from kvsieve.core.kv_rows import DeviceLength
from kvsieve.core.selection import pack_ragged
from kvsieve.methods import FP8, KIVI, Int8, Outlier, Rotated

BATCH, HEADS, DIM = 2, 2, 16
PROMPT, NEW = 60, 40
SIZES = {"block": 8, "tail": 6}
CODECS = {
    "kivi": KIVI(bits=2, group=8, **SIZES),
    "sinks": KIVI(bits=4, group=8, sinks=3, **SIZES),
    "rotated": Rotated(bits=3, **SIZES),
    "int8": Int8(**SIZES),
    "fp8": FP8(**SIZES),
    "outlier": Outlier(bits=4, group=8, **SIZES),
}


def filled(codec, kind="", ends_prompt=True):
    """A packed store after a prompt; kind: "padded", or "ragged" for heads with entries of their own number."""
    torch.manual_seed(4)
    store, (keys, values) = DenseStore(), torch.randn(2, BATCH, HEADS, PROMPT, DIM)
    valid = torch.arange(PROMPT) >= torch.tensor([[0], [21]]) if kind == "padded" else None
    store.append(keys + 2, values, torch.arange(PROMPT)[None], valid)
    if kind == "ragged":
        stays = torch.rand(BATCH, HEADS, PROMPT) > 0.4
        stays[..., -8:] = True
        store = keep(store, pack_ragged(stays))
    return PackedStore.build(store, codec, ends_prompt=ends_prompt)


def addresses(store):
    return [None if each is None else each.data_ptr() for each in store.tensors]


class Recorded:
    """A stand-in for a recorded pass: it writes and reads by what lies on the device, and is told of new blocks."""

    def __init__(self, store, first):
        self.store, self.number = store, torch.tensor([store.next_slot])
        store.prepare_slots(first)
        self.fixed, self.made = FixedEntries(store), 0

    def follow(self, token_index):
        assert self.fixed.fits(self.store)
        self.store.prepare_slots(token_index)
        self.fixed.update(self.store)
        self.number.fill_(self.store.next_slot)
        self.made += 1

    def run(self, query, key, value, terms):
        self.store.put(key, value, self.number)
        length = DeviceLength(self.number[0] + 1)
        out = packed_attention(query, self.fixed.store, scale=0.3, terms=terms, length=length)
        self.number += 1
        return out


@pytest.mark.parametrize("kind", ["", "padded", "ragged"])
@pytest.mark.parametrize("name", CODECS)
def test_tokens_written_and_read_at_fixed_places(name, kind):
    codec = CODECS[name]
    terms = AttentionTerms(30.0, torch.randn(HEADS * 3)) if name == "kivi" else None
    store, plain = (filled(codec, kind) for _ in range(2))
    before = store.bodies[-1].used
    store.make_room(NEW)
    recorded, pointers, again = Recorded(store, PROMPT), addresses(store), []
    for token in range(PROMPT, PROMPT + NEW):
        key, value, query = *torch.randn(2, BATCH, HEADS, 1, DIM), torch.randn(BATCH, HEADS * 3, 1, DIM)
        if not recorded.fixed.is_current(store):
            recorded.follow(token)
        if addresses(store) != pointers:
            # Filler among the exact entries needs a mask, once.
            again.append(token)
            recorded, pointers = Recorded(store, token), addresses(store)
        ours = recorded.run(query, key, value, terms)
        store.advance_host_length()
        plain.append(key, value, torch.tensor([[token]]))
        wanted = packed_attention(query, plain, scale=0.3, terms=terms, kernel=False)
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
        store.quantize_tail(), plain.quantize_tail()
        assert store.lengths == plain.lengths and store.next_slot == plain.next_slot
    for one, other in ((store.index, plain.index), (store.keys, plain.keys), (store.values, plain.values)):
        assert torch.equal(one, other)
    assert store.bodies[-1].used >= before + BATCH * HEADS * (NEW // codec.block - 1)
    assert len(again) == 0 and recorded.made >= 2


def test_a_copy_of_the_store_is_not_written_to():
    store = filled(CODECS["kivi"])
    store.make_room(NEW)
    taken = store.share()
    before, held = taken.keys.clone(), addresses(taken)
    recorded = Recorded(store, PROMPT)
    for token in range(PROMPT, PROMPT + 20):
        if not recorded.fixed.is_current(store):
            recorded = Recorded(store, token)
        recorded.run(torch.randn(BATCH, HEADS, 1, DIM), *torch.randn(2, BATCH, HEADS, 1, DIM), None)
        store.advance_host_length()
        store.quantize_tail()
    assert torch.equal(taken.keys, before) and addresses(taken) == held
    # The exact entries moved to buffers of their own, which the next block then found again.
    assert addresses(store)[0] != held[0] and len(store.bodies[0].table[0]) > len(taken.bodies[0].table[0])


def test_what_no_longer_fits_is_told():
    store = filled(CODECS["kivi"])
    store.make_room(16)
    fixed, table = FixedEntries(store), store.bodies[0].table
    for token in range(PROMPT, PROMPT + 40):
        assert fixed.is_current(store) == (store.bodies[0].table is table)
        assert fixed.fits(store) == (store.bodies[0].table.shape[1] <= table.shape[1] + 2)
        store.append(*torch.randn(2, BATCH, HEADS, 1, DIM), torch.tensor([[token]]))
        store.quantize_tail()
    assert not fixed.fits(store)
