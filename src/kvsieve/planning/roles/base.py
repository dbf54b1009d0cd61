"""The base class of all roles, its traits, and a check of subclasses."""

from __future__ import annotations

import dataclasses
import inspect
import types
from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvsieve.errors import PlanError
from kvsieve.planning.parameters import Checked

HeadScope = Literal["own", "all"]


@dataclass(frozen=True)
class Traits:
    """Facts about a role, given as keywords of its class: ``class SnapKV(Evictor, heads="own")``.

    Attributes:
        needs: required facts of ``ctx.model``: "rotary" and "output_weight"; with "hidden", an evictor gets
            ``ctx.hidden`` and ``ctx.output``; with "tokens", ``ctx.ids``, and prompts given as embeddings are refused;
            "uncapped" requires logits without a cap (``AttentionQueries.softcap``). Other models are refused.
        heads: heads needed to choose for a KV head: "own" for that KV head and its query heads, "all" if other heads of
            the layer count and `ctx.ranks` is used for those of other processes. None: unknown, so the plan is refused
            if tensor parallelism divides heads. Not inherited.
        ragged: KV heads may keep different numbers of entries.
        is_view: an evictor that drops nothing: its selection is the entries this turn's answer attends to.
        recuts: drops of a layer may depend on later layers, so more of the layer may be dropped later in the same pass.
        takes_quotas: an evictor that ranks entries by scores, so that ``quotas=`` may be set.
        static_shapes: a reader that also works on sequences with a length on the device (core.kv_rows.DeviceLength),
            with only an IncrementalMetadata of each as state; passes can then be recorded.
        query_aware: an evictor or propagator with choices that depend on queries, including those of the question at
            the prompt's end. None: unknown, treated as True. Not inherited.
        fixed_counts: an evictor that keeps exactly `counts` entries in every KV head and layer, at lengths given by
            `Evictor.rhythm`, so that an engine can free blocks. It chooses only by the queries of its `window`, keys
            and values. Not inherited.
        remembers: an evictor with `fixed_counts` that continues from its last ``ctx.state``.
        writes: an evictor whose selections may carry keys, values or weights of entries (types.Selection).
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
    writes: bool = False


# Traits that a subclass does not inherit.
_OWN: dict[str, Any] = {"heads": None, "query_aware": None, "fixed_counts": False}
_TRAITS = frozenset(field.name for field in dataclasses.fields(Traits))
# Public role classes by their `role_name`.
_CLASSES: dict[str, type[Role]] = {}


class Role(Checked, ABC):
    """Base of evictors, propagators and readers. Keywords of a subclass are its Traits."""

    TRAITS: ClassVar[Traits] = Traits()

    @property
    def traits(self) -> Traits:
        """The Traits of this object: those of its class, unless its parameters change them."""
        return self.TRAITS

    def check(self, num_layers: int) -> None:
        """Raise PlanError for a model of `num_layers` decoder layers that it does not support."""

    def check_layer(self, index: int, num_layers: int, heads: int, query_heads: int, dim: int) -> None:
        """Raise PlanError if its arrays by layer and head do not fit a layer with KV that grows.

        index: of the layer, of `num_layers`. heads, query_heads: its KV and query heads. dim: channels of a key.
        """

    def __init_subclass__(cls, **traits: Any) -> None:
        super().__init_subclass__()
        unknown = traits.keys() - _TRAITS
        if unknown:
            raise TypeError(f"{cls.__name__}: unknown trait {min(unknown)!r}; known are {', '.join(sorted(_TRAITS))}")
        cls.TRAITS = dataclasses.replace(cls.TRAITS, **{**_OWN, **traits})
        _check_contract(cls)
        if not cls.__name__.startswith("_") and "<locals>" not in cls.__qualname__:
            _CLASSES[role_name(cls)] = cls


def check_layers(owner: object, name: str, layers: int | tuple[int, ...], num_layers: int) -> None:
    """Raise PlanError unless `layers`, a number of first ones or which, are in a model of `num_layers` layers.

    name: the parameter's. Negative layers count from the last.
    """
    bad = [layer for layer in layers if not -num_layers <= layer < num_layers] if isinstance(layers, tuple) else []
    if bad or (isinstance(layers, int) and layers > num_layers):
        raise PlanError(
            f"{type(owner).__name__}: {name}={layers} lies outside the model, which has {num_layers} layers"
            + (f": layers are {-num_layers}..{num_layers - 1}" if bad else "")
        )


def role_name(kind: type) -> str:
    """Return the name of a role's class in files: "SnapKV" for kvsieve's own, else "module:Name"."""
    return kind.__name__ if kind.__module__.startswith("kvsieve.methods.") else f"{kind.__module__}:{kind.__name__}"


def role_class(name: str) -> type[Role] | None:
    """Return the defined class of this `role_name`, or None."""
    return _CLASSES.get(name)


def _check_contract(cls: type[Role]) -> None:
    """Raise TypeError for a class that defines a method of its role's contract as a value, or a value as a method."""
    contract = {
        name: isinstance(value, types.FunctionType)
        for base in reversed(cls.__mro__[1:])
        if base.__module__.startswith("kvsieve.planning.roles")
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
