"""`kvsieve ask`: the document is prefilled once, and every method's answers stand beside full KV's."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

import kvsieve
from kvsieve.cli.ask import given_questions, runs_of
from kvsieve.errors import InputError
from kvsieve.lab.eval.ask import DocumentAnswer, advice, differing_words, differs_at, summarise
from kvsieve.store import PrefixStore
from tiny_models import build
from toy_words import word_tokenizer

WORDS = " ".join(f"w{number % 60}" for number in range(300))
QUESTIONS = ("w3 w4 w5", "w7 w8")


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(WORDS)
    return path


def ask(cli, model_dir, document, *more):
    asked = [part for question in QUESTIONS for part in ("--question", question)]
    return cli("ask", document, *asked, "--model", model_dir, "--max-new-tokens", 6, "--chunk", 64, *more)


def test_the_answers_are_those_of_run(cli, model_dir, document):
    methods = (
        "full,snapkv:budget=40:window=8,rocketkv-mt:budget=40,knorm:budget=30,fastkv:budget=40:tsp_layer=1,kivi:bits=4"
    )
    code, out, _ = ask(cli, model_dir, document, "--methods", methods, "--json")
    report = json.loads(out)
    assert code == 0 and report["questions"] == list(QUESTIONS)
    assert [each["method"] for each in report["methods"]] == methods.split(",")
    for number, question in enumerate(QUESTIONS):
        for label in methods.split(","):
            _, out, _ = cli(
                "run", model_dir, "--prompt-file", document, "--question", question, "--method", label,
                "--max-new-tokens", 6, "--chunk", 64, "--json",
            )  # fmt: skip
            alone = json.loads(out)["results"][0]
            row = next(row for row in report["answers"] if (row["question"], row["method"]) == (number, label))
            assert (row["text"], row["prompt_tokens"]) == (alone["answer"], alone["stats"]["prompt_tokens"]), label
            kept = alone["stats"]["kv_entries"]
            assert row["kv_entries"] == pytest.approx(sum(kept) / len(kept)), label


def test_the_document_is_prefilled_once(cli, model_dir, document, monkeypatch):
    fed = fed_tokens(monkeypatch)
    ask(cli, model_dir, document, "--methods", "full,snapkv:budget=40:window=8,rocketkv-mt:budget=40")
    # Six prompts of 300 tokens and more: one whole, and behind it a window and a question each.
    assert sum(fed) < 300 + 6 * 80


def test_what_is_printed(cli, model_dir, document, tmp_path):
    table, page = tmp_path / "a.csv", tmp_path / "a.html"
    code, out, _ = ask(
        cli, model_dir, document, "--methods", "snapkv:budget=20:window=8", "--csv", table, "--html", page
    )
    assert code == 0 and "1. w3 w4 w5" in out and "2. w7 w8" in out
    assert "full: " in out and "snapkv:budget=20:window=8: " in out and "prefilled once" in out
    assert "snapkv:budget=20:window=8 differs from full KV on" in out.replace("\n", " ")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["question"] for row in rows] == [QUESTIONS[0]] * 2 + [QUESTIONS[1]] * 2
    assert {row["method"] for row in rows} == {"full", "snapkv:budget=20:window=8"}
    assert "w7 w8" in page.read_text() and "kvsieve ask" in page.read_text()


def answer(method: str, tokens: list[int], size: int, number: int = 0, text: str = "") -> DocumentAnswer:
    return DocumentAnswer(number, method, text, tokens, 0.5, 0.1, size, 10.0, 100, True)


def test_where_answers_differ():
    full = answer("full", [1, 2, 3], 100, text="in the year 1998 at noon")
    assert differs_at([1, 2, 3], [1, 2, 3]) is None
    assert differs_at([1, 2, 3], [1, 5, 3]) == 2
    assert differs_at([1, 2, 3], [1, 2]) == 3 == differs_at([1, 2], [1, 2, 3])
    other = answer("a", [1, 5], 10, text="in the year 1996")
    assert differing_words(full, other) == ("1998 at noon", "1996")
    assert differing_words(full, answer("a", [1], 1, text="in the year")) == ("1998 at noon", "(end)")


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"a": ([1], [9], 20), "b": ([1], [2], 50)}, "b gives every answer of full KV with 50% of its memory."),
        ({"a": ([1], [9], 20)}, "None gives every answer of full KV: try a larger budget, or keep full KV."),
        ({"a": ([1], [2], 100)}, "a gives every answer of full KV, and takes as much memory."),
    ],
)
def test_the_advice_names_the_smallest_method_that_differs_nowhere(others, told):
    answers = [answer("full", [1], 100), answer("full", [2], 100, 1)]
    for name, (first, second, size) in others.items():
        answers += [answer(name, first, size), answer(name, second, size, 1)]
    text = advice(summarise(answers))
    assert text.endswith(told)
    assert f"a differs from full KV on {sum(others['a'][at] != [at + 1] for at in (0, 1))} of 2" in text


def test_the_advice_says_where_no_method_acted():
    full, idle = answer("full", [1], 100), answer("a", [1], 100)
    text = advice(summarise([full, replace(idle, applied=False)]))
    assert text.startswith("a differs from full KV on 0 of 1. No method acted on every prompt")
    # A method that acted is judged where others did not act.
    text = advice(summarise([full, replace(idle, applied=False), answer("b", [1], 50)]))
    assert text.endswith("b gives every answer of full KV with 50% of its memory.")


def test_questions_come_from_both_options(tmp_path):
    file = tmp_path / "q.txt"
    file.write_text("second\n\n third \n")
    assert given_questions(["first"], str(file)) == ["first", "second", "third"]
    assert [run.label for run in runs_of("snapkv:budget=99,full", None)] == ["full", "snapkv:budget=99"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "no question was given"),
        (("--question", " "), "--question is empty"),
        (("--question", "w1", "--methods", "snapvk"), "unknown method 'snapvk'"),
        (("--question", "w1", "--csv", "nowhere/a.csv"), "there is no directory"),
        (("--question", "w1", "--max-new-tokens", 0), "--max-new-tokens must be at least 1"),
        (("--questions", "nowhere.txt"), "cannot read the question file 'nowhere.txt'"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(cli, document, arguments, told):
    code, _, err = cli("ask", document, "--model", "no/such/model", *arguments)
    assert code == 2 and told in err


@pytest.mark.parametrize("name", ["missing.txt", "missing.pdf", "missing.docx"])
def test_a_missing_document_is_named(cli, tmp_path, name):
    code, _, err = cli("ask", tmp_path / name, "--question", "w1", "--model", "no/such/model")
    assert code == 2 and name in err and "cannot read the document" in err


def test_a_document_longer_than_the_context_is_refused_before_it_is_prefilled(cli, model_dir, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text(" ".join(["w1"] * 5000))
    code, _, err = cli("ask", path, "--question", "w1", "--model", model_dir)
    assert code == 2 and "the model's context ends at" in err


def test_pdf_and_docx_become_text(tmp_path):
    docx = pytest.importorskip("docx")
    from kvsieve.cli.documents import read_documents

    file = docx.Document()
    file.add_paragraph("first words")
    table = file.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "left", "right"
    file.save(str(tmp_path / "a.docx"))
    (tmp_path / "b.md").write_text("# Title")
    assert read_documents([str(tmp_path / "a.docx")]) == "first words\n\nleft\tright"
    both = read_documents([str(tmp_path / "a.docx"), str(tmp_path / "b.md")])
    assert both == "a.docx\n\nfirst words\n\nleft\tright\n\nb.md\n\n# Title"
    pypdf = pytest.importorskip("pypdf")
    writer = pypdf.PdfWriter()
    writer.add_blank_page(100, 100)
    writer.write(str(tmp_path / "scan.pdf"))
    with pytest.raises(InputError, match="has no text"):
        read_documents([str(tmp_path / "scan.pdf")])
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    with pytest.raises(InputError, match="cannot read the document"):
        read_documents([str(tmp_path / "broken.pdf")])


STORED = "full,snapkv:budget=40:window=8,fastkv:budget=40:tsp_layer=1,h2o:budget=40,rocketkv-mt:budget=40"


def fed_tokens(monkeypatch) -> list[int]:
    """Tokens of each pass from now on."""
    from kvsieve.hf.runtime import AttachedModel

    fed, feed = [], AttachedModel.feed
    monkeypatch.setattr(
        AttachedModel,
        "feed",
        lambda self, cache, ids, *a, **k: (fed.append(ids.shape[1]), feed(self, cache, ids, *a, **k))[1],
    )
    return fed


def test_a_second_run_takes_the_documents_from_the_store(cli, model_dir, document, tmp_path, monkeypatch):
    def asked(*questions, store=()):
        given = [part for question in questions for part in ("--question", question)]
        more = ("--model", model_dir, "--max-new-tokens", 6, "--chunk", 64, "--methods", STORED, "--json", *store)
        report = json.loads(cli("ask", document, *given, *more)[1])
        return report, [(row["method"], row["tokens"], row["kv_entries"], row["applied"]) for row in report["answers"]]

    store = ("--store", tmp_path / "store")
    (_, first), (other, second) = asked(QUESTIONS[0]), asked(QUESTIONS[1])
    assert other["stored_tokens"] == 0
    report, mine = asked(QUESTIONS[0], store=store)
    assert report["stored_tokens"] == 0 and mine == first
    fed = fed_tokens(monkeypatch)
    report, mine = asked(QUESTIONS[1], store=store)
    # What is left of the documents with each question is the window that methods look back on.
    rest = report["answers"][0]["prompt_tokens"] - report["stored_tokens"]
    assert mine == second and 200 < report["stored_tokens"] <= 300 and max(fed) == rest < 64
    # A run under full KV has the same prompt in the store, and what lies there as a conversation is a beginning here.
    cli("run", model_dir, "--prompt-file", document, "--method", "full", *store, "--max-new-tokens", 2, "--chunk", 64)
    assert asked(QUESTIONS[1], store=store)[1] == second
    code, out, _ = cli(
        "ask", document, "--question", "w9", "--model", model_dir, "--methods", "knorm:budget=40", *store
    )
    assert code == 0 and "of them from the store, prefilled once" in out


def test_full_kv_in_the_store_serves_longer_documents(cli, model_dir, document, tmp_path, monkeypatch):
    more = (
        "--question",
        "w3",
        "--model",
        model_dir,
        "--methods",
        "knorm:budget=40",
        "--json",
        "--store",
        tmp_path / "s",
    )
    cli("ask", document, *more)
    longer = document.with_name("longer.txt")
    longer.write_text(f"{WORDS} {WORDS[:500]}")
    fed = fed_tokens(monkeypatch)
    report = json.loads(cli("ask", longer, *more)[1])
    assert 200 < report["stored_tokens"] < 300 and sum(fed) < 300 + 3 * 64


@pytest.mark.parametrize(
    ("command", "method", "told"),
    [
        ("ask", "full,gemfilter", "the store cannot serve this prompt: gemfilter reads the whole conversation again"),
        ("run", "gemfilter", "the store cannot serve this prompt: gemfilter reads the whole conversation again"),
        ("chat", "gemfilter", "the store cannot serve this prompt: gemfilter reads the whole conversation again"),
        ("serve", "gemfilter", "the store cannot serve this prompt: gemfilter reads the whole conversation again"),
    ],
)
def test_what_no_store_can_serve_is_refused_before_a_model_is_loaded(
    cli, model_dir, document, tmp_path, monkeypatch, command, method, told
):
    monkeypatch.setattr("kvsieve.models.load", lambda *a, **k: pytest.fail("the model was loaded"))
    prompt = {
        "ask": (document, "--question", "w1", "--model", model_dir, "--methods", method),
        "run": (model_dir, "--prompt-file", document, "--method", method),
        "chat": (model_dir, "--method", method),
        "serve": (model_dir, "--method", method),
    }[command]
    code, _, err = cli(command, *prompt, "--store", tmp_path / "store")
    assert code == 2 and told in err


def test_a_text_is_answered_by_what_a_store_has_of_it(tmp_path):
    tokenizer = word_tokenizer()
    with (
        PrefixStore() as store,
        kvsieve.attach(build("llama"), kvsieve.plan("knorm:budget=40"), tokenizer=tokenizer) as s,
    ):
        alone, *stored = (s.ask(WORDS, "w7 w8", max_new_tokens=6, store=each) for each in (None, store, store))
        assert [each.text for each in stored] == [alone.text] * 2
        assert "came from the store" in str(stored[1].stats.notes) and not stored[0].stats.notes
        for given, told in (
            ({"protect": [(0, 3)]}, "protect="),
            ({"reduce": False}, "reduce="),
            ({"cache": 1}, "cache="),
        ):
            with pytest.raises(InputError, match=f"the store cannot serve this prompt: {told}"):
                s.ask(WORDS, store=store, **given)
        with pytest.raises(InputError, match="takes a kvsieve.store.PrefixStore"):
            s.ask(WORDS, store="folder")


def test_a_whole_conversation_in_the_store_is_the_beginning_of_a_document(cli, model_dir, document, tmp_path):
    dtype = ("--dtype", "float32")
    more = (
        "--question",
        "w3",
        "--model",
        model_dir,
        "--methods",
        "snapkv:budget=40:window=8",
        "--json",
        *dtype,
        "--max-new-tokens",
        6,
    )
    alone = json.loads(cli("ask", document, *more)[1])
    store = ("--store", tmp_path / "store")
    first = " ".join(WORDS.split()[:150])
    cli("run", model_dir, "--prompt", first, "--method", "full", *store, *dtype, "--max-new-tokens", 1)
    report = json.loads(cli("ask", document, *more, *store)[1])
    assert report["stored_tokens"] == 150
    for name in ("tokens", "kv_entries", "prompt_tokens", "applied"):
        assert [row[name] for row in report["answers"]] == [row[name] for row in alone["answers"]], name
