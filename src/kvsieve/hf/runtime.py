"""A model with a plan attached, and the only call of its decoder."""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvsieve.cache.tensors import tensors_in
from kvsieve.errors import CacheStateError, InputError, UnsupportedOptionError, short
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.copies import Unpicklable
from kvsieve.hf.cache.own_class import new_cache
from kvsieve.hf.cache.owner import Owner
from kvsieve.hf.cache.states import StateLayer
from kvsieve.hf.compat import CACHE, decoder_of, layers_of, tensor_parallel_mesh, text_config
from kvsieve.hf.decode.engine import Engine
from kvsieve.hf.forward.compact import reordered
from kvsieve.hf.forward.one_by_one import StatesTransaction, feed_one_by_one
from kvsieve.hf.forward.passes import cancel_session, open_session
from kvsieve.hf.forward.request import PLAIN, ModelContext, PassRequest, PassResult, StopForward
from kvsieve.hf.forward.scores import forget_records, forget_scores
from kvsieve.hf.forward.session import Session
from kvsieve.hf.forward.transaction import AnswerSession, PassTransaction
from kvsieve.hf.inputs import check_ids, check_no_media
from kvsieve.hf.kinds import growing_layers, layer_kinds
from kvsieve.hf.model.facts import Facts
from kvsieve.hf.model.parallel import ranks_of
from kvsieve.hf.model.weights import active_adapters, adapted_layer
from kvsieve.planning.plans import Plan

# Of a trial whose times are compared.
_ROUNDS = 3


@dataclass(frozen=True)
class DraftModel:
    """A draft model for an attached one.

    Attributes:
        tokenizer: the draft's; None if it shares the model's.
        opened: attaches an empty plan to the draft for a `with` block.
    """

    tokenizer: Any
    opened: Callable[[], AbstractContextManager[AttachedModel]]


class AttachedModel(Unpicklable):
    """A model with a plan attached, used by all drivers.

    Attributes:
        model: of transformers.
        plan: the plan, fully specified.
        config: of the model's decoder.
        decoder: the model's decoder.
        layers: of the decoder.
        num_layers: number of layers.
        kinds: of each of them.
        context: facts about the model that every pass needs.
        facts: facts about the model for evictors.
        engine: computes the tokens after a prompt.
        attached: True while the `with` block runs.
        any_plan: True if prompts may be prefilled under other plans as well, with propagators of their own.
        tokenizer: the model's, or None.
        drafter: the model that chooses a prompt's tokens, for plans that draft.
        open_draft: attaches an empty plan to a model that drafts answers, until this one's block ends.
    """

    _instead = "it is a model in its `with` block; attach the plan where it is to run"

    def __init__(self, model: Any, plan: Plan, decode: str = "auto") -> None:
        self.model = model
        self.plan = plan
        self.attached = False
        self.any_plan = False
        self.tokenizer: Any = None
        self.drafter: DraftModel | None = None
        self.open_draft: Callable[[Any], AttachedModel]
        self._probing = False
        self.config = text_config(model)
        self.decoder: nn.Module = decoder_of(model)
        self.layers: list[nn.Module] = list(layers_of(self.decoder) or ())
        self.num_layers = len(self.layers)
        self.facts = Facts(model)
        self._adapted = adapted_layer(self.decoder)
        self.kinds = layer_kinds(self.config)
        growing = growing_layers(self.kinds)
        tables = self.facts.tables if self.facts.tables.depend else None
        self.context = ModelContext(self.num_layers, growing, self.facts, ranks_of(model, plan), tables)
        divided = tensor_parallel_mesh(model) is not None
        self.engine = Engine(self.decoder, decode, divided, model.get_output_embeddings())

    @property
    def is_composite(self) -> bool:
        """True if the model has other parts than text, such as a vision tower."""
        return self.config is not self.model.config

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the active PEFT adapters."""
        return active_adapters(self._adapted)

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Complete the plan with a tokenizer of transformers; see Plan.for_tokenizer."""
        self.tokenizer = tokenizer
        self.plan = self.plan.for_tokenizer(tokenizer)

    def new_cache(self) -> SieveCache:
        """Make an empty cache for one batch of conversations under this plan."""
        return new_cache(self.decoder, self.config, self._owner())

    def adopt(self, cache: SieveCache) -> SieveCache:
        """Continue a cache of another plan on this model under this one, and return it.

        Entries dropped by the other plan stay dropped. For comparing plans on one prefill, and for continuing under
        other adapters on purpose; such a cache cannot be saved.

        Raises:
            CacheStateError: the cache is of another model.
        """
        if not isinstance(cache, SieveCache):
            raise InputError(f"adopt takes a cache that sieve.new_cache() has made, got {short(cache)}")
        if cache.owner.why_not(self.decoder, cache.owner.plan, cache.owner.adapters) is None:
            forget_scores(cache, self.plan)
            forget_records(cache, self.plan)
            cache.owner = self._owner(adopted=True)
        self.check_cache(cache)
        return cache

    def check_cache(self, cache: Any) -> None:
        """Raise InputError unless this is a cache of kvsieve, CacheStateError for that of another model or plan.

        Also for one prefilled under other PEFT adapters, or left by a call that failed half-way.
        """
        if not isinstance(cache, SieveCache):
            raise InputError(f"cache takes what sieve.new_cache() or an earlier result has, got {short(cache)}")
        cache.check_ready()
        reason = cache.owner.why_not(self.decoder, self.plan, self.adapters)
        if reason is None:
            return
        if cache.num_seen or cache.owner.decoder() is not self.decoder:
            raise CacheStateError(f"the cache {reason}")
        # Nothing has been read into it, so nothing in it is another plan's.
        cache.owner = self._owner()

    def check_call(self, call: dict[str, Any]) -> None:
        """Raise for arguments of the decoder that the plan does not support."""
        if self.decoder.training:
            raise UnsupportedOptionError("the model is in training mode; kvsieve is for inference: call model.eval()")
        if call.get("use_cache") is False:
            raise UnsupportedOptionError("use_cache=False leaves nothing to reduce; leave use_cache unset")
        if call.get("output_attentions") or getattr(self.config, "output_attentions", False):
            raise UnsupportedOptionError("output_attentions=True is not supported: attention weights are never formed")
        ids = call.get("input_ids")
        if ids is not None:
            # A token that was just chosen needs no look, which would make a GPU wait.
            check_ids(ids, self.config.vocab_size, values=ids.device.type == "cpu" or ids.shape[-1] > 1)
        positions = call.get("position_ids")
        if positions is not None and positions.ndim not in (2, 3):
            raise InputError(
                f"position_ids must be [batch, tokens], or [axes, batch, tokens], got shape {tuple(positions.shape)}"
            )

    def feed(
        self,
        cache: SieveCache,
        ids: Tensor,
        mask: Tensor | None,
        request: PassRequest = PLAIN,
        *,
        logits: int = 0,
    ) -> PassResult:
        """Run one pass over new tokens of a cache. All drivers call the model here.

        Args:
            cache: of the conversation.
            ids: int64 [B, L], the new tokens.
            mask: [B, seen + L], 1 for tokens and 0 for padding, of all columns fed so far and the new ones; None
                without padding.
            request: of the driver.
            logits: return those of so many last columns; 0 for none, which skips the output layer.
        """
        device = self.model.device
        ids = ids.to(device)
        before = cache.moment
        several = request.tentative or (request.phase == "decode" and ids.shape[1] > 1)
        if several and self.feeds_one_by_one(cache, request.plan):
            one = functools.partial(self._feed_plainly, cache, request)
            return feed_one_by_one(one, cache, ids, mask, logits, tentative=request.tentative)
        # Weights are looked at with prompts, not with every token of an answer.
        if several:
            self._check_follows(cache, ids.shape[1], ids, answers=True)
        else:
            self.check_tokens(cache, ids.shape[1], ids)
        size = cache.num_seen + ids.shape[1]
        seen = torch.ones(len(ids), size, dtype=torch.long, device=device) if mask is None else mask.long().to(device)
        call: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": None if mask is None else seen,
            "position_ids": _positions(cache, seen),
            CACHE: cache,
            "use_cache": True,
        }
        self.check_call(call)
        undoes_states = request.tentative and cache.has_state
        states = [layer.copied_states() for layer in cache.all_layers] if undoes_states else None
        session = open_session(self.context, self.plan, cache, call, request)
        call = reordered(call, session.order, cache.num_seen, list(call))
        out = self.run_pass(session, call, logits)
        hidden = None if logits or out is None else out[0]
        found = out.logits if logits and out is not None else None
        transaction = None
        if request.tentative:
            assert isinstance(session, AnswerSession)
            transaction = PassTransaction(session, before)
            if states is not None:
                again = functools.partial(self._feed_again, cache, request, ids, mask)
                transaction = StatesTransaction(session, before, states, again)
        return PassResult(hidden, found, session.chosen, cache.turn.record.report, transaction)

    def feeds_one_by_one(self, cache: SieveCache, plan: Plan | None = None) -> bool:
        """Return True if tokens of an answer cannot pass the layers together. plan: of the pass; None for the model's.

        This is the case for recurrent layers that compute several otherwise than one after another, or slowly, and for
        evictors that weigh layers against each other.
        """
        return (plan or self.plan).weighs_layers or (cache.has_state and not self._continues_together)

    def _feed_plainly(
        self, cache: SieveCache, request: PassRequest, ids: Tensor, mask: Tensor | None, logits: int
    ) -> PassResult:
        """Feed tokens of a tentative pass that stay."""
        return self.feed(cache, ids, mask, dataclasses.replace(request, phase="decode", tentative=False), logits=logits)

    def _feed_again(
        self, cache: SieveCache, request: PassRequest, ids: Tensor, mask: Tensor | None, counts: tuple[int, ...]
    ) -> None:
        """Feed the first tokens of each row of a pass that was taken back."""
        most = max(counts)
        ids = ids[:, :most]
        mask = None if mask is None else mask[:, : cache.num_seen + most]
        feed = functools.partial(self._feed_plainly, cache, request)
        if min(counts) == most:
            feed(ids, mask, 0)
            return
        transaction = feed_one_by_one(feed, cache, ids, mask, 0, tentative=True).transaction
        assert transaction is not None
        transaction.accept(counts)

    def run_pass(self, session: Session, call: dict[str, Any], logits: int) -> Any:
        """Call the model, or its decoder without logits; return None for a pass stopped on purpose."""
        session.prepared = True
        try:
            with torch.no_grad():
                return self.model(**call, logits_to_keep=logits) if logits else self.decoder(**call)
        except StopForward:
            return None
        finally:
            if session.prepared:
                cancel_session(session)

    def check_tokens(self, cache: SieveCache, new: int, text: Tensor | None = None) -> None:
        """Raise KvsieveError for tokens that cannot follow those in a cache, or weights that were cast or moved.

        Args:
            cache: of the conversation.
            new: tokens of the pass, per row.
            text: their ids, int64 [B, L], if none may be a placeholder of an image; None to skip that check.
        """
        if new > 1 or cache.turn.reading:
            self.engine.look()
        self._check_follows(cache, new, text)

    def _check_follows(self, cache: SieveCache, new: int, text: Tensor | None, *, answers: bool = False) -> None:
        """Raise KvsieveError for tokens that cannot follow those in a cache. answers: several are an answer's."""
        self._check_continues(cache, new)
        if new > 1:
            cache.turn.check_beams()
        if new > 1 or text is not None:
            self._check_counts_on(cache)
        # An answer may hold the token of an image, as a token like others.
        prompts = not answers and (new > 1 or cache.turn.reading)
        if text is not None and self.is_composite and prompts and (cache.embedded is None or not new):
            check_no_media(text, self.model.config, self.plan.name)

    def _check_continues(self, cache: SieveCache, new: int) -> None:
        """Raise UnsupportedOptionError if `new` tokens cannot follow those in a cache.

        Some models' recurrent layers continue their state for one token at a time only, and reset it with several.
        """
        if new > 1 and cache.num_seen and cache.has_state and not self._probing and not self.continues:
            raise UnsupportedOptionError(
                f"{type(self.model).__name__} forgets its recurrent state when several tokens follow others (its own "
                "code in transformers does): read a prompt in one piece, without chunk=, and a conversation of several "
                "turns anew, with a new cache"
            )

    def _check_counts_on(self, cache: SieveCache) -> None:
        """Raise UnsupportedOptionError if positions of further tokens do not simply count on."""
        if cache.conversation.multi_axis_positions:
            raise UnsupportedOptionError(
                "the conversation holds images, whose tokens have positions on several axes, and only single tokens "
                "can follow: read the whole conversation again, with a new cache and its images"
            )

    @functools.cached_property
    def continues(self) -> bool:
        """True if several tokens may follow others.

        Found by a trial: two tokens after two must equal all four at once, or depend on the states between them.
        """
        ids, request = self._trial
        ends = []
        before = self.new_cache()
        self._probing = True
        try:
            self.feed(before, ids[:, :2], None, request)
            whole = self.feed(self.new_cache(), ids, None, request).hidden
            first = next(index for index, layer in enumerate(before.all_layers) if layer.has_state)
            for changed in (None, "conv_states", "recurrent_states"):
                cache = before.fork()
                layer: StateLayer = cache.layers[first]  # type: ignore[assignment]
                states = [] if changed is None else [*tensors_in(vars(layer)[changed])]
                if changed is not None and not states:
                    continue
                for state in states:
                    state += 1
                hidden = self.feed(cache, ids[:, 2:], None, request).hidden
                assert hidden is not None
                ends.append([hidden, *tensors_in(layer.recurrent_states)])
        finally:
            self._probing = False
        assert whole is not None
        parted = ends[0][0][:, -1].float()
        last = whole[:, -1].float()
        if bool((parted - last).norm() <= 1e-3 * last.norm()):
            return True
        return all(any(not torch.equal(*pair) for pair in zip(ends[0], end, strict=True)) for end in ends[1:])

    @functools.cached_property
    def _continues_together(self) -> bool:
        """True if several tokens after others give what they give one after another, but for rounding, and not slowly.

        Found by a trial: some recurrent layers compute several tokens in chunks of hundreds.
        """
        if not self.continues:
            return False
        ids, request = self._trial
        before = self.new_cache()
        outs: dict[int, Tensor] = {}
        seconds: dict[int, list[float]] = {2: [], 1: []}
        self._probing = True
        try:
            self.feed(before, ids[:, :2], None, request)
            for size in (2, 1) * _ROUNDS:
                cache = before.fork()
                began = time.perf_counter()
                parts = [self.feed(cache, part, None, request).hidden for part in ids[:, 2:].split(size, 1)]
                outs[size] = torch.cat([part for part in parts if part is not None], 1).float()
                # Waits for the device.
                norm = float(outs[size].norm())
                seconds[size].append(time.perf_counter() - began)
        finally:
            self._probing = False
        # Recurrent layers may compute in float32.
        eps = max(torch.finfo(self.model.dtype).eps, torch.finfo(torch.float32).eps)
        alike = float((outs[2] - outs[1]).norm()) <= 64 * eps * norm
        return alike and min(seconds[2]) <= min(seconds[1])

    @property
    def _trial(self) -> tuple[Tensor, PassRequest]:
        """Four tokens, and how they are fed to find out how the model computes."""
        return torch.arange(1, 5, device=self.model.device)[None] % self.config.vocab_size, PassRequest(plan=Plan())

    def _owner(self, adopted: bool = False) -> Owner:
        return Owner(weakref.ref(self.decoder), self.plan, adopted, self.adapters)


def _positions(cache: SieveCache, seen: Tensor) -> Tensor:
    """Return the positions of new tokens, int64 [B, L]. seen: int64 [B, seen + L], 0 for padding."""
    positions = (seen.cumsum(-1) - 1).clamp_min(0)[:, cache.num_seen :]
    shift = cache.conversation.position_shift
    return positions + shift if shift else positions
