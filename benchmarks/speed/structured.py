"""Answers by JSON schemas: how many match, what a token takes with and without the schema, and compilers compared.

    python benchmarks/speed/structured.py MODEL ... [--calls] [--schemas 100] [--timed 100] [--new-tokens 768]
        [--seed 0] [--minutes M] [--out FILE]
    python benchmarks/speed/structured.py MODEL --server URL [--clients 8] [--calls] [--schemas 100] ...
    python benchmarks/speed/structured.py MODEL --compare [--schemas 100] [--rounds 3] [--out FILE]

The schemas are those of json_schemas.py: nested objects, enumerations, arrays, formats, bounded numbers, alternatives
and definitions. For each the model is asked for such an object, greedily. An answer is valid if it has ended, and the
package jsonschema accepts it. Then the same prompt is answered without the grammar, by as many tokens; which of both
runs first alternates. After the first --timed schemas, answers are only checked. Times are medians over the tokens of
an answer, ratios are taken schema by schema. Matcher times are those of restricting and taking each token, without the
model.

With --calls the model is forced to call a tool with such an object as its arguments, in the form of its chat template,
as the server does it for a named `tool_choice`.

With --server a running server with that model is asked, by several clients at once, so answers are generated in joint
batches; they are only checked.

With --compare nothing is generated: llguidance, as kvsieve uses it, and xgrammar (`pip install xgrammar`) compile the
same schemas for the model's tokenizer, and compute the mask before each token of a value that matches. Each schema is
compiled without a cache.

All parts are kept in one result, `benchmarks/results/structured.json`, by the model's name. Schemas that it has answers
to are not asked again, so a run that was interrupted, or ended by --minutes, continues with the same command.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jsonschema
import torch

import kvsieve
from benchmarks.answers.compared import Deadline
from benchmarks.speed.json_schemas import Sample, samples
from kvsieve.hf.generate.grammar import compiled
from kvsieve.models import load_tokenizer
from kvsieve.planning.turns import prompt_ids, render, stop_ids, token_ids
from kvsieve.report.environment import environment, write_result
from kvsieve.serve.parsers.found import forms_of
from kvsieve.serve.pieces import WholeAnswer

RESULTS = Path(__file__).parents[1] / "results" / "structured.json"
VALIDATOR = jsonschema.Draft202012Validator
WANTED = {"valid": 1.0, "ratio": 1.05}


def figures(times: list[float], unit: float) -> dict[str, float]:
    """Return median, 95th percentile and maximum of some times."""
    ordered = sorted(times)
    high = ordered[min(int(0.95 * len(ordered)), len(ordered) - 1)]
    return {
        "median": round(statistics.median(ordered) / unit, 3),
        "p95": round(high / unit, 3),
        "max": round(ordered[-1] / unit, 3),
    }


def question(sample: Sample) -> list[dict[str, str]]:
    schema = json.dumps(sample.schema)
    text = f"Invent one {sample.topic}. Answer with a JSON object that matches this JSON schema:\n{schema}"
    return [{"role": "user", "content": text}]


def fault(text: str, schema: dict[str, Any]) -> str | None:
    """Return why a text does not match a schema, or None if it does."""
    try:
        VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def matching_times(grammar: kvsieve.Grammar, tokenizer: Any, tokens: list[int], words: int) -> list[float]:
    """Return the seconds that the matcher takes for each token of an answer."""
    matcher = compiled(grammar, tokenizer).matcher(())
    scores = torch.zeros(words)
    found = []
    for token in tokens:
        began = time.perf_counter()
        matcher.restrict(scores)
        if not matcher.take(token):
            break
        found.append(time.perf_counter() - began)
    return found


@dataclass(frozen=True)
class Task:
    """A prompt int64 [1, N], the grammar of its answer, and a function from an answer to its fault."""

    ids: torch.Tensor
    grammar: kvsieve.Grammar
    fault: Callable[[str], str | None]


def json_task(tokenizer: Any, sample: Sample) -> Task:
    """Return the task to answer with JSON that matches a schema."""
    ids = torch.tensor([prompt_ids(tokenizer, question(sample))])
    return Task(ids, kvsieve.Grammar.json_schema(sample.schema), lambda text: fault(text, sample.schema))


def recorder(sample: Sample) -> dict[str, Any]:
    """Return the tool whose parameters match a schema."""
    function = {"name": "record", "description": f"Record one {sample.topic}.", "parameters": sample.schema}
    return {"type": "function", "function": function}


def invitation(sample: Sample) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Record an invented {sample.topic}."}]


def call_task(tokenizer: Any, sample: Sample) -> Task:
    """Return the task to call a tool whose parameters match a schema."""
    tool = recorder(sample)
    prompt = render(tokenizer, invitation(sample), tools=[tool])
    form = forms_of(tokenizer).answer(prompt, [tool], single=True, named=True)
    added = {word.content: token for token, word in tokenizer.added_tokens_decoder.items()}

    def wrong(text: str) -> str | None:
        answer = WholeAnswer(form.parser().add(text, last=True))
        if answer.text.strip() or [call.name for call in answer.calls] != ["record"]:
            return f"not one call: {text[:100]!r}"
        return fault(answer.calls[0].arguments, sample.schema)

    grammar = kvsieve.Grammar.lark(form.forced_calls(added, [tool]))
    return Task(torch.tensor([token_ids(tokenizer, prompt)]), grammar, wrong)


def answered(sieve: Any, tokenizer: Any, sample: Sample, number: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Answer one prompt with and without its grammar, and return what came of it."""
    task = (call_task if arguments.calls else json_task)(tokenizer, sample)
    ids, grammar = task.ids, task.grammar
    ends = sorted(stop_ids(tokenizer, sieve.model.generation_config.eos_token_id))
    greedy = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id or 0, "repetition_penalty": 1.0}
    began = time.perf_counter()
    compiled(grammar, tokenizer)
    compile_s = time.perf_counter() - began

    def restricted() -> Any:
        return sieve.generate(ids, grammar=grammar, max_new_tokens=arguments.new_tokens, eos_token_id=ends, **greedy)

    def free(count: int) -> Any:
        return sieve.generate(ids, max_new_tokens=count, eos_token_id=None, **greedy)

    result = restricted()
    count = result.sequences.shape[1] - ids.shape[1]
    times: dict[str, float] = {}
    if number < arguments.timed:
        plain = free(count)
        # Where the free run is to be first, the number of its tokens is known from the one before.
        if number % 2:
            result = restricted()
        medians = [statistics.median(one.token_s) for one in (result, plain)] if count > 1 else [1.0, 1.0]
        times = {
            "tpot_ms": round(1e3 * medians[0], 3),
            "tpot_free_ms": round(1e3 * medians[1], 3),
            "ratio": round(medians[0] / medians[1], 4),
        }
    tokens = result.sequences[0, ids.shape[1] :].tolist()
    ended = tokens[-1] in ends
    why = task.fault(result.text) if ended else f"not ended after {count} tokens"
    mask = matching_times(grammar, tokenizer, tokens, sieve.model.get_output_embeddings().weight.shape[0])
    return {
        "topic": sample.topic,
        "tokens": count,
        "fault": why,
        "compile_ms": round(1e3 * compile_s, 3),
        "matcher_ms": round(1e3 * statistics.median(mask), 4),
        **times,
    }


def rows_of(known: dict[str, Any], arguments: argparse.Namespace, **more: int) -> list[dict[str, Any]]:
    """Return the rows of a part of a result. Raises SystemExit if it is of other settings."""
    settings = {"seed": arguments.seed, "new_tokens": arguments.new_tokens, **more}
    if known.setdefault("settings", settings) != settings:
        raise SystemExit(f"error: {arguments.out} has other settings; name another file with --out")
    rows: list[dict[str, Any]] = known.setdefault("answers", [])
    return rows


def measured(name: str, arguments: argparse.Namespace, known: dict[str, Any], write: Callable[[], None]) -> None:
    """Add the answers of a model that a result lacks, and write it after each. known: the model's part of it."""
    rows = rows_of(known, arguments)
    if len(rows) >= arguments.schemas:
        return
    deadline = Deadline(arguments.minutes)
    model, tokenizer = kvsieve.models.load(name)
    known.setdefault("environments", []).append(environment(model))
    # The tokenizer is converted once for all grammars.
    began = time.perf_counter()
    compiled(kvsieve.Grammar.regex("x"), tokenizer)
    known["prepare_s"] = round(time.perf_counter() - began, 2)
    with kvsieve.attach(model, kvsieve.plan("full"), tokenizer=tokenizer) as sieve:
        for number, sample in enumerate(samples(arguments.schemas, arguments.seed)):
            if number < len(rows) or deadline.passed:
                continue
            rows.append(answered(sieve, tokenizer, sample, number, arguments))
            print(f"{name}, schema {number}: {rows[-1]}", flush=True)
            known["summary"] = summary(rows)
            write()
    print(f"{name}: {known.get('summary')}")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a model's answers."""
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    return {
        "schemas": len(rows),
        "valid": sum(row["fault"] is None for row in rows) / len(rows),
        "timed": len(ratios),
        "ratio": round(statistics.median(ratios), 4) if ratios else None,
        "compile_ms": figures([row["compile_ms"] for row in rows], 1),
        "matcher_ms": figures([row["matcher_ms"] for row in rows], 1),
        "wanted": WANTED,
    }


def fetched(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a server's reply to a body, or to none."""
    data = body and json.dumps(body).encode()
    request = urllib.request.Request(url, data or None, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=3600) as reply:
        return dict(json.load(reply))


def replied(url: str, model: str, sample: Sample, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what came of one request to a server."""
    body: dict[str, Any] = {"model": model, "max_tokens": arguments.new_tokens, "temperature": 0}
    if arguments.calls:
        chosen = {"type": "function", "function": {"name": "record"}}
        body |= {"messages": invitation(sample), "tools": [recorder(sample)], "tool_choice": chosen}
    else:
        form = {"type": "json_schema", "json_schema": {"name": "record", "schema": sample.schema}}
        body |= {"messages": question(sample), "response_format": form}
    reply = fetched(f"{url}/v1/chat/completions", body)
    choice = reply["choices"][0]
    if choice["finish_reason"] == "length":
        why: str | None = "not ended"
    elif arguments.calls:
        calls = {call["function"]["name"]: call["function"]["arguments"] for call in choice["message"]["tool_calls"]}
        why = fault(calls["record"], sample.schema) if [*calls] == ["record"] else f"calls of {[*calls]}"
    else:
        why = fault(choice["message"]["content"], sample.schema)
    return {"topic": sample.topic, "tokens": reply["usage"]["completion_tokens"], "fault": why}


def served(arguments: argparse.Namespace, known: dict[str, Any], write: Callable[[], None]) -> None:
    """Like `measured`, of a server's answers."""
    rows = rows_of(known, arguments, clients=arguments.clients)
    chosen = samples(arguments.schemas, arguments.seed)
    deadline = Deadline(arguments.minutes)
    model = fetched(f"{arguments.server}/v1/models")["data"][0]["id"]
    known.setdefault("environments", []).append(environment())
    with ThreadPoolExecutor(arguments.clients) as clients:
        while len(rows) < len(chosen) and not deadline.passed:
            some = chosen[len(rows) : len(rows) + 2 * arguments.clients]
            rows += clients.map(lambda sample: replied(arguments.server, model, sample, arguments), some)
            known["summary"] = {"schemas": len(rows), "valid": sum(row["fault"] is None for row in rows) / len(rows)}
            write()
            print(known["summary"], [row["fault"] for row in rows if row["fault"]], flush=True)


Step = Callable[[int], bool]


def by_llguidance(tokenizer: Any, words: int) -> Callable[[Sample], tuple[Callable[[], None], Step]]:
    """Return a function that compiles a schema, and gives what computes a mask and what takes a token."""
    import llguidance
    from llguidance.torch import allocate_token_bitmask, fill_next_token_bitmask

    from kvsieve.hf.generate.grammar import Vocabulary

    own = Vocabulary(tokenizer).tokenizer
    bits = allocate_token_bitmask(1, own.vocab_size)

    def compile_(sample: Sample) -> tuple[Callable[[], None], Step]:
        matcher = llguidance.LLMatcher(own, kvsieve.Grammar.json_schema(sample.schema).text, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return lambda: fill_next_token_bitmask(matcher, bits), matcher.consume_token

    return compile_


def by_xgrammar(tokenizer: Any, words: int) -> Callable[[Sample], tuple[Callable[[], None], Step]]:
    """Like `by_llguidance`."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=words)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bits = xgrammar.allocate_token_bitmask(1, words)

    def compile_(sample: Sample) -> tuple[Callable[[], None], Step]:
        matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(sample.schema)))
        return lambda: matcher.fill_next_token_bitmask(bits), matcher.accept_token

    return compile_


def compared(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return times of both libraries for the tokenizer of a model."""
    from importlib.metadata import version

    tokenizer = load_tokenizer(name)
    words = len(tokenizer)
    chosen = samples(arguments.schemas, arguments.seed)
    values = [tokenizer(json.dumps(sample.value), add_special_tokens=False)["input_ids"] for sample in chosen]
    makers = {"llguidance": by_llguidance, "xgrammar": by_xgrammar}
    found: dict[str, dict[str, Any]] = {}
    ready = {}
    for library, make in makers.items():
        began = time.perf_counter()
        ready[library] = make(tokenizer, words)
        prepare_s = round(time.perf_counter() - began, 2)
        found[library] = {"version": version(library), "prepare_s": prepare_s, "compile": [], "mask": [], "first": []}
        found[library]["refused"] = {}
    for turn in range(arguments.rounds):
        for library in sorted(makers, reverse=bool(turn % 2)):
            for number, (sample, tokens) in enumerate(zip(chosen, values, strict=True)):
                _time(found[library], ready[library], sample, tokens, number)
    for part in found.values():
        part["compile_ms"] = figures(part.pop("compile"), 1e-3)
        part["first_mask_us"] = figures(part.pop("first"), 1e-6)
        part["mask_us"] = figures(part.pop("mask"), 1e-6)
    print(json.dumps(found, indent=1))
    settings = {"schemas": arguments.schemas, "rounds": arguments.rounds, "words": words}
    return {"environment": environment(), "settings": settings, **found}


def _time(
    found: dict[str, Any],
    compile_: Callable[[Sample], tuple[Callable[[], None], Step]],
    sample: Sample,
    tokens: list[int],
    number: int,
) -> None:
    """Add the times of one schema to those of its library."""
    began = time.perf_counter()
    try:
        mask, take = compile_(sample)
    except Exception as error:  # each library has its own
        found["refused"][number] = str(error).splitlines()[0][:200]
        return
    found["compile"].append(time.perf_counter() - began)
    for place, token in enumerate(tokens):
        began = time.perf_counter()
        mask()
        found["mask" if place else "first"].append(time.perf_counter() - began)
        if not take(token):
            found["refused"][number] = f"token {place} of a value that matches"
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", help="checkpoints' directories")
    parser.add_argument("--calls", action="store_true", help="force tool calls instead")
    parser.add_argument("--server", metavar="URL", help="ask a running server instead")
    parser.add_argument("--clients", type=int, default=8, help="of --server (default: 8)")
    parser.add_argument("--compare", action="store_true", help="compare the libraries instead")
    parser.add_argument("--schemas", type=int, default=100)
    parser.add_argument("--timed", type=int, default=100, help="schemas with times of their tokens (default: 100)")
    parser.add_argument("--new-tokens", type=int, default=768, help="most tokens of an answer (default: 768)")
    parser.add_argument("--rounds", type=int, default=3, help="of --compare (default: 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="end of a model's answers (default: none)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    report: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in arguments.models:
        kind = "compared" if arguments.compare else "calls" if arguments.calls else "answers"
        known = report.setdefault(f"served {kind}" if arguments.server else kind, {}).setdefault(Path(name).name, {})
        write = partial(write_result, arguments.out, report)
        if arguments.compare:
            known |= compared(name, arguments)
            write()
        else:
            served(arguments, known, write) if arguments.server else measured(name, arguments, known, write)


if __name__ == "__main__":
    main()
