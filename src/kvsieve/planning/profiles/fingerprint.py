"""The shape of a model, which determines whether a profile fits it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fingerprint:
    """Shape of a model, which determines whether a profile fits it. `name` is for messages and is not compared."""

    model_type: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    name: str = field(default="", compare=False)

    @classmethod
    def of(cls, model: Any, name: str = "") -> Fingerprint:
        """Return the fingerprint of a transformers model. name: default: its checkpoint's."""
        return cls.of_config(model.config, name)

    @classmethod
    def of_config(cls, config: Any, name: str = "") -> Fingerprint:
        """Return the fingerprint of models with this transformers config."""
        config = config.get_text_config(decoder=True)

        def of(name: str) -> int:
            # If layers differ, transformers refuses to give one number.
            with contextlib.suppress(RuntimeError):
                return getattr(config, name, None) or 0
            return 0

        heads = of("num_attention_heads")
        width = of("hidden_size")
        kv_heads = of("num_key_value_heads") or heads
        head_dim = of("head_dim") or width // max(heads, 1)
        if of("kv_lora_rank"):
            # Latent attention: a latent and the rotated part of the key, for all heads.
            kv_heads = 1
            head_dim = of("kv_lora_rank") + of("qk_rope_head_dim")
        return cls(
            model_type=config.model_type,
            layers=of("num_hidden_layers"),
            query_heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=width,
            vocab_size=of("vocab_size"),
            name=name or Path(str(getattr(config, "_name_or_path", "") or "")).name,
        )

    def differences(self, other: Fingerprint) -> list[str]:
        names = [field.name for field in fields(self) if field.compare]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    @property
    def digest(self) -> str:
        shape = [getattr(self, field.name) for field in fields(self) if field.compare]
        return hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        shape = (
            f"{self.model_type}, {self.layers} layers, {self.query_heads} query and {self.kv_heads} KV heads of "
            f"{self.head_dim}, {self.hidden_size} channels, {self.vocab_size} tokens"
        )
        return f"{self.name or 'a model'} ({shape})"
