"""Answers with and without drafts share passes, and are those that each has alone without drafts."""

from __future__ import annotations

import functools

import pytest
import torch

import kvsieve
from codecs_of_tests import Formats
from kvsieve.core.codes import CodeFormat
from kvsieve.decoding.answer import Answer
from kvsieve.decoding.asked import Sampling
from kvsieve.decoding.loop import Rows, step
from kvsieve.decoding.sampling import Sampler
from kvsieve.detokenize import Detokenizer
from kvsieve.hf.attach import attached, under
from kvsieve.hf.drafts.drafter import Drafter, RowDrafts
from kvsieve.hf.drafts.length import DraftLength
from kvsieve.planning.drafts import as_draft
from orders import prompt
from small import longrope_factors, plan_of, stored
from tiny_models import build
from toy_words import word_tokenizer

SMALL = {"budget": 16, "window": 4}
KIVI = Formats(of_keys=CodeFormat(8, "channel"), of_values=CodeFormat(8, "token", 16), block=8, tail=4)
CASES = {
    "full": ("llama", "full", {}),
    "snapkv": ("llama", "snapkv", SMALL),
    "adakv": ("llama", "adakv", {**SMALL, "every": 3}),
    "lagkv": ("llama", "lagkv", {"budget": 14, "lag": 4}),
    "h2o": ("llama", "h2o", {"budget": 16}),
    "rocketkv": ("llama", "rocketkv", {"budget": 20, "window": 4, "kernel": 5}),
    "kivi": ("llama", kvsieve.Plan(codec=KIVI), {}),
    "cascade, drafts alone": ("llama", "cake", {**SMALL, "every": 3}),
    "windows": ("gemma3_text", "snapkv", SMALL),
    "latents": ("deepseek_v3", "full", {}),
    "hybrid, drafts alone": ("qwen3_next", "snapkv", SMALL),
}
# By name: rules, and the word before which the answer stops, by its place; None for none.
REQUESTS = {
    "plain": (Sampling(), None),
    "greedy": (Sampling(logprobs=2), None),
    "sampled": (Sampling(temperature=1.0, seed=7, presence_penalty=0.5, logprobs=1), None),
    "stopped": (Sampling(temperature=1.0, seed=9), 6),
    "looked up": (Sampling(), None),
}
LIMIT = 10


@functools.cache
def built(family):
    return build(family, dtype=torch.float64)


class Told(Drafter):
    """Proposes an answer that is known before, wrong at every fifth place."""

    def __init__(self, answer, before):
        self._answer = answer
        self._at = -before

    def extend(self, tokens):
        self._at += len(tokens)

    def propose(self, most):
        places = range(self._at, min(self._at + most, len(self._answer)))
        return [self._answer[at] + (at % 5 == 4) for at in places]


def forced(tokens, answer, before):
    return RowDrafts(Told(answer, before), DraftLength(4, 0.0, adapt=False), tokens)


def begun(model, ids, number, rules, stop=(), limit=LIMIT):
    """Rows of one answer after its prompt, with its first token, and what it has told."""
    parts = []
    answer = Answer(
        Sampler(rules, torch.tensor(ids)),
        (),
        limit,
        words=Detokenizer(word_tokenizer()),
        tell=parts.append,
        stops=stop,
        number=number,
    )
    cache = model.new_cache()
    logits = model.feed(cache, torch.tensor([ids]), None, logits=1).logits
    rows = Rows(model, cache, [answer])
    rows.take(logits.cpu())
    return rows, parts


def told(rows, parts):
    (answer,) = rows.answers
    likelihoods = [(token.own.id, [top.id for top in token.top]) for part in parts for token in part.tokens]
    return answer.tokens, answer.text, answer.finish, likelihoods, rows.cache.num_seen, stored(rows.cache)


@pytest.mark.parametrize("case", CASES)
def test_requests_with_and_without_drafts_share_passes_and_answer_as_alone(case):
    family, name, given = CASES[case]
    model = built(family)
    plan = name if isinstance(name, kvsieve.Plan) else plan_of(name, model, **given)
    with attached(model, kvsieve.Plan(), "eager", any_plan=True) as sieve, torch.no_grad():
        plans = [plan, plan, kvsieve.Plan(), plan, plan]
        models = [under(sieve, one) for one in plans]
        ids = [prompt(number, 40 + 5 * number) for number in range(len(REQUESTS))]
        alone, stops = [], []
        for number, (rules, place) in enumerate(REQUESTS.values()):
            stops.append(())
            for again in range(1 + (place is not None)):
                rows, parts = begun(models[number], ids[number], number, rules, stops[-1])
                while rows.going:
                    step(models[number], [rows])
                if place is not None and not again:
                    stops[-1] = (rows.answers[0].text.split()[place],)
            alone.append(told(rows, parts))
        joint = [
            begun(models[number], ids[number], number, rules, stops[number])
            for number, (rules, _) in enumerate(REQUESTS.values())
        ]
        for number in (1, 2, 3):
            rows, _ = joint[number]
            rows.drafts = [forced([*ids[number], *rows.answers[0].tokens], alone[number][0], len(ids[number]))]
        looked_up = as_draft("lookup:tokens=3:ngram=1:adapt=false")
        joint[4][0].open_drafts(looked_up, [[*ids[4], *joint[4][0].answers[0].tokens]])
        passes = drafted = accepted = 0
        while going := [rows for rows, _ in joint if rows.going]:
            counts = step(sieve, going)
            assert counts.passes == 1
            if "alone" in case and len(going) > 1:
                assert not any(joint[number][0].drafts[0].counts.drafted for number in (1, 3, 4))
            passes += 1
            drafted += counts.drafted
            accepted += counts.accepted
    assert [told(*one) for one in joint] == alone
    tokens = sum(len(found[0]) - 1 for found in alone)
    assert "alone" in case or (tokens > passes and drafted > accepted > 0)
    assert accepted == sum(rows.drafts[0].counts.accepted for rows, _ in joint[1:])
    # It stopped in the middle of a pass, and its cache ends there.
    assert alone[3][2] == "stop" and alone[3][4] == len(ids[3]) + len(alone[3][0]) - 1


def test_an_interrupt_leaves_the_cache_where_the_answer_is():
    with kvsieve.attach(built("llama"), kvsieve.Plan()) as sieve, torch.no_grad():
        ids = prompt(1, 30)
        alone, _ = begun(sieve, ids, 0, Sampling())
        while alone.going:
            step(sieve, [alone])
        rows, parts = begun(sieve, ids, 0, Sampling())
        rows.drafts = [forced([*ids, *rows.answers[0].tokens], alone.answers[0].tokens, len(ids))]
        answer = rows.answers[0]
        add = answer.add

        def interrupted(logits):
            if len(answer.tokens) == 3:
                raise KeyboardInterrupt
            add(logits)

        answer.add = interrupted
        with pytest.raises(KeyboardInterrupt):
            step(sieve, [rows])
        assert answer.tokens == alone.answers[0].tokens[:3] and rows.cache.num_seen == len(ids) + 2
        answer.add = add
        while rows.going:
            step(sieve, [rows])
    assert answer.tokens == alone.answers[0].tokens


def test_rows_of_one_cache_accept_different_numbers():
    with kvsieve.attach(built("llama"), plan_of("h2o", built("llama"), budget=16)) as sieve, torch.no_grad():
        ids = torch.tensor([prompt(1, 40), prompt(2, 40)])

        def batch():
            cache = sieve.new_cache()
            logits = sieve.feed(cache, ids, None, logits=1).logits
            rows = Rows(sieve, cache, [Answer(Sampler(Sampling(), row), (), 9 + 4 * at) for at, row in enumerate(ids)])
            rows.take(logits)
            return rows

        alone, rows = batch(), batch()
        while alone.going:
            step(sieve, [alone])
        wanted = [answer.tokens for answer in alone.answers]
        # The first row's are right, the second's are not.
        rows.drafts = [forced([*ids[row], wanted[row][0]], wanted[0], ids.shape[1]) for row in range(2)]
        passes = 0
        while rows.going:
            step(sieve, [rows])
            passes += 1
    assert [answer.tokens for answer in rows.answers] == wanted
    counts = [drafts.counts for drafts in rows.drafts]
    assert counts[0].accepted > counts[1].accepted and passes < len(wanted[1])


def test_nothing_is_drafted_beyond_a_border_of_rotary_tables_or_the_limit():
    lengths = {"original_max_position_embeddings": 36, "max_position_embeddings": 256}
    model = build("phi3", dtype=torch.float64, rope_parameters=longrope_factors(36), **lengths)
    with kvsieve.attach(model, kvsieve.Plan()) as sieve, torch.no_grad():
        ids = prompt(3, 30)
        rows, _ = begun(sieve, ids, 0, Sampling(), limit=20)
        rows.drafts = [forced([*ids, *rows.answers[0].tokens], [7] * 40, len(ids))]
        answer = rows.answers[0]
        answer.limit = len(answer.tokens) + 2
        rows.propose(32, 1)
        assert rows.next_ids().shape[1] == 2
        answer.limit = 20
        widths = []
        while rows.going and not rows.at_border:
            rows.propose(32, 1)
            widths.append((rows.cache.num_seen, rows.next_ids().shape[1]))
            step(sieve, [rows])
        assert rows.at_border and all(seen + width <= 36 for seen, width in widths) and widths[0][1] == 5


class Copying(Told):
    """Proposes what comes, with the confidence of long copies."""

    confidence = 7

    def propose(self, most):
        return self._answer[self._at : self._at + most]


@pytest.mark.parametrize(("slope", "most"), [(0.07, (15, 8, 8, 8)), (0.2, (15, 3, 3, 4))])
def test_drafts_of_several_requests_lengthen_a_pass_by_two_thirds(slope, most):
    """Most drafted tokens of a pass of n requests: (2/3 of 1 + slope * (n - 1), less n * 0.06) / slope."""
    with kvsieve.attach(built("llama"), kvsieve.Plan()) as sieve, torch.no_grad():
        all_ids = [prompt(number, 30 + number) for number in range(4)]
        limits = 20, 40, 60, 120
        wanted = []
        for number, ids in enumerate(all_ids):
            alone, _ = begun(sieve, ids, number, Sampling(), limit=limits[number])
            while alone.going:
                step(sieve, [alone])
            wanted.append(alone.answers[0].tokens)
        joint = [begun(sieve, ids, at, Sampling(), limit=limits[at])[0] for at, ids in enumerate(all_ids)]
        # The first one drafts nothing, and leaves its share to the others.
        for ids, rows, answer in list(zip(all_ids, joint, wanted, strict=True))[1:]:
            length = DraftLength(15, slope, first=0.06)
            rows.drafts = [RowDrafts(Copying(answer, len(ids)), length, [*ids, answer[0]])]
        drafted = {}
        while going := [rows for rows in joint if rows.going]:
            found = step(sieve, going).drafted
            drafted[len(going)] = max(found, drafted.get(len(going), 0))
    assert [rows.answers[0].tokens for rows in joint] == wanted
    assert drafted == dict(enumerate(most, 1))


def test_answers_that_share_passes_draft_less():
    length = DraftLength(16, 0.09)
    counts = []
    for rows in (1, 4, 16):
        length.rows = rows
        counts.append(length.of_class(4, 16))
    assert counts[0] > counts[1] > counts[2]
