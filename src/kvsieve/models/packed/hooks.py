"""Hooks of transformers' loader, which packs weights in one pass and loads the others in a second one."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

_METHOD = "kvsieve-packed"


class Pass(Protocol):
    """A pass of transformers' loader over a checkpoint."""

    # Whether `take` gets the tensors; the model's parameters stay empty then.
    takes: bool
    # What the pass itself has raised, or keeps for its end; None before.
    error: Exception | None

    def begin(self, model: PreTrainedModel) -> None:
        """Take the model before its weights are loaded; it has no memory yet."""

    def take(self, name: str, tensor: Tensor) -> None:
        """Take a tensor of the checkpoint. name: of the parameter that it belongs to."""


class Hooked(QuantizationConfigMixin):
    """Argument `quantization_config` of `from_pretrained` that makes its loader call a pass."""

    def __init__(self, loading: Pass) -> None:
        self.quant_method = _METHOD  # type: ignore[assignment]
        self.loading = loading

    def __deepcopy__(self, memo: object) -> Hooked:
        return self


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):
    quantization_config: Hooked

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self.quantization_config.loading.begin(model)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.remove_quantization_config(model)
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return self.quantization_config.loading.takes

    def get_quantize_ops(self) -> _Take:
        return _Take(self.quantization_config.loading)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Take:
    """Last conversion of each tensor on its way into a model."""

    def __init__(self, loading: Pass) -> None:
        self.loading = loading

    def convert(self, input_dict: dict[str, Any], *, missing_keys: set[str], **kwargs: Any) -> dict[str, Any]:
        for name, found in input_dict.items():
            missing_keys.discard(name)
            self.loading.take(name, found[0] if isinstance(found, list) else found)
        return {}
