"""Tokens of a prompt and the share of layers and heads that still hold each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from kvsieve.display import percent, span
from kvsieve.errors import InputError, short
from kvsieve.kept.occurrence import Occurrence
from kvsieve.kept.pieces import Piece, text_pieces


@dataclass(frozen=True, eq=False)
class KeptLayer:
    """Tokens that one layer holds.

    Attributes:
        index: of the layer.
        kind: what it is, in words.
        counts: True where a plan may drop what it holds; shares are of these layers.
        heads: KV heads that store; more than the model has where each query head has its own.
        stored: float32 [N], share of the heads that hold each token; None for a layer without entries of tokens.
        read: float32 [N], share of the heads whose entry of the token this turn's answer reads; None: all stored.
        reached: bool [N], tokens that came to this layer; None for all.
    """

    index: int
    kind: str
    counts: bool
    heads: int = 0
    stored: Tensor | None = None
    read: Tensor | None = None
    reached: Tensor | None = None
    entries: tuple[int, ...] = ()

    @property
    def shown(self) -> Tensor | None:
        """float32 [N]: what the answer can attend to of it, stored and read."""
        return self.stored if self.read is None else self.read


@dataclass(frozen=True, eq=False, repr=False)
class KeptTokens:
    """Tokens of a conversation and where each is still held.

    Attributes:
        method: the plan's name.
        tokens: int64 [N], the row's tokens without padding that the model has read, of all turns.
        prompt_start: number of the first token of this turn's prompt.
        prompt_end: number of the first token behind it, which the answer begins with.
        layers: all decoder layers.
        row: of the batch.
        unreached: words for a token that did not come to a layer.
        notes: what the map cannot tell.
        tokenizer: turns tokens into text; None where none is known.
    """

    method: str
    tokens: Tensor
    prompt_start: int
    prompt_end: int
    layers: tuple[KeptLayer, ...]
    row: int = 0
    unreached: str = "never reached"
    notes: tuple[str, ...] = ()
    tokenizer: Any = field(default=None)

    def __len__(self) -> int:
        return len(self.tokens)

    def with_tokenizer(self, tokenizer: Any) -> Self:
        """Copy it with the tokenizer that turns its tokens into text."""
        return replace(self, tokenizer=tokenizer)

    @property
    def counted(self) -> list[KeptLayer]:
        """Layers that shares are of: those whose KV grows, or, without any, all that hold entries."""
        return [layer for layer in self.layers if layer.counts]

    @property
    def is_view(self) -> bool:
        """True where the answer reads less than what is stored."""
        return any(layer.read is not None for layer in self.layers)

    @functools.cached_property
    def share(self) -> Tensor:
        """float32 [N]: share of layers and heads that still hold each token and let the answer read it."""
        return self._share([layer.shown for layer in self.counted])

    @functools.cached_property
    def stored_share(self) -> Tensor:
        """float32 [N]: share of layers and heads that store each token."""
        return self._share([layer.stored for layer in self.counted])

    @property
    def deep(self) -> Tensor | None:
        """bool [N]: tokens that came to the deepest layer; None where all did."""
        return self.counted[-1].reached if self.counted else None

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Text of the tokens.

        Raises:
            InputError: no tokenizer is known.
        """
        if self.tokenizer is None:
            raise InputError(
                "the text of tokens needs the tokenizer: attach(model, plan, tokenizer=tokenizer), or "
                "kept.with_tokenizer(tokenizer)"
            )
        return text_pieces(self.tokenizer, self.tokens.tolist())

    @functools.cached_property
    def text(self) -> str:
        """The conversation as text, control tokens included."""
        return "".join(piece.text for piece in self.pieces)

    def of(self, text: str) -> list[Occurrence]:
        """Find a string, and tell of each occurrence where it is held and where it was lost; [] if it does not occur.

        Raises:
            InputError: the string is empty, or no tokenizer is known.
        """
        if not isinstance(text, str) or not text:
            raise InputError(f"kept.of(...) looks for a string, got {short(text)}; kept.at(start, end) takes tokens")
        found, at = [], self.text.find(text)
        ends = torch.tensor([len(piece.text) for piece in self.pieces]).cumsum(0)
        while at >= 0:
            # The pieces that hold its first and its last character.
            first, last = torch.searchsorted(ends, torch.tensor([at, at + len(text) - 1]), right=True).tolist()
            found.append(replace(self.at(self.pieces[first].start, self.pieces[last].end), text=text))
            at = self.text.find(text, at + len(text))
        return found

    def at(self, start: int, end: int) -> Occurrence:
        """Tell of the tokens from `start` up to `end`, padding not counted, where they are held.

        Raises:
            InputError: there are no such tokens.
        """
        if not 0 <= start < end <= len(self):
            raise InputError(f"tokens ({start}, {end}) of {len(self)}: expected 0 <= start < end <= {len(self)}")
        where = slice(start, end)

        def mean(part: Tensor | None, other: float) -> float:
            return other if part is None else float(part[where].float().mean())

        return Occurrence(
            start=start,
            end=end,
            part=next(name for name, begin, behind in self.parts if begin <= start < behind),
            share=float(self.share[where].mean()),
            layers=tuple(layer.index for layer in self.counted),
            stored=tuple(mean(layer.stored, 0.0) for layer in self.counted),
            read=tuple(mean(layer.shown, 0.0) for layer in self.counted),
            reached=tuple(mean(layer.reached, 1.0) for layer in self.counted),
            unreached=self.unreached,
        )

    @property
    def parts(self) -> list[tuple[str, int, int]]:
        """Earlier turns, prompt and answer: name, first token and the one behind the last; those that have tokens."""
        edges = (
            ("earlier turns", 0, self.prompt_start),
            ("prompt", self.prompt_start, self.prompt_end),
            ("answer", self.prompt_end, len(self)),
        )
        return [each for each in edges if each[1] < each[2]]

    def map(self, bins: int, *, tokens: int | None = None, stored: bool = False) -> Tensor:
        """Mean share by layer and position, float32 [layers, bins], all layers.

        Args:
            bins: columns of the map.
            tokens: the first so many tokens only; None for all.
            stored: of what is stored, whatever the answer reads.
        """
        length = len(self) if tokens is None else tokens
        if 0 < length < bins:
            # Every column shows the token at its place: none is without one.
            return self.map(length, tokens=tokens, stored=stored)[:, torch.arange(bins) * length // bins]
        place = torch.arange(length) * bins // max(length, 1)
        size = torch.bincount(place, minlength=bins).clamp_min(1)
        found = torch.zeros(len(self.layers), bins)
        for row, layer in zip(found, self.layers, strict=True):
            part = layer.stored if stored else layer.shown
            if part is not None:
                row.index_add_(0, place, part[:length])
        return found / size

    def describe(self) -> list[tuple[str, str]]:
        """Return what is worth telling, as names and texts."""
        held = "read by the answer" if self.is_view else "held"
        rows = [("tokens", ", ".join(f"{name} {end - start}" for name, start, end in self.parts))]
        rows.append((held, f"{percent(float(self.share.mean()))} of all layers and heads together"))
        if self.is_view:
            rows.append(("stored", percent(float(self.stored_share.mean()))))
        rows.append(("entries per layer and head", span(each for layer in self.counted for each in layer.entries)))
        gone = int((self.share == 0).sum())
        rows.append(("in no layer" if not self.is_view else "read in no layer", f"{gone} tokens"))
        if self.deep is not None:
            rows.append(("went deep", f"{int(self.deep.sum())} tokens came to the deepest layer"))
        return rows + [("note", note) for note in self.notes]

    def __repr__(self) -> str:
        read = " of the answer's reading" if self.is_view else ""
        row = f", row {self.row}" if self.row else ""
        share = percent(float(self.share.mean()))
        return f"<Kept under {self.method}: {len(self)} tokens in {len(self.counted)} layers, {share}{read}{row}>"

    def _share(self, parts: Sequence[Tensor | None]) -> Tensor:
        heads = [layer.heads for layer in self.counted]
        total = torch.zeros(len(self))
        for part, count in zip(parts, heads, strict=True):
            total += 0 if part is None else part * count
        return total / max(sum(heads), 1)
