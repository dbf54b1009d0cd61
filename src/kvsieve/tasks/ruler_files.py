"""RULER (arXiv 2404.06654): the JSONL files that its own scripts generate.

kvsieve's `ruler_...` tasks generate prompts of the same kind without a download; these read the benchmark's own.
"""

from __future__ import annotations

from pathlib import Path

from kvsieve.tasks.document_task import DocumentQuestion, DocumentTask
from kvsieve.tasks.files import SUFFIXES, FileRow, find_file, read_rows
from kvsieve.tasks.samples import QuestionAnswer
from kvsieve.tasks.scoring import match_all, match_any

# Longest answers, by how the names of RULER's tasks begin.
_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
NAMES = tuple(
    f"rulerfile_{each}"
    for each in (
        *(f"niah_{kind}_{number}" for kind in ("single", "multikey") for number in (1, 2, 3)),
        *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
    )
)
_FIELDS: dict[str, tuple[type, ...]] = {"index": (int,), "input": (str,), "outputs": (list,)}
_CONTROL = ("<|im_start|>", "<|eot_id|>", "[/INST]", "<start_of_turn>", "<|end|>", "<|user|>")


def ruler_file(name: str, data: str | Path) -> DocumentTask:
    """A generated file as a task: "rulerfile_vt" is vt/validation.jsonl (or test.jsonl) or vt.jsonl.

    Prompts are as long as they were made, and a longer one than asked for is refused.

    Raises:
        InputError: a file that is not there, is not RULER's, or was made with a model's chat template.
    """
    part = name.removeprefix("rulerfile_")
    places = [f"{part}{middle}{suffix}" for suffix in SUFFIXES for middle in ("/validation", "/test", "")]
    file = find_file(data, places, name)
    rows = read_rows(file, _FIELDS, "RULER")
    return DocumentTask(name, f"RULER's file, {part}", [_asked(row, part) for row in rows], None, file)


def _asked(row: FileRow, part: str) -> DocumentQuestion:
    outputs, prompt, prefix = row.values["outputs"], row.values["input"].strip(), row.values.get("answer_prefix") or ""
    if not outputs or not all(isinstance(each, str) and each for each in outputs):
        raise row.wrong(f"'outputs' must be a list of texts, at least one; got {outputs!r}")
    if not isinstance(prefix, str):
        raise row.wrong(f"'answer_prefix' is {prefix!r}, expected text")
    control = next((each for each in _CONTROL if each in prompt), None)
    if control is not None:
        raise row.wrong(f"'input' has a chat template in it ({control!r}); generate it with --model_template_type base")
    # The question is the last line; a prompt of one line would leave no context to compress.
    text, _, question = prompt.rpartition("\n")
    if not text.strip():
        raise row.wrong("'input' has one line only, expected a text and the question below it")
    tokens = next((most for kind, most in _TOKENS.items() if part.startswith(kind)), 128)
    score = match_any if part.startswith("qa") else match_all
    turn = QuestionAnswer(question, tuple(outputs), score, tokens, prefix.strip())
    return DocumentQuestion("", text.rstrip(), turn, row.line)
