"""Tool calls as FunctionGemma and Gemma 4 write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsieve.serve.parsers.form import AnswerParser, CallForm, Tools
from kvsieve.serve.parsers.lark import Rules, choices_of, members_of, options_of, parameters_of, quoted
from kvsieve.serve.parsers.steps import NamedParser, held_back
from kvsieve.serve.parsers.typed import kinds_of
from kvsieve.serve.pieces import Piece

_WORD = re.compile(r'[^\s{}\[\],:<"]+')
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.S)
_LITERALS = ("true", "false", "null")
_STRING = frozenset(["string"])
# Members of a schema that decide about a value's type, and those that only plain JSON is held to.
_CHOOSING = {"$ref", "anyOf", "oneOf", "allOf", "not", "if"}
_AS_JSON = {"$ref", "allOf", "not", "if", "minItems", "maxItems", "prefixItems", "minProperties", "maxProperties"}


@dataclass(frozen=True)
class GemmaCalls(CallForm):
    """Calls as `call:NAME{key:value}` between marks, with marks instead of quotation marks.

    Attributes:
        begin: mark before a call.
        end: mark after a call.
        quote: mark around strings.
    """

    begin: str
    end: str
    quote: str

    @property
    def controls(self) -> tuple[str, ...]:
        return (self.begin, self.end, self.quote)

    def parser(self) -> AnswerParser:
        return _GemmaParser(self)

    def forced(self, rules: Rules, tools: Tools, several: bool) -> str:
        calls = []
        for tool in tools:
            head = rules.text(f"{self.begin}call:{tool['function']['name']}")
            value = self._object(rules, parameters_of(tool), tool["function"].get("parameters") or {})
            calls.append(rules.rule(f"{head} {value} {rules.text(self.end)}"))
        return f"{rules.any_of(calls)}{'+' if several else ''}"

    def _object(self, rules: Rules, schema: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
        """Return the expression of an object with the members that a schema names, in its order.

        Required members come first, so that commas are between members only.
        """
        members, names = members_of(schema)
        required = [name for name in members if name in names]
        parts = {name: f"{quoted(name + ':')} {self._value(rules, members[name], whole)}" for name in members}
        optional = [name for name in members if name not in required]
        if required:
            inside = ' "," '.join(parts[name] for name in required)
            inside += "".join(f' ("," {parts[name]})?' for name in optional)
        else:
            inside = self._optional(rules, [parts[name] for name in optional])
        return rules.rule(f'"{{" {inside} "}}"')

    def _optional(self, rules: Rules, parts: list[str]) -> str:
        """Return the expression of any of some members, in their order."""
        if not parts:
            return ""
        firsts = [part + "".join(f' ("," {later})?' for later in parts[at + 1 :]) for at, part in enumerate(parts)]
        return f"({rules.any_of(firsts)})?"

    def _value(self, rules: Rules, schema: Any, whole: Mapping[str, Any]) -> str:
        """Return the expression of a value: in the form's own notation, or as JSON if that cannot follow the schema."""
        kinds = kinds_of(schema)
        if kinds is None and not (isinstance(schema, Mapping) and _CHOOSING & schema.keys()):
            return rules.any_of([self._string(rules, {}), rules.json(schema, whole)])
        if kinds is None or schema.keys() & _AS_JSON:
            return rules.json(schema, whole)
        if (choices := choices_of(schema)) is not None:
            return rules.any_of([self._value(rules, choice, whole) for choice in choices])
        if kinds == _STRING:
            return self._string(rules, schema)
        if kinds == {"object"} and schema.get("properties"):
            return self._object(rules, schema, whole)
        if kinds == {"array"}:
            item = rules.rule(self._value(rules, schema.get("items", {}), whole))
            return f'"[" ({item} ("," {item})*)? "]"'
        return rules.json(schema, whole)

    def _string(self, rules: Rules, schema: Mapping[str, Any]) -> str:
        quote = rules.text(self.quote)
        listed = options_of(schema)
        if listed:
            return f"{quote} {rules.any_of([rules.text(str(value)) for value in listed])} {quote}"
        return f"{quote} {rules.string(schema, self.quote)}"


FUNCTION_GEMMA = GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4 = GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>')


class _GemmaParser(NamedParser):
    def __init__(self, form: GemmaCalls) -> None:
        head = re.compile(rf"{re.escape(form.begin)}\s*call:\s*(?P<name>[^\s{{]+)\s*")
        super().__init__(form.begin, head, (form.end,))
        self._quote = form.quote
        self._open: list[str] = []
        self._key = self._string = False

    def json_arguments(self, begun: list[Piece]) -> list[Piece]:
        self._open = []
        self._string = False
        self.step = self.value
        return begun

    def value(self) -> list[Piece] | None:
        """Return arguments as JSON while they arrive."""
        out = ""
        while (part := self._part()) is not None:
            out += part
            if not (self._open or self._string):
                self.step = self.behind
                return self.arguments(out)
        if self.last:
            self.held = ""
        return self.arguments(out) or None

    def _part(self) -> str | None:
        """Take the next part of the arguments, and return it as JSON; None if more text is needed."""
        if self._string:
            return self._inside()
        self.held = self.held.lstrip()
        if self.held.startswith(self._quote):
            self._taken(len(self._quote))
            self._string = True
            return '"'
        if not self.held or self._quote.startswith(self.held):
            return None
        letter = self.held[0]
        if letter == "<":
            # The mark behind a broken call ends it.
            self._open = []
            return ""
        if letter in "{}[],:":
            return self._punctuation(letter)
        if self._key and letter != '"':
            # A name may have spaces.
            name, colon, _ = self.held.partition(":")
            return json.dumps(self._taken(len(name)).rstrip(), ensure_ascii=False) if colon else None
        found = (_JSON_STRING if letter == '"' else _WORD).match(self.held)
        if found is None or (found.end() == len(self.held) and letter != '"'):
            return None
        word = self._taken(found.end())
        return word if letter == '"' or not self._is_text(word) else json.dumps(word, ensure_ascii=False)

    def _inside(self) -> str | None:
        """Take text of a string."""
        text, found, rest = self.held.partition(self._quote)
        if found:
            self.held = rest
            self._string = False
            return json.dumps(text, ensure_ascii=False)[1:]
        text = self._taken(len(self.held) - held_back(self.held, (self._quote,)))
        return json.dumps(text, ensure_ascii=False)[1:-1] if text else None

    def _punctuation(self, letter: str) -> str:
        self._taken(1)
        if letter in "{[":
            self._open.append(letter)
        elif letter in "}]" and self._open:
            self._open.pop()
        if letter in "{,":
            self._key = bool(self._open) and self._open[-1] == "{"
        if letter == ":":
            self._key = False
        return letter + (" " if letter in ",:" else "")

    def _is_text(self, word: str) -> bool:
        """Return whether a word is a text, not a number or the like."""
        return word not in _LITERALS and re.fullmatch(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?", word) is None
