"""A document is read once, and every question about it gets what reading the whole prompt would have given."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import kvsieve
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.lab.eval.reading import DocumentReader
from kvsieve.shared.prompt import read_alone
from kvsieve.store import PrefixStore
from small import plan_of, stored
from tiny import tiny_prompt

FULL = kvsieve.plan("full")


def tokens(size, seed):
    return tiny_prompt(1, size, seed=seed)


def same(mine, cache, logits, name):
    assert stored(mine.cache) == stored(cache), name
    torch.testing.assert_close(mine.logits, logits, rtol=0, atol=1e-9, msg=name)
    assert without_executors(mine.cache.turn.record) == without_executors(cache.turn.record), name


def without_executors(record):
    """A record without the reasons for the first pass's executor, which depend on how many tokens pass first."""
    return dataclasses.replace(record, blocks=dataclasses.replace(record.blocks, executors={}))


@pytest.mark.parametrize("name", kvsieve.list_methods())
def test_each_question_gets_what_reading_alone_gives(model, name):
    plan = plan_of(name, model).for_model(model)
    reader, plans = DocumentReader(model, None), [FULL, plan]
    first, second = tokens(83, 1), tokens(90, 2)
    for document, size in ((first, 9), (first, 40), (second, 40)):
        question = tokens(size, size)
        hidden = (document, reader.after_context(plans, document, 8)[1])
        both = torch.cat([document, question], 1), reader.after_prompt(plans, document, question, 8)[1]
        # The hidden state is the same for every question, so one comparison will do.
        for ids, state in (both, hidden) if size == 9 else (both,):
            cache, logits, fed = read_alone(model, plan, ids, torch.ones_like(ids), ReadOptions(None, 8))
            same(state, cache, logits, name)
            assert torch.equal(fed, state.fed) and torch.equal(ids, state.given)


def fed(model, run):
    """Tokens that each layer is given while `run` runs."""
    counts = [0] * len(model.model.layers)

    def count(index, module, args, kwargs):
        counts[index] += (args[0] if args else kwargs["hidden_states"]).shape[1]

    layers = model.model.layers
    handles = [
        layer.register_forward_pre_hook(functools.partial(count, i), with_kwargs=True) for i, layer in enumerate(layers)
    ]
    run()
    for handle in handles:
        handle.remove()
    return counts


def test_a_document_is_read_once_for_all_plans_questions_and_ways_of_asking(model):
    plans = [FULL, *(plan_of(name, model, budget=share) for name in ("snapkv", "h2o") for share in ("20%", "40%"))]
    plans += [plan_of("fastkv", model, tsp_rate=rate) for rate in (0.2, 0.4)]
    reader, questions = DocumentReader(model, None), [tokens(9, 2), tokens(11, 3)]
    first = fed(model, lambda: reader.after_context(plans, tokens(90, 1), 8))
    # Read once are 58 tokens, for all. What is left is read by: those that act once; h2o and fastkv, at two rates each.
    assert first[0] == first[1] == 58 + 5 * 32
    # Propagators go on from what full KV has read up to their layer, with the tokens they choose.
    assert first[2] == first[3] == 58 + 3 * 32 + 18 + 36
    asked = fed(model, lambda: [reader.after_prompt(plans, tokens(90, 1), each, 8) for each in questions])
    assert asked[0] == 5 * (32 + 9 + 32 + 11)
    assert fed(model, lambda: reader.after_context(plans, tokens(90, 1), 16)) == [0] * len(asked)
    assert fed(model, lambda: reader.after_context(plans, tokens(90, 5), 8)) == first


def test_probing_serves_all_budgets(model):
    plans = [plan_of("kvzip", model, budget=share).for_model(model) for share in ("20%", "40%")]
    both, one = (
        fed(model, functools.partial(DocumentReader(model, None).after_context, [FULL, *some], tokens(90, 1), 8))[0]
        for some in (plans, plans[:1])
    )
    assert both - one == 32
    state = DocumentReader(model, None).after_context([FULL, *plans], tokens(90, 1), 8)[2]
    alone = read_alone(model, plans[1], tokens(90, 1), None, ReadOptions(None, 8))[0]
    assert stored(state.cache) == stored(alone)


# Of each kind one; `expectedattention` asks for rotary tables while others note those that the layers get.
KINDS = (
    "full snapkv adakv h2o expectedattention fastkv asl staged rocketkv-mt kvzip criticalkv streamingllm quest perturn"
)
ALONE = "xattention gemfilter kivi finch"


def test_methods_generate_from_one_beginning_as_each_alone(model):
    """One after another, full KV once more: none writes to what the others go on from."""
    plans = {name: plan_of(name, model).for_model(model) for name in f"{KINDS} {ALONE}".split()}
    ids, alone = tokens(120, 3), {}
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "chunk": 32}
    reader = DocumentReader(model, 32)
    reader.open(list(plans.values()), ids)
    assert reader.prefix is not None
    for name in (*plans, "full"):
        with kvsieve.attach(model, plans[name]) as sieve:
            cache = reader.begin(sieve, ids)
            if cache is None:
                continue
            if name not in alone:
                alone[name] = sieve.generate(ids, torch.ones_like(ids), **options)
            shared = sieve.generate(ids, torch.ones_like(ids), cache=cache, **options)
        assert torch.equal(shared.sequences, alone[name].sequences), name
        assert shared.stats.kv_entries == alone[name].stats.kv_entries, name
    assert set(alone) == set(KINDS.split())


def test_a_stored_conversation_is_the_beginning_of_a_document(model):
    """Its turns are none of the prompt that goes on from it."""
    plans, document = [FULL, plan_of("snapkv", model)], tokens(90, 1)
    with PrefixStore() as store:
        with kvsieve.attach(model, FULL) as sieve:
            cache = sieve.prefill(document[:, :30])
            store.add(sieve, document[0, :58], sieve.prefill(document[:, :58], cache=cache), 1.0)
        reader = DocumentReader(model, None, store)
        state = reader.after_context(plans, document, 8)[1]
    alone = DocumentReader(model, None).after_context(plans, document, 8)[1]
    assert reader.prefix.stored == 58 and stored(state.cache) == stored(alone.cache)
    torch.testing.assert_close(state.logits, alone.logits, rtol=0, atol=1e-9)
    assert state.cache.conversation.acted == alone.cache.conversation.acted == ((0, 90),)
