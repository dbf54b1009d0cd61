"""A part of the text, and its state in each layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvsieve.report.display import percent


@dataclass(frozen=True)
class Occurrence:
    """Tokens of a string, and the layers that still store them.

    Attributes:
        start: first token.
        end: end of the tokens, exclusive.
        part: "prompt", "answer" or "earlier turns".
        share: of layers and heads that store its tokens for the answer to attend to.
        layers: indices of the layers of the next three.
        stored: share of heads that store its tokens, per layer.
        read: share of heads with entries that the answer attends to, per layer.
        reached: share of its tokens that reached the layer, per layer.
        unreached: description of those that did not.
        text: the string, "" for tokens given by number.
    """

    start: int
    end: int
    part: str
    share: float
    layers: tuple[int, ...]
    stored: tuple[float, ...]
    read: tuple[float, ...]
    reached: tuple[float, ...]
    unreached: str = "never reached"
    text: str = ""

    @property
    def states(self) -> list[str]:
        """State in each layer: "whole", "in part", "evicted", "not read", or never reached."""
        return [
            state(stored, read, reached, self.unreached)
            for stored, read, reached in zip(self.stored, self.read, self.reached, strict=True)
        ]

    @property
    def where(self) -> str:
        """State by layers, in words: ``layers 0–9 whole, 10–11 in part (33–50%), 12–29 never reached``."""
        parts = []
        for name, first, last in runs(self.states):
            layers = f"{self.layers[first]}" + (f"–{self.layers[last]}" if last > first else "")
            shares = self.read[first : last + 1]
            least = percent(min(shares))
            most = percent(max(shares))
            extent = most if least == most else f"{least[:-1]}–{most}"
            parts.append(f"{layers} {name}{f' ({extent})' if name == 'in part' else ''}")
        return f"layers {', '.join(parts)}"

    def __str__(self) -> str:
        tokens = f"token {self.start}" if self.end == self.start + 1 else f"tokens {self.start}–{self.end - 1}"
        verb = "held" if self.read == self.stored else "read"
        return f"{tokens} ({self.part}): {percent(self.share)} {verb}; {self.where}"


def state(stored: float, read: float, reached: float, unreached: str) -> str:
    """Return the name of the state of tokens in a layer; shares as in Occurrence."""
    if read == 1:
        return "whole"
    if read > 0:
        return "in part"
    if reached == 0:
        return unreached
    return "not read" if stored > 0 else "evicted"


def runs(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return runs of equal names: name, first and last index."""
    found = []
    at = 0
    for name, group in itertools.groupby(names):
        count = len(list(group))
        found.append((name, at, at + count - 1))
        at += count
    return found
