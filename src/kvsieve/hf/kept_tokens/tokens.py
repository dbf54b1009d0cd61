"""Tokens of a conversation and the share of layers and heads that still store each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from kvsieve.errors import InputError, short
from kvsieve.hf.kept_tokens.occurrence import Occurrence
from kvsieve.hf.kept_tokens.pieces import Piece, text_pieces
from kvsieve.report.display import percent, span


@dataclass(frozen=True, eq=False)
class KeptLayer:
    """Tokens stored by one layer.

    Attributes:
        index: of the layer.
        kind: description of the layer.
        counts: True if a plan may evict from it; shares are over these layers.
        heads: heads that store entries; more than the model's KV heads if query heads store their own.
        stored: float32 [N], share of the heads that store each token; None for a layer without token entries.
        read: float32 [N], share of the heads with an entry that this turn's answer attends to; None: all stored.
        reached: bool [N], tokens that reached this layer; None for all.
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
        """float32 [N]: share of heads that store the token for the answer to attend to."""
        return self.stored if self.read is None else self.read


@dataclass(frozen=True, eq=False, repr=False)
class KeptTokens:
    """Tokens of a conversation and the layers and heads that still store each.

    Attributes:
        method: the plan's name.
        tokens: int64 [N], the row's processed tokens without padding, of all turns.
        prompt_start: first token of this turn's prompt.
        prompt_end: end of the prompt, where the answer begins.
        layers: all decoder layers.
        row: of the batch.
        unreached: description of tokens that did not reach a layer.
        notes: limits of the map.
        tokenizer: decodes tokens; None if unknown.
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
        """Return a copy with this tokenizer."""
        return replace(self, tokenizer=tokenizer)

    @property
    def counted(self) -> list[KeptLayer]:
        """Layers that shares are over: those with growing KV or, without any, all with entries."""
        return [layer for layer in self.layers if layer.counts]

    @property
    def is_view(self) -> bool:
        """True if the answer attends to fewer entries than are stored."""
        return any(layer.read is not None for layer in self.layers)

    @functools.cached_property
    def share(self) -> Tensor:
        """float32 [N]: share of layers and heads that store each token for the answer to attend to."""
        return self._share([layer.shown for layer in self.counted])

    @functools.cached_property
    def stored_share(self) -> Tensor:
        """float32 [N]: share of layers and heads that store each token."""
        return self._share([layer.stored for layer in self.counted])

    @property
    def deep(self) -> Tensor | None:
        """bool [N]: tokens that reached the deepest layer; None if all did."""
        return self.counted[-1].reached if self.counted else None

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Text of the tokens. Raises InputError if no tokenizer is known."""
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
        """Return each occurrence of a string, with the layers that still store it; [] if there is none.

        Raises:
            InputError: the string is empty, or no tokenizer is known.
        """
        if not isinstance(text, str) or not text:
            raise InputError(f"kept.of(...) looks for a string, got {short(text)}; kept.at(start, end) takes tokens")
        found = []
        at = self.text.find(text)
        ends = torch.tensor([len(piece.text) for piece in self.pieces]).cumsum(0)
        while at >= 0:
            # The pieces that hold its first and its last character.
            first, last = torch.searchsorted(ends, torch.tensor([at, at + len(text) - 1]), right=True).tolist()
            found.append(replace(self.at(self.pieces[first].start, self.pieces[last].end), text=text))
            at = self.text.find(text, at + len(text))
        return found

    def at(self, start: int, end: int) -> Occurrence:
        """Return the state of tokens `start` to `end` (exclusive), without padding.

        Raises:
            InputError: no such tokens.
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
        """Return the non-empty ones of earlier turns, prompt and answer: name, first token, end."""
        edges = (
            ("earlier turns", 0, self.prompt_start),
            ("prompt", self.prompt_start, self.prompt_end),
            ("answer", self.prompt_end, len(self)),
        )
        return [edge for edge in edges if edge[1] < edge[2]]

    def map(self, bins: int, *, tokens: int | None = None, stored: bool = False) -> Tensor:
        """Return the mean share by layer and position, float32 [layers, bins], for all layers.

        Args:
            bins: columns of the map.
            tokens: use only the first so many; None for all.
            stored: count all stored entries, even those that the answer does not attend to. Default False.
        """
        length = len(self) if tokens is None else tokens
        if 0 < length < bins:
            # Every column shows at least one token.
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
        """Return the facts worth showing, as names and texts."""
        heading = "read by the answer" if self.is_view else "held"
        rows = [("tokens", ", ".join(f"{name} {end - start}" for name, start, end in self.parts))]
        rows.append((heading, f"{percent(float(self.share.mean()))} of all layers and heads together"))
        if self.is_view:
            rows.append(("stored", percent(float(self.stored_share.mean()))))
        rows.append(("entries per layer and head", span(size for layer in self.counted for size in layer.entries)))
        number = int((self.share == 0).sum())
        rows.append(("in no layer" if not self.is_view else "read in no layer", f"{number} tokens"))
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
