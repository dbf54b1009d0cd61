"""Check that a server can follow a checkpoint's generation_config."""

from __future__ import annotations

from typing import Any

from kvsieve.errors import UnsupportedOptionError
from kvsieve.hf.generate.config import check_config, config_in_effect, who_says

# Attributes of a checkpoint's generation_config that generate supports and the server does not, with their neutral
# values.
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "num_beams": ("answers are not searched for with beams", (1,)),
    "guidance_scale": ("no second, unconditional pass is run", (1,)),
    "max_time": ("kvsieve serve --seconds is the limit of time", ()),
}


def check_generation_config(model: Any) -> None:
    """Raise UnsupportedOptionError if a checkpoint's generation_config has settings that the server cannot honour."""
    config = config_in_effect(model)
    for name, (reason, nothing) in _REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and value not in nothing:
            raise UnsupportedOptionError(
                f"{who_says(model, {}, name)} is not supported by a server: {reason}; take it out of "
                "generation_config.json"
            )
    try:
        check_config(model, {}, config)
    except UnsupportedOptionError as error:
        raise UnsupportedOptionError(f"{error}; for a server, take it out of generation_config.json") from error
