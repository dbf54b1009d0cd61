"""What `kvsieve run` prints beside full KV: a sentence per method, six columns of at most 80 signs, all with --wide."""

from __future__ import annotations

from types import SimpleNamespace

from kvsieve.cli.run_tables import print_stats
from kvsieve.hf.generate.edited import EditedEntries


def result(method: str, answer: str, differs_at: int | None = None, **stats) -> dict:
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
        "drafts": None,
        "edited": None,
        "notes": [],
    }
    facts = {"method": method, "label": method, "answer": answer, "differs_at": differs_at}
    return {**facts, "stats": SimpleNamespace(**{**usual, **stats})}


FULL = result("full", "the code is 42")
FAST = result("fastkv", "the  code is 42\n", kv_bytes=20 * 2**20, kv_entries=[1500, 1600], ttft_s=5.0, deep_tokens=1500)
SNAP = result("snapkv", "the code was 7", 3, kv_bytes=96 * 2**20, ttft_s=9.0)


def test_a_sentence_per_method_and_six_columns(capsys):
    print_stats([FULL, FAST, SNAP], "label")
    out = capsys.readouterr().out
    assert out.splitlines()[:2] == [
        "FastKV: same answer, 4.8x less KV, first token 1.2x sooner",
        "SnapKV: answer differs at token 3, as much KV, first token 1.5x later",
    ]
    assert max(map(len, out.splitlines())) <= 80
    headers, *rows = (line for line in out.splitlines()[2:] if line.strip()[:1].isalpha())
    assert headers.split() == "method KV kept KV MiB TTFT s TPOT ms as full".split()
    ends = ["-", "= full", "differs at token 3"]
    assert all(row.rstrip().endswith(f"  {end}") for row, end in zip(rows, ends, strict=True))


def test_times_behind_a_shared_prefill_are_called_so(capsys):
    print_stats([{**each, "shared_prefill_s": seconds} for each, seconds in ((FULL, 5.2), (FAST, 5.2), (SNAP, None))])
    out = capsys.readouterr().out
    assert out.splitlines()[:2] == [
        "FastKV: same answer, 4.8x less KV",
        "SnapKV: answer differs at token 3, as much KV",
    ]
    assert (
        "first token s" in out and "TTFT" not in out and "prefilled once, in 5.2 s; first token: seconds after" in out
    )
    assert max(map(len, out.splitlines())) <= 80


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


def test_drafts_have_a_line_per_method(capsys):
    print_stats([{**FULL, "stats": SimpleNamespace(**{**vars(FULL["stats"]), "drafts": "3 of 8 accepted"})}, FAST])
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "drafts" in line] == ["drafts: full: 3 of 8 accepted"]


def test_edits_have_a_line_and_joins_another(capsys):
    edited = EditedEntries(0.25, 900, 64, ["link:tokens=32"])
    one = {**FULL, "stats": SimpleNamespace(**{**vars(FULL["stats"]), "edited": edited})}
    print_stats([one])
    line = "edited: full: 25% of the prompt's tokens approximate (link:tokens=32), 900 tokens reused, 64 prefilled"
    assert line in capsys.readouterr().out
    join = {"kind": "link:tokens=32", "documents": 3, "tokens": 964, "found": 10, "prefilled": 954, "reread": 64}
    print_stats([{**one, "join": {**join, "seconds": 0.125}}])
    out = capsys.readouterr().out
    numbers = "3 documents, 964 tokens: 10 from the store, 954 prefilled alone, 64 in place, in 0.12 s; 25% approximate"
    assert f"join: full: link:tokens=32, {numbers}" in out and "edited:" not in out


def test_a_method_that_did_not_act_and_one_named_twice(capsys):
    idle = result("snapkv", "the code is 42", applied=False, notes=["nothing was evicted"])
    print_stats([FULL, idle], "label")
    out = capsys.readouterr().out
    assert out.startswith("SnapKV: did not act on this prompt\n")
    assert out.endswith("note: snapkv: nothing was evicted\n")
    twice = [{**FAST, "label": f"fastkv:tsp_layer={layer}"} for layer in (3, 4)]
    print_stats([FULL, *twice], "label")
    assert capsys.readouterr().out.startswith("fastkv:tsp_layer=3: same answer, ")
