"""Tokens of joined documents that the question chooses, against a definition with explicit hidden states."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvsieve
from kvsieve.errors import InputError, PlanError, UnsupportedOptionError
from kvsieve.methods.joins import Prophet, Relevant
from kvsieve.methods.joins.relevant import _standard
from kvsieve.planning.joins import AskedAttention, join_of
from tiny_models import build

BEFORE = 6
SIZES = (17, 23, 20, 19)
START = BEFORE + SIZES[0]
TOTAL = BEFORE + sum(SIZES)
# Tables of rotations are float32.
CLOSE = {"atol": 1e-6, "rtol": 1e-6}
QUESTION = torch.tensor([[11, 12, 40, 13, 14]])


@pytest.fixture
def ids():
    return torch.randint(3, 90, (1, TOTAL), generator=torch.Generator().manual_seed(4))


def joined(sieve, ids, kind, question=QUESTION, **options):
    return sieve.join([*ids[:, BEFORE:].split(SIZES, 1)], ids[:, :BEFORE], kind=kind, question=question, **options)


def keys_and_values(cache):
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.sieve_layers.values()]


def passed(model, tokens, columns, stored):
    """Pass tokens of columns over stored entries: new entries of every layer, and mean attention of the columns."""
    decoder = model.model
    hidden = decoder.embed_tokens(tokens)
    size = max(TOTAL, int(columns.max()) + 1)
    entries, attention = [], []
    for layer, (old_keys, old_values) in zip(decoder.layers, stored, strict=True):
        own = layer.self_attn
        normed = layer.input_layernorm(hidden)
        query, key, value = (
            project(normed).view(1, len(columns), -1, own.head_dim).transpose(1, 2)
            for project in (own.q_proj, own.k_proj, own.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *decoder.rotary_emb(hidden, columns[None]))
        keys, values = (
            torch.nn.functional.pad(old, (0, 0, 0, size - old.shape[2])).clone() for old in (old_keys, old_values)
        )
        keys[:, :, columns], values[:, :, columns] = key, value
        entries.append((keys, values))
        groups = query.shape[1] // keys.shape[1]
        logits = query @ keys.repeat_interleave(groups, 1).transpose(2, 3) * own.scaling
        weights = logits.masked_fill(torch.arange(size) > columns[:, None], float("-inf")).softmax(-1)
        attention.append(weights.mean((0, 1, 2)))
        mixed = weights @ values.repeat_interleave(groups, 1)
        hidden = hidden + own.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return entries, torch.stack(attention)


def attended(model, tokens, stored, start=START):
    """Attention of tokens after the documents to columns from `start` on, summed over layers."""
    _, attention = passed(model, tokens, torch.arange(TOTAL, TOTAL + tokens.shape[1]), stored)
    return attention.sum(0)[start:TOTAL]


def of_prophet(model, ids, stored, share):
    return attended(model, QUESTION, stored).topk(round(share * (TOTAL - START))).indices.sort().values + START


def standard(scores):
    """Scores by name in standard deviations from their mean."""
    mean, spread = statistics.mean(scores.values()), statistics.pstdev(scores.values()) or 1
    return {at: (score - mean) / spread for at, score in scores.items()}


def chosen(asked, last, texts, question, count):
    """Numbers of the documents that Relevant chooses, in order. asked, last: attention to each token of documents."""
    names = range(len(texts))
    rare = {t: math.log(len(texts) / sum(t in text for text in texts)) ** 2 for text in texts for t in text}
    weight = dict.fromkeys(question, 1.0)
    found = []
    while len(found) < count:
        left = [at for at in names if at not in found]
        drawn = {at: sum(max(one - other, 0) for one, other in zip(asked[at], last[at], strict=True)) for at in left}
        words = {at: sum(weight.get(t, 0) * rare[t] for t in set(texts[at])) for at in left}
        drawn, words = standard(drawn), standard(words)
        best = max(left, key=lambda at: 0.75 * drawn[at] + words[at])
        found.append(best)
        leads = {}
        for t, mass, less in zip(texts[best], asked[best], last[best], strict=True):
            if t not in question:
                leads[t] = leads.get(t, 0) + max(mass - less, 0)
        top = max(leads.values(), default=0) or 1
        for t in set(texts[best]):
            weight[t] = 0 if weight.get(t, 0) > 0 else leads.get(t, 0) / top
    return found


def of_relevant(model, ids, stored, documents):
    """Columns of documents that the question chooses, without those of the first, and all entries after them."""
    places = torch.arange(START, TOTAL).split(SIZES[1:])
    asked, last = (
        [part.tolist() for part in attended(model, tokens, stored, BEFORE).split(SIZES)]
        for tokens in (QUESTION, QUESTION[:, -1:])
    )
    texts = [part.tolist() for part in ids[0, BEFORE:].split(SIZES)]
    # The first document is exact.
    best = {*chosen(asked, last, texts, QUESTION[0].tolist(), documents)} - {0}
    again = torch.cat([places[at - 1] for at in sorted(best)])
    fresh, _ = passed(model, ids[:, again], again, stored)
    late = torch.cat([places[at - 1][16:] for at in sorted(best)])
    stays = torch.cat([place for at, place in enumerate(places, 1) if at not in best])
    return again, shifted(model, stored, fresh, late, stays)


def turned(model, x, columns, sign):
    cos, sin = model.model.rotary_emb(x, columns[None])
    return apply_rotary_pos_emb(x, x, cos, sign * sin)[0]


def of_document(change, late, column):
    """Mean change in a column's document; that over all documents counts as 20 tokens. change: of `late` columns."""
    ends = torch.tensor(SIZES).cumsum(0) + BEFORE
    own = change[:, :, torch.bucketize(late, ends, right=True) == torch.bucketize(column, ends, right=True)]
    return (own.sum(2) + 20 * change.mean(2)) / (own.shape[2] + 20)


def shifted(model, stored, fresh, late, stays):
    """Entries, of which those that stay are shifted as their documents' late columns have changed."""
    found = []
    for old, new in zip(stored, fresh, strict=True):
        keys, values = (part.clone() for part in new)
        of_keys = turned(model, (new[0] - old[0])[:, :, late], late, -1)
        of_values = (new[1] - old[1])[:, :, late]
        for column in stays:
            shift = of_document(of_keys, late, column)[:, :, None]
            keys[:, :, column] += turned(model, shift, column[None], 1)[:, :, 0]
            values[:, :, column] += of_document(of_values, late, column)
        found.append((keys, values))
    return found


def check(found, columns, entries):
    assert found.reread == len(columns) and found.reused == TOTAL - len(columns)
    for index, (pair, other) in enumerate(zip(keys_and_values(found.cache), entries, strict=True)):
        torch.testing.assert_close(pair, other, **CLOSE, msg=lambda text, at=index: f"layer {at}: {text}")
    record = found.cache.conversation.edits
    share = (TOTAL - START - len(columns)) / TOTAL
    assert record.reread == len(columns) and record.share(TOTAL) == pytest.approx(share)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.5])
@torch.no_grad()
def test_prophet_is_the_definition(model, ids, share, shift):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        stored = keys_and_values(joined(sieve, ids, "modules").cache)
        best = of_prophet(model, ids, stored, share)
        entries, _ = passed(model, ids[:, best], best, stored)
        if shift:
            places = torch.arange(START, TOTAL).split(SIZES[1:])
            late = torch.cat([place[16:] for place in places])
            rest = torch.arange(START, TOTAL)
            entries = shifted(model, stored, entries, late[torch.isin(late, best)], rest[~torch.isin(rest, best)])
        check(joined(sieve, ids, Prophet(share=share, shift=shift)), best, entries)


@pytest.mark.parametrize("documents", [1, 2])
@torch.no_grad()
def test_relevant_is_the_definition(model, ids, documents):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        stored = keys_and_values(joined(sieve, ids, "modules").cache)
        columns, entries = of_relevant(model, ids, stored, documents)
        check(joined(sieve, ids, Relevant(documents=documents)), columns, entries)


@torch.no_grad()
def test_link_shifts_what_stays(model, ids):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        stored = keys_and_values(joined(sieve, ids, "modules").cache)
        fresh = keys_and_values(joined(sieve, ids, "link:tokens=18").cache)
        places = torch.arange(START, TOTAL).split(SIZES[1:])
        late, stays = (torch.cat([place[part] for place in places]) for part in (slice(16, 18), slice(18, None)))
        entries = shifted(model, stored, fresh, late, stays)
        found = joined(sieve, ids, "link:tokens=18:shift=true")
    for pair, other in zip(keys_and_values(found.cache), entries, strict=True):
        torch.testing.assert_close(pair, other, **CLOSE)


@pytest.mark.parametrize("kind", ["relevant:documents=2", "link:tokens=20:shift=true"])
def test_progress_counts_every_token_once(model, ids, kind):
    seen = []
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        found = joined(sieve, ids, kind, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == TOTAL + found.reread <= seen[-1][1]


SLICES = [slice(0, 4), slice(4, 10), slice(10, 15)]


def test_the_place_of_a_document_does_not_decide():
    """Attention falls with the distance; the document that draws more than its place does is chosen anywhere."""
    last, words = torch.tensor([0.1] * 4 + [0.2] * 6 + [0.8] * 5), torch.zeros(15, dtype=torch.int64)
    for number, part in enumerate(SLICES):
        asked = last.clone()
        asked[part] *= 1.5
        given = AskedAttention(asked[None], last[None], (4, 6, 5), words, torch.tensor([7]))
        found = Relevant(documents=1).choose(given)
        assert found.nonzero().flatten().tolist() == list(range(15))[part], number


@pytest.mark.parametrize(("having", "wanted"), [(2, 0), (3, 8)])
def test_a_word_that_few_documents_have_outweighs_attention(having, wanted):
    """In standard deviations 2 of 9 documents with the word have 2.41 more than others; attention's 3.18 count 0.75."""
    words = torch.tensor([7] * having + [*range(10, 19 - having)])
    asked = torch.tensor([[0.2] * 8 + [0.9]])
    given = AskedAttention(asked, torch.full_like(asked, 0.1), (1,) * 9, words, torch.tensor([7]))
    assert Relevant(documents=1).choose(given).nonzero().flatten().tolist() == [wanted]


def test_scores_that_differ_by_rounding_are_equal():
    scores = torch.tensor([0.7, 0.7, 0.7]).nextafter(torch.tensor([0.7, 0.7, 1.0]))
    assert len(scores.unique()) == 2
    assert _standard(scores, torch.zeros(3, dtype=torch.bool)).abs().max() < 0.02


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_name_leads_to_the_next_document(order):
    """The question has 7 of one document, and that one's attended name, 8 and 9, is in another one."""
    texts = [[1, 7, 8, 9], [2, 1, 8, 9, 3, 3], [1, 2, 4, 5, 3]]
    drawn = [[0.1, 0.3, 0.5, 0.4], [0.1] * 6, [0.1, 0.1, 0.12, 0.13, 0.1]]
    sizes = tuple(len(texts[at]) for at in order)
    ids = torch.tensor([token for at in order for token in texts[at]])
    asked = torch.tensor([mass for at in order for mass in drawn[at]])[None]
    given = AskedAttention(asked, torch.full_like(asked, 0.1), sizes, ids, torch.tensor([1, 7]))
    for count, wanted in ((1, {0}), (2, {0, 1})):
        found = Relevant(documents=count).choose(given).split(sizes)
        assert {at for at, part in zip(order, found, strict=True) if part.all()} == wanted
        assert sum(bool(part.any()) for part in found) == count


@pytest.mark.parametrize("kind", ["prophet:share=1.0", "relevant:documents=3", "relevant:documents=9"])
@pytest.mark.parametrize("family", ["llama", "gemma", "phi3", "gpt_neox"])
def test_all_tokens_are_a_full_prefill(family, ids, kind):
    with kvsieve.attach(build(family), kvsieve.plan("full")) as sieve:
        found = joined(sieve, ids, kind)
        whole = sieve.prefill(ids)
    for pair, other in zip(keys_and_values(found.cache), keys_and_values(whole), strict=True):
        assert torch.equal(pair[0], other[0]) and torch.equal(pair[1], other[1])


@pytest.mark.parametrize("kind", ["prophet:share=0.4", "relevant:documents=1"])
def test_chunks_are_the_whole(model, ids, kind):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        whole, parts = (joined(sieve, ids, kind, chunk=chunk) for chunk in (None, 7))
    for pair, other in zip(keys_and_values(whole.cache), keys_and_values(parts.cache), strict=True):
        torch.testing.assert_close(pair, other, atol=1e-9, rtol=1e-9)


def test_another_question_chooses_other_tokens(model, ids):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        old, one, two = (
            keys_and_values(joined(sieve, ids, kind, question).cache)[-1][0]
            for kind, question in (("modules", None), ("prophet", QUESTION), ("prophet", [50, 60, 61]))
        )
    changed = [(keys != old).any(-1).any(1)[0] for keys in (one, two)]
    assert not torch.equal(*changed) and all(int(mask.sum()) == 12 for mask in changed)


def test_the_cache_is_without_the_question_and_continues(model, ids):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        cache = joined(sieve, ids, "prophet").cache
        conversation = cache.conversation
        assert conversation.num_seen == TOTAL and conversation.prompt_lengths == (TOTAL,)
        assert all(layer.store.index[0, 0].tolist() == list(range(TOTAL)) for layer in cache.all_layers)
        assert conversation.approximate == ("prophet:share=0.2",)
        result = sieve.generate(torch.cat([ids, QUESTION], 1), cache=cache, max_new_tokens=4, do_sample=False)
    assert result.sequences.shape[1] <= TOTAL + QUESTION.shape[1] + 4


@pytest.mark.parametrize("plan", [{"method": "snapkv", "budget": 30, "window": 8}, {"method": "quest", "budget": 24}])
def test_plans_act_on_the_question(model, ids, plan):
    with kvsieve.attach(model, kvsieve.plan(floor=0, **plan)) as sieve:
        found = joined(sieve, ids, "prophet")
        seen = TOTAL - (8 if plan["method"] == "snapkv" else 0)
        assert found.cache.conversation.num_seen == seen and found.reread == round(0.2 * (seen - START))
        more = torch.cat([found.ids, QUESTION], 1)
        result = sieve.generate(more, cache=found.cache, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert result.sequences.shape[1] == more.shape[1] + 4


@pytest.mark.parametrize("kind", ["prophet", "relevant"])
def test_one_document_is_a_plain_prefill(model, ids, kind):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        found = sieve.join([ids], kind=kind, question=QUESTION)
        whole = sieve.prefill(ids)
    assert found.reread == 0 and not found.cache.conversation.approximate
    for pair, other in zip(keys_and_values(found.cache), keys_and_values(whole), strict=True):
        assert torch.equal(pair[0], other[0]) and torch.equal(pair[1], other[1])


@pytest.mark.parametrize(
    ("plan", "question", "message"),
    [
        ({"method": "full"}, None, "chooses tokens by the question; give its token ids"),
        ({"method": "full"}, [], "question is the token ids of one text"),
        ({"method": "full"}, [1 << 20], "the model knows 0 to"),
        (
            {"method": "full"},
            [7] * 428,
            "have 85 tokens together and the question 428, the model's context ends at 512",
        ),
        ({"method": "keydiff", "budget": 24, "floor": 0}, QUESTION, "evicts entries of each document alone"),
    ],
)
def test_reasons_against_it(model, ids, plan, question, message):
    with (
        kvsieve.attach(model, kvsieve.plan(**plan)) as sieve,
        pytest.raises((InputError, UnsupportedOptionError), match=message),
    ):
        joined(sieve, ids, "prophet", question)


@pytest.mark.parametrize("share", ["200", "0", "x"])
def test_wrong_shares(share):
    with pytest.raises(PlanError, match="Prophet: share must be a share"):
        join_of(f"prophet:share={share}")


@pytest.mark.parametrize("documents", ["0", "x", "1.5"])
def test_wrong_numbers_of_documents(documents):
    with pytest.raises(PlanError, match="documents"):
        join_of(f"relevant:documents={documents}")
