"""Kinds and shapes of decoder layers, as far as memory goes: plain numbers, known without torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

Entries = Literal["growing", "latent", "window", "chunk", "shared", "none"]


@dataclass(frozen=True)
class LayerKind:
    """Kind of one decoder layer: its memory of earlier tokens.

    Attributes:
        entries: "growing", keys and values of every token, which plans act on; "latent", the same in compressed form;
            "window", those of the last `span` tokens; "chunk", those of the tokens since the last multiple of `span`;
            "shared", those of the layer `source`; "none", no entries.
        state: True if it has recurrent state of constant size (linear attention, state spaces, convolutions), with or
            without entries.
        span: tokens of a window or chunk.
        source: index of the layer that it shares entries of.
    """

    entries: Entries = "growing"
    state: bool = False
    span: int | None = None
    source: int | None = None

    @property
    def grows(self) -> bool:
        """True if entries of every token are stored, for plans to act on."""
        return self.entries in ("growing", "latent")

    @property
    def words(self) -> str:
        """Its name in messages and tables."""
        text = {
            "growing": "full attention",
            "latent": "latent attention",
            "window": f"sliding window of {self.span}",
            "chunk": f"attention in chunks of {self.span}",
            "shared": f"KV shared with layer {self.source}",
            "none": "recurrent" if self.state else "no KV",
        }[self.entries]
        return f"{text} and recurrent" if self.state and self.entries != "none" else text


@dataclass(frozen=True)
class LayerShape:
    """Shapes of one decoder layer.

    Attributes:
        kind: of the layer.
        heads: stored KV heads; 1 for latent entries, which serve all heads.
        entry_elements: elements of an entry, all heads together; 0 without entries.
        dims: channels of a key, and of a value.
        query_heads: query heads of its first attention, 0 without one.
        pair_elements: elements of a query that meet a key, and of a value that meets a weight, over all query heads.
        state_elements: elements of its recurrent state, in the model's dtype.
        wide_state_elements: those that are always float32.
        last_token_only: True if only a prompt's last token reaches it.
    """

    kind: LayerKind
    heads: int
    entry_elements: int
    dims: tuple[int, int]
    query_heads: int
    pair_elements: int
    state_elements: int
    wide_state_elements: int
    last_token_only: bool


def growing_layers(kinds: tuple[LayerKind, ...]) -> tuple[int, ...]:
    """Indices of the layers that plans act on."""
    return tuple(index for index, kind in enumerate(kinds) if kind.grows)


# In the singular and in the plural.
_NAMES = {
    "window": ("has a sliding window", "have a sliding window"),
    "chunk": ("attends in chunks", "attend in chunks"),
    "shared": ("shares another layer's KV", "share another layer's KV"),
    "state": ("is recurrent", "are recurrent"),
    "none": ("holds nothing", "hold nothing"),
}


def describe_kinds(kinds: tuple[LayerKind, ...]) -> str:
    """Return a clause such as "16 of 64 layers hold KV that grows, 48 are recurrent"."""
    grows = len(growing_layers(kinds))
    both = sum(kind.state and kind.entries != "none" for kind in kinds)
    latent = sum(kind.entries == "latent" for kind in kinds)
    whole = "all" if grows == len(kinds) else f"{grows} of"
    parts = [f"{whole} {len(kinds)} layers hold KV that grows"]
    others = Counter("state" if kind.entries == "none" and kind.state else kind.entries for kind in kinds)
    parts += [f"{latent} of them as latents"] * (latent > 0)
    parts += [f"{others[name]} {words[others[name] > 1]}" for name, words in _NAMES.items() if others[name]]
    return ", ".join(parts + [f"{both} also {'have' if both > 1 else 'has'} recurrent state"] * (both > 0))
