"""Keys of GGUF files that change a model's numbers and that transformers does not read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

from kvsieve.errors import short
from kvsieve.models.fetch import ModelLoadError

if TYPE_CHECKING:
    from kvsieve.models.gguf.file import GgufFile

_HEADS = "attention.head_count"
_MIXED = {"qwen2_moe", "qwen3_moe", "gpt_oss"}
# Types whose positions are rotated as a whole, and those that can leave channels of a head as they are.
_WHOLE = {"llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_oss", "falcon", "starcoder2", "gemma2"}
_PARTIAL = {"phi3", "stablelm", "nemotron"}
_GEMMA = {"gemma2", "gemma3_text"}
_ROTARY = _WHOLE | _PARTIAL | _GEMMA
# Types whose heads may have another size than hidden size / heads.
_OWN_HEAD = {"llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_oss", "starcoder2", "nemotron"}
# Types with a window in every layer, and in some layers by a rule.
_WINDOW = {"mistral", "phi3", "starcoder2"}
_SOME_WINDOWS = {"gemma2", "gemma3_text", "gpt_oss"}
# Settings by type of model and key.
_SETTINGS = {
    "qwen2_moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3_moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "nemotron": {"attention.layer_norm_epsilon": "norm_eps"},
    "falcon": {"attention.layer_norm_epsilon": "layer_norm_epsilon", "attention.head_count_kv": "num_kv_heads"},
    "gpt2": {"context_length": "n_positions", "feed_forward_length": "n_inner"},
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3_text": {"final_logit_softcapping": "final_logit_softcapping"},
}
# Keys that no setting stands for, and the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), (0, 1)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_length"), (0,)),
    **dict.fromkeys(("attention.q_lora_rank", "attention.kv_lora_rank", "attention.shared_kv_layers"), (0,)),
    **dict.fromkeys(("rope.scaling.alpha", "rope.scaling.yarn_log_multiplier", "nextn_predict_layers"), (0,)),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_attn_factor": (-1, 1),
    "attention.causal": (True,),
    "swin_norm": (False,),
    "leading_dense_block_count": (0,),
    "expert_group_count": (0, 1),
}


def correct(settings: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """Return a configuration's settings, with the keys of a file that transformers leaves out.

    Args:
        settings: as transformers maps them, with `model_type`.
        file: the file. Tensors with factors of rotary frequencies are read too.

    Raises:
        ModelLoadError: a key that changes numbers and cannot be honoured.
    """
    kind = settings.get("model_type", "")
    if kind not in _ROTARY and kind not in _SETTINGS:
        return settings
    try:
        return _corrected(dict(settings), _ArchitectureKeys(file), kind)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelLoadError(
            f"{file.path} cannot be loaded: a key of its architecture is no number that fits ({error})"
        ) from error


def _corrected(settings: dict[str, Any], keys: _ArchitectureKeys, kind: str) -> dict[str, Any]:
    honoured = _SETTINGS.get(kind, {})
    for key, setting in honoured.items():
        if key in keys:
            settings[setting] = keys.get(key)
    for key, neutral in _NEUTRAL.items():
        if key not in honoured and keys.get(key, neutral[0]) not in neutral:
            keys.refuse(key, f"{' or '.join(map(str, neutral))} for a model of type {kind}")
    if keys.get("expert_count", 0) and kind not in _MIXED:
        keys.refuse("expert_count", f"no experts in a model of type {kind}")
    if kind == "falcon" and keys.get("attention.head_count_kv", 1) > 1:
        keys.refuse("attention.head_count_kv", "1: transformers does not read the layout of Falcon with more KV heads")
    if kind in _ROTARY:
        head = _set_head(settings, keys, kind)
        _set_windows(settings, keys, kind)
        _set_rotation(settings, keys, kind, head)
    return settings


class _ArchitectureKeys:
    """A file's keys without the name of its architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def __contains__(self, key: str) -> bool:
        return f"{self.file.architecture}.{key}" in self.file

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.get(f"{self.file.architecture}.{key}", default)

    def refuse(self, key: str, expected: str) -> NoReturn:
        raise ModelLoadError(
            f"{self.file.path} cannot be loaded: its {self.file.architecture}.{key} is {short(self.get(key))}, "
            f"expected {expected}; load the model from its own checkpoint"
        )

    def numbers(self, name: str) -> list[float] | None:
        """Return a small tensor of float32; None if the file lacks it."""
        if name not in self.file.tensors:
            return None
        import torch

        tensor = self.file.tensors[name]
        if tensor.kind != "F32":
            raise ModelLoadError(f"{self.file.path} cannot be loaded: its {name} is {tensor.kind}, expected F32")
        return [float(number) for number in self.file.rows(tensor).flatten().view(torch.float32).tolist()]


def _set_head(settings: dict[str, Any], keys: _ArchitectureKeys, kind: str) -> int:
    """Set the size of a head and the scale of attention; return the size."""
    head = keys.get("attention.key_length") or settings.get("head_dim")
    head = int(head or keys.get("embedding_length", 0) // max(1, keys.get(_HEADS, 1)))
    if kind in _OWN_HEAD | _GEMMA:
        settings["head_dim"] = head
    if keys.get("attention.value_length", head) != head:
        keys.refuse("attention.value_length", f"{head}, the size of keys")
    scale = keys.get("attention.scale", 0)
    if kind in _GEMMA:
        # The largest ones scale by another size; files seldom say so.
        largest = keys.get("block_count") == {"gemma2": 46, "gemma3_text": 62}[kind]
        size = keys.get("embedding_length", 0) // max(1, keys.get(_HEADS, 1)) if largest else head
        settings["query_pre_attn_scalar"] = round(scale**-2) if scale else size
    elif scale and not math.isclose(scale, head**-0.5, rel_tol=1e-5):
        keys.refuse("attention.scale", f"{head**-0.5:.6g} for a model of type {kind}")
    return head


def _set_windows(settings: dict[str, Any], keys: _ArchitectureKeys, kind: str) -> None:
    window = keys.get("attention.sliding_window", 0)
    window = window if 0 < window < keys.get("context_length", 1 << 62) else None
    if kind in _WINDOW:
        settings["sliding_window"] = window
        return
    if kind not in _SOME_WINDOWS:
        if window:
            keys.refuse("attention.sliding_window", f"none for a model of type {kind}: no key says in which layers")
        return
    if "attention.sliding_window" in keys:
        settings["sliding_window"] = keys.get("attention.sliding_window")
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(keys.get("block_count", 0))]
    if isinstance(pattern, list):
        settings["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]


def _set_rotation(settings: dict[str, Any], keys: _ArchitectureKeys, kind: str, head: int) -> None:
    theta = keys.get("rope.freq_base", 10000.0)
    rotation = {"rope_type": "default", "rope_theta": theta, **_scaling(keys, kind, theta)}
    turned = keys.get("rope.dimension_count", head)
    if kind in _PARTIAL and "rope.dimension_count" in keys:
        rotation["partial_rotary_factor"] = turned / head
    elif turned != head:
        keys.refuse("rope.dimension_count", f"{head}, the size of a head, for a model of type {kind}")
    local = keys.get("rope.freq_base_swa", 10000.0 if kind == "gemma3_text" else theta)
    if any(keys.get("rope.dimension_sections", ())):
        keys.refuse("rope.dimension_sections", f"none for a model of type {kind}")
    if kind == "gemma3_text":
        sliding = {"rope_type": "default", "rope_theta": local}
        settings["rope_parameters"] = {"full_attention": rotation, "sliding_attention": sliding}
    elif local != theta:
        keys.refuse("rope.freq_base_swa", f"{theta}, that of the other layers")
    else:
        settings["rope_parameters"] = rotation
    if rotation["rope_type"] == "longrope" and kind == "phi3":
        settings["original_max_position_embeddings"] = rotation["original_max_position_embeddings"]
    for name in ("rope_theta", "rope_scaling"):
        settings.pop(name, None)


def _scaling(keys: _ArchitectureKeys, kind: str, theta: float) -> dict[str, Any]:
    """Return how a file scales rotary frequencies, in the words of transformers; {} if it does not."""
    named = keys.get("rope.scaling.type")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0)) or 1.0
    attention = keys.get("rope.scaling.attn_factor", 1.0)
    usual = keys.get("rope.scaling.original_context_length", keys.get("context_length"))
    long = keys.numbers("rope_factors_long.weight")
    divisors = keys.numbers("rope_freqs.weight")
    if long is not None:
        lists = {"long_factor": long, "short_factor": keys.numbers("rope_factors_short.weight") or long}
        lengths = {"original_max_position_embeddings": usual, "factor": keys.get("context_length", usual) / usual}
        return {"rope_type": "longrope", **lists, **lengths, "attention_factor": attention}
    if named == "yarn" and factor != 1:
        attention *= 0.1 * math.log(factor) + 1
        betas = {name: keys.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        lengths = {"factor": factor, "original_max_position_embeddings": usual, "attention_factor": attention}
        cut = {"truncate": False} if kind == "gpt_oss" else {}
        return {"rope_type": "yarn", **lengths, **cut, **{name: beta for name, beta in betas.items() if beta}}
    if attention != 1:
        keys.refuse("rope.scaling.attn_factor", "1 without YaRN and without lists of factors")
    if divisors is not None and set(divisors) != {1.0}:
        return _by_divisors(keys, divisors, theta)
    if factor == 1:
        return {}
    if named not in (None, "linear"):
        keys.refuse("rope.scaling.type", "none, linear or yarn in a file without lists of factors")
    return {"rope_type": "linear", "factor": factor}


def _by_divisors(keys: _ArchitectureKeys, divisors: list[float], theta: float) -> dict[str, Any]:
    """Return the rule of Llama 3 with these divisors of frequencies; the file has nothing else of it."""
    factor = max(divisors)
    low, high, length = 1.0, 4.0, 8192
    rule = []
    for channel in range(len(divisors)):
        turns = length * theta ** (-channel / len(divisors)) / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        rule.append(1 / ((1 - smooth) / factor + smooth))
    if not all(math.isclose(found, wanted, rel_tol=1e-4) for found, wanted in zip(divisors, rule, strict=True)):
        raise ModelLoadError(
            f"{keys.file.path} cannot be loaded: its rope_freqs.weight has other numbers than the rule of Llama 3 "
            f"with factor {factor:g}, expected that rule; load the model from its own checkpoint"
        )
    return {
        "rope_type": "llama3",
        "factor": float(round(factor)) if math.isclose(factor, round(factor), rel_tol=1e-4) else factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }
