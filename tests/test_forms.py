"""Chats reach a template in the form that it takes: parts or texts, arguments of calls as objects or as text."""

from __future__ import annotations

import re

import pytest

import call_templates as templates
from kvsieve.errors import InputError
from kvsieve.planning.forms import ParsedArguments, forms
from kvsieve.planning.turns import render, token_ids
from toy_words import word_tokenizer

TEXT = '{"x":[1,null],"y":"é"}'
WRITTEN = '{"x": [1, null], "y": "é"}'


def rendered(template: str, messages, **how) -> str:
    tokenizer = word_tokenizer(template)
    return render(tokenizer, messages, ask=False, **how)


def called(arguments, call_id="abcdefghi"):
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


OBJECT = ParsedArguments({"x": [1, None], "y": "é"}, TEXT)
CALLS = {
    "qwen": (templates.QWEN, f'"arguments": {WRITTEN}}}'),
    "llama": (templates.LLAMA, f'"parameters": {WRITTEN}}}'),
    "mistral": (templates.MISTRAL, f'"arguments": {WRITTEN}, "id": "abcdefghi"'),
    "deepseek": (templates.DEEPSEEK, f"json\n{TEXT}\n"),
    "kimi": (templates.KIMI, f"abcdefghi{WRITTEN}"),
    "prints": (templates.PRINTS, f"f({TEXT})"),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_an_object_or_text_as_the_template_takes_them(name):
    template, wanted = CALLS[name]
    assert wanted in rendered(template, called(OBJECT))
    assert wanted in rendered(template, called(OBJECT), parse_special=True)
    # None at all are an empty object in either form.
    empty = rendered(template, called(ParsedArguments({}, "{}")))
    assert "{}" in empty and '"{}"' not in empty and "None" not in empty


def test_ids_of_calls_are_shortened_where_the_template_wants_it():
    """Calls and their answers stay together, and calls apart."""
    given = [*called(OBJECT, "call_abcdefghi")[:1], *called(OBJECT, "call_1")[1:], *called(OBJECT, "call_2")[1:]]
    text = rendered(templates.MISTRAL, given)
    ids = re.findall(r'"id": "(\w+)"', text)
    assert [len(each) for each in ids] == [9, 9] and ids[0] != ids[1] and "call_" not in text
    one, *_ = re.findall(r'"id": "(\w+)"', rendered(templates.MISTRAL, called(OBJECT, "call_1")))
    assert one == ids[0]
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "w5"}
    *_, form = forms([*called(OBJECT, "call_1"), answer])
    assert form[1]["tool_calls"][0]["id"] == form[2]["tool_call_id"] == one
    # Templates that take any id get the one that was given.
    assert "call_1" in rendered(templates.KIMI, called(OBJECT, "call_1"))


def test_a_template_that_refuses_says_so():
    with pytest.raises(InputError, match="refuses the prompt: no"):
        rendered("{{ raise_exception('no') }}", called(OBJECT, "call_1"))


def test_what_a_user_says_is_not_taken_for_python():
    messages = [{"role": "user", "content": str(dict(OBJECT))}, *called(OBJECT)[1:]]
    assert f'"arguments": {WRITTEN}' in rendered(templates.QWEN, messages)


PARTED = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("w1 w2 ", "w3")]}]


@pytest.mark.parametrize(
    ("name", "parts", "text"),
    [
        ("TEXTS", "<user>w1 w2 \nw3", "<user>w5"),
        ("ADDS", "<user>w1 w2 \nw3", "<user>w5"),
        ("NONE", "<user>w1 w2 \nw3", "<user>w5"),
        ("PARTS", "<user>w1 w2 ;w3;", "<user>w5;"),
        ("BOTH", "<user>w1 w2 ;w3;", "<user>w5"),
    ],
)
def test_text_comes_in_parts_or_whole_as_the_template_takes_it(name, parts, text):
    template = getattr(templates, name)
    assert rendered(template, PARTED) == parts
    assert rendered(template, [{"role": "user", "content": "w5"}]) == text


def test_control_tokens_are_text_in_every_form():
    tokenizer = word_tokenizer(templates.PARTS)
    for content in ("w1 [EOS]", [{"type": "text", "text": "w1"}, {"type": "text", "text": "[EOS]"}]):
        text = render(tokenizer, [{"role": "user", "content": content}])
        assert "[EOS]" not in text and "w1" in text
    tokenizer.chat_template = templates.DEEPSEEK
    text = render(tokenizer, called(ParsedArguments({"[EOS]": "[EOS]"}, '{"[EOS]": "[EOS]"}')))
    assert "[EOS]" not in text and tokenizer.eos_token_id not in token_ids(tokenizer, text)


def test_a_template_that_drops_what_a_user_says_is_left_to_it():
    assert rendered("{% for m in messages %}<{{ m.role }}>{% endfor %}", PARTED) == "<user>"
