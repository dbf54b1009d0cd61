"""`kvsieve demo`: a real model, a long document, one fact to find, three methods side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from kvsieve.cli.answers import Generation, encode, run_methods
from kvsieve.cli.document import CODE, QUESTION, build_document
from kvsieve.cli.loading import DtypeOption, check_dtype, load_model
from kvsieve.cli.output import JsonOption, emit_json, say, show
from kvsieve.cli.prompts import TextPrompt
from kvsieve.cli.run import print_answers, print_stats, report
from kvsieve.cli.specs import MethodRun, make_run

CHUNK = 1024
MAX_NEW_TOKENS = 32
COLUMNS = """\
prompt tokens: those read; deep tokens: those of them that the deepest layer computed, which is what a prompt costs.
KV asked, KV kept: entries per layer and KV head after the prompt, by the budget and in fact; KV held: their memory.
TTFT: time to the first token; TPOT: time per token after it; peak: memory of the process, model included.
ran: whether every part of the method acted on this prompt."""


def demo_runs() -> list[MethodRun]:
    """Settings that suit this small model.

    Narrow pooling tears a number of seven tokens apart, an early TSP layer drops the fact before the model has
    understood it, and a window of 8 sees little more than the chat template.
    """
    shared = {"budget": "20%", "kernel": 21, "window": 32}
    return [
        make_run("full"),
        make_run("snapkv", **shared),
        make_run("fastkv", **shared, tsp_layer=22, tsp_rate=0.3, pooling="avg"),
    ]


def demo_command(
    tokens: Annotated[int, typer.Option(min=200, max=8000, help="Length of the document.")] = 5000,
    depth: Annotated[float, typer.Option(min=0, max=1, help="Where the fact stands: 0 start, 1 end.")] = 0.5,
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Hide a fact in a long document and ask the demo model for it, under full KV, SnapKV and FastKV."""
    check_dtype(dtype)
    tell = say if as_json else show
    runs = demo_runs()
    model, tokenizer = load_model(None, dtype)
    document = build_document(tokenizer, tokens, depth)
    asked = encode(tokenizer, TextPrompt(f"{document}\n\n{QUESTION}"))
    tell(f"{run_title(model)} reads {asked.ids.shape[1]} tokens of Python's help texts with one fact at {depth:.0%}.")
    tell(f"Question: {QUESTION}  (expected: {CODE})")
    results = run_methods(model, tokenizer, asked, runs, Generation(CHUNK, MAX_NEW_TOKENS))
    for result in results:
        result["correct"] = CODE in result["answer"]
    if as_json:
        facts = {"question": QUESTION, "expected": CODE, "document_tokens": tokens, "depth": depth}
        emit_json({**facts, **report(None, results)})
    else:
        show()
        print_answers(results)
        print_stats(results)
        print(COLUMNS)
    wrong = [result["method"] for result in results if not result["correct"]]
    if wrong:
        say(f"error: expected {CODE} in every answer, {', '.join(wrong)} answered without it")
        raise typer.Exit(1)


def run_title(model: object) -> str:
    from kvsieve.models.fetch import MODEL_NAME

    return f"{MODEL_NAME} ({str(model.dtype).removeprefix('torch.')}, {model.device})"  # type: ignore[attr-defined]
