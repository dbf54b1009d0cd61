"""sieve.chat(): turns are fed once, failures leave no trace, many questions on one context."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvsieve
from kvsieve.errors import CacheFileError, CacheStateError, InputError, UnsupportedOptionError
from kvsieve.hf.chat.pieces import Pieces
from kvsieve.hf.forward import passes as sessions
from kvsieve.planning.turns import Turns, render
from tiny_models import build
from toy_chats import MOVING, chat_tokenizer, template
from toy_words import word_tokenizer, words

# Special tokens are not in an answer's text, so without them it can be written again.
PLAIN = {"suppress_tokens": [0, 1, 2], "max_new_tokens": 9}
PLANS = {
    "full": {},
    "snapkv": {"budget": 30, "window": 4, "paper": True},
    "adakv": {"budget": 30, "window": 4, "paper": True},
    "fastkv": {"budget": 30, "tsp_layer": 1, "tsp_rate": 0.5, "window": 4, "paper": True},
    "streamingllm": {"budget": 30, "every": 1},
    "gemfilter": {"budget": 30, "layer": 1, "paper": True},
    "kvzip": {"budget": 0.5},
    "attentionmatching": {"budget": 0.5},
    "finch": {"budget": 30, "question_tokens": 3},
    "rocketkv": {"budget": 24, "window": 4},
    "rocketkv-mt": {"budget": 24, "window": 4},
}
EOS = 127


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture
def full(model):
    with kvsieve.attach(model, kvsieve.plan("full")) as sieve:
        yield sieve


def contents(cache):
    out = []
    for layer in cache.sieve_layers.values():
        store = layer.store
        if not store.is_empty:
            out += [store.keys, store.values, store.index, *([] if store.valid is None else [store.valid])]
    return [part.clone() for part in out]


def size(chat):
    """What is stored; what a reader has made of it may go."""
    return chat.cache.entries(), [layer.store.entry_bytes() for layer in chat.cache.sieve_layers.values()]


def state(chat):
    """All that a failed turn must leave alone."""
    numbers = chat.cache.num_seen, chat.cache.turn, chat.cache.conversation.caller_length_and_mask()[0], len(chat.turns)
    return size(chat), numbers, chat.messages, chat.ids.tolist(), [part.tolist() for part in contents(chat.cache)]


def written(chat) -> list[int]:
    """The conversation's token ids, written anew by the template."""
    text = render(chat.tokenizer, chat.messages, ask=False)
    return chat.tokenizer(text, add_special_tokens=False)["input_ids"]


# Turns


def test_turns_are_one_prompt_and_its_greedy_answers(model, tokenizer, full):
    chat = full.chat(tokenizer, "w3 w4", **PLAIN)
    first, second = chat.ask(words(1)), chat.ask(words(2))
    assert chat.messages == [
        {"role": "system", "content": "w3 w4"},
        {"role": "user", "content": words(1)},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": words(2)},
        {"role": "assistant", "content": second.text},
    ]
    assert chat.ids[0].tolist() == written(chat)[: chat.ids.shape[1]]
    assert chat.turns == [first.stats, second.stats] and chat.system == "w3 w4"
    assert chat.ids[0, -len(second.tokens) :].tolist() == second.tokens
    prompt = chat.ids[:, : -len(second.tokens)]
    assert second.stats.prompt_tokens == prompt.shape[1] and second.stats.new_tokens == len(second.tokens)
    assert chat.cache.num_seen == chat.ids.shape[1] - 1
    whole = full.generate(prompt, do_sample=False, eos_token_id=EOS, pad_token_id=0, **PLAIN)
    assert torch.equal(whole.sequences, chat.ids)


@pytest.mark.parametrize("name", PLANS)
def test_a_chat_is_generate_on_one_cache_under_any_plan(model, tokenizer, name):
    plan = kvsieve.plan(name, **PLANS[name]).for_tokenizer(tokenizer)
    with kvsieve.attach(model, plan) as sieve:
        chat, cache = sieve.chat(tokenizer, chunk=None, **PLAIN), sieve.new_cache()
        for turn in range(3):
            before = state(chat)
            with pytest.raises(RuntimeError, match="stop"):
                chat.ask(words(turn, 60), on_text=raiser(RuntimeError("stop"), after=3))
            assert state(chat) == before
            reply = chat.ask(words(turn, 60))
            prompt = chat.ids[:, : -len(reply.tokens)]
            ours = sieve.generate(
                prompt, torch.ones_like(prompt), cache=cache, do_sample=False, eos_token_id=EOS, pad_token_id=0, **PLAIN
            )
            assert torch.equal(ours.sequences, chat.ids)
            assert [each.tolist() for each in contents(cache)] == state(chat)[-1]
            assert ours.stats.kv_entries == reply.stats.kv_entries


def test_sampling_is_asked_for(tokenizer, full):
    chat = full.chat(tokenizer, **PLAIN)
    greedy = [chat.fork().ask("w1").tokens for _ in range(2)]
    torch.manual_seed(1)
    sampled = [chat.fork().ask("w1", do_sample=True).tokens for _ in range(4)]
    assert greedy[0] == greedy[1] and len(set(map(tuple, sampled))) > 1


@pytest.mark.parametrize("end", ["[EOS]", "[BOS]", "w93"])
@pytest.mark.parametrize("last", [None, EOS, 1], ids=["cut", "eos", "bos"])
def test_the_end_of_a_turn_is_the_templates_whatever_ended_the_answer(full, end, last):
    """[BOS] as the end of turn is not the tokenizer's eos; w93 is no special token at all."""
    tokenizer = chat_tokenizer(end=end)
    chat = full.chat(tokenizer, **PLAIN)
    options = {"suppress_tokens": [each for each in (0, 1, 2, EOS) if each != last]}
    if last is not None:
        options |= {"eos_token_id": [last], "forced_eos_token_id": last}
    first = chat.ask("w1 w2", **options)
    assert first.ended == (last is not None) and (first.tokens[-1] == last) == first.ended
    assert tokenizer.decode(first.tokens, skip_special_tokens=True).strip() == first.text
    second = chat.ask("w3")
    prompt = chat.ids[0, : -len(second.tokens)].tolist()
    assert prompt == written(chat)[: len(prompt)] and chat.cache.num_seen == chat.ids.shape[1] - 1
    assert tokenizer.decode(prompt).count(end) == 3


def test_the_templates_end_of_turn_ends_an_answer(full):
    chat = full.chat(chat_tokenizer(end="[BOS]"), max_new_tokens=9)
    assert chat.ask("w1", forced_eos_token_id=1).ended


# What goes wrong


def raiser(error, after):
    calls = []

    def on_text(piece):
        calls.append(piece)
        if len(calls) == after:
            raise error

    return on_text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("mine")], ids=["interrupt", "error"])
@pytest.mark.parametrize("after", [1, 5])
def test_a_turn_that_fails_did_not_happen(model, tokenizer, error, after):
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=30, window=4)) as sieve:
        chat = sieve.chat(tokenizer, **PLAIN)
        chat.ask(words(1, 60))
        wanted, before = chat.fork().ask(words(2, 60)), state(chat)
        with pytest.raises(type(error)):
            chat.ask(words(3, 60), on_text=raiser(error, after))
        assert state(chat) == before
        assert chat.ask(words(2, 60)).tokens == wanted.tokens


def test_an_interrupt_in_the_middle_of_a_pass(model, tokenizer, full):
    """torch runs no hooks then, so nothing of the pass may stay behind."""

    def interrupt(*given):
        raise KeyboardInterrupt

    chat = full.chat(tokenizer, **PLAIN)
    chat.ask(words(1))
    wanted, before = chat.fork().ask("w5"), state(chat)
    handle = model.model.layers[2].self_attn.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        chat.ask("w5")
    handle.remove()
    assert sessions.current() is None and state(chat) == before
    assert chat.ask("w5").tokens == wanted.tokens


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"num_beams": 2}, UnsupportedOptionError, "num_beams=2.*fork"),
        ({"num_return_sequences": 3}, UnsupportedOptionError, "num_return_sequences=3"),
        ({"cache": 1}, UnsupportedOptionError, "cache of its own"),
        ({"streamer": 1}, UnsupportedOptionError, "on_text="),
        ({"max_length": 9}, UnsupportedOptionError, "max_new_tokens="),
        ({"max_new_tokens": 0}, InputError, "at least 1, got 0"),
        ({"output_attentions": True}, UnsupportedOptionError, "never formed"),
        ({"protect": [(0, 999)]}, InputError, "lies outside"),
        ({"question_tokens": 99}, InputError, "leaves nothing"),
        ({"chunk": 0}, InputError, "chunk must be"),
    ],
)
def test_options_are_refused_and_nothing_happened(tokenizer, full, options, error, told):
    chat = full.chat(tokenizer, **PLAIN)
    chat.ask("w1 w2")
    before = state(chat)
    with pytest.raises(error, match=told):
        chat.ask("w3", **options)
    for message in ("", " \n", None):
        with pytest.raises(InputError, match="message must be a text"):
            chat.ask(message)
    assert state(chat) == before
    assert chat.ask("w3").text


def test_options_of_a_chat_are_refused_at_once(tokenizer, full):
    with pytest.raises(UnsupportedOptionError, match="num_beams"):
        full.chat(tokenizer, num_beams=4)
    with pytest.raises(InputError, match="max_new_tokens must be"):
        full.chat(tokenizer, max_new_tokens=2.5)
    with pytest.raises(InputError, match="system must be a text"):
        full.chat(tokenizer, "")
    with pytest.raises(InputError, match="no chat template.*instruct model"):
        full.chat(word_tokenizer())


def test_the_context_ends(tokenizer, full):
    chat = full.chat(tokenizer, max_new_tokens=50, suppress_tokens=[0, 1, 2, EOS])
    chat.ask(words(1, 400))
    before = state(chat)
    # 403 + 50 tokens, then the end of turn, two words of the template, the message and its end: 511 and 512.
    with pytest.raises(InputError, match="has 453 tokens and this message adds 59.*context of 512"):
        chat.ask(words(2, 55))
    with pytest.raises(InputError, match="context of 512"):
        chat.read(words(2, 58))
    assert state(chat) == before
    reply = chat.ask(words(2, 54))
    assert len(reply.tokens) == 1 and not reply.ended and chat.ids.shape[1] == 512
    assert "the answer was cut at 1 tokens, where the model's context of 512 ends" in reply.stats.notes[-1]
    bounded = full.chat(tokenizer, max_new_tokens=50, max_context=100, suppress_tokens=[0, 1, 2, EOS])
    for short in (bounded, bounded.fork()):
        with pytest.raises(InputError, match="more than max_context=100; say less"):
            short.ask(words(1, 98))
        assert "where max_context=100 ends" in short.ask(words(1, 80)).stats.notes[-1] and short.ids.shape[1] == 100
    with pytest.raises(InputError, match="max_context must be a number of tokens"):
        full.chat(tokenizer, max_context=1)
    assert chat.turns[-1] == reply.stats


def test_templates_that_a_chat_cannot_use(full):
    with pytest.raises(InputError, match="no chat today"):
        full.chat(word_tokenizer("{{ raise_exception('no chat today') }}"))
    moving = full.chat(word_tokenizer(MOVING), "w3", **PLAIN)
    moving.ask("w1")
    before = state(moving)
    with pytest.raises(InputError, match="rewrites earlier turns.*without system="):
        moving.ask("w2")
    assert state(moving) == before
    without = full.chat(word_tokenizer(MOVING), **PLAIN)
    without.ask("w1")
    assert without.ask("w2").text
    upper = full.chat(word_tokenizer(template(text="m.content | upper")), **PLAIN)
    upper.ask("w1")
    with pytest.raises(InputError, match="leaves out what was said"):
        upper.ask("w2")


def test_templates_may_trim_and_drop_thoughts(full):
    """What was generated stays as it was, whatever the template makes of an answer later."""
    thoughts = "(m.content.split('w50')[-1] if m.role == 'assistant' else m.content) | trim"
    chat = full.chat(word_tokenizer(template(text=thoughts)), **PLAIN)
    first = chat.ask("  w1 ")
    second = chat.ask("w2")
    known = chat.tokenizer("w91 w1 [EOS] w92")["input_ids"] + first.tokens + [EOS]
    assert chat.ids[0, : len(known)].tolist() == known
    assert chat.ids.shape[1] == len(known) + 4 + len(second.tokens)


# Streams


def test_a_stream_is_ask_in_pieces(tokenizer, full):
    chat, got = full.chat(tokenizer, **PLAIN), []
    wanted = chat.fork().ask(words(1), on_text=got.append)
    stream = chat.stream(words(1))
    pieces = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            reply = end.value
            break
    assert pieces == got and len(pieces) == 9 and "".join(pieces) == reply.text == wanted.text
    assert reply.tokens == wanted.tokens and chat.messages[-1]["content"] == wanted.text


def test_a_stream_that_is_left_did_not_happen(model, tokenizer, full):
    chat = full.chat(tokenizer, **{**PLAIN, "max_new_tokens": 200})
    chat.ask("w1", max_new_tokens=2)
    wanted, before, threads = chat.fork().ask("w2", max_new_tokens=5), state(chat), threading.active_count()
    for piece in chat.stream(words(2)):
        assert piece
        with pytest.raises(CacheStateError, match="a turn of this chat is in progress"):
            chat.ask("w3")
        with pytest.raises(CacheStateError, match="in progress"):
            chat.snapshot()
        break
    gc.collect()
    assert threading.active_count() == threads and state(chat) == before
    stream = chat.stream("w2")
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt())
    assert state(chat) == before
    with pytest.raises(InputError, match="context of 512"):
        list(chat.stream(words(3, 600)))
    assert state(chat) == before and chat.ask("w2", max_new_tokens=5).tokens == wanted.tokens


def test_a_stream_stops_between_chunks(tokenizer, full):
    chat, seen = full.chat(tokenizer, chunk=10, **PLAIN), []
    chat.ask("w1")
    before = state(chat)

    def progress(done, total):
        seen.append(done)
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        list(chat.stream(words(1, 100), progress=progress))
    assert seen == [10] and state(chat) == before


def bytewise():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


@pytest.mark.parametrize("text", ["héllo wörld", "漢字かな ✓\n\nnext  line ", "👩‍👩‍👧 ok", " \ufffd!"])
def test_pieces_are_whole_characters(text):
    tokenizer, got = bytewise(), []
    pieces = Pieces(tokenizer, frozenset([tokenizer.eos_token_id]), got.append, lambda: None)
    pieces.put(torch.tensor([[1, 2, 3]]))
    ids = tokenizer(text)["input_ids"]
    for token in [*ids, tokenizer.eos_token_id]:
        pieces.put(torch.tensor([token]))
    pieces.end()
    assert "".join(got) == pieces.text == text
    assert all("\ufffd" not in piece for piece in got) or "\ufffd" in text
    # What ends within a character is told at the end, as the tokenizer shows it.
    cut = Pieces(tokenizer, frozenset(), None, lambda: None)
    cut.put(torch.tensor([[1]]))
    for token in tokenizer("a漢")["input_ids"][:-1]:
        cut.put(torch.tensor([token]))
    cut.end()
    assert cut.text == tokenizer.decode(tokenizer("a漢")["input_ids"][:-1])


@pytest.mark.parametrize("name", PLANS)
def test_a_retry_ends_as_if_the_first_answer_had_not_been(model, tokenizer, name):
    plan = kvsieve.plan(name, **PLANS[name]).for_tokenizer(tokenizer)
    with kvsieve.attach(model, plan) as sieve:
        chat, other = (sieve.chat(tokenizer, "w9", retry=retry, **PLAIN) for retry in (True, False))
        for one in (chat, other):
            one.ask(words(1, 60))
        with pytest.raises(InputError, match="make the chat with sieve.chat"):
            other.retry()
        chat.ask(words(2, 60), max_new_tokens=5)
        before = state(chat)
        with pytest.raises(RuntimeError, match="stop"):
            chat.retry(raiser(RuntimeError("stop"), after=2))
        stream = chat.stream_retry()
        next(stream)
        stream.close()
        assert state(chat) == before
        assert chat.retry().tokens == other.ask(words(2, 60)).tokens
        pieces = chat.stream_retry()
        assert "".join(pieces) == other.messages[-1]["content"]
        assert state(chat)[0] == state(other)[0] and state(chat)[2:] == state(other)[2:]
        assert len(chat.turns) == 2 and chat.ask("w3").tokens == other.ask("w3").tokens


def test_a_retry_draws_anew_and_needs_a_turn(tokenizer, full, tmp_path):
    chat = full.chat(tokenizer, retry=True, **PLAIN)
    chat.read(words(1))
    with pytest.raises(InputError, match="no turn to answer again"):
        chat.retry()
    chat.ask("w1", do_sample=True)
    message = chat.messages[0]
    assert message["content"] == f"{words(1)}\n\nw1"
    torch.manual_seed(0)
    assert len({tuple(chat.retry(do_sample=True).tokens) for _ in range(4)}) > 1
    assert chat.messages[0] == message and len(chat.messages) == 2 and chat.context is None
    chat.save(tmp_path / "chat")
    for none in (chat.fork(), full.chat(tokenizer, load=tmp_path / "chat", retry=True)):
        with pytest.raises(InputError, match="loaded or forked"):
            none.retry()
    chat.read("w2")
    with pytest.raises(InputError, match="read ahead"):
        next(chat.stream_retry())
    for turn in (chat.ask, chat.stream):
        with pytest.raises(InputError, match="message must be a text"):
            list(turn(None))


def test_roles_are_protected_in_a_chat(model, tokenizer):
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=50, window=4)) as sieve:

        def kept(**options):
            chat = sieve.chat(tokenizer, "w9 w8", **PLAIN)
            first = chat.ask(words(1, 20), **options)
            read = chat.ids.shape[1] - len(first.tokens)
            chat.ask(words(2, 80))
            return (chat.kept.stored_share == 1).tolist(), read

        both, read = kept(protect=["system", "user"])
        assert all(both[:read]) and not all(both)
        some, _ = kept(protect=["system", (10, 14)])
        assert all(some[:4]) and all(some[10:14]) and not all(some[:read])
        assert not all(kept()[0][:4])
        chat = sieve.chat(tokenizer, protect=["system"], **PLAIN)
        for given, told in ((["users"], "got 'users'"), (["system"], "this chat has none")):
            with pytest.raises(InputError, match=told):
                chat.ask("w1", protect=given)


# Many questions on one context


def test_forks_go_their_own_way(model, tokenizer):
    with kvsieve.attach(model, kvsieve.plan("snapkv", budget=30, window=4)) as sieve:
        chat = sieve.chat(tokenizer, "w9", **PLAIN)
        chat.ask(words(1, 60))
        before, one, two = state(chat), chat.fork(), chat.fork()
        answers = one.ask(words(2)), two.ask(words(3))
        assert state(chat) == before and one.messages[:3] == two.messages[:3] == chat.messages
        assert one.cache is not chat.cache and one.options == chat.options
        for said, wanted in ((2, answers[0]), (3, answers[1])):
            fresh = sieve.chat(tokenizer, "w9", **PLAIN)
            fresh.ask(words(1, 60))
            assert fresh.ask(words(said)).tokens == wanted.tokens
        with pytest.raises(CacheStateError, match="another cache"):
            one.rollback(chat.snapshot())


@pytest.mark.parametrize("name", PLANS)
def test_a_context_is_read_once(model, tokenizer, name):
    plan = kvsieve.plan(name, **PLANS[name]).for_tokenizer(tokenizer)
    with kvsieve.attach(model, plan) as sieve:
        chat = sieve.chat(tokenizer, "w9", **PLAIN)
        chat.ask("w1")
        chat.read(words(1, 60) + "\n")
        assert chat.context == words(1, 60) and len(chat.messages) == 3
        read, before = chat.snapshot(), state(chat)
        answers = []
        for question in ("w5 w6 w7", "w8 w9 w10", "w5 w6 w7"):
            answers.append(chat.ask(question).text)
            assert chat.messages[-2]["content"] == f"{words(1, 60)}\n\n{question}" and chat.context is None
            prompt = chat.ids[0, : -len(chat.tokenizer(answers[-1])["input_ids"])].tolist()
            assert prompt[:-1] == written(chat)[: len(prompt) - 1]
            chat.rollback(read)
            assert state(chat) == before
        assert answers[0] == answers[2]


def test_a_context_in_parts(tokenizer, full):
    chat, whole = full.chat(tokenizer, "w9", **PLAIN), full.chat(tokenizer, "w9", **PLAIN)
    chat.read(words(1))
    before = state(chat)
    with pytest.raises(ZeroDivisionError):
        chat.read(words(5), progress=lambda done, total: 1 / 0)
    assert state(chat) == before
    chat.read(words(2))
    reply = chat.ask("w5")
    assert whole.ask(f"{words(1)}\n\n{words(2)}\n\nw5").tokens == reply.tokens
    assert torch.equal(whole.ids, chat.ids) and whole.messages == chat.messages
    with pytest.raises(InputError, match="text must be a text"):
        chat.read(" ")


def test_an_open_message_after_an_answer(tokenizer):
    turns = Turns(tokenizer)
    said = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    parts = [turns.added(said, "w3 w4", open_end=True), turns.added(said, " w5", before="w3 w4")]
    assert tokenizer.decode(parts[0] + parts[1]) == "[EOS] w91 w3 w4 w5 [EOS] w92"
    # A mark of ours in what people say does no harm.
    odd = "w7 kvsieve-mark-of-the-answer w8"
    assert turns.added([said[0], {"role": "assistant", "content": odd}], odd) == turns.added(said, odd)


# Files


@pytest.mark.parametrize("name", PLANS)
def test_a_saved_chat_goes_on(model, tokenizer, name, tmp_path):
    plan = kvsieve.plan(name, **PLANS[name]).for_tokenizer(tokenizer)
    with kvsieve.attach(model, plan) as sieve:
        chat = sieve.chat(tokenizer, "w9", **PLAIN)
        chat.ask(words(1, 60))
        if name == "snapkv":
            chat.ask("w4", eos_token_id=[5], forced_eos_token_id=5)
            chat.read(words(2))
        chat.save(tmp_path / "chat")
        known, wanted = state(chat), chat.ask("w5 w6 w7")
        again = sieve.chat(tokenizer, load=tmp_path / "chat", **PLAIN)
        # A file has no room to spare in its buffers.
        assert state(again)[1:] == known[1:] and again.system == "w9"
        assert again.turns == chat.turns[:-1]
        assert again.ask("w5 w6 w7").tokens == wanted.tokens and again.messages == chat.messages


def test_what_cannot_be_loaded(tokenizer, full, tmp_path):
    chat = full.chat(tokenizer, "w9", **PLAIN)
    chat.ask("w1")
    chat.save(tmp_path / "chat")
    assert full.chat(tokenizer, "w9", load=tmp_path / "chat").messages == chat.messages
    with pytest.raises(InputError, match="another system prompt .'w9'."):
        full.chat(tokenizer, "w8", load=tmp_path / "chat")
    full.save(chat.cache, tmp_path / "cache", ids=chat.ids)
    with pytest.raises(InputError, match="holds a cache but no chat"):
        full.chat(tokenizer, load=tmp_path / "cache")
    for name, odd in [("messages", [1]), ("messages", [{"role": "user"}]), ("messages", [{"role": 1, "content": ""}]),
                      ("turns", [{}]), ("turns", 3), ("context", 3)]:  # fmt: skip
        extra = {"chat": {"messages": [], "turns": [], "context": None, "ended": False, name: odd}}
        full.save(chat.cache, tmp_path / "odd", ids=chat.ids, extra=extra)
        with pytest.raises(CacheFileError, match="odd cannot be read by kvsieve"):
            full.chat(tokenizer, load=tmp_path / "odd")
    for _ in chat.stream("w2"):
        with pytest.raises(CacheStateError, match="in progress"):
            chat.save(tmp_path / "half")
        break
    assert not (tmp_path / "half").exists()


# The long run


# Each number of detours with and without an interrupt, and three times what fills a budget.
MANY = 25


@pytest.mark.parametrize("name", ["full", "snapkv", "rocketkv-mt"])
@pytest.mark.slow
def test_many_turns_with_forks_and_rollbacks(tokenizer, name):
    """Nothing piles up, and what is there is what a conversation without detours would have."""
    model = build("llama", dtype=torch.float64, max_position_embeddings=2048)
    options, gone, sizes = {**PLAIN, "max_new_tokens": 5}, [], []
    with kvsieve.attach(model, kvsieve.plan(name, **PLANS[name])) as sieve:
        chat, straight = sieve.chat(tokenizer, "w9", **options), sieve.chat(tokenizer, "w9", **options)
        for turn in range(MANY):
            taken, before = chat.snapshot(), (size(chat), chat.ids.shape, len(chat.messages))
            fork = chat.fork()
            fork.ask(words(turn + 500, 9))
            gone.append(weakref.ref(fork.cache))
            for detour in range(turn % 3):
                chat.ask(words(turn + 900 + detour, 12))
                chat.rollback(taken)
            if turn % 7 == 3:
                with pytest.raises(KeyboardInterrupt):
                    chat.ask(words(turn, 20), on_text=raiser(KeyboardInterrupt(), after=2))
            assert (size(chat), chat.ids.shape, len(chat.messages)) == before
            del taken, fork
            chat.ask(words(turn, 10))
            straight.ask(words(turn, 10))
            sizes.append(chat.cache.nbytes())
        assert torch.equal(chat.ids, straight.ids) and chat.messages == straight.messages
        assert chat.cache.entries() == straight.cache.entries() and len(chat.turns) == MANY
        assert chat.cache.nbytes() == straight.cache.nbytes()
        gc.collect()
        # The chat's own state, and no other.
        assert not [each for each in gone if each() is not None] and len(chat.cache.snapshots) == 1
        with pytest.raises(InputError, match="make the chat with sieve.chat"):
            chat.retry()
        if name == "rocketkv-mt":
            return
        if name == "snapkv":
            assert max(chat.cache.entries()) <= 30 + 5 and len(set(sizes[5:])) == 1
            return
    # All of it at once, by the model alone.
    with torch.no_grad():
        logits = model(chat.ids).logits[0]
    logits[:, [0, 1, 2]] = float("-inf")
    made = logits.argmax(-1)
    for stats in chat.turns:
        start = stats.prompt_tokens
        assert made[start - 1 : start - 1 + stats.new_tokens].tolist() == (
            chat.ids[0, start : start + stats.new_tokens].tolist()
        )
