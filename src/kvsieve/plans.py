"""A plan: at most one object per role. An empty plan is full KV."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from kvsieve.display import brief, html_table
from kvsieve.errors import PlanError, short
from kvsieve.loading import PROVIDED
from kvsieve.plan_files import as_json, read_record, read_role
from kvsieve.profiles import Fingerprint
from kvsieve.roles import (
    ChunkedEvictor,
    Codec,
    DraftPropagator,
    Evictor,
    ProbingEvictor,
    Propagator,
    Reader,
    Role,
    SparsePrefill,
    byte_budgets,
    check_together,
    floor_of,
)
from kvsieve.roles.codec import ASKED
from kvsieve.unset import SettledParameters, Unset

ROLES: dict[str, type[Role]] = {
    "propagate": Propagator,
    "evict": Evictor,
    "read": Reader,
    "prefill": SparsePrefill,
    "codec": Codec,
    "rest": Codec,
}
_RECORDS: dict[str, type[Fingerprint] | type[Unset]] = {"profile": Fingerprint, "unset": Unset}
_EXAMPLES = {
    "propagate": "propagate=TSP(rate=0.2)",
    "evict": "evict=SnapKV(budget=0.2)",
    "read": "read=HSA(budget=512)",
    "prefill": "prefill=XAttention(threshold=0.9)",
    "codec": "codec=KIVI(bits=4)",
    "rest": "rest=Rotated(bits=2)",
}


@dataclass(frozen=True, repr=False)
class Plan:
    """A compression plan for one model's context: at most one object per role.

    propagate: a Propagator, which hidden states go on to deeper layers. evict: an Evictor, which entries stay stored.
    read: a Reader, which entries a new token reads. codec: a Codec, how stored entries are encoded. rest: a Codec of
    what the evictor would drop, which stays stored then. prefill: a SparsePrefill, what a prompt's queries attend to.
    profile: the model whose profile gave the parameters, if one did; `attach` refuses another. unset: of a plan made
    by name, what `attach` needs to fill in parameters that were not given, which stand at the method's defaults until
    then. filled: what it filled in. name: what reports call it. Raises PlanError for what fills no role or fits none.
    """

    propagate: Propagator | None = None
    evict: Evictor | None = None
    read: Reader | None = None
    prefill: SparsePrefill | None = None
    codec: Codec | None = None
    rest: Codec | None = None
    profile: Fingerprint | None = None
    unset: Unset | None = field(default=None, repr=False)
    filled: SettledParameters | None = field(default=None, compare=False, repr=False)
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for role, base in ROLES.items():
            value = vars(self)[role]
            if isinstance(value, (tuple, list)):
                raise PlanError(f"Plan({role}=...) takes one {base.__name__}, got {len(value)}; choose one of them")
            if value is not None and not isinstance(value, base):
                raise PlanError(
                    f"Plan({role}=...) takes a {base.__name__}, got {short(value)}; e.g. Plan({_EXAMPLES[role]}), or a "
                    f"class of your own that derives from kvsieve.roles.{base.__name__}"
                )
        check_together(self.propagate, self.evict, self.read, self.codec, self.rest, self.prefill)
        if not self.name:
            parts = [type(getattr(self, role)).__name__ for role in self.roles]
            object.__setattr__(self, "name", "+".join(parts) or "full")

    def __repr__(self) -> str:
        return f"<Plan {self.name}{': ' if self.roles else ''}{', '.join(f'{a} {b}' for a, b in self._rows())}>"

    def _repr_html_(self) -> str:
        profile = [("profile of", self.profile)] if self.profile is not None else []
        return html_table(f"Plan {self.name}", [*self._rows(), *profile])

    def _rows(self) -> list[tuple[str, str]]:
        later = [("parameters not given", "with the model")] if self.unset is not None else []
        return [(role, brief(getattr(self, role))) for role in self.roles] + later

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that are filled."""
        return tuple(role for role in ROLES if getattr(self, role) is not None)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Codecs of the plan: `codec` and `rest`, those that are there."""
        return tuple(each for each in (self.codec, self.rest) if each is not None)

    @property
    def budgets_in_bytes(self) -> bool:
        """True while a budget in bytes has not become entries; see `for_model`."""
        return any(True for role in self.roles for _ in byte_budgets(getattr(self, role)))

    @property
    def floor(self) -> int:
        """Entries that its shares keep at least; shorter conversations stay whole."""
        return max((floor_of(vars(self)[role]) for role in self.roles), default=0)

    @property
    def acts_once(self) -> bool:
        """True when one full reading of a prompt is enough: nothing is dropped before its end or while decoding."""
        if self.shortens_prompt or self.probes or self.prefill is not None:
            return False
        return self.evict is None or not (self.evict.when.chunks or self.evict.when.steps)

    @property
    def shortens_prompt(self) -> bool:
        """True when the cache holds a shorter prompt in place of the one given, which was read to find it."""
        return (self.propagate is not None and self.propagate.two_pass) or isinstance(self.evict, ChunkedEvictor)

    @property
    def is_view(self) -> bool:
        """True if the evictor drops nothing and selects, in every turn, the entries its answer reads."""
        return self.evict is not None and self.evict.traits.is_view

    @property
    def probes(self) -> bool:
        """True when the evictor needs passes of its own before a prompt is complete; see roles.ProbingEvictor."""
        return isinstance(self.evict, ProbingEvictor)

    @property
    def drops(self) -> bool:
        """True when tokens or entries may be dropped for good, or encoded by an evictor's choice."""
        return self.propagate is not None or (self.evict is not None and not self.is_view)

    @property
    def query_aware(self) -> bool:
        """True if the choice at a prompt's end depends on its question, or if a role does not declare it."""
        return any(part.traits.query_aware is not False for part in (self.propagate, self.evict) if part is not None)

    @property
    def drafts(self) -> bool:
        """True if a draft model selects the tokens to prefill; roles.DraftPropagator."""
        return isinstance(self.propagate, DraftPropagator)

    @property
    def window(self) -> int:
        """Queries of the prompt's end that the plan looks at."""
        return max((part.window for part in (self.propagate, self.evict) if part is not None), default=0)

    def queries(self, length: int) -> int:
        """`window` for a prompt of `length` tokens; the last chunk of a chunked prefill holds at least these."""
        asked = (0 if self.rest is None else ASKED, 0 if self.propagate is None else self.propagate.queries(length))
        return max(self.window, *asked)

    def caution(self, num_layers: int) -> str | None:
        """Return a warning before the plan runs on a model of `num_layers` layers."""
        return None if self.propagate is None else self.propagate.caution(num_layers)

    @property
    def lacks_tokenizer(self) -> bool:
        """True when it feeds texts of its own, or a draft model the prompt's, without the tokenizer that this takes."""
        if isinstance(self.propagate, DraftPropagator) and self.propagate.lacks_tokenizer:
            return True
        return self.evict is not None and self.evict.lacks_tokenizer

    def for_tokenizer(self, tokenizer: Any) -> Plan:
        """Return this plan with the tokenizer's parameters filled in: token ids of texts, or the tokenizer itself."""
        out = self
        if isinstance(out.propagate, DraftPropagator) and out.propagate.lacks_tokenizer:
            out = dataclasses.replace(out, propagate=out.propagate.for_tokenizer(tokenizer))
        if out.evict is not None and out.evict.lacks_tokenizer:
            out = dataclasses.replace(out, evict=out.evict.for_tokenizer(tokenizer))
        return out

    def for_model(self, model: Any, tokenizer: Any = None) -> Plan:
        """This plan with nothing left open: `attach` does this.

        model: of transformers, or its Fingerprint. tokenizer: the model's; without one its digits are taken to be
        tokens of their own. Parameters of a named method that were not given come, each from the first that has it,
        from the user's own profile of such a model, from a shipped one, from the method's paper if it ran on a model of
        this shape, from the model's depth and its tokenizer's digits, and from the method itself. What was given, and a
        role that was replaced, stays. Raises PlanError for a method that needs a profile where there is none, and for a
        profile whose parameters cannot be used. Budgets in bytes become entries; of a Fingerprint alone they stay.
        """
        settled: Plan = PROVIDED["settle"](self, model, tokenizer)
        return settled

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description that `Plan.from_dict` reads back."""
        out: dict[str, Any] = {"name": self.name}
        for role in self.roles:
            out[role] = as_json(getattr(self, role))
        if self.profile is not None:
            out["profile"] = dataclasses.asdict(self.profile)
        if self.unset is not None:
            out["unset"] = dataclasses.asdict(self.unset)
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The inverse of `to_dict`, for role classes of kvsieve.methods and of files that registered a method.

        Raises PlanError for others.
        """
        if not isinstance(data, dict):
            raise PlanError(f"a plan is read from what Plan.to_dict() made, a dict, got {short(data)}")
        parts: dict[str, Any] = {}
        for key, value in data.items():
            if key == "name":
                parts[key] = str(value)
            elif key in _RECORDS:
                parts[key] = read_record(_RECORDS[key], value)
            elif key in ROLES:
                parts[key] = read_role(key, value)
            else:
                raise PlanError(f"cannot read a plan with {key}=: it is none of its roles, {', '.join(ROLES)}")
        return cls(**parts)
