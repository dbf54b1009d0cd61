"""Decoding with fixed shapes: a pass is recorded once, as a CUDA graph, and run again for every token, or few of them.

While a plan is attached the decoder's `forward` is replaced on the instance. It runs passes with fixed shapes if
possible (recorded_pass.py) and all others as transformers does, and the turn's record says why. The decoder's hooks,
the output layer and sampling stay outside, so nothing changes for them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from kvsieve.cache.contract import MIN_ROOM
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.compat import CACHE, CACHE_NAMES
from kvsieve.hf.decode.engines import check_engine
from kvsieve.hf.decode.fused_decoder import FusedDecoder, by_default
from kvsieve.hf.decode.recorded_pass import RecordedPass, check_plan, check_several
from kvsieve.hf.decode.recorders import RECORDERS, Refused, Run
from kvsieve.hf.forward import passes as forward
from kvsieve.hf.forward.rows import RowsSession
from kvsieve.hf.forward.session import Session
from kvsieve.hf.forward.transaction import AnswerSession
from kvsieve.hf.model.weights import check_forms, forms_of

# Tokens that room is made for at a time; an answer that is longer is recorded again.
_ROOM = 4096
# Recordings per turn that need no more passes than this each.
_PATIENCE = 3
_LEAST = 8
# Most numbers of tokens for which a cache has a recording.
_SHAPES = 6
_INPUTS = ("input_ids", "inputs_embeds", "position_ids", "cache_position")

_log = logging.getLogger(__name__)


class Engine:
    """Runs the decoder's passes while a plan is attached. asked: "eager", "fused" or "graph".

    refusal: reason against running any pass as requested, or None. expected: numbers of tokens that will come again:
    a pass over so many is recorded at once, others when they come for the second time.

    Args:
        decoder: of a model.
        asked: as in `attach`.
        divided: True if heads are divided among processes.
        output: the model's output layer.
    """

    def __init__(self, decoder: nn.Module, asked: str, divided: bool = False, output: nn.Module | None = None) -> None:
        check_engine(asked, "decode")
        devices = {parameter.device for parameter in decoder.parameters()}
        device = next(iter(devices), torch.device("cpu"))
        self._fused: FusedDecoder | None = None
        if asked == "auto":
            asked, self._fused = by_default(decoder, output, alone=not divided and len(devices) == 1)
        self.asked = asked
        self.decoder = decoder
        self.refusal: str | None = None
        # By the number of tokens.
        self._known: weakref.WeakKeyDictionary[SieveCache, dict[int, tuple[RecordedPass, Run]]] = (
            weakref.WeakKeyDictionary()
        )
        self._sizes: weakref.WeakKeyDictionary[SieveCache, set[int]] = weakref.WeakKeyDictionary()
        self.expected: set[int] = set()
        self._output: type[ModelOutput] | str = "the first pass of the decoder is run eagerly"
        self._own = decoder.__dict__.get("forward")
        self._forward = decoder.forward
        self._names = list(inspect.signature(decoder.forward).parameters)
        self._forms = forms_of(decoder)
        if asked == "eager" or self._fused is not None:
            return
        try:
            if divided or len(devices) > 1:
                raise Refused("the model lies on several devices")
            if asked == "fused":
                self._fused = FusedDecoder(decoder, output)
                return
            if "position_ids" not in self._names:
                raise Refused(f"{type(decoder).__name__} takes no position_ids")
            self._record = RECORDERS[asked](device)
        except (Refused, ValueError) as refused:
            self.refusal = str(refused)

    @property
    def fused(self) -> tuple[int, int, int]:
        """Modules with compiled operations, linear layers with compiled products, and bytes of copies of weights."""
        one = self._fused
        return (0, 0, 0) if one is None else (one.modules, one.linear_layers, one.narrow_bytes)

    @property
    def records(self) -> bool:
        """True if passes are recorded, as far as nothing about them is against it."""
        return self.asked in RECORDERS and self.refusal is None

    def look(self) -> None:
        """Look for weights that were written to since they were copied, in ways that torch does not count.

        Raises:
            KvsieveError: weights were cast or moved.
        """
        check_forms(self.decoder, self._forms)
        if self._fused is not None:
            self._fused.look()

    def install(self, harmless: Iterable[int] = ()) -> None:
        """Replace the decoder's forward, if that is useful; `remove` restores it. harmless: see `FusedLayers`."""
        if self._fused is not None:
            self._fused.install(harmless)
        if self.records:
            self.decoder.forward = functools.wraps(self._forward)(functools.partial(self._dispatch))

    def remove(self) -> None:
        """Restore the decoder, and free recordings."""
        self._known.clear()
        self._sizes.clear()
        if self._fused is not None:
            self._fused.remove()
        if "forward" in self.decoder.__dict__:
            del self.decoder.forward
        if self._own is not None:
            self.decoder.forward = self._own

    def _dispatch(self, *args: Any, **kwargs: Any) -> Any:
        session = forward.current()
        if session is None or session.step.phase != "decode" or isinstance(session, RowsSession):
            return self._eagerly(*args, **kwargs)
        passes = session.cache.turn.record.passes
        try:
            output = self._fixed(session, {**dict(zip(self._names, args, strict=False)), **kwargs})
        except Refused as refused:
            if passes.reason != str(refused):
                _log.debug("a token is generated eagerly: %s", refused)
            passes.eager = passes.eager + 1
            passes.reason = str(refused)
            return self._eagerly(*args, **kwargs)
        passes.fixed += 1
        return output

    def _eagerly(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        if not isinstance(output, ModelOutput):
            self._output = "the decoder returns a tuple"
        elif set(output) <= {"last_hidden_state", CACHE}:
            self._output = type(output)
        else:
            self._output = f"the decoder returns {', '.join(output)}"
        return output

    def _fixed(self, session: Session, kwargs: dict[str, Any]) -> ModelOutput:
        if self.refusal is not None:
            raise Refused(self.refusal)
        self._check(session, kwargs)
        inputs, options = self._arguments(session, kwargs)
        cache = session.cache
        size = session.tokens.size
        recordings = self._known.setdefault(cache, {})
        recording, run = recordings.get(size, (None, None))
        if recording is None or not _alike(recording, inputs, options) or not recording.fits(cache):
            # Its buffers may be the ones that are about to grow.
            recordings.pop(size, None)
            recording = run = None
            self._check_size(cache, size)
            recording, run = self._made(session, inputs, options)
        assert run is not None
        for name, tensor in inputs.items():
            recording.inputs[name].copy_(tensor)
        with self._may_fail(cache), recording.activate():
            hidden = run().clone()
        recording.finish(cache, session.counts if isinstance(session, AnswerSession) else [session.reads])
        return self._output(last_hidden_state=hidden, **{CACHE: cache})  # type: ignore[operator]

    @contextlib.contextmanager
    def _may_fail(self, cache: SieveCache) -> Iterator[None]:
        """Run everything eagerly from now on if the decoder cannot be recorded or replayed."""
        try:
            yield
        except Exception as error:
            self._known.clear()
            # Readers' metadata may be half written.
            for layer in cache.sieve_layers.values():
                layer.store.derived = {}
            what = str(error).strip().partition("\n")[0] or type(error).__name__
            self.refusal = f"the decoder cannot be recorded ({self.asked}): {what}"
            _log.info("tokens are generated eagerly from here on: %s", self.refusal)
            raise Refused(self.refusal) from error

    def _check(self, session: Session, kwargs: dict[str, Any]) -> None:
        """Raise Refused for a pass that fixed shapes do not support."""
        cache = session.cache
        config = getattr(self.decoder, "config", None)
        if session.tokens.valid is not None:
            raise Refused("the new token is padding in some row")
        if len(cache.sieve_layers) < len(cache.layers):
            raise Refused("layers that are not full attention: sliding windows, recurrent state, shared KV")
        if any(layer.is_latent for layer in cache.all_layers):
            raise Refused("latent attention, whose queries kvsieve makes of the model's own")
        if cache.turn.reordered:
            raise Refused("rows change places between tokens (beams)")
        if session.request.plan not in (None, cache.owner.plan):
            raise Refused("a pass of another plan than the cache's")
        if isinstance(session, AnswerSession):
            check_several(session)
        check_plan(session)
        if torch.is_grad_enabled() or torch.is_autocast_enabled(session.tokens.token_index.device.type):
            raise Refused("gradients or autocast are on; use torch.no_grad() and a model in its own dtype")
        for name in ("output_hidden_states", "output_attentions"):
            value = kwargs.get(name)
            if value if value is not None else getattr(config, name, False):
                raise Refused(f"{name} is asked for")
        if isinstance(self._output, str):
            raise Refused(self._output)

    def _check_size(self, cache: SieveCache, size: int) -> None:
        """Raise Refused for a number of tokens that is not worth a recording."""
        sizes = self._sizes.setdefault(cache, set())
        if size > 1 and size not in sizes | self.expected:
            sizes.add(size)
            raise Refused(f"a first pass of {size} tokens is run eagerly")
        if len(self._known[cache]) == _SHAPES:
            raise Refused(f"passes of {_SHAPES} other numbers of tokens are recorded")

    @staticmethod
    def _arguments(session: Session, kwargs: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the decoder's arguments: tensors that change from token to token, and constant others."""
        left_out = ("attention_mask", *CACHE_NAMES)
        arguments = {name: value for name, value in kwargs.items() if value is not None and name not in left_out}
        inputs = {name: arguments.pop(name) for name in _INPUTS if name in arguments}
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                raise Refused(f"the decoder is given a tensor {name!r}")
        if "position_ids" not in inputs:
            if session.cache.conversation.mask is not None:
                raise Refused("rows are padded and no position_ids are given")
            inputs["position_ids"] = session.tokens.token_index
        return inputs, arguments

    def _made(self, session: Session, inputs: dict[str, Tensor], options: dict[str, Any]) -> tuple[RecordedPass, Run]:
        """Record a pass on the session's cache, which only gains room."""
        cache = session.cache
        passes = session.cache.turn.record.passes
        began = time.perf_counter()
        recordings = self._known[cache]
        if passes.captures - len(recordings) >= _PATIENCE and passes.fixed < _LEAST * passes.captures:
            raise Refused(f"the buffers change too often: {passes.captures} recordings served {passes.fixed} tokens")
        _make_room(session, first=not recordings)
        static = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in inputs.items()}
        recording = RecordedPass(session, self._forward, static, options)
        reason = recording.prepare(cache)
        if reason is not None:
            raise Refused(reason)
        accumulators = [(part, part.clone()) for part in recording.accumulators()]
        with self._may_fail(cache), recording.activate():
            run = self._record(recording.run)
        for part, before in accumulators:
            part.copy_(before)
        recording.start_over(cache)
        for size in [size for size, (other, _) in recordings.items() if not other.fits(cache)]:
            del recordings[size]
        # A failure has forgotten all of them.
        self._known.setdefault(cache, recordings)[session.tokens.size] = recording, run
        passes.captures += 1
        passes.capture_s += time.perf_counter() - began
        return recording, run


def _alike(made: RecordedPass, inputs: dict[str, Tensor], options: dict[str, Any]) -> bool:
    """Return True if a pass was recorded for such arguments."""
    if inputs.keys() != made.inputs.keys() or options.keys() != made.options.keys():
        return False
    for name, tensor in inputs.items():
        if tensor.shape != made.inputs[name].shape or tensor.dtype != made.inputs[name].dtype:
            return False
    if torch.is_inference_mode_enabled() != made.values.is_inference():
        return False
    plain = (bool, int, float, str)
    return all(
        value is options[name] or (isinstance(value, plain) and value == options[name])
        for name, value in made.options.items()
    )


def _make_room(session: Session, *, first: bool) -> None:
    """Reserve room for the expected tokens. Evictors that act while decoding keep small buffers.

    first: no other recording uses the buffers.
    """
    cache = session.cache
    acts = session.when.steps is not None
    expected = cache.turn.new_tokens - 1 - cache.turn.decoded
    for layer in cache.sieve_layers.values():
        store = layer.store
        some = max(MIN_ROOM, store.size // store.stride // 8)
        # Drafts behind the last expected token are stored, too.
        tokens = min(expected + MIN_ROOM, some if acts else _ROOM) if expected > 0 else some
        if (first and not acts) or not store.has_room(session.tokens.size):
            store.make_room(max(tokens, session.tokens.size))
