"""Calibration: what a model needs of its methods' parameters, measured once and kept as a profile. An application."""

from kvsieve.calibrate.options import PARTS, Options
from kvsieve.calibrate.prompts import Prompt, built_in_prompts, text_prompts
from kvsieve.calibrate.run import calibrate, forecast, measure

__all__ = ["PARTS", "Options", "Prompt", "built_in_prompts", "calibrate", "forecast", "measure", "text_prompts"]
