"""Plans that read prompts sparsely: the laws, what they compose with, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

import kvsieve
from attend import masked_attention
from kvsieve.cli.specs import compared_specs, make_runs, parse_prefills
from kvsieve.errors import PlanError, UnsupportedModelError
from kvsieve.hf.prompt.chunks import chunk_ends
from kvsieve.lab.bench.estimate import estimate
from kvsieve.lab.bench.geometry import geometry
from kvsieve.lab.eval.cells import settings
from kvsieve.methods import AShape, XAttention
from kvsieve.planning.named import crossed
from kvsieve.planning.plans import Plan
from small import plan_of
from tiny import greedy, padded_prompt
from tiny_models import build

SMALL = "block=8:queries=16:least=32"
SPARSE = f"xattention:{SMALL}:stride=4:threshold=0.6"
WHOLE = f"xattention:{SMALL}:stride=4:threshold=1.0"
GREEDY = greedy(max_new_tokens=3, return_dict_in_generate=True, output_logits=True)
PADDING = 13


@pytest.fixture(scope="module")
def prompts():
    return padded_prompt(150, PADDING, seed=3)


def answered(model, plan, ids, mask=None, **options):
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        result = sieve.generate(ids, mask, **{**GREEDY, **options})
        return torch.stack(result.output.logits, 1), result.stats, result


def full(prefill, method="full", **given):
    return kvsieve.plan(method, prefill=prefill, **given)


METHODS = {
    "full": {},
    "snapkv": {"budget": 60, "window": 4, "paper": True},
    "fastkv": {"budget": 60, "window": 4, "tsp_layer": 1, "paper": True},
    "adakv": {"budget": 60},
    "quest": {"budget": 32},
}


@pytest.mark.parametrize(("method", "chunk"), [*((name, None) for name in METHODS), ("fastkv", 60), ("adakv", 60)])
def test_computing_every_block_is_the_plan_without(model, prompts, method, chunk):
    found, stats, _ = answered(model, full(WHOLE, method, **METHODS[method]), *prompts, chunk=chunk)
    expected, _, _ = answered(model, kvsieve.plan(method, **METHODS[method]), *prompts, chunk=chunk)
    assert torch.allclose(found, expected, atol=1e-8)
    assert stats.prompt_density == 1.0 and not stats.applied
    assert any("read in full" in note for note in stats.notes)


@pytest.mark.parametrize("method", METHODS)
def test_a_padded_row_is_the_row_alone(model, prompts, method):
    ids, mask = prompts
    plan = full(SPARSE, method, **METHODS[method])
    both, stats, _ = answered(model, plan, ids, mask)
    alone, own, _ = answered(model, plan, ids[1:, PADDING:])
    assert torch.allclose(both[1:], alone, atol=1e-8)
    assert 0.2 < own.prompt_density < 0.9 and 0.2 < own.prompt_recall < 1
    assert 0.2 < stats.prompt_density < 0.9
    assert f"{100 * own.prompt_density:.0f}% of the prompt's attention computed" in str(own)


def test_skipping_is_masking_in_every_layer(model, prompts, monkeypatch):
    """The first layer's output under the plan is that of dense attention under the chosen blocks' mask."""
    from kvsieve.hf.forward import sparse_prompt

    ids, seen = prompts[0][:1], []
    exact = sparse_prompt.attend

    def spied(request):
        out, stored, sees = exact(request), request.stored, request.sees
        if sees is None:
            return out
        query, chosen, grid = request.asked.query, sees.chosen, sees.grid
        blocks = chosen.repeat_interleave(grid.queries, 2).repeat_interleave(grid.block, 3)
        mask = blocks[:, :, : grid.new, grid.pad : grid.pad + grid.length]
        mask = mask.repeat_interleave(query.shape[1] // mask.shape[1], 1)
        mask = mask & (torch.arange(grid.length) <= torch.arange(grid.length - grid.new, grid.length)[:, None])
        seen.append((out, masked_attention(query, stored.keys, stored.values, mask, scale=request.asked.scale)))
        return out

    monkeypatch.setattr(sparse_prompt, "attend", spied)
    answered(model, full(SPARSE), ids, chunk=70)
    # Two chunks of four layers: what is left of a prompt behind them has less than a block.
    assert len(seen) == 8
    assert all(torch.allclose(out, expected, atol=1e-10) for out, expected in seen)


def seen_in_passes(role, ends):
    """Which keys each query of a prompt sees if its passes end there, bool [N, N]: A-shape's definition, by token."""
    mask = torch.ones(ends[-1], ends[-1], dtype=torch.bool).tril()
    for start, end in itertools.pairwise([0, *ends]):
        if end < role.least or end - start < role.queries:
            continue
        pad = -start % role.block
        blocks = -(-(end - start) // role.queries)
        for number in range(blocks - role.full if end == ends[-1] else blocks):
            own = start + number * role.queries
            keys = torch.arange(own)
            near = (own - keys + role.block - 1) // role.block <= (role.local + role.block - 1) // role.block
            first = (keys + pad) // role.block < (role.sinks + pad + role.block - 1) // role.block
            mask[own : min(own + role.queries, end), :own] &= near | first
    return mask


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize(
    ("size", "chunk"),
    [(150, None), (150, 48), (150, 50), (31, None), (41, None), (41, 7), (41, 16), (41, 17), (1, None)],
)
def test_passes_are_sparse_by_their_own_tokens_and_entries(model, prompts, size, chunk, full):
    """Short passes, and those with few entries, are dense, so short chunks of a short prompt are not one pass."""
    role = AShape(block=8, queries=16, least=32, sinks=3, local=8, full=full)
    ids = prompts[0][:1, :size]
    mask = seen_in_passes(role, chunk_ends(size, chunk, 0))
    found, stats, _ = answered(model, Plan(prefill=role), ids, chunk=chunk, max_new_tokens=1)
    hidden = torch.zeros(size, size, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    expected = model(ids, attention_mask=hidden[None, None]).logits[:, -1:].float()
    assert torch.allclose(found, expected, atol=1e-6)
    assert stats.applied == (not mask.equal(torch.ones_like(mask).tril()))


@pytest.mark.parametrize("method", [name for name in kvsieve.list_methods() if kvsieve.method_info(name).is_prefill])
def test_chunks_shorter_than_a_block_of_queries_are_dense(model, prompts, method):
    plan = plan_of(method, model)
    ids = prompts[0][:1]
    found, stats, _ = answered(model, plan, ids, chunk=plan.prefill.queries - 1)
    expected, _, _ = answered(model, Plan(), ids)
    assert torch.allclose(found, expected, atol=1e-8)
    assert stats.prompt_density == 1.0 and any("each pass over it, is too short" in note for note in stats.notes)
    assert answered(model, plan, ids)[1].prompt_density < 1


def test_later_turns_are_read_sparsely_too_and_answers_are_not(model, prompts):
    ids = prompts[0][:1]
    with kvsieve.attach(model, full(SPARSE)) as sieve, torch.no_grad():
        first = sieve.generate(ids, **GREEDY)
        more = torch.cat([first.sequences, prompts[0][1:, 60:120]], 1)
        second = sieve.generate(more, cache=first.cache, **GREEDY)
        before = second.cache.turn.record.blocks.causal
        sieve.generate(torch.cat([second.sequences, ids[:, :5]], 1), cache=second.cache, reduce=False, **GREEDY)
        assert second.cache.turn.record.blocks.causal == 0
    assert before > 0 and second.stats.prompt_density < 1
    # A question that the plan is told not to act on is read in full, as are tokens of answers.
    assert first.stats.prompt_density < 1


def test_it_goes_with_a_codec_and_survives_a_file(model, prompts, tmp_path):
    plan = kvsieve.plan("snapkv", budget="60%", window=4, paper=True, prefill=SPARSE, codec="int8:block=8:tail=8")
    assert plan.roles == ("evict", "prefill", "codec")
    assert Plan.from_dict(plan.to_dict()) == plan
    _, stats, result = answered(model, plan, prompts[0][:1])
    assert stats.prompt_density < 1 and "Int8" in stats.codec and stats.applied


def test_evictors_that_observe_see_all_queries(model, prompts):
    plan = full(SPARSE, "h2o", budget=60)
    _, stats, _ = answered(model, plan, prompts[0][:1])
    assert stats.applied and stats.prompt_density < 1


@pytest.mark.parametrize("chunk", [None, 50])
def test_both_passes_of_a_prompt_are_counted(model, prompts, chunk):
    """The second pass, over 40 tokens, is dense."""
    shape = "a-shape:block=8:queries=16:local=8:sinks=8:least=64"
    plan = full(shape, "gemfilter", budget=40, layer=2, floor=0)
    _, stats, _ = answered(model, plan, prompts[0][:1], chunk=chunk)
    assert stats.prompt_density < 0.9
    assert not any("read in full" in note for note in stats.notes)


def test_needles_are_found_where_their_block_is_kept(model, prompts):
    """A key that all queries of the end look for is read, though four fifths of the blocks are skipped."""
    ids = prompts[0][:1]
    exact, _, _ = answered(model, Plan(), ids)
    near, stats, _ = answered(model, full(f"xattention:{SMALL}:stride=4:threshold=0.95"), ids)
    far, less, _ = answered(model, full(f"a-shape:{SMALL}:local=8:sinks=8"), ids)
    assert less.prompt_density < stats.prompt_density < 1 and less.prompt_recall < stats.prompt_recall
    assert (near - exact).abs().mean() < (far - exact).abs().mean()


def test_windows_are_exact_and_capped_logits_are_capped(prompts):
    made = build("gemma2", dtype=torch.float64)
    found, stats, _ = answered(made, full(WHOLE), prompts[0])
    expected, _, _ = answered(made, Plan(), prompts[0])
    assert torch.allclose(found, expected, atol=1e-8)
    _, stats, _ = answered(made, full(SPARSE), prompts[0])
    assert stats.prompt_density < 1 and any("sliding" in note or "window" in note for note in stats.notes)


def test_it_is_refused_where_it_cannot_run(model):
    with pytest.raises(UnsupportedModelError, match="latent"), kvsieve.attach(build("deepseek_v3"), full(SPARSE)):
        pass
    with pytest.raises(PlanError, match="passes of its own"):
        kvsieve.plan("finch", budget="50%", question_tokens=4, prefill=SPARSE)
    with pytest.raises(PlanError, match="reads prompts sparsely itself"):
        kvsieve.plan("xattention", prefill="a-shape")
    with pytest.raises(PlanError, match="prefills are a-shape"):
        kvsieve.plan("snapkv", prefill="snapkv")
    with pytest.raises(PlanError, match="prefill= takes"):
        kvsieve.plan("snapkv", prefill=3)

    class Wrong(AShape, heads="own"):
        def select(self, ctx):
            return super().select(ctx)[..., 1:]

    ids = torch.arange(2, 90)[None]
    wrong = Plan(prefill=Wrong(block=8, queries=16, least=32))
    with pytest.raises(PlanError, match="gave a mask"), kvsieve.attach(model, wrong) as sieve:
        sieve.generate(ids, **GREEDY)


def test_it_is_written_as_codecs_are(model):
    assert kvsieve.plan("full", prefill="xattention").prefill == XAttention()
    assert kvsieve.plan("xattention", threshold=0.8).prefill == XAttention(threshold=0.8)
    runs = make_runs(
        compared_specs("snapkv,a-shape", None), [None], prefills=parse_prefills("none,xattention:stride=8")
    )
    assert [run.label for run in runs] == ["snapkv", "snapkv prefill=xattention:stride=8", "a-shape"]
    found = settings(crossed([("snapkv", {}), ("full", {})], [None], [None], [None, "xattention"]), ["10%"])
    assert [each.label for each in found] == ["full", "snapkv", "snapkv prefill=xattention", "full prefill=xattention"]
    with pytest.raises(PlanError, match="names none twice"):
        parse_prefills("none,none")


def test_estimates_know_what_does_not_depend_on_the_prompt(model):
    shape = geometry(model.config)
    dense, sparse = (estimate(shape, plan, 8192) for plan in (Plan(), kvsieve.plan("a-shape")))
    assert sparse.attention_flops == pytest.approx(dense.attention_flops * AShape().density(8192))
    assert sparse.matmul_flops == dense.matmul_flops
    with pytest.raises(PlanError, match="depends on the prompt"):
        estimate(shape, kvsieve.plan("xattention"), 8192)
