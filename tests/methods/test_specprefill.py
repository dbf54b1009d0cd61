"""SpecPrefill: whom the draft votes for, what is carried over to another tokenizer, and what is read then."""

from __future__ import annotations

import json

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

import kvsieve
from kvsieve.errors import InputError, PlanError, UnsupportedOptionError
from kvsieve.hf.compat import CACHE
from kvsieve.hf.prompt import draft as drafting
from kvsieve.hf.prompt.draft import carried_over, text_and_spans
from kvsieve.methods import SnapKV, SpecPrefill
from kvsieve.planning.roles import Loaded
from layers import context
from small import draft as tiny_draft
from tiny import greedy, tiny_prompt
from tiny_models import build
from toy_words import word_tokenizer

N, PADDING, LAYERS = 60, 11, 4
GREEDY = greedy(max_new_tokens=4)
SHAPE = {"keep": "40%", "chunk_length": 4, "keep_last": 4, "smooth": 3, "lookahead": 3}


@pytest.fixture(scope="module")
def ids():
    return tiny_prompt(2, N, seed=3, low=3)


def spec(**given):
    return kvsieve.plan("specprefill", **{"draft": tiny_draft(), **SHAPE, **given})


def run(model, plan, *inputs, tokenizer=None, **options):
    with kvsieve.attach(model, plan, tokenizer=tokenizer) as sieve:
        return sieve.generate(*inputs, **{**GREEDY, **options})


def columns(result, layer=0, row=0, end=N):
    store = result.cache.sieve_layers[layer].store
    found = store.index[row, 0][store.valid[row, 0] if store.valid is not None else slice(None)].tolist()
    return [column for column in found if column < end]


def chosen(part, scores, padding=(0,)):
    shared = {"drafted": scores}
    keys = torch.zeros(len(scores), 1, scores.shape[1], 1)
    selection = part.select(context(keys, keys, padding=list(padding), layer_idx=-1, shared=shared))
    lengths = selection.lengths or (selection.indices.shape[1],) * len(scores)
    return [row[-count:].tolist() for row, count in zip(selection.indices, lengths, strict=True)]


def test_chunks_by_hand():
    part = SpecPrefill(draft="demo", keep=5, chunk_length=3, keep_last=1)
    # Means of the chunks: 2, 3, 1 and, of the last two, 4.
    scores = torch.tensor([[6.0, 0, 0, 1, 1, 7, 1, 1, 1, 8, 0]])
    assert chosen(part, scores) == [[3, 4, 5, 9, 10]]
    # A chunk that does not fit is cut; chunks begin at a row's first true token.
    assert chosen(SpecPrefill(draft="demo", keep=4, chunk_length=3, keep_last=1), scores) == [[3, 4, 9, 10]]
    padded = torch.cat([torch.full((1, 2), float("-inf")), scores[:, :9]], 1)
    assert chosen(part, padded, [2]) == [[2, 5, 6, 7, 10]]


def test_votes_equal_transformers_own_attention(model, ids):
    """Softmax weights of the last token and two drafted ones, smoothed; the largest of layers and heads; the mean."""
    seen = []
    part = spec().propagate

    class Spy(SpecPrefill, heads="all"):
        def select(self, ctx):
            if ctx.layer_idx < 0:
                seen.append(ctx.shared["drafted"])
            return super().select(ctx)

    run(model, kvsieve.Plan(propagate=Spy(draft=tiny_draft(), **SHAPE)), ids[:1])
    fed = ids[:1]
    draft = build("llama", dtype=torch.float64, num_hidden_layers=2, attn_implementation="eager")
    draft.load_state_dict(tiny_draft().state_dict())
    votes = []
    for _ in range(part.lookahead):
        with torch.no_grad():
            out = draft(fed, output_attentions=True)
        weights = torch.stack([each[0, :, -1, :N] for each in out.attentions]).flatten(0, 1)
        padded = torch.nn.functional.pad(weights, (1, 1))
        votes.append(((padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3).amax(0))
        fed = torch.cat([fed, out.logits[:, -1].argmax(-1, keepdim=True)], 1)
    torch.testing.assert_close(seen[0][0].double(), torch.stack(votes).mean(0), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [None, 16])
def test_the_model_reads_the_chosen_tokens_at_their_positions(model, ids, chunk):
    result = run(model, spec(), ids[:1], chunk=chunk, return_dict_in_generate=True, output_logits=True)
    kept = columns(result)
    assert len(kept) == 24 == result.stats.deep_tokens and kept[-4:] == [56, 57, 58, 59]
    assert all(columns(result, layer) == kept for layer in range(LAYERS))
    with torch.no_grad():
        own = model(ids[:1, kept], position_ids=torch.tensor([kept])).logits[:, -1]
    torch.testing.assert_close(result.output.logits[0].double(), own, atol=1e-6, rtol=1e-6)
    assert result.stats.applied and result.stats.report["draft"] == "LlamaForCausalLM"
    assert columns(run(model, spec(), ids[:1], chunk=16)) == kept


def test_keeping_all_is_full_kv(model, ids):
    result = run(model, spec(keep="100%"), ids)
    assert torch.equal(result.sequences, run(model, kvsieve.plan("full"), ids).sequences)
    assert not result.stats.applied and "every token went through" in result.stats.notes[0]


def test_padded_rows_and_beams(model, ids):
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :PADDING], mask[1, :PADDING] = 0, 0
    together = run(model, spec(), padded, mask)
    assert columns(together, row=0) == columns(run(model, spec(), ids[:1]))
    alone = columns(run(model, spec(), ids[1:, PADDING:]), end=N - PADDING)
    assert columns(together, row=1) == [column + PADDING for column in alone]
    for chunk in (None, 16):
        beams = run(model, spec(), padded, mask, num_beams=2, chunk=chunk)
        assert columns(beams, row=2) == columns(together, row=1)


def test_eviction_and_later_turns(model, ids):
    plan = kvsieve.Plan(propagate=spec().propagate, evict=SnapKV(budget=10, window=4, kernel=3))
    with kvsieve.attach(model, plan) as sieve:
        first = sieve.generate(ids[:1], **GREEDY)
        assert [len(columns(first, layer)) for layer in range(LAYERS)] == [10] * LAYERS
    with kvsieve.attach(model, spec()) as sieve:
        first = sieve.generate(ids[:1], **GREEDY)
        kept = columns(first)
        whole = torch.cat([first.sequences, ids[1:, :40]], 1)
        second = sieve.generate(whole, cache=first.cache, **GREEDY)
        # 41 new tokens, of the last one generated on: 16 of them are read, chosen by a draft that read all.
        new = [column for column in columns(second, end=104) if column >= 63]
        assert len(new) == 16 == second.stats.deep_tokens and columns(second) == kept
        alone = [column - 63 for column in new]
        assert alone != columns(sieve.generate(whole[:, 63:], **GREEDY), end=41), "the draft saw the first turn as well"
    protected = run(model, spec(), ids[:1], protect=[(7, 12)])
    assert set(range(7, 12)) <= set(columns(protected)) and len(columns(protected)) == 24


def test_characters():
    scores = torch.tensor([1.0, 5.0, 2.0])
    # abc|de|f over ab|cde|(nothing)|f
    assert carried_over(scores, [(0, 3), (3, 5), (5, 6)], [(0, 2), (2, 5), (5, 5), (5, 6)], 6).tolist() == [1, 5, 0, 2]


def bytes_tokenizer():
    """Splits into bytes; two merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {each: index for index, each in enumerate([*alphabet, "w1", "w2"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("w", "1"), ("w", "2")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_text_and_its_tokens():
    tokenizer = bytes_tokenizer()
    text = "w1 w27 ü w1"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    told, spans = text_and_spans(tokenizer, ids)
    assert told == text and [text[a:b] for a, b in spans][:2] == ["w1", " "] and spans[-1] == (9, 11)
    # Tokens that no text is split into: each still has its own characters.
    apart = [*tokenizer.convert_tokens_to_ids(["w", "1"]), *ids[1:]]
    told, spans = text_and_spans(tokenizer, apart)
    assert told == text and list(spans[:3]) == [(0, 1), (1, 2), (2, 3)] and spans[-1] == (9, 11)


def test_another_tokenizer(model, ids, monkeypatch):
    """A draft that splits the same words into pieces chooses by what the words' characters get."""
    own, other = word_tokenizer(), bytes_tokenizer()
    draft = build("llama", dtype=torch.float64, num_hidden_layers=2, vocab_size=len(other))
    read = []

    def attention(attached, propagator, given, chunk):
        read.append(other.decode(given))
        return torch.tensor([float(place in range(40, 60)) for place in range(len(given))])

    monkeypatch.setattr(drafting, "_attention", attention)
    plan = spec(draft=(draft, other), keep=24)
    result = run(model, plan, ids[:1], tokenizer=own)
    assert read == [own.decode(ids[0])]
    # The model's words that have the favoured pieces' characters, and with them others of their chunks.
    text, spans = text_and_spans(own, ids[0].tolist())
    pieces = other(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"][40:60]
    wanted = {place for place, (start, end) in enumerate(spans) if start < pieces[-1][1] and end > pieces[0][0]}
    assert 4 < len(wanted) < 16 and wanted <= set(columns(result))
    monkeypatch.undo()
    assert len(columns(run(model, plan, ids[:1], tokenizer=own))) == 24
    with pytest.raises(PlanError, match="no tokenizer"):
        run(model, plan, ids[:1])


def test_plans_and_refusals(model, ids, tmp_path):
    plan = kvsieve.plan("specprefill", draft=str(tmp_path), keep="25%", budget="10%")
    assert kvsieve.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan and plan.evict.budget.ratio == 0.1
    assert json.loads(json.dumps(spec().to_dict()))["propagate"]["draft"] == "LlamaForCausalLM"
    assert spec(draft=(tiny_draft(), word_tokenizer())).lacks_tokenizer and not spec().lacks_tokenizer
    for wrong in (3, None, "", ("a", "b", "c"), torch.nn.Linear):
        with pytest.raises(PlanError, match="draft= takes the model that chooses"):
            kvsieve.plan("specprefill", draft=wrong)
    with pytest.raises(PlanError, match="needs draft="):
        kvsieve.plan("specprefill")
    with pytest.raises(PlanError, match="the draft is the model itself"):
        run(model, spec(draft=model), ids)
    small = build("llama", dtype=torch.float64, vocab_size=64)
    with pytest.raises(PlanError, match="the draft knows 64 tokens and the model 128"):
        run(model, spec(draft=small), ids)
    with kvsieve.attach(model, spec()) as sieve:
        with pytest.raises(UnsupportedOptionError, match="has another model read a prompt first"):
            model.generate(ids, max_new_tokens=2)
        # A plain call may go on from a prompt that was read.
        assert model(ids[:, :1], **{CACHE: sieve.prefill(ids)}).logits.shape[1] == 1
    short = build("llama", dtype=torch.float64, max_position_embeddings=61)
    with pytest.raises(InputError, match="the draft counts 60 tokens and drafts 2 more, and its context is 61"):
        run(model, spec(draft=short), ids)
    assert isinstance(SpecPrefill(draft=tiny_draft(), keep=40).draft, Loaded)
