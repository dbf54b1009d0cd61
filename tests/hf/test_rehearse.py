"""Rehearsals: what is fed sees what it should, leaves no trace, and the plans that rehearse hold the usual laws."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import kvsieve
from kvsieve.errors import PlanError, UnsupportedOptionError
from kvsieve.hf.compat import CACHE
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.methods import TSP, KVzip, Lookahead
from kvsieve.planning.roles import ProbingEvictor
from tiny import greedy, padded_prompt, tiny_model
from tiny_models import build
from toy_chats import chat_tokenizer
from toy_words import WORDS, word_tokenizer

PADDING = 7
GREEDY = greedy(max_new_tokens=5)
LOGITS = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
KVZIP = {"chunk_length": 16, "repeat_ids": (5, 6), "go_on_ids": (7,), "answer_ids": ()}
LAQ = {"window": 4, "kernel": 3, "lookahead": 3}
PLANS = {
    "kvzip": kvsieve.plan("kvzip", budget="50%", **KVZIP),
    "kvzip-uniform": kvsieve.plan("kvzip", budget="50%", uniform=True, **KVZIP),
    "lookahead": kvsieve.plan("lookahead", budget="50%", **LAQ),
}


@dataclass(frozen=True)
class Spy(ProbingEvictor):
    """Rehearses, and then keeps everything all the same."""

    action: object
    budget: kvsieve.Budget = kvsieve.Budget(ratio=0.5)
    window: int = 0
    probe_tokens: int = 1
    seen: list = field(default_factory=list, compare=False)

    def probe(self, passes):
        self.seen.append(self.action(passes))

    def select(self, ctx, counts):
        return None


def rehearsed_by(action, **options):
    return kvsieve.Plan(evict=Spy(action, **options))


@pytest.fixture(scope="module")
def llama():
    return tiny_model()


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_moe", "glm4"])
def model(request):
    return build(request.param, dtype=torch.float64)


@pytest.fixture(scope="module")
def prompts():
    return padded_prompt(48, PADDING, seed=0)


@pytest.mark.parametrize("window", [0, 5])
def test_a_rehearsal_sees_the_conversation_and_leaves_no_trace(model, prompts, window):
    ids, mask = prompts
    fed, real = torch.tensor([[9, 8, 7], [0, 0, 6]]), torch.tensor([[True] * 3, [False, False, True]])

    def action(rehearsal):
        shapes, out = [], []
        branch = rehearsal.branch()
        out.append(branch.read_rest(logits=True))
        out.append(branch.feed(fed, real, observe=lambda ctx: shapes.append(ctx.keys.shape[2]), logits=True))
        out.append(branch.branch().feed(fed[:, -1:], logits=True))
        # What was fed to the branch's branch is gone.
        out.append(branch.feed(torch.tensor([[4], [3]]), logits=True))
        assert torch.equal(rehearsal.real, mask.bool()) and set(shapes) == {51}
        return out

    plan = rehearsed_by(action, window=window)
    with kvsieve.attach(model, plan) as sieve:
        result = sieve.generate(ids, mask, chunk=13, **LOGITS)
    rest = [
        torch.empty(2, 0).long(),
        fed,
        torch.cat([fed, fed[:, -1:]], 1),
        torch.cat([fed, torch.tensor([[4], [3]])], 1),
    ]
    for ours, tail in zip(plan.evict.seen[0], rest, strict=True):
        whole = torch.cat([mask, real.long(), torch.ones(2, 4).long()], 1)[:, : 48 + tail.shape[1]]
        rows = torch.cat([ids, tail], 1)
        with torch.no_grad():
            # Each row as if it were alone: windows go by positions, padding between tokens left out.
            theirs = torch.cat(
                [model(row[real][None]).logits[:, -1] for row, real in zip(rows, whole.bool(), strict=True)]
            )
        assert torch.allclose(ours, theirs, atol=1e-10)
    theirs = model.generate(ids, attention_mask=mask, **LOGITS)
    assert torch.equal(result.sequences, theirs.sequences)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(result.output.logits, theirs.logits, strict=True))
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        plain = sieve.generate(ids, mask, **LOGITS).cache
    for ours, full in zip(result.cache.sieve_layers.values(), plain.sieve_layers.values(), strict=True):
        assert torch.equal(ours.store.index, full.store.index) and torch.allclose(ours.store.keys, full.store.keys)
    assert result.cache.num_seen == plain.num_seen and result.cache.turn.number == plain.turn.number


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_rehearse_hold_the_laws(model, prompts, name):
    """The first token is full KV's, chunks and padding change nothing, budgets are exact, and memory falls."""
    ids, mask = prompts
    theirs = model.generate(ids, attention_mask=mask, **LOGITS)
    with kvsieve.attach(model, PLANS[name]) as sieve:
        ours = sieve.generate(ids, mask, **LOGITS)
        chunked = sieve.generate(ids, mask, chunk=11, **LOGITS)
        alone = [sieve.generate(ids[1:, pad:], mask[1:, pad:], **LOGITS) for pad in (0, PADDING)]
        with pytest.raises(UnsupportedOptionError, match="feeds tokens of its own before a prompt is complete"):
            model.generate(ids, attention_mask=mask, **GREEDY)
        cache = sieve.prefill(ids, mask)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        full = sieve.prefill(ids, mask)
    assert ours.stats.applied and torch.allclose(ours.output.logits[0], theirs.logits[0], atol=1e-6)
    for step, logits in enumerate(ours.output.logits):
        assert torch.allclose(logits, chunked.output.logits[step], atol=1e-6)
        for each in alone:
            assert torch.allclose(logits[1:], each.output.logits[step], atol=1e-6)
    stores = [layer.store for layer in cache.sieve_layers.values()]
    for row, length in enumerate((48, 48 - PADDING)):
        held = [
            store.index.shape[1:] if store.valid is None else store.valid[row].expand(store.index.shape[1:]).sum()
            for store in stores
        ]
        total = sum(int(each[0] * each[1]) if isinstance(each, torch.Size) else int(each) for each in held)
        assert total == sum(length // 2 * store.index.shape[1] for store in stores)
    assert cache.nbytes() < full.nbytes()
    assert not any(layer.state for layer in cache.sieve_layers.values())


@pytest.mark.parametrize("name", PLANS)
def test_a_budget_of_everything_is_the_model_itself(llama, prompts, name):
    ids, mask = prompts
    given = {"budget": "100%", **(LAQ if name == "lookahead" else KVZIP)}
    with kvsieve.attach(llama, kvsieve.plan(name.partition("-")[0], **given)) as sieve:
        ours, cache = sieve.generate(ids, mask, **GREEDY), sieve.prefill(ids, mask)
    with kvsieve.attach(llama, kvsieve.plan("full")) as sieve:
        full = sieve.prefill(ids, mask)
    assert torch.equal(ours.sequences, llama.generate(ids, attention_mask=mask, **GREEDY))
    assert not ours.stats.applied and cache.memory_report() == full.memory_report()


@pytest.mark.parametrize("name", PLANS)
def test_beams_later_turns_and_snapshots(llama, prompts, name):
    ids, mask = prompts
    with kvsieve.attach(llama, PLANS[name]) as sieve:
        beams = [sieve.generate(ids[1:, pad:], mask[1:, pad:], num_beams=3, **GREEDY) for pad in (0, PADDING)]
        assert torch.equal(beams[0].sequences[:, 48:], beams[1].sequences[:, 48 - PADDING :])
        first = sieve.generate(ids, mask, **GREEDY)
        more = torch.cat([first.sequences, ids[:, -9:]], 1)
        moment = first.cache.snapshot()
        again = [sieve.generate(more, cache=first.cache, **GREEDY)]
        first.cache.rollback(moment)
        again.append(sieve.generate(more, cache=first.cache, chunk=4, **GREEDY))
        assert torch.equal(again[0].sequences, again[1].sequences)
        assert sum(again[0].stats.kv_entries) >= 4 * (62 // 2) and again[0].stats.applied
        with pytest.raises(UnsupportedOptionError, match="a plain call of the model"):
            llama(more[:, -3:], **{CACHE: again[1].cache})


def test_a_row_of_one_token_in_a_padded_batch(llama, prompts):
    ids, mask = prompts
    ids, mask = ids.clone(), mask.clone()
    mask[1, :-1], ids[1, :-1] = 0, 0
    for plan in PLANS.values():
        with kvsieve.attach(llama, plan) as sieve:
            both, alone = sieve.generate(ids, mask, **LOGITS), sieve.generate(ids[:1], mask[:1], **LOGITS)
        assert all(torch.isfinite(logits).all() for logits in both.output.logits)
        assert all(
            torch.allclose(a[:1], b, atol=1e-6) for a, b in zip(both.output.logits, alone.output.logits, strict=True)
        )


def test_protected_tokens_stay(llama, prompts):
    ids, mask = prompts
    for plan in PLANS.values():
        with kvsieve.attach(llama, plan) as sieve:
            cache = sieve.prefill(ids, mask, protect=[(10, 16)])
        for layer in cache.layers:
            for row, pad in enumerate((0, PADDING)):
                for head in layer.store.index[row].tolist():
                    assert set(range(pad + 10, pad + 16)) <= set(head)


def test_what_cannot_be_combined_is_refused():
    for evictor in (KVzip(budget="20%"), Lookahead(budget="20%")):
        with pytest.raises(PlanError, match="needs passes of its own over the prompt, of which TSP drops tokens"):
            kvsieve.Plan(propagate=TSP(rate=0.5, layer=1), evict=evictor)


def test_a_plan_that_lacks_a_tokenizer_reads_no_prompt(llama, prompts):
    """What it would feed is not known, and without it it would keep what a fixed set of ids makes it keep."""
    ids, mask = prompts
    plan = kvsieve.plan("kvzip", budget="50%", chunk_length=16)
    partly = kvsieve.plan("kvzip", budget="50%", chunk_length=16, repeat_ids=(3,))
    assert plan.lacks_tokenizer and partly.lacks_tokenizer and not PLANS["kvzip"].lacks_tokenizer
    with kvsieve.attach(llama, plan) as sieve:
        with pytest.raises(PlanError, match="no tokenizer to make token ids of them: use attach.*tokenizer=tokenizer"):
            sieve.generate(ids, mask, **GREEDY)
    with kvsieve.attach(llama, partly) as sieve, pytest.raises(PlanError, match="no tokenizer"):
        sieve.prefill(ids, mask)
    with kvsieve.attach(llama, nothing_fed()) as sieve:
        assert sieve.generate(ids, mask, **GREEDY).stats.applied


def test_a_tokenizer_is_taken_where_there_is_one(llama, prompts):
    """attach, generate's own option and a chat give the plan what for_tokenizer gives it, and it is fed."""
    ids, mask = prompts
    tokenizer = chat_tokenizer()
    plan = kvsieve.plan("kvzip", budget="50%", chunk_length=16)
    bound = plan.for_tokenizer(tokenizer)
    assert bound.evict.repeat_ids and bound.evict.go_on_ids and bound.evict.answer_ids
    with kvsieve.attach(llama, bound) as sieve:
        wanted = sieve.prefill(ids, mask)
    with kvsieve.attach(llama, plan, tokenizer=tokenizer) as sieve:
        assert sieve.plan == bound
        attached = sieve.prefill(ids, mask)
    with kvsieve.attach(llama, plan) as sieve:
        chat = sieve.chat(tokenizer, max_new_tokens=3, do_sample=False)
        assert sieve.plan == bound
        reply = chat.ask(" ".join(f"w{each}" for each in range(50)))
        assert reply.stats.applied
        chatted = sieve.prefill(ids, mask)
    with kvsieve.attach(llama, plan) as sieve:
        sieve.generate(ids, mask, tokenizer=tokenizer, **GREEDY)
        assert sieve.plan == bound
    with kvsieve.attach(llama, nothing_fed()) as sieve:
        unasked = sieve.prefill(ids, mask)
    for cache, same in ((attached, True), (chatted, True), (unasked, False)):
        stores = zip(cache.sieve_layers.values(), wanted.sieve_layers.values(), strict=True)
        assert all(torch.equal(ours.store.index, theirs.store.index) for ours, theirs in stores) == same


def nothing_fed():
    return kvsieve.plan("kvzip", budget="50%", chunk_length=16, repeat_ids=(), go_on_ids=(), answer_ids=())


def test_positions_beyond_the_context_warn(llama):
    ids = torch.randint(2, 120, (1, llama.config.max_position_embeddings - 3))
    with kvsieve.attach(llama, rehearsed_by(lambda rehearsal: None, probe_tokens=9)) as sieve:
        with pytest.warns(kvsieve.KvsieveWarning, match="feeds up to 9 tokens after the prompt"):
            sieve.prefill(ids, torch.ones_like(ids), chunk=512)


@pytest.mark.slow
def test_evaluations_give_what_each_plan_gives_alone(llama):
    context = " ".join(WORDS[3 + (7 * i) % 110] for i in range(70))
    turns = tuple(
        QuestionAnswer(text, ("w1",), lambda answer, expected: {"score": 0.0}, 3) for text in ("w3 w4", "w9 w8 w7")
    )
    plans = [
        kvsieve.plan("full"),
        *PLANS.values(),
        kvsieve.plan("finch", budget="50%", question_tokens=4, chunk_length=16),
        kvsieve.plan("snapkv", budget="50%", window=4),
    ]
    evaluator = Evaluator(llama, word_tokenizer())
    sample = Sample(context, turns)
    encoded = evaluator.prompter.encode(sample)
    for question in ("visible", "hidden"):
        outcomes = evaluator.run(sample, plans, question)
        assert [outcome.applied for outcome in outcomes[1:]] == [True] * 5
        alone = [evaluator.run(sample, [plans[0], plan], question)[1].answers for plan in plans]
        assert [outcome.answers for outcome in outcomes] == alone
        prompt = encoded.prompt if question == "visible" else encoded.context
        for plan, outcome in zip(plans[1:5], outcomes[1:5], strict=True):
            with kvsieve.attach(llama, plan.for_tokenizer(evaluator.prompter.tokenizer)) as sieve:
                cache = sieve.prefill(prompt, torch.ones_like(prompt))
                assert outcome.record.kept == dict(enumerate(cache.entries()))
                if question == "visible":
                    result = sieve.generate(prompt, torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
                    new = result.sequences[0, prompt.shape[1] :].tolist()
                    assert evaluator.prompter.answer(new)[0] == outcome.answers[0]
