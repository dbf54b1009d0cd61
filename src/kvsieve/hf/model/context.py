"""The number of tokens that a model's context holds, with the scaling of its rotary positions."""

from __future__ import annotations

from typing import Any

# Kinds of scaling that stretch the context by their factor where the config names no original length.
_STRETCHING = ("linear", "dynamic")


def context_of(config: Any) -> int | None:
    """Return the tokens of a model's context, or None without a limit.

    ``max_position_embeddings``, or the length scaled by the rotary positions if that is more: many configs have the
    scaling and an unscaled ``max_position_embeddings``.

    Args:
        config: of the model, or of its decoder.
    """
    config = config.get_text_config(decoder=True)
    found: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if found is None or not isinstance(rope, dict):
        return found
    if "rope_type" in rope or "type" in rope or "rope_theta" in rope:
        return max(found, _scaled(rope, found))
    # One set of parameters for each type of layer. Such configs name the stretched length, but for an original one.
    ropes = [part for part in rope.values() if isinstance(part, dict) and part.get("original_max_position_embeddings")]
    return max([found, *(_scaled(part, found) for part in ropes)])


def _scaled(rope: dict[str, Any], length: int) -> int:
    """Return the length that rotary positions are scaled to; length: max_position_embeddings."""
    kind = rope.get("rope_type", rope.get("type"))
    factor = rope.get("factor")
    original = rope.get("original_max_position_embeddings") or (length if kind in _STRETCHING else None)
    return 0 if original is None or factor is None else int(original * factor)
