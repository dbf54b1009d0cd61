"""An entry of weight k counts as k copies of it, for every executor that takes weights; the others refuse by name."""

from __future__ import annotations

import pytest
import torch

from attend import asking, query_mass, window_mass
from kvsieve.attention import AttentionRequest, DenseEntries, attend, executors
from kvsieve.attention.reference import reference_attention

BATCH, HEADS, GROUPS, DIM, LENGTH = 2, 2, 3, 16, 40
COUNTS = (1, 1, 2, 3, 1)
CLOSE = {torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def drawn(dtype, new, length=LENGTH):
    """Return queries, keys, values, and the number of copies of each entry: 1 for the last `new`."""
    torch.manual_seed(length + new)
    keys, values = torch.randn(2, BATCH, HEADS, length, DIM, dtype=torch.float64).to(dtype)
    query = torch.randn(BATCH, HEADS * GROUPS, new, DIM, dtype=torch.float64).to(dtype)
    copies = torch.tensor(COUNTS).repeat(length // len(COUNTS))
    copies = torch.stack([copies[torch.randperm(length)] for _ in range(BATCH * HEADS)])
    # All rows and heads have equally many, none of them among the last.
    order = copies.argsort(1, descending=True)
    return query, keys, values, copies.gather(1, order).view(BATCH, HEADS, length)


def repeated(part, copies):
    rows = [
        one.repeat_interleave(count, 0) for one, count in zip(part.flatten(0, 1), copies.flatten(0, 1), strict=True)
    ]
    return torch.stack(rows).unflatten(0, part.shape[:2])


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("new", [1, 4, 8])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_an_entry_counts_as_its_copies(dtype, new, softcap, sinks):
    query, keys, values, copies = drawn(dtype, new)
    asked = asking(query, 0.3, (softcap, torch.randn(HEADS * GROUPS).to(dtype) if sinks else None))
    whole = AttentionRequest(asked, DenseEntries(repeated(keys, copies), repeated(values, copies)))
    wanted = reference_attention(whole)
    request = AttentionRequest(asked, DenseEntries(keys, values, log_weight=copies.float().log()))
    ran = [executor for executor in executors(request) if executor.why_not(request) is None]
    assert len(ran) > 1
    for executor in ran:
        found = executor.run(request)
        torch.testing.assert_close(found, wanted, atol=CLOSE[dtype], rtol=CLOSE[dtype], msg=executor.name)
    torch.testing.assert_close(attend(request), wanted, atol=CLOSE[dtype], rtol=CLOSE[dtype])


def test_a_token_is_for_the_c_kernel_and_what_refuses_says_why():
    query, keys, values, copies = drawn(torch.float32, 1)
    request = AttentionRequest(asking(query, 0.3), DenseEntries(keys, values, log_weight=copies.float().log()))
    reasons = {executor.name: executor.why_not(request) for executor in executors(request)}
    assert reasons["C"] is None or "gcc" in reasons["C"]
    prompt = drawn(torch.float32, 8)
    request = AttentionRequest(asking(prompt[0], 0.3), DenseEntries(*prompt[1:3], log_weight=prompt[3].float().log()))
    reasons = {executor.name: executor.why_not(request) for executor in executors(request)}
    assert reasons["torch, in two parts"] == "entries have weights" and reasons["torch, masked"] is None


@pytest.mark.parametrize("padded", [False, True])
def test_mass_is_that_of_the_copies(padded):
    query, keys, values, copies = drawn(torch.float32, 4)
    real = torch.ones(BATCH, HEADS, LENGTH, dtype=torch.bool)
    if padded:
        real[..., :3] = False
    weights = copies.float().log()
    valid = repeated(real[..., None], copies)[..., 0] if padded else None
    number = repeated(torch.arange(LENGTH).expand(BATCH, HEADS, -1)[..., None], copies)[..., 0]

    def summed(mass):
        number_of = number.repeat_interleave(GROUPS, 1)
        return mass.new_zeros(*mass.shape[:2], LENGTH).scatter_add(2, number_of, mass)

    wanted = summed(window_mass(query, repeated(keys, copies), 0.3, valid=valid))
    for block in (None, 16):
        found = window_mass(query, keys, 0.3, valid=real if padded else None, log_weight=weights, block=block)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    shown = real[:, :, None]
    found = query_mass(query, keys, 0.3, shown, log_weight=weights)
    wanted = summed(
        query_mass(query, repeated(keys, copies), 0.3, repeated(real[..., None], copies)[..., 0][:, :, None])
    )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
