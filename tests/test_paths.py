"""Promises that hold on every path by which a question is answered (tests/support/paths.py): path x case.

A case is a model, a question and what its answer must equal. A new path joins PATHS, and is then tried on all of them.
Kinds of masks are in tests/support/masked_paths.py, where each path says how it takes them, or why it takes none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from kvsieve.errors import InputError
from masked_paths import CARRIED, MASKED, asks
from paths import PATHS, Ask, answer, plain, words
from small import fill, longrope_factors
from tiny import tiny_model
from tiny_models import build


def llama():
    return tiny_model(filled=True)


@functools.cache
def phi3(border: int):
    lengths = {"max_position_embeddings": 512, "original_max_position_embeddings": border}
    return fill(build("phi3", dtype=torch.float64, rope_parameters=longrope_factors(border), **lengths))


def full_kv() -> tuple[Ask, str]:
    """Full KV answers as transformers does."""
    ask = Ask(llama(), words(50, seed=3))
    return ask, plain(ask)


def snapkv() -> tuple[Ask, str]:
    """A method answers as `sieve.generate` in one pass does."""
    ask = Ask(llama(), words(60, seed=4), method="snapkv:window=4:kernel=3:paper=true", budget=30)
    return ask, answer("generate", ask)


def view() -> tuple[Ask, str]:
    """So does one that chooses at the prompt's end what the answer reads, also where the store has the prompt."""
    ask = Ask(llama(), words(60, seed=6), method="perturn:paper=true", budget=40)
    return ask, answer("generate", ask)


def below_the_floor() -> tuple[Ask, str]:
    """A share of a prompt below the floor is full KV."""
    ask = Ask(llama(), words(50, seed=5), method="fastkv:floor=512:window=4:kernel=3:tsp_layer=1", budget="10%")
    return ask, plain(ask)


def of_checkpoint(**settings: object) -> tuple[Ask, str]:
    """What a checkpoint's generation_config says is obeyed, and the answer is another one without it."""
    ask = Ask(fill(build("llama", dtype=torch.float64)), words(50, seed=3))
    for name, value in settings.items():
        setattr(ask.model.generation_config, name, value)
    wanted = plain(ask)
    assert wanted != full_kv()[1]
    return ask, wanted


def token_rules() -> tuple[Ask, str]:
    """Tokens and their sequences that the checkpoint forbids or favours."""
    first, second, third, fourth, *_ = full_kv()[0].tokenizer.convert_tokens_to_ids(full_kv()[1].split())
    return of_checkpoint(
        suppress_tokens=[third],
        begin_suppress_tokens=[first],
        bad_words_ids=[[second], [fourth, fourth]],
        sequence_bias=[[[third + 1], 0.5]],
        no_repeat_ngram_size=2,
        repetition_penalty=1.1,
    )


def ends() -> tuple[Ask, str]:
    """Several end tokens, one of them a word of the answer, and the fewest tokens before them."""
    said = full_kv()[0].tokenizer.convert_tokens_to_ids(full_kv()[1].split())
    return of_checkpoint(eos_token_id=[127, said[2], said[6]], min_new_tokens=5)


def pad_token() -> tuple[Ask, str]:
    """A word of the question that is the pad token as well is a word."""
    ask = Ask(fill(build("llama", dtype=torch.float64)), f"w5 {words(40, seed=3)} w5 w5")
    (pad,) = ask.tokenizer.convert_tokens_to_ids(["w5"])
    ask.model.generation_config.pad_token_id = ask.model.config.pad_token_id = pad
    return ask, plain(ask)


def longrope(border: int) -> Callable[[], tuple[Ask, str]]:
    """Phi-3's rotary factors change behind `border` tokens: within the prompt of 53, or within the answer."""

    def case() -> tuple[Ask, str]:
        ask = Ask(phi3(border), words(50, seed=3))
        return ask, plain(ask)

    return case


CASES: dict[str, Callable[[], tuple[Ask, str]]] = {
    "full KV": full_kv,
    "snapkv": snapkv,
    "view": view,
    "below the floor": below_the_floor,
    "longrope, prompt crosses": longrope(40),
    "longrope, answer crosses": longrope(56),
    "rules of tokens": token_rules,
    "ends": ends,
    "the pad token": pad_token,
}


@functools.cache
def prepared(case: str) -> tuple[Ask, str]:
    return CASES[case]()


# Rows of one batch share the rotary tables of the longest, in transformers as well.
OTHERWISE = {("padded row", "longrope, answer crosses")}
# A stored prefix would have been made with the tables of another length.
REFUSED = {("chat with a store", f"longrope, {part} crosses") for part in ("prompt", "answer")}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", PATHS)
def test_every_path_gives_the_answer(path, case):
    ask, wanted = prepared(case)
    if (path, case) in REFUSED:
        with pytest.raises(InputError, match="rotary tables depend on the length"):
            answer(path, ask)
    else:
        assert (answer(path, ask) == wanted) == ((path, case) not in OTHERWISE)


@pytest.mark.parametrize("case", CASES)
def test_a_case_can_tell_answers_apart(case):
    """An answer of one word over and over would be right by chance."""
    assert len(set(prepared(case)[1].split())) > 2


@functools.cache
def masked() -> tuple[tuple[Ask, Ask, Ask], str]:
    rows = asks()
    return rows, answer("generate", rows[0])


@pytest.mark.parametrize(("path", "kind"), CARRIED)
def test_a_prompt_under_a_mask_is_answered_as_without(path, kind):
    (ask, *others), wanted = masked()
    carry = MASKED[path][kind]
    if kind == "ended early":
        wanted = carry(ask)
    assert len(set(wanted.split())) > 2
    assert carry(ask, *others) == wanted
