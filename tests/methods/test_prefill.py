"""Methods that read prompts sparsely choose the blocks that they say."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from attend import asking
from kvsieve.attention import AttentionRequest, ChosenBlocks, DenseEntries, attend, explain
from kvsieve.attention.reference import reference_attention
from kvsieve.core.blocks import BlockGrid, BlockLines, PromptContext
from kvsieve.errors import PlanError
from kvsieve.methods import AShape

SPARSE = [name for name in kvsieve.list_methods() if kvsieve.method_info(name).is_prefill]
BLOCKS = {"block": 8, "queries": 16, "least": 32, "full": 0}
# What makes a method choose everything.
ALL = {
    "a-shape": {"local": 4096},
    "compactattention": {"full": 4096},
    "critiprefill": {"critical": 4096},
    "flashprefill": {"full": 4096},
    "flexprefill": {"gamma": 1.0},
    "minference": {"vertical": 1.0},
    "xattention": {"threshold": 1.0},
}


OPTIONS = {
    "xattention": {"stride": 4},
    "critiprefill": {"critical": 40, "skip_layers": 0},
    "compactattention": {"chunk_length": 32},
}


def role(name, **given):
    return kvsieve.plan(name, **{**BLOCKS, **OPTIONS.get(name, {}), **given}).prefill


def context(length=200, new=200, strong=None, heads=2, sparse=None):
    """Random keys, of which those of the slots `strong` are what every query looks for."""
    made = torch.Generator().manual_seed(5)
    query = torch.randn(1, 2 * heads, new, 16, generator=made)
    keys = 0.3 * torch.randn(1, heads, length, 16, generator=made)
    looked_for = torch.randn(16, generator=made)
    query += looked_for
    if strong is not None:
        keys[:, :, strong] += 2 * looked_for
    grid = BlockGrid(new, length, BLOCKS["queries"], BLOCKS["block"])
    return PromptContext(3, 6, asking(query, 0.25), keys, grid)


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("new", [200, 77])
def test_everything_is_chosen_where_that_is_asked(name, new):
    ctx = context(new=new)
    chosen = role(name, **ALL[name]).select(ctx)
    visible = ctx.grid.visible(chosen.device)
    assert chosen.dtype == torch.bool and chosen.shape[2:] == visible.shape
    assert (chosen | ctx.grid.diagonal(chosen.device) | ~visible).all()


@pytest.mark.parametrize("name", [name for name in SPARSE if name != "a-shape"])
def test_what_queries_look_for_is_found(name):
    ctx = context(strong=slice(72, 88), new=104)
    assert ctx.grid.pad == 0
    chosen = (role(name, local=8).select(ctx) & ctx.grid.visible(torch.device("cpu"))).float()
    found = chosen[..., 72 // 8 : 88 // 8].mean()
    assert found == 1 or (name == "flexprefill" and found > 0.8)
    assert chosen.mean() < 0.6


@pytest.mark.parametrize("name", SPARSE)
def test_heads_choose_alone(name):
    """As they must under tensor parallelism."""
    ctx = context(heads=2)
    both = role(name, **({} if name == "a-shape" else {"local": 8})).select(ctx)
    part = PromptContext(3, 6, ctx.asked.heads(slice(2, None)), ctx.keys[:, 1:], ctx.grid)
    alone = role(name, **({} if name == "a-shape" else {"local": 8})).select(part)
    assert torch.equal(both[:, -alone.shape[1] :], alone)
    assert role(name).traits.heads == "own"


@pytest.mark.parametrize("new", [200, 77])
def test_flashprefill_weighs_blocks_by_the_means_of_their_keys(new):
    """All blocks of queries, which are weighed some at a time."""
    ctx = context(new=new)
    grid, flash = ctx.grid, role("flashprefill")
    places = torch.arange(200) + grid.pad
    means = torch.stack([ctx.keys[:, :, places // grid.block == block].mean(2) for block in range(grid.key_blocks)], 2)
    logits = ctx.query @ means.repeat_interleave(2, 1).transpose(2, 3) * ctx.scale
    wanted = torch.zeros(1, 4, grid.query_blocks, grid.key_blocks)
    for row in range(new):
        block = row // grid.queries
        seen = min(grid.first + (block + 1) * grid.own, grid.key_blocks)
        wanted[:, :, block, :seen] += logits[:, :, row, :seen].softmax(-1)
    torch.testing.assert_close(flash.weights(ctx), wanted, atol=1e-5, rtol=1e-5)
    chosen = flash.select(ctx) & ~flash.always(ctx)
    assert torch.equal(chosen, (wanted >= 0.1 * wanted.amax(-1, keepdim=True)) & ~flash.always(ctx))


@pytest.mark.parametrize("new", [200, 77])
def test_critiprefill_ranks_blocks_by_bounds_of_queries_and_keys(new):
    ctx = context(new=new)
    grid = ctx.grid
    method = role("critiprefill")
    places = torch.arange(200) + grid.pad
    rows = torch.arange(new) // grid.queries
    wanted = torch.zeros(1, 2, grid.query_blocks, grid.key_blocks)
    for head in range(2):
        for segment in range(grid.query_blocks):
            before = grid.first + segment * grid.own
            scores = []
            for block in range(before):
                own = ctx.keys[0, head, places // grid.block == block]
                means = []
                for query_head in (2 * head, 2 * head + 1):
                    asked = ctx.query[0, query_head, rows == segment]
                    ends = asked.amax(0), asked.amin(0)
                    by_bound = [
                        sum(float(end @ bound) for end in ends) / 2 * ctx.scale for bound in (own.amax(0), own.amin(0))
                    ]
                    means.append(max(by_bound))
                scores.append(sum(means) / 2)
            wanted[0, head, segment, :before] = torch.tensor(scores).softmax(-1)
    torch.testing.assert_close(method.weights(ctx), wanted, atol=1e-5, rtol=1e-4)
    first = method.select(ctx)
    best = wanted[0, 0, -1].topk(5).indices
    before = grid.first + (grid.query_blocks - 1) * grid.own
    assert set(first[0, 0, -1, :before].nonzero().flatten().tolist()) == set(best.tolist())
    # The next layer blends its weights with those of this one, by a quarter.
    before = 100 * torch.eye(grid.key_blocks)[:1].expand_as(wanted)
    ctx.shared["critiprefill"] = ctx.layer_idx - 1, before
    chosen = method.select(ctx)
    assert chosen[:, :, 1:, 0].all()
    layer, blended = ctx.shared["critiprefill"]
    assert layer == ctx.layer_idx
    torch.testing.assert_close(blended[..., 1:], 0.75 * wanted[..., 1:], atol=1e-5, rtol=1e-4)
    # A layer after one with full attention is not blended with the last sparse one.
    ctx.shared["critiprefill"] = ctx.layer_idx - 2, before
    assert torch.equal(method.select(ctx), first)


@pytest.mark.parametrize("new", [200, 77])
def test_a_compact_table_is_the_union_of_a_chunk_and_a_group(new):
    ctx = context(new=new, strong=slice(40, 48))
    grid = ctx.grid
    method = role("compactattention", full=1)
    chosen = method.base.select(ctx) & grid.visible(torch.device("cpu"))
    found = method.select(ctx) & grid.visible(torch.device("cpu"))
    for head in range(2):
        for start in range(0, grid.query_blocks, 2):
            rows = [row for row in (start, start + 1) if row < grid.query_blocks]
            counted = [row for row in rows if row < grid.query_blocks - 1]
            table = {
                block
                for row in counted
                for query_head in (2 * head, 2 * head + 1)
                for block in chosen[0, query_head, row].nonzero().flatten().tolist()
            }
            own = set(range(grid.first + start * grid.own, grid.key_blocks))
            for row in rows:
                seen = set(range(min(grid.first + (row + 1) * grid.own, grid.key_blocks)))
                wanted = (table | own) & seen if row in counted else seen
                assert set(found[0, head, row].nonzero().flatten().tolist()) == wanted


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("new", [200, 77])
def test_attention_over_a_table_equals_the_mask(new, full):
    """The gathering executor, beside the reference; a last query block with everything has a run of its own."""
    ctx = context(new=new, strong=slice(40, 48))
    method = role("compactattention", full=full)
    values = torch.randn(1, 2, 200, 16, generator=torch.Generator().manual_seed(3))
    request = AttentionRequest(
        ctx.asked, DenseEntries(ctx.keys, values), ChosenBlocks(method.select(ctx), ctx.grid, method.shared)
    )
    assert explain(request) == "dense, gathered"
    torch.testing.assert_close(attend(request), reference_attention(request), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("new", "length", "window"), [(40, 40, 16), (24, 53, 24), (40, 61, 5)])
def test_lines_are_those_of_the_last_queries(new, length, window):
    ctx = context(length=length, new=new)
    grid, lines = ctx.grid, BlockLines.of(ctx, window)
    keys = ctx.keys.repeat_interleave(2, 1)
    logits = ctx.query @ keys.transpose(2, 3) * ctx.scale
    own = torch.arange(length - new, length)[:, None]
    weights = logits.masked_fill(torch.arange(length) > own, float("-inf")).softmax(-1)[:, :, -window:]
    vertical = torch.zeros(1, 4, grid.key_blocks)
    slash = torch.zeros(1, 4, grid.key_blocks)
    for key in range(length):
        vertical[..., (key + grid.pad) // grid.block] += weights[..., key].sum(-1)
    for block in range(grid.key_blocks):
        # Distances of a query of a block and a key of the block so many before its first one.
        near = range(max(block * grid.block - grid.block + 1, 0), min(block * grid.block + grid.queries, length))
        for row in range(window):
            at = length - window + row
            slash[..., block] += sum(weights[..., row, at - apart] for apart in near if at - apart >= 0)
    assert torch.allclose(lines.vertical, vertical, atol=1e-5)
    assert torch.allclose(lines.slash, slash, atol=1e-5)


@pytest.mark.parametrize("tokens", [31, 64, 200, 1001])
def test_the_density_of_an_a_shape_is_known_beforehand(tokens):
    shape = AShape(**BLOCKS, sinks=10, local=20)
    ctx = context(length=tokens, new=tokens)
    chosen = shape.select(ctx) | ctx.grid.diagonal(torch.device("cpu"))
    visible = ctx.grid.visible(torch.device("cpu"))
    counted = (chosen & visible).sum() / (visible.sum() * chosen.shape[1])
    assert shape.density(tokens) == pytest.approx(1.0 if tokens < 32 else counted.item())


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("a-shape", {"block": 48}, "multiple of block"),
        ("xattention", {"threshold": 0.0}, "above 0"),
        ("xattention", {"stride": 3}, "divide"),
        ("xattention", {"local": -1}, "local"),
        ("minference", {"slash": 1.5}, "at most 1"),
        ("flexprefill", {"gamma": 0.0}, "above 0"),
        ("flashprefill", {"alpha": -1.0}, "above 0"),
        ("critiprefill", {"critical": 4}, "at least 32"),
        ("critiprefill", {"fusion": 1.0}, "below 1"),
        ("compactattention", {"chunk_length": 200}, "multiple of the 128 queries"),
        ("compactattention", {"base": "snapkv"}, "block"),
    ],
)
def test_bad_parameters_are_refused(name, given, told):
    with pytest.raises(PlanError, match=told):
        kvsieve.plan(name, **given)
