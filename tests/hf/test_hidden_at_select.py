"""An evictor that needs hidden states gets them, and the attention's output, when it chooses."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import kvsieve
from kvsieve import Plan
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.methods import TSP
from kvsieve.methods.base import ScoredEvictor
from kvsieve.shared.prompt import read_shared
from tiny import greedy, tiny_model, tiny_prompt

SEEN: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}


@dataclass(frozen=True, kw_only=True)
class Looking(ScoredEvictor, needs=("hidden",), heads="own", query_aware=True):
    """Notes the hidden states and outputs of its window."""

    window: int = 5
    last: int = field(default=5)

    def scores(self, ctx):
        assert ctx.hidden is not None and ctx.output is not None
        assert ctx.hidden.shape[1] == ctx.output.shape[2]
        SEEN[ctx.layer_idx] = ctx.hidden[:, -self.last :], ctx.output[:, :, -self.last :], ctx.hidden.shape[1]
        return ctx.index.double()


@pytest.fixture
def wanted():
    """Inputs of the layers at the last five tokens, and outputs of their heads before the projection."""
    model, ids = tiny_model(), tiny_prompt(1, 40)
    outputs = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: outputs.append(args[0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    SEEN.clear()
    return [(part[:, -5:], out[:, -5:]) for part, out in zip(hidden, outputs, strict=False)]


def check(wanted):
    for index, (hidden, output) in enumerate(wanted):
        found, heads, _ = SEEN[index]
        torch.testing.assert_close(found, hidden)
        torch.testing.assert_close(heads.transpose(1, 2).flatten(2), output)


@pytest.mark.parametrize("chunk", [None, 13])
def test_at_the_end_of_a_prompt(wanted, chunk):
    with kvsieve.attach(tiny_model(), Plan(evict=Looking(budget=9))) as sieve:
        sieve.prefill(tiny_prompt(1, 40), chunk=chunk)
    check(wanted)
    assert all(seen[2] == 40 if chunk is None else 5 <= seen[2] < 40 for seen in SEEN.values())


def test_in_a_prefill_shared_by_several_evictors(wanted):
    evictor = Looking(budget=9)
    shared = read_shared(
        tiny_model(), None, tiny_prompt(1, 40), window=5, evictors=[evictor, None], options=ReadOptions(13)
    )
    shared.reduced(evictor)
    check(wanted)


def test_of_tokens_that_a_propagator_lets_pass():
    plan = Plan(propagate=TSP(rate=0.5, layer=1, window=5), evict=Looking(budget=9))
    SEEN.clear()
    with kvsieve.attach(tiny_model(), plan) as sieve:
        sieve.prefill(tiny_prompt(1, 40))
    assert [seen[2] for seen in SEEN.values()] == [40, 40, 20, 20]


def test_while_decoding_of_the_newest_token():
    SEEN.clear()
    with kvsieve.attach(tiny_model(), Plan(evict=Looking(budget=9, every=2))) as sieve:
        sieve.generate(tiny_prompt(1, 40), **greedy(max_new_tokens=4))
    assert {seen[2] for seen in SEEN.values()} == {1}
