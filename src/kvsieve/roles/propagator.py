"""Propagators: which hidden states go on to deeper layers while a prompt is read."""

from __future__ import annotations

from abc import abstractmethod

from kvsieve.errors import PlanError
from kvsieve.roles.base import Role
from kvsieve.types import LayerContext, Selection


class Propagator(Role):
    """Selects the hidden states that continue to deeper layers during prefill.

    A subclass is a frozen dataclass with the methods `source` and `select`. With `two_pass`, the pass ends where
    `select` first chooses, and the chosen tokens are read again as a prompt of their own.
    """

    @property
    def window(self) -> int:
        """Queries at the prompt's end that it looks at; see Evictor.window."""
        return 0

    @property
    def two_pass(self) -> bool:
        """True where the chosen tokens are read again, as a short prompt that takes the place of the one given."""
        return False

    @property
    def floor(self) -> int:
        """Tokens that shares which are no Budget pass on at least; a Budget has its own."""
        return 0

    @abstractmethod
    def source(self, num_layers: int) -> int:
        """Return the index of the first layer after which hidden states may be dropped; -1 for before the first layer.

        Raises:
            PlanError: the model of `num_layers` layers has no such layer.
        """

    def first_layer(self, num_layers: int, layers: tuple[int, ...] = ()) -> int:
        """Return the index of the first layer after which hidden states may really be dropped.

        Tokens are chosen by attention over all of them, which some models' layers do not have.

        Args:
            num_layers: layers of the model.
            layers: indices of those with keys and values of all tokens, in order; () for all.

        Returns:
            The first of `layers` that is not before ``source(num_layers)``.

        Raises:
            PlanError: there is none.
        """
        return self.layer_from(self.source(num_layers), num_layers, layers)

    def layer_from(self, source: int, num_layers: int, layers: tuple[int, ...] = ()) -> int:
        """Return the first of `layers` that is not before `source`; see `first_layer`."""
        found = next((layer for layer in layers or range(num_layers) if layer >= source), None)
        if found is None or (found == num_layers - 1 and not self.two_pass):
            raise PlanError(
                f"{type(self).__name__} is to drop tokens after layer {source}, and of the model's {num_layers} layers "
                f"only {', '.join(map(str, layers))} have keys and values of all tokens to choose by: name one of "
                f"these, not the last layer"
            )
        return found

    @abstractmethod
    def select(self, ctx: LayerContext) -> Selection | None:
        """Select the tokens that continue to the next layer: [B, K] ascending, with the last one; None lets all pass.

        Called at every layer in the pass that ends a prompt, after its attention and before its eviction; before
        ``source(num_layers)`` only to observe. What it has seen goes into ``ctx.shared``. Offered are the last
        ``ctx.offered`` stored entries; indices count from the first of them.
        """

    def queries(self, length: int) -> int:
        """Queries at the end of a prompt of `length` tokens that it looks at, where that depends on the length."""
        return self.window

    def reread_tokens(self, length: int) -> int:
        """Tokens of a prompt of `length` that are read again, with `two_pass`."""
        return length

    def caution(self, num_layers: int) -> str | None:
        """Return a warning for a model of `num_layers` layers."""
        return None
