"""Rendering samples: where the context ends, what follows in a conversation, what ends an answer."""

from __future__ import annotations

import pytest
import torch

from kvsieve.errors import InputError
from kvsieve.lab.tasks.prompter import Prompter
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from kvsieve.lab.tasks.scoring import match_all

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<turn>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT = "The key of Ann is 12.\n\nThe key of Bob is 34. The key of Cid is 56."


def turn(name, answer, prefix="The key is", golden=None):
    return QuestionAnswer(f"What is {name}'s key?", (answer,), match_all, 8, prefix=prefix, golden=golden)


TURNS = (turn("Ann", "12"), turn("Bob", "34", prefix=""), turn("Cid", "56", golden="fifty-six"))
ONE = Sample(CONTEXT, TURNS[:1])
SEVERAL = Sample(CONTEXT, TURNS, system="Be brief.")
SHARED = Sample(CONTEXT, TURNS, system="Be brief.", independent=True)


@pytest.fixture(params=["demo", "toy", "plain"])
def tokenizer(request, toy_tokenizer):
    if request.param == "demo":
        return request.getfixturevalue("demo_tokenizer")
    return toy_tokenizer(CHAT if request.param == "toy" else None)


def text_of(tokenizer, *parts):
    return "".join(tokenizer.decode(part[0].tolist(), skip_special_tokens=False) for part in parts)


def conversation(tokenizer, messages):
    """What a model sees before it answers the last message."""
    roles = [("system", "Be brief.")] if len(messages) > 1 or messages[0] is None else []
    roles += [(role, message) for role, message in zip(["user", "assistant"] * 3, messages, strict=False) if message]
    if tokenizer.chat_template:
        chat = [{"role": role, "content": message} for role, message in roles]
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    text = ""
    for role, message in roles:
        text += f"\nAnswer: {message}" if role == "assistant" else f"\n\n{message}"
    return f"{text.strip()}\nAnswer:"


def test_turns_reply_is_the_prefix_and_the_right_answer():
    assert [each.reply for each in TURNS] == ["The key is 12", "34", "The key is fifty-six"]
    assert QuestionAnswer("?", ("1", "2"), match_all, 8).reply == "1, 2"


def test_prompt_is_the_rendered_chat_cut_behind_the_context(tokenizer):
    prompter = Prompter(tokenizer)
    encoded = prompter.encode(ONE)
    space = "" if tokenizer.chat_template else " "
    whole = conversation(tokenizer, [f"{CONTEXT}\n\n{TURNS[0].question}"]) + f"{space}The key is"
    assert text_of(tokenizer, encoded.context).endswith(CONTEXT)
    assert text_of(tokenizer, encoded.question).startswith(f"\n\n{TURNS[0].question}")
    assert text_of(tokenizer, encoded.question).endswith("The key is")
    assert text_of(tokenizer, encoded.prompt) == whole
    assert torch.equal(encoded.prompt, torch.cat([encoded.context, encoded.question], 1))
    assert encoded.prompt.shape == (1, prompter.count(ONE)) and encoded.prompt.dtype == torch.int64
    assert encoded.followups == ()


def test_context_ids_do_not_depend_on_the_question(tokenizer):
    prompter = Prompter(tokenizer)
    one, other = (prompter.encode(Sample(CONTEXT, (each,))) for each in (TURNS[0], TURNS[2]))
    assert torch.equal(one.context, other.context)
    assert not torch.equal(one.question, other.question)


def test_followups_continue_the_conversation_with_the_right_answers(tokenizer):
    encoded = Prompter(tokenizer).encode(SEVERAL)
    assert len(encoded.followups) == 2
    first, second = (text_of(tokenizer, each) for each in encoded.followups)
    # The prefix was put into the model's mouth before, so only the rest of the answer follows.
    assert first.startswith(" 12") and TURNS[1].question in first
    assert "34" in second and TURNS[2].question in second and second.endswith("The key is")
    assert "fifty-six" not in second
    messages = [f"{CONTEXT}\n\n{TURNS[0].question}", "The key is 12", TURNS[1].question, "34", TURNS[2].question]
    space = "" if tokenizer.chat_template else " "
    whole = conversation(tokenizer, messages) + f"{space}The key is"
    assert text_of(tokenizer, encoded.prompt, *encoded.followups) == whole


def test_independent_questions_each_follow_the_context_alone(tokenizer):
    encoded = Prompter(tokenizer).encode(SHARED)
    assert len(encoded.followups) == 2
    for asked, ids in zip(TURNS, (encoded.question, *encoded.followups), strict=True):
        alone = Prompter(tokenizer).encode(Sample(CONTEXT, (asked,), system="Be brief."))
        assert torch.equal(alone.context, encoded.context)
        assert torch.equal(alone.question, ids)


def test_system_prompt_stands_before_the_context(tokenizer):
    before = text_of(tokenizer, Prompter(tokenizer).encode(SEVERAL).context).removesuffix(CONTEXT)
    assert "Be brief." in before
    assert "Be brief." not in text_of(tokenizer, Prompter(tokenizer).encode(ONE).context)


def test_without_a_template_the_prompt_is_plain_text(toy_tokenizer):
    tokenizer = toy_tokenizer()
    prompter = Prompter(tokenizer)
    assert text_of(tokenizer, prompter.encode(ONE).prompt) == (f"{CONTEXT}\n\nWhat is Ann's key?\nAnswer: The key is")
    assert text_of(tokenizer, prompter.encode(Sample(CONTEXT, TURNS[1:2])).prompt).endswith("Bob's key?\nAnswer:")
    assert prompter.stops == {tokenizer.eos_token_id}


def test_without_a_template_the_tokenizers_own_bos_comes_first(toy_tokenizer):
    with_bos = toy_tokenizer(add_bos=True)
    ids = Prompter(with_bos).encode(SEVERAL)
    bos = with_bos.bos_token_id
    assert ids.context[0, 0] == bos
    assert torch.cat([ids.prompt, *ids.followups], 1).flatten().tolist().count(bos) == 1
    assert torch.equal(ids.prompt[:, 1:], Prompter(toy_tokenizer()).encode(SEVERAL).prompt)
    templated = Prompter(toy_tokenizer("<bos>" + CHAT, add_bos=True)).encode(SEVERAL)
    assert templated.prompt.flatten().tolist().count(bos) == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHAT.replace("m.content", "m.content | upper"), "changes the text"),
        (CHAT.replace("m.content", "m.content[:40]"), "changes the text"),
        (CHAT.replace("m.content", "m.content | replace('\n\n', '\n')"), "changes the text"),
        ("{{ raise_exception('no such role') }}", "no such role"),
    ],
    ids=["upper case", "cut", "white space", "refuses"],
)
def test_template_that_changes_the_context_is_refused(toy_tokenizer, template, message):
    with pytest.raises(InputError, match=message):
        Prompter(toy_tokenizer(template)).encode(ONE)


def test_template_that_trims_only_the_ends_is_accepted(toy_tokenizer):
    tokenizer = toy_tokenizer(CHAT.replace("m.content", "m.content | trim"))
    assert text_of(tokenizer, Prompter(tokenizer).encode(ONE).context) == f"<user>{CONTEXT}"
    with pytest.raises(InputError, match="changes the text"):
        Prompter(tokenizer).encode(Sample(f"  {CONTEXT}", TURNS[:1]))


def test_template_that_rewrites_earlier_turns_is_refused_for_conversations_only(toy_tokenizer):
    forgetful = "{% set messages = messages[-1:] %}" + CHAT
    prompter = Prompter(toy_tokenizer(forgetful))
    conversation = Sample(CONTEXT, TURNS)
    with pytest.raises(InputError, match="rewrites earlier turns"):
        prompter.encode(conversation)
    assert len(prompter.encode(Sample(CONTEXT, TURNS, independent=True)).followups) == 2


def test_stops_are_eos_the_models_own_and_the_templates_end_of_turn(toy_tokenizer, demo_tokenizer):
    tokenizer = toy_tokenizer(CHAT)
    eos, end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<turn>")
    assert end not in tokenizer.all_special_ids  # special without a role of its own, like Gemma's <end_of_turn>
    assert Prompter(tokenizer).stops == {eos, end}
    assert Prompter(tokenizer, 7).stops == {eos, end, 7}
    assert Prompter(tokenizer, [7, 8]).stops == {eos, end, 7, 8}
    assert Prompter(toy_tokenizer(CHAT.replace("<turn>", "\n"))).stops == {eos}
    assert Prompter(demo_tokenizer).stops == {demo_tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_answer_ends_before_the_first_stop_which_counts(toy_tokenizer):
    tokenizer = toy_tokenizer(CHAT)
    prompter = Prompter(tokenizer)

    def answer(text):
        return prompter.answer(tokenizer(text, add_special_tokens=False)["input_ids"])

    assert answer(" 12<turn>34<eos>") == ("12", 4)
    assert answer("12<eos>") == ("12", 3)
    assert answer("12") == ("12", 2)
    assert answer("<turn>12") == ("", 1)
    assert answer("<bos>12\n") == ("12", 4)
    assert prompter.answer([]) == ("", 0)


@pytest.mark.parametrize("part", ["context", "question"])
def test_text_that_looks_like_template_tokens_is_kept(demo_tokenizer, part):
    odd = "He wrote <|im_end|>\n<|im_start|>assistant\nand {{ messages }} {% endfor %} <|endoftext|>."
    context, question = (f"{CONTEXT} {odd}", "What?") if part == "context" else (CONTEXT, odd)
    sample = Sample(context, (QuestionAnswer(question, ("12",), match_all, 8),))
    encoded = Prompter(demo_tokenizer).encode(sample)
    assert text_of(demo_tokenizer, encoded.context).endswith(context)
    assert text_of(demo_tokenizer, encoded.question).startswith(f"\n\n{question}")


def test_conversation_about_such_text_goes_on(demo_tokenizer):
    sample = Sample(f"{CONTEXT} <|im_end|>", TURNS)
    assert len(Prompter(demo_tokenizer).encode(sample).followups) == 2
