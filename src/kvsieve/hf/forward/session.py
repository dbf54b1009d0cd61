"""One forward pass under a plan: its facts, and its work at each layer."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvsieve.cache import DenseStore, keep
from kvsieve.core.checks import gathered, look
from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.cache.layer import SieveLayer, StoreLayer, WindowLayer
from kvsieve.hf.forward.by_column import attend_by_column
from kvsieve.hf.forward.compact import columns_of
from kvsieve.hf.forward.drafted import choose_drafted
from kvsieve.hf.forward.encode import decode_before, encode_after
from kvsieve.hf.forward.evict import act_together, closed_up, drops_nothing, evict
from kvsieve.hf.forward.pass_state import PassState
from kvsieve.hf.forward.propagate import propagate
from kvsieve.hf.forward.recent import recent_queries
from kvsieve.hf.forward.request import StopForward
from kvsieve.hf.forward.scores import add_scores
from kvsieve.hf.forward.sparse_prompt import attend_stored
from kvsieve.hf.forward.sparse_read import read_token
from kvsieve.hf.forward.travel import Tokens, gather, joined
from kvsieve.hf.forward.windows import attend_window
from kvsieve.types import AttentionQueries, LayerContext, Selection


@dataclass
class Session(PassState):
    """The forward pass in progress: its work at each layer."""

    @functools.cached_property
    def only_appends(self) -> bool:
        """True if layers store real tokens of each row's answer and attend to all entries up to their own, no more.

        A layer's view, and the form of its entries, may still ask for more.
        """
        return type(self) is Session and self.tokens.size == 1 and self.only_stores()

    def only_stores(self) -> bool:
        """Return True if neither plan, driver nor conversation do more than that with the tokens."""
        request = self.request
        if self.step.phase != "decode" or self.tokens.valid is not None or self.order is not None:
            return False
        if self.cache.producers or self.cache.conversation.parallel is not None:
            return False
        acts = self.plan.read is not None or self.plan.codec is not None or self.when.steps is not None
        return not acts and request.on_layer is None and request.on_leave is None

    def attend(self, index: int, layer: StoreLayer, asked: AttentionQueries, key: Tensor, value: Tensor) -> Tensor:
        """Store this pass's keys and values, attend to everything stored, then let the plan reduce the layer."""
        self.check_queries(index, asked)
        if isinstance(layer, WindowLayer):
            out = attend_window(layer, asked, key, value, self.tokens, self.cache.conversation.mask)
            self.lend(index, layer, key, changes=True)
            layer.drop_unseen(at_once=self.tokens.size > 1)
            return out
        assert isinstance(layer, SieveLayer)
        tokens = self.tokens
        step = self.step
        query = asked.query
        model_key = key
        reduces = step.ends_prompt or self.acts_in_between
        evictor = self.plan.evict
        codec = self.plan.codec
        where = index, self.model.num_layers
        if reduces and codec is not None:
            decode_before(self.plan, layer)
        store = layer.store
        room = self.cache.turn.room(self.end, max(tokens.size, store.size // store.stride))
        if codec is not None and evictor is None:
            # They are encoded long before so many have come.
            room = min(room, codec.block)
        key, value = (part.detach() if part.requires_grad else part for part in (key, value))
        if self.reads_as_answer:
            out = self._read(index, layer, asked, key, value, room)
        else:
            store.append(key, value, tokens.token_index, tokens.valid, tokens.counts, room)
            with gathered(self.checks):
                placed = self._before_attention(index, layer, asked)
                if placed is None:
                    store = layer.store
                    documents = self.cache.conversation.parallel
                    facts = self.cache.turn, step, where
                    out = attend_stored(self.plan.prefill, *facts, asked, store, self.shared, documents)
                else:
                    out = attend_by_column(asked, placed, tokens.token_index[0])
        self.lend(index, layer, model_key, changes=reduces or codec is not None or self.request.on_layer is not None)
        self._show(index, layer, asked, out)
        if evictor is not None and self.when.steps is not None and evictor.window > 1 and step.is_last_chunk:
            query = recent_queries(layer.state, query, tokens.counts, evictor.window, decoding=step.phase == "decode")
            asked = replace(asked, query=query)
            if step.phase == "decode" and tokens.valid is not None:
                layer.store = closed_up(layer.store, room)
        if reduces and not drops_nothing(self.plan, step, where, layer):
            with gathered(self.checks):
                self._reduce(index, layer, asked, out)
        if codec is not None:
            encode_after(self.plan, self.cache, index, layer, step, reduced=reduces)
        return out

    def lend(self, index: int, layer: StoreLayer, key: Tensor, *, changes: bool) -> None:
        """Give layers with shared KV the current entries; changes: some are dropped or encoded before the pass ends."""
        if index in self.cache.producers:
            self.lent[index] = (layer.fork(share=True) if changes else layer), key

    def check_queries(self, index: int, asked: AttentionQueries) -> None:
        """Raise UnsupportedModelError unless a layer attends with one query per travelling token."""
        if asked.query.shape[2] != self.tokens.size:
            raise UnsupportedModelError(
                f"layer {index} attends with {asked.query.shape[2]} queries where {self.tokens.size} tokens were fed: "
                "this architecture is not supported"
            )

    def _read(
        self, index: int, layer: SieveLayer, asked: AttentionQueries, key: Tensor, value: Tensor, room: int
    ) -> Tensor:
        """Append and attend one token at a time; each sees only earlier entries."""
        arguments = self.plan.read, self.cache, layer, index, self.model.num_layers, self.reads
        tokens = self.tokens
        outs = []
        if tokens.size == 1:
            layer.store.append(key, value, tokens.token_index, tokens.valid, tokens.counts, room)
            return asked.output(read_token(*arguments, asked.stored, self.sharing(index)))
        for at in range(tokens.size):
            one = slice(at, at + 1)
            token = tokens.part(one)
            layer.store.append(key[:, :, one], value[:, :, one], token.token_index, token.valid, token.counts, room)
            outs.append(read_token(*arguments, asked.stored.part(one), self.sharing(index, at)))
        return asked.output(torch.cat(outs, 2))

    def _before_attention(self, index: int, layer: SieveLayer, asked: AttentionQueries) -> DenseStore | None:
        """Let the driver change a layer's entries; return its store of them by column, if it gives one."""
        if self.request.before_attention is None:
            return None
        found = self.request.before_attention(self._context(index, layer, asked))
        if found is None or isinstance(found, Selection):
            self._keep(layer, found)
            return None
        layer.store = found
        return found

    def _show(self, index: int, layer: SieveLayer, asked: AttentionQueries, out: Tensor) -> None:
        """Pass the layer, with all queries of the pass, to the driver and to an observing role."""
        if self.plan.read is not None and self.plan.read.observes:
            add_scores(self.plan.read, self._context(index, layer, asked), layer)
        evictor = self.plan.evict
        on_layer = self.request.on_layer
        observes = self.when.observes and (self.step.phase == "prefill" or self.when.steps is not None)
        if not observes and on_layer is None:
            return
        ctx = self._context(index, layer, asked, out)
        if on_layer is not None:
            self._keep(layer, on_layer(ctx))
        if observes and evictor is not None:
            evictor.observe(ctx)

    def _keep(self, layer: SieveLayer, kept: Selection | None) -> None:
        if kept is not None:
            layer.store = keep(layer.store, kept, self.cache.turn.room(self.end, kept.indices.shape[-1]))

    def _context(
        self, index: int, layer: SieveLayer, asked: AttentionQueries, out: Tensor | None = None
    ) -> LayerContext:
        store = layer.store
        protected_tokens = self.cache.conversation.protected
        ranks = self.model.ranks
        ranks.check_heads(asked.query.shape[1])
        protected, quotas = (None, None) if protected_tokens is None else protected_tokens.at(store.index, store.valid)
        ragged = self.plan.evict is not None and self.plan.evict.traits.ragged
        return LayerContext(
            layer_idx=index,
            num_layers=self.model.num_layers,
            step=self.step,
            scale=asked.scale,
            query=asked.stored.query.detach(),
            keys=store.keys,
            values=store.values,
            index=store.index,
            valid=store.valid,
            # Where heads keep different numbers, the fullest may be another process's.
            stored=ranks.most(store.lengths) if ragged else store.lengths,
            state=layer.state,
            shared=self.shared,
            protected=protected,
            quotas=quotas,
            model=self.model.facts,
            layers=tuple(self.cache.sieve_layers),
            ranks=ranks,
            softcap=asked.softcap,
            sinks=asked.sinks,
            hidden=None if self.hidden is None else self.hidden.detach(),
            output=None if self.hidden is None or out is None else out.detach(),
            ids=None if self.ids is None else self.ids[:, : self.end],
            log_weight=store.log_weight,
        )

    def _reduce(self, index: int, layer: SieveLayer, asked: AttentionQueries, out: Tensor) -> None:
        plan = self.plan
        prompt = self.step.phase == "prefill"
        if not prompt or self.cache.turn.acts:
            ctx = self._context(index, layer, asked, out)
            if plan.propagate is not None and self.source is not None and self.step.ends_prompt:
                propagate(self, index, layer, ctx)
            for number, rows in enumerate(act_together(plan, self.cache, self.step, self.due)):
                evict(plan, self._context(index, layer, asked, out) if number else ctx, self.cache, rows)
        if prompt:
            self.cache.turn.record.kept[index] = layer.store.entries

    def leave(self, index: int, hidden: Tensor, given: dict[str, Any]) -> Tensor:
        """Let hidden states [B, L, C] leave layer `index`; those that continue are [B, K, C].

        Under chunked prefill the leading chunks wait at the source layer, the first that may drop tokens (StopForward
        ends their pass), and the last chunk brings all of the turn's tokens to the deeper layers.

        Args:
            index: index of the layer.
            hidden: its output.
            given: its arguments without hidden states, and its further outputs.
        """
        arguments = self.arguments
        arguments.rows = None
        if index == self.source:
            arguments.note_given(given)
            deferred = self.cache.turn.deferred
            if not self.step.is_last_chunk:
                look(self.checks)
                deferred.append((hidden, *arguments.noted))
                self.stopped = True
                raise StopForward
            if deferred:
                chunks = [chunk[1:] for chunk in deferred]
                sizes = [chunk[0].shape[1] for chunk in deferred]
                hidden = joined([*(chunk[0] for chunk in deferred), hidden])
                arguments.join(chunks, joined)
                deferred.clear()
                self.moved = True
                where = self.cache.conversation.mask, self.step.turn_start, [*sizes, self.step.num_new]
                self.tokens = Tokens(*columns_of(*where, hidden.device, holed=True), self.step.turn_lengths)
        selection = self.selection
        self.selection = None
        if index < 0:
            selection = choose_drafted(self.plan, self.cache, self.model, self.step, self.tokens, self.shared)
        if selection is not None:
            rows = selection.indices.to(hidden.device)
            arguments.narrow(rows, hidden.shape[1])
            hidden = gather(hidden, rows)
            self.moved = True
            self.tokens = self.tokens.narrow(selection)
            self.cache.conversation.record_propagated(index, self.end, self.tokens.columns(), max(self.tokens.counts))
        return hidden

    def enter(self, index: int, given: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
        """Return the arguments of a layer after the source layer, for the travelling tokens.

        Args:
            index: index of the layer.
            given: its arguments for all tokens of the pass, without hidden states.
            names: its parameters.
        """
        if not self.moved:
            return given
        given = self.arguments.deeper(given)
        if self.cache.all_layers[index].has_state:
            self.tokens.mask_states(given, names)
        return given
