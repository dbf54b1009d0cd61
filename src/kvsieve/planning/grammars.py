"""Grammars that answers match: JSON schemas, regular expressions, and Lark grammars, as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvsieve.errors import InputError, short

# Most characters of a grammar.
MOST_CHARACTERS = 1 << 18
# White space between JSON's signs, at most once at a place: a space, or a line break with an indent.
_JSON = {
    "whitespace_pattern": r" |\r?\n[ \t]{0,32}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
# Bounds of the work to compile a grammar, of that of a step, and of the lexer's states, of 1 to 2 kB each.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# Formats whose texts may go on for ever, in digits of a fraction or a number, and most characters that they get.
_ENDLESS = ("time", "date-time", "duration")
_MOST_OF_TIME = 40
# Keywords of a schema with others in them, by name or plainly.
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_PLAIN = ("anyOf", "allOf", "prefixItems", "items", "additionalProperties", "unevaluatedProperties", "contains")
# Tokens are never forced: texts that a grammar leaves no choice about may be endless.
_FREE = '%llguidance {"no_forcing": true}'


@dataclass(frozen=True)
class Grammar:
    """A grammar that an answer matches, for ``sieve.generate(grammar=...)``. Made by its class methods.

    Attributes:
        kind: of the source.
        source: a JSON schema as JSON text, a regular expression, or a Lark grammar.
    """

    kind: Literal["json_schema", "regex", "lark"]
    source: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool = True) -> Grammar:
        """Return the grammar of JSON that matches a schema; by default of any JSON.

        Properties come in the order of the schema; docs/serving.md has the rest.

        Raises InputError for a schema that is no JSON, or too long.
        """
        return cls("json_schema", _checked(_json_text(schema)))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of texts that match a regular expression as a whole. Raises InputError."""
        return cls("regex", _checked(pattern))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Return a grammar in llguidance's variant of Lark, in which `symbol` embeds others. Raises InputError."""
        return cls("lark", _checked(text))

    @property
    def symbol(self) -> str:
        """The grammar as a symbol within a rule of a Lark grammar. Raises InputError without llguidance."""
        if self.kind == "regex":
            return f"/{library().regex_to_lark(self.source)}/"
        if self.kind == "lark":
            return f"%lark {{\n{self.source}\n}}"
        schema = json.loads(self.source)
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        return embedded(schema, **_JSON)

    @property
    def text(self) -> str:
        """The grammar as a whole Lark grammar. Raises InputError without llguidance."""
        own = self.source if self.kind == "lark" else f"start: {self.symbol}"
        return f"{own}\n{_FREE}\n"


def embedded(schema: Mapping[str, Any], **options: Any) -> str:
    """Return a JSON schema as a symbol of a Lark grammar.

    Times get at most 40 characters: greedy answers may repeat the digits of a fraction for ever.

    Args:
        schema: an object.
        options: of llguidance.
    """
    whole = json.loads(json.dumps({**schema, "x-guidance": options}))
    parts = [whole]
    while parts:
        part = parts.pop()
        if not isinstance(part, dict):
            continue
        for name in _NAMED:
            parts += part[name].values() if isinstance(part.get(name), dict) else []
        for name in _PLAIN:
            inner = part.get(name)
            parts += inner if isinstance(inner, list) else [inner]
        most = part.get("maxLength", _MOST_OF_TIME)
        if part.get("format") in _ENDLESS and "minLength" not in part and type(most) is int:
            part["maxLength"] = min(most, _MOST_OF_TIME)
    return f"%json {json.dumps(whole)}"


def library() -> Any:
    """Return the package that compiles grammars. Raises InputError if it is missing."""
    try:
        import llguidance
    except ImportError as error:
        raise InputError(
            f"grammars need the package llguidance ({error}); run `pip install 'kvsieve[grammar]'`"
        ) from error
    return llguidance


def parsed(text: str, tokenizer: Any) -> Any:
    """Return llguidance's matcher of a Lark grammar at its begin, which may have an error.

    Args:
        text: of the grammar; see Grammar.text.
        tokenizer: of llguidance.
    """
    package = library()
    return package.LLMatcher(tokenizer, text, log_level=0, limits=package.LLParserLimits(**_LIMITS))


def fault(matcher: Any) -> str:
    """Return why llguidance's matcher has failed, or ""."""
    # What follows repeats the grammar.
    error = str(matcher.get_error()).partition("\n 1 | ")[0] if matcher.is_error() else ""
    return "no answer matches it" if error.startswith("NoExtension") else error


def _checked(source: Any) -> str:
    if not isinstance(source, str) or not source:
        raise InputError(f"a grammar's source is a text, got {short(source)}")
    if len(source) > MOST_CHARACTERS:
        raise InputError(
            f"a grammar has at most {MOST_CHARACTERS:,} characters, got {len(source):,}; give a shorter one"
        )
    try:
        source.encode()
    except UnicodeEncodeError as error:
        place = repr(source[error.start])
        raise InputError(f"a grammar holds half a character ({place}, a surrogate); leave it out") from None
    return source


def _json_text(schema: Any) -> str:
    if not isinstance(schema, (bool, Mapping)):
        raise InputError(f"a JSON schema is a dict, True or False, got {short(schema)}")
    try:
        return json.dumps(schema if isinstance(schema, bool) else dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the schema is no JSON: {error}; give dicts, lists, texts, finite numbers and None") from None
