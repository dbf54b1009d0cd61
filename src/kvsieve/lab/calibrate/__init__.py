"""Calibration: measures the parameters that a model's methods need, and stores them as a profile."""

from typing import TYPE_CHECKING

from kvsieve.lazy import lazy_names

if TYPE_CHECKING:
    from kvsieve.lab.calibrate.duration import forecast
    from kvsieve.lab.calibrate.options import PARTS, Options
    from kvsieve.lab.calibrate.prompts import Material, Prompt, built_in_prompts, text_prompts
    from kvsieve.lab.calibrate.run import calibrate, measure

__all__ = [
    "PARTS",
    "Material",
    "Options",
    "Prompt",
    "built_in_prompts",
    "calibrate",
    "forecast",
    "measure",
    "text_prompts",
]

__getattr__ = lazy_names(
    __name__,
    duration=("forecast",),
    options=("PARTS", "Options"),
    prompts=("Material", "Prompt", "built_in_prompts", "text_prompts"),
    run=("calibrate", "measure"),
)
