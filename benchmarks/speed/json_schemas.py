"""JSON schemas as applications send them, each with a value that matches it, made by a seeded generator."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

TOPICS = {
    "customer": "name email phone address age newsletter tags",
    "order": "id customer items total currency status placed_at notes",
    "invoice": "number issued_on due_on lines tax_rate total paid",
    "calendar event": "title starts_at ends_at location attendees reminder_minutes recurring",
    "support ticket": "subject severity component steps reporter assignee resolved",
    "weather report": "city date temperature humidity wind conditions warnings",
    "recipe": "title servings ingredients steps minutes vegetarian difficulty",
    "job posting": "title company location remote salary skills contact",
    "patient record": "id name birth_date blood_type medications allergies vitals",
    "sensor reading": "device measured_at value unit battery errors position",
}
WORDS = "amber birch cedar delta ember fjord grove harbor indigo juniper kelp lumen maple nectar opal pine".split()
FORMATS = {
    "email": "ada.birch@example.com",
    "date": "2026-03-14",
    "date-time": "2026-03-14T09:26:53Z",
    "uuid": "3f2b1c9e-7a54-4c1d-9d3e-2b8f6a0c5d17",
    "ipv4": "192.0.2.17",
    "time": "09:26:53Z",
}
_DEEPEST = 3


@dataclass(frozen=True)
class Sample:
    """A schema, the thing that it describes, and a value that matches it."""

    topic: str
    schema: dict[str, Any]
    value: Any


def samples(count: int, seed: int = 0) -> list[Sample]:
    """Return schemas with values; the first ones do not depend on their number."""
    return [_sample(random.Random(f"{seed} {number}")) for number in range(count)]


def _sample(draw: random.Random) -> Sample:
    topic = draw.choice(sorted(TOPICS))
    names = draw.sample(TOPICS[topic].split(), draw.randint(3, 7))
    schema, value = _object(draw, names, 0)
    if draw.random() < 0.3:
        person, one = _object(draw, ["name", "role", "since"], _DEEPEST)
        schema["$defs"] = {"person": person}
        schema["properties"]["owner"] = {"$ref": "#/$defs/person"}
        schema["properties"]["reviewers"] = {"type": "array", "items": {"$ref": "#/$defs/person"}, "maxItems": 2}
        schema["required"] += ["owner", "reviewers"]
        value |= {"owner": one, "reviewers": [one]}
    return Sample(topic, schema, value)


def _object(draw: random.Random, names: list[str], depth: int) -> tuple[dict[str, Any], dict[str, Any]]:
    properties = {}
    value = {}
    required = []
    for name in names:
        properties[name], one = _value(draw, depth + 1)
        if draw.random() < 0.85:
            required.append(name)
            value[name] = one
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return schema, value


def _value(draw: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    """Return a schema and a value of any kind; deeper than a few levels, of one without parts."""
    kinds = [_text, _formatted, _one_of, _whole, _number, _truth]
    if depth < _DEEPEST:
        kinds += [_list, _part, _either]
    return draw.choice(kinds)(draw, depth)


def _text(draw: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    text = " ".join(draw.sample(WORDS, draw.randint(1, 4)))
    schema: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": draw.choice([40, 60, 80])}
    if draw.random() < 0.2:
        code = f"{draw.choice(['AB', 'QX', 'ZT'])}-{draw.randint(1000, 9999)}"
        return {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}, code
    if draw.random() < 0.3:
        schema["description"] = f"What is said about {draw.choice(WORDS)}."
    return schema, text


def _formatted(draw: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    name = draw.choice(sorted(FORMATS))
    # An address is as long as its writer likes, unless it is bounded.
    bound = {"maxLength": 60} if name == "email" else {}
    return {"type": "string", "format": name, **bound}, FORMATS[name]


def _one_of(draw: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    choices = draw.sample(WORDS, draw.randint(2, 6))
    return {"type": "string", "enum": choices}, draw.choice(choices)


def _whole(draw: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    low = draw.choice([0, 1, -50])
    high = low + draw.choice([10, 100, 5000])
    return {"type": "integer", "minimum": low, "maximum": high}, draw.randint(low, high)


def _number(draw: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    if draw.random() < 0.2:
        return {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500}, 5 * draw.randint(0, 100)
    return {"type": "number", "minimum": 0, "maximum": draw.choice([1, 100, 10_000])}, round(draw.random(), 3)


def _truth(draw: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    return {"type": "boolean"}, draw.random() < 0.5


def _list(draw: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    items, value = _value(draw, depth + 1)
    least = draw.randint(0, 1)
    most = draw.randint(2, 4)
    schema = {"type": "array", "items": items, "minItems": least, "maxItems": most}
    return schema, [value] * draw.randint(least, most)


def _part(draw: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    return _object(draw, draw.sample(WORDS, draw.randint(2, 4)), depth)


def _either(draw: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    first, value = _value(draw, depth + 1)
    second = draw.choice([{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}])
    return {"anyOf": [first, second]}, value
