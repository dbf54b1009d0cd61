"""Schemas, regular expressions and grammars that would take endless time or memory, or cannot be compiled."""

from __future__ import annotations

from typing import Any

from kvsieve.planning.grammars import Grammar


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def chosen(count: int) -> dict[str, Any]:
    """Of each of several parts, one of as many."""
    parts = [
        {"anyOf": [{"type": "object", "properties": {f"p{part}_{at}": {"type": "integer"}}} for at in range(count)]}
        for part in range(count)
    ]
    return {"allOf": parts}


def chain(rules: int) -> str:
    return "\n".join(["start: r0", *(f"r{at}: r{at + 1}" for at in range(rules)), f'r{rules}: "a"'])


def doubled(levels: int) -> dict[str, Any]:
    """Definitions that each name the next one twice."""
    names = {f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(levels)}
    return {"$defs": {**names, f"d{levels}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


SCHEMAS: dict[str, Any] = {
    "deep": nested(28),
    "deeper": nested(200),
    "enum": {"enum": [f"value {at} of many" for at in range(10_000)]},
    "many items": {"type": "array", "items": {"type": "string"}, "minItems": 1_000_000},
    "endless items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 10**9},
    "long text": {"type": "string", "minLength": 1_000_000},
    "pattern": {"type": "string", "pattern": "^(([a-z]{100}){100}){100}$"},
    "patterns": {"type": "object", "patternProperties": {f"^(a|b)*{at}(a|b){{50}}$": {} for at in range(50)}},
    "length and pattern": {"type": "string", "pattern": "^(.*x){20}$", "maxLength": 2000},
    "all patterns": {"allOf": [{"type": "string", "pattern": f".*a{at}.*"} for at in range(40)]},
    "itself": {"$ref": "#"},
    "each other": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "itself and more": {"allOf": [{"$ref": "#"}, {"type": "object"}]},
    "doubled": doubled(40),
    "chosen": chosen(8),
    "one of many": {"oneOf": [{"type": "object", "properties": {f"p{at}": {}}} for at in range(400)]},
    "optional": {"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(3000)}},
    "fraction": {"type": "number", "multipleOf": 1e-300, "minimum": -1e300, "maximum": 1e300},
    "multiple": {"type": "integer", "multipleOf": 982451653},
    "elsewhere": {"$ref": "http://example.com/schema.json"},
    "unknown": {"type": "array", "uniqueItems": True},
    "impossible": False,
    "no type": {"type": "frob"},
}
REGEXES = {
    "repeated": "(a{1000}){1000}",
    "repeated more": "((((a{100}){100}){100}){100}){100}",
    "letters": r"(\p{L}{500}|\p{Lu}{500}){500}",
    "any": r"[\s\S]{1,100000}x",
    "behind": "(?:a|b)*a(?:a|b){60}",
    "nested": "(" * 5000 + ")" * 5000,
    "stars": "(x+x+)+y" * 200,
    "unclosed": "(a",
    "look": "(?=a)b",
}
GRAMMARS = {
    "ambiguous": 'start: start start start | "a" | ',
    "repeated": "start: a{1000000}\na: b{1000000}\nb: /x{1000}/",
    "chain": chain(9000),
    "right": 'start: a start | a\na: "x"',
    "terminals": "\n".join(["start: A0", *(f'A{at}: ("b" A{at + 1})*' for at in range(4000)), 'A4000: "a"']),
    "all of": "start: A\nA: " + " & ".join(f"/.*a{at}.*/" for at in range(40)),
    "sequence": "start: " + " ".join(f'"a{at}"' for at in range(20_000)),
    "negated": "start: A\nA: ~(~(/(a|b)*a(a|b){9}/) & ~(/(a|b)*b(a|b){9}/)) & /(ab|ba)*c{1,300}/",
    "itself": "start: start",
    "terminal itself": 'start: A\nA: "a" A',
    "substring": 'start: A\nA: %regex {"substring_chars": "' + "abcdefgh" * 9000 + '"}',
    "json": "start: %json " + '{"a":' * 150 + "1" + "}" * 150,
    "lark": "start: " + "%lark { start: " * 90 + '"a"' + " }" * 90,
    "brackets": "start: " + "(" * 40_000 + '"a"' + ")" * 40_000,
    "hidden brackets": 'start: <"> ' + "(" * 40_000,
    "unknown": "start: nothing",
    "no grammar": "}{",
}


def sources() -> dict[str, Any]:
    """Functions that return a grammar, or refuse it, by name."""
    found = {f"schema {name}": (Grammar.json_schema, source) for name, source in SCHEMAS.items()}
    found |= {f"regex {name}": (Grammar.regex, source) for name, source in REGEXES.items()}
    return found | {f"grammar {name}": (Grammar.lark, source) for name, source in GRAMMARS.items()}


def member(name: str) -> dict[str, Any]:
    """The member of a request that has the grammar of this name."""
    kind, _, of = name.partition(" ")
    if kind == "schema":
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMAS[of]}}}
    return {"regex": REGEXES[of]} if kind == "regex" else {"grammar": GRAMMARS[of]}
