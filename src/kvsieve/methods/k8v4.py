"""Keys in more bits than values: K8V4 and other pairs (KVTuner, arXiv 2502.04420; AsymKV, arXiv 2410.13212).

Attention is more sensitive to errors of keys, which softmax magnifies, than to those of values, which it averages: at
equal bytes, 8 and 4 bits lose less than 6 and 6.

Keys are encoded per channel. Per token would cost the same (two numbers for each channel of 128 tokens, one for each
token of 64 channels), and one large channel, as in Qwen's models, would use up the levels of all others.

Differences from the references: one pair for all layers, where KVTuner searches one for each and AsymKV gives later
layers fewer bits; keys and values as in `kivi`, with the same differences. Values may be rotated instead: with keys in
4 bits and values in 2, that is far closer to full KV than 3 bits for both, at the bytes of `rotated` with 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsieve.core.codebooks import level_scale
from kvsieve.core.codes import CodeFormat
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor
from kvsieve.methods.base import refuse_unused
from kvsieve.methods.codecs import GroupCodec
from kvsieve.methods.rotated import Rotated
from kvsieve.planning.registry import register_method


@register_method("k8v4", title="K8V4", paper="arXiv 2502.04420", phase="storage")
@dataclass(frozen=True, kw_only=True)
class K8V4(GroupCodec, heads="own"):
    """Quantize keys per channel, to more bits than values.

    key_bits: 2, 3, 4 or 8.
    value_bits: 2, 3, 4 or 8.
    rotate_values: encode values as `rotated` does, in at most 4 bits.
    """

    key_bits: Literal[2, 3, 4, 8] = 8
    value_bits: Literal[2, 3, 4, 8] = 4
    rotate_values: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotate_values and self.value_bits == 8:
            raise PlanError(
                f"{type(self).__name__}: values of 8 bits are not rotated; set value_bits to 2, 3 or 4, or leave "
                "rotate_values out"
            )
        if self.rotate_values:
            refuse_unused(self, "rotate_values=True", "group")

    def keys(self, dim: int) -> CodeFormat:
        return CodeFormat(self.key_bits, "channel")

    def values(self, dim: int) -> CodeFormat:
        if self.rotate_values and self.value_bits != 8:
            return Rotated(bits=self.value_bits).values(dim)
        return CodeFormat(self.value_bits, "token", min(self.group, dim))

    def fit(self, form: CodeFormat, x: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
        return super().fit(form, x, dim) if form.levels is None else (level_scale(form, x, dim), None)
