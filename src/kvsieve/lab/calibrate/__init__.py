"""Calibration: measures the parameters that a model's methods need, and stores them as a profile."""

from typing import TYPE_CHECKING

from kvsieve.lazy import lazy_names

if TYPE_CHECKING:
    from kvsieve.lab.calibrate.duration import forecast as forecast
    from kvsieve.lab.calibrate.options import PARTS as PARTS
    from kvsieve.lab.calibrate.options import Options as Options
    from kvsieve.lab.calibrate.prompts import Material as Material
    from kvsieve.lab.calibrate.prompts import Prompt as Prompt
    from kvsieve.lab.calibrate.prompts import built_in_prompts as built_in_prompts
    from kvsieve.lab.calibrate.prompts import text_prompts as text_prompts
    from kvsieve.lab.calibrate.run import calibrate as calibrate
    from kvsieve.lab.calibrate.run import measure as measure


__getattr__ = lazy_names(
    __name__,
    duration=("forecast",),
    options=("PARTS", "Options"),
    prompts=("Material", "Prompt", "built_in_prompts", "text_prompts"),
    run=("calibrate", "measure"),
)
