"""Answers as text, and tokens as bytes: characters of several tokens, first spaces, special tokens."""

from __future__ import annotations

import random

import pytest
import torch

from kvsieve.detokenize import Detokenizer, text_of, token_bytes
from kvsieve.hf.chat.pieces import Pieces
from toy_bytes import byte_level, metaspace, sentence_piece
from toy_words import word_tokenizer

TEXT = "né 😀 ok\ufffd"


def pieces(tokenizer, ids, before=()) -> list[str]:
    words = Detokenizer(tokenizer, before)
    return [*(words.add([token]) for token in ids), words.end()]


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_a_character_comes_when_its_last_byte_has_come(make):
    tokenizer = make()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    told = pieces(tokenizer, ids)
    assert "".join(told) == TEXT.removeprefix(" ") and "😀" in told and told[-1] == "\ufffd"
    assert not any("\ufffd" in piece for piece in told[:-1])
    spelled = b"".join(map(token_bytes(tokenizer), ids))
    assert spelled.decode().strip() == TEXT


@pytest.mark.parametrize("make", [byte_level, sentence_piece, metaspace, word_tokenizer])
def test_pieces_are_the_text_of_all_tokens(make):
    """Whatever the tokens are, special ones among them; unfinished characters may be told of in another way."""
    tokenizer, draw = make(), random.Random(3)
    for _ in range(60):
        ids = [draw.randrange(len(tokenizer)) for _ in range(draw.randint(1, 12))]
        whole = text_of(tokenizer, ids)
        if "\ufffd" not in whole:
            assert "".join(pieces(tokenizer, ids)) == whole


@pytest.mark.parametrize("make", [sentence_piece, metaspace])
def test_an_answer_that_goes_on_with_a_text_begins_with_its_space(make):
    tokenizer = make()
    hello, world = tokenizer.convert_tokens_to_ids(["▁Hello", "▁world"])
    assert pieces(tokenizer, [world, world]) == ["world", " world", ""]
    assert pieces(tokenizer, [world, world], before=[hello]) == [" world", " world", ""]
    # A special token is no text to go on with; what stands before it is.
    assert pieces(tokenizer, [world], before=[1]) == ["world", ""]
    assert pieces(tokenizer, [world], before=[hello, 2]) == [" world", ""]


def test_a_prompt_that_ends_within_a_character():
    tokenizer = sentence_piece()
    smile = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "😀".encode()]
    hello = tokenizer.convert_tokens_to_ids("▁Hello")
    assert "".join(pieces(tokenizer, smile, before=smile[1:])) == "😀"
    assert "".join(pieces(tokenizer, [hello], before=[*smile[2:], *smile])) == " Hello"


def test_no_space_is_taken_away():
    tokenizer = sentence_piece()
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = tokenizer.convert_tokens_to_ids(["▁Hello", "▁.", "▁a"])
    assert tokenizer.decode(ids) == "Hello. a"
    assert text_of(tokenizer, ids) == "".join(pieces(tokenizer, ids)) == "Hello . a"


def test_bytes_of_single_tokens():
    level, piece, words = byte_level(), sentence_piece(), word_tokenizer()
    # By the tokenizer's own splitting of characters that hold every byte there is in UTF-8.
    for letter in [*map(chr, range(0x80)), *map(chr, range(0x80, 0x800, 0x3F)), "\u2028", "\uffff", "😀", "\U0010ffff"]:
        ids = level(letter)["input_ids"]
        assert [token_bytes(level)(token) for token in ids] == [bytes([byte]) for byte in letter.encode()]
    spelled = token_bytes(piece)
    assert [spelled(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    names = ["<s>", "</s>", "▁", "▁Hello", "ab"]
    assert [spelled(token) for token in piece.convert_tokens_to_ids(names)] == [b"<s>", b"</s>", b" ", b" Hello", b"ab"]
    assert [token_bytes(words)(token) for token in (0, 5, 127)] == [b"[PAD]", b"w2", b"[EOS]"]
    # Outputs of a model beyond its tokenizer.
    assert spelled(9999) == token_bytes(words)(9999) == b""
    piece.add_tokens(["▁▁", "<tool>"])
    assert [token_bytes(piece)(token) for token in (len(piece) - 2, len(piece) - 1)] == [b"  ", b"<tool>"]


def test_the_streamer_leaves_out_what_ends_an_answer():
    tokenizer, got, checks = sentence_piece(), [], []
    hello, world = tokenizer.convert_tokens_to_ids(["▁Hello", "▁world"])
    streamer = Pieces(tokenizer, frozenset([hello]), got.append, lambda: checks.append(1))
    streamer.put(torch.tensor([[hello, world]]))
    for token in (world, world, hello):
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert got == ["world", " world"] and streamer.text == "world world" and len(checks) == 3


def test_some_special_tokens_are_shown():
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[CALL]", "[END]"]})
    call, end = tokenizer.convert_tokens_to_ids(["[CALL]", "[END]"])
    ids = [call, *tokenizer("né")["input_ids"], end, call]
    words = Detokenizer(tokenizer, (), [call])
    assert [words.add([token]) for token in ids] == ["[CALL]", "n", "", "é", "", "[CALL]"]
    assert Detokenizer(tokenizer).add(ids) == "né"
