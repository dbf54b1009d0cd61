"""Tokens, sizes and times as people write them: one parser for all, and what to write instead of what is none."""

from __future__ import annotations

import pytest

from kvsieve.errors import InputError, PlanError
from kvsieve.planning.budget import Budget
from kvsieve.planning.quantities import (
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_length,
    parse_lengths,
    parse_seconds,
    parse_tokens,
)


def test_lengths():
    assert parse_lengths("128k", "--context") == [131072]
    assert parse_lengths("8k, 7500,1M,8192", "--context") == [8192, 7500, 1048576]
    assert parse_tokens("0", "--chunk") == 0
    for text in ("", "0", "k", "-5", "1.5k", "8k,", "many", "²", "9" * 5000):
        with pytest.raises(InputError, match="--context takes tokens such as 7500, 8k or 128k, comma between several"):
            parse_lengths(text, "--context")
    assert parse_length("16k", "--context") == 16384
    with pytest.raises(InputError, match="--context takes one number of tokens such as 7500 or 16k, got '8k,16k'"):
        parse_length("8k,16k", "--context")


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 2**29), ("1.5 GB", 1_500_000_000), ("300kB", 300_000), ("2gib", 2**31), ("7B", 7), ("0", 0)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size == parse_bytes(format_bytes(size) if size else "0B")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2", "'2' has no unit; write 2GiB or 2MiB"),
        ("1.5", "write 1.5GiB or 1.5MiB"),
        ("2GiX", "unknown unit 'GiX'; known are TiB"),
        ("2k", "unknown unit 'k'"),
        ("lots", "is no size in bytes"),
        ("-1GiB", "is no size in bytes"),
    ],
)
def test_what_is_no_size(text, message):
    with pytest.raises(PlanError, match=message):
        parse_bytes(text)


def test_times():
    assert (parse_seconds("50ms", "--tpot"), parse_seconds(".1 s", "--tpot")) == (0.05, 0.1)
    with pytest.raises(InputError, match="--tpot takes a time per token with its unit, such as 50ms or 0.1s, got '50'"):
        parse_seconds("50", "--tpot")
    assert [format_seconds(each) for each in (1, 38, 300)] == ["10 seconds", "40 seconds", "5 minutes"]


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("8k", Budget(tokens=8192)),
        ("8192", Budget(tokens=8192)),
        ("20%", Budget(ratio=0.2)),
        ("0.2", Budget(ratio=0.2)),
        ("2kB", Budget(bytes=2000)),
        ("2GiB", Budget(bytes=2**31)),
    ],
)
def test_budgets(text, budget):
    assert Budget.parse(text) == budget


def test_what_is_no_budget():
    with pytest.raises(PlanError, match="neither a share like '20%', a number of entries like 2048 or 2k nor a size"):
        Budget.parse("ten")
    with pytest.raises(PlanError, match="unknown unit 'k'"):
        Budget.parse("1.5k")
