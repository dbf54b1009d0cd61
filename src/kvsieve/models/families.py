"""Tiny random models, one per architecture family of transformers.

FAMILIES is the single place that says which families kvsieve knows of: the tests run over it, and
`docs/models.md` and `kvsieve models` are made from it. A family here need not be supported; it must build
from a config alone, at once, with no download, and compute in float64. Every decoder is 64 channels wide, and most have
4 layers, 4 query heads, 2 KV heads and 16 channels per head. Families that mix local and full attention alternate the
two, with a window of 16 tokens.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from kvsieve.models.composite_families import COMPOSITE
from kvsieve.models.family import BASE, Family
from kvsieve.models.plain_families import PLAIN
from kvsieve.models.special_families import SPECIAL

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class UnknownFamilyError(KeyError):
    """No family has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"unknown model family {self.name!r}; known: {', '.join(family.name for family in FAMILIES)}"


FAMILIES = (*PLAIN, *SPECIAL, *COMPOSITE)

# Values that a composite model's own configuration takes beside that of its text part.
_OF_BOTH = ("initializer_range", "tie_word_embeddings", "experts_implementation", "attn_implementation")


def available() -> tuple[Family, ...]:
    """The families that the installed transformers has."""
    import transformers

    return tuple(family for family in FAMILIES if family.why_not_in(transformers.__version__) is None)


def build(family_name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A tiny random model of the family, on CPU and in eval mode, with SDPA attention where the family has it.

    The same seed gives the same weights (within one transformers release: some change the order of initialisation), and
    the caller's random state is left alone. `overrides` are config values laid over the family's own;
    `attn_implementation` is one of them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    family = next((family for family in FAMILIES if family.name == family_name), None)
    if family is None:
        raise UnknownFamilyError(family_name)
    values: dict[str, Any] = {**BASE, **family.config, **overrides}
    if family.parts:
        both = {name: values[name] for name in _OF_BOTH if name in values}
        values = {**both, **family.parts, "text_config": values}
    # Copied, because some configurations write into what they are given.
    config = AutoConfig.for_model(family.model_type, **copy.deepcopy(values))
    auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    # Mistral 4 alone is a text model that is not in the mapping of causal ones.
    if family.parts or not (config.is_encoder_decoder or type(config) in AutoModelForCausalLM._model_mapping):
        auto = AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto.from_config(config, dtype=dtype).eval()
