"""Turns of a chat that are removed, changed, or lose their reasoning go on from the edited cache."""

from __future__ import annotations

import pytest
import torch

import kvsieve
from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.hf.chat.edits import without_reasoning
from toy_chats import chat_tokenizer

PLAIN = {"suppress_tokens": [0, 1, 2], "max_new_tokens": 9}


def words(seed, count=25):
    dice = torch.Generator().manual_seed(seed)
    return " ".join(f"w{number}" for number in torch.randint(0, 80, (count,), generator=dice).tolist())


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


def talk(sieve, tokenizer, turns=3):
    chat = sieve.chat(tokenizer, "w3 w4", **PLAIN)
    for turn in range(turns):
        chat.ask(words(turn))
    return chat


def follows(chat, reference):
    """The next answers of a chat and of one that prefills its messages anew."""
    return chat.ask(words(9)).tokens, reference.ask(words(9)).tokens


@pytest.mark.parametrize("edit", ["remove", "replace"])
@pytest.mark.parametrize("turn", [0, 1, -1])
def test_an_edited_chat_answers_like_one_read_anew(model, tokenizer, edit, turn):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        chat = talk(sieve, tokenizer)
        before = chat.messages
        done = chat.remove(turn, window="all") if edit == "remove" else chat.replace(turn, words(7), window="all")
        at = 1 + 2 * (turn % 3)
        wanted = [*before[:at], *before[at + 2 :]]
        if edit == "replace":
            wanted = [*before[:at], {"role": "user", "content": words(7)}, *before[at + 1 :]]
        assert chat.messages == wanted and len(chat.turns) == (2 if edit == "remove" else 3)
        assert torch.equal(done.ids, chat.ids[:, :-1]) and chat.cache.num_seen == done.ids.shape[1]
        assert done.reused > 0
        anew = sieve.prefill(chat.ids[:, :-1])
        for layer, other in zip(chat.cache.all_layers, anew.all_layers, strict=True):
            torch.testing.assert_close(layer.keys, other.keys, atol=1e-4, rtol=1e-3)
        more = chat.ask(words(9))
        whole = sieve.generate(chat.ids[:, : -len(more.tokens)], do_sample=False, pad_token_id=0, **PLAIN)
        assert whole.sequences[0, -len(more.tokens) :].tolist() == more.tokens


@pytest.mark.parametrize("plan", [{"budget": 30, "window": 4}, None])
def test_a_chat_goes_on_after_edits_under_a_plan(model, tokenizer, plan, tmp_path):
    name = "snapkv" if plan else "rocketkv-mt"
    with kvsieve.attach(model, kvsieve.plan(name, **(plan or {"budget": 24, "window": 4}))) as sieve:
        chat = talk(sieve, tokenizer)
        chat.replace(0, words(5))
        chat.remove(1)
        chat.save(tmp_path / "chat")
        again = sieve.chat(tokenizer, load=tmp_path / "chat", **PLAIN)
        assert chat.ask("w5 w6").tokens == again.ask("w5 w6").tokens


def test_reasoning_is_stripped():
    messages = (
        {"role": "user", "content": "a </think> b"},
        {"role": "assistant", "content": "<think>\nlong\n</think>\n\nyes </think> no"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "begun within</think>then"},
        {"role": "assistant", "content": "none <think>open"},
    )
    assert [message["content"] for message in without_reasoning(messages)] == [
        "a </think> b",
        "yes </think> no",
        "c",
        "then",
        "none <think>open",
    ]


def test_what_cannot_be_edited_is_refused_and_nothing_changes(model, tokenizer):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        chat = sieve.chat(tokenizer, **PLAIN)
        with pytest.raises(InputError, match="0 turns"):
            chat.remove(0)
        chat.ask(words(1))
        with pytest.raises(InputError, match="only turn"):
            chat.remove(0)
        with pytest.raises(InputError, match="1 turns"):
            chat.replace(3, "w1")
        chat.read("w1 w2")
        with pytest.raises(InputError, match="read"):
            chat.replace(0, "w1")
        assert len(chat.turns) == 1
    with kvsieve.attach(model, kvsieve.plan("h2o", budget=30, floor=0)) as sieve:
        chat = talk(sieve, tokenizer, 2)
        ids = chat.ids
        with pytest.raises(UnsupportedOptionError, match="counted attention"):
            chat.remove(0)
        assert torch.equal(chat.ids, ids) and len(chat.messages) == 5
        chat.ask("w1")
