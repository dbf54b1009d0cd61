"""Advice: measures a few plans to recommend one for a model, a context and a limit."""

from typing import TYPE_CHECKING

from kvsieve.lazy import lazy_names

if TYPE_CHECKING:
    from kvsieve.lab.advise.choose import PlanLimits
    from kvsieve.lab.advise.material import AdviceMaterial, built_in, from_file
    from kvsieve.lab.advise.options import AdviceOptions
    from kvsieve.lab.advise.run import Advice, advise

__all__ = ["Advice", "AdviceMaterial", "AdviceOptions", "PlanLimits", "advise", "built_in", "from_file"]

__getattr__ = lazy_names(
    __name__,
    choose=("PlanLimits",),
    material=("AdviceMaterial", "built_in", "from_file"),
    options=("AdviceOptions",),
    run=("Advice", "advise"),
)
