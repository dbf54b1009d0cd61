"""Prompt Cache: Modular Attention Reuse for Low-Latency Inference (arXiv 2311.04934), section 3.

A prompt is composed of modules. The attention states of each module are computed once, without the other modules, at
positions of its own, and the prompt's cache is the concatenation of its modules' states. Nothing is computed again: the
tokens of a module never attend to those of another, and only text after the modules attends to all of them.

Differences from the reference: documents are prefilled after the tokens that precede the first one, instead of without
any; keys are then rotated to the places that the documents have in the prompt, instead of positions that a schema
fixes, so that any order and repetition serves and positions have no gaps. Modules have no parameters, unions or
scaffolds.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.planning.joins import Join, register_join


@register_join("modules", title="Prompt Cache", paper="arXiv 2311.04934")
@dataclass(frozen=True, kw_only=True)
class Modules(Join):
    """Concatenate the documents' entries; prefill nothing again."""
