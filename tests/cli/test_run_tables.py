"""What `kvsieve run` prints beside full KV: a sentence per method, six columns of at most 80 signs, all with --wide."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvsieve.cli.run_tables import first_difference, print_stats


def result(method: str, answer: str, **stats) -> dict:
    usual = {
        "applied": True,
        "prompt_tokens": 7500,
        "deep_tokens": 7500,
        "kv_asked": None,
        "kv_entries": [7500],
        "kv_bytes": 96 * 2**20,
        "ttft_s": 6.0,
        "tpot_s": 0.05,
        "peak_bytes": 2**30,
        "notes": [],
    }
    return {"method": method, "label": method, "answer": answer, "stats": SimpleNamespace(**{**usual, **stats})}


FULL = result("full", "the code is 42")
FAST = result("fastkv", "the  code is 42\n", kv_bytes=20 * 2**20, kv_entries=[1500, 1600], ttft_s=5.0, deep_tokens=1500)
SNAP = result("snapkv", "the code was 7", kv_bytes=96 * 2**20, ttft_s=9.0)


@pytest.mark.parametrize(
    ("answer", "other", "word"), [("a b", "a  b\n", None), ("a b", "a c", 2), ("a", "a b", 2), ("", "", None)]
)
def test_the_first_word_that_differs(answer, other, word):
    assert first_difference(answer, other) == first_difference(other, answer) == word


def test_a_sentence_per_method_and_six_columns(capsys):
    print_stats([FULL, FAST, SNAP], "label")
    out = capsys.readouterr().out
    assert out.splitlines()[:2] == [
        "FastKV: same answer, 4.8x less KV, first token 1.2x sooner",
        "SnapKV: answer differs at word 3, as much KV, first token 1.5x later",
    ]
    assert max(map(len, out.splitlines())) <= 80
    headers, *rows = (line for line in out.splitlines()[2:] if line.strip()[:1].isalpha())
    assert headers.split() == "method KV kept KV MiB TTFT s TPOT ms as full".split()
    assert [row.split()[-1] for row in rows] == ["-", "yes", "2"] and rows[2].rstrip().endswith("to word 2")


def test_all_columns(capsys):
    print_stats([FULL, FAST], "label", wide=True)
    header = next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("method"))
    for name in ("prompt tokens", "deep tokens", "KV budget", "KV kept", "peak MiB", "ran", "as full"):
        assert name in header


def test_without_full_kv_nothing_is_compared(capsys):
    for results in ([SNAP], [SNAP, FAST], [FULL]):
        print_stats(results, "label")
        out = capsys.readouterr().out
        assert "as full" not in out and "same answer" not in out and "ran" in out.split()


def test_a_method_that_did_not_act_and_one_named_twice(capsys):
    idle = result("snapkv", "the code is 42", applied=False, notes=["nothing was evicted"])
    print_stats([FULL, idle], "label")
    out = capsys.readouterr().out
    assert out.startswith("SnapKV: did not act on this prompt\n")
    assert out.endswith("note: snapkv: nothing was evicted\n")
    twice = [{**FAST, "label": f"fastkv:tsp_layer={layer}"} for layer in (3, 4)]
    print_stats([FULL, *twice], "label")
    assert capsys.readouterr().out.startswith("fastkv:tsp_layer=3: same answer, ")
