"""Turns of a chat that are removed, changed, or lose their reasoning go on from the edited cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvsieve
from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.hf.chat.edits import CLEARED, stripped
from kvsieve.hf.chat.state import from_saved, saved_form
from kvsieve.store import PrefixStore
from toy_chats import chat_tokenizer, template
from toy_words import word_tokenizer

THINK = {100: "<think>", 101: "</think>"}
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
    assert [message["content"] for message in stripped(messages, True, None)] == [
        "a </think> b",
        "yes </think> no",
        "c",
        "then",
        "none <think>open",
    ]
    assert stripped(messages, False, None) == messages


class Say:
    """Lets answers begin with given tokens."""

    def __init__(self, *tokens):
        self.tokens = tokens
        self.start = None

    def __call__(self, ids, scores):
        self.start = ids.shape[1] if self.start is None else self.start
        if (at := ids.shape[1] - self.start) < len(self.tokens):
            scores = torch.full_like(scores, -torch.inf)
            scores[:, self.tokens[at]] = 0.0
        return scores


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("end", [[9], [9, 127]], ids=["cut", "ended"])
@pytest.mark.parametrize("edit", ["strip", "remove", "replace"])
def test_tokens_of_unchanged_turns_stay(model, tokenizer, tmp_path, edit, end, loaded):
    """Also if their text alone would be other tokens: here it lacks the control token 1."""
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        chat = sieve.chat(tokenizer, "w3 w4", max_new_tokens=4)
        chat.read(words(0, 4))
        sizes = [0]
        for turn in range(3):
            chat.ask(words(turn, 6), logits_processor=[Say(7, 1, 8, *end)], max_new_tokens=3 + len(end))
            sizes.append(chat.ids.shape[1])
        if loaded:
            chat.save(tmp_path / "chat")
            chat = sieve.chat(tokenizer, load=tmp_path / "chat", max_new_tokens=4)
        before = chat.ids[0].tolist()
        if edit == "strip":
            done = chat.strip(tools_before=1)
            assert (done.reread, chat.ids[0].tolist()) == (0, before)
        elif edit == "remove":
            chat.remove(1)
            # A cut answer is ended by what follows it.
            assert chat.ids[0].tolist() == before[: sizes[1]] + before[sizes[2] :]
        else:
            chat.replace(1, "w5")
            ids = chat.ids[0].tolist()
            assert ids[: sizes[1]] == before[: sizes[1]] and ids.count(1) == before.count(1)
            assert ids[-len(end) - 3 :] == before[-len(end) - 3 :]
        assert chat.cache.num_seen == chat.ids.shape[1] - 1
        for _ in range(2):
            chat.ask("w7", logits_processor=[Say(7, 1)])
        count = chat.ids[0].tolist().count(1)
        chat.remove(-1)
        assert chat.ids[0].tolist().count(1) == count - 1


def test_stripped_answers_follow_no_opened_reasoning(model):
    """A template may begin the reasoning of an answer, and writes earlier answers without."""
    tokenizer = word_tokenizer(f"{template()}{{% if add_generation_prompt %}}<think>{{% endif %}}", words=THINK)
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        chat = sieve.chat(tokenizer, max_new_tokens=6)
        for turn in range(3):
            said = (7, 101, 8, 127) if turn < 2 else (7, 8, 9, 10)
            chat.ask(words(turn, 3), logits_processor=[Say(*said)], max_new_tokens=4)
        assert chat.ids[0].tolist().count(100) == 3
        chat.strip()
        stripped_ids = chat.ids[0].tolist()
        # The last answer is cut within its reasoning.
        assert stripped_ids.count(100) == 1 and 101 not in stripped_ids
        assert [message["content"] for message in chat.messages[1:4:2]] == ["w5", "w5"]
        chat.replace(0, "w9")
        assert chat.ids[0].tolist().count(100) == 1
        chat.remove(0)
        assert chat.ids[0].tolist().count(100) == 1


def test_a_chat_saved_without_the_sizes_of_its_turns_is_edited(model, tokenizer):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        chat = talk(sieve, tokenizer)
        form = saved_form(chat._transcript)
        del form["sizes"]
        chat._state = dataclasses.replace(chat._state, transcript=from_saved(form, chat.ids))
        chat.ask("w5")
        ids = chat.ids
        assert chat.strip().reread == 0 and torch.equal(chat.ids, ids)
        assert chat._transcript.fed_turns()[1].is_known
        chat.remove(0)
        assert len(chat.ask("w6").tokens) and len(chat.turns) == 4


def use_tools(sieve, tokenizer):
    """A chat in which two of four messages are results of tools."""
    chat = sieve.chat(tokenizer, **PLAIN)
    for turn, role in enumerate(("user", "tool", "tool", "user")):
        chat.ask(words(turn), role=role)
    return chat


def test_results_of_tools_are_written_as_the_template_writes_them(model, tokenizer):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        chat = use_tools(sieve, tokenizer)
        assert [message["role"] for message in chat.messages[::2]] == ["user", "tool", "tool", "user"]
        assert chat.ids[0].tolist().count(tokenizer.convert_tokens_to_ids("w93")) == 2
        chat = sieve.chat(tokenizer, retry=True, **PLAIN)
        chat.ask("w1")
        first = list(chat.stream("w5", role="tool"))
        assert "".join(first) == chat.retry().text and chat.messages[2] == {"role": "tool", "content": "w5"}
        chat.read("w6")
        for role, reason in (("tool", "begun with read"), ("system", "role is 'user', or 'tool'")):
            with pytest.raises(InputError, match=reason):
                chat.ask("w7", role=role)
        silent = word_tokenizer("{% for m in messages if m.role != 'tool' %}{{ m.content }} [EOS] {% endfor %}")
        with pytest.raises(InputError, match="leaves out tool results"):
            sieve.chat(silent, **PLAIN).ask("w7", role="tool")


@pytest.mark.parametrize(("kept", "cleared"), [(0, [2, 4]), (1, [2, 4]), (2, [2]), (3, []), (9, [])])
def test_results_of_tools_before_the_last_turns_are_cleared(model, tokenizer, kept, cleared):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        chat = use_tools(sieve, tokenizer)
        before = chat.messages
        chat.strip(reasoning=False, tools_before=kept, window="all")
        texts = [CLEARED if place in cleared else message["content"] for place, message in enumerate(before)]
        assert [message["content"] for message in chat.messages] == texts
        more = chat.ask(words(9))
        whole = sieve.generate(chat.ids[:, : -len(more.tokens)], do_sample=False, pad_token_id=0, **PLAIN)
        assert whole.sequences[0, -len(more.tokens) :].tolist() == more.tokens


def test_a_result_as_short_as_its_placeholder_stays():
    messages = ({"role": "tool", "content": "x" * len(CLEARED)}, {"role": "assistant", "content": "y"})
    assert stripped(messages, True, 0) == messages
    for turns in (-1, True, "1"):
        with pytest.raises(InputError, match="number of last turns"):
            stripped(messages, True, turns)


def test_statistics_tell_the_share_of_approximate_entries_in_all_later_turns(model, tokenizer, tmp_path):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        chat = talk(sieve, tokenizer)
        assert chat.turns[-1].edited is None
        before = chat.snapshot()
        first = chat.replace(0, words(5, 3), window=4)
        second = chat.remove(1, window=4)
        moved = chat.cache.conversation.edits.spans
        count = sum(end - start for start, end in moved)
        assert 0 < count <= first.moved and chat.cache.conversation.approximate == ("edit:window=4",)
        fork = chat.fork()
        chat.save(tmp_path / "chat")
        loaded = sieve.chat(tokenizer, load=tmp_path / "chat", **PLAIN)
        for each in (chat, fork, loaded):
            stats = each.ask(words(9)).stats
            edited = stats.edited
            assert edited.share == round(count / stats.prompt_tokens, 4) and edited.rules == ["edit:window=4"]
            assert (edited.reused, edited.reread) == (second.reused, first.reread + second.reread)
            assert str(edited) in str(stats)
            stats = each.ask(words(8)).stats
            assert stats.edited.share == round(count / stats.prompt_tokens, 4) < edited.share
            assert (stats.edited.reused, stats.edited.reread) == (0, 0)
        chat.save(tmp_path / "chat")
        assert sieve.chat(tokenizer, load=tmp_path / "chat").turns == chat.turns
        chat.rollback(before)
        assert chat.ask("w1").stats.edited is None


def test_an_exact_edit_is_told_once(model, tokenizer):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        chat = talk(sieve, tokenizer)
        done = chat.remove(0, window="all")
        edited = chat.ask("w1").stats.edited
        assert (edited.share, edited.reused, edited.reread, edited.rules) == (0.0, done.reused, done.reread, [])
        assert str(edited).startswith("exact") and chat.ask("w2").stats.edited is None


def test_tokens_prefilled_again_are_exact_no_more_and_no_less(model):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        ids = torch.arange(3, 43)[None]
        cache = sieve.prefill(ids)
        editor = sieve.edit(cache, ids, window=3)
        editor.cut((10, 12))
        assert cache.conversation.edits.spans == ((13, 38),)
        editor.move((20, 24), 2)
        # The moved tokens, those they passed, and the rest, each less its first three.
        assert cache.conversation.edits.spans == ((5, 6), (9, 24), (27, 38))
        result = sieve.generate(torch.cat([editor.ids, ids[:, :4]], 1), cache=cache, max_new_tokens=3, do_sample=False)
        assert result.stats.edited.share == round(27 / 42, 4)


def test_a_stored_edited_conversation_has_its_columns(model, tokenizer):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve, PrefixStore() as store:
        chat = talk(sieve, tokenizer)
        chat.replace(0, words(5, 3), window=4)
        chat.ask("w1")
        seen = chat.cache.num_seen
        ids = chat.ids[0].tolist()
        store.add(sieve, ids, chat.cache, 1.0)
        for tokens in (seen, 60):
            asked = [*ids[:tokens], 5, 6, 7]
            found = store.find(sieve, asked, approximate=("edit:window=4",))
            edits = found.cache.conversation.edits
            assert edits == chat.cache.conversation.edits.up_to(tokens).without_counts() and edits.spans
            result = sieve.generate(torch.tensor([asked]), cache=found.cache, max_new_tokens=2, do_sample=False)
            assert result.stats.edited.share == round(edits.share(len(asked)), 4)


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


@pytest.mark.parametrize("window", [8, "all"])
def test_edits_are_prefilled_in_the_chunks_of_the_chat(model, tokenizer, monkeypatch, window):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        chat = sieve.chat(tokenizer, **PLAIN, chunk=16)
        for turn in range(2):
            chat.ask(words(turn))
        fed = []
        feed = sieve.feed
        monkeypatch.setattr(sieve, "feed", lambda *given, **more: fed.append(given[1].shape[1]) or feed(*given, **more))
        done = chat.replace(0, words(5, 50), window=window)
        assert max(fed) == 16 and sum(fed) == done.reread > 50


def test_an_edit_that_changes_nothing_leaves_the_last_answer_to_be_made_again(model, tokenizer):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        chat = sieve.chat(tokenizer, retry=True, **PLAIN)
        chat.ask(words(0))
        reply = chat.ask(words(1))
        assert chat.strip(tools_before=1).reread == chat.replace(0, words(0)).reread == 0
        assert chat.retry().tokens == reply.tokens
        chat.replace(0, words(2))
        with pytest.raises(InputError, match="was edited"):
            chat.retry()


def test_edits_keep_to_the_context_of_the_chat(model, tokenizer):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        chat = sieve.chat(tokenizer, max_context=90, **PLAIN)
        for turn in range(2):
            chat.ask(words(turn, 20))
        ids = chat.ids
        with pytest.raises(InputError, match="more than max_context=90; say less"):
            chat.replace(0, words(5, 50))
        assert torch.equal(chat.ids, ids) and chat.cache.num_seen == ids.shape[1] - 1
        chat.replace(0, words(5, 10))
