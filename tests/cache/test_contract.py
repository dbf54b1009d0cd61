"""Dense, ragged and packed stores answer alike: the same entries, whatever they lie in and what was done to them."""

from __future__ import annotations

import random

import pytest
import torch

from codecs_of_tests import Whole
from kvsieve.cache import DenseStore, LatentStore, PackedStore, RaggedStore, group_rows, keep, quantize_evicted
from kvsieve.core.page_recipe import page_table, value_mean
from kvsieve.core.selection import pack_ragged
from kvsieve.errors import CacheStateError, UnsupportedOptionError
from kvsieve.methods import KIVI
from kvsieve.types import Selection

BATCH, HEADS, DIM, WIDE = 2, 3, 8, 16
SEEDS = 30

CODECS = {
    "packed": Whole(),
    "packed-by-token": Whole(axis="token", block=16),
    "packed-with-sinks": Whole(sinks=5),
    "kivi": KIVI(bits=8, block=8, tail=4, group=8),
}
KINDS = ["dense", "ragged", *CODECS]


class Told:
    """A store, and what it should hold: for each row and head the columns fed, and a number that tells the entry."""

    def __init__(self, kind: str, length: int, valid: torch.Tensor | None = None, *, ends_prompt: bool = False) -> None:
        self.kind, self.fed = kind, 0
        self.store = DenseStore()
        self.rows: list[list[list[tuple[int, int]]]] = [[[] for _ in range(HEADS)] for _ in range(BATCH)]
        self.append(length, valid)
        if kind == "ragged":
            # One head of one row lets an entry go.
            stays = self.mask(lambda row, head, place: (row, head, place) != (0, 1, 0))
            self.keep(pack_ragged(stays))
            assert isinstance(self.store, RaggedStore)
        if kind in CODECS:
            self.store = PackedStore.build(self.store, CODECS[kind], ends_prompt=ends_prompt)

    def copy(self, store) -> Told:
        other = object.__new__(Told)
        vars(other).update(vars(self), store=store, rows=[[list(head) for head in row] for row in self.rows])
        return other

    def append(
        self, new: int, valid: torch.Tensor | None = None, *, ends_prompt: bool = False, settles: bool = True
    ) -> None:
        """Append tokens; valid: bool [B, new]. settles: encode what has left the newest ones."""
        batch, columns = len(self.rows), range(self.fed, self.fed + new)
        number = torch.tensor(
            [
                [[100 * row + 30 * head + column % 29 for column in columns] for head in range(HEADS)]
                for row in range(batch)
            ]
        )
        keys, values = (each.float() for each in vectors(number))
        self.store.append(keys, values, torch.arange(self.fed, self.fed + new)[None], valid)
        for row in range(batch):
            for head in range(HEADS):
                for at, column in enumerate(columns):
                    if valid is None or valid[row, at]:
                        self.rows[row][head].append((column, int(number[row, head, at])))
        self.fed += new
        if settles and isinstance(self.store, PackedStore):
            self.store.quantize_tail(ends_prompt=ends_prompt)

    def take_back(self, counts: list[int]) -> None:
        """Take back the last `counts` tokens of each row."""
        self.store.drop_last(counts)
        for count, row in zip(counts, self.rows, strict=True):
            for head in row:
                head[:] = [entry for entry in head if entry[0] < self.fed - count]
        self.fed -= min(counts)

    def mask(self, stays) -> torch.Tensor:
        """Keep-mask bool [B, H, size] of the store; stays: tells by row, head and place among the real entries."""
        real = self.real().clone()
        for row in range(len(self.rows)):
            for head in range(HEADS):
                for place, slot in enumerate(real[row, head].nonzero()[:, 0].tolist()):
                    real[row, head, slot] = bool(stays(row, head, place))
        return real

    def real(self) -> torch.Tensor:
        """Mask of the store's real entries, bool [B, H, size]."""
        keys, valid = self.store.keys, self.store.valid
        whole = torch.ones(1, 1, 1, dtype=torch.bool) if valid is None else valid
        return whole.expand(*keys.shape[:3])

    def drop(self, stays) -> None:
        """Keep the entries that `stays(row, head, place)` names."""
        self.keep(pack_ragged(self.mask(stays)))

    def keep(self, selection: Selection) -> None:
        place = self.real().cumsum(-1) - 1
        chosen = selection.real()
        chosen = torch.ones_like(selection.indices, dtype=torch.bool) if chosen is None else chosen
        chosen = (chosen[:, None] if chosen.ndim == 2 else chosen).expand_as(selection.indices)
        for row, told in enumerate(self.rows):
            for head, entries in enumerate(told):
                slots = selection.indices[row, head][chosen[row, head]]
                told[head] = [entries[at] for at in place[row, head][slots].tolist()]
        self.store = keep(self.store, selection)

    def check(self, rounds: int = 1) -> None:
        """Compare all that is told of the store; rounds: times that an entry may have been encoded."""
        store, most = self.store, 0.0 if self.kind != "kivi" else 0.4 * rounds
        keys, values, index, real = store.keys, store.values, store.index, self.real()
        batch = len(self.rows)
        slots = keys.shape[2]
        assert keys.shape == (batch, HEADS, slots, DIM) and values.shape == (batch, HEADS, slots, WIDE)
        assert index.shape == (batch, HEADS, slots) and index.dtype == torch.int32
        assert store.dims == (DIM, WIDE) and store.heads == HEADS and not store.is_empty
        for row, told in enumerate(self.rows):
            for head, entries in enumerate(told):
                mine = real[row, head]
                assert index[row, head][mine].tolist() == [column for column, _ in entries]
                compare((keys[row, head][mine], values[row, head][mine]), entries, most)
        counts = [[len(head) for head in row] for row in self.rows]
        assert store.lengths == tuple(max(each) for each in counts)
        assert store.entries == max(-(-sum(each) // HEADS) for each in counts)
        if store.is_ragged:
            assert store.size <= store.capacity
        else:
            assert store.size == slots
        assert 0 < store.entry_bytes() < store.nbytes() and store.entry_size() > 0
        # A few entries may lie in a block of many.
        assert store.entries < 16 or store.entry_size() <= (DIM + WIDE) * 4 * 2
        read_kv_rows(store, None, [head for row in self.rows for head in row], most)


def vectors(number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return number[..., None] + 2 * torch.arange(DIM), 900 - number[..., None] - torch.arange(WIDE)


def compare(found, entries, most: float) -> None:
    wanted = vectors(torch.tensor([number for _, number in entries], dtype=torch.int64))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs.float(), atol=most, rtol=0)


def read_kv_rows(store, view, entries, most: float) -> None:
    """Every KV row, by the groups that readers see, has these entries in order."""
    grouped = group_rows(store, view, [None] * len(store.lengths))
    seen = []
    for group in grouped.groups:
        kv_rows = grouped.kv_rows(store, group)
        keys, values = kv_rows.read(kv_rows.span(0, kv_rows.size))
        which = range(len(entries)) if group.kv_rows is None else group.kv_rows.tolist()
        for at, number in enumerate(which):
            assert kv_rows.size == len(entries[number])
            compare((keys[at], values[at]), entries[number], most)
        seen += which
    assert sorted(seen) == list(range(len(entries)))


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_turn_of_things(kind, seed):
    """Prompts, tokens, evictions, copies and other rows in any order; ends of prompts encode what fills no block."""
    made = random.Random(seed)
    first = [made.choice([0, 0, 3, 11]) for _ in range(BATCH)]
    length = made.randint(14, 60)
    told = Told(kind, length, padding(*first, length=length) if any(first) else None, ends_prompt=seed % 2 == 0)
    for _ in range(made.randint(3, 8)):
        step = made.choice(["prompt", "tokens", "drop", "drop", "copy", "rows"])
        if step == "prompt":
            told.append(made.randint(1, 40), ends_prompt=True)
        elif step == "tokens":
            for _ in range(made.randint(1, 20)):
                told.append(1)
        elif step == "drop":
            left = made.choice([0.1, 0.5, 0.9])
            told.drop(lambda row, head, place, left=left: not place or made.random() < left)
        elif step == "copy":
            told = told.copy(made.choice([told.store.clone, told.store.share])())
        else:
            rows = [made.randrange(len(told.rows)) for _ in told.rows]
            told.store.reorder(torch.tensor(rows))
            told.rows = [[list(head) for head in told.rows[row]] for row in rows]
        told.check(rounds=5)


def padding(*first: int, length: int) -> torch.Tensor:
    """Mask bool [B, length] of rows that begin with so much padding."""
    return torch.arange(length) >= torch.tensor(first)[:, None]


def test_prompts_and_tokens_one_by_one(kind):
    told = Told(kind, 37)
    told.check()
    for _ in range(41):
        told.append(1)
    told.check()
    told.append(30)
    told.check()


def test_rows_of_different_length_and_padding_in_the_middle(kind):
    told = Told(kind, 40, padding(13, 0, length=40))
    told.check()
    told.append(1)
    told.append(25, padding(3, 20, length=25))
    told.check()
    for _ in range(12):
        told.append(1)
    told.append(9, padding(0, 9, length=9))
    told.check()


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_heads_keep_entries_of_their_own(kind, padded):
    told = Told(kind, 61, padding(9, 0, length=61) if padded else None)
    # As many in every head of a row, not the same ones.
    size = min(len(head) for row in told.rows for head in row)
    told.drop(lambda row, head, place: place < size and place % 3 != head)
    told.check()
    told.append(1)
    told.append(30)
    told.check()
    told.drop(lambda row, head, place: (place + head) % 2 or place > 30)
    told.append(12)
    told.check()


def test_heads_keep_different_numbers(kind):
    told = Told(kind, 50)
    told.drop(lambda row, head, place: place % (head + 1) == 0 or place == 49)
    told.check()
    for _ in range(20):
        told.append(1)
    told.check()
    told.append(11, padding(4, 0, length=11))
    told.drop(lambda row, head, place: place % 5 != row + head)
    told.check()
    told.append(3)
    told.check()


def test_rows_are_reordered(kind):
    told = Told(kind, 45, padding(6, 0, length=45))
    told.store.reorder(torch.tensor([1, 1, 0]))
    told.rows = [[list(head) for head in told.rows[row]] for row in (1, 1, 0)]
    told.check()
    told.append(1)
    told.append(20)
    told.check()
    told.drop(lambda row, head, place: place % 4 != row)
    told.check()


def test_what_a_copy_does_the_other_does_not_see(kind):
    told = Told(kind, 50)
    cloned, shared = told.copy(told.store.clone()), told.copy(told.store.share())
    shared.append(19)
    told.check()
    shared.drop(lambda row, head, place: place % 3)
    shared.append(10)
    told.check(), shared.check()
    told.drop(lambda row, head, place: place % 2)
    told.append(30)
    for each in (told, shared, cloned):
        each.check()
    cloned.append(5)
    cloned.store.reorder(torch.tensor([1, 0]))
    cloned.rows.reverse()
    for each in (told, shared, cloned):
        each.check()


def test_a_snapshot_is_gone_back_to_again_and_again(kind):
    told = Told(kind, 50)
    snapshot = told.copy(told.store.share())
    for _ in range(3):
        now = snapshot.copy(snapshot.store.share())
        for _ in range(20):
            now.append(1)
        now.check(), snapshot.check()


def test_the_mask_changes(kind):
    told = Told(kind, 40)
    # Of the newest entries, which are exact.
    mask = torch.ones(BATCH, 40, dtype=torch.bool)
    mask[0, 38:] = False
    told.store.remask(mask)
    told.rows[0] = [[entry for entry in head if entry[0] < 38] for head in told.rows[0]]
    told.check()
    told.append(20)
    told.check()
    mask = torch.ones(BATCH, 60, dtype=torch.bool)
    mask[0, 38:40] = mask[1, 7] = False
    if kind in CODECS:
        with pytest.raises(UnsupportedOptionError, match="hides tokens whose entries are encoded"):
            told.store.remask(mask)
    else:
        told.store.remask(mask)
        told.rows[1] = [[entry for entry in head if entry[0] != 7] for head in told.rows[1]]
    told.check()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ragged"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_a_view_and_what_is_stored_after_it(kind, padded):
    told = Told(kind, 48, padding(7, 0, length=48) if padded else None)
    stays = told.mask(lambda row, head, place: place % 4 == head)
    selection = pack_ragged(stays)
    real = selection.real()
    view = told.store.view(selection.indices, real[:, None] if real is not None and real.ndim == 2 else real)
    chosen = [[entries[head::4] for head, entries in enumerate(row)] for row in told.rows]
    for _ in range(14):
        told.append(1)
    later = [[head[-14:] for head in row] for row in told.rows]
    entries = [old + new for row, after in zip(chosen, later, strict=True) for old, new in zip(row, after, strict=True)]
    read_kv_rows(told.store, view, entries, 0.4 if kind == "kivi" else 0.0)
    told.check()


def same(ours, theirs) -> bool:
    """Tell that nested parts of two stores are equal; no mask is one under which all is real."""
    if ours is None or theirs is None:
        return ours is theirs or bool((theirs if ours is None else ours).all())
    if isinstance(ours, torch.Tensor):
        if ours.dtype == torch.bool and ours.shape[-1] == theirs.shape[-1]:
            # Masks may be those of each head, or of all.
            ours, theirs = torch.broadcast_tensors(ours, theirs)
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(part, theirs[name]) for name, part in ours.items())
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


@pytest.mark.parametrize("shares", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("seed", range(10))
def test_tokens_taken_back_leave_no_trace(kind, seed, shares):
    """Tokens stored and taken back equal tokens never stored; where rows keep more than others, padding is left."""
    draw = random.Random(seed)
    length, first = draw.randint(14, 60), draw.choice([0, 0, 5])
    tried = Told(kind, length, padding(first, 0, length=length) if first else None, ends_prompt=seed % 2 == 0)
    for _ in range(draw.randint(0, 9)):
        tried.append(1)
    never, snapshot = tried.copy(tried.store.clone()), None
    for _ in range(3):
        new = draw.randint(1, 20)
        counts = [draw.randint(0, new) for _ in range(BATCH)] if draw.random() < 0.7 else [new] * BATCH
        padded = counts == [new] * BATCH and draw.random() < 0.5
        tried.append(new, padding(draw.randint(1, new), 0, length=new) if padded else None, settles=False)
        if shares:
            # What others hold of these very buffers stays.
            snapshot = tried.copy(tried.store.share())
        tried.take_back(counts)
        stays = [new - count for count in counts]
        if max(stays):
            valid = torch.arange(max(stays)) < torch.tensor(stays)[:, None]
            never.append(max(stays), None if bool(valid.all()) else valid, settles=False)
        assert same(tried.store.parts(), never.store.parts())
        tried.check(rounds=5)
        for each in (tried, never):
            for _ in range(2):
                each.append(1)
        assert same(tried.store.parts(), never.store.parts())
        tried.check(rounds=5)
        if snapshot is not None:
            snapshot.check(rounds=5)


@pytest.mark.parametrize("means", [False, True], ids=["bounds", "means"])
def test_metadata_of_readers_forgets_what_is_taken_back(kind, means):
    told = Told(kind, 41)
    grouped = group_rows(told.store, None, [None] * BATCH)

    def known(groups):
        found = []
        for group in groups.groups:
            kv_rows = groups.kv_rows(told.store, group)
            table, mean = page_table(group.state, 8, means), value_mean(group.state)
            table.update(kv_rows)
            found += [table.bounds().clone(), mean.update(kv_rows, torch.float32)]
        return found

    known(grouped)
    told.append(13, settles=False)
    known(grouped)
    told.take_back([9, 9])
    assert grouped.drop_last(told.store)
    told.append(2, settles=False)
    for ours, theirs in zip(known(grouped), known(group_rows(told.store, None, [None] * BATCH)), strict=True):
        torch.testing.assert_close(ours, theirs)
    told.take_back([6, 6])
    assert grouped.drop_last(told.store)
    if kind not in CODECS and kind != "ragged":
        told.take_back([1, 1])
        assert not grouped.drop_last(told.store)


def test_tokens_that_the_plan_acted_on_are_not_taken_back(kind):
    told = Told(kind, 50)
    told.append(6, settles=False)
    told.drop(lambda row, head, place: place % 3)
    told.append(2, settles=False)
    assert told.store.droppable == 2
    with pytest.raises(CacheStateError, match="3 tokens are to be taken back, and only 2 were stored since"):
        told.store.drop_last([3, 0])
    told.check(rounds=2)


@pytest.mark.parametrize("counts", [[4, 4], [1, 3]], ids=["alike", "uneven"])
@pytest.mark.parametrize("other", ["latent", "rest", "window"])
def test_latents_evicted_entries_and_windows_take_back_tokens(other, counts):
    def append(store, columns, valid=None):
        number = torch.arange(columns.start, columns.stop)[None, None, :, None]
        keys = (number + torch.arange(DIM)).float().expand(BATCH, 1 if other == "latent" else HEADS, -1, -1)
        store.append(keys, keys[..., :5] if other == "latent" else keys, number[0, :, :, 0], valid)

    store = LatentStore() if other == "latent" else DenseStore()
    append(store, range(40))
    if other == "rest":
        few = torch.arange(5, 40, 3).expand(BATCH, HEADS, -1)
        store = quantize_evicted(store, Selection(few), CODECS["kivi"], CODECS["packed"])
    elif other == "window":
        store.drop_first(9)
    assert store.droppable == (40 if other == "latent" else 0)
    append(store, range(40, 42))
    never = store.clone()
    append(store, range(42, 46))
    store.drop_last(counts)
    stays = torch.arange(4) < 4 - torch.tensor(counts)[:, None]
    if bool(stays.any()):
        append(never, range(42, 45), stays[:, :3])
    assert same(store.parts(), never.parts()) and store.entries == never.entries
