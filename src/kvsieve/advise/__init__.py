"""Advice: which plan suits a model, a context and a limit, by measuring a handful of them. An application."""

from kvsieve.advise.choose import PlanLimits
from kvsieve.advise.material import AdviceMaterial, built_in, from_file
from kvsieve.advise.options import AdviceOptions
from kvsieve.advise.run import Advice, advise

__all__ = ["Advice", "AdviceMaterial", "AdviceOptions", "PlanLimits", "advise", "built_in", "from_file"]
