"""The demo's document: Python's help texts with one fact hidden in them."""

from __future__ import annotations

from typing import Any

from kvsieve.lab.tasks.haystack import load_haystack

CODE = "7294163"
FACT = "The special magic number of the lighthouse is {code}."
QUESTION = "What is the special magic number of the lighthouse mentioned in the text above?"

# English prose never has fewer characters per token of the demo model's vocabulary.
_CHARACTERS_PER_TOKEN = 10


def build_document(tokenizer: Any, tokens: int, depth: float, code: str = CODE) -> str:
    """Return about `tokens` tokens of Python's help texts, with the fact as a paragraph at `depth` (0 to 1)."""
    fact = FACT.format(code=code)
    text = _first_tokens(tokenizer, load_haystack("topics"), tokens - len(tokenizer(fact)["input_ids"]))
    at = _paragraph_break(text, int(len(text) * depth))
    return "\n\n".join(part for part in (text[:at].strip(), fact, text[at:].strip()) if part)


def _first_tokens(tokenizer: Any, text: str, count: int) -> str:
    text = text[: count * _CHARACTERS_PER_TOKEN]
    offsets = tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return text[: offsets[min(count, len(offsets)) - 1][1]]


def _paragraph_break(text: str, near: int) -> int:
    """Return the paragraph break closest to `near`; both ends of the text count as one."""
    before = text.rfind("\n\n", 0, near)
    after = text.find("\n\n", near)
    before = max(before, 0)
    after = len(text) if after < 0 else after
    return before if near - before < after - near else after
