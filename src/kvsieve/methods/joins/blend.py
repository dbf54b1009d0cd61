"""CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion (arXiv 2405.16444), section 4.

Documents are prefilled alone and moved to their places. Then all their tokens pass the first layers, and the KV
deviation of a token is the distance of its key and value there from the stored ones. The tokens of the highest
deviation continue: in every deeper layer their keys and values replace the stored ones, and their queries attend to
all entries up to their own, updated or not. With gradual filtering every deeper layer chooses again, a little fewer
among those that reached it.

The paper recomputes 15% of the tokens. It does not name a norm, nor the shares of gradual filtering: the deviation here
is the Euclidean distance over keys and values of all heads, and shares fall linearly from `first` with `share` as their
mean.

Differences from the reference: entries of the layers up to `layer` are updated for all tokens, since all are computed
there; the first layer's keys and values depend on the token alone, so the choice is made after the second one, as in
the authors' code. Tokens of the first document, which is exact in its place, do not take part.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.errors import PlanError
from kvsieve.methods.base import check_int
from kvsieve.methods.joins.shares import parse_share
from kvsieve.planning.joins import SelectiveJoin, register_join


@register_join("blend", title="CacheBlend", paper="arXiv 2405.16444")
@dataclass(frozen=True, kw_only=True)
class Blend(SelectiveJoin):
    """Prefill the tokens again that deviate most from a prefill in their places.

    share: of the tokens after the first document, those prefilled in every deeper layer; a share ("15%", 0.15).
    layer: 0-based, from 1, the last one that computes all tokens. first: share chosen after `layer`; deeper layers
    choose fewer, with a mean of `share`. None: the same tokens in all.
    """

    share: float | str = 0.15
    layer: int = 1
    first: float | str | None = None

    def __post_init__(self) -> None:
        check_int(self, "layer", self.layer, 1)
        object.__setattr__(self, "share", parse_share(self, "share", self.share))
        if self.first is not None:
            object.__setattr__(self, "first", parse_share(self, "first", self.first))
            if not self._share <= self._first < 2 * self._share:
                raise PlanError(
                    f"Blend: first={self.first:g} is outside [share, 2 * share) of share={self.share:g}; later layers "
                    "take fewer tokens, so that the mean is the share"
                )

    @property
    def _share(self) -> float:
        return float(self.share)

    @property
    def _first(self) -> float:
        return float(self.share if self.first is None else self.first)

    def source(self, num_layers: int) -> int:
        if self.layer >= num_layers - 1:
            raise PlanError(
                f"Blend: layer={self.layer} leaves no deeper layer to save on; the model has {num_layers} layers, so "
                f"give one of 1..{num_layers - 2}"
            )
        return self.layer

    def tokens(self, layer: int, num_layers: int, total: int) -> int:
        deeper = num_layers - 1 - self.layer
        at = (layer - self.layer) / (deeper - 1) if deeper > 1 else 0.5
        return max(1, round(total * (self._first + 2 * at * (self._share - self._first))))
