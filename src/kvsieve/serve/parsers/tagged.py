"""Tool calls with parameters between tags, as Qwen3-Coder and GLM write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsieve.serve.parsers.form import AnswerParser, CallForm, Tools
from kvsieve.serve.parsers.lark import BOUNDS, Rules, choices_of, members_of, options_of, parameters_of, quoted
from kvsieve.serve.parsers.steps import CallParser, Step, held_back
from kvsieve.serve.parsers.typed import kinds_of, typed
from kvsieve.serve.pieces import Piece

# Characters of a name, at most.
_LONGEST = 200
_STRING = frozenset(["string"])


@dataclass(frozen=True)
class Tags:
    """Texts around the parts of a call; white space around them does not matter.

    Attributes:
        marks: that begin a call.
        name: before the name.
        name_end: after the name; "" for the end of the line.
        key: before a parameter's name.
        value: between a parameter's name and its value.
        value_end: after a value.
        line: line break between a tag and a value, if the template writes one.
        ends: after the last parameter, in their order.
    """

    marks: tuple[str, ...]
    name: str
    name_end: str
    key: str
    value: str
    value_end: str
    line: str
    ends: tuple[str, ...]


QWEN_CODER = Tags(
    marks=("<tool_call>", "<function="),
    name="<function=",
    name_end=">",
    key="<parameter=",
    value=">",
    value_end="</parameter>",
    line="\n",
    ends=("</function>", "</tool_call>"),
)
GLM = Tags(
    marks=("<tool_call>",),
    name="",
    name_end="",
    key="<arg_key>",
    value="</arg_key>\n<arg_value>",
    value_end="</arg_value>",
    line="",
    ends=("</tool_call>",),
)


def schemas_of(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the parameters of some tools, by the tools' names."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


@dataclass(frozen=True)
class TaggedCalls(CallForm):
    """Calls as tags around names and values.

    Attributes:
        tags: of the template.
        schemas: of the tools' parameters, which say which values are strings.
    """

    tags: Tags
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    controls = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def parser(self) -> AnswerParser:
        return _TaggedParser(self.tags, self.schemas)

    def forced(self, rules: Rules, tools: Tools, several: bool) -> str:
        tags = self.tags
        calls = []
        for tool in tools:
            head = f"{tags.marks[0]}{tags.line}{tags.name}{tool['function']['name']}{tags.name_end}\n"
            parts = [
                rules.text(head),
                *self._arguments_rules(rules, parameters_of(tool)),
                rules.text("\n".join(tags.ends)),
            ]
            calls.append(rules.rule(" ".join(parts)))
        call = rules.any_of(calls)
        return f"{call} ({quoted(chr(10))} {call})*" if several else call

    def _arguments_rules(self, rules: Rules, schema: Mapping[str, Any]) -> list[str]:
        """Return the expressions of the parameters that a schema names, in its order."""
        tags = self.tags
        out = []
        members, required = members_of(schema)
        for name, own in members.items():
            head = rules.text(f"{tags.key}{name}{tags.value}{tags.line}")
            part = rules.rule(f"{head} {self._value(rules, own, schema)} {quoted(chr(10))}")
            out.append(part if name in required else f"{part}?")
        return out

    def _value(self, rules: Rules, schema: Any, whole: Mapping[str, Any]) -> str:
        """Return the expression of a value and the tag after it."""
        end = self.tags.line + self.tags.value_end
        if kinds_of(schema) != _STRING:
            return f"{rules.json(schema, whole)} {rules.text(end)}"
        listed = options_of(schema)
        if listed is not None:
            return f"{rules.any_of([rules.text(str(value)) for value in listed])} {rules.text(end)}"
        if (choices := choices_of(schema)) is not None:
            return rules.any_of([self._value(rules, choice, whole) for choice in choices])
        # A line break before the tag is no part of the value, and some models leave it out.
        return rules.string(schema, end if schema.keys() & set(BOUNDS) else self.tags.value_end)


class _TaggedParser(CallParser):
    def __init__(self, tags: Tags, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self.marks = tags.marks
        self.ends = tags.ends
        self._tags = tags
        self._schemas = schemas
        self._types: Mapping[str, Any] = {}
        self._kinds: frozenset[str] | None = None
        self._count = 0
        end = re.escape(tags.name_end) or r"(?=[\n<])"
        self._name = re.compile(rf'\s*{re.escape(tags.name)}([^\s<>{{}}"]+)[ \t]*{end}')
        between = r"\s*".join(map(re.escape, tags.value.split("\n")))
        self._key = re.compile(rf"{re.escape(tags.key)}(.*?){between}", re.S)

    def call(self) -> list[Piece] | None:
        mark = next(mark for mark in self.marks if self.held.startswith(mark))
        at = 0 if mark == self._tags.name else len(mark)
        found = self._name.match(self.held, at)
        if found is None:
            return None if self._may_be_named(self.held[at:].lstrip()) else self.no_call(len(mark))
        types = self._schemas.get(found[1], {}).get("properties")
        self._types = types if isinstance(types, Mapping) else {}
        self._count = 0
        self.step = self.parameter
        return self.begin(found[1], found.end()) + self.arguments("{")

    def _may_be_named(self, text: str) -> bool:
        """Return whether text after a mark may be the begin of a name."""
        tag = self._tags.name
        if self.last or len(text) > _LONGEST:
            return False
        return tag.startswith(text) or (text.startswith(tag) and not re.search(r'[\s<>{}"]', text[len(tag) :]))

    def parameter(self) -> list[Piece] | None:
        """Begin a parameter, or end the call."""
        tags = self._tags
        self.held = self.held.lstrip()
        found = self._key.match(self.held)
        if found is not None:
            return self._parameter(found[1].strip(), found.end())
        if self.held.startswith(self.ends):
            self.step = self.behind
            return self.arguments("}")
        if self.held.startswith(tags.key) or any(mark.startswith(self.held) for mark in (tags.key, *self.ends)):
            return self._cut_off() if self.last else None
        self.step = self.behind
        return self.arguments("}")

    def _parameter(self, name: str, size: int) -> list[Piece]:
        self._taken(size)
        self._kinds = kinds_of(self._types.get(name))
        is_string = self._kinds == _STRING
        line = self._tags.line
        value: Step = self.string if is_string else self.other
        self.step = (lambda: self._behind_line(line, value)) if line else value
        before = ", " if self._count else ""
        self._count += 1
        return self.arguments(f"{before}{json.dumps(name, ensure_ascii=False)}: " + ('"' if is_string else ""))

    def _behind_line(self, line: str, value: Step) -> list[Piece] | None:
        """Drop the line break before a value."""
        if not self.held:
            return None
        self.held = self.held.removeprefix(line)
        self.step = value
        return []

    def string(self) -> list[Piece] | None:
        """Return a string's text while it arrives."""
        tags = self._tags
        text, found, rest = self.held.partition(tags.value_end)
        if found:
            self.held = rest
            self.step = self.parameter
            return self.arguments(_escaped(text.removesuffix(tags.line)) + '"')
        keep = held_back(self.held, (tags.value_end, tags.line + tags.value_end))
        pieces = self.arguments(_escaped(self._taken(len(self.held) - keep)))
        return self._cut_off(pieces) if self.last else pieces or None

    def other(self) -> list[Piece] | None:
        """Return a value of another type when it is complete."""
        text, found, rest = self.held.partition(self._tags.value_end)
        if not found:
            return self._cut_off() if self.last else None
        self.held = rest
        self.step = self.parameter
        return self.arguments(typed(text.removesuffix(self._tags.line), self._kinds))

    def _cut_off(self, pieces: list[Piece] | None = None) -> list[Piece] | None:
        """Drop the part that the end of the answer cut off: its call stays incomplete."""
        self.held = ""
        return pieces or None


def _escaped(text: str) -> str:
    """Return a text as part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
