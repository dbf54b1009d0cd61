"""kvsieve makes long-context inference of Hugging Face language models cheap.

Fewer hidden states travel through the deep layers while a prompt is read, and fewer KV entries stay in memory:

    model, tokenizer = kvsieve.models.load_demo()
    plan = kvsieve.plan("fastkv", budget="20%", tsp_layer=22, tsp_rate=0.3, kernel=21)
    with kvsieve.attach(model, plan) as sieve:
        result = sieve.generate(input_ids, max_new_tokens=48)
"""

from kvsieve import methods, models
from kvsieve.budget import Budget
from kvsieve.errors import KvsieveError, KvsieveWarning
from kvsieve.hf.attach import Sieve, attach
from kvsieve.hf.cache import SieveCache
from kvsieve.plans import Plan, plan
from kvsieve.registry import list_methods, method_info, register_method

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "KvsieveError",
    "KvsieveWarning",
    "Plan",
    "Sieve",
    "SieveCache",
    "attach",
    "list_methods",
    "method_info",
    "methods",
    "models",
    "plan",
    "register_method",
]
