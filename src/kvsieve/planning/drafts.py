"""Drafts in text form: ``lookup:tokens=8``, a draft model's directory, ``self:quest:budget=5%``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from kvsieve.errors import PlanError, short
from kvsieve.planning.roles.drafting import Loaded, draft_of
from kvsieve.planning.specs import split_specs
from kvsieve.planning.suggestions import did_you_mean

_PARAMETERS = {"tokens": 15, "ngram": 2, "adapt": True}
_FORMS = (
    "'lookup', 'lookup:tokens=8:ngram=3', 'self:' and a plan, a draft model's directory, file or hub id, a loaded "
    "model, or (model, tokenizer)"
)
# Most tokens of a pass: products read weights once for as many rows.
MOST = 31


@dataclass(frozen=True)
class Draft:
    """A source of tokens that a pass verifies beside an answer's next token.

    Attributes:
        kind: "lookup" copies from the conversation, "model" asks a smaller model, "self" the same model under a plan.
        tokens: most drafted tokens of a pass.
        ngram: least tokens that the end of the conversation shares with an earlier place, for "lookup".
        adapt: draft fewer tokens, or none, where passes over more tokens do not pay.
        model: the draft model, for "model".
        view: the plan as text, for "self".
    """

    kind: Literal["lookup", "model", "self"]
    tokens: int = 15
    ngram: int = 2
    adapt: bool = True
    model: str | Loaded | None = None
    view: str | None = None

    def __str__(self) -> str:
        if self.kind == "model":
            return self.model if isinstance(self.model, str) else str((self.model and self.model.name) or "model")
        if self.kind == "self":
            return f"self:{self.view}"
        changed = {name: vars(self)[name] for name, value in _PARAMETERS.items() if vars(self)[name] != value}
        return "".join(["lookup", *(f":{name}={str(value).lower()}" for name, value in changed.items())])


def as_draft(value: Any) -> Draft | None:
    """Return a caller's draft=, or None for none.

    Args:
        value: None, False or "none"; "lookup" with parameters; "self:" and a plan as text; a draft model's directory,
            file or hub id, a loaded model with the model's tokenizer, or a pair of model and tokenizer.

    Raises:
        PlanError: any other value.
    """
    if value is None or value is False or isinstance(value, Draft):
        return value or None
    if isinstance(value, (str, os.PathLike)):
        return _from_text(os.fspath(value).strip())
    try:
        return Draft("model", model=draft_of(value))
    except PlanError:
        raise PlanError(f"draft= takes {_FORMS}; got {short(value)}") from None


def _from_text(text: str) -> Draft | None:
    name, colon, rest = text.partition(":")
    name = name.lower()
    if text.lower() == "none":
        return None
    if name == "self":
        if not rest.strip():
            raise PlanError(f"draft='self:' lacks its plan, such as self:quest:budget=5%; got {text!r}")
        return Draft("self", view=rest.strip())
    if name == "lookup":
        ((_, parameters),) = split_specs(f"lookup{colon}{rest}")
        return Draft("lookup", **_checked(parameters))
    if not text:
        raise PlanError(f"draft= takes {_FORMS}; got an empty text")
    return Draft("model", model=text)


def _checked(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a lookup. Raises PlanError for an unknown one, or a value that does not fit."""
    for name, value in parameters.items():
        if name not in _PARAMETERS:
            raise PlanError(f"lookup has no parameter {name!r}{did_you_mean(name, list(_PARAMETERS), 'it takes')}")
        if name == "adapt":
            if not isinstance(value, bool):
                raise PlanError(f"lookup's adapt is true or false, got {short(value)}")
        elif type(value) is not int or not 1 <= value <= MOST:
            raise PlanError(f"lookup's {name} is a whole number from 1 to {MOST}, got {short(value)}")
    return parameters
