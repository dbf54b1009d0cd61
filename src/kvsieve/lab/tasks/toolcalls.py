"""A long list of tools and a request: is the call valid by the tool's JSON schema, and is it the right one?"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsieve.lab.tasks.base import Generated
from kvsieve.lab.tasks.fit import Count, fit_padded
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample, Score
from kvsieve.lab.tasks.words import FIRST_NAMES, NOUNS, TOWNS

_VERBS = "book borrow check clean order paint rent repair reserve sell send store".split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday".split()
# Arguments: their schema, and the words of a request that give them.
_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "person": ({"type": "string"}, "for {}"),
    "town": ({"type": "string"}, "in {}"),
    "day": ({"type": "string", "enum": _DAYS}, "on {}"),
    "hours": ({"type": "integer"}, "{} hours long"),
}
_TYPES = {"string": str, "integer": int, "boolean": bool, "object": dict}
_START = '{"name": "'
Tool = dict[str, Any]


@dataclass(frozen=True)
class ToolCalls(Generated):
    """Tools with JSON schemas, and a request that one of them serves; the answer is the call as JSON."""

    name: str = "toolcalls"
    title: str = "Tool call (valid, right)"

    def build(self, rng: random.Random, index: int, length: int, count: Count) -> Sample:
        verb, noun = rng.choice(_VERBS), rng.choice(NOUNS)
        right = _tool(rng, verb, noun)
        values: dict[str, Any] = {
            "person": rng.choice(FIRST_NAMES),
            "town": rng.choice(TOWNS),
            "day": rng.choice(_DAYS),
            "hours": rng.randrange(2, 10),
        }
        arguments = {name: values[name] for name in right["parameters"]["properties"]}
        depth = rng.random()
        more = rng.getrandbits(32)
        said = " ".join(_ARGUMENTS[name][1].format(value) for name, value in arguments.items())
        ask = (
            f"Request: please {verb} the {noun} {said}. Which tool is to be called? Answer with the call only, as JSON "
            'such as {"name": "...", "arguments": {...}}.'
        )
        call = json.dumps({"name": right["name"], "arguments": arguments})
        # Filled by `make`: the score judges a call of any of the prompt's tools.
        tools: dict[str, Tool] = {}
        turn = QuestionAnswer(
            ask,
            (right["name"],),
            valid_and_right(tools, right["name"], arguments),
            80,
            prefix=_START,
            golden=call.removeprefix(_START),
        )

        def make(units: int, filler: str) -> Sample:
            fresh = random.Random(more)
            # Tools of the same verb or of the same noun among them, never of both; names repeat with a number.
            others: list[Tool] = []
            seen: Counter[str] = Counter()
            while len(others) < units:
                tool = _tool(fresh, fresh.choice(_VERBS), fresh.choice(NOUNS))
                plain = tool["name"]
                if plain != right["name"]:
                    others.append({**tool, "name": f"{plain}_{seen[plain] + 1}" if seen[plain] else plain})
                    seen[plain] += 1
            others.insert(round(depth * len(others)), right)
            tools.clear()
            tools.update((tool["name"], tool) for tool in others)
            lead = f"These tools can be called, one a line. {filler}".strip()
            return Sample("\n".join([lead, *map(json.dumps, others)]), (turn,), meta={"depth": depth})

        return fit_padded(make, count, length, self.name)


def _tool(rng: random.Random, verb: str, noun: str) -> Tool:
    names = sorted(rng.sample(list(_ARGUMENTS), rng.randrange(2, 4)))
    parameters = {"type": "object", "properties": {name: _ARGUMENTS[name][0] for name in names}, "required": names}
    return {"name": f"{verb}_{noun}", "description": f"{verb.capitalize()} the {noun}.", "parameters": parameters}


def valid_and_right(tools: Mapping[str, Tool], name: str, arguments: Mapping[str, Any]) -> Score:
    """Score a call: "valid" by its tool's schema, "tool" if that is the right one, "right" if its arguments are, too.

    The score is their mean.
    """

    def score(answer: str, expected: tuple[str, ...]) -> dict[str, float]:
        call = call_of(answer)
        called = tools.get(str(call.get("name"))) if call else None
        given = call.get("arguments") if call else None
        valid = called is not None and matches(given, called["parameters"])
        tool = called is not None and called["name"] == name
        right = valid and tool and given == arguments
        parts = {"valid": float(valid), "tool": float(tool), "right": float(right)}
        return {"score": sum(parts.values()) / len(parts), **parts}

    return score


def call_of(answer: str) -> dict[str, Any]:
    """Return the first JSON object of an answer that continues `_START` or begins with it; {} for none."""
    for text in (_START + answer.lstrip(), answer[answer.find("{") :] if "{" in answer else ""):
        try:
            found, _ = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def matches(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return True if a value is valid by a schema of `type`, `enum`, `properties` and `required`."""
    kind: Any = _TYPES[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return False
    if value not in schema.get("enum", [value]):
        return False
    if kind is not dict:
        return True
    properties: Mapping[str, Any] = schema["properties"]
    required: Sequence[str] = schema["required"]
    return set(required) <= value.keys() <= properties.keys() and all(
        matches(argument, properties[name]) for name, argument in value.items()
    )
