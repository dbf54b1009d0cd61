"""The kernel over encoded entries equals the slow definition over what they decode to."""

from __future__ import annotations

import pytest
import torch

from attend import AttentionTerms, packed_attention
from codecs_of_tests import Formats
from kvsieve import kernels
from kvsieve.cache import DenseStore, FixedEntries, PackedStore, keep
from kvsieve.core.codes import CodeFormat
from kvsieve.core.kv_rows import DeviceLength
from kvsieve.core.selection import pack_ragged
from kvsieve.kernels import packed
from reference import reference_attention

HEADS = 2
KERNELS = "packed_kernel", "planes_kernel"
LEVELS = CodeFormat(3, "token", 8, zero=False, levels=(-1.7, -0.8, -0.4, -0.1, 0.3, 0.6, 1.1, 2.0))
KIVI_4 = CodeFormat(4, "channel"), CodeFormat(4, "token", 12)
TURNED = CodeFormat(4, "token", 24, rotated=True, centered=True)
ANY, PLANES = KERNELS
PAIRS = {
    "kivi-3": (CodeFormat(3, "channel"), CodeFormat(3, "token", 12), ANY),
    "kivi-4, 8": (CodeFormat(4, "channel"), CodeFormat(4, "token", 8), ANY),
    "bits-5-7": (CodeFormat(5, "channel"), CodeFormat(7, "token", 24), ANY),
    "levels": (LEVELS, LEVELS, ANY),
    "bits-8-2": (CodeFormat(8, "token", 24, zero=False), CodeFormat(2, "channel"), PLANES),
    "bits-2-8": (CodeFormat(2, "token", 12), CodeFormat(8, "token", 12), PLANES),
    "bits-4-4": (CodeFormat(4, "token", 6), CodeFormat(4, "channel", zero=False), PLANES),
    "turned": (TURNED, TURNED, PLANES),
}


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """KV rows are split as far as they can be; tiles are smaller than blocks."""
    monkeypatch.setattr(packed, "multiprocessors", lambda device: 50)
    monkeypatch.setattr(packed, "_BYTES", 2048)
    monkeypatch.setattr(packed, "BLOCK", 16)


def filled(pair: tuple[CodeFormat, CodeFormat], dtype=torch.float32, block: int = 20, valid=None, batch: int = 1):
    torch.manual_seed(1)
    store, (keys, values) = DenseStore(), torch.randn(2, batch, HEADS, 50, 24)
    store.append((keys + 1).to(dtype), values.to(dtype), torch.arange(50)[None], valid)
    return PackedStore.build(store, Formats(of_keys=pair[0], of_values=pair[1], block=block))


def compare(
    store: PackedStore,
    groups: int,
    monkeypatch,
    terms: AttentionTerms | None = None,
    kernel: str = PLANES,
    new: int = 1,
) -> None:
    launched = set()

    class Spy:
        def __init__(self, name: str) -> None:
            self.name, self.run = name, vars(packed)[name]

        def __getitem__(self, grid):
            launched.add(self.name)
            return self.run[grid]

    dim = store.keys.shape[-1]
    query = torch.randn(len(store.lengths), HEADS * groups, new, dim).to(store.dtype)
    with monkeypatch.context() as patched:
        for name in KERNELS:
            patched.setattr(packed, name, Spy(name))
        ours = packed_attention(query, store, scale=0.2, terms=terms)
    assert launched == {kernel} and ours.isfinite().all()
    wanted = reference_attention(query, store.keys, store.values, scale=0.2, valid=store.valid, terms=terms)
    close = 1e-5 if store.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(ours, wanted, atol=close, rtol=close)


@pytest.mark.parametrize(("keys", "values", "kernel"), PAIRS.values(), ids=PAIRS)
def test_every_format(keys, values, kernel, monkeypatch):
    compare(filled((keys, values)), 3, monkeypatch, kernel=kernel)


def test_more_query_heads_than_a_tile_has_rows(monkeypatch):
    compare(filled(KIVI_4), 11, monkeypatch)


@pytest.mark.parametrize(("groups", "new"), [(3, 5), (7, 9)], ids=["", "in two calls"])
def test_several_tokens_see_the_exact_entries_up_to_their_own(groups, new, monkeypatch):
    store = filled(KIVI_4)
    store.append(*torch.randn(2, 1, HEADS, new, 24), torch.arange(50, 50 + new)[None])
    sinks = torch.linspace(-3, 3, HEADS * groups)
    compare(store, groups, monkeypatch, AttentionTerms(0.7, sinks), new=new)


@pytest.mark.parametrize("terms", [None, AttentionTerms(0.7, torch.tensor([0.5, -9, 2, 0, 9, -4]))], ids=["", "terms"])
def test_padding_and_heads_of_their_own(terms, monkeypatch):
    store = filled(KIVI_4, torch.float32, 16, torch.arange(50) >= torch.tensor([[20], [0]]), 2)
    real = store.valid.expand(-1, HEADS, -1) & (torch.rand(2, HEADS, store.size) > 0.4)
    real[1, 0, :-5], real[..., -1] = False, True
    compare(keep(store, pack_ragged(real)), 3, monkeypatch, terms)


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("name", ["kivi-3", "levels", "turned"])
def test_at_fixed_places_with_room_for_more(name, padded):
    """Places without a block, of which whole parts are, and exact slots that are not in use count for nothing."""
    valid = torch.arange(50) >= torch.tensor([[20], [0]]) if padded else None
    store = filled(PAIRS[name][:2], torch.float32, 16, valid, 2)
    store.make_room(100)
    store.prepare_slots(50)
    fixed, length = FixedEntries(store).store, DeviceLength(torch.tensor(store.next_slot))
    assert fixed.bodies[0].table.shape[1] > 2 * store.bodies[0].table.shape[1]
    assert fixed.exact.size > store.exact.size
    query = torch.randn(2, HEADS * 3, 1, 24)
    ours = packed_attention(query, fixed, scale=0.2, length=length)
    wanted = reference_attention(query, store.keys, store.values, scale=0.2, valid=store.valid)
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)


def test_bfloat16_in_one_part(monkeypatch):
    monkeypatch.setattr(packed, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(packed, "PROGRAMS", 1)
    compare(filled(KIVI_4, torch.bfloat16), 1, monkeypatch)


def test_numbers_kept_apart_are_left_to_plain_torch(monkeypatch):
    launched = []
    monkeypatch.setattr(packed, "packed_decode", lambda *args: launched.append(args))
    monkeypatch.setattr(kernels, "packed_decode", packed.packed_decode, raising=False)
    store = filled((CodeFormat(4, "channel", apart=3), CodeFormat(4, "token", 8)))
    query = torch.randn(1, HEADS, 1, 24)
    wanted = reference_attention(query, store.keys, store.values, scale=0.2)
    torch.testing.assert_close(packed_attention(query, store, scale=0.2), wanted, atol=1e-5, rtol=0)
    assert not launched
