"""Rows of a batch that end before others: on a later turn such a row answers as it would alone, or is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import kvsieve
from kvsieve.errors import CacheStateError, InputError
from kvsieve.hf.compat import CACHE
from small import plan_of
from tiny import tiny_model, tiny_prompt
from tiny_models import build

N, PAD, END = 60, 0, 2
ANSWERS = [[5, 6, END], [7, 8, 9, 10, 11, 12, 13, 14]]
PLANS = {
    **{name: {} for name in kvsieve.list_methods()},
    "keydiff, chunks": {"chunks": True},
    "lagkv, chunks": {"chunks": True, "lag": 8, "sinks": 2},
    "snapkv, every": {"every": 3},
    "snapkv, codec": {"codec": "kivi:bits=8:block=8:tail=4"},
    "finch, all at once": {"chunk_length": 100},
}


class Say(LogitsProcessor):
    """Lets rows answer with given tokens."""

    def __init__(self, answers):
        self.answers, self.at = answers, 0

    def __call__(self, input_ids, scores):
        for row, answer in enumerate(self.answers):
            if self.at < len(answer):
                scores[row] = -torch.inf
                scores[row, answer[self.at]] = 0
        self.at += 1
        return scores


@pytest.fixture(scope="module")
def model():
    return tiny_model(filled=True)


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(2, N + 12, seed=5, low=3, high=100)


def plan(model, name):
    return plan_of(name.partition(",")[0], model, **PLANS[name])


def first(answers, **options):
    say = LogitsProcessorList([Say(answers)])
    new = len(ANSWERS[1])
    return {"logits_processor": say, "max_new_tokens": new, "pad_token_id": PAD, "eos_token_id": END} | options


def logits(sieve, ids, cache, mask=None, **options):
    said = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    result = sieve.generate(ids, mask, cache=cache, do_sample=False, pad_token_id=PAD, **said, **options)
    return torch.stack(result.output.logits, 1)


def ask(sieve, ids, cache=None, answers=ANSWERS, **options):
    """The first turn's sequences and cache."""
    result = sieve.generate(ids, cache=cache, do_sample=False, **first(answers, **options))
    return result.sequences, result.cache


def wanted(sieve, ids, later, row=0):
    """Logits of the second turn of a row that was alone in both."""
    sequences, cache = ask(sieve, ids[row : row + 1], None, ANSWERS[row : row + 1])
    return logits(sieve, torch.cat([sequences, later[row : row + 1]], 1), cache)[0]


@pytest.mark.parametrize("name", PLANS)
def test_a_row_that_ended_early_answers_as_alone_or_is_refused(model, ids, name):
    prompt, later = ids[:, :N], ids[:, N:]
    with kvsieve.attach(model, plan(model, name)) as sieve:
        sequences, cache = ask(sieve, prompt)
        assert sequences[0, N:].tolist() == ANSWERS[0] + [PAD] * 5
        together = torch.cat([sequences, later], 1)
        evict = sieve.plan.evict
        if (
            sieve.plan.scores_entries
            or (evict and evict.when.steps)
            or ((sieve.plan.codec or sieve.plan.rest) and name != "snapkv, codec")
        ):
            with pytest.raises(
                CacheStateError, match=r"rows \[0\] of the batch ended before others, and .* one by one"
            ):
                logits(sieve, together, cache, torch.ones_like(together))
            return
        found = logits(sieve, together, cache, torch.ones_like(together))
        torch.testing.assert_close(found[0], wanted(sieve, prompt, later))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("pad", [PAD, END])
@pytest.mark.parametrize("name", ["full", "snapkv", "fastkv", "quest", "gemfilter"])
def test_without_a_mask_and_with_one_that_hides_the_padding(model, ids, name, pad, masked):
    prompt, later = ids[:, :N], ids[:, N:]
    with kvsieve.attach(model, plan(model, name)) as sieve:
        sequences, cache = ask(sieve, prompt, pad_token_id=pad)
        together = torch.cat([sequences, later], 1)
        mask = torch.ones_like(together)
        mask[0, N + 3 : N + 8] = 0
        found = logits(sieve, together, cache, mask if masked else None, chunk=5)
        torch.testing.assert_close(found[0], wanted(sieve, prompt, later))
        # The row that went on to the end, too.
        torch.testing.assert_close(found[1], wanted(sieve, prompt, later, row=1))


@pytest.mark.parametrize("name", ["snapkv", "gemfilter", "finch"])
def test_three_turns_through_a_file(model, ids, name, tmp_path):
    prompt, later, more = ids[:, :N], ids[:, N : N + 6], ids[:, N + 6 :]

    def turns(rows):
        answers = [ANSWERS[row] for row in rows]
        sequences, cache = ask(sieve, prompt[rows], None, answers)
        for each in (later, more):
            sieve.save(cache, tmp_path / "cache", force=True)
            cache = sieve.load(tmp_path / "cache").cache
            fed = torch.cat([sequences, each[rows]], 1)
            sequences, cache = ask(sieve, {"input_ids": fed, "attention_mask": torch.ones_like(fed)}, cache, answers)
            assert torch.equal(sequences[:, : fed.shape[1]], fed)
        fed = torch.cat([sequences, later[rows]], 1)
        kept = sieve.kept(cache, sequences, row=0)
        return logits(sieve, fed, cache, torch.ones_like(fed))[0], kept.tokens.tolist()

    with kvsieve.attach(model, plan(model, name)) as sieve:
        (found, tokens), (alone, bare) = turns([0, 1]), turns([0])
        torch.testing.assert_close(found, alone)
        # The last token of a row alone was not read yet.
        assert tokens == [*bare, END]


@pytest.mark.parametrize("name", ["full", "snapkv", "fastkv", "a-shape", "quest"])
def test_plain_generate(model, ids, name):
    prompt, later = ids[:, :N], ids[:, N:]
    said = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with kvsieve.attach(model, plan(model, name)) as sieve:

        def turns(rows, mask=None):
            cache, answers = sieve.new_cache(), [ANSWERS[row] for row in rows]
            sequences = model.generate(prompt[rows], **{CACHE: cache}, do_sample=False, **first(answers))
            # Of a row alone the last token was not read yet.
            answer = torch.tensor(ANSWERS[0][: None if len(rows) > 1 else -1])
            assert torch.equal(sieve.kept(cache, sequences).tokens, torch.cat([prompt[0], answer]))
            fed = torch.cat([sequences, later[rows]], 1)
            options = {**said, "attention_mask": mask, "pad_token_id": PAD, "eos_token_id": None, CACHE: cache}
            out = model.generate(fed, **options)
            assert torch.equal(out.sequences[:, : fed.shape[1]], fed)
            return torch.stack(out.logits, 1)[0]

        alone, ones = turns([0]), torch.ones(2, N + 8 + 12).long()
        hidden = ones.clone()
        hidden[0, N + 3 : N + 8] = 0
        for mask in (None, ones, hidden):
            torch.testing.assert_close(turns([0, 1], mask), alone)


def test_plain_calls(model, ids):
    """They take the last token of a row's answer for part of it."""
    prompt, later = ids[:, :N], ids[:, N:]
    with kvsieve.attach(model, plan(model, "knorm")) as sieve, torch.no_grad():
        sequences, cache = ask(sieve, prompt)
        fed, seen = torch.cat([sequences, later], 1), cache.num_seen
        mask = torch.ones_like(fed)
        with pytest.raises(InputError, match="give 0 for the padding behind their ends"):
            model(fed[:, seen:], attention_mask=mask, **{CACHE: cache})
        mask[0, N + 3 : N + 8] = 0
        positions = (mask.cumsum(-1) - 1)[:, seen:]
        out = model(fed[:, seen:], attention_mask=mask, position_ids=positions, **{CACHE: cache})
        torch.testing.assert_close(out.logits[0, -1].float(), wanted(sieve, prompt, later)[0])


def test_other_rows_go_on_alone(model, ids):
    prompt, later = ids[:, :N], ids[:, N:]
    with kvsieve.attach(model, plan(model, "h2o")) as sieve:
        sequences, cache = ask(sieve, prompt)
        cache.batch_select_indices(torch.tensor([1]))
        found = logits(sieve, torch.cat([sequences, later], 1)[1:], cache)
        torch.testing.assert_close(found[0], wanted(sieve, prompt, later, row=1))


def test_plain_calls_are_refused_where_a_row_cannot_be_as_alone(model, ids):
    prompt, later = ids[:, :N], ids[:, N:]
    with kvsieve.attach(model, plan(model, "tova")) as sieve, torch.no_grad():
        sequences, cache = ask(sieve, prompt)
        fed = torch.cat([sequences, later], 1)
        with pytest.raises(CacheStateError, match="tova has evicted for the padding"):
            model(fed[:, cache.num_seen :], attention_mask=fed.ne(PAD).long(), **{CACHE: cache})


def test_hidden_tokens_of_an_answer(model, ids):
    """Rows that a loop of one's own leaves out of a pass; an evictor that acts while decoding would count them."""
    mask = torch.ones(2, N + 1, dtype=torch.long)
    mask[0, N] = 0
    for name, every in (("snapkv", None), ("snapkv", 3), ("h2o", 1)):
        with kvsieve.attach(model, plan_of(name, model, every=every)) as sieve, torch.no_grad():
            cache, own = sieve.prefill(ids[:, :N]), sieve.prefill(ids[:1, :N])
            options = {"attention_mask": mask, **{CACHE: cache}}
            if every:
                with pytest.raises(InputError, match=r"hides the token of rows \[0\], and .* evicts after"):
                    model(ids[:, N : N + 1], **options)
                continue
            model(ids[:, N : N + 1], **options)
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
            positions = mask.cumsum(-1)[:, -1:] - 1
            found = model(ids[:, N + 1 : N + 2], attention_mask=mask, position_ids=positions, **{CACHE: cache}).logits
            mask = mask[:, :-1]
            torch.testing.assert_close(found[0], model(ids[:1, N + 1 : N + 2], **{CACHE: own}).logits[0])


class Until(StoppingCriteria):
    """Ends rows at a token."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == 6


def test_rows_that_other_criteria_have_ended(model, ids):
    prompt, later = ids[:, :N], ids[:, N:]
    with kvsieve.attach(model, plan(model, "snapkv")) as sieve:

        def turns(rows, pad=PAD):
            until = StoppingCriteriaList([Until()])
            answers = [ANSWERS[row] for row in rows]
            sequences, cache = ask(sieve, prompt[rows], None, answers, stopping_criteria=until, pad_token_id=pad)
            fed = torch.cat([sequences, later[rows]], 1)
            return logits(sieve, fed, cache, torch.ones_like(fed))[0]

        torch.testing.assert_close(turns([0, 1]), turns([0]))
        with pytest.raises(CacheStateError, match="a pad_token_id that ends no answer"):
            turns([0, 1], END)


@pytest.mark.parametrize("family", ["mistral:sliding", "qwen3_next"])
def test_layers_that_cannot_take_tokens_back(family):
    model = build(family, dtype=torch.float64)
    ids = tiny_prompt(2, N + 12, seed=5, low=3, high=100)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        sequences, cache = ask(sieve, ids[:, :N])
        with pytest.raises(CacheStateError, match="recurrent or sliding-window layers have read the padding"):
            logits(sieve, torch.cat([sequences, ids[:, N:]], 1), cache)


class Fails(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise InterruptedError


@pytest.mark.parametrize("name", ["snapkv", "gemfilter"])
def test_after_a_call_that_failed(model, ids, name):
    prompt, later = ids[:, :N], ids[:, N:]
    with kvsieve.attach(model, plan(model, name)) as sieve:
        sequences, cache = ask(sieve, prompt)
        together = torch.cat([sequences, later], 1)
        bad = {"logits_processor": LogitsProcessorList([Fails()])} if name == "gemfilter" else {"protect": [(0, 900)]}
        with pytest.raises((InterruptedError, InputError)):
            sieve.generate(together, cache=cache, max_new_tokens=2, **bad)
        found = logits(sieve, together, cache, torch.ones_like(together))
        torch.testing.assert_close(found[0], wanted(sieve, prompt, later))
