"""Joins by name: their text form, their parameters, and the columns that they prefill again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvsieve.errors import PlanError
from kvsieve.methods.joins import Full, Link, Modules
from kvsieve.planning.joins import JOIN, Join, checked_spans, join_info, join_of, list_joins, register_join


@pytest.mark.parametrize(
    ("text", "join", "spec"),
    [
        ("full", Full(), "full"),
        ("Modules", Modules(), "modules"),
        ("link", Link(), "link:tokens=32"),
        (JOIN, Link(shift=True), "link:tokens=32:shift=true"),
        ("link:tokens=8", Link(tokens=8), "link:tokens=8"),
        (Link(tokens=3), Link(tokens=3), "link:tokens=3"),
    ],
)
def test_joins_are_read_and_written(text, join, spec):
    assert join_of(text) == join
    assert join_of(text).spec == spec
    assert join_of(spec) == join


@pytest.mark.parametrize("name", list_joins())
def test_every_join_has_a_source_and_defaults(name):
    info = join_info(name)
    assert info.title and info.summary.endswith(".") and (info.paper.startswith("arXiv") or name == "full")
    assert join_of(info.kind().spec) == info.kind()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lnk", "unknown join 'lnk'; did you mean 'link'"),
        ("link:token=8", "link has no parameter 'token'; did you mean 'tokens'"),
        ("link:tokens=x", "tokens must be a whole number"),
        ("link:tokens=0", "tokens must be a whole number of at least 1"),
        ("link:tokens", "name=value"),
        ("modules,link", "one name"),
        ("", "one name"),
        (3, "one name"),
    ],
)
def test_wrong_texts_are_refused(text, message):
    with pytest.raises(PlanError, match=message):
        join_of(text)


def test_columns_to_prefill_again():
    assert Modules().again((5, 3, 9), 2) == []
    assert Full().again((5, 3, 9), 2) == [(2, 19)]
    assert Link(tokens=4).again((5, 3, 9), 2) == [(7, 10), (10, 14)]
    assert Link(tokens=4).again((5,), 0) == []


@dataclass(frozen=True, kw_only=True)
class Fixed(Join):
    """Spans of the caller."""

    spans: tuple[tuple[int, int], ...] = ()

    def again(self, sizes, start):
        return list(self.spans)


@pytest.mark.parametrize("spans", [((0, 3),), ((4, 6), (5, 7)), ((6, 6),), ((6, 30),)])
def test_spans_out_of_place_are_refused(spans):
    with pytest.raises(PlanError, match="Fixed.again returned"):
        checked_spans(Fixed(spans=spans), (5, 3, 9), 2)


def test_a_taken_name_and_a_class_without_one_are_refused():
    with pytest.raises(PlanError, match="registered already"):
        register_join("Link", title="", paper="")(Fixed)
    with pytest.raises(PlanError, match="no registered join"):
        _ = Fixed().spec
