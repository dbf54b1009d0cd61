"""`kvsieve demo`: a real model, a long document, one fact to find, three methods side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from kvsieve.cli.answers import Generation, encode, run_methods
from kvsieve.cli.document import CODE, QUESTION, build_document
from kvsieve.cli.loading import DtypeOption, check_dtype, load_model
from kvsieve.cli.options import PROMPT, TOKENS, option
from kvsieve.cli.output import JsonOption, emit_json, say, show
from kvsieve.cli.prompts import TextPrompt
from kvsieve.cli.run import report
from kvsieve.cli.run_tables import print_answers, print_stats
from kvsieve.cli.specs import MethodRun, make_run
from kvsieve.errors import InputError

CHUNK = 1024
MAX_NEW_TOKENS = 32
LEGEND = """\
KV kept: entries per layer and KV head after the prompt; KV MiB: memory of the KV cache.
TTFT: time to first token; TPOT: time per token after it.
as full: = full where the answer has the tokens of full KV's, else the first that differs."""


def demo_runs() -> list[MethodRun]:
    """Return settings that suit this small model.

    Narrow pooling breaks up a number of seven tokens, an early TSP layer drops the fact before the model has understood
    it, and a window of 8 sees little more than the chat template.
    """
    shared = {"budget": "20%", "kernel": 21, "window": 32}
    return [
        make_run("full"),
        make_run("snapkv", **shared),
        make_run("fastkv", **shared, tsp_layer=22, tsp_rate=0.3, pooling="avg"),
    ]


def demo_command(
    tokens: Annotated[int, option(PROMPT, "Length of the document, in tokens", **TOKENS)] = 5000,
    depth: Annotated[float, option(PROMPT, "Position of the fact: 0 start, 1 end", min=0, max=1)] = 0.5,
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Hide a fact in a long document and ask the demo model for it, under full KV, SnapKV and FastKV."""
    check_dtype(dtype)
    if not 200 <= tokens <= 8000:
        raise InputError(f"--tokens must be from 200 to 8000, got {tokens}")
    write = say if as_json else show
    runs = demo_runs()
    model, tokenizer = load_model(None, dtype)
    prompt = encode(tokenizer, TextPrompt(f"{build_document(tokenizer, tokens, depth)}\n\n{QUESTION}"))
    write(f"{run_title(model)} reads {prompt.ids.shape[1]} tokens of Python's help texts with one fact at {depth:.0%}.")
    write(f"Question: {QUESTION}  (expected: {CODE})")
    results = run_methods(model, tokenizer, prompt, runs, Generation(CHUNK, MAX_NEW_TOKENS))
    for result in results:
        result["correct"] = CODE in result["answer"]
    if as_json:
        facts = {"question": QUESTION, "expected": CODE, "document_tokens": tokens, "depth": depth}
        emit_json({**facts, **report(None, results)})
    else:
        show()
        print_answers(results)
        print_stats(results)
        print(LEGEND)
    wrong = [result["method"] for result in results if not result["correct"]]
    if wrong:
        say(f"error: expected {CODE} in every answer, {', '.join(wrong)} answered without it")
        raise typer.Exit(1)


def run_title(model: object) -> str:
    from kvsieve.models.fetch import MODEL_NAME

    return f"{MODEL_NAME} ({str(model.dtype).removeprefix('torch.')}, {model.device})"  # type: ignore[attr-defined]
