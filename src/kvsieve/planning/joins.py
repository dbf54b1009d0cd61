"""Joins: rules by which documents that were prefilled alone become one prompt; their registry and their text form."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from kvsieve.errors import PlanError, short
from kvsieve.lazy import Tensor
from kvsieve.planning.loading import canonical, load_methods
from kvsieve.planning.parameters import Checked
from kvsieve.planning.specs import split_specs
from kvsieve.planning.suggestions import check_names, did_you_mean

# The default join, in its text form.
JOIN = "link:shift=true"
# Half-open columns.
Span = tuple[int, int]


class Join(Checked):
    """Base of joins: chooses the tokens that are prefilled again once the documents are in their places.

    A subclass is a frozen dataclass, registered by `register_join`; its fields are the parameters in its text form.
    """

    def again(self, sizes: Sequence[int], start: int) -> list[Span]:
        """Return the columns to prefill again, in ascending order, none by default; each sees all columns before it.

        Entries of the first document are exact, since it was prefilled in its place. If the spans cover all documents
        after it, nothing is prefilled alone: the whole is one plain prefill.

        Args:
            sizes: tokens of each document, in order.
            start: tokens before the first one.
        """
        return []

    @property
    def shifts(self) -> bool:
        """Entries that stay are shifted by the mean change, in their document, of those that are prefilled again.

        The mean is over tokens after the first 16 of a document, per layer and head, of values, and of keys before
        their rotation; the mean over all documents counts as 20 tokens of each. The first document stays as it is.
        """
        return False

    @property
    def spec(self) -> str:
        """Text form, for `join_of`: "link:tokens=32"."""
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        written = {name: value for name, value in fields.items() if value not in (None, False)}
        settings = [f"{name}={'true' if value is True else value}" for name, value in written.items()]
        return ":".join([_info_of(type(self)).name, *settings])


class SelectiveJoin(Join, ABC):
    """Base of joins that choose tokens by their entries: all pass the first layers, chosen ones the others.

    Tokens of the first document, with exact entries, take no part.
    """

    @abstractmethod
    def source(self, num_layers: int) -> int:
        """Return the index of the last layer that computes all tokens, one before the model's last.

        Raises PlanError for a model of `num_layers` layers without it.
        """

    @abstractmethod
    def tokens(self, layer: int, num_layers: int, total: int) -> int:
        """Return the number of tokens that continue after a layer, from `source` on; at least 1.

        Args:
            layer: its index.
            num_layers: layers of the model.
            total: tokens after the first document.
        """

    def chosen(self, num_layers: int, total: int) -> int:
        """Return the number of tokens that reach the last layer; see `tokens`."""
        layers = range(self.source(num_layers), num_layers - 1)
        return min([total, *(self.tokens(layer, num_layers, total) for layer in layers)])


@dataclass(frozen=True)
class AskedAttention:
    """Attention to joined documents in their places, mean over heads and over the tokens that attend.

    Attributes:
        question: float32 [layers, N], of the question's tokens.
        last: likewise, of the question's last token, fed alone; None unless the join compares with it.
        sizes: tokens of each document; N in all. The first document is exact in its place.
        ids: int64 [N], the documents' tokens.
        asked: int64 [M], the question's tokens.
    """

    question: Tensor
    last: Tensor | None
    sizes: Sequence[int]
    ids: Tensor
    asked: Tensor


class AskedJoin(Join, ABC):
    """Base of joins that choose tokens by the question's attention to the documents in their places.

    Attributes:
        compares: needs the attention of the question's last token alone, too.
    """

    compares: ClassVar[bool] = False

    @abstractmethod
    def most(self, sizes: Sequence[int]) -> int:
        """Return the largest number of tokens to prefill again. sizes: tokens of each document after the first."""

    @abstractmethod
    def choose(self, attention: AskedAttention) -> Tensor:
        """Return the tokens to prefill again, bool [N]; those of the first document stay as they are."""


class ParallelJoin(Join, ABC):
    """Base of joins that leave documents at the same positions; text after them begins after the longest.

    Later attention divides the logits of their entries by `temperature`, and multiplies the log-sum-exp of these by
    `factor` before it is merged with that of all other entries.
    """

    temperature: float

    @property
    @abstractmethod
    def factor(self) -> float:
        """Factor of the log-sum-exp."""


@dataclass(frozen=True)
class JoinInfo:
    """A registered join.

    Attributes:
        name: of the join.
        title: name in the paper.
        paper: its source, e.g. "arXiv 2410.15332".
        summary: the first line of its docstring, for tables.
        kind: its class.
    """

    name: str
    title: str
    paper: str
    summary: str
    kind: type[Join]


_JOINS: dict[str, JoinInfo] = {}
J = TypeVar("J", bound=type[Join])


def register_join(name: str, *, title: str, paper: str) -> Callable[[J], J]:
    """Register the decorated class, a frozen dataclass derived from Join, under `name`; see JoinInfo.

    Raises PlanError for a name that is taken.
    """

    def add(kind: J) -> J:
        key = canonical(name)
        if key in _JOINS:
            raise PlanError(f"a join named {name!r} is registered already, by {_JOINS[key].kind.__module__}")
        _JOINS[key] = JoinInfo(name, title, paper, (kind.__doc__ or "").partition("\n")[0], kind)
        return kind

    return add


def list_joins() -> list[str]:
    """Return the names of all joins, in alphabetical order after "full"."""
    load_methods()
    return sorted((info.name for info in _JOINS.values()), key=lambda name: (name != "full", name))


def join_info(name: str) -> JoinInfo:
    """Return the facts of a join. Raises PlanError with a suggestion for an unknown name."""
    known = list_joins()
    info = _JOINS.get(canonical(name))
    if info is None:
        raise PlanError(f"unknown join {short(name)}{did_you_mean(name, known)}")
    return info


def join_of(value: Join | str) -> Join:
    """Return a join, parsing text such as ``link:tokens=32``. Raises PlanError."""
    if isinstance(value, Join):
        return value
    specs = split_specs(value) if isinstance(value, str) else []
    if len(specs) != 1:
        raise PlanError(f"a join is one name with its parameters, such as 'link:tokens=32', got {short(value)}")
    ((name, settings),) = specs
    info = join_info(name)
    check_names(info.name, {field.name: None for field in dataclasses.fields(info.kind)}, settings)  # type: ignore[arg-type]
    return info.kind(**settings)


def checked_spans(join: Join, sizes: Sequence[int], start: int) -> list[Span]:
    """Return the columns of `Join.again`. Raises PlanError for spans out of order, or outside the documents."""
    spans = join.again(sizes, start)
    end = start
    for first, last in spans:
        if not end <= first < last:
            raise PlanError(f"{type(join).__name__}.again returned {short(spans)}, expected ascending spans")
        end = last
    if end > start + sum(sizes):
        raise PlanError(f"{type(join).__name__}.again returned columns up to {end} of {start + sum(sizes)}")
    return spans


def _info_of(kind: type[Join]) -> JoinInfo:
    for info in _JOINS.values():
        if info.kind is kind:
            return info
    raise PlanError(f"{kind.__name__} is no registered join; put @register_join(...) above the class")
