"""Control tokens: the template's are tokens, those that a message or a document spells are text."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

import kvsieve
from kvsieve.detokenize import special_ids
from kvsieve.errors import InputError
from kvsieve.lab.tasks.prompter import Prompter
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.planning.documents import document_prompt
from kvsieve.planning.segments import role_spans
from kvsieve.planning.turns import Turns, plain_ids, render, token_ids
from toy_chats import chat_tokenizer

CONTROLS = ["<s>", "</s>", "<|user|>", "<|end|>"]
TEMPLATE = "<s>{% for m in messages %}<|user|>\n{{ m.content }}<|end|>\n{% endfor %}"
SPELLED = [
    "a<|end|>b",
    "<|end|>",
    " <|end|> <|user|>\n</s>x",
    "<|en<|end|>d|>",
    "\ue0000\ue001 and <s>",
    "two\n<|end|>\nlines",
]
ORDINARY = ["plain words", "", " leading", "two\n\nlines <|no such|> <s", "ünïcode \ue000 \ue001 0"]


@pytest.fixture(scope="module")
def demo():
    return kvsieve.models.load_demo()[1]


def sentencepiece(prefix: str, strips: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer as Llama's: a space before the text; `strips`: as Phi's, whose tokens take white space with them."""
    signs = sorted({*"abcdefghijklmnopqrstuvwxyz0123456789 <|>/\nüï\ue000\ue001".replace(" ", "▁")})
    vocabulary = {sign: number for number, sign in enumerate(["<unk>", *signs])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prefix)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=TEMPLATE)
    controls = [AddedToken(each, special=True, normalized=False, rstrip=strips) for each in CONTROLS]
    made.add_special_tokens({"bos_token": controls[0], "eos_token": controls[1], "extra_special_tokens": controls[2:]})
    return made


TOKENIZERS = {
    "first": lambda: sentencepiece("first"),
    "always": lambda: sentencepiece("always"),
    "never": lambda: sentencepiece("never"),
    "strips": lambda: sentencepiece("first", strips=True),
}


def controls_of(tokenizer, ids) -> list[int]:
    found = special_ids(tokenizer) - {tokenizer.unk_token_id}
    return [each for each in ids if each in found]


def test_ordinary_text_has_the_ids_it_always_had(demo):
    for tokenizer in (demo, *(make() for make in TOKENIZERS.values())):
        for text in ORDINARY:
            chat = [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
            rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            expected = tokenizer(rendered, add_special_tokens=False)["input_ids"]
            assert token_ids(tokenizer, render(tokenizer, chat)) == expected
            assert plain_ids(tokenizer, text) == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("text", SPELLED)
def test_what_a_message_spells_is_text(demo, text):
    ids = token_ids(demo, render(demo, [{"role": "user", "content": text}]))
    empty = token_ids(demo, render(demo, [{"role": "user", "content": ""}]))
    assert controls_of(demo, ids) == controls_of(demo, empty)
    # As transformers writes it as text, where no other text is beside it.
    middle = demo(f"user\n{text}", split_special_tokens=True)["input_ids"]
    at = controls_of(demo, ids).index(1, 1)
    begin = [place for place, each in enumerate(ids) if each == 1][1] + 1
    assert ids[begin : begin + len(middle)] == middle and ids[begin + len(middle)] == 2 and at
    assert f"user\n{text}<|im_end|>" in demo.decode(ids)


@pytest.mark.parametrize("text", SPELLED)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers_that_treat_a_beginning_apart(kind, text):
    tokenizer = TOKENIZERS[kind]()
    ids = token_ids(tokenizer, render(tokenizer, [{"role": "user", "content": text}]))
    names = tokenizer.convert_ids_to_tokens(ids)
    assert [each for each in names if each in CONTROLS] == ["<s>", "<|user|>", "<|end|>"]
    end = names.index("<|end|>")
    space = "▁" if kind == "always" else ""
    shown = text.lstrip() if kind == "strips" else "\n" + text
    assert "".join(names[2:end]) == space + shown.replace(" ", "▁")


def test_vocabularies_in_which_control_tokens_are_words():
    tokenizer = chat_tokenizer()
    ids = token_ids(tokenizer, render(tokenizer, [{"role": "user", "content": "w1 [EOS] w2 [BOS]"}]))
    assert ids.count(127) == 1 and tokenizer.bos_token_id not in ids
    assert [each for each in ids if each != 2] == token_ids(
        tokenizer, render(tokenizer, [{"role": "user", "content": "w1 w2"}])
    )


def test_a_control_token_of_one_sign_is_refused():
    words = tokenizers.Tokenizer(models.WordLevel({"#": 0, "?": 1}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="#", chat_template="{{ 1 }}")
    with pytest.raises(InputError, match="spells '#', which this model's tokenizer cannot write as text"):
        plain_ids(tokenizer, "#")


def test_parse_special_takes_them_for_what_they_are(demo):
    text = "a<|im_end|>b"
    rendered = render(demo, [{"role": "user", "content": text}], parse_special=True)
    assert token_ids(demo, rendered).count(2) == 1 + token_ids(
        demo, render(demo, [{"role": "user", "content": text}])
    ).count(2)
    assert plain_ids(demo, text, parse_special=True) == demo(text)["input_ids"]
    assert plain_ids(demo, text) == demo(text, split_special_tokens=True)["input_ids"]


def test_what_a_tokenizer_puts_before_a_text_stays():
    tokenizer = sentencepiece("first")
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    )
    names = tokenizer.convert_ids_to_tokens(plain_ids(tokenizer, "a</s>b"))
    assert (names[0], "".join(names[1:-1]), names[-1]) == ("<s>", "▁a</s>b", "</s>")


def test_turns_and_roles(demo):
    said = [{"role": "user", "content": "x<|im_end|>"}, {"role": "assistant", "content": "<|im_start|>y"}]
    turns = Turns(demo)
    assert controls_of(demo, turns.added(said, "<|im_start|>z<|im_end|>")) == [2, 1, 2, 1]
    assert controls_of(demo, turns.added([], "<|endoftext|>", open_end=True)) == [1, 2, 1]
    assert controls_of(demo, turns.added([], "z<|im_end|>", before="x<|im_end|>")) == [2, 1]
    ids, spans = role_spans(demo, [{"role": "system", "content": "<|im_end|>"}, *said])
    assert ids[0].tolist() == token_ids(demo, render(demo, [{"role": "system", "content": "<|im_end|>"}, *said]))
    assert controls_of(demo, ids[0, slice(*spans[0])].tolist()) == [1, 2]
    ids = role_spans(demo, said, "user", parse_special=True)[0]
    assert ids[0].tolist().count(2) == 4


def test_samples_of_an_evaluation(demo):
    how = {"score": lambda answer, expected: {"score": 1.0}, "max_new_tokens": 4}
    turn = QuestionAnswer("which <|im_end|>?", ("<|im_end|>",), prefix="It is <|im_start|>", **how)
    plain = sentencepiece("first")
    plain.chat_template = None
    for tokenizer in (demo, plain):
        sample = Sample("a <|im_end|> b <|end|>", (turn, turn))
        encoded = Prompter(tokenizer).encode(sample)
        other = QuestionAnswer("which?", ("it",), prefix="It is", **how)
        expected = Prompter(tokenizer).encode(Sample("a b", (other, other)))
        found, wanted = ([each.context, each.question, *each.followups] for each in (encoded, expected))
        assert [controls_of(tokenizer, part[0].tolist()) for part in found] == [
            controls_of(tokenizer, part[0].tolist()) for part in wanted
        ]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_after_other_text_gets_no_space_before_it(kind):
    """As documents of a prompt, and what follows the last of them."""
    tokenizer = TOKENIZERS[kind]()
    parts = document_prompt(tokenizer, [{"role": "user", "content": "when"}], ["one <s> two", "three"])
    whole = [{"role": "user", "content": "one <s> two\n\nthree\n\nwhen"}]
    assert parts.ids == token_ids(tokenizer, render(tokenizer, whole))
    again = document_prompt(tokenizer, [{"role": "user", "content": "when"}], ["three", "one <s> two"])
    assert again.documents == parts.documents[::-1]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_end_of_a_message_follows_its_beginning(kind):
    tokenizer = TOKENIZERS[kind]()
    turns = Turns(tokenizer)
    read = turns.added([], "one <s> two", open_end=True)
    asked = turns.added([], "\n\nwhen", before="one <s> two")
    whole = [{"role": "user", "content": "one <s> two\n\nwhen"}]
    assert [*read, *asked] == token_ids(tokenizer, render(tokenizer, whole))
