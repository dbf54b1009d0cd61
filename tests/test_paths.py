"""Promises that hold on every path by which a question is answered (tests/support/paths.py): path x case.

A case is a model, a question and what its answer must equal. A new path joins PATHS, and is then tried on all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from kvsieve.models.families import build
from paths import PATHS, Ask, answer, plain, words
from small import fill


@functools.cache
def llama():
    return fill(build("llama", dtype=torch.float64))


def full_kv() -> tuple[Ask, str]:
    """Full KV answers as transformers does."""
    ask = Ask(llama(), words(50, seed=3))
    return ask, plain(ask)


def snapkv() -> tuple[Ask, str]:
    """A method answers as `sieve.generate` in one pass does."""
    ask = Ask(llama(), words(60, seed=4), method="snapkv:window=4:kernel=3:paper=true", budget=30)
    return ask, answer("generate", ask)


def below_the_floor() -> tuple[Ask, str]:
    """A share of a prompt below the floor is full KV."""
    ask = Ask(llama(), words(50, seed=5), method="fastkv:floor=512:window=4:kernel=3:tsp_layer=1", budget="10%")
    return ask, plain(ask)


CASES: dict[str, Callable[[], tuple[Ask, str]]] = {
    "full KV": full_kv,
    "snapkv": snapkv,
    "below the floor": below_the_floor,
}


@functools.cache
def prepared(case: str) -> tuple[Ask, str]:
    return CASES[case]()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", PATHS)
def test_every_path_gives_the_answer(path, case):
    ask, wanted = prepared(case)
    assert answer(path, ask) == wanted


@pytest.mark.parametrize("case", CASES)
def test_a_case_can_tell_answers_apart(case):
    """An answer of one word over and over would be right by chance."""
    assert len(set(prepared(case)[1].split())) > 2
