"""`kvsieve ask`: questions about documents, answered under several methods side by side."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsieve.cli.documents import read_documents
from kvsieve.cli.loading import (
    DeviceOption,
    DtypeOption,
    WeightsOption,
    check_device,
    check_least,
    check_loading,
    check_model_name,
    load_model,
)
from kvsieve.cli.options import METHOD, MODEL, OUTPUT, PROMPT, ChunkOption, MaxNewTokensOption, SystemOption, option
from kvsieve.cli.output import JsonOption, check_writable, emit_json, prefill_progress, print_table, saved, say, show
from kvsieve.cli.prompts import check_system, read_text
from kvsieve.cli.run_tables import as_full
from kvsieve.cli.specs import BudgetOption, MethodRun, check_budget_used, compared_methods, make_run, method_specs
from kvsieve.cli.store import StoreOption, check_store, check_stored_plans, opened_store
from kvsieve.errors import InputError
from kvsieve.report.display import mebibytes

if TYPE_CHECKING:
    from kvsieve.lab.eval.ask import Asker, DocumentAnswer

_METHODS = "full,snapkv,fastkv,rocketkv-mt"


def ask_command(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Documents: text, Markdown, PDF, DOCX; - is stdin")
    ],
    question: Annotated[
        list[str] | None, option(PROMPT, "Question about the documents; repeatable (default: none)")
    ] = None,
    questions: Annotated[
        str | None, option(PROMPT, "File with one question per line (default: none)", metavar="FILE")
    ] = None,
    system: SystemOption = None,
    methods: Annotated[str, option(METHOD, "Methods to compare with full KV: full,snapkv:budget=20%")] = _METHODS,
    budget: BudgetOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    chunk: ChunkOption = 1024,
    store: StoreOption = None,
    model: Annotated[
        str | None, option(MODEL, "Hub id, checkpoint directory or .gguf file (default: the demo model)")
    ] = None,
    dtype: DtypeOption = "auto",
    weights: WeightsOption = None,
    device: DeviceOption = None,
    csv_file: Annotated[
        str | None, option(OUTPUT, "CSV file with all answers (default: none)", "--csv", metavar="FILE")
    ] = None,
    html_file: Annotated[
        str | None, option(OUTPUT, "HTML page with all answers (default: none)", "--html", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask questions about documents under several methods, and see which give full KV's answers.

    The documents are prefilled once. Answers are greedy.
    """
    check_loading(dtype, device)
    check_least(1, max_new_tokens=max_new_tokens, chunk=chunk)
    check_system(system)
    asked = given_questions(question, questions)
    runs = runs_of(methods, budget)
    for file, name in (("--csv", csv_file), ("--html", html_file)):
        check_writable(file, name)
    check_store(store)
    text = read_documents(files)
    check_model_name(model, weights)
    plans = {run.label: run.plan for run in runs}
    check_stored_plans(store, plans.values())
    check_device(device)
    loaded, tokenizer = load_model(model, dtype, device, weights)

    from kvsieve.lab.eval.ask import Asker
    from kvsieve.models.fetch import MODEL_NAME

    how: dict[str, Any] = {"system": system, "chunk": chunk, "max_new_tokens": max_new_tokens}
    with opened_store(store) as opened:
        asker = Asker(loaded, tokenizer, text, plans, store=opened, **how)
        asker.check(asked)
        with prefill_progress("documents") as progress:
            asker.prefill(progress)
        answers = ask_all(asker, asked, quiet=as_json)
    report = {
        "model": model or MODEL_NAME,
        "documents": list(files),
        "document_tokens": asker.document_tokens,
        "stored_tokens": asker.stored_tokens,
        "prefill_s": asker.prefill_s,
        **results(asked, answers),
    }
    written = True
    for place, name, form in (("--csv", csv_file, as_csv), ("--html", html_file, as_html)):
        if name is not None:
            if saved(place, name, form(report)):
                say(f"written: {name}")
            else:
                written = False
    if as_json:
        from kvsieve.report.environment import environment

        emit_json({**report, "environment": environment(loaded)})
    else:
        print_results(report)
    if not written:
        raise typer.Exit(1)


def given_questions(question: Sequence[str] | None, file: str | None) -> list[str]:
    """Return the questions of both options. Raises InputError if there are none, or one is empty."""
    lines = [] if file is None else read_text(file, "question file").splitlines()
    found = [*(question or []), *(line.strip() for line in lines if line.strip())]
    if not found:
        raise InputError('no question was given: add --question "What was decided?" or --questions FILE')
    if not all(line.strip() for line in found):
        raise InputError("--question is empty; write the question")
    return found


def runs_of(methods: str, budget: str | None) -> list[MethodRun]:
    """Return the methods, full KV first, for comparison. Raises PlanError."""
    runs = compared_methods(methods, budget)
    if not runs:
        raise InputError(f"--methods names no method; write e.g. {_METHODS}")
    check_budget_used("--budget", budget, method_specs(methods))
    full = next((run for run in runs if run.name == "full"), None) or make_run("full")
    return list({run.label: run for run in (full, *runs)}.values())


def ask_all(asker: Asker, questions: Sequence[str], quiet: bool) -> list[DocumentAnswer]:
    """Return all answers, showing each while it is generated unless `quiet`."""
    answers: list[DocumentAnswer] = []
    last: list[str] = []

    def shown(label: str, piece: str) -> None:
        if last != [label]:
            show("", end="\n" if last else "")
            show(f"  {label}: ", end="")
            last[:] = [label]
            piece = piece.lstrip()
        show(piece, end="")

    for number, question in enumerate(questions):
        if not quiet:
            show(f"{number + 1}. {question}")
        answers += asker.ask(question, number, None if quiet else shown)
        if not quiet:
            show("\n" if last else "")
        last.clear()
    return answers


def results(questions: Sequence[str], answers: Sequence[DocumentAnswer]) -> dict[str, Any]:
    from kvsieve.lab.eval.ask import advice, differing_words, differs_at, summarise

    reference = {answer.question: answer for answer in reversed(answers)}
    rows = []
    for answer in answers:
        full = reference[answer.question]
        at = differs_at(full.tokens, answer.tokens)
        words = None if at is None else dict(zip(("full", "here"), differing_words(full, answer), strict=True))
        rows.append({**answer.to_dict(), "same_as_full": at is None, "differs_at": at, "differing_words": words})
    methods = summarise(answers)
    return {
        "questions": list(questions),
        "answers": rows,
        "methods": [dataclasses.asdict(method) for method in methods],
        "advice": advice(methods),
    }


def cell(row: dict[str, Any]) -> str:
    words = row["differing_words"]
    return as_full(row["differs_at"]) + (f": {words['here']} | {words['full']}" if words else "")


def matrix(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    labels = [method["method"] for method in report["methods"]][1:]
    rows = []
    for number, question in enumerate(report["questions"]):
        by_method = {row["method"]: row for row in report["answers"] if row["question"] == number}
        rows.append([f"{number + 1}. {question}", *(cell(by_method[label]) for label in labels)])
    return ["question", *labels], rows


def costs(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for method in report["methods"]:
        speed = "-" if method["per_token_s"] is None else f"{1000 * method['per_token_s']:.0f}"
        same = f"{method['same']} of {method['questions']}"
        times = [f"{method['first_token_s']:.2f}", speed]
        rows.append([method["method"], same, mebibytes(method["kv_bytes"]), f"{method['kv_share']:.0%}", *times])
    return ["method", "as full", "KV", "of full", "first token s", "token ms"], rows


def print_results(report: dict[str, Any]) -> None:
    tokens = report["document_tokens"]
    seconds = report["prefill_s"]
    if len(report["methods"]) > 1:
        headers, rows = matrix(report)
        print_table(headers, rows, left=len(headers))
    print_table(*costs(report))
    stored = f", {report['stored_tokens']:,} of them from the store" if report["stored_tokens"] else ""
    show(f"{tokens:,} tokens of documents{stored}, prefilled once in {seconds:.1f} s; first token: seconds after that.")
    notes = dict.fromkeys(f"note: {row['method']}: {note}" for row in report["answers"] for note in row["notes"])
    for note in notes:
        show(note)
    show(report["advice"])


def as_csv(report: dict[str, Any]) -> str:
    names = ["question", "method", "same_as_full", "differs_at", "text", "kv_bytes", "first_token_s", "per_token_s"]
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(names)
    for row in report["answers"]:
        writer.writerow([report["questions"][row["question"]], *(row[name] for name in names[1:])])
    return out.getvalue()


def as_html(report: dict[str, Any]) -> str:
    from kvsieve.report import html as h

    sections = [("costs", "Methods", h.text_table("What each method takes", *costs(report)))]
    if len(report["methods"]) > 1:
        sections.insert(0, ("matrix", "Compared with full KV", h.text_table("Answers", *matrix(report))))
    for number, question in enumerate(report["questions"]):
        rows = [[row["method"], row["text"]] for row in report["answers"] if row["question"] == number]
        sections.append((f"question-{number + 1}", question, h.text_table("Answers", ["method", "answer"], rows)))
    documents = ", ".join(Path(name).name for name in report["documents"])
    facts = f"{report['document_tokens']:,} tokens of {documents}, {Path(report['model']).name}"
    intro = h.paragraph(report["advice"]) + h.paragraph(facts, "quiet")
    return h.page("Questions and answers", sections, intro, made_by="kvsieve ask")
