"""What comes from elsewhere cannot give a terminal orders, break a table or flood a screen."""

from __future__ import annotations

import json
import unicodedata

import pytest

import fake_results
from kvsieve.cli import methods_table, run_tables
from kvsieve.cli.output import print_table
from kvsieve.errors import InputError, KvsieveWarning
from kvsieve.report.tables import markdown_table
from kvsieve.text import Markdown, markdown_text, printable, shortened

EVIL = "[/bold] [red]x[/] a|b `c` *d* <e> \x1b[31m\x9b\x07\r\n_f_"


def test_a_terminal_gets_no_orders():
    everything = "".join(map(chr, range(0x3000))) + "\ud800"
    shown = printable(everything)
    assert "\n" in shown and "\t" in shown and "é漢" in printable("é漢")
    assert not [sign for sign in shown if unicodedata.category(sign) in ("Cc", "Cs") and sign not in "\n\t"]
    assert printable("a\r\nb\x1b[0m\u202e\ud83d") == "a\nb\\x1b[0m\\u202e\\ud83d"


def test_answers(capsys):
    run_tables.print_answers([{"method": "full", "answer": EVIL}])
    assert capsys.readouterr().out == f"full: {printable(EVIL)}\n"


def test_tables_show_what_they_are_given(capsys):
    print_table([EVIL, "n"], [[EVIL.replace("\n", " "), "[1]"], ["[/]", "2"]])
    out = capsys.readouterr().out
    assert "[/bold] [red]x[/] a|b `c` *d* <e> \\x1b[31m\\x9b\\x07" in out and "\x1b" not in out and "[1]" in out


def test_cells_of_markdown():
    assert markdown_text(EVIL) == (
        "\\[/bold\\] \\[red\\]x\\[/\\] a\\|b \\`c\\` \\*d\\* \\<e\\> \\\\x1b\\[31m\\\\x9b\\\\x07 \\_f\\_"
    )
    assert markdown_text("tsp_layer=22 ~ 5%") == "tsp_layer=22 \\~ 5%"
    table = markdown_table(["a|b"], [["\\"], ["x\ny"], [Markdown("`a`")]])
    assert table.splitlines() == ["| a\\|b |", "| --- |", "| \\\\ |", "| x y |", "| `a` |"]


def test_labels_of_results_that_someone_else_made(cli, tmp_path):
    pytest.importorskip("matplotlib")
    fake_results.write_results(tmp_path, tasks=1, labels=2, budgets=("10%",), lengths=(1024,), samples=2, repeats=1)
    for file in ("samples.jsonl", "costs.jsonl"):
        rows = [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
        rows = [{**row, "label": row["label"] if row["label"] == "full" else EVIL} for row in rows]
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = cli("report", tmp_path)
    assert code == 0 and "[red]x[/]" in out and not set("\x1b\x9b\x07") & set(out + err)
    tables = (tmp_path / "tables.md").read_text()
    assert markdown_text(EVIL) in tables and EVIL[:20] not in tables
    rows = [line for line in tables.splitlines() if line.startswith("| \\[/bold")]
    assert rows and {line.replace("\\|", "").count("|") for line in rows} <= {
        line.count("|") for line in tables.splitlines() if line.startswith("| ---")
    }


def test_messages_are_of_a_bearable_length(cli):
    long = "x" * 100_000
    assert len(shortened(long)) < 1300 and shortened("short") == "short"
    error = InputError(f"expected a number, got {long!r}; write 1")
    assert len(str(error)) < 1300 and str(error).endswith("xxx'; write 1") and "characters left out" in str(error)
    assert str(InputError("an \x1b[31m order")) == "an \\x1b[31m order"
    for arguments in (
        ["run", "--prompt-file", "none", "--method", long],
        ["run", "--prompt-file", long],
        ["run", long, "--prompt-file", __file__],
        [f"--{long}"],
        ["estimate", "--context", long],
    ):
        code, out, err = cli(*arguments)
        assert code == 2 and len(err) < 1400 and len(err.splitlines()) == 1, err[:2000]


def test_warnings_too(cli, monkeypatch):
    import warnings

    def warn():
        warnings.warn(f"kvsieve: \x1b[31m{'x' * 100_000}", KvsieveWarning, stacklevel=1)
        return []

    monkeypatch.setattr(methods_table, "list_methods", warn)
    code, out, err = cli("methods")
    assert code == 0 and err.startswith("warning: \\x1b[31mxxx") and len(err) < 1400
