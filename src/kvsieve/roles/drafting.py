"""Propagators that let a second, smaller model choose a prompt's tokens before the first layer."""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any, Self

from kvsieve.errors import PlanError, short
from kvsieve.roles.propagator import Propagator
from kvsieve.types import LayerContext

# What `Propagator.source` says of tokens that are dropped before the first layer.
BEFORE = -1


class Loaded:
    """Something loaded that a plan holds; a description of the plan has its name only.

    Attributes:
        name: the directory or hub id of a model; None for what has none.
        model: of transformers; None for a tokenizer alone.
        tokenizer: of transformers; None where it is not known.
    """

    def __init__(self, name: str | None, model: Any, tokenizer: Any) -> None:
        self.name, self.model, self.tokenizer = name, model, tokenizer

    def __repr__(self) -> str:
        return f"<{self.name or 'loaded'}>"


def draft_of(value: Any) -> str | Loaded:
    """Return a draft model as plans hold it.

    Args:
        value: "demo", a directory, a file or a hub id; a loaded model that shares the tokenizer of the one it drafts
            for; or a pair of a loaded model and its tokenizer.

    Raises:
        PlanError: it is none of these.
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
    """Drops tokens before the first layer, by how a draft model attends to them.

    The draft reads the whole conversation and drafts a few tokens of the answer. `observe` sees its layers as it does,
    and `scores` becomes a score per token of the draft; the driver carries these over to the model's own tokens, and
    hands them to `select` as ``ctx.shared["drafted"]``, [B, offered], -inf for padding, in a context of layer -1 that
    has no queries, keys or values. Tokens keep their positions; those dropped are never read.
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
        """Return how many queries vote: of the prompt's last token, and of the draft's own tokens after it."""

    @abstractmethod
    def entries(self, length: int) -> int:
        """Return how many tokens of a turn's prompt of `length` go on."""

    @abstractmethod
    def observe(self, ctx: LayerContext, prompt: int, seen: dict[int, Any]) -> None:
        """Note what a layer of the draft attends to; called in each layer, for one query after another.

        Args:
            ctx: the layer; its last query is the one that votes.
            prompt: tokens of the prompt, as the draft counts them: the first that are stored.
            seen: notes of this prompt.
        """

    @abstractmethod
    def scores(self, seen: dict[int, Any]) -> Any:
        """Return a score for each token of the prompt, float [prompt], from what was noted."""

    @abstractmethod
    def own_tokenizer(self) -> Loaded | None:
        """Return the tokenizer of the model itself; None where it is not known."""

    @property
    @abstractmethod
    def lacks_tokenizer(self) -> bool:
        """True while the draft has a tokenizer of its own and the model's is not known."""

    @abstractmethod
    def for_tokenizer(self, tokenizer: Any) -> Self:
        """Return the propagator with the model's own tokenizer."""
