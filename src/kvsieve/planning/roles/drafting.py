"""Propagators that let a smaller draft model choose a prompt's tokens before the first layer."""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any, Self

from kvsieve.errors import PlanError, short
from kvsieve.planning.roles.propagator import Propagator
from kvsieve.types import LayerContext

# `Propagator.source` for tokens dropped before the first layer.
BEFORE = -1


class Loaded:
    """A loaded model or tokenizer in a plan; described by its name only.

    Attributes:
        name: the directory or hub id of a model, or None.
        model: of transformers; None for a tokenizer alone.
        tokenizer: of transformers; None if unknown.
    """

    def __init__(self, name: str | None, model: Any, tokenizer: Any) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer

    def __repr__(self) -> str:
        return f"<{self.name or 'loaded'}>"


def draft_of(value: Any) -> str | Loaded:
    """Return a draft model as plans store it.

    Args:
        value: "demo", a directory, a file or a hub id; a loaded model that shares the target model's tokenizer; or a
            pair of a loaded model and its tokenizer.

    Raises:
        PlanError: any other value.
    """
    if isinstance(value, Loaded):
        return value
    if isinstance(value, (str, os.PathLike)) and os.fspath(value):
        return os.fspath(value)
    model, tokenizer = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    config = vars(model).get("config") if hasattr(model, "__dict__") else None
    if config is None or isinstance(model, type):
        raise PlanError(
            "draft= takes the model that chooses: 'demo', a directory or hub id, a loaded model, or (model, tokenizer) "
            f"where its tokenizer is another; got {short(value)}"
        )
    return Loaded(vars(config).get("_name_or_path") or type(model).__name__, model, tokenizer)


class DraftPropagator(Propagator):
    """Drops tokens before the first layer, by a draft model's attention to them.

    The draft prefills the whole conversation and drafts a few tokens of the answer. `observe` sees its layers, and
    `scores` returns a score per draft token. The driver maps these to the model's own tokens and passes them to
    `select` as ``ctx.shared["drafted"]``, [B, offered], -inf for padding, in a context of layer -1 without queries,
    keys or values. Tokens keep their positions; dropped ones are never prefilled.
    """

    def source(self, num_layers: int) -> int:
        return BEFORE

    def first_layer(self, num_layers: int, layers: tuple[int, ...] = ()) -> int:
        return BEFORE

    @abstractmethod
    def drafter(self) -> str | Loaded:
        """Return the draft model; see `draft_of`."""

    @abstractmethod
    def steps(self) -> int:
        """Return the number of voting queries: the prompt's last token, and the draft's own tokens after it."""

    @abstractmethod
    def entries(self, length: int) -> int:
        """Return the number of tokens kept of a turn's prompt of `length`."""

    @abstractmethod
    def observe(self, ctx: LayerContext, prompt: int, seen: dict[int, Any]) -> None:
        """Record the attention of a draft layer; called per layer and query.

        Args:
            ctx: the layer; its last query votes.
            prompt: tokens of the prompt, as the draft counts them: the first that are stored.
            seen: records of this prompt.
        """

    @abstractmethod
    def scores(self, seen: dict[int, Any]) -> Any:
        """Return a score for each token of the prompt, float [prompt], from the records."""

    @abstractmethod
    def own_tokenizer(self) -> Loaded | None:
        """Return the tokenizer of the model itself, or None if unknown."""

    @property
    @abstractmethod
    def lacks_tokenizer(self) -> bool:
        """True if the draft has a tokenizer of its own and the model's is unknown."""

    @abstractmethod
    def for_tokenizer(self, tokenizer: Any) -> Self:
        """Return a propagator with the model's own tokenizer."""
