"""Another model drafts: answers stay those without, whatever it proposes, and also where it fails."""

from __future__ import annotations

import functools

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

import kvsieve
from drafted import alone, drafted
from kvsieve.errors import PlanError, UnsupportedOptionError
from kvsieve.hf.drafts import draft_passes, length
from kvsieve.hf.drafts.model import model_drafter
from kvsieve.hf.drafts.translation import Translation
from kvsieve.hf.prompt.draft import load_draft
from kvsieve.planning.roles import Loaded
from small import plan_of
from tiny import greedy, tiny_model, tiny_prompt
from tiny_models import build
from toy_gguf import TOKENS, write_gguf
from toy_words import WORDS, word_tokenizer

N = 60
NEW = 12
PLANS = {
    "full": {},
    "snapkv": {"budget": 24, "window": 4},
    "adakv": {"budget": 24, "window": 4},
    "lagkv": {"budget": 26, "lag": 4},
    "h2o": {"budget": 24},
    "rocketkv": {"budget": 20, "window": 4, "kernel": 5},
    "kivi": {"tail": 4},
}


@pytest.fixture(autouse=True)
def unsure(monkeypatch):
    """Tiny models are unsure of every token, and cost what they save; their drafts go on nevertheless."""
    monkeypatch.setattr(draft_passes, "LEAST", 0.0)
    monkeypatch.setattr(length, "_MARGIN", 0.0)


@functools.cache
def near(family="llama", noise=0.02, **config):
    """A model whose answers are often, not always, those of the tiny model of this family."""
    model = build(family, dtype=torch.float32, **config)
    make = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=make) * weight.std() * noise)
    return model


def answers(family, plan, draft, *, tokenizer=None, prompts=1):
    """The answer alone, and with the draft for so many answers to one prompt; the rows' drafts."""
    model = tiny_model(family, torch.float32)
    ids = tiny_prompt(1, N)
    rows = []
    with kvsieve.attach(model, plan_of(plan, model, **PLANS[plan]), tokenizer=tokenizer) as sieve, torch.no_grad():
        expected = alone(sieve, ids, NEW)[1]
        for _ in range(prompts):
            tokens, row = drafted(sieve, ids, NEW, lambda cache: model_drafter(draft, sieve))[1:]
            assert tokens == expected
            rows.append(row)
    return rows


@pytest.mark.parametrize("plan", PLANS)
def test_an_answer_with_a_draft_model_is_the_answer_without(plan):
    (row,) = answers("llama", plan, Loaded("near", near(), None))
    assert row.note is None
    assert row.counts.drafted > row.counts.accepted


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "deepseek_v3"])
def test_drafts_with_other_layers_take_back_what_was_wrong(family):
    """Windows that have moved on, recurrent states and latents."""
    (row,) = answers(family, "full", Loaded("near", near(family), None))
    assert row.note is None
    assert row.counts.drafted > row.counts.accepted > 0


def test_the_same_weights_draft_the_answer_itself():
    (row,) = answers("llama", "full", Loaded("same", build("llama", dtype=torch.float32), None))
    assert row.counts.drafted == row.counts.accepted == 8


def test_a_conversation_goes_on_where_the_last_drafter_left_it(monkeypatch):
    """A later turn's drafter prefills what is new only."""
    fed = []
    model = near()
    run = model.forward
    monkeypatch.setattr(
        model, "forward", lambda *args, **kwargs: fed.append(kwargs["input_ids"].shape[1]) or run(*args, **kwargs)
    )
    answers("llama", "full", Loaded("near", model, None), prompts=2)
    assert fed.count(N + 1) == 1


def test_generate_with_a_draft_model():
    model = tiny_model("llama", torch.float32)
    ids = tiny_prompt(2, N)
    options = greedy(max_new_tokens=NEW)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        expected = sieve.generate(ids, **options).sequences
        result = sieve.generate(ids, draft=near(), **options)
        assert torch.equal(model.generate(ids, assistant_model=near(), **options), expected)
    assert torch.equal(result.sequences, expected)
    assert result.stats.drafts.accepted > 0
    # Its block has ended too.
    assert torch.equal(near().generate(ids, **options), near().generate(ids, **options))


def test_a_draft_that_fails_in_the_middle_is_noted(monkeypatch):
    model = tiny_model("llama", torch.float32)
    draft = near()
    calls = []
    layer = draft.model.layers[1]
    run = layer.forward

    def fails(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("out of luck")
        return run(*args, **kwargs)

    ids = tiny_prompt(1, N)
    options = greedy(max_new_tokens=NEW)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        expected = sieve.generate(ids, **options).sequences
        monkeypatch.setattr(layer, "forward", fails)
        result = sieve.generate(ids, draft=draft, **options)
        monkeypatch.undo()
        # The next answer does not take up what the failure left.
        assert not any("draft" in note for note in sieve.generate(ids, draft=draft, **options).stats.notes)
    assert len(calls) == 2
    assert torch.equal(result.sequences, expected)
    assert any("out of luck" in note for note in result.stats.notes)


def test_a_draft_with_a_shorter_context_ends_with_a_note():
    (row,) = answers("llama", "full", Loaded("near", near(max_position_embeddings=N + 4), None))
    assert "its context is 64" in row.note
    assert 0 < row.counts.drafted <= 4


def test_tokens_that_only_the_draft_knows_are_not_drafted():
    """Its embedding has more rows than the tokenizer that both share."""
    tokenizer = word_tokenizer()
    (row,) = answers("llama", "full", Loaded("wide", near(vocab_size=400), tokenizer), tokenizer=tokenizer)
    assert row.note is None


def other_words():
    """The words in another order, and numbers below 50 as a word of two parts."""
    vocabulary = {word: index for index, word in enumerate(reversed(WORDS))}
    words = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]")


def test_a_draft_with_another_tokenizer():
    """The same weights with rows of the vocabulary reversed draft the answer itself, in other tokens."""
    draft = build("llama", dtype=torch.float32)
    with torch.no_grad():
        for weight in {draft.get_input_embeddings().weight, draft.get_output_embeddings().weight}:
            weight.copy_(weight.flip(0))
    (row,) = answers("llama", "full", Loaded("other", draft, other_words()), tokenizer=word_tokenizer())
    assert row.note is None
    # The last token of each proposal, which might go on, is left out.
    assert row.counts.drafted == row.counts.accepted > 4


def test_text_is_split_anew_until_it_is_old(monkeypatch):
    """Two tokens of the model are one of the draft, across the border of what was there and what came."""
    own = characters({"a": 0, "b": 1, "ab": 2, " ": 3, "\u00e9": 4}, [])
    other = characters({"a": 0, "b": 1, " ": 2, "ab": 3}, [("a", "b")])
    read = []
    encode = type(other)._encode_plus
    monkeypatch.setattr(
        type(other), "_encode_plus", lambda self, text, **given: read.append(text) or encode(self, text, **given)
    )
    translation = Translation(own, other, end=9)
    assert translation.extend([0]) == [0]
    assert translation.extend([1, 3]) == [3, 2]
    assert translation.back([3, 2, 0], ended=False) == [0, 1, 3]
    assert translation.back([3], ended=True) == [0, 1, 9]
    for _ in range(30):
        tokens = translation.extend([0, 1, 3])
    assert tokens == [3, 2] * 31
    assert max(map(len, read)) < 60


def characters(vocabulary, merges):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_vocabularies_that_cannot_be_mapped_are_refused():
    model = tiny_model("llama", torch.float32)
    small = near(vocab_size=100)
    cases = [
        (Loaded("self", model, None), None, "is the model itself"),
        (Loaded("near", small, None), None, "their tokenizers differ"),
        (Loaded("near", small, other_words()), None, r"attach\(model, plan, tokenizer=tokenizer\)"),
        (Loaded("near", near(vocab_size=200), None), word_tokenizer(), r"draft=\(model, tokenizer\)"),
    ]
    for draft, tokenizer, message in cases:
        with (
            kvsieve.attach(model, kvsieve.plan("full"), tokenizer=tokenizer) as sieve,
            pytest.raises(PlanError, match=message),
        ):
            model_drafter(draft, sieve)
    windows = Loaded("windows", near("gemma3_text"), other_words())
    with (
        kvsieve.attach(model, kvsieve.plan("full"), tokenizer=word_tokenizer()) as sieve,
        pytest.raises(UnsupportedOptionError, match="cannot take text back"),
    ):
        model_drafter(windows, sieve)


@pytest.mark.parametrize(
    ("dtype", "own"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
    ids=str,
)
def test_a_draft_in_blocks_computes_in_a_dtype_that_blocks_have(tmp_path, dtype, own):
    file = tmp_path / "draft.gguf"
    write_gguf(build("llama", vocab_size=len(TOKENS)), file)
    model = build("llama", vocab_size=len(TOKENS), dtype=dtype)
    assert load_draft(str(file), model).model.dtype == own
