"""Answers of models with tool calls and reasoning, parsed as an outside suite of recorded outputs expects.

    pip install canitoolcall==0.1.1
    python benchmarks/answers/tool_calls.py --out benchmarks/results/tool_calls.json

The suite (CanIToolCall) has the text that a model wrote, the tools it was offered, and the right parse. It judges one
of the whole text, and others of the text in pieces. Chat templates are not part of it, so the form of each family is
named here; the server finds it in the template (tests/serve/test_parsers.py).
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from canitoolcall import checks, fixtures, results

from kvsieve.report.environment import environment, write_result
from kvsieve.serve.parsers.deepseek import DeepSeekCalls
from kvsieve.serve.parsers.found import TemplateForms
from kvsieve.serve.parsers.gemma import GEMMA_4
from kvsieve.serve.parsers.harmony import HarmonyCalls
from kvsieve.serve.parsers.kimi import KimiCalls
from kvsieve.serve.parsers.mistral import MistralCalls
from kvsieve.serve.parsers.objects import BareCalls, MarkedCalls
from kvsieve.serve.parsers.reasoning import MarkedReasoning
from kvsieve.serve.parsers.tagged import GLM, QWEN_CODER, TaggedCalls, schemas_of
from kvsieve.serve.pieces import WholeAnswer

THINK = MarkedReasoning("<think>", "</think>")
SQUARE = MarkedReasoning("[THINK]", "[/THINK]")
CHANNEL = MarkedReasoning("<|channel>thought\n", "<channel|>")
# Sizes of pieces, in characters; "random" for 1 to 8.
SIZES: tuple[int | str, ...] = (1, 2, 3, 7, "random")


def names(tools: Any) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in tools)


# Forms by the begin of a model's name, the first that fits; None for formats that are not parsed.
FORMS: tuple[tuple[str, TemplateForms | None], ...] = (
    ("deepseek-ai/DeepSeek-V3-0324", TemplateForms(lambda tools: DeepSeekCalls(fenced=True))),
    ("deepseek-ai/DeepSeek-V3.1", TemplateForms(lambda tools: DeepSeekCalls(), THINK)),
    ("deepseek-ai/", None),
    ("google/gemma-4", TemplateForms(lambda tools: GEMMA_4, CHANNEL)),
    ("zai-org/GLM", TemplateForms(lambda tools: TaggedCalls(GLM, schemas_of(tools)), THINK)),
    ("openai/gpt-oss", TemplateForms(lambda tools: HarmonyCalls(names(tools)), channels=True)),
    ("moonshotai/Kimi-K3", None),
    ("moonshotai/Kimi", TemplateForms(lambda tools: KimiCalls(), THINK)),
    ("meta-llama/Llama-4", None),
    ("meta-llama/", TemplateForms(lambda tools: BareCalls(names(tools)))),
    ("mistralai/Magistral-Small-2506", TemplateForms(lambda tools: MistralCalls(), THINK)),
    ("mistralai/", TemplateForms(lambda tools: MistralCalls(), SQUARE)),
    ("Qwen/Qwen3-Coder", TemplateForms(lambda tools: TaggedCalls(QWEN_CODER, schemas_of(tools)))),
    ("Qwen/Qwen3.", TemplateForms(lambda tools: TaggedCalls(QWEN_CODER, schemas_of(tools)), THINK)),
    ("Qwen/", TemplateForms(lambda tools: MarkedCalls(), THINK)),
)


def pieces(text: str, size: int | str) -> Iterator[str]:
    """Yield a text in pieces."""
    draw = random.Random(1)
    at = 0
    while at < len(text):
        end = at + (draw.randint(1, 8) if isinstance(size, str) else size)
        yield text[at:end]
        at = end


def parsed(fixture: Any, forms: TemplateForms, prompt: str, size: int | str | None) -> Any:
    """Return the parse of a fixture. size: of the pieces; None for the whole text at once."""
    parser = forms.answer(prompt, fixture.tools).parser()
    answer = WholeAnswer()
    for piece in [fixture.raw_output] if size is None else pieces(fixture.raw_output, size):
        for part in parser.add(piece):
            answer.add(part)
    for part in parser.add("", last=True):
        answer.add(part)
    calls = tuple(results.ParsedToolCall(call.name, call.arguments) for call in answer.calls)
    return results.ParseResult(answer.text or None, answer.reasoning or None, calls)


def judged(fixture: Any, family: Any) -> dict[str, Any]:
    """Return a fixture's status, and its checks that did not pass."""
    forms = next(forms for begin, forms in FORMS if fixture.reference_model.startswith(begin))
    if forms is None:
        return {"id": fixture.id, "status": "unsupported"}
    models = {model.repo: model.default_generation_prompt for model in family.reference_models}
    prompt = fixture.generation_prompt or models.get(fixture.reference_model) or ""
    whole = parsed(fixture, forms, prompt, None)
    streams = {f"size:{size}": parsed(fixture, forms, prompt, size) for size in SIZES}
    rows = checks.run_checks(fixture, family, results.Observation(whole, streams))
    bad = {row.check: row.detail for row in rows if row.status.value not in ("pass", "soft_pass")}
    return {"id": fixture.id, "status": checks.case_status(rows).value, **({"checks": bad} if bad else {})}


def main() -> None:
    """Parse all fixtures and write the statuses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    families = fixtures.load_families()
    cases = [judged(fixture, families[fixture.family]) for fixture in fixtures.load_fixtures()]
    counts: dict[str, Counter[str]] = {}
    for case in cases:
        counts.setdefault(case["id"].partition("/")[0], Counter())[case["status"]] += 1
    for family, count in counts.items():
        print(f"{family:14}", dict(count))
    total = sum(counts.values(), Counter[str]())
    print("all", dict(total))
    failed = [case for case in cases if "checks" in case]
    report = {"suite": "canitoolcall 0.1.1", "counts": counts, "all": total, "not passed": failed, **environment()}
    write_result(args.out, report)


if __name__ == "__main__":
    main()
