"""Checkpoints in 16 bits computed with in float32, with their weights as they are stored: half of the bytes."""

from __future__ import annotations

import dis
import inspect
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvsieve.kernels.cpu import quantized as kernel
from kvsieve.kernels.cpu.quantized import QuantizedMatrix
from kvsieve.models.fetch import ModelLoadError
from kvsieve.models.quantized import include_blocks, is_table, keep_tied, layer_over
from kvsieve.models.source import is_gguf, quantization_of

_METHOD = "kvsieve-stored"
# Types of 16 bits, by the names of safetensors and of `FORMATS`.
KINDS = {"BF16": torch.bfloat16, "F16": torch.float16}
# Older releases of transformers choose each tensor's dtype themselves.
IS_SUPPORTED = "get_new_dtype" in vars(HfQuantizer)


def stored_kind(name: str | None, config: Any) -> str | None:
    """Return the type, of KINDS, that a checkpoint's weights stay in under float32 on a CPU; None if they do not.

    Args:
        name: of the checkpoint; None for the demo model.
        config: its config from transformers.
    """
    from transformers import AutoModelForCausalLM

    # A part's own is not changed with the model's.
    dtype = config.dtype or config.get_text_config().dtype
    kind = next((kind for kind, known in KINDS.items() if known == dtype), None)
    if not IS_SUPPORTED or name is None or is_gguf(name) or kind is None or quantization_of(config) is not None:
        return None
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return None
    folder = Path(name).expanduser()
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        return None
    return None if kernel.built().loaded is None else kind


def stored_weights(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of weights that can stay as stored: of linear layers, and of the input embeddings.

    model: may have no memory. Weights that a forward reads, as Mamba's reads its output's, are left out, and those tied
        to one that cannot stay; all, if the model would be without others.
    """
    words = model.get_input_embeddings()
    read = {kind: _read_by(kind) for kind in {type(module) for module in model.modules()}}
    names = {
        f"{path}.{name}.weight".removeprefix(".")
        for path, parent in model.named_modules()
        for name, module in parent.named_children()
        if (type(module) is nn.Linear or (module is words and is_table(module)))
        and not _is_watched(module)
        and name not in read[type(parent)]
    }
    tied = dict(model.all_tied_weights_keys)
    names -= {name for pair in tied.items() if not names.issuperset(pair) for name in pair}
    stay = {id(model.get_parameter(name)) for name in names}
    # Others have the model's dtype; OLMo's norms have none.
    has_others = any(id(weight) not in stay for weight in model.base_model.parameters() if weight.is_floating_point())
    return frozenset(names) if has_others else frozenset()


def _is_watched(module: nn.Module) -> bool:
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def _read_by(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names of modules that the forward of a class reads the weight of."""
    function = inspect.unwrap(kind.forward)
    pairs = pairwise(dis.get_instructions(function)) if inspect.isfunction(function) else ()
    return frozenset(str(one.argval) for one, then in pairs if then.argval == "weight")


class AsStored(QuantizationConfigMixin):
    """Argument `quantization_config` of `from_pretrained` in float32 that leaves `stored_weights` as they are stored.

    They become layers over the mapped numbers of the safetensors files. Weights that are float32 there, or loaded from
    other files, are loaded as without it.

    Raises ModelLoadError, from `from_pretrained`, for a model whose layers cannot compute with them.
    """

    def __init__(self) -> None:
        self.quant_method = _METHOD  # type: ignore[assignment]

    def __deepcopy__(self, memo: object) -> AsStored:
        return self


@register_quantizer(_METHOD)
class _Keeping(HfQuantizer):
    names: frozenset[str] = frozenset()

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if IS_SUPPORTED:
            self.names = stored_weights(model)
            # The loader asks for the dtype of each tensor only so.
            self.pre_quantized = True

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return None, which leaves a tensor mapped, for those that stay. param: of a file, or a tensor."""
        if not isinstance(converter, WeightRenaming) or converter.target_patterns[0] not in self.names:
            return dtype
        stays = not isinstance(param, Tensor) and param.get_dtype() in KINDS and kernel.built().loaded is not None
        return None if stays else dtype

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        conversions = model._weight_conversions
        self.remove_quantization_config(model)
        # Saving the model reverts them.
        model._weight_conversions = conversions
        try:
            _put_in(model, self.names)
        except Exception as error:
            raise ModelLoadError(f"as stored, its weights fail ({error}): load it with weights='expand'") from error
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _put_in(model: Any, names: frozenset[str]) -> None:
    """Replace layers of a loaded model with weights of 16 bits by those that compute in float32."""
    kept = [name for name in names if model.get_parameter(name).dtype in KINDS.values()]
    if not kept:
        return
    # Tied layers share one.
    matrices: dict[int, QuantizedMatrix] = {}
    for name in kept:
        path = name.removesuffix(".weight")
        module = model.get_submodule(path)
        matrix = matrices.setdefault(module.weight.data_ptr(), QuantizedMatrix.of(module.weight))
        model.set_submodule(path, layer_over(module, matrix, torch.float32))
    others = [name for name, weight in model.named_parameters() if weight.dtype in KINDS.values()]
    if others:
        raise ValueError(f"{type(model).__name__} has other weights of 16 bits: {', '.join(others)}")
    model.tie_weights = keep_tied
    include_blocks(model, None, Path(model.name_or_path).glob("model*.safetensors"))
