"""Names by which the plugin is configured; with the entry point all that vLLM imports where there is no plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

KEY = "kvsieve"
PLAN_VARIABLE = "KVSIEVE_VLLM_PLAN"
ANY_VERSION = "KVSIEVE_VLLM_ANY_VERSION"


def asked_for(additional_config: Any) -> Any:
    """Return what was given in vLLM's `additional_config`, or the plan in the environment; None for nothing."""
    found = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    return found if found is not None else os.environ.get(PLAN_VARIABLE) or None
