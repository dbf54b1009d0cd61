"""GemFilter's choice, and the driver that reads chosen tokens again: what survives, and what its caller is shown."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from transformers.generation import BaseStreamer, LogitsProcessor, StoppingCriteria

import kvsieve
from kvsieve.errors import InputError, KvsieveWarning, PlanError, UnsupportedOptionError
from kvsieve.hf.compat import CACHE
from kvsieve.lab.eval.costs import kept_map
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.methods import HSA, TSP, GemFilter, SnapKV
from kvsieve.planning.roles import Propagator
from layers import context, golden
from tiny import greedy, tiny_prompt
from toy_words import WORDS, word_tokenizer

PLAIN = greedy()
GREEDY = {"max_new_tokens": 4, **PLAIN, "return_dict_in_generate": True, "output_logits": True}
N, K, LAYER, PADDING = 60, 20, 1, 11


def gem(**given):
    return kvsieve.plan("gemfilter", **{"budget": K, "layer": LAYER, "paper": True, "keep_last": 1, **given})


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(2, N, seed=3)


@pytest.fixture(scope="module")
def padded(ids):
    ids, mask = ids.clone(), torch.ones_like(ids)
    ids[1, :PADDING], mask[1, :PADDING] = 0, 0
    return ids, mask


def run(model, plan, *inputs, **options):
    with kvsieve.attach(model, plan) as sieve:
        return sieve.generate(*inputs, **{**GREEDY, **options})


def chosen(result, row=0):
    """Columns of the prompt that were read again."""
    columns = result.cache.conversation.short_prompt.token_index[row]
    return columns[columns >= 0].tolist()


def logits(result):
    return torch.stack(result.output.logits, 1)


def test_golden_tokens():
    ctx = context(3 * golden((1, 4, 24, 4), 1), 3 * golden((1, 2, 24, 4), 2))
    parity = GemFilter(budget=8, layer=0, keep_last=0)
    assert parity.select(ctx).indices.tolist() == [[5, 6, 7, 9, 10, 11, 13, 14]]
    last = GemFilter(budget=8, layer=0).select(ctx).indices.tolist()[0]
    assert last[-1] == 23 and set(last[:-1]) < {5, 6, 7, 9, 10, 11, 13, 14} and len(last) == 8
    assert GemFilter(budget=8, layer=1).select(ctx) is None


def test_by_hand():
    # Dot products with the last query: 4, 0, 0, 7, 1, 1, 0; averages of three (zeros beyond the ends):
    # 4/3, 4/3, 7/3, 8/3, 3, 2/3, 1/3.
    keys = torch.tensor([4.0, 0, 0, 7, 1, 1, 0])[None, None, :, None]
    ctx = context(torch.ones_like(keys), keys, scale=123.0)
    for budget, keep_last, wanted in ((3, 0, [2, 3, 4]), (4, 0, [0, 2, 3, 4]), (3, 2, [4, 5, 6]), (4, 1, [2, 3, 4, 6])):
        part = GemFilter(budget=budget, layer=0, kernel=3, keep_last=keep_last)
        assert part.select(ctx).indices.tolist() == [wanted]


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8], ids=lambda g: f"G{g}")
def test_equals_the_slow_reference_in_padded_batches(groups):
    torch.manual_seed(groups)
    length, padding, heads = 63, [0, 17], 2
    query = torch.randn(2, heads * groups, length, 8, dtype=torch.float64)
    keys = torch.randn(2, heads, length, 8, dtype=torch.float64)
    part = GemFilter(budget="30%", layer=0, keep_last=0)
    selection = part.select(context(query, keys, padding=padding))
    # The scale of queries is irrelevant, and so is all but the last one.
    other = query * 1000
    other[:, :, :-1] = 0
    assert torch.equal(part.select(context(other, keys, padding=padding)).indices, selection.indices)
    for row, pad in enumerate(padding):
        scores = [
            sum(float(query[row, h, -1] @ keys[row, h // groups, j]) for h in range(heads * groups))
            for j in range(pad, length)
        ]
        pooled = [sum(scores[max(0, j - 2) : j + 3]) / 5 for j in range(len(scores))]
        count = int(0.3 * len(scores))
        best = sorted(sorted(range(len(scores)), key=lambda j: (-pooled[j], j))[:count])
        assert selection.indices[row, -count:].tolist() == [pad + j for j in best]
        assert (selection.lengths or (count,) * 2)[row] == count


@pytest.mark.parametrize("keep_last", [0, 1, 9])
def test_the_second_pass_is_an_ordinary_run_on_the_chosen_ids(model, ids, keep_last):
    result = run(model, gem(keep_last=keep_last), ids[:1])
    kept = chosen(result)
    assert len(kept) == K and kept == sorted(kept) and set(range(N - keep_last, N)) <= set(kept)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        plain = sieve.generate(ids[:1, kept], **GREEDY)
    assert torch.equal(logits(result), logits(plain))
    assert torch.equal(result.sequences, torch.cat([ids[:1], plain.sequences[:, K:]], 1))
    assert torch.equal(result.output.sequences, result.sequences)
    for ours, theirs in zip(result.cache.sieve_layers.values(), plain.cache.sieve_layers.values(), strict=True):
        assert torch.equal(ours.store.keys, theirs.store.keys) and torch.equal(ours.store.index, theirs.store.index)
    # transformers' own forward agrees.
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:1, kept]).logits[:, -1].float(), logits(plain)[:, 0])


def test_the_choice_is_that_of_the_filter_layer_alone(model, ids):
    result, ran = run(model, gem(), ids[:1]), []
    seen = {}
    with kvsieve.attach(model, kvsieve.Plan(propagate=Look(seen))) as sieve:
        sieve.prefill(ids[:1])
    best, _ = GemFilter(budget=K).best(seen[LAYER], (K,))
    assert chosen(result) == best[0].nonzero()[:, 0].tolist()
    # Layers behind it run once, on the short prompt.
    handles = [
        layer.register_forward_pre_hook(lambda module, args, index=index: ran.append((index, args[0].shape[1])))
        for index, layer in enumerate(model.model.layers)
    ]
    try:
        run(model, gem(), ids[:1], max_new_tokens=1)
    finally:
        for handle in handles:
            handle.remove()
    assert ran == [(0, N), (1, N), (0, K), (1, K), (2, K), (3, K)]


class Look(Propagator):
    """A propagator that only remembers what it was shown."""

    window = 1

    def __init__(self, seen):
        self.seen = seen

    def source(self, num_layers):
        return 0

    def select(self, ctx):
        self.seen[ctx.layer_idx] = ctx


def test_stats_tell_what_happened(model, ids):
    stats = run(model, gem(), ids[:1]).stats
    assert (stats.applied, stats.prompt_tokens, stats.deep_tokens, stats.notes) == (True, N, K, [])
    assert stats.kv_entries == [K] * 4 and stats.kv_asked == K and stats.report == {"filter_layer": LAYER}
    assert stats.kv_bytes < 0.5 * run(model, kvsieve.plan("full"), ids[:1]).stats.kv_bytes
    assert run(model, gem(budget="25%"), ids[:1]).stats.kv_entries == [N // 4] * 4


def test_progress_counts_both_passes(model, ids):
    told = []
    run(model, gem(), ids[:1], chunk=25, progress=lambda *given: told.append(given))
    assert told == [(25, 80), (50, 80), (60, 80), (80, 80)]


@pytest.mark.parametrize("budget", [N, 1000, "100%"])
def test_a_budget_that_covers_the_prompt_is_the_full_model_in_one_pass(model, padded, budget):
    passes = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda *args: passes.append(1))
    try:
        result = run(model, gem(budget=budget), *padded, max_new_tokens=1)
    finally:
        handle.remove()
    assert len(passes) == 1
    result = run(model, gem(budget=budget), *padded)
    full = run(model, kvsieve.plan("full"), *padded)
    assert torch.equal(result.sequences, full.sequences) and torch.equal(logits(result), logits(full))
    assert not result.stats.applied and "every token was read again" in result.stats.notes[0]
    assert result.stats.deep_tokens == N and result.stats.kv_entries == [N] * 4


@pytest.mark.parametrize(("budget", "chunk"), [(K, None), (55, 9), ("40%", 25)])
def test_a_padded_row_is_the_row_alone_and_chunks_change_nothing(model, padded, budget, chunk):
    ids, mask = padded
    together = run(model, gem(budget=budget), ids, mask, chunk=chunk)
    for row, pad in enumerate((0, PADDING)):
        alone = run(model, gem(budget=budget), ids[row : row + 1, pad:])
        assert chosen(together, row) == [pad + column for column in chosen(alone)]
        assert torch.equal(together.sequences[row, N:], alone.sequences[0, N - pad :])
        torch.testing.assert_close(logits(together)[row], logits(alone)[0])


@pytest.mark.parametrize(("chunk", "given"), [(None, True), (9, False)], ids=["mask-given", "mask-known"])
def test_a_later_turn_filters_the_whole_conversation_afresh(model, padded, chunk, given):
    ids, mask = padded
    more = tiny_prompt(2, 13, seed=8)
    with kvsieve.attach(model, gem()) as sieve:
        first = sieve.generate(ids, mask, **GREEDY)
        talk = torch.cat([first.sequences, more], 1)
        talk_mask = torch.cat([mask, torch.ones(2, talk.shape[1] - N, dtype=mask.dtype)], 1)
        second = sieve.generate(talk, talk_mask if given else None, cache=first.cache, chunk=chunk, **GREEDY)
        fresh = sieve.generate(talk, talk_mask, **GREEDY)
        with pytest.raises(InputError, match="the cache has seen 80 tokens and input_ids holds 13"):
            sieve.generate(more, cache=second.cache, **GREEDY)
    assert second.cache is first.cache and second.stats.prompt_tokens == talk.shape[1]
    assert torch.equal(second.sequences, fresh.sequences) and chosen(second, 1) == chosen(fresh, 1)
    torch.testing.assert_close(logits(second), logits(fresh))


def test_padding_in_the_middle_of_a_conversation_is_as_if_it_were_not_there(model, ids):
    talk, mask = ids[:1].clone(), torch.ones(1, N, dtype=torch.long)
    mask[0, 20:26] = 0
    held = torch.cat([talk[:, :20], talk[:, 26:]], 1)
    ours, theirs = run(model, gem(), talk, mask), run(model, gem(), held)
    assert torch.equal(logits(ours), logits(theirs))
    assert chosen(ours) == [column + 6 * (column >= 20) for column in chosen(theirs)]
    assert ours.stats.prompt_tokens == N - 6


def test_prefill_reads_what_was_chosen(model, ids):
    whole = run(model, gem(), ids[:1])
    with kvsieve.attach(model, gem()) as sieve:
        cache = sieve.prefill(ids[:1], chunk=16)
        assert (
            cache.get_seq_length() == K
            and cache.entries() == [K] * 4
            and cache.conversation.caller_length_and_mask() == (N, None)
        )
        # One token at a time goes on by plain calls.
        with torch.no_grad():
            step = model(whole.sequences[:, N : N + 1], **{CACHE: cache}).logits[:, -1]
    torch.testing.assert_close(step.float(), logits(whole)[:, 1])
    assert cache.conversation.caller_length_and_mask() == (N + 1, None)


def test_an_evictor_acts_on_the_short_prompt_and_its_share_counts_the_whole_one(model, padded):
    ids, mask = padded
    evict = SnapKV(budget="20%", window=4, kernel=3)
    result = run(model, kvsieve.Plan(propagate=gem().propagate, evict=evict), ids[:1])
    assert result.stats.applied and result.stats.kv_entries == [12] * 4 and result.stats.kv_asked == 12
    same = kvsieve.Plan(evict=SnapKV(budget=12, window=4, kernel=3))
    plain = run(model, same, ids[:1, chosen(result)])
    assert torch.equal(logits(result), logits(plain))
    every = kvsieve.Plan(propagate=gem().propagate, evict=SnapKV(budget="20%", window=4, kernel=3, every=2))
    result = run(model, every, ids, mask, num_beams=2, num_return_sequences=2, max_new_tokens=9)
    assert max(result.cache.entries()) <= 13 and result.sequences.shape[0] == 4


MODES = {
    "sampling": {"do_sample": True},
    "three samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "beams returned": {"num_beams": 3, "num_return_sequences": 2},
}


@pytest.mark.parametrize("chunk", [None, 7], ids=["whole", "chunked"])
@pytest.mark.parametrize("mode", MODES)
def test_generates_modes_act_on_the_short_prompt(model, padded, mode, chunk):
    ids, mask = padded
    kept = run(model, gem(), ids, mask)
    short = torch.stack([ids[row, chosen(kept, row)] for row in range(2)])
    options = {**MODES[mode], "max_new_tokens": 7}
    torch.manual_seed(5)
    plain = model.generate(short, attention_mask=torch.ones_like(short), **{**PLAIN, **options})
    torch.manual_seed(5)
    ours = run(model, gem(), ids, mask, chunk=chunk, **options)
    assert torch.equal(ours.sequences[:, N:], plain[:, K:])
    assert torch.equal(ours.sequences[:, :N], ids.repeat_interleave(len(plain) // 2, 0))


class Collect(BaseStreamer):
    def __init__(self):
        self.put_, self.ended = [], 0

    def put(self, value):
        self.put_.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


class StopAt(StoppingCriteria):
    """Stops at a length, if it is shown the prompt as it was given."""

    def __init__(self, prompt, length):
        self.prompt, self.length = prompt, length

    def __call__(self, input_ids, scores, **kwargs):
        assert torch.equal(input_ids[:, :N], self.prompt)
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Forbid(LogitsProcessor):
    """No token of the prompt as it was given."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, :N], float("-inf"))


def test_what_the_caller_brings_sees_the_whole_prompt(model, ids):
    ids = ids[:1]
    streamer = Collect()
    result = run(model, gem(), ids, streamer=streamer)
    assert streamer.put_[0] == ids[0].tolist() and streamer.ended == 1
    assert list(itertools.chain.from_iterable(streamer.put_)) == result.sequences[0].tolist()
    assert run(model, gem(), ids, stopping_criteria=[StopAt(ids, N + 3)]).sequences.shape[1] == N + 3
    assert run(model, gem(), ids, max_new_tokens=None, max_length=N + 5).sequences.shape[1] == N + 5
    config = copy.deepcopy(model.generation_config)
    config.max_length = config.min_length = N + 2
    assert run(model, gem(), ids, max_new_tokens=None, generation_config=config).sequences.shape[1] == N + 2
    new = run(model, gem(), ids, logits_processor=[Forbid()]).sequences[0, N:]
    assert not set(new.tolist()) & set(ids[0].tolist())
    seen = []

    def allowed(row, tokens):
        seen.append(tokens[:N].tolist())
        return [7]

    assert run(model, gem(), ids, prefix_allowed_tokens_fn=allowed).sequences[0, N:].tolist() == [7] * 4
    assert seen[0] == ids[0].tolist()


def test_what_cannot_restart_is_refused(model, ids):
    ids = ids[:1]
    with kvsieve.attach(model, gem()) as sieve, torch.no_grad():
        cache = sieve.prefill(ids)
        for call in (
            lambda: model.generate(ids, max_new_tokens=2, **PLAIN),
            lambda: model(ids),
            lambda: model(ids, **{CACHE: sieve.new_cache()}),
            lambda: model(ids[:, :3], **{CACHE: cache}),
            lambda: model.generate(torch.cat([ids, ids], 1), **{CACHE: cache}, max_new_tokens=2, **PLAIN),
        ):
            with pytest.raises(UnsupportedOptionError, match="'gemfilter' reads every prompt twice.*sieve.generate"):
                call()
        with pytest.raises(UnsupportedOptionError, match="token_type_ids"):
            sieve.generate(ids, token_type_ids=torch.zeros_like(ids), **GREEDY)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        with pytest.raises(InputError, match="a shorter reading of its prompt, made under 'gemfilter'"):
            sieve.prefill(torch.cat([ids, ids], 1), cache=sieve.adopt(cache))


def test_the_model_is_left_as_it_was_found(model, ids):
    found = model.config._attn_implementation
    before = model.generate(ids, **{**GREEDY})
    run(model, gem(), ids)
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    assert hooks == 0 and model.config._attn_implementation == found
    assert torch.equal(model.generate(ids, **GREEDY).sequences, before.sequences)


def test_an_error_in_either_pass_spoils_nothing(model, ids):
    ids, wanted = ids[:1], run(model, gem(), ids[:1]).sequences
    with kvsieve.attach(model, gem()) as sieve:
        for layer, calls in ((0, 1), (0, 2), (3, 1)):
            left = iter([None] * (calls - 1))

            def fail(*args, left=left):
                if next(left, 1) == 1:
                    raise RuntimeError("broken")

            cache = sieve.new_cache()
            handle = model.model.layers[layer].register_forward_hook(fail)
            with pytest.raises(RuntimeError, match="broken"):
                sieve.generate(ids, cache=cache, **GREEDY)
            handle.remove()
            assert torch.equal(sieve.generate(ids, cache=cache, **GREEDY).sequences, wanted)


def test_plans_that_cannot_be(model):
    with pytest.raises(PlanError, match="takes one Propagator, got 2"):
        kvsieve.Plan(propagate=(TSP(rate=0.2), GemFilter(budget=8)))
    with pytest.raises(PlanError, match="GemFilter reads a short prompt again.*read="):
        kvsieve.Plan(propagate=GemFilter(budget=8), read=HSA(budget=64))
    with pytest.raises(PlanError, match="a budget of 8 tokens is too small for keep_last=9"):
        gem(budget=8, keep_last=9)
    for bad in ({"kernel": 4}, {"keep_last": -1}, {"layer": -1}):
        with pytest.raises(PlanError, match=next(iter(bad))):
            gem(**bad)
    with pytest.raises(PlanError, match=r"filter layer 4 is outside the model: it has 4 layers.*0\.\.3"):
        with kvsieve.attach(model, gem(layer=4)):
            pass
    with pytest.warns(KvsieveWarning, match="no filter layer given: using layer 1 of 4"):
        with kvsieve.attach(model, gem(layer=None)):
            pass
    plan = gem()
    assert plan.shortens_prompt and not plan.acts_once and kvsieve.Plan.from_dict(plan.to_dict()) == plan
    assert GemFilter(budget=8).source(32) == 13


def test_the_kept_map_is_of_the_prompt_as_given(model, ids):
    result = run(model, gem(), ids[:1])
    bins, taken = len(kept_map(result)[0]), set(chosen(result))
    columns = [{at * N // bins} if bins > N else {c for c in range(N) if c * bins // N == at} for at in range(bins)]
    wanted = [len(each & taken) / len(each) for each in columns]
    assert kept_map(result) == [pytest.approx(wanted, abs=1e-4)] * 4


def exact(answer, expected):
    return {"score": float(answer == expected[0])}


@pytest.mark.parametrize("question", ["visible", "hidden"])
def test_an_evaluation_runs_it(model, question):
    evaluator = Evaluator(model, word_tokenizer(), chunk=16)
    turns = tuple(
        QuestionAnswer(" ".join(f"w{word}" for word in words), ("w1",), exact, 4) for words in ((5, 6, 7), (8, 9))
    )
    sample = Sample(" ".join(WORDS[3 + (7 * i) % 110] for i in range(70)), turns)
    encoded = evaluator.prompter.encode(sample)
    plans = [kvsieve.plan("full"), gem(), gem(budget="30%")]
    outcomes = evaluator.run(sample, plans, question)
    first = encoded.prompt if question == "visible" else encoded.context
    for plan, outcome in zip(plans[1:], outcomes[1:], strict=True):
        assert outcome.applied and outcome.record.prompt_tokens == first.shape[1]
        assert set(outcome.record.kept.values()) == {outcome.record.propagated}
        conversation, answers = first, []
        more = encoded.followups if question == "visible" else (encoded.question, *encoded.followups)
        if question == "visible":
            for extra in (None, *more):
                conversation = conversation if extra is None else torch.cat([conversation, extra], 1)
                answers.append(run(model, plan, conversation, torch.ones_like(conversation), max_new_tokens=4))
            answers = [each.sequences[0, -4:].tolist() for each in answers]
        else:
            kept = chosen(run(model, plan, first, torch.ones_like(first)))
            conversation = first[:, kept]
            for extra in more:
                conversation = torch.cat([conversation, extra], 1)
                plain = run(model, kvsieve.plan("full"), conversation, torch.ones_like(conversation), max_new_tokens=4)
                answers.append(plain.sequences[0, -4:].tolist())
        assert outcome.answers == [evaluator.prompter.answer(tokens)[0] for tokens in answers]
