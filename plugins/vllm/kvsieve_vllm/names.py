"""Names of the plugin's configuration; with the entry point, vLLM's only import without a plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

KEY = "kvsieve"
PLAN_VARIABLE = "KVSIEVE_VLLM_PLAN"
ANY_VERSION = "KVSIEVE_VLLM_ANY_VERSION"


def asked_for(additional_config: Any) -> Any:
    """Return the value in vLLM's `additional_config`, or the plan in the environment; None for nothing."""
    found = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    return found if found is not None else os.environ.get(PLAN_VARIABLE) or None
