"""Chats and commands with a store: yesterday's document is not read again, and answers stay what they were."""

from __future__ import annotations

import json

import pytest

import kvsieve
from kvsieve.cli.main import run_cli
from kvsieve.errors import InputError, KvsieveWarning
from kvsieve.store import PrefixStore
from tiny import tiny_model
from toy_chats import chat_tokenizer

PLAIN = {"suppress_tokens": [0, 1, 2], "max_new_tokens": 6, "chunk": 64}
DOCUMENT = " ".join(f"w{each % 80}" for each in range(300))
QUESTIONS = ["w1 w2 w3", "w7 w9"]


@pytest.fixture(scope="module")
def model():
    return tiny_model(max_position_embeddings=2048)


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.mark.parametrize(("name", "given"), [("full", {}), ("snapkv", {"budget": 60, "window": 4, "paper": True})])
def test_the_second_question_on_a_document(model, tokenizer, tmp_path, name, given):
    """Given in one message with its document, tomorrow, in another process; as the unbroken chat answers."""
    with kvsieve.attach(model, kvsieve.plan(name, **given), tokenizer=tokenizer) as sieve:
        alone = [sieve.chat(tokenizer, **PLAIN).ask(f"{DOCUMENT}\n\n{each}") for each in QUESTIONS]
        seen = []
        for number, question in enumerate(QUESTIONS):
            seen.clear()
            with PrefixStore(tmp_path) as store:
                chat = sieve.chat(tokenizer, store=store, **PLAIN)
                told = lambda done, total: seen.append((done, total))  # noqa: E731
                reply = chat.ask(f"{DOCUMENT}\n\n{question}", progress=told)
                assert reply.text == alone[number].text and reply.stats.applied
                assert seen == sorted(seen) and {total for _, total in seen} == {seen[-1][0]}
                stats = store.stats()
                assert stats.hits == number
                if number:
                    assert stats.tokens_reused >= 0.5 * reply.stats.prompt_tokens and stats.disk_hits == 1
                    assert f"{stats.tokens_reused} of {reply.stats.prompt_tokens} tokens came" in reply.stats.notes[-1]
                again = chat.ask("w5")
        unbroken = sieve.chat(tokenizer, **PLAIN)
        unbroken.ask(f"{DOCUMENT}\n\n{QUESTIONS[1]}")
        assert again.text == unbroken.ask("w5").text


def test_a_document_that_is_read_ahead(model, tokenizer):
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=60, window=4, paper=True), tokenizer=tokenizer) as sieve:
        answers = []
        with PrefixStore() as store:
            for _ in range(2):
                chat = sieve.chat(tokenizer, store=store, **PLAIN)
                chat.read(DOCUMENT)
                answers.append([chat.ask(each).text for each in QUESTIONS])
            assert store.stats().hits == 1 and answers[0] == answers[1]
            before = store.stats().added
            # What its caller wants kept is nobody else's, and the turn says so.
            left_out = "the store was left out: protect= makes its reading the caller's own"
            chat = sieve.chat(tokenizer, store=store, **PLAIN)
            assert chat.ask(DOCUMENT, protect=[(0, 4)]).stats.notes.count(left_out) == 1
            with pytest.warns(KvsieveWarning, match=left_out):
                sieve.chat(tokenizer, store=store, **PLAIN).read(DOCUMENT, protect=[(0, 4)])
            assert store.stats().added == before
            with pytest.raises(InputError, match="the store cannot serve this prompt: protect="):
                sieve.chat(tokenizer, store=store, protect=[(0, 4)], **PLAIN)
    with kvsieve.attach(model, kvsieve.plan("finch", budget=60, question_tokens=3), tokenizer=tokenizer) as sieve:
        with PrefixStore() as store, pytest.raises(InputError, match="the store cannot serve this prompt: finch"):
            sieve.chat(tokenizer, store=store, **PLAIN)
        with pytest.raises(InputError, match="store= takes a kvsieve.store.PrefixStore"):
            sieve.chat(tokenizer, store="folder")


def test_commands(tmp_path, model, tokenizer, capsys):
    folder, store = tmp_path / "model", tmp_path / "store"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (tmp_path / "doc.txt").write_text(DOCUMENT)

    def call(*given, code=0):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            run_cli([str(each) for each in given])
        out = capsys.readouterr()
        assert left.value.code == code, out.err
        return out.err if code else out.out

    asked = ("run", folder, "--prompt-file", tmp_path / "doc.txt", "--method", "full", "--max-new-tokens", 2)
    told = [json.loads(call(*asked, "--question", each, "--store", store, "--json")) for each in QUESTIONS]
    notes = [each["results"][0]["stats"]["notes"] for each in told]
    assert "came from the store" in str(notes[1]) and "came from the store" not in str(notes[0])
    assert "--protect keeps tokens" in call(*asked, "--store", store, "--protect", "0:3", code=2)
    nodes = json.loads(call("store", "ls", store, "--json"))
    assert len(nodes) == 2 and nodes[0]["serves"] == "beginning" and nodes[0]["plan"] == "full"
    assert "2 nodes" in call("store", "ls", store) and "2 nodes, all fine" in call("store", "verify", store)
    assert "2 nodes written" in call("store", "export", store, tmp_path / "all.tar")
    assert "1 nodes deleted" in call("store", "rm", store, nodes[0]["key"][:10])
    assert "1 new nodes" in call("store", "import", store, tmp_path / "all.tar")
    assert "name nodes by their keys" in call("store", "rm", store, code=2)
    file = store / f"{nodes[0]['key']}.kv"
    file.write_bytes(file.read_bytes()[:-1])
    assert "1 damaged files were moved to" in call("store", "verify", store, code=1)
    assert "1 nodes deleted" in call("store", "rm", store, "--all")


def test_a_prompt_that_was_stopped_goes_on_where_it_was(model, tokenizer):
    def stop(done, total):
        if done >= 128:
            raise KeyboardInterrupt

    with kvsieve.attach(model, kvsieve.plan("full"), tokenizer=tokenizer) as sieve, PrefixStore() as store:
        chat = sieve.chat(tokenizer, store=store, **PLAIN)
        with pytest.raises(KeyboardInterrupt):
            chat.ask(DOCUMENT, progress=stop)
        assert "128 of " in chat.ask(DOCUMENT).stats.notes[-1]
