"""A plan: at most one object per role. An empty plan is full KV."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from kvsieve.errors import PlanError, short
from kvsieve.planning.loading import PROVIDED
from kvsieve.planning.plan_files import as_json, read_record, read_role
from kvsieve.planning.profiles import Fingerprint
from kvsieve.planning.roles import (
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
from kvsieve.planning.roles.codec import ASKED
from kvsieve.planning.unset import SettledParameters, Unset
from kvsieve.report.display import brief, html_table
from kvsieve.types import END_OF_PROMPT, When

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

    propagate: a Propagator, which hidden states pass to deeper layers. evict: an Evictor, which entries stay stored.
    read: a Reader, which entries a new token attends to. codec: a Codec, how stored entries are encoded. rest: a Codec
    for entries that the evictor would drop, which then stay stored. prefill: a SparsePrefill, the keys that a prompt's
    queries attend to. profile: the model of the profile that gave the parameters; `attach` refuses another. unset:
    parameters of a plan made by name that `attach` fills in; until then they have the method's defaults. filled: the
    values filled in. name: used in reports. Raises PlanError for roles that do not fit.
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
                    f"class of your own that derives from kvsieve.planning.roles.{base.__name__}"
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
        """Names of the roles in use."""
        return tuple(role for role in ROLES if getattr(self, role) is not None)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """`codec` and `rest`, if set."""
        return tuple(codec for codec in (self.codec, self.rest) if codec is not None)

    @property
    def budgets_in_bytes(self) -> bool:
        """True while a budget in bytes is not converted to entries; see `for_model`."""
        return any(True for role in self.roles for _ in byte_budgets(getattr(self, role)))

    @property
    def floor(self) -> int:
        """Least entries of its shares; shorter conversations are not evicted from."""
        return max((floor_of(vars(self)[role]) for role in self.roles), default=0)

    @property
    def acts_once(self) -> bool:
        """True if one full prefill suffices: nothing is dropped before the prompt's end or during decode."""
        if self.shortens_prompt or self.probes or self.prefill is not None or self.scores_entries:
            return False
        return not (self.when.chunks or self.when.steps)

    @property
    def when(self) -> When:
        """Times at which the evictor acts, if there is one."""
        return END_OF_PROMPT if self.evict is None else self.evict.when

    @property
    def weighs_layers(self) -> bool:
        """True if entries of a layer are dropped after later layers have attended to an answer's token."""
        return self.evict is not None and self.evict.traits.recuts and self.when.steps is not None

    @property
    def scores_entries(self) -> bool:
        """True if a reader chooses by scores that every pass adds to, so that it has to be there from the start."""
        return self.read is not None and self.read.observes

    @property
    def shortens_prompt(self) -> bool:
        """True if the cache has a shortened prompt, found by a pass over the full one."""
        return (self.propagate is not None and self.propagate.two_pass) or isinstance(self.evict, ChunkedEvictor)

    @property
    def is_view(self) -> bool:
        """True if the evictor drops nothing but selects, in every turn, the entries that its answer attends to."""
        return self.evict is not None and self.evict.traits.is_view

    @property
    def probes(self) -> bool:
        """True if the evictor needs its own passes before a prompt is complete; see roles.ProbingEvictor."""
        return isinstance(self.evict, ProbingEvictor)

    @property
    def drops(self) -> bool:
        """True if tokens or entries may be dropped permanently, or encoded by an evictor's choice."""
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
        """Number of queries at the prompt's end that the plan observes."""
        return max((part.window for part in (self.propagate, self.evict) if part is not None), default=0)

    def queries(self, length: int) -> int:
        """Return `window` for a prompt of `length` tokens: the least size of the last chunk of a chunked prefill."""
        sizes = (0 if self.rest is None else ASKED, 0 if self.propagate is None else self.propagate.queries(length))
        return max(self.window, *sizes)

    def caution(self, num_layers: int) -> str | None:
        """Return a warning before the plan runs on a model of `num_layers` layers."""
        return None if self.propagate is None else self.propagate.caution(num_layers)

    @property
    def lacks_tokenizer(self) -> bool:
        """True if it feeds its own texts, or the prompt to a draft model, and has no tokenizer for that."""
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
        """Return this plan with all parameters filled in, as `attach` does.

        model: of transformers, or its Fingerprint. tokenizer: the model's; without one, each digit counts as a token. A
        named method's unset parameters come from the first source that has them: the user's own profile of such a
        model, a shipped one, the method's paper if it used a model of this shape, the model's depth and its tokenizer's
        digits, and the method. Given parameters and replaced roles do not change. Raises PlanError for a method that
        needs a profile and has none, and for unusable parameters of a profile. Budgets in bytes become entries, except
        with a Fingerprint.
        """
        settled: Plan = PROVIDED["settle"](self, model, tokenizer)
        return settled

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready description for `Plan.from_dict`."""
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
        """Parse the result of `to_dict`, with role classes of kvsieve.methods and of files that registered a method.

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
