"""Every executor of the table equals the reference wherever it does not refuse, over random requests."""

from __future__ import annotations

import itertools

import pytest
import torch

from attend import asking
from drawn_requests import CLOSE, KINDS, Draw, counted
from kvsieve.attention import AttentionRequest, DenseEntries, attend, executors, explain
from kvsieve.attention.reference import reference_attention
from reference import reference_attention as plainest


@pytest.mark.parametrize("kind", KINDS)
def test_every_executor_equals_the_reference_wherever_it_runs(kind):
    ran = set()
    for seed in range(60):
        request = Draw(kind, seed).request()
        wanted = reference_attention(request)
        assert wanted.dtype == request.asked.query.dtype and wanted.isfinite().all()
        for executor in executors(request):
            if executor.why_not(request) is None:
                found, ran = executor.run(request), ran | {executor.name}
                torch.testing.assert_close(
                    counted(request, found),
                    counted(request, wanted),
                    atol=CLOSE[wanted.dtype],
                    rtol=CLOSE[wanted.dtype],
                    msg=lambda text, name=executor.name, seed=seed: f"{name}, seed {seed}: {text}",
                )
        first = next(row.name for row in executors(request) if row.why_not(request) is None)
        assert explain(request).partition(" (")[0] == first
    assert len(ran) > 1


@pytest.mark.parametrize("new", [1, 6])
def test_several_parts_are_seen_as_one(new):
    """The last of them has the queries' own entries."""
    for seed in range(6):
        draw = Draw("prompt", seed)
        draw.length, draw.new, draw.dtype = 20, new, torch.float64
        keys, values = draw.entries()
        query, terms = (
            draw.random(draw.batch, draw.heads * draw.groups, new, draw.dim),
            draw.terms(draw.heads * draw.groups),
        )
        cuts = (0, 5, 12, 20)
        parts = tuple(DenseEntries(keys[:, :, a:b], values[:, :, a:b]) for a, b in itertools.pairwise(cuts))
        found = attend(AttentionRequest(asking(query, 0.3, terms), parts))
        whole = attend(AttentionRequest(asking(query, 0.3, terms), DenseEntries(keys, values)))
        torch.testing.assert_close(found, whole, atol=1e-9, rtol=1e-9)


def test_the_reference_is_the_plain_definition():
    for seed in range(20):
        request = Draw("prompt", seed).request()
        asked, stored = request.asked, request.stored
        stored.log_weight = None
        wanted = plainest(asked.query, stored.keys, stored.values, scale=0.3, valid=stored.valid, terms=asked)
        close = CLOSE[wanted.dtype]
        torch.testing.assert_close(reference_attention(request), wanted, atol=close, rtol=close)


def test_what_refuses_says_why():
    query, keys = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 30, 16)
    capped = explain(AttentionRequest(asking(query, 0.3, (2.0, None)), DenseEntries(keys, keys)))
    assert capped.startswith(
        "products (Triton: it is for GPUs; C, few tokens: it is for CPUs, in bfloat16; "
        "C: logits are capped, or there are sinks; "
    )
