"""The base class of all roles: what a class says of itself, and a check of what it defines."""

from __future__ import annotations

import dataclasses
import inspect
import types
from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvsieve.parameters import Checked

HeadScope = Literal["own", "all"]


@dataclass(frozen=True)
class Traits:
    """Facts about a role, given as keywords of its class: ``class SnapKV(Evictor, heads="own")``.

    Attributes:
        needs: facts about the model that it asks ``ctx.model`` for, "rotary" and "output_weight"; with "hidden" among
            them, an evictor that observes is given ``ctx.hidden`` and ``ctx.output``; "uncapped" are logits without a
            cap (``AttentionTerms.softcap``). A model without them is refused.
        heads: whose heads it looks at to choose for a KV head: "own" where that KV head and its query heads are enough,
            "all" where other heads of the layer count and it asks ``ctx.ranks`` for those of other processes. None:
            not said, so the plan is refused where tensor parallelism divides heads. A subclass must say it again.
        ragged: KV heads may keep different numbers of entries.
        is_view: an evictor that drops nothing: what it selects is what this turn's answer reads.
        recuts: what it drops of a layer may depend on layers behind it, so that it drops more of the layer later in the
            same pass.
        takes_quotas: an evictor that ranks entries by scores, so that ``quotas=`` can be asked of it.
        static_shapes: a reader that also works on sequences whose length is on the device (core.kv_rows.DeviceLength),
            and remembers nothing but an IncrementalMetadata of each; passes can then be recorded.
        query_aware: what an evictor or propagator chooses depends on queries, those of the question at the prompt's end
            among them. None: not said, which is taken for True. A subclass must say it again.
        fixed_counts: an evictor that keeps exactly `counts` entries of every KV head, in every layer alike, at lengths
            that `Evictor.rhythm` gives, so that an engine can free blocks. It chooses by the queries of its `window`,
            keys and values alone. A subclass must say it again.
        remembers: an evictor with `fixed_counts` goes on from what it left in ``ctx.state`` when it acted last.
    """

    needs: tuple[str, ...] = ()
    heads: HeadScope | None = None
    ragged: bool = False
    is_view: bool = False
    recuts: bool = False
    takes_quotas: bool = False
    static_shapes: bool = False
    query_aware: bool | None = None
    fixed_counts: bool = False
    remembers: bool = False


# Traits that a subclass does not inherit.
_OWN: dict[str, Any] = {"heads": None, "query_aware": None, "fixed_counts": False}
_TRAITS = frozenset(each.name for each in dataclasses.fields(Traits))
# Every public class of a role that a module has defined, by the name that files use for it.
_CLASSES: dict[str, type[Role]] = {}


class Role(Checked, ABC):
    """Base of evictors, propagators and readers. Keywords of a subclass are its Traits."""

    TRAITS: ClassVar[Traits] = Traits()

    @property
    def traits(self) -> Traits:
        """The Traits of this object: those of its class, unless its parameters change them."""
        return self.TRAITS

    def __init_subclass__(cls, **traits: Any) -> None:
        super().__init_subclass__()
        unknown = traits.keys() - _TRAITS
        if unknown:
            raise TypeError(f"{cls.__name__}: unknown trait {min(unknown)!r}; known are {', '.join(sorted(_TRAITS))}")
        cls.TRAITS = dataclasses.replace(cls.TRAITS, **{**_OWN, **traits})
        _check_contract(cls)
        if not cls.__name__.startswith("_") and "<locals>" not in cls.__qualname__:
            _CLASSES[role_name(cls)] = cls


def role_name(kind: type) -> str:
    """The name by which plans in files call a role's class: "SnapKV" for kvsieve's own, else "module:Name"."""
    return kind.__name__ if kind.__module__.startswith("kvsieve.methods.") else f"{kind.__module__}:{kind.__name__}"


def role_class(name: str) -> type[Role] | None:
    """The inverse of `role_name`, among the classes that have been defined; None for any other name."""
    return _CLASSES.get(name)


def _check_contract(cls: type[Role]) -> None:
    """Raise TypeError where a class defines a method of its role's contract as a value, or a value as a method."""
    contract = {
        name: isinstance(value, types.FunctionType)
        for base in reversed(cls.__mro__[1:])
        if base.__module__.startswith("kvsieve.roles")
        for name, value in vars(base).items()
        if not name.startswith("_")
    }
    unset = set(vars(cls).get("__annotations__", {})) - set(vars(cls))
    for name in unset & set(contract):
        if isinstance(inspect.getattr_static(cls, name, None), property):
            raise TypeError(f"{cls.__name__}.{name}: a field of its role's contract needs a default; give it one")
    defined = {name: isinstance(value, types.FunctionType) for name, value in vars(cls).items()}
    defined |= {name: False for name in vars(cls).get("__annotations__", {}) if name not in defined}
    for name, is_method in defined.items():
        if contract.get(name, is_method) != is_method:
            wanted, got = ("a method", "a value") if contract[name] else ("a value or property", "a method")
            raise TypeError(f"{cls.__name__}.{name} is {got}; in the contract of its role it is {wanted}")
