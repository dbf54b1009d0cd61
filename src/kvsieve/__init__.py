"""kvsieve makes long-context inference of Hugging Face language models cheap.

    model, tokenizer = kvsieve.models.load_demo()
    with kvsieve.attach(model, kvsieve.plan("fastkv:budget=20%"), tokenizer=tokenizer) as sieve:
        result = sieve.ask(document, question="What was decided?")
    print(result.text, result.stats)

Importing this loads neither torch nor transformers: names are loaded on first use.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

# In the command's own process Ctrl-C is fatal, without a traceback, until __main__ handles it.
if (
    (sys.argv[:1] == ["-m"] and ("-m", "kvsieve") in itertools.pairwise(sys.orig_argv))
    or "".join(sys.argv[:1]).endswith(f"{os.sep}kvsieve")
) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import importlib
import logging
from typing import TYPE_CHECKING, Any

from kvsieve.errors import KvsieveError, KvsieveWarning
from kvsieve.moved import OldNames
from kvsieve.planning.budget import Budget
from kvsieve.planning.loading import PROVIDED
from kvsieve.version import __version__

if TYPE_CHECKING:
    from kvsieve import methods, models
    from kvsieve.hf.attach import Sieve, attach
    from kvsieve.hf.cache.cache import SieveCache
    from kvsieve.lab.eval.evaluator import Evaluator
    from kvsieve.planning.grammars import Grammar
    from kvsieve.planning.named import plan
    from kvsieve.planning.plans import Plan
    from kvsieve.planning.registry import list_methods, method_info, register_method

__all__ = [
    "Budget",
    "Evaluator",
    "Grammar",
    "KvsieveError",
    "KvsieveWarning",
    "Plan",
    "Sieve",
    "SieveCache",
    "__version__",
    "attach",
    "list_methods",
    "method_info",
    "methods",
    "models",
    "plan",
    "register_method",
]

_HOME = {
    "Evaluator": "kvsieve.lab.eval.evaluator",
    "Grammar": "kvsieve.planning.grammars",
    "Plan": "kvsieve.planning.plans",
    "Sieve": "kvsieve.hf.attach",
    "SieveCache": "kvsieve.hf.cache.cache",
    "attach": "kvsieve.hf.attach",
    "list_methods": "kvsieve.planning.registry",
    "method_info": "kvsieve.planning.registry",
    "plan": "kvsieve.planning.named",
    "register_method": "kvsieve.planning.registry",
}

sys.meta_path.insert(0, OldNames())

# Applications that show logs add a handler, or call logging.basicConfig.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def _load_methods() -> None:
    """Import kvsieve's own methods, which registers them."""
    import kvsieve.methods  # noqa: F401


def _settle(plan: Plan, model: Any, tokenizer: Any) -> Plan:
    """See Plan.for_model."""
    from kvsieve.hf.model.settle import plan_for

    return plan_for(plan, model, tokenizer)


PROVIDED.update(load_methods=_load_methods, settle=_settle)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return value
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
