"""A packed store encodes an entry once, frees what is evicted, and loses no more than its codec says."""

from __future__ import annotations

import pytest
import torch

from attend import packed_attention
from codecs_of_tests import Whole
from kvsieve.cache import DenseStore, PackedStore, keep
from kvsieve.cache.encoded_rows import entries_at
from kvsieve.cache.pool import BlockPool
from kvsieve.core.selection import pack_ragged
from kvsieve.methods import KIVI, Rotated
from kvsieve.types import Selection
from reference import reference_attention

HEADS, DIM = 2, 16
KIVI_4 = KIVI(bits=4, block=16, tail=8, group=8, sinks=0)


def packed(length: int, codec=KIVI_4, batch: int = 1, valid=None) -> tuple[PackedStore, torch.Tensor, torch.Tensor]:
    """A store of random entries, its keys of numbers around 3; and what went in."""
    torch.manual_seed(length)
    keys, values = torch.randn(2, batch, HEADS, length, DIM)
    keys += 3
    store = DenseStore()
    store.append(keys, values, torch.arange(length)[None], valid)
    return PackedStore.build(store, codec), keys, values


def append(store: PackedStore, new: int, valid=None) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.randn(2, len(store.lengths), HEADS, new, DIM)
    first = int(store.index.max()) + 1
    store.append(keys, values, torch.arange(first, first + new)[None], valid)
    store.quantize_tail()
    return keys, values


def drop(store: PackedStore, mask: torch.Tensor) -> None:
    """Drop the entries that `mask`, bool [B, H, size], is true of."""
    valid = store.valid
    real = torch.ones_like(mask) if valid is None else valid.expand_as(mask)
    assert keep(store, pack_ragged(real & ~mask)) is store


def blocks(store: PackedStore) -> dict[tuple[int, ...], list[bytes]]:
    """Bytes of every block in use, by its KV row and the token indices of its entries."""
    (one,), found = store.bodies, {}
    for row, (numbers, fills) in enumerate(zip(one.table.tolist(), one.fills.tolist(), strict=True)):
        for number, fill in zip(numbers, fills, strict=True):
            if fill:
                tensors = [*one.keys.codes.tensors(), *one.values.codes.tensors()]
                name = (row, *one.index[number, :fill].tolist())
                found[name] = [tensor[number].contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return found


def test_an_entry_is_encoded_once_and_its_bytes_stay():
    store, *_ = packed(40, batch=2)
    before = blocks(store)
    assert before
    for _ in range(60):
        append(store, 1)
        now = blocks(store)
        assert {name: now[name] for name in before} == before
        before = now
    append(store, 90)
    now = blocks(store)
    assert {name: now[name] for name in before} == before and len(now) > len(before) + 15


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("sinks", [0, 3])
def test_the_newest_and_the_first_entries_stay_exact(padded, sinks):
    codec = KIVI(bits=2, block=16, tail=8, group=8, sinks=sinks)
    valid = torch.ones(2, 300, dtype=torch.bool)
    if padded:
        valid[0, :170] = valid[1, 100:130] = False
    store, *found = packed(300, codec, 2, valid if padded else None)
    for new in (1, 40, 1, 16):
        more = torch.rand(2, new) > 0.3 if padded and new > 1 else None
        own = append(store, new, more)
        found = [torch.cat(each, 2) for each in zip(found, own, strict=True)]
        valid = torch.cat([valid, torch.ones(2, new, dtype=torch.bool) if more is None else more], 1)
        whole = store.valid
        for row in range(2):
            columns = valid[row].nonzero()[:, 0]
            for head in range(HEADS):
                mine = slice(None) if whole is None else whole[row].expand(HEADS, -1)[head]
                assert store.index[row, head][mine].tolist() == columns.tolist()
                newest = codec.newest(len(columns))
                for ours, theirs in zip((store.keys, store.values), found, strict=True):
                    ours, theirs = ours[row, head][mine], theirs[row, head][columns]
                    exact = (ours == theirs).all(1)
                    assert exact[:sinks].all() and exact[-newest:].all()
                    # No more than a block of them waits.
                    assert (~exact).sum() > len(columns) - newest - sinks - codec.block - 2
                    assert (ours - theirs).abs().max() < 2


@pytest.mark.parametrize(
    "codec", [KIVI(block=16, tail=16, group=8), Rotated(block=16, tail=16)], ids=["kivi", "rotated"]
)
def test_a_padded_row_is_encoded_when_it_would_be_alone(codec):
    """Also one whose first block comes later than other rows'."""
    keys, values = torch.randn(2, 2, HEADS, 300, DIM)
    keys += 3
    for pad in (40, 240, 290):
        valid = torch.ones(2, 300, dtype=torch.bool)
        valid[0, :pad] = False
        stores = []
        for rows, begin in ((slice(None), 0), (slice(1), pad)):
            store = DenseStore()
            index = torch.arange(300 - begin)[None]
            store.append(keys[rows, :, begin:], values[rows, :, begin:], index, valid[rows, begin:])
            stores.append(PackedStore.build(store, codec))
        both, alone = stores
        for step in range(60):
            new = torch.randn(2, 2, HEADS, 1, DIM) + 3
            for store, rows, begin in ((both, slice(None), 0), (alone, slice(1), pad)):
                store.append(*new[:, rows], torch.tensor([[300 + step - begin]]))
                store.quantize_tail()
            mine = both.valid[0, 0]
            for ours, theirs in ((both.keys, alone.keys), (both.values, alone.values)):
                torch.testing.assert_close(ours[0][:, mine], theirs[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("codec", [KIVI_4, KIVI(bits=8, block=16, tail=8, group=16, sinks=0)], ids=["4bit", "8bit"])
def test_many_evictions_while_decoding(codec, monkeypatch):
    store, *_ = packed(200, codec)
    encoded: list[int] = []
    encode = BlockPool.encode
    monkeypatch.setattr(
        BlockPool, "encode", lambda self, codec, x, *rest: encoded.append(len(x)) or encode(self, codec, x, *rest)
    )
    for step in range(10):
        append(store, 5)
        before, keys, values, index = blocks(store), store.keys, store.values, store.index
        mask = torch.zeros(1, HEADS, store.size, dtype=torch.bool)
        for head in range(HEADS):
            mask[0, head, torch.randperm(store.size)[: 5 if step % 3 else 40 * (head + 1) % 60]] = True
        encoded.clear()
        valid = store.valid
        drop(store, mask)
        after = blocks(store)
        lost = {(head, int(index[0, head, slot])) for head, slot in mask[0].nonzero().tolist()}
        whole = {name: each for name, each in before.items() if not any((name[0], at) in lost for at in name[1:])}
        # What lost nothing and still stands by itself has its bytes; all else was encoded once.
        assert all(after[name] == each for name, each in whole.items() if name in after)
        fresh = len([name for name in after if name not in whole])
        assert encoded[:2] == [fresh, fresh] and sum(encoded) <= 2 * (fresh + 2 * HEADS)
        for head in range(HEADS):
            stays = ~mask[0, head] if valid is None else ~mask[0, head] & valid[0].expand(HEADS, -1)[head]
            real = slice(None) if store.valid is None else store.valid[0].expand(HEADS, -1)[head]
            assert store.index[0, head][real].tolist() == index[0, head][stays].tolist()
            assert index[0, head][stays].diff().gt(0).all()
            bounds = [error_bounds(store, what, head) for what in ("keys", "values")]
            for ours, theirs, bound in zip((store.keys, store.values), (keys, values), bounds, strict=True):
                error = (ours[0, head][real] - theirs[0, head][stays]).abs()
                assert (error[: len(bound)] <= bound).all() and error[len(bound) + codec.block :].eq(0).all()
        # Two neighbours hold more than one block could.
        fills = store.bodies[0].fills
        pairs = (fills[:, 1:] + fills[:, :-1])[fills[:, 1:] > 0]
        assert pairs.gt(codec.block).all() and fills.le(codec.block).all()


def error_bounds(store: PackedStore, what: str, head: int) -> torch.Tensor:
    """Half a scale for each number of a KV row's encoded entries, and the rounding of scale and zero to float16."""
    one, rows = store.bodies[0], []
    part: BlockPool = getattr(one, what)
    for number, fill in zip(one.table[head].tolist(), one.fills[head].tolist(), strict=True):
        scale, zero = (each[number].float() for each in (part.codes.scale, part.codes.zero))
        if part.form.axis == "token":
            scale, zero = (each.repeat_interleave(part.form.group, 1) for each in (scale, zero))
        bound = scale * (0.5 + 2**part.form.bits / 1024) + zero.abs() / 1024
        rows.append(bound.expand(one.codec.block, -1)[:fill])
    return torch.cat(rows)


def test_freed_blocks_leave_the_pool():
    store, *_ = packed(16 * 64 + 8)
    before = store.entry_bytes()
    mask = torch.ones(1, HEADS, store.size, dtype=torch.bool)
    mask[..., 3::20] = False
    drop(store, mask)
    assert store.lengths == (52,) and store.entry_bytes() < before / 8
    assert store.bodies[0].used == len(store.bodies[0].index) == 4 * HEADS


def test_bytes_are_those_that_are_allocated():
    store, *_ = packed(16 * 20 + 8)
    # Per block of 16 entries: 16 x 16 half bytes, scale and zero of 16 channels; and of 16 x 2 groups.
    encoded = 20 * HEADS * ((128 + 2 * 32) + (128 + 2 * 64))
    exact = sum(part.untyped_storage().nbytes() for part in store.exact.buffers()[:2])
    assert store.entry_bytes() == encoded + exact
    assert store.exact.size == 8 and store.exact.capacity <= 8 + 16
    for _ in range(16 * 12):
        append(store, 1)
        held = [*store.bodies[0].keys.tensors(), *store.bodies[0].values.tensors()]
        exact = sum(part.untyped_storage().nbytes() for part in store.exact.buffers()[:2])
        assert store.entry_bytes() == exact + sum(part.untyped_storage().nbytes() for part in held)
        # Room for an eighth more, at most.
        assert len(store.bodies[0].index) <= store.bodies[0].used * 9 / 8 + HEADS
        assert store.exact.capacity < 64
    assert store.nbytes() > store.entry_bytes()


def test_rows_share_blocks_until_they_differ():
    store, keys, values = packed(16 * 10 + 8, batch=2)
    before = store.bodies[0].used
    store.reorder(torch.tensor([0, 0, 0, 1]))
    assert store.bodies[0].used == before
    append(store, 16)
    assert store.bodies[0].used == before + 4 * HEADS
    torch.testing.assert_close(store.values[2, :, :100], values[0, :, :100], atol=0.2, rtol=0)
    mask = torch.zeros(4, HEADS, store.size, dtype=torch.bool)
    mask[1, :, 20:40] = True
    kept = store.keys[[0, 2, 3]]
    drop(store, mask)
    ours = store.keys[[0, 2, 3]]
    assert torch.equal(ours, kept)
    # Rows that go take their blocks along, once they are half of the pool.
    store.reorder(torch.tensor([3]))
    assert store.bodies[0].used == len(store.bodies[0].index) == 11 * HEADS
    assert torch.equal(store.keys, kept[2:])


def test_a_row_goes_on_when_a_longer_one_has_gone():
    store, *_ = packed(200, batch=2, valid=torch.arange(200) >= torch.tensor([[0], [160]]))
    store.reorder(torch.tensor([1]))
    wide = store.bodies[0].width
    append(store, 40)
    assert store.bodies[0].width == wide + 32
    attends(store)


@pytest.mark.parametrize("sinks", [0, 3])
def test_all_encoded_entries_are_evicted(sinks):
    store, *_ = packed(200, Whole(block=16, tail=8, sinks=sinks))
    mask = torch.ones(1, HEADS, store.size, dtype=torch.bool)
    mask[..., -3:] = False
    drop(store, mask)
    (one,) = store.bodies
    assert one.width == 0 and one.used == 0 and store.lengths == (3,) and store.entries == 3
    assert sum(part.numel() for part in one.tensors()) == one.counts.numel()
    drop(store, torch.zeros(1, HEADS, store.size, dtype=torch.bool))
    attends(store)
    for _ in range(40):
        append(store, 1)
    assert store.lengths == (43,) and one.width == 32
    attends(store)
    clone = store.clone()
    clone.reorder(torch.tensor([0, 0]))
    assert torch.equal(clone.keys[1], store.keys[0])


def test_a_prompt_whose_blocks_are_all_filled_alike_loses_entries():
    """Of 13 entries 12 are encoded, six to a block, which has more places once one is encoded again."""
    torch.manual_seed(3)
    store = DenseStore()
    store.append(*torch.randn(2, 1, HEADS, 13, DIM), torch.arange(13)[None], None)
    store = PackedStore.build(store, KIVI(bits=8, block=8, tail=8, group=8, sinks=0), ends_prompt=True)
    (one,) = store.bodies
    assert one.fills.tolist() == [[6, 6]] * HEADS and one.tokens == 6
    keys, tokens = store.keys.clone(), [at for at in range(13) if at not in (7, 10)]
    mask = torch.zeros(1, HEADS, 13, dtype=torch.bool)
    mask[..., [7, 10]] = True
    drop(store, mask)
    assert store.index[0].tolist() == [tokens] * HEADS
    torch.testing.assert_close(store.keys, keys[:, :, tokens], atol=0.05, rtol=0)
    attends(store)


def test_a_head_that_keeps_nothing_encoded():
    store, *_ = packed(200, batch=2)
    mask = torch.zeros(2, HEADS, store.size, dtype=torch.bool)
    mask[1, 0, :-8] = True
    drop(store, mask)
    assert store.bodies[0].counts.tolist()[2] == 0 and store.lengths == (200, 200) and store.entries == 200
    attends(store)
    append(store, 30)
    attends(store)
    drop(store, torch.rand(2, HEADS, store.size) < 0.5)
    attends(store)


def attends(store: PackedStore) -> None:
    """Attention is that over what the store says it holds."""
    query = torch.randn(len(store.lengths), HEADS * 2, 1, DIM)
    wanted = reference_attention(query, store.keys, store.values, scale=0.1, valid=store.valid)
    torch.testing.assert_close(packed_attention(query, store, scale=0.1), wanted, atol=1e-4, rtol=0)


def test_single_entries_are_those_of_the_whole():
    store, *_ = packed(150, batch=2, valid=torch.arange(150) >= torch.tensor([[40], [0]]))
    drop(store, torch.rand(2, HEADS, store.size) < 0.3)
    append(store, 20)
    totals = store.totals()
    for row in range(2 * HEADS):
        mine = store.valid.flatten(0, 1)[row]
        entries = torch.randperm(int(totals[row]))
        rows = torch.full_like(entries, row)
        for what in ("keys", "values"):
            whole = getattr(store, what).flatten(0, 1)[row][mine]
            torch.testing.assert_close(entries_at(store, what, rows, entries), whole[entries], atol=1e-6, rtol=0)


def test_selections_of_slots_out_of_order_and_with_filler():
    store, *_ = packed(60)
    values = store.values
    store.keep(Selection(torch.tensor([[[0, 9, 5, 59], [7, 3, 2, 40]]]), (3,)))
    assert store.lengths == (3,)
    real = store.valid
    assert store.index[0, 0][real[0].expand(HEADS, -1)[0]].tolist() == [5, 9, 59]
    assert store.index[0, 1][real[0].expand(HEADS, -1)[1]].tolist() == [2, 3, 40]
    kept = store.values[0, 1][real[0].expand(HEADS, -1)[1]]
    torch.testing.assert_close(kept, values[0, 1, [2, 3, 40]], atol=0.2, rtol=0)


def test_a_short_row_encodes_when_it_would_alone():
    """Of few entries fewer of the newest stay exact, whatever other rows hold."""
    valid = torch.arange(200) >= torch.tensor([[0], [160]])
    (both, *_), (alone, *_) = packed(200, batch=2, valid=valid), packed(40)
    counts = []
    for _ in range(20):
        append(both, 1), append(alone, 1)
        assert both.bodies[0].counts[HEADS:].tolist() == alone.bodies[0].counts.tolist()
        counts.append(both.bodies[0].counts.view(2, HEADS)[:, 0].tolist())
    assert counts[7:9] == [[192, 32], [192, 48]] and counts[-1] == [208, 48]


@pytest.mark.parametrize("codec", [KIVI_4, Rotated(block=16, tail=8, sinks=0)], ids=["kivi", "rotated"])
def test_a_prompt_leaves_no_more_than_the_newest_exact_and_no_room(codec):
    """70 entries, of which 2 are the newest: 5 blocks of 14 at most, not 4 of 16 and 6 exact ones."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, HEADS, 70, DIM)
    store = DenseStore()
    store.append(keys, values, torch.arange(70)[None], reserve=64)
    store = PackedStore.build(store, codec, ends_prompt=True)
    assert store.exact.size == store.exact.capacity == codec.newest(70) == 2
    (body,) = store.bodies
    assert body.tokens == 14 and sorted(set(body.fills.flatten().tolist())) == [13, 14] and len(body.index) == 5 * HEADS
    first = blocks(store)
    before = store.keys[:, :, :68].clone()
    for _ in range(40):
        append(store, 1)
    # Those of the answer fill whole blocks, for which all get more places; what was encoded stays as it was.
    assert body.tokens == 16 and store.bodies[0].width == 68 + 2 * 16
    torch.testing.assert_close(store.keys[:, :, :68], before, rtol=0, atol=0)
    assert {name: len(each) for name, each in first.items()}.items() <= {
        n: len(e) for n, e in blocks(store).items()
    }.items()


def test_few_entries_are_not_encoded():
    for length, count in ((8, 0), (10, 9)):
        keys, values = torch.randn(2, 1, HEADS, length, DIM)
        store = DenseStore()
        store.append(keys, values, torch.arange(length)[None])
        assert PackedStore.build(store, KIVI_4, ends_prompt=True).bodies[0].width == count


def test_rows_of_different_length_are_not_looked_at_for_every_token(monkeypatch):
    valid = torch.ones(2, 100, dtype=torch.bool)
    valid[0, :30] = False
    store, *_ = packed(100, batch=2, valid=valid)
    looked = []
    totals = PackedStore.totals
    monkeypatch.setattr(PackedStore, "totals", lambda self: looked.append(1) or totals(self))
    for _ in range(64):
        append(store, 1, torch.ones(2, 1, dtype=torch.bool))
    assert store.bodies[0].counts.min() > 64 and len(looked) < 20


@pytest.mark.parametrize(
    "length, codec, most",
    [(7500, KIVI(bits=4), 0.29), (7500, KIVI(bits=2), 0.16), (750, KIVI(bits=4), 0.03), (750, Rotated(bits=4), 0.03)],
)
def test_a_prompt_of_7500_tokens_takes_as_little_as_is_promised(length, codec, most):
    """Or a tenth of it, of heads with 64 channels, over 16 bits for every number."""
    keys, values = torch.randn(2, 1, HEADS, length, 64, dtype=torch.bfloat16)
    store = DenseStore()
    store.append(keys, values, torch.arange(length)[None])
    assert PackedStore.build(store, codec, ends_prompt=True).entry_bytes() <= most * 7500 * HEADS * 64 * 2 * 2
