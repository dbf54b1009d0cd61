"""Mixed precision by importance: MiKV, No Token Left Behind (arXiv 2402.18096), and ZipCache (arXiv 2405.14256).

Entries that an evictor would drop still matter a little, and to some answers a lot. They are stored in few bits; kept
ones stay exact. ``plan("snapkv", budget="20%", rest="2bit")`` is the same for any evictor.

Differences from MiKV: importance is SnapKV's, where the paper has H2O's; important entries are exact unless ``codec=``
is given, where the paper gives them more bits; key channels of the rest are balanced by the mean squares of keys and of
the prompt's last 32 queries, where the paper uses the maxima, and are then rotated, with codes chosen by the errors of
products with these queries. From ZipCache: importance is not normalised by how many queries can see an entry, since all
observing queries see all others. From both: importance is fixed at the end of a prompt; an encoded entry does not
become exact again, even if a later turn chooses it, and tokens of the answer stay exact until the next prompt.
"""

from __future__ import annotations

from typing import Literal

from kvsieve.core.scoring import Kernel, Pool
from kvsieve.methods.rotated import Rotated
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning import defaults
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method


@register_method(
    "mixed",
    title="MiKV, ZipCache",
    paper="arXiv 2402.18096, 2405.14256",
    phase="end of prompt",
    derive=defaults.pooling,
)
def mixed(
    budget: Budget | str | int | float = "20%",
    bits: Literal[2, 3, 4] = 2,
    window: int = 32,
    kernel: Kernel = 7,
    pooling: Pool = "avg",
) -> Plan:
    """SnapKV that evicts nothing: it quantizes the entries SnapKV would evict.

    budget: entries that stay exact.
    bits: 2, 3 or 4, of the others.
    """
    evict = SnapKV(budget=Budget.parse(budget), window=window, kernel=kernel, pooling=pooling)
    return Plan(evict=evict, rest=Rotated(bits=bits))
