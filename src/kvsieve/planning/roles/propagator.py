"""Propagators: choice of the hidden states that continue to deeper layers during prefill."""

from __future__ import annotations

from abc import abstractmethod

from kvsieve.errors import PlanError
from kvsieve.planning.roles.base import Role
from kvsieve.types import LayerContext, Selection


class Propagator(Role):
    """Selects the hidden states that continue to deeper layers during prefill.

    A subclass is a frozen dataclass with the methods `source` and `select`. With `two_pass`, the pass ends where
    `select` first chooses, and the chosen tokens are prefilled again as a prompt of their own.
    """

    @property
    def window(self) -> int:
        """Observation window: queries at the prompt's end that it uses; see Evictor.window."""
        return 0

    @property
    def two_pass(self) -> bool:
        """True if the chosen tokens are prefilled again, as a short prompt that replaces the given one."""
        return False

    @property
    def floor(self) -> int:
        """Fewest tokens passed on by shares that are not a Budget; a Budget has its own floor."""
        return 0

    @abstractmethod
    def source(self, num_layers: int) -> int:
        """Return the index of the first layer after which hidden states may be dropped; -1 for before the first layer.

        Raises:
            PlanError: the model of `num_layers` layers has no such layer.
        """

    def first_layer(self, num_layers: int, layers: tuple[int, ...] = ()) -> int:
        """Return the index of the first layer after which hidden states are dropped.

        The choice needs attention over all tokens, which some models' layers do not have.

        Args:
            num_layers: layers of the model.
            layers: indices of those with keys and values of all tokens, in order; () for all.

        Returns:
            The first of `layers` from ``source(num_layers)`` on.

        Raises:
            PlanError: there is none.
        """
        return self.layer_from(self.source(num_layers), num_layers, layers)

    def layer_from(self, source: int, num_layers: int, layers: tuple[int, ...] = ()) -> int:
        """Return the first of `layers` from `source` on; see `first_layer`."""
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
        ``source(num_layers)`` only to observe. Records are stored in ``ctx.shared``. Candidates are the last
        ``ctx.offered`` stored entries; indices count from the first of them.
        """

    def queries(self, length: int) -> int:
        """Return the observation window for a prompt of `length` tokens, if it depends on the length."""
        return self.window

    def reread_tokens(self, length: int) -> int:
        """Return the tokens of a prompt of `length` that `two_pass` prefills again."""
        return length

    def caution(self, num_layers: int) -> str | None:
        """Return a warning for a model of `num_layers` layers."""
        return None
