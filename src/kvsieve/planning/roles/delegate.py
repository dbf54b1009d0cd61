"""Base of evictors that wrap another one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from kvsieve.errors import PlanError, short
from kvsieve.planning.roles.base import Traits
from kvsieve.planning.roles.evictor import ChunkedEvictor, Evictor, Layers
from kvsieve.planning.roles.probing import ProbingEvictor
from kvsieve.types import LayerContext, Selection, When

if TYPE_CHECKING:
    from kvsieve.planning.budget import Budget


def base_of(evictor: Evictor | None) -> Evictor | None:
    """Return the evictor that another one holds as `base`, or None."""
    base = None if evictor is None else vars(evictor).get("base")
    return base if isinstance(base, Evictor) else None


@dataclass(frozen=True, kw_only=True)
class DelegatingEvictor(Evictor):
    """An evictor that behaves as `base`, except for methods that a subclass overrides.

    Its traits combine both: the needs of both, and all heads if one of them needs them.
    """

    base: Evictor

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.base, Evictor):
            raise PlanError(f"{name}: base must be an evictor, such as SnapKV(budget=0.2), got {short(self.base)}")
        if isinstance(self.base, (ProbingEvictor, ChunkedEvictor)):
            raise PlanError(
                f"{name}: {type(self.base).__name__} needs passes of its own over the prompt, which {name} does not "
                "give it; use a base such as SnapKV(budget=0.2)"
            )

    @property
    def traits(self) -> Traits:
        own = self.TRAITS
        base = self.base.traits
        scopes = {own.heads, base.heads}
        aware = {own.query_aware, base.query_aware}
        return Traits(
            needs=tuple(dict.fromkeys((*own.needs, *base.needs))),
            heads=None if None in scopes else "all" if "all" in scopes else "own",
            ragged=own.ragged or base.ragged,
            is_view=own.is_view or base.is_view,
            recuts=own.recuts or base.recuts,
            writes=own.writes or base.writes,
            takes_quotas=base.takes_quotas,
            query_aware=None if None in aware else True in aware,
        )

    @property
    def budget(self) -> Budget:
        return self.base.budget

    @property
    def window(self) -> int:
        return self.base.window

    @property
    def minimum(self) -> int:
        return self.base.minimum

    @property
    def when(self) -> When:
        return self.base.when

    @property
    def why_not_edited(self) -> str | None:
        return super().why_not_edited or self.base.why_not_edited

    def why_not_joined(self, before: int) -> str | None:
        return super().why_not_edited or self.base.why_not_joined(before)

    @property
    def grows(self) -> bool:
        return self.base.grows

    @property
    def keeps_prompt(self) -> bool:
        return self.base.keeps_prompt

    def answer_entries(self, generated: int, prompt: int, budget: int) -> int:
        return self.base.answer_entries(generated, prompt, budget)

    @property
    def skip_layers(self) -> Layers:
        return self.base.skip_layers

    @property
    def lacks_tokenizer(self) -> bool:
        return self.base.lacks_tokenizer

    def for_tokenizer(self, tokenizer: Any) -> Self:
        return replace(self, base=self.base.for_tokenizer(tokenizer))

    def check(self, num_layers: int) -> None:
        # Its own first: messages should name it.
        super().check(num_layers)
        self.base.check(num_layers)

    def rhythm(self, prompt: int) -> tuple[int, int] | None:
        return self.base.rhythm(prompt)

    def requested(self, length: int, new_tokens: int = 0) -> int:
        return self.base.requested(length, new_tokens)

    def entries(self, length: int, new_tokens: int = 0) -> int:
        return self.base.entries(length, new_tokens)

    def stored_heads(self, kv_heads: int, query_heads: int) -> int:
        return self.base.stored_heads(kv_heads, query_heads)

    def observe(self, ctx: LayerContext) -> None:
        self.base.observe(ctx)

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | dict[int, Selection] | None:
        return self.base.select(ctx, counts)

    def is_noop(self, layer_idx: int, num_layers: int, stored: tuple[int, ...], state: dict[str, Any]) -> bool:
        return self.base.is_noop(layer_idx, num_layers, stored, state)
