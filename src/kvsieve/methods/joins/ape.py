"""APE: Faster and Longer Context-Augmented Generation via Adaptive Parallel Encoding (arXiv 2502.05431), section 4.

Every document is prefilled alone after a shared prefix, `before`, and all keep the same positions. The question begins
after the longest. Its attention, and that of the answer, has a temperature T in the documents' logits, and the
log-sum-exp of these logits is multiplied by the scaling factor S and by T before it is merged with that of the prefix,
the question and the answer. T below 1 sharpens attention within the documents, S below 1 lowers their part.

The paper finds T and S by a search on a few examples per task; 0.9 for both is the default of the authors' demo.

Differences from the reference: the temperature is written into the stored keys; without a shared prefix the documents
begin at position 0. Attention is computed by products, not by the fastest kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.errors import PlanError, short
from kvsieve.planning.joins import ParallelJoin, register_join


@register_join("ape", title="APE", paper="arXiv 2502.05431")
@dataclass(frozen=True, kw_only=True)
class Ape(ParallelJoin):
    """Leave documents at the same positions; attend to them with a temperature and a scaling factor.

    temperature: T, by which the documents' logits are divided. scale: S, of the log-sum-exp of these, besides T.
    """

    temperature: float = 0.9
    scale: float = 0.9

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("scale", self.scale)):
            if not 0 < value <= 10:
                raise PlanError(f"Ape: {name} must be a number above 0, at most 10, got {short(value)}")

    @property
    def factor(self) -> float:
        return self.temperature * self.scale
