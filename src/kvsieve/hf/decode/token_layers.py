"""The next tokens of an answer through all layers in one compiled call, which takes the first input to the last output.

These are one token of each row, or that and its drafts. The first layer computes all of them, the others return what
they are given. That is so if each layer does nothing but append the tokens' entries and attend to all entries up to
each token's own by the C kernel, and nobody looks at the layers or their modules. Other tokens pass layer by layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from kvsieve.attention import AttentionRequest, DenseEntries, FlatEntries, explain, next_border, token_kernel
from kvsieve.cache.lanes import LANES
from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.counts import Reads
from kvsieve.hf.cache.layer import SieveLayer
from kvsieve.hf.compat import CACHE, CACHE_NAMES
from kvsieve.hf.decode.layer_parts import LayerParts
from kvsieve.hf.decode.watch import Weights, Wiring
from kvsieve.hf.forward.pass_state import ComputedLayers
from kvsieve.hf.forward.rows import RowsSession
from kvsieve.hf.forward.session import Session
from kvsieve.hf.forward.sparse_read import stored_entries
from kvsieve.hf.forward.transaction import AnswerSession
from kvsieve.kernels.cpu import cores
from kvsieve.kernels.cpu.decoder_layer import DecoderLayer
from kvsieve.kernels.cpu.token_pass import TokenEntries, through_layers
from kvsieve.types import AttentionQueries

# Arguments of a layer that the tokens' way through all of them knows.
_KNOWN = frozenset(("attention_mask", "position_embeddings", "position_ids", "use_cache", *CACHE_NAMES))
_DEPTH = "num_hidden_layers"
# Columns after which the table is asked again: where it has chosen another executor, and at most.
_LATER = 64
_MOST = 4096


@dataclass(eq=False)
class _TokenChoice:
    """The table's choice for some passes of a turn over the same number of tokens.

    Attributes:
        reads: counts of the turn's reads, which are its own.
        threads: CPU threads that were counted on.
        start: columns fed before the first of these passes.
        end: columns fed before the first pass after them.
        entries: of the cache, which the tokens join; None if layers attend otherwise.
        executors: of the layers in the table, by index, where the turn's reads have none yet.
    """

    reads: Reads
    threads: int
    start: int
    end: int
    entries: TokenEntries | None
    executors: dict[int, str] = field(default_factory=dict)


class _AttendedEntries(NamedTuple):
    """Entries that each row's first token attends to, and how many more each token after it, in all layers together.

    Attributes:
        entries: those without weights.
        weighted: those with weights, which have four bytes more.
        more: further entries of the next token, without weights.
        more_weighted: the same, with weights.
    """

    entries: int
    weighted: int
    more: int
    more_weighted: int


class TokenLayers:
    """Layers of a decoder that the next tokens of a cache pass in one call, or of several caches together.

    Args:
        layers: all of the decoder's, in order.
        parts: of the layers.
        config: of the decoder.

    Attributes:
        linked: True once the decoder was seen to give each layer the output of the one before.
    """

    def __init__(self, layers: nn.ModuleList, parts: Sequence[LayerParts], config: Any) -> None:
        self.linked = False
        self.count = len(parts)
        self._layers = layers
        self._parts = parts
        self._config = config
        self._wiring: Wiring | None = None
        self._weights: Weights | None = None
        self._kernels: list[DecoderLayer] = []
        # By the number of tokens.
        self._choices: weakref.WeakKeyDictionary[SieveCache, dict[int, _TokenChoice]] = weakref.WeakKeyDictionary()

    def install(self, harmless: set[int]) -> None:
        """Note how modules are wired, with the layers' forwards in place. harmless: see `Wiring`."""
        inside = [part.wiring for part in self._parts]
        facts = [
            *((self._layers._modules, name, layer) for name, layer in self._layers._modules.items()),
            *((layer.__dict__, "forward", layer.forward) for layer in self._layers),
            *(part.scaling for part in self._parts),
            # A decoder may be told to run the first layers only.
            (vars(self._config), _DEPTH, vars(self._config).get(_DEPTH)),
        ]
        hooks = [found for layer in self._layers for found in (layer._forward_hooks, layer._forward_pre_hooks)]
        facts += chain(*(wiring.facts for wiring in inside))
        self._wiring = Wiring(facts, [*hooks, *chain(*(wiring.hooks for wiring in inside))], harmless)

    def remove(self) -> None:
        """Forget all."""
        self._wiring = self._weights = None
        self._choices.clear()

    def run(self, session: Session, hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the last layer's output, or None if the tokens must pass layer by layer.

        Args:
            session: the pass.
            hidden: [B, L, C], the first layer's input.
            kwargs: its other arguments.
        """
        angles = kwargs.get("position_embeddings")
        rows = _rows_of(session, kwargs.get(CACHE)) if self.linked else ()
        if not rows or angles is None or kwargs.get("attention_mask") is not None or not _KNOWN.issuperset(kwargs):
            return None
        cosine, sine = angles
        batch = 1 if isinstance(session, RowsSession) else len(hidden)
        if not self._parts[0].takes(hidden, cosine, sine) or not self._are_ready():
            return None
        if batch * sum(row.tokens.size for row in rows) != hidden.shape[0] * hidden.shape[1]:
            return None
        caches = []
        attended = []
        executors = []
        for row in rows:
            choice = self._choice(row, hidden.new_empty(batch, 0))
            entries = choice.entries
            counts = None if entries is None or entries.batch != batch else _placed(row.cache, entries)
            if entries is None or counts is None:
                return None
            caches.append(entries)
            attended.append(counts)
            executors.append(choice.executors)
        cores.look()
        output = through_layers(hidden, cosine, sine, caches, [row.step.start for row in rows])
        entry = 2 * cosine.shape[-1] * hidden.element_size()
        for row, counts, names in zip(rows, attended, executors, strict=True):
            for index, name in names.items():
                row.reads.executors.setdefault(index, name)
            for at, reads in enumerate(row.counts if isinstance(row, AnswerSession) else [row.reads]):
                reads.read(batch * (counts.entries + at * counts.more), entry)
                reads.read(batch * (counts.weighted + at * counts.more_weighted), entry + 4)
            for layer in cast("list[SieveLayer]", row.cache.all_layers):
                layer.store.advance_host_length(row.tokens.size)
        session.computed = ComputedLayers(self.count, output, angles)
        return output

    def note(self, session: Session, number: int, given: Tensor, kwargs: Mapping[str, Any], output: Tensor) -> None:
        """Note that a layer was computed alone, to see whether the decoder does nothing between layers."""
        angles = kwargs.get("position_embeddings")
        before = session.computed
        follows = before is not None and before.number == number and before.output is given and before.angles is angles
        session.computed = ComputedLayers(number + 1, output, angles) if follows or not number else None
        self.linked = session.computed is not None and number + 1 == self.count

    def _are_ready(self) -> bool:
        """Return True if nobody has changed or looks at a module, with the layers' weights as they are now."""
        if self._wiring is None or not self._wiring.hold():
            return False
        if self._weights is not None and self._weights.hold():
            return True
        self._choices.clear()
        self._weights = None
        kernels = [part.kernel() for part in self._parts]
        weights = [part.weights for part in self._parts]
        if any(part is None for part in (*kernels, *weights)):
            return False
        self._kernels = cast("list[DecoderLayer]", kernels)
        self._weights = Weights.joined(cast("list[Weights]", weights))
        return True

    def _choice(self, session: Session, hidden: Tensor) -> _TokenChoice:
        """Return the table's choice for the tokens, as first asked in this turn.

        hidden: of the dtype and the rows of the tokens.
        """
        choices = self._choices.setdefault(session.cache, {})
        tokens = session.tokens.size
        known = choices.get(tokens)
        threads = cores.asked_threads()
        if known is None or known.reads is not session.reads or known.threads != threads:
            known = None
        if known is None or not known.start <= session.step.start < known.end:
            known = choices[tokens] = self._asked(session, hidden, threads)
        return known

    def _asked(self, session: Session, hidden: Tensor, threads: int) -> _TokenChoice:
        """Ask the table about the next passes over as many tokens."""
        start = session.step.start
        tokens = session.tokens.size
        layers = session.cache.sieve_layers
        refused = _TokenChoice(session.reads, threads, start, start + _LATER, None)
        if len(layers) != self.count or any(layer.is_latent or layer.has_state for layer in layers.values()):
            return refused
        columns = _MOST
        found = []
        executors = {}
        scales = [part.scale for part in self._parts]
        for (index, layer), kernel, scale in zip(layers.items(), self._kernels, scales, strict=True):
            store = layer.store
            if store.is_encoded:
                return refused
            query = hidden.new_empty(len(hidden), kernel.widths[0] // kernel.head, tokens, kernel.head)
            stored = stored_entries(store)
            if isinstance(stored, FlatEntries):
                # The tokens are real.
                stored.padded = False
            request: AttentionRequest[Any, None] = AttentionRequest(AttentionQueries(query, scale), stored)
            if index not in session.reads.executors:
                executors[index] = explain(request)
            if tokens > 1 and isinstance(stored, DenseEntries):
                # The kernel looks at the marks itself, since the tokens are real.
                stored.valid = None
            found.append(token_kernel(request))
            if found[-1] is None:
                return refused
            slots = store.next_slot
            unread = LANES if store.is_ragged else 1
            columns = min(columns, (next_border(slots) - unread - slots) // store.stride - tokens + 1)
        if columns <= 0:
            return _TokenChoice(session.reads, threads, start, start + 1, None)
        few = [kernel == "few" for kernel in found]
        entries = TokenEntries(self._kernels, scales, len(hidden), tokens, hidden.dtype, LANES, few)
        return _TokenChoice(session.reads, threads, start, start + columns, entries, executors)


def _rows_of(session: Session, cache: Any) -> Sequence[Session]:
    """Return the passes of the caches of a pass, each over tokens that layers only append; none for others.

    cache: as given to layers.
    """
    rows = [session]
    if isinstance(session, RowsSession):
        rows = session.rows if cache is session.together else []
    elif cache is not session.cache:
        return ()
    return rows if all(row.only_appends for row in rows) else ()


def _placed(cache: SieveCache, entries: TokenEntries) -> _AttendedEntries | None:
    """Set the entries of all layers as they are now; return how many the tokens attend to, None if they cannot."""
    attended = weighted = more = more_weighted = 0
    for number, layer in enumerate(cast("list[SieveLayer]", cache.all_layers)):
        store = layer.store
        if layer.view is not None or store.is_encoded or not store.has_room(entries.tokens):
            return None
        tensors = store.tensors
        count = entries.place(number, tensors, store.next_slot)
        if not count:
            return None
        if tensors[4] is None:
            attended += count
            more += store.heads
        else:
            weighted += count
            more_weighted += store.heads
    return _AttendedEntries(attended, weighted, more, more_weighted)


def computed_before(session: Session, number: int, given: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the output of layer `number` if that is what it is given, since another layer has computed all.

    Raises:
        UnsupportedModelError: the layer is given something else.
    """
    computed = session.computed
    if computed is None or computed.number <= number:
        return None
    if computed.output is not given or computed.angles is not kwargs.get("position_embeddings"):
        raise UnsupportedModelError(
            f"the decoder has given layer {number} another input than the layer before returned, which it did not do "
            "before: attach with decode='eager'"
        )
    return given
