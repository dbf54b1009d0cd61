"""The fast attention equals the reference on every path."""

from __future__ import annotations

import pytest
import torch

from attend import asking, dense_attention
from kvsieve.attention import AttentionRequest, DenseEntries, blocked, choice, dense
from kvsieve.attention.chunk import chunk_attention, is_even
from reference import reference_attention


@pytest.mark.parametrize("new", [1, 6, 19], ids=lambda n: f"L{n}")
@pytest.mark.parametrize("groups", [1, 3, 4], ids=lambda g: f"G{g}")
@pytest.mark.parametrize("padding", [None, "rows", "heads"])
@pytest.mark.parametrize("limit", [1 << 25, 700], ids=["one-block", "blocks"])
def test_equals_the_reference(new, groups, padding, limit, monkeypatch):
    monkeypatch.setattr(dense, "_MASK_ELEMENTS", limit)
    torch.manual_seed(new * 10 + groups)
    query = torch.randn(2, 2 * groups, new, 8, dtype=torch.float64)
    keys, values = torch.randn(2, 2, 2, 19, 8, dtype=torch.float64)
    valid = None
    if padding is not None:
        valid = torch.rand(2, 1 if padding == "rows" else 2, 19) > 0.3
        valid[1, :, :4] = False
    ours = dense_attention(query, keys, values, scale=0.3, valid=valid)
    theirs = reference_attention(query, keys, values, scale=0.3, valid=valid)
    assert ours.isfinite().all()
    if padding == "rows" and new > 1:
        # What padding itself attends to is nobody's concern.
        asked = valid[:, 0, -new:]
        ours, theirs = (part.transpose(1, 2)[asked] for part in (ours, theirs))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("new", [2, 37, 50], ids=lambda n: f"L{n}")
@pytest.mark.parametrize("groups", [1, 3], ids=lambda g: f"G{g}")
@pytest.mark.parametrize("padding", [None, "rows", "heads"])
def test_blocks_of_products_equal_the_reference(new, groups, padding, monkeypatch):
    monkeypatch.setattr(blocked, "_ELEMENTS", 1)  # blocks of 16 queries, the fewest
    torch.manual_seed(new * 10 + groups)
    query = torch.randn(2, 2 * groups, new, 6, dtype=torch.float64)
    # As a store has them: views of longer buffers.
    keys, values = (torch.randn(2, 2, 64, dim, dtype=torch.float64)[:, :, :50] for dim in (6, 10))
    valid = None
    if padding is not None:
        valid = torch.rand(2, 1 if padding == "rows" else 2, 50) > 0.3
        valid[1, :, :20] = False
    ours = blocked.blocked_attention(AttentionRequest(asking(query, 0.3), DenseEntries(keys, values, valid)))
    theirs = reference_attention(query, keys, values, scale=0.3, valid=valid)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("new", "length"), [(2, 3), (70, 71), (70, 700), (512, 700)], ids=str)
def test_chunks_in_two_fused_calls_equal_the_reference(new, length, dtype):
    torch.manual_seed(new)
    query = torch.randn(2, 6, new, 16, dtype=dtype)
    # As a store has them: views of longer buffers.
    keys, values = torch.randn(2, 2, 2, length + 9, 16, dtype=dtype)[..., :length, :]
    assert is_even(query, values)
    ours = chunk_attention(AttentionRequest(asking(query, 0.3), DenseEntries(keys, values)))
    theirs = reference_attention(query.double(), keys.double(), values.double(), scale=0.3)
    assert ours.dtype == dtype
    atol = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(ours.double(), theirs, atol=atol, rtol=0)


def test_a_chunk_is_split_without_a_mask(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a mask was made")

    query, keys = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 12, 8)
    monkeypatch.setattr(dense.F, "scaled_dot_product_attention", refuse)
    dense_attention(query, keys, keys, scale=0.3)
    # Values of another size, which the kernel does not take, need none either.
    dense_attention(query, keys, torch.randn(1, 2, 12, 4), scale=0.3)
    with pytest.raises(AssertionError, match="mask"):  # its log-sum-exp has no gradient
        dense_attention(query.requires_grad_(), keys, keys, scale=0.3)


def test_only_bfloat16_on_a_cpu_is_taken_apart_into_products():
    assert not choice.faster_here(torch.zeros(1)) and not choice.faster_here(torch.zeros(1, dtype=torch.float16))
    assert not choice.faster_here(torch.zeros(1, dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize("new", [700, 300])
def test_blocks_have_few_widths_and_one_block_is_held(new, monkeypatch):
    """Each shape is compiled and kept by oneDNN; logits beyond a block's are memory for nothing."""
    monkeypatch.setattr(blocked, "_QUERIES", 4)
    monkeypatch.setattr(blocked, "_WIDTHS", 8)
    query, keys = torch.randn(1, 2, new, 4), torch.randn(1, 1, 700, 4)
    widths, scratch, product = set(), set(), torch.baddbmm

    def noting(logits, *given, **options):
        widths.add(logits.shape[-1])
        scratch.add(logits.untyped_storage().nbytes())
        return product(logits, *given, **options)

    monkeypatch.setattr(torch, "baddbmm", noting)
    ours = blocked.blocked_attention(AttentionRequest(asking(query, 0.3), DenseEntries(keys, keys)))
    assert len(widths) <= 9 and max(widths) == 700 and scratch == {2 * 4 * 700 * 4}
    whole = dense.F.scaled_dot_product_attention(
        query, keys, keys, attn_mask=torch.ones(new, 700, dtype=torch.bool).tril(700 - new), scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(ours, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("padding", [None, "rows", "heads"])
def test_a_token_by_products_equals_the_reference(padding):
    torch.manual_seed(1)
    query, (keys, values) = torch.randn(2, 6, 1, 8).double(), torch.randn(2, 2, 2, 33, 8).double()
    valid = None if padding is None else torch.rand(2, 1 if padding == "rows" else 2, 33) > 0.3
    mask = None
    if valid is not None:
        mask = valid[:, :, None].clone()
        mask[..., -1] = True
    ours = blocked.single_query_attention(asking(query.view(2, 2, 3, 8), 0.3), keys, values, mask).view(2, 6, 1, 8)
    torch.testing.assert_close(
        ours, reference_attention(query, keys, values, scale=0.3, valid=valid), atol=1e-12, rtol=0
    )


def test_a_pass_with_gradients_runs():
    """A plain call of the model without torch.no_grad()."""
    query, keys = torch.randn(1, 4, 5, 8, dtype=torch.bfloat16), torch.randn(1, 2, 12, 8, dtype=torch.bfloat16)
    expected = dense_attention(query, keys, keys, scale=0.3)
    found = dense_attention(query.requires_grad_(), keys, keys, scale=0.3)
    found.sum().backward()
    assert query.grad is not None and query.grad.isfinite().all()
    torch.testing.assert_close(found.detach(), expected, atol=2e-2, rtol=0)
