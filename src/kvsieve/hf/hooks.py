"""Hooks on the decoder of an attached model: every pass runs as a session, whoever calls the model."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn

from kvsieve.errors import UnsupportedModelError, UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.compat import DynamicCache
from kvsieve.hf.forward import passes
from kvsieve.hf.runtime import AttachedModel


def install(model: AttachedModel, *, hidden: bool) -> list[Any]:
    """Register the hooks of a plan, and return their handles.

    Args:
        model: the attached model.
        hidden: note what enters each layer, for evictors that ask for it.
    """
    decoder, plan = model.decoder, model.plan
    layers = list(decoder.layers)  # type: ignore[arg-type]
    names = list(inspect.signature(decoder.forward).parameters)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        session = passes.current()
        if session is not None and session.prepared:
            session.prepared = False
            return (), kwargs
        _begin_plain_pass(model, kwargs)
        return (), kwargs

    def after(module: nn.Module, args: Any, output: Any) -> None:
        session = passes.current()
        if session is not None:
            passes.close_session(session, finished=output is not None)

    handles = [
        decoder.register_forward_pre_hook(before, with_kwargs=True),
        decoder.register_forward_hook(after, always_call=True),
    ]
    if hidden:
        handles += [layer.register_forward_pre_hook(_note_hidden, with_kwargs=True) for layer in layers]
    if plan.propagate is not None:
        for index in range(plan.propagate.source(len(layers)), len(layers) - 1):
            leave = functools.partial(_leave, index)
            handles.append(layers[index].register_forward_hook(leave, with_kwargs=True))
            handles.append(layers[index + 1].register_forward_pre_hook(_enter_deeper, with_kwargs=True))
    return handles


def _begin_plain_pass(model: AttachedModel, kwargs: dict[str, Any]) -> None:
    """Begin a pass that no driver has begun: of a plain call of the model, or of its `generate`."""
    model.check_call(kwargs)
    cache = kwargs.get("past_key_values")
    if cache is None or _is_generates_own(cache):
        cache = kwargs["past_key_values"] = model.new_cache()
    if not isinstance(cache, SieveCache):
        raise UnsupportedOptionError(
            f"past_key_values is a {type(cache).__name__}, on which {model.plan.name!r} could not run; pass "
            "sieve.new_cache(), or nothing"
        )
    model.check_cache(cache)
    passes.open_session(model.context, model.plan, cache, kwargs)


def _leave(index: int, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    session = passes.current()
    if session is None or session.source is None or index < session.source or session.step.phase != "prefill":
        return None
    if not isinstance(output, tuple):
        return session.leave(index, output, kwargs)
    return (session.leave(index, output[0], kwargs), *output[1:])


def _enter_deeper(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    session = passes.current()
    if session is None or not session.narrowed:
        return None
    return args, {**kwargs, **session.narrowed}


def _note_hidden(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Keep what enters a decoder layer for the evictor that asked for it."""
    session = passes.current()
    if session is not None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            raise UnsupportedModelError(
                f"{type(module).__name__} is not given hidden states [batch, tokens, channels] as its first argument, "
                f"which {session.plan.name!r} needs to see"
            )
        session.hidden = hidden


def _is_generates_own(cache: Any) -> bool:
    """Tell the empty cache that generate makes when it is given none."""
    fresh = type(cache) is DynamicCache and not getattr(cache, "_is_user_defined", False)
    return fresh and cache.get_seq_length() == 0
