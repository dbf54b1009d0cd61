"""Roles of a plan: evictors, propagators, readers, codecs and sparse prefill.

A role is a frozen dataclass that derives from one of these base classes: the object is the configuration. State of a
conversation is stored in its cache and passed to the role in every call.
"""

from kvsieve.planning.roles.base import HeadScope as HeadScope
from kvsieve.planning.roles.base import Role as Role
from kvsieve.planning.roles.base import Traits as Traits
from kvsieve.planning.roles.base import check_layers as check_layers
from kvsieve.planning.roles.base import role_class as role_class
from kvsieve.planning.roles.base import role_name as role_name
from kvsieve.planning.roles.codec import Codec as Codec
from kvsieve.planning.roles.delegate import DelegatingEvictor as DelegatingEvictor
from kvsieve.planning.roles.delegate import base_of as base_of
from kvsieve.planning.roles.drafting import DraftPropagator as DraftPropagator
from kvsieve.planning.roles.drafting import Loaded as Loaded
from kvsieve.planning.roles.drafting import draft_of as draft_of
from kvsieve.planning.roles.evictor import ChunkedEvictor as ChunkedEvictor
from kvsieve.planning.roles.evictor import Evictor as Evictor
from kvsieve.planning.roles.evictor import Layers as Layers
from kvsieve.planning.roles.paged import PageBudget as PageBudget
from kvsieve.planning.roles.paged import PagedReader as PagedReader
from kvsieve.planning.roles.prefill import SparsePrefill as SparsePrefill
from kvsieve.planning.roles.probing import Branch as Branch
from kvsieve.planning.roles.probing import Compact as Compact
from kvsieve.planning.roles.probing import Observe as Observe
from kvsieve.planning.roles.probing import ProbePasses as ProbePasses
from kvsieve.planning.roles.probing import ProbingEvictor as ProbingEvictor
from kvsieve.planning.roles.propagator import Propagator as Propagator
from kvsieve.planning.roles.reader import Reader as Reader
from kvsieve.planning.roles.sizes import budgets_of as budgets_of
from kvsieve.planning.roles.sizes import byte_budgets as byte_budgets
from kvsieve.planning.roles.sizes import floor_of as floor_of
from kvsieve.planning.roles.sizes import parts_of as parts_of
from kvsieve.planning.roles.sizes import with_entries as with_entries
from kvsieve.planning.roles.sizes import with_floor as with_floor
from kvsieve.planning.roles.together import check_together as check_together
