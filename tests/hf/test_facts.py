"""Facts about models: rotations and output projections as the models really have them, and refusals where not."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, field

import pytest
import torch

import kvsieve
from kvsieve import Budget, Plan
from kvsieve.errors import PlanError, UnsupportedModelError
from kvsieve.hf.model.facts import Facts
from kvsieve.hf.model.support import check_model, why_unsupported
from kvsieve.methods import CriticalKV, ExpectedAttention, SnapKV
from kvsieve.planning.roles import Evictor, Traits
from tiny_models import build

EXPECTED = Plan(evict=ExpectedAttention(budget=0.5))
CRITICAL = Plan(evict=CriticalKV(base=SnapKV(budget=0.5, window=4)))
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
# Half and interleaved pairs, part of the channels, other signs, tables per kind of layer, layers without positions.
FAMILIES = (
    "llama qwen2 qwen3 gemma gemma3_text phi phi3 stablelm nemotron persimmon gpt_neox glm glm4 cohere cohere2 exaone4 "
    "smollm3 ernie4_5 nanochat olmo2 opt"
).split()


@dataclass(frozen=True)
class Spy(Evictor):
    """Keeps everything and remembers what each layer was shown."""

    seen: dict = field(default_factory=dict, compare=False)
    asked: tuple = ("rotary", "output_weight")
    budget: Budget = Budget(ratio=1.0)

    @property
    def traits(self):
        return Traits(needs=self.asked)

    def select(self, ctx, counts):
        self.seen[ctx.layer_idx] = ctx


def shown(model, ids, mask=None):
    spy = Spy()
    with warnings.catch_warnings(), kvsieve.attach(model, Plan(evict=spy)) as sieve:
        warnings.simplefilter("ignore")
        sieve.prefill(ids, mask)
    return spy.seen


def made(family, **options):
    return build(family, dtype=torch.float64, **options)


@pytest.mark.parametrize("family", [*FAMILIES, "yarn"])
def test_rotation_is_the_models_own(family):
    """A prompt of one token only has the same hidden state everywhere, in all layers: keys differ by rotation alone."""
    model = made("llama", rope_parameters=YARN) if family == "yarn" else made(family)
    # No position embedding that is added to hidden states, as OPT has.
    if family == "opt":
        torch.nn.init.zeros_(model.get_decoder().embed_positions.weight)
    seen = shown(model, torch.full((1, 30), 7))
    place = torch.arange(30)[None]
    turns = 0
    for layer, ctx in seen.items():
        for part in (ctx.query, ctx.keys):
            first = part[:, :, :1].expand_as(part)
            torch.testing.assert_close(ctx.model.rotate(layer, first, place), part, rtol=0, atol=1e-5)
            torch.testing.assert_close(ctx.model.rotate(layer, part, place, inverse=True), first, rtol=0, atol=1e-5)
            turns += not torch.allclose(part, first)
    without = {"cohere2": len(seen), "exaone4": len(seen), "opt": len(seen), "smollm3": 1}
    assert turns == 2 * (len(seen) - without.get(family, 0))


def test_rotations_are_float32_and_of_length_one():
    model = build("llama", dtype=torch.bfloat16, rope_parameters=YARN)
    facts, x = Facts(model), torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    place = torch.tensor([[0, 3, 4, 200, 9], [1, 1, 2, 5, 400]])
    turned = facts.rotate(1, x, place)
    assert turned.dtype == torch.float32
    torch.testing.assert_close(turned.norm(dim=-1), x.float().norm(dim=-1))
    torch.testing.assert_close(facts.rotate(1, turned, place, inverse=True), x.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_channel_that_hardly_turns_does_not_hide_the_rotation(dtype):
    """Qwen2.5's keys are like this in one layer."""
    model = build("qwen2", dtype=dtype, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    with torch.no_grad():
        model.get_decoder().layers[1].self_attn.k_proj.bias[7] = 300
    x, place = torch.ones(1, 1, 1, 16), torch.tensor([[160]])
    layers = [Facts(model).rotate(layer, x, place) for layer in (0, 1)]
    torch.testing.assert_close(*layers, rtol=0, atol=0)
    assert not torch.allclose(layers[1], x)


def test_kept_tables_are_those_of_their_layer_positions_and_direction():
    """Layers of gemma3_text have tables of two kinds."""
    model = made("gemma3_text")
    x = torch.randn(2, 3, 5, 16, dtype=torch.float64)
    asked = [
        (layer, torch.arange(5)[None] + start, inverse)
        for layer in range(model.config.num_hidden_layers)
        for start in (0, 7)
        for inverse in (False, True)
    ]
    facts = Facts(model)
    wanted = [facts.rotate(layer, x, positions, inverse=inverse) for layer, positions, inverse in asked]
    calls = []
    make = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = functools.wraps(make)(lambda *args: calls.append(args) or make(*args))
    with facts.keeping_tables():
        for _ in range(2):
            # The order of an edit: the same positions in all layers.
            for number in sorted(range(len(asked)), key=lambda at: asked[at][1][0, 0].item()):
                layer, positions, inverse = asked[number]
                assert torch.equal(facts.rotate(layer, x, positions, inverse=inverse), wanted[number])
    assert len({*model.config.layer_types}) == 2 and len(calls) == 2 * 2 * 2 * 2
    before = len(calls)
    facts.rotate(*asked[0][:1], x, asked[0][1])
    assert len(calls) == before + 1


@pytest.mark.parametrize("family", ["llama", "phi", "gpt_neox", "gemma", "opt", "starcoder2"])
def test_output_weight_is_the_projection_by_head(family):
    model = made(family)
    facts, heads = Facts(model), torch.randn(4, 16, dtype=torch.float64)
    for index, layer in enumerate(model.get_decoder().layers):
        attention = layer.attention if family == "gpt_neox" else layer.self_attn
        projection = next(
            getattr(attention, name) for name in ("o_proj", "out_proj", "dense") if hasattr(attention, name)
        )
        weight = facts.output_weight(index)
        assert weight.shape == (4, 16, 64) and weight.data_ptr() == projection.weight.data_ptr()
        bias = 0 if projection.bias is None else projection.bias
        torch.testing.assert_close(torch.einsum("hd,hdc->c", heads, weight) + bias, projection(heads.flatten()))


def longrope():
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 128}
    return build("phi3", rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors})


def normed_after_rotation():
    model = build("hunyuan_v1_dense")
    torch.nn.init.uniform_(model.get_decoder().layers[2].self_attn.key_layernorm.weight)
    return model


def odd_projection():
    model = build("llama")
    attention = model.get_decoder().layers[3].self_attn
    attention.o_proj = torch.nn.Sequential(attention.o_proj)
    return model


@pytest.mark.parametrize(
    ("make", "plan", "reason"),
    [
        (lambda: build("llama", rope_parameters=YARN | {"rope_type": "dynamic"}), EXPECTED, "changes with the prompt"),
        (longrope, EXPECTED, "changes with the prompt's length .rope 'longrope'"),
        (normed_after_rotation, EXPECTED, "layer 2 applies it in an unknown way"),
        (odd_projection, CRITICAL, "layer 3 has no linear one of 4 heads with 16 channels"),
    ],
    ids=["dynamic", "longrope", "norm-after-rotation", "odd-projection"],
)
def test_a_model_that_cannot_give_it_is_refused(make, plan, reason):
    model = make()
    with pytest.raises(UnsupportedModelError, match=reason), kvsieve.attach(model, plan):
        pass
    assert why_unsupported(model, kvsieve.plan("snapkv")) is None
    # Whoever asks all the same, as on a shared reading, is refused then.
    with pytest.raises(UnsupportedModelError, match=reason):
        facts = Facts(model)
        for layer in range(4):
            if plan is EXPECTED:
                facts.rotate(layer, torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, dtype=torch.int64))
            else:
                facts.output_weight(layer)


def test_only_full_attention_layers_are_asked():
    model = build("gemma3_text")
    model.get_decoder().layers[0].self_attn.o_proj = torch.nn.Identity()
    assert why_unsupported(model, CRITICAL) is None


def test_unknown_needs_are_an_error():
    with pytest.raises(PlanError, match="needs 'magic' of the model; known are rotary, output_weight"):
        check_model(build("llama"), Plan(evict=Spy(asked=("magic",))))


def test_models_without_weights_are_taken_on_trust():
    with torch.device("meta"):
        model = build("llama")
    assert why_unsupported(model, EXPECTED) is None and why_unsupported(model, CRITICAL) is None
