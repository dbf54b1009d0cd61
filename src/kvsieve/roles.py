"""The roles a plan is made of.

Role objects are frozen dataclasses: the object is the configuration. What belongs to a sequence lives on the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvsieve.budget import Budget
from kvsieve.types import LayerContext, Selection, When

if TYPE_CHECKING:
    from torch import Tensor

    from kvsieve.core.kv_rows import Choice, KVRows, ReadFacts

Look = Callable[[LayerContext], None]

# What an evictor may have besides; see Evictor.
OPTIONAL = ("needs", "check", "ragged", "views", "entries", "waits", "needs_heads", "takes_quotas", "skip_layers")


@runtime_checkable
class Evictor(Protocol):
    """Chooses which KV entries stay stored: once a prompt is complete, and at other times if `when` says so.

    One that uses ``ctx.model`` says of what in an attribute ``needs: tuple[str, ...]``, "rotary" or "output_weight";
    a model that cannot give it is then refused. "hidden" among them gives a Looker ``ctx.hidden`` and ``ctx.output``. A
    method ``check(num_layers: int)`` may raise PlanError for a model that it does not fit. One whose ``when.looks`` is
    set is a Looker as well. ``ragged = True`` tells tables that its heads may keep different numbers of entries.
    ``views = True``: nothing is dropped; what it chooses is what this turn's answer reads. A method ``entries(length:
    int, new_tokens: int) -> int`` is for a number of entries that the budget alone does not tell; new_tokens: tokens
    expected after the prompt, 0 if nobody said. ``waits(layer_idx, num_layers, stored, state) -> bool`` says, from what
    the host knows, that `select` would drop nothing of a layer with ``stored[b]`` real entries while decoding: passes
    of fixed shapes then need not stop for it. ``needs_heads``: see `heads_needed`. ``takes_quotas = True``: it ranks
    entries by scores, so that ``quotas=`` can be asked of it. ``skip_layers``: layers that keep everything, how many at
    the start or which. All of these are named in `OPTIONAL`, and an evictor that holds another one forwards them.
    """

    @property
    def budget(self) -> Budget:
        """Entries kept per layer and KV head."""
        ...

    @property
    def window(self) -> int:
        """Queries of the prompt's end it looks at; the last chunk of a chunked prefill holds at least these."""
        ...

    @property
    def minimum(self) -> int:
        """Fewest entries it can keep; a smaller ratio budget is raised to this, a smaller token budget refused."""
        ...

    @property
    def when(self) -> When:
        """When it acts besides the end of a prompt."""
        ...

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | dict[int, Selection] | None:
        """Slots that stay, [B, H, K] ascending with ``counts[b]`` real ones in row b, or None to keep everything.

        Heads may keep different numbers (``Selection.head_lengths``), ``counts[b]`` on average. An evictor that weighs
        layers against each other returns a selection per layer index, of this layer and of earlier ones, whose slots
        are those they store at that moment; ``ctx.shared`` carries what it needs from layer to layer.

        Called per layer, after its attention. Must not write to `ctx`, except to ``ctx.state`` and ``ctx.shared``.
        """
        ...


def heads_needed(role: object) -> str | None:
    """Whose heads an evictor or propagator looks at to choose for a KV head, which tensor parallelism depends on.

    A class says so itself in ``needs_heads``, which subclasses do not inherit: "own" where the KV head and its query
    heads are enough, "all" where other heads of the layer count and it asks ``ctx.ranks`` for those of other processes.
    One that holds a `base` needs what that needs as well. None: not said, and refused where heads are divided.
    """
    if "needs_heads" not in vars(type(role)):
        return None
    said: str | None = role.needs_heads  # type: ignore[attr-defined]
    base = getattr(role, "base", None)
    both = {said, said if base is None else heads_needed(base)}
    return None if None in both else "all" if "all" in both else "own"


def entries_kept(evictor: Evictor, length: int, new_tokens: int = 0) -> int:
    """Entries that an evictor keeps of a row whose prompt has `length` true tokens."""
    own = getattr(evictor, "entries", None)
    return evictor.budget.entries(length, evictor.minimum) if own is None else int(own(length, new_tokens))


@runtime_checkable
class Reader(Protocol):
    """Chooses which stored entries a new token reads.

    It sees KV rows (core.kv_rows): the entries of one KV head of one batch row, all real, whatever they are stored in.
    Prompts are read densely; with ``questions`` set, one that the plan leaves whole is read as answers are.
    """

    @property
    def questions(self) -> bool: ...

    def setting(self, facts: ReadFacts) -> Hashable | None:
        """The parameters for one row's KV rows in one layer; None where everything is read.

        Raises PlanError for a budget that cannot be honoured there.
        """
        ...

    def reads_all(self, setting: Any, size: int) -> bool:
        """Whether KV rows of `size` entries are read whole."""
        ...

    def choose(self, query: Tensor, kv_rows: KVRows, state: dict[str, Any], scale: float, setting: Any) -> Choice:
        """What of each KV row is read for query [X, G, D], the G query heads of each KV row.

        state: scratch of these KV rows; what it holds is derived from their entries (tensors with a row per KV row, or
        objects with a method all_tensors() that gives their tensors), which between calls only grow. With
        ``fixed_shapes = True`` a reader says that it also knows KV rows whose length is on the device, and remembers
        nothing but IncrementalMetadata (core.kv_rows) of each. What that reads to take in entries, it tells itself
        (update_bytes); `metadata_bytes` (core.kv_rows.Choice) tells the rest.
        """
        ...


@runtime_checkable
class Looker(Protocol):
    """The part of an evictor that sees every pass of a prompt, chunks included, not its last `window` queries only."""

    def look(self, ctx: LayerContext) -> None:
        """Called per layer and pass, before `select` in the pass that acts; ``ctx.query`` is this pass's, all of it.

        What it learns goes into ``ctx.state`` and must not depend on where the chunks end.
        """
        ...


class Branch(Protocol):
    """A copy of a half-read conversation that passes are fed to; nothing of it survives the rehearsal."""

    def read_rest(
        self, *, look: Look | None = None, evict: Evictor | None = None, logits: bool = False
    ) -> Tensor | None:
        """Read what is left of the prompt; then `evict`, if given, reduces the branch. See `feed`."""
        ...

    def feed(
        self, ids: Tensor, real: Tensor | None = None, *, look: Look | None = None, logits: bool = False
    ) -> Tensor | None:
        """A pass of ids int64 [B, L] after what the branch holds; real: bool [B, L], False for padding.

        look: called per layer with what it sees; its last L entries are this pass's. Returns the logits [B, V] after
        the last column if `logits` asks for them, else None.
        """
        ...

    def branch(self) -> Branch:
        """A branch of this branch. Nothing may be fed to this one while that one is in use."""
        ...


class Rehearsal(Protocol):
    """What `Rehearsing.rehearse` is given: the conversation, of which only the prompt's last tokens are unread.

    ids: int64 [B, N]; real: bool [B, N], False for padding. ends: tokens that end an answer.
    """

    ids: Tensor
    real: Tensor
    ends: frozenset[int]

    def branch(self) -> Branch:
        """A new branch of the conversation. Only one may be in use at a time."""
        ...

    def state(self, layer_idx: int) -> dict[str, Any]:
        """The layer's ``ctx.state``, which `select` reads once the prompt is complete."""
        ...


@runtime_checkable
class Rehearsing(Protocol):
    """The part of an evictor that needs passes of its own, which are then forgotten, before a prompt is complete.

    They come when all but the prompt's last ``max(1, window)`` tokens are read, and only where something must go: a
    select without what a rehearsal left keeps everything. Such a plan needs a driver (``sieve.generate``,
    ``sieve.prefill``) and does not go with propagation. rehearsed: tokens it feeds at once, which room is left for.
    """

    @property
    def rehearsed(self) -> int: ...

    def rehearse(self, rehearsal: Rehearsal) -> None: ...


@runtime_checkable
class Asking(Protocol):
    """The part of an evictor that feeds texts of its own, as token ids that a tokenizer gives.

    A plan that lacks some of them reads no prompt: what it would feed is not known, and without it it would not act.
    """

    @property
    def lacks_tokenizer(self) -> bool:
        """Whether some of the ids are neither given nor made yet."""
        ...

    def for_tokenizer(self, tokenizer: Any) -> Evictor:
        """The evictor with the ids it lacks, made with a tokenizer of transformers."""
        ...


@runtime_checkable
class Condensing(Protocol):
    """The part of an evictor that reduces the prompt while it is read, chunk by chunk, in the light of its question.

    Each pass reads [what is kept | chunk | question]; then ``select(ctx, counts)`` chooses, per head, ``counts[b]``
    entries of row b among all but the question's; the question is forgotten, and what is kept moves together: its keys
    are turned to the positions 0, 1, ... At the end the question is read for good, and the conversation goes on there.

    restarts: True. question: last tokens of the prompt that are its question. chunk_length: tokens of a chunk.
    """

    @property
    def restarts(self) -> bool: ...

    @property
    def question(self) -> int: ...

    @property
    def chunk_length(self) -> int: ...


def condenses(evictor: object) -> bool:
    """Whether an evictor reduces the prompt while it is read, and so does not act as others do; see Condensing."""
    return isinstance(evictor, Condensing) and evictor.restarts


@runtime_checkable
class Propagator(Protocol):
    """Chooses which hidden states go on to deeper layers while a prompt is read.

    It may also have ``restarts = True``: then the pass ends where `select` first chooses, and the chosen tokens are
    read again as a prompt of their own; ``keeps(length: int) -> int`` tells how many those are. ``queries(length: int)
    -> int`` is for a `window` that depends on the prompt's length, and ``caution(num_layers: int) -> str | None`` for
    a warning when it is attached to a model. ``needs_heads``: see `heads_needed`.
    """

    @property
    def window(self) -> int:
        """Queries of the prompt's end it looks at; see Evictor.window."""
        ...

    def source(self, num_layers: int) -> int:
        """Index of the first layer after which hidden states may be dropped.

        Raises PlanError when the model of `num_layers` layers has no such layer.
        """
        ...

    def select(self, ctx: LayerContext) -> Selection | None:
        """Tokens that go on to the next layer, [B, K] ascending, the last one included; None lets all pass.

        Called at every layer in the pass that ends a prompt, after its attention and before its eviction; before
        ``source(num_layers)`` only to look. What it has seen goes into ``ctx.shared``. Offered are the last
        ``ctx.offered`` stored entries; indices count from the first of them.
        """
        ...
