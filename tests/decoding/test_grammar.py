"""Answers that match a grammar, in every loop that chooses tokens."""

from __future__ import annotations

import builtins
import functools
import json
import re

import jsonschema
import pytest
import torch

import kvsieve
from kvsieve.decoding.answer import Answer
from kvsieve.decoding.asked import Sampling
from kvsieve.decoding.loop import Rows, step
from kvsieve.decoding.sampling import Sampler, processors_for
from kvsieve.detokenize import Detokenizer
from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.hf.attach import attached
from kvsieve.hf.drafts.drafter import Drafter, RowDrafts
from kvsieve.hf.drafts.length import DraftLength
from kvsieve.hf.generate.grammar import compiled
from kvsieve.planning.grammars import Grammar
from kvsieve.serve.parsers.lark import Rules
from tiny_models import build
from toy_bytes import byte_chats, byte_level
from toy_words import word_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "bc", 3, None]},
        "ok": {"type": "boolean"},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "name": {"type": "string", "pattern": "^[a-z]{1,5}$"},
    },
    "required": ["kind", "ok", "sizes", "name"],
    "additionalProperties": False,
}
GRAMMAR = Grammar.json_schema(SCHEMA)
PLAIN = Sampling()
# White space that the grammar allows would make answers of random models long.
LIMIT = 400


@functools.cache
def tokenizer():
    return byte_chats()


@functools.cache
def model():
    """A model with more outputs than its tokenizer has tokens."""
    made = build("llama", vocab_size=288, max_position_embeddings=2048)
    made.generation_config.eos_token_id = ends()
    made.generation_config.pad_token_id = tokenizer().pad_token_id
    return made


def ends():
    return [tokenizer().eos_token_id, tokenizer().bos_token_id]


def attach(plan="full", **parameters):
    return kvsieve.attach(model(), kvsieve.plan(plan, **parameters), tokenizer=tokenizer())


def ids(*texts):
    """Token ids of some texts, padded on the left, and their mask."""
    rows = tokenizer()(list(texts), padding=True, padding_side="left", return_tensors="pt")
    return rows.input_ids, rows.attention_mask


def check(text):
    jsonschema.validate(json.loads(text), SCHEMA)


def answer_of(grammar, rules=PLAIN, number=0, limit=LIMIT, end_ids=None, stops=()):
    """An answer in the server's loop, with the text that it has told."""
    end_ids = ends() if end_ids is None else end_ids
    matcher = compiled(grammar, tokenizer()).matcher(end_ids)
    prompt = ids("Say it: ")[0][0]
    processors = processors_for(model(), prompt, rules, limit, end_ids, matcher)
    sampler = Sampler(rules, prompt, processors, number)
    parts = []
    words = Detokenizer(tokenizer())
    return Answer(sampler, end_ids, limit, words=words, tell=parts.append, stops=stops, matcher=matcher), parts


def begun(sieve, answer):
    """Rows of one answer with its first token."""
    cache = sieve.new_cache()
    prompt = answer.sampler.ids[None]
    logits = sieve.feed(cache, prompt, None, logits=1).logits
    rows = Rows(sieve, cache, [answer])
    rows.take(logits.cpu())
    return rows


def decoded(*answers):
    """Decode answers in one loop to their ends."""
    with attached(model(), kvsieve.Plan(), "eager", any_plan=True) as sieve, torch.no_grad():
        rows = [begun(sieve, answer) for answer in answers]
        while going := [one for one in rows if one.going]:
            step(sieve, going)
    return answers


@pytest.mark.parametrize("draft", [None, "lookup:tokens=4:ngram=1:adapt=false"])
@pytest.mark.parametrize("plan", ["full", "snapkv:budget=16:window=4"])
def test_rows_and_samples_of_a_generate_call_match(draft, plan):
    torch.manual_seed(3)
    prompts = ids('{"kind": "a", "ok": true, "sizes": [1, 2], "name": "ab"}', "Something else, shorter:")
    with attach(plan) as sieve:
        options = {"do_sample": True, "temperature": 1.0, "num_return_sequences": 2, "max_new_tokens": LIMIT}
        result = sieve.generate(*prompts, grammar=GRAMMAR, draft=draft, **options)
        again = sieve.generate(*prompts, grammar=GRAMMAR, do_sample=False, draft=draft, max_new_tokens=LIMIT)
    assert len(result.texts) == 4 and len(again.texts) == 2
    for text in [*result.texts, *again.texts]:
        check(text)
    assert draft is None or result.stats.drafts.drafted > result.stats.drafts.accepted >= 0


@pytest.mark.parametrize("rules", [Sampling(), Sampling(temperature=1.0, seed=1, top_k=5), Sampling(logprobs=1)])
def test_joint_answers_match_each_its_own_grammar(rules):
    pairs = [
        answer_of(grammar, rules, number)
        for number, grammar in enumerate([GRAMMAR, Grammar.regex("x[0-9]{5}y"), GRAMMAR])
    ]
    first, second, third = decoded(*(answer for answer, _ in pairs))
    check(first.text)
    check(third.text)
    assert re.fullmatch("x[0-9]{5}y", second.text)
    assert {first.finish, second.finish, third.finish} == {"stop"}
    # A complete answer ends by itself, and all of its text is told.
    assert second.tokens[-1] not in ends()
    assert ["".join(part.text for part in parts) for _, parts in pairs] == [first.text, second.text, third.text]


def test_a_seed_gives_one_answer_and_matchers_are_not_shared():
    rules = [Sampling(temperature=1.0, seed=seed) for seed in (1, 1, 2, 3)]
    answers = decoded(*(answer_of(GRAMMAR, each)[0] for each in rules))
    assert answers[0].text == answers[1].text
    assert len({answer.text for answer in answers}) == 3
    for answer in answers:
        check(answer.text)


class Guesses(Drafter):
    """Proposes what no grammar of these tests allows, behind what the answer will be."""

    def __init__(self, answer):
        self._answer = answer
        self._at = -1

    def extend(self, tokens):
        self._at = 1 if self._at < 0 else self._at + len(tokens)

    def propose(self, most):
        wrong = tokenizer().convert_tokens_to_ids(["<|im_start|>", "}", "}"])
        return [*self._answer[self._at : self._at + 2], *wrong][:most]


def test_drafts_are_cut_to_the_grammar_and_change_no_answer():
    rules = Sampling(temperature=1.0, seed=11)
    (alone,) = decoded(answer_of(GRAMMAR, rules)[0])
    answer, _ = answer_of(GRAMMAR, rules)
    with kvsieve.attach(model(), kvsieve.Plan()) as sieve, torch.no_grad():
        rows = begun(sieve, answer)
        drafts = RowDrafts(Guesses(alone.tokens), DraftLength(5, 0.0, adapt=False), [0, answer.tokens[0]])
        drafts.fits = answer.matcher.allowed
        rows.drafts = [drafts]
        passes = 0
        while rows.going:
            step(sieve, [rows])
            passes += 1
    assert answer.tokens == alone.tokens and answer.text == alone.text
    # Two of the proposed tokens are right, and others are not fed.
    assert passes < len(alone.tokens) / 2
    assert drafts.counts.drafted - drafts.counts.accepted <= 1


def test_rules_about_a_prompt_that_is_shortened_do_not_ban_what_a_grammar_needs():
    with attach("gemfilter", budget=24, layer=1) as sieve:
        prompts = ids("Say it, and then say it again: ")
        result = sieve.generate(*prompts, grammar=GRAMMAR, max_new_tokens=LIMIT, no_repeat_ngram_size=2)
    check(result.text)


def test_a_proposal_is_measured_without_a_change():
    matcher = compiled(Grammar.regex("abc+"), tokenizer()).matcher(ends())
    a, b, c = tokenizer().convert_tokens_to_ids(list("abc"))
    end = ends()[0]
    assert matcher.allowed([a, b, a]) == 2 and matcher.allowed([b]) == 0 and matcher.allowed([10_000]) == 0
    assert matcher.take(a) and not matcher.take(a) and matcher.allowed([b, c, c, end]) == 3
    assert matcher.take(b) and not matcher.take(end) and matcher.take(c) and matcher.take(end)
    assert matcher.allowed([c]) == 0 and matcher.complete


def allowed_tokens(matcher, size=288):
    scores = matcher.restrict(torch.zeros(size))
    return set(torch.nonzero(scores > -torch.inf).flatten().tolist())


def test_an_answer_ends_only_where_its_grammar_does_by_any_end_token():
    a, b = tokenizer().convert_tokens_to_ids(["a", "b"])
    matcher = compiled(Grammar.regex("ab?"), tokenizer()).matcher(ends())
    assert allowed_tokens(matcher) == {a}
    matcher.take(a)
    assert allowed_tokens(matcher) == {b, *ends()} and not matcher.complete
    matcher.take(b)
    assert allowed_tokens(matcher) == set(ends()) and matcher.complete
    # Scores may be fewer than the tokenizer's tokens.
    assert allowed_tokens(compiled(Grammar.regex("a"), tokenizer()).matcher(ends()), 100) == {a}


def test_end_tokens_that_the_grammar_names_end_it_too():
    grammar = Grammar.lark('start: "a" <|im_end|>')
    matcher = compiled(grammar, tokenizer()).matcher(ends())
    matcher.take(tokenizer().convert_tokens_to_ids("a"))
    assert allowed_tokens(matcher) == {tokenizer().eos_token_id}
    assert matcher.take(tokenizer().eos_token_id) and matcher.complete


def test_with_end_tokens_ignored_an_answer_goes_on_while_its_grammar_does():
    (short,) = decoded(answer_of(Grammar.regex("a{3,6}"), end_ids=())[0])
    (cut,) = decoded(answer_of(Grammar.regex("a+"), end_ids=(), limit=7)[0])
    assert (short.text, short.finish) == ("aaaaaa", "stop")
    assert (cut.text, cut.finish) == ("aaaaaaa", "length")


def test_stop_strings_end_an_answer_before_its_grammar():
    (answer,) = decoded(answer_of(Grammar.regex("ab{9}c"), stops=("bbb",))[0])
    assert (answer.text, answer.finish) == ("a", "stop")


def test_log_probabilities_are_those_before_the_grammar():
    answer, parts = answer_of(Grammar.regex("ab"), Sampling(logprobs=3))
    decoded(answer)
    tokens = [token for part in parts for token in part.tokens]
    with kvsieve.attach(model(), kvsieve.Plan()) as sieve, torch.no_grad():
        prompt = ids("Say it: ")[0]
        whole = torch.cat([prompt, torch.tensor([answer.tokens])], 1)
        logits = sieve.feed(sieve.new_cache(), whole, None, logits=3).logits[0].float().log_softmax(-1)
    for token, row in zip(tokens, logits, strict=False):
        assert token.own.logprob == pytest.approx(float(row[token.own.id]), abs=1e-4)
        assert [top.id for top in token.top] == row.topk(3).indices.tolist()


def test_the_grammar_wins_over_rules_that_ban_all_it_allows():
    a = tokenizer().convert_tokens_to_ids("a")
    matcher = compiled(Grammar.regex("aa"), tokenizer()).matcher(ends())
    scores = torch.zeros(288).index_fill(0, torch.tensor([a]), -torch.inf)
    restricted = matcher.restrict(scores)
    assert int(restricted.argmax()) == a and int((restricted > -torch.inf).sum()) == 1


def test_white_space_between_signs_is_bounded():
    matcher = compiled(Grammar.json_schema({"type": "object"}), tokenizer()).matcher(ends())
    brace, space, line = tokenizer().convert_tokens_to_ids(["{", "Ġ", "Ċ"])
    assert matcher.allowed([space]) == 0 and matcher.take(brace)
    assert matcher.allowed([space, space]) == 1 and matcher.allowed([line] * 3) == 1
    assert matcher.allowed([line, *[space] * 40]) == 33


TIME = {"type": "string", "format": "time"}
DAY = {"type": "string", "format": "date-time", "maxLength": 90}
TIMES = {
    "alone": (TIME, "{}"),
    "property": ({"type": "object", "properties": {"at": DAY}, "required": ["at"]}, '{{"at": {}}}'),
    "items": ({"type": "array", "items": {"anyOf": [TIME, DAY]}}, "[{}]"),
    "definition": ({"$ref": "#/$defs/at", "$defs": {"at": {"allOf": [TIME]}}}, "{}"),
}


@pytest.mark.parametrize("form", ["answer", "call"])
@pytest.mark.parametrize(("schema", "frame"), TIMES.values(), ids=TIMES)
def test_the_fraction_of_a_time_ends(schema, frame, form):
    if form == "answer":
        grammar = Grammar.json_schema(schema)
    else:
        rules = Rules({})
        grammar = Grammar.lark(rules.grammar(rules.json(schema)))
    day = "2026-03-14T" * ("date-time" in json.dumps(schema))
    for digits, fits in ((9, True), (60, False)):
        tokens = tokenizer()(frame.format(f'"{day}20:00:00.{"0" * digits}Z"')).input_ids
        matcher = compiled(grammar, tokenizer()).matcher(ends())
        assert (matcher.allowed(tokens) == len(tokens)) == fits


def test_nothing_follows_complete_json():
    (answer,) = decoded(answer_of(Grammar.json_schema({"const": {"a": 1}}))[0])
    assert json.loads(answer.text) == {"a": 1} and answer.text[-1] == "}" and answer.finish == "stop"


def test_grammars_are_embedded_in_others():
    json_part, regex_part, lark_part = (
        GRAMMAR.symbol,
        Grammar.regex("[a/]+").symbol,
        Grammar.lark('start: "x" | "y"').symbol,
    )
    grammar = Grammar.lark(f'start: "<" part ">"\npart: {json_part} | {regex_part} | {lark_part}')
    compile_ = compiled(grammar, tokenizer())
    for text, fits in (("<a/a>", True), ("<y>", True), ('<{"kind": 3, "ok": true,', True), ("<z>", False)):
        tokens = tokenizer()(text).input_ids
        assert (compile_.matcher(ends()).allowed(tokens) == len(tokens)) == fits


def test_a_grammar_is_compiled_once_for_a_tokenizer():
    assert compiled(Grammar.json_schema(dict(SCHEMA)), tokenizer()) is compiled(GRAMMAR, tokenizer())
    assert compiled(GRAMMAR, byte_chats()) is not compiled(GRAMMAR, tokenizer())


@pytest.mark.parametrize("make", [byte_level, word_tokenizer])
def test_tokenizers_that_have_no_end_or_are_of_words_serve_too(make):
    own = make()
    letter = "a" if make is byte_level else "w7"
    token = own.convert_tokens_to_ids(letter)
    matcher = compiled(Grammar.regex(f"({letter})+"), own).matcher(())
    assert allowed_tokens(matcher, 300) == {token} and matcher.take(token) and not matcher.complete


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.json_schema({"a": {1, 2}}), "the schema is no JSON"),
        (lambda: Grammar.json_schema({"a": float("nan")}), "the schema is no JSON"),
        (lambda: Grammar.json_schema([1]), "a JSON schema is a dict"),
        (lambda: Grammar.regex(""), "a grammar's source is a text"),
        (lambda: Grammar.regex("a" * 300_000), "at most 262,144 characters"),
        (lambda: Grammar.regex("\ud800"), "half a character"),
    ],
)
def test_sources_that_are_none_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_calls_without_what_a_grammar_needs_are_refused():
    with attach() as sieve:
        prompt = ids("Say it: ")[0]
        with pytest.raises(InputError, match=r"takes a kvsieve\.Grammar, such as .*got \{'type'"):
            sieve.generate(prompt, grammar={"type": "object"})
        with pytest.raises(UnsupportedOptionError, match=r"num_beams=.*beams change places"):
            sieve.generate(prompt, grammar=GRAMMAR, num_beams=2)
        with pytest.raises(InputError, match="needs an end token"):
            sieve.generate(prompt, grammar=GRAMMAR, eos_token_id=[])
    with kvsieve.attach(model(), kvsieve.Plan()) as sieve, pytest.raises(InputError, match="needs the tokenizer"):
        sieve.generate(prompt, grammar=GRAMMAR)


def test_a_missing_package_is_named(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **more):
        if name.partition(".")[0] == "llguidance":
            raise ImportError("No module named 'llguidance'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InputError, match=r"pip install 'kvsieve\[grammar\]'"):
        compiled(Grammar.regex("never compiled"), tokenizer())
