"""Forms of calls and reasoning: found in templates, parsed the same whole and in pieces, forced by their grammars."""

from __future__ import annotations

import json
import random

import pytest

import call_templates as templates
from kvsieve.errors import InputError
from kvsieve.planning.turns import render
from kvsieve.serve.parsers.deepseek import DeepSeekCalls
from kvsieve.serve.parsers.form import AnswerForm
from kvsieve.serve.parsers.found import TemplateForms, forms_of
from kvsieve.serve.parsers.gemma import FUNCTION_GEMMA, GEMMA_4
from kvsieve.serve.parsers.harmony import HarmonyCalls
from kvsieve.serve.parsers.kimi import KimiCalls
from kvsieve.serve.parsers.mistral import MistralCalls
from kvsieve.serve.parsers.objects import BareCalls, MarkedCalls
from kvsieve.serve.parsers.reasoning import MARKS, MarkedReasoning
from kvsieve.serve.parsers.tagged import GLM, QWEN_CODER, TaggedCalls, schemas_of
from kvsieve.serve.parsers.typed import kinds_of, typed
from kvsieve.serve.pieces import CallArguments, CallBegin, Reasoning, Text, WholeAnswer
from toy_bytes import byte_level
from toy_words import word_tokenizer


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


NUMBER = {"type": "integer"}
STRING = {"type": "string"}
TOOLS = [
    tool("add", a=NUMBER, b=NUMBER),
    tool("write", path=STRING, text=STRING, options={"type": "object"}, level={"type": ["number", "null"]}),
    {"type": "function", "function": {"name": "now"}},
]
NAMES = frozenset(["add", "write", "now"])


def written(value):
    return json.dumps(value, ensure_ascii=False)


def plain(value):
    return value if isinstance(value, str) else written(value)


def an_object(name, values, key="arguments"):
    return f'{{"name": "{name}", "{key}": {written(values)}}}'


def coder(name, values):
    inside = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def glm(name, values):
    pairs = values.items()
    inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in pairs)
    return f"<tool_call>{name}\n{inside}</tool_call>"


def gemma(value, quote):
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(part, quote)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(part, quote) for part in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else written(value)


def fenced(name, values):
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{written(values)}\n```<｜tool▁call▁end｜>"


def kimi(number, name, values):
    head = f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
    return f"{head}{written(values)}<|tool_call_end|>"


def harmony(said, calls):
    header = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
    messages = [f"<|channel|>commentary<|message|>{said}<|end|>"] if said else []
    messages += [header.format(name) + written(values) + "<|call|>" for name, values in calls]
    # The token that ends the answer has no text.
    return "<|start|>assistant".join(messages).removesuffix("<|call|>")


# Templates, their forms, and an answer with text and calls as the model writes it.
FORMS = {
    "hermes": (
        templates.QWEN,
        MarkedCalls(),
        lambda said, calls: said + "\n".join(f"<tool_call>\n{an_object(*call)}\n</tool_call>" for call in calls),
    ),
    "llama": (
        templates.LLAMA,
        BareCalls(NAMES),
        lambda said, calls: "; ".join(an_object(*call, key="parameters") for call in calls),
    ),
    "coder": (
        templates.QWEN_CODER,
        TaggedCalls(QWEN_CODER, schemas_of(TOOLS)),
        lambda said, calls: said + "\n".join(coder(*call) for call in calls),
    ),
    "glm": (
        templates.GLM,
        TaggedCalls(GLM, schemas_of(TOOLS)),
        lambda said, calls: said + "\n".join(glm(*call) for call in calls),
    ),
    "mistral": (
        templates.MISTRAL,
        MistralCalls(),
        lambda said, calls: f"{said}[TOOL_CALLS][{', '.join(an_object(*call) for call in calls)}]",
    ),
    "mistral-args": (
        templates.MISTRAL_ARGS,
        MistralCalls(listed=False),
        lambda said, calls: said + "".join(f"[TOOL_CALLS]{name}[ARGS]{written(values)}" for name, values in calls),
    ),
    "deepseek-r1": (
        templates.DEEPSEEK_R1,
        DeepSeekCalls(fenced=True),
        lambda said, calls: (
            f"{said}<｜tool▁calls▁begin｜>" + "\n".join(fenced(*call) for call in calls) + "<｜tool▁calls▁end｜>"
        ),
    ),
    "deepseek-v3.1": (
        templates.DEEPSEEK_V31,
        DeepSeekCalls(),
        lambda said, calls: (
            f"{said}<｜tool▁calls▁begin｜>"
            + "".join(
                f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{written(of)}<｜tool▁call▁end｜>" for name, of in calls
            )
            + "<｜tool▁calls▁end｜>"
        ),
    ),
    "kimi": (
        templates.KIMI_K2,
        KimiCalls(),
        lambda said, calls: (
            f"{said}<|tool_calls_section_begin|>"
            + "".join(kimi(number, *call) for number, call in enumerate(calls))
            + "<|tool_calls_section_end|>"
        ),
    ),
    "harmony": (templates.HARMONY, HarmonyCalls(NAMES), harmony),
    "function-gemma": (
        templates.FUNCTION_GEMMA,
        FUNCTION_GEMMA,
        lambda said, calls: (
            said
            + "".join(
                f"<start_function_call>call:{name}{gemma(of, '<escape>')}<end_function_call>" for name, of in calls
            )
        ),
    ),
    "gemma-4": (
        templates.GEMMA_4,
        GEMMA_4,
        lambda said, calls: (
            said + "".join(f"<|tool_call>call:{name}{gemma(of, GEMMA_4.quote)}<tool_call|>" for name, of in calls)
        ),
    ),
}
CALLS = {
    "one": ("", [("add", {"a": 2, "b": -3})]),
    "behind a text": ("Let me see. ", [("add", {"a": 2, "b": 3})]),
    "several": ("", [("add", {"a": 1}), ("write", {"path": "x"}), ("now", {})]),
    "without arguments": ("", [("now", {})]),
    "signs": ("", [("write", {"path": 'ü "x" \\ 🙂', "text": "a\n  b\t{}[],:\n"})]),
    "nested": ("", [("write", {"path": "p", "options": {"deep": [1, {"x": None, "y": [True, 2.5]}], "s": "t"}})]),
    "marks within": ("", [("write", {"path": "<tool_call>", "text": "[TOOL_CALLS]}</tool> ``` call:f{"})]),
    "types": ("", [("write", {"path": "5", "text": "true", "level": None})]),
}


def parsed(form, text, size, **how):
    parser = AnswerForm(form, **how).parser()
    pieces = [parser.add(text[at : at + size]) for at in range(0, len(text), size)]
    return [*pieces, parser.add("", last=True)]


def whole(pieces):
    answer = WholeAnswer(piece for some in pieces for piece in some)
    return answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("name", FORMS)
def test_calls_are_parsed_the_same_whole_and_in_pieces(name, what):
    _, form, write = FORMS[name]
    said, calls = CALLS[what]
    text = write(said, calls)
    found, reasoning, got = whole([AnswerForm(form).parser().add(text, last=True)])
    # Llama's calls are the whole answer.
    assert found.strip() == ("" if name == "llama" else said.strip()) and not reasoning
    assert [(name, json.loads(arguments)) for name, arguments in got] == calls
    for size in (1, 2, 3, 7):
        assert whole(parsed(form, text, size)) == (found, reasoning, got)


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_cut_off_keeps_what_there_was(name):
    _, form, write = FORMS[name]
    text = write("Well: ", [("add", {"a": 2, "b": 3}), ("write", {"path": "a\nb", "options": {"c": [1]}})])
    _, _, complete = whole(parsed(form, text, len(text)))
    most = []
    for end in range(len(text)):
        _, _, calls = found = whole(parsed(form, text[:end], len(text)))
        assert found == whole(parsed(form, text[:end], 1))
        assert [name for name, _ in calls] == [name for name, _ in complete][: len(calls)]
        for (_, part), (_, arguments) in zip(calls, complete, strict=False):
            assert arguments.startswith(part)
        # Longer answers never have fewer calls.
        assert len(calls) >= len(most)
        most = calls


@pytest.mark.parametrize("name", FORMS)
def test_names_and_arguments_come_before_the_call_has_ended(name):
    _, form, write = FORMS[name]
    text = write("", [("write", {"path": "a long name of a file", "text": "and a long text in it, of many words"})])
    pieces = parsed(form, text, 4)
    begun = next(at for at, some in enumerate(pieces) if any(isinstance(piece, CallBegin) for piece in some))
    parts = [at for at, some in enumerate(pieces) if any(isinstance(piece, CallArguments) for piece in some)]
    assert 4 * begun < text.index("file") and len(parts) > 10 and parts[0] < len(pieces) // 2


TEXTS = [
    "No calls.",
    " \n spaces \n\n within, and behind \n",
    "a < b, [TOO], <tool, <|x|>, {",
    "<tool_call>\n hello world </tool_call>",
    "[TOOL_CALLS] nothing",
    "<start_function_call>nothing",
    "<|tool_call>nothing else",
    "<｜tool▁calls▁begin｜>nothing",
    "<|tool_calls_section_begin|> nothing",
    '{"no": "call"}',
    '{"name": "nobody", "arguments": {}}',
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", FORMS)
def test_text_that_is_no_call_stays_text(name, text):
    _, form, _ = FORMS[name]
    for size in (1, 2, 3, 7, len(text)):
        assert whole(parsed(form, text, size)) == (text, "", [])


def test_text_comes_at_once():
    for name, (_, form, _) in FORMS.items():
        if name == "llama":
            continue
        parser = AnswerForm(form).parser()
        pieces = [parser.add(piece) for piece in ("Hello", " there", ", you", " <")]
        assert pieces[:3] == [[Text("Hello")], [Text(" there")], [Text(", you")]], name
        held = [*pieces[3], *parser.add(" b", last=True)]
        assert "".join(piece.text for piece in held) == " < b", name


@pytest.mark.parametrize("name", FORMS)
def test_one_call_alone(name):
    _, form, write = FORMS[name]
    text = write("", [("add", {"a": 1}), ("now", {})])
    for size in (1, len(text)):
        assert [name for name, _ in whole(parsed(form, text, size, single=True))[2]] == ["add"]


@pytest.mark.parametrize("name", FORMS)
def test_a_mark_at_the_end_is_no_text(name):
    _, form, write = FORMS[name]
    mark = {"llama": "<|python_tag|>", "harmony": "<|channel|>"}.get(name) or write("", [("add", {})])
    mark = next((part for part in form.controls if mark.startswith(part)), mark)
    for size in (1, len(mark)):
        assert whole(parsed(form, mark, size)) == ("", "", [])


BROKEN = {
    # A name, then arguments that are no JSON: passed on as they are, up to the mark behind them.
    '<tool_call>{"name": "f", "arguments": {"a": 1,, }}</tool_call>.': (".", [("f", '{"a": 1,, }')]),
    '<tool_call>{"name": "f", "arguments": {"a": {"b": 1}</tool_call>.': (".", [("f", '{"a": {"b": 1}')]),
    '<tool_call>{"name": "f", "arguments": {}} and so on': ("and so on", [("f", "{}")]),
    '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>': ("", [("f", '{"a": 1}')]),
}


@pytest.mark.parametrize("text", BROKEN)
def test_broken_arguments_behind_a_name_are_passed_on(text):
    for size in (1, 2, 3, len(text)):
        found, _, calls = whole(parsed(MarkedCalls(), text, size))
        assert (found, calls) == BROKEN[text]


def test_ids_that_the_model_writes_stay():
    text = FORMS["kimi"][2]("", [("add", {"a": 1}), ("now", {})])
    answer = WholeAnswer(piece for some in parsed(KimiCalls(), text, 5) for piece in some)
    assert [call.id for call in answer.calls] == ["functions.add:0", "functions.now:1"]
    text = "[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{}"
    answer = WholeAnswer(piece for some in parsed(MistralCalls(), text, 5) for piece in some)
    assert [(call.id, call.name, call.arguments) for call in answer.calls] == [("abcdefghi", "add", "{}")]


def test_names_with_spaces_and_empty_sections():
    call = '<|tool_call>call:f{a b :{c d:1},"e":[x y]}<tool_call|>'
    ((_, arguments),) = whole(parsed(GEMMA_4, call, 3))[2]
    assert json.loads(arguments.replace('"x""y"', '"x", "y"')) == {"a b": {"c d": 1}, "e": ["x", "y"]}
    empty = "Well. <|tool_calls_section_begin|><|tool_calls_section_end|>"
    assert whole(parsed(KimiCalls(), empty, 2)) == ("Well. ", "", [])


def test_python_tags_and_lone_tags_are_calls_too():
    call = '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'
    assert whole(parsed(BareCalls(NAMES), call, 3)) == ("", "", [("add", '{"a": 1}')])
    assert whole(parsed(BareCalls(NAMES), f"{call}; {call}", 3))[2] == [("add", '{"a": 1}')] * 2
    assert whole(parsed(BareCalls(NAMES), "<|python_tag|>print(1)", 2)) == ("<|python_tag|>print(1)", "", [])
    behind = f"Let me see. {call}"
    assert whole(parsed(BareCalls(NAMES), behind, 3)) == ("Let me see.", "", [("add", '{"a": 1}')])
    lone = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"
    assert whole(parsed(TaggedCalls(QWEN_CODER), lone, 3))[2] == [("add", '{"a": 1}')]
    close = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert whole(parsed(TaggedCalls(GLM), close, 3))[2] == [("add", '{"a": 1}')]


def test_values_have_the_types_of_their_schemas():
    assert kinds_of({"anyOf": [{"type": "string"}, {"type": "null"}]}) == {"string", "null"}
    assert kinds_of({"enum": ["a", 1]}) == {"string", "integer"} and kinds_of({"$ref": "#/x"}) is None
    assert typed("5", None) == "5" and typed("5", frozenset(["string", "null"])) == '"5"'
    assert typed("True", frozenset(["boolean"])) == "true" and typed("5", frozenset(["number"])) == "5"
    assert typed("NaN", None) == '"NaN"' and typed("null", frozenset(["string", "null"])) == "null"


@pytest.mark.parametrize("name", FORMS)
def test_the_template_tells_the_form(name):
    template, form, _ = FORMS[name]
    assert forms_of(word_tokenizer(template)).answer("", TOOLS).calls == form
    assert forms_of(word_tokenizer(template)).answer("", []).calls == (HarmonyCalls() if name == "harmony" else None)


def test_templates_without_a_form_have_none():
    for template in (templates.NONE, templates.DEEPSEEK, "{% if tools %}{{ raise_exception('no') }}{% endif %}", None):
        assert forms_of(word_tokenizer(template)) == TemplateForms()


REASONED = {
    "<think>\nHm, 2 < 3.\n\nSo.\n</think>\n\nYes.\n": ("Yes.\n", "Hm, 2 < 3.\n\nSo."),
    "\n<think></think>Yes.": ("Yes.", ""),
    "<think>cut off </thi": ("", "cut off </thi"),
    "No <think>reasons</think>": ("No <think>reasons</think>", ""),
    "<thin": ("<thin", ""),
    "": ("", ""),
}


@pytest.mark.parametrize("text", REASONED)
def test_reasoning_is_apart(text):
    form = MARKS[0]
    for size in (1, 2, 3, 7, max(len(text), 1)):
        assert whole(parsed(None, text, size, reasoning=form))[:2] == REASONED[text]
        opened = MarkedReasoning(form.begin, form.end, opened=True)
        if text.startswith("<think>"):
            rest = text.removeprefix("<think>")
            assert whole(parsed(None, rest, size, reasoning=opened))[:2] == REASONED[text]


def test_reasoning_comes_at_once_and_calls_behind_it():
    parser = AnswerForm(MarkedCalls(), MARKS[0]).parser()
    assert parser.add("<think>Let") == [Reasoning("Let")] and parser.add(" me") == [Reasoning(" me")]
    pieces = parser.add('.</think>\n\n<tool_call>{"name": "add", "arguments": {', last=True)
    assert pieces[0] == Reasoning(".") and pieces[1].name == "add" and pieces[2:] == [CallArguments(0, "{")]


def test_channels():
    text = (
        "<|channel|>analysis<|message|>We add.<|end|><|start|>assistant<|channel|>commentary<|message|>Adding. <|end|>"
        "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{}<|call|><|start|>assistant"
        "<|channel|>analysis to=python<|message|>1+1<|end|><|start|>assistant<|channel|>final<|message|>It is 2 <|x"
    )
    for size in (1, 2, 3, 7, len(text)):
        found = whole(parsed(HarmonyCalls(NAMES), text, size))
        assert found == ("Adding. It is 2 <|x", "We add.1+1", [("add", "{}")])
        assert whole(parsed(HarmonyCalls(), "Plain <|text", size)) == ("Plain <|text", "", [])
    cut = "<|channel|>final<|message|>Yes.<|end|><|start|>assis"
    assert whole(parsed(HarmonyCalls(), cut, 2)) == ("Yes.", "", [])


OPENED = {
    "R1": (templates.DEEPSEEK_R1, {}, True),
    "V3.1": (templates.DEEPSEEK_V31, {}, None),
    "V3.1, thinking": (templates.DEEPSEEK_V31, {"thinking": True}, True),
    "Qwen 3": (templates.QWEN_3, {}, False),
    "Qwen 3, not thinking": (templates.QWEN_3, {"enable_thinking": False}, None),
    "Gemma 4": (templates.GEMMA_4, {}, None),
    "Gemma 4, thinking": (templates.GEMMA_4, {"enable_thinking": True}, False),
    "harmony": (templates.HARMONY, {}, None),
    "Qwen 2.5": (templates.QWEN, {}, None),
}


@pytest.mark.parametrize("name", OPENED)
def test_the_prompt_tells_whether_reasoning_has_begun(name):
    template, options, opened = OPENED[name]
    tokenizer = word_tokenizer(template)
    prompt = render(tokenizer, [{"role": "user", "content": "w1"}], options=options)
    reasoning = forms_of(tokenizer).answer(prompt, []).reasoning
    assert (None if reasoning is None else reasoning.opened) == opened


def bytes_with(marks, special):
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"eos_token": "<|eos|>"})
    if special is not None:
        tokenizer.add_tokens(list(marks), special_tokens=special)
    return tokenizer


# Marks are spelled by letters, tokens, or control tokens.
SPECIAL = [None, False, True]
FORCED = [tool("add", a=NUMBER, b={"enum": ["x", "yy"]}), tool("now", flag={"type": "boolean"})]


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("name", FORMS)
def test_forced_answers_are_calls(name, special):
    pytest.importorskip("llguidance")
    from kvsieve.hf.generate.grammar import compiled
    from kvsieve.planning.grammars import Grammar

    template, _, write = FORMS[name]
    form = AnswerForm(forms_of(word_tokenizer(template)).answer("", FORCED).calls)
    tokenizer = bytes_with(form.controls, special)
    end = tokenizer.eos_token_id
    added = {word.content: number for number, word in tokenizer.added_tokens_decoder.items()}
    grammar = compiled(Grammar.lark(form.forced_calls(added, FORCED)), tokenizer)
    # What the model writes by itself fits.
    matcher = grammar.matcher([end])
    text = write("", [("add", {"a": 12, "b": "yy"})])
    assert all(matcher.take(token) for token in [*tokenizer(text)["input_ids"], end])
    draw = random.Random(5)
    for _ in range(3):
        matcher = grammar.matcher([end])
        tokens = tokenizer(text[: text.index("add")])["input_ids"]
        assert all(matcher.take(token) for token in tokens)
        while not matcher.complete and len(tokens) < 300:
            order = sorted(range(len(tokenizer)), key=lambda token: (token != end, draw.random()))
            tokens.append(next(token for token in order if matcher.take(token)))
        answer = tokenizer.decode([token for token in tokens if token != end])
        ((called, arguments),) = whole(parsed(form.calls, answer, 3))[2][:1]
        values = json.loads(arguments)
        assert values.keys() <= ({"a", "b"} if called == "add" else {"flag"})
        assert isinstance(values["a" if called == "add" else "flag"], int) and values.get("b", "x") in ("x", "yy")


@pytest.mark.parametrize("opened", [False, True])
def test_forced_calls_follow_free_reasoning(opened):
    pytest.importorskip("llguidance")
    from kvsieve.hf.generate.grammar import compiled
    from kvsieve.planning.grammars import Grammar

    form = AnswerForm(MarkedCalls(), MarkedReasoning("<think>", "</think>", opened))
    for special in SPECIAL:
        tokenizer = bytes_with(form.controls, special)
        added = {word.content: number for number, word in tokenizer.added_tokens_decoder.items()}
        for source, behind in (
            (form.forced_calls(added, FORCED), FORMS["hermes"][2]("", [("now", {"flag": True})])),
            (form.matching(added, '"yes"', []), "yes"),
        ):
            matcher = compiled(Grammar.lark(source), tokenizer).matcher([tokenizer.eos_token_id])
            text = "" if opened else "<think>"
            for token in tokenizer(f"{text}Anything <at> all.</think>")["input_ids"]:
                assert matcher.take(token)
            # Nothing but the call.
            assert matcher.allowed(tokenizer("Text")["input_ids"]) == 0
            assert all(matcher.take(token) for token in tokenizer(f"\n\n{behind}")["input_ids"])
            assert matcher.take(tokenizer.eos_token_id)


MALFORMED = {
    "properties": {"properties": ["a"]},
    "required": {"properties": {"a": {"type": "string"}}, "required": True},
    "enum": {"properties": {"a": {"type": "string", "enum": 5}}},
}


@pytest.mark.parametrize("what", MALFORMED)
@pytest.mark.parametrize("name", ["qwen coder", "glm", "function gemma", "gemma 4"])
def test_schemas_of_no_kind_are_refused_where_calls_are_forced_and_else_say_nothing(name, what):
    tools = [{"type": "function", "function": {"name": "add", "parameters": MALFORMED[what]}}]
    forms = {"function gemma": FUNCTION_GEMMA, "gemma 4": GEMMA_4}
    form = forms.get(name) or TaggedCalls({"qwen coder": QWEN_CODER, "glm": GLM}[name], schemas_of(tools))
    with pytest.raises(InputError, match=what):
        AnswerForm(form).forced_calls({}, tools)
    parts = {"qwen coder": coder, "glm": glm}.get(name)
    if parts is not None:
        answer = WholeAnswer(form.parser().add(parts("add", {"a": 1}), last=True))
        assert [call.name for call in answer.calls] == ["add"] and "a" in json.loads(answer.calls[0].arguments)
