"""Hooks on the decoder of an attached model: every pass runs as a session, with any caller."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from kvsieve.cache.tensors import tensors_in
from kvsieve.errors import UnsupportedModelError, UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.compat import CACHE_NAMES, DynamicCache, cache_argument, take_cache
from kvsieve.hf.forward import passes
from kvsieve.hf.forward.compact import reordered, restored
from kvsieve.hf.forward.embedding import end_if_embedding
from kvsieve.hf.forward.own_generate import in_generate
from kvsieve.hf.forward.resume import resumed
from kvsieve.hf.forward.tables import make_tables
from kvsieve.hf.runtime import AttachedModel
from kvsieve.kernels.cpu import cores

_ABOUT_TOKENS = frozenset(
    ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position", "labels", *CACHE_NAMES)
)
# Arguments of the call of a composite model that runs in this context.
_CALL: ContextVar[dict[str, Any] | None] = ContextVar("kvsieve_call", default=None)


def install(model: AttachedModel, *, hidden: bool, leaving: Sequence[int] = (), any_plan: bool = False) -> list[Any]:
    """Register the hooks of a plan, and return their handles.

    Args:
        model: the attached model.
        hidden: record each layer's input, for evictors that need it.
        leaving: layers that call ``PassRequest.on_leave``.
        any_plan: register the hooks for any plan, besides the attached one; see attach.under.
    """
    decoder = model.decoder
    plan = model.plan
    layers = model.layers
    names = list(inspect.signature(decoder.forward).parameters)
    taken_as = cache_argument(decoder)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        end_if_embedding(kwargs)
        session = passes.current()
        if session is not None and session.prepared:
            session.prepared = False
            return (), _with_images(session, kwargs)
        session = _begin_plain_pass(model, kwargs, taken_as)
        return (), reordered(kwargs, session.order, session.step.start, names)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        session = passes.current()
        if session is None:
            return None
        passes.close_session(session, finished=output is not None)
        return None if output is None or session.order is None else _in_order(output, session.order)

    handles: list[Any] = []
    for part in (model.model, decoder):
        # Before those that may raise; after a pass torch calls both in any case.
        handles.append(part.register_forward_pre_hook(_take_cores))
        handles.append(part.register_forward_hook(_give_cores_back, always_call=True))
    if model.is_composite:
        handles += [
            model.model.register_forward_pre_hook(_note_call, with_kwargs=True),
            model.model.register_forward_hook(_forget_call, always_call=True),
        ]
    tables = model.context.tables
    if tables is not None and tables.module is not None:
        # Before those that record its output.
        hook = functools.partial(make_tables, tables)
        handles.append(tables.module.register_forward_hook(hook, with_kwargs=True))
    handles += [
        decoder.register_forward_pre_hook(before, with_kwargs=True),
        decoder.register_forward_hook(after, always_call=True),
    ]
    if hidden or any_plan:
        handles += [layer.register_forward_pre_hook(_note_hidden, with_kwargs=True) for layer in layers]
    for index in leaving:
        hook = functools.partial(_tell_leaving, index, _arguments_of(layers[index]))
        handles.append(layers[index].register_forward_hook(hook, with_kwargs=True))
    if any_plan:
        handles += propagation_hooks(model, 0)
    elif plan.propagate is not None:
        handles += propagation_hooks(model, plan.propagate.first_layer(model.num_layers, model.context.layers))
    elif leaving:
        handles += _argument_hooks(model)
    return handles


def _in_order(output: Any, order: Tensor) -> Any:
    """Return the decoder's output with all of a pass's hidden states in the caller's order."""
    for name, hidden in output.items() if isinstance(output, Mapping) else ():
        if isinstance(hidden, Tensor) and hidden.ndim == 3 and hidden.shape[1] == order.shape[1]:
            output[name] = restored(hidden, order)
        elif name == "hidden_states" and hidden is not None:
            output[name] = tuple(restored(e, order) if e.shape[1] == order.shape[1] else e for e in hidden)
    if isinstance(output, tuple) and output[0].shape[1] == order.shape[1]:
        output = (restored(output[0], order), *output[1:])
    return output


def _begin_plain_pass(model: AttachedModel, kwargs: dict[str, Any], taken_as: str) -> passes.Session:
    """Begin a pass without a driver: of a plain call of the model, or of its `generate`.

    taken_as: the decoder's name of the cache argument, added to kwargs.
    """
    outer = _CALL.get()
    # A composite model embeds the tokens itself, and may have made masks of the mask.
    outer_inputs = {} if outer is None else {name: outer.get(name) for name in ("attention_mask", "input_ids")}
    model.check_call({**kwargs, **outer_inputs})
    cache = take_cache(kwargs)
    if cache is None or (in_generate() and type(cache) is DynamicCache and cache.get_seq_length() == 0):
        # generate, given no cache, has made one that is empty.
        cache = resumed(kwargs, outer or {}) or model.new_cache()
    refuse_foreign(cache, model.plan.name)
    kwargs[taken_as] = cache
    model.check_cache(cache)
    fed = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    outer_ids = outer_inputs.pop("input_ids", None)
    several = fed is not None and fed.shape[1] > 1
    media = any(_is_media(name, value) for name, value in (outer or {}).items())
    if several and cache.num_seen and media:
        raise UnsupportedOptionError(
            "images and the like are read with the first prompt of a conversation, in one piece: leave chunk= out, and "
            "begin a later turn that brings some with a new cache and the whole conversation"
        )
    text = (outer or {}).get("input_ids") if several and not media else None
    model.check_tokens(cache, 0 if fed is None else fed.shape[1], text)
    token_ids = None if outer_ids is None or fed is None else outer_ids[:, -fed.shape[1] :]
    session = passes.open_session(model.context, model.plan, cache, {**kwargs, **outer_inputs, "token_ids": token_ids})
    positions = kwargs.get("position_ids")
    if cache.conversation.parallel is not None:
        # Its caller does not know where the text after the documents is.
        positions = session.tokens.token_index if positions is None else positions
        positions = kwargs["position_ids"] = positions + cache.conversation.position_shift
    if several and positions is not None and positions.ndim == 3:
        if bool((positions != positions[:1]).any()):
            session.cache.conversation.multi_axis_positions = True
        else:
            # As for earlier chunks, which came without the outer model.
            kwargs["position_ids"] = positions[0]
    if session.order is not None and media:
        passes.cancel_session(session)
        raise UnsupportedOptionError(
            "attention_mask hides tokens behind others, and the prompt brings images or the like: leave the hidden "
            "tokens out of the prompt"
        )
    return session


def _with_images(session: passes.Session, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a pass of ours, with its part of an embedded prompt in place of token ids."""
    embedded = session.cache.embedded
    if embedded is None:
        return kwargs
    session.cache.conversation.position_shift = embedded.shift_after(session.step.start + session.step.num_new)
    return {**kwargs, "input_ids": None, **embedded.part(session.step.start, session.step.num_new)}


def propagation_hooks(model: AttachedModel, source: int) -> list[Any]:
    """Register the hooks of prefills under a propagator, and return their handles.

    Args:
        model: the attached model, without such hooks.
        source: first layer after which tokens may be dropped; -1 for before the first layer.
    """
    layers = model.layers
    handles = _argument_hooks(model)
    if source < 0:
        bound = functools.partial(_enter_first, _arguments_of(layers[0]))
        handles.append(layers[0].register_forward_pre_hook(bound, with_kwargs=True))
    for index in range(max(source, 0), len(layers) - 1):
        for layer, at, hook in ((layers[index], index, _leave), (layers[index + 1], index + 1, _enter_deeper)):
            bound = functools.partial(hook, at, _arguments_of(layer))
            register = layer.register_forward_hook if hook is _leave else layer.register_forward_pre_hook
            handles.append(register(bound, with_kwargs=True))
    if not hasattr(model.decoder, "layers"):
        # Older decoders give their output the shape of their input.
        handles.append(layers[-1].register_forward_hook(_widen))
    return handles


def _argument_hooks(model: AttachedModel) -> list[Any]:
    """Register hooks that record the layers' per-token arguments."""
    return [part.register_forward_hook(_note_made) for part in _outside(model)]


def _outside(model: AttachedModel) -> list[nn.Module]:
    """List the decoder's modules outside its layers, which make their arguments."""
    inside = {id(module) for layer in model.layers for module in layer.modules()}
    # Embedded tokens are hidden states; a composite model makes them outside its decoder.
    inside |= {id(model.decoder), *(id(module) for module in model.model.get_input_embeddings().modules())}
    return [module for module in model.decoder.modules() if id(module) not in inside]


def _arguments_of(layer: nn.Module) -> list[str]:
    """Return the parameters of a layer after hidden states, which come first."""
    return list(inspect.signature(layer.forward).parameters)[1:]


def _take_cores(module: nn.Module, args: Any) -> None:
    cores.begin()


def _give_cores_back(module: nn.Module, args: Any, output: Any) -> None:
    cores.end()


def _widen(module: nn.Module, args: Any, output: Any) -> Any:
    """Insert zeros for the tokens that were dropped before the last layer, before the others."""
    session = passes.current()
    if session is None or not session.moved:
        return None
    hidden = output[0] if isinstance(output, tuple) else output
    hidden = nn.functional.pad(hidden, (0, 0, session.step.num_new - hidden.shape[1], 0))
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _note_made(module: nn.Module, args: Any, output: Any) -> None:
    """Record the output of a module outside the layers, such as rotary tables."""
    session = passes.current()
    if session is None or session.step.phase != "prefill":
        return
    if session.source is not None or session.request.on_leave is not None:
        session.arguments.note(output)


def _note_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record the arguments of a composite model; its decoder gets them in another form."""
    _CALL.set({**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs})


def _is_media(name: str, value: Any) -> bool:
    """Return True for an argument with images or the like, False for those about tokens."""
    if name in _ABOUT_TOKENS or name.endswith("token_type_ids"):
        return False
    return any(True for _ in tensors_in(dict(value) if isinstance(value, Mapping) else value))


def _forget_call(module: nn.Module, args: Any, output: Any) -> None:
    _CALL.set(None)


def _leave(index: int, names: list[str], module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    session = passes.current()
    if session is None or session.source is None or index < session.source or session.step.phase != "prefill":
        return None
    hidden, arguments = _leaving(names, args, kwargs, output)
    hidden = session.leave(index, hidden, arguments)
    return (hidden, *session.arguments.moved(output[1:])) if isinstance(output, tuple) else hidden


def _tell_leaving(
    index: int, names: list[str], module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
) -> None:
    session = passes.current()
    if session is None or session.request.on_leave is None:
        return
    hidden, layer_arguments = _leaving(names, args, kwargs, output)
    # Another layer's arguments are none of this one's.
    arguments = dataclasses.replace(session.arguments, noted=list(session.arguments.noted))
    arguments.note_given(layer_arguments)
    session.request.on_leave(index, (hidden.clone(), *arguments.noted))


def _leaving(names: list[str], args: Any, kwargs: dict[str, Any], output: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the hidden states that leave a layer, and its arguments.

    Further outputs for the next layer follow its tokens: they are among the arguments.
    """
    arguments = _by_name(names, args, kwargs)[1]
    return (output[0], {**arguments, "": output[1:]}) if isinstance(output, tuple) else (output, arguments)


def _enter_first(names: list[str], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Drop tokens before the first layer."""
    session = passes.current()
    if session is None or session.source is None or session.step.phase != "prefill":
        return None
    hidden, arguments = _by_name(names, args, kwargs)
    entering = hidden[0] if hidden else arguments.pop("hidden_states")
    return (session.leave(session.source, entering, arguments),), session.enter(0, arguments, names)


def _enter_deeper(index: int, names: list[str], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    session = passes.current()
    if session is None or not session.moved:
        return None
    hidden, arguments = _by_name(names, args, kwargs)
    return hidden, session.enter(index, arguments, names)


def _by_name(names: list[str], args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Separate a layer's hidden states, () where they are given by name, from its other arguments, by name."""
    return args[:1], {**dict(zip(names, args[1:], strict=False)), **kwargs}


def _note_hidden(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Keep the input of a decoder layer for the evictor that needs it."""
    session = passes.current()
    if session is not None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            raise UnsupportedModelError(
                f"{type(module).__name__} is not given hidden states [batch, tokens, channels] as its first argument, "
                f"which {session.plan.name!r} needs to see"
            )
        session.hidden = hidden


def refuse_foreign(cache: Any, name: str) -> None:
    """Raise UnsupportedOptionError for a cache that is not kvsieve's. name: of the plan."""
    if not isinstance(cache, SieveCache):
        raise UnsupportedOptionError(
            f"the cache given is a {type(cache).__name__}, on which {name!r} could not run; pass sieve.new_cache(), or "
            "nothing"
        )
