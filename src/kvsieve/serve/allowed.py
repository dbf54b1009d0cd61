"""Plans and drafts that requests may select."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvsieve.errors import InputError, PlanError
from kvsieve.planning.drafts import Draft, as_draft
from kvsieve.planning.named import codec_of, plan
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import method_info
from kvsieve.planning.specs import split_specs
from kvsieve.serve.schema import KVOptions


@dataclass(frozen=True)
class AllowedPlans:
    """Plans within the operator's limits.

    Attributes:
        own: the default plan.
        method: its method in command-line syntax, without its budget.
        budget: its budget, or None.
        others: further methods that requests may name, in command-line syntax.
        codecs: True if requests may name a codec.
        check: returns a fully specified plan, or raises if it cannot run on the model.
        draft: the default source of drafts; requests may draft fewer tokens, or none. None for no drafts at all.
        edits: edit sessions that a prompt does not continue; requests may decline.
    """

    own: Plan
    method: str
    budget: str | float | None
    others: tuple[str, ...]
    codecs: bool
    check: Callable[[Plan], Plan]
    draft: Draft | None = None
    edits: bool = False

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.method, *self.others)))

    def of(self, asked: KVOptions | None) -> Plan:
        """Return the plan of a request.

        Raises:
            PlanError: the operator does not allow it, or it cannot be honoured.
        """
        if asked is None or (asked.method, asked.budget, asked.codec) == (None, None, None):
            return self.check(self.own)
        if asked.codec is not None and not self.codecs:
            raise PlanError("this server lets requests name no codec; leave kv.codec out")
        method = asked.method or self.method
        if method not in self.methods:
            raise PlanError(f"this server allows the methods {', '.join(self.methods)}; got kv.method {method!r}")
        ((name, parameters),) = split_specs(method)
        info = method_info(name)
        if asked.budget is not None:
            if isinstance(asked.budget, bool):
                raise PlanError("kv.budget is a share or a number of entries, not true or false")
            if "budget" not in info.parameters:
                raise PlanError(f"{info.name} takes no budget; leave kv.budget out")
            parameters["budget"] = asked.budget
        elif self.budget is not None and "budget" in info.parameters:
            parameters.setdefault("budget", self.budget)
        codec = None if asked.codec in (None, "none") else codec_of(str(asked.codec))
        return self.check(plan(name, codec=codec, **parameters))

    def edits_of(self, asked: KVOptions | None, chain: str | None) -> bool:
        """Return whether the stored conversation of a request may be edited. chain: of its stored responses.

        Raises:
            InputError: the operator does not allow it, or there is no conversation.
        """
        wanted = None if asked is None else asked.edits
        named = chain is not None or (asked is not None and asked.session is not None)
        if wanted and not self.edits:
            raise InputError("kv.edits: this server edits no sessions (kvsieve serve --edits on); leave it out")
        if wanted and not named:
            raise InputError("kv.edits: a request without kv.session continues no conversation; name one")
        return self.edits and named and wanted is not False

    @property
    def draft_name(self) -> str:
        """The default source of drafts as requests see it, without the paths of the operator's models."""
        if self.draft is None:
            return "none"
        return "model" if self.draft.kind == "model" else str(self.draft)

    def draft_of(self, asked: KVOptions | None) -> Draft | None:
        """Return the source of a request's drafts, or None.

        Raises:
            PlanError: the operator does not allow it.
        """
        own = self.draft
        text = self.draft_name if asked is None or asked.draft is None else asked.draft.strip()
        if text == "none":
            return None
        if own is None:
            raise PlanError(f"this server drafts no tokens (kvsieve serve --draft); leave kv.draft out, got {text!r}")
        if text == self.draft_name or (text == "lookup" and own.kind == "lookup"):
            return own
        # Any other text would be a model's path or a plan, which the operator chooses.
        draft = as_draft(text) if text.partition(":")[0] == "lookup" else None
        if draft is None or draft.tokens > own.tokens or (own.adapt and not draft.adapt):
            raise PlanError(
                f"this server allows the drafts none, {self.draft_name}, and lookup with tokens={own.tokens} at most "
                f"and adapt={str(own.adapt).lower()}; got kv.draft {text!r}"
            )
        return draft
