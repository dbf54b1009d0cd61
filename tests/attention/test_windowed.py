"""Windows and chunks by position, against a mask over all positions, and what their layers may forget."""

from __future__ import annotations

import pytest
import torch

from attend import AttentionTerms, masked_attention, window_attention
from kvsieve.attention import Window
from kvsieve.hf.cache.layer import WindowLayer

WINDOWS = [Window(16), Window(16, chunked=True), Window(1), Window(5, chunked=True), Window(1000)]
TERMS = {"plain": None, "cap and sinks": AttentionTerms(3.0, torch.linspace(-1, 2, 4).double())}
SCALE = 0.3


def made(rows, new, length, holes, padding=0, seed=0):
    """Queries, keys, values, positions that ascend (with gaps where there are holes), and which entries are real."""
    gen = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, 4, new, 8, generator=gen).double()
    keys, values = (torch.randn(rows, 2, length, 8, generator=gen).double() for _ in range(2))
    steps = torch.randint(1, 9 if holes else 2, (rows, length), generator=gen)
    positions = steps.cumsum(1) - 1
    valid = None
    if padding:
        valid = torch.ones(rows, length, dtype=torch.bool)
        for row in range(rows):
            valid[row, : padding * row] = False
    return query, keys, values, positions.to(torch.int32), valid


def brute(query, keys, values, positions, window, valid, terms):
    new = query.shape[2]
    at, stored = positions[:, -new:, None].long(), positions[:, None].long()
    if window.chunked:
        seen = (at // window.span == stored // window.span) & (stored <= at)
    else:
        seen = (at - stored < window.span) & (stored <= at)
    if valid is not None:
        seen &= valid[:, None]
    return masked_attention(query, keys, values, seen[:, None], scale=SCALE, terms=terms)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("window", WINDOWS, ids=repr)
@pytest.mark.parametrize("holes", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize(("new", "length"), [(40, 40), (7, 50), (1, 50), (1, 1), (600, 1300), (1100, 1100)])
def test_attention_goes_by_positions(new, length, holes, window, terms):
    for padding in (0, 3) if length < 100 and length > 10 else (0,):
        query, keys, values, positions, valid = made(3 if length < 100 else 1, new, length, holes, padding)
        found = window_attention(query, keys, values, positions, window, scale=SCALE, valid=valid, terms=TERMS[terms])
        wanted = brute(query, keys, values, positions, window, valid, TERMS[terms])
        assert found.isfinite().all()
        real = torch.ones(len(query), new, dtype=torch.bool) if valid is None else valid[:, -new:]
        for row, asked in enumerate(real):
            torch.testing.assert_close(found[row][:, asked], wanted[row][:, asked], atol=1e-10, rtol=0)


@pytest.mark.parametrize("window", [Window(16), Window(16, chunked=True), Window(200)], ids=repr)
@pytest.mark.parametrize("holes", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize("padding", [0, 9])
def test_nothing_that_a_token_to_come_sees_is_dropped(window, holes, padding):
    """A prompt in pieces and a long answer: every output is that of a layer that forgets nothing, in bounded memory."""
    rows, prompt, total = 3, 60, 400
    _, keys, values, positions, valid = made(rows, total, total, holes, padding)
    if holes:
        # What is generated follows without holes.
        after = torch.arange(1, total - prompt + 1, dtype=torch.int32)
        positions[:, prompt:] = positions[:, prompt - 1 : prompt] + after
    query = torch.randn(rows, 4, total, 8, generator=torch.Generator().manual_seed(1)).double()
    layer = WindowLayer(window)
    layer.holes = holes
    ends = [25, 26, prompt, *range(prompt + 1, total + 1)]
    for first, last in zip([0, *ends], ends, strict=False):
        part = slice(first, last)
        fresh = None if valid is None or bool(valid[:, part].all()) else valid[:, part]
        layer.store.append(keys[:, :, part], values[:, :, part], positions[:, part], fresh, None, layer.room)
        store = layer.store
        found = window_attention(
            query[:, :, part],
            store.keys,
            store.values,
            store.index[:, 0],
            window,
            scale=SCALE,
            valid=None if store.valid is None else store.valid[:, 0],
        )
        low = max(0, first - 2 * window.span - 70)
        near = slice(low, last)
        seen = None if valid is None else valid[:, near]
        wanted = brute(query[:, :, part], keys[:, :, near], values[:, :, near], positions[:, near], window, seen, None)
        for row in range(rows):
            asked = torch.ones(last - first, dtype=torch.bool) if valid is None else valid[row, part]
            torch.testing.assert_close(found[row][:, asked], wanted[row][:, asked], atol=1e-10, rtol=0)
        layer.drop_unseen(at_once=last - first > 1)
        if first >= prompt:
            assert store.size <= window.span + layer.room
    held = sum(part.nbytes for part in layer.all_tensors())
    each = rows * 2 * (8 + 8) * 8 + rows * 2 * 4
    assert held <= (window.span + 3 * layer.room) * each + rows * 1000


def test_the_row_that_sees_most_decides():
    """A row with padding or holes sees further back in the store than one without."""
    layer = WindowLayer(Window(4))
    layer.holes = True
    # The first row's last tokens lie close together, the second row's far apart.
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 3, 9, 12, 15, 18]], dtype=torch.int32)
    zeros = torch.zeros(2, 1, 6, 2)
    layer.store.append(zeros, zeros, positions)
    layer.drop_unseen(at_once=True)
    assert layer.store.index[:, 0].tolist() == [[3, 4, 5], [12, 15, 18]]
