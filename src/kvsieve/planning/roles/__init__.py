"""Roles of a plan: evictors, propagators, readers, codecs and sparse prefill.

A role is a frozen dataclass that derives from one of these base classes: the object is the configuration. State of a
conversation is stored in its cache and passed to the role in every call.
"""

from kvsieve.planning.roles.base import HeadScope, Role, Traits, check_layers, role_class, role_name
from kvsieve.planning.roles.codec import Codec
from kvsieve.planning.roles.delegate import DelegatingEvictor, base_of
from kvsieve.planning.roles.drafting import DraftPropagator, Loaded, draft_of
from kvsieve.planning.roles.evictor import ChunkedEvictor, Evictor, Layers
from kvsieve.planning.roles.paged import PageBudget, PagedReader
from kvsieve.planning.roles.prefill import SparsePrefill
from kvsieve.planning.roles.probing import Branch, Compact, Observe, ProbePasses, ProbingEvictor
from kvsieve.planning.roles.propagator import Propagator
from kvsieve.planning.roles.reader import Reader
from kvsieve.planning.roles.sizes import budgets_of, byte_budgets, floor_of, parts_of, with_entries, with_floor
from kvsieve.planning.roles.together import check_together

__all__ = [
    "Branch",
    "ChunkedEvictor",
    "Codec",
    "Compact",
    "DelegatingEvictor",
    "DraftPropagator",
    "Evictor",
    "HeadScope",
    "Layers",
    "Loaded",
    "Observe",
    "PageBudget",
    "PagedReader",
    "ProbePasses",
    "ProbingEvictor",
    "Propagator",
    "Reader",
    "Role",
    "SparsePrefill",
    "Traits",
    "base_of",
    "budgets_of",
    "byte_budgets",
    "check_layers",
    "check_together",
    "draft_of",
    "floor_of",
    "parts_of",
    "role_class",
    "role_name",
    "with_entries",
    "with_floor",
]
