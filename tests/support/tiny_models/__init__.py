"""Tiny random models, one per architecture family of transformers.

FAMILIES is the only list of the families that kvsieve knows: the tests run over it, and model_table.py makes
`docs/models.md` and `kvsieve models` from it. A family need not be supported; it must build from a config alone, fast
and without download, and compute in float64. Every decoder is 64 channels wide, and most have 4 layers, 4 query heads,
2 KV heads and 16 channels per head. Families that mix local and full attention alternate the two, with a window of 16
tokens.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from tiny_models.composite import COMPOSITE
from tiny_models.family import BASE, Family
from tiny_models.plain import PLAIN
from tiny_models.special import SPECIAL

if TYPE_CHECKING:
    from transformers import PreTrainedModel


FAMILIES = (*PLAIN, *SPECIAL, *COMPOSITE)

# Values of a composite model's own configuration, besides those of its text part.
_OF_BOTH = ("initializer_range", "tie_word_embeddings", "experts_implementation", "attn_implementation")


def available() -> tuple[Family, ...]:
    """Return the families of the installed transformers."""
    import transformers

    return tuple(family for family in FAMILIES if family.why_not_in(transformers.__version__) is None)


def build(family_name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """Return a tiny random model of the family, on CPU, in eval mode, with SDPA attention if available.

    The same seed gives the same weights within one transformers release, and the caller's random state does not change.
    `overrides` replace values of the family's config, including `attn_implementation`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    family = next(family for family in FAMILIES if family.name == family_name)
    values: dict[str, Any] = {**BASE, **family.config, **overrides}
    if family.parts:
        both = {name: values[name] for name in _OF_BOTH if name in values}
        values = {**both, **family.parts, "text_config": values}
    # Copied, because some configurations modify their arguments.
    config = AutoConfig.for_model(family.model_type, **copy.deepcopy(values))
    auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    # Mistral 4 alone is a text model that is not in the mapping of causal ones.
    if family.parts or not (config.is_encoder_decoder or type(config) in AutoModelForCausalLM._model_mapping):
        auto = AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto.from_config(config, dtype=dtype).eval()
