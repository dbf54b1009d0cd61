"""Attach a plan to a model, and leave the model as it was found."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from kvsieve.errors import (
    CacheStateError,
    InputError,
    KvsieveError,
    KvsieveWarning,
    NotAttachedError,
    UnsupportedModelError,
    UnsupportedOptionError,
    short,
)
from kvsieve.hf.cache.cache import Owner, SieveCache
from kvsieve.hf.chat.chat import Chat
from kvsieve.hf.compat import DynamicCache, attention_of, check_version, tensor_parallel_mesh, text_config
from kvsieve.hf.decode.engine import Engine
from kvsieve.hf.forward import attention
from kvsieve.hf.forward import session as sessions
from kvsieve.hf.generate.generate import GenerateResult, Stats, generate, note_cache, with_stats
from kvsieve.hf.inputs import check_ids, check_path, check_tokenizer, prompt_of
from kvsieve.hf.model.facts import Facts
from kvsieve.hf.model.parallel import ranks_of
from kvsieve.hf.model.support import check_model
from kvsieve.hf.persist.saved import Saved, load_cache, save_cache
from kvsieve.hf.prompt.constraints import Wishes
from kvsieve.hf.prompt.read import read_prompt
from kvsieve.plans import Plan

_log = logging.getLogger(__name__)


class Sieve:
    """A model with a plan attached. Made by `attach`.

    last_stats: of the last generate call, also of a plain ``model.generate`` or a pipeline inside the block (whose
    peak memory is not measured); None before the first, and after one that failed.
    """

    def __init__(self, model: Any, plan: Plan, decode: str = "auto") -> None:
        self.model = model
        self.own_generate: Callable[..., Any] = model.generate
        self.last_stats: Stats | None = None
        self.plan = plan
        # Whether the `with` block is running.
        self.attached = False
        self.config = text_config(model)
        self.decoder: nn.Module = model.get_decoder()
        self.num_layers = len(self.decoder.layers)  # type: ignore[arg-type]
        self.source = plan.propagate.source(self.num_layers) if plan.propagate is not None else None
        self.facts = Facts(model)
        self.ranks = ranks_of(model, plan)
        self.engine = Engine(self.decoder, decode, divided=tensor_parallel_mesh(model) is not None)

    def __repr__(self) -> str:
        return (
            f"<Sieve {type(self.model).__name__}, {self.num_layers} layers, decode {self.engine.asked}, {self.plan!r}>"
        )

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Let the plan take from a tokenizer of transformers what it lacks of one; see Plan.for_tokenizer."""
        self.plan = self.plan.for_tokenizer(tokenizer)

    def new_cache(self) -> SieveCache:
        """An empty cache for one batch of conversations under this plan."""
        return SieveCache(self.config, self._owner())

    def _owner(self, adopted: bool = False) -> Owner:
        return Owner(weakref.ref(self.decoder), self.plan, adopted)

    def adopt(self, cache: SieveCache) -> SieveCache:
        """Let a cache that another plan has read on this model go on under this one, and return it.

        What the other plan dropped stays dropped. For comparing plans on one reading; such a cache is not saved.
        Raises CacheStateError for a cache of another model.
        """
        if not isinstance(cache, SieveCache):
            raise InputError(f"adopt takes a cache that sieve.new_cache() has made, got {short(cache)}")
        if cache.owner.why_not(self.decoder, cache.owner.plan) is None:
            cache.owner = self._owner(adopted=True)
        self.check_cache(cache)
        return cache

    def check_cache(self, cache: Any) -> None:
        """Raise InputError for what is no cache of kvsieve, CacheStateError for that of another model or plan."""
        if not isinstance(cache, SieveCache):
            raise InputError(f"cache takes what sieve.new_cache() or an earlier result has, got {short(cache)}")
        reason = cache.owner.why_not(self.decoder, self.plan)
        if reason is None:
            return
        if cache.num_seen or cache.in_flight or cache.owner.decoder() is not self.decoder:
            raise CacheStateError(f"the cache {reason}")
        # Nothing has been read into it, so nothing in it is another plan's.
        cache.owner = self._owner()

    def _check_attached(self) -> None:
        if not self.attached:
            raise CacheStateError(
                f"the `with` block that attached {self.plan.name!r} has ended, so the model runs without it: attach "
                "the plan again (with kvsieve.attach(model, plan) as sieve: ...); caches of the same plan go on there"
            )

    def prefill(
        self,
        input_ids: Tensor | Mapping[str, Any],
        attention_mask: Tensor | None = None,
        *,
        cache: SieveCache | None = None,
        chunk: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        protect: Sequence[Any] | None = None,
        quotas: Sequence[Any] | None = None,
        reduce: bool = True,
    ) -> SieveCache:
        """Read a prompt, apply the plan to it and return the cache, ready for a next turn.

        input_ids: int64 [B, N], left-padded, or what ``tokenizer(..., return_tensors="pt")`` returned, mask included;
        with a used `cache`, the whole conversation, of which only what is new is read. attention_mask: [B, N], 1 for
        tokens and 0 for padding; None when nothing new is padding. cache: of this plan on this model; None for a new
        one.
        chunk: tokens per forward pass, None for all at once. progress: called with (tokens read, tokens in all).

        protect: spans of the conversation that are never evicted, ``[(0, 40), (100, 120)]``: half-open, counted in a
        row's true tokens, one list for all rows or one per row. quotas: spans of which so many entries must stay, the
        best of each per layer and head, ``[((0, 40), 10), ((40, 90), "20%")]``. Both are counted in the budget and hold
        for as long as the cache is used. reduce: False keeps this turn's prompt whole: the plan does not act on it.

        Raises InputError for an empty, too long or wrongly padded prompt, for spans outside it, and for more than the
        budget allows; PlanError under a plan that needs a tokenizer and has none (see `attach`); CacheStateError for a
        cache of another plan or model, and after the `with` block.
        """
        self._check_attached()
        input_ids, attention_mask = prompt_of(input_ids, attention_mask)
        cache = self.new_cache() if cache is None else cache
        wishes = Wishes(protect, quotas, None, reduce)
        with sessions.closing():
            read_prompt(
                self, input_ids, attention_mask, cache, chunk=chunk, progress=progress, leave_last=False, wishes=wishes
            )
        return cache

    def generate(
        self,
        input_ids: Tensor | Mapping[str, Any],
        attention_mask: Tensor | None = None,
        *,
        cache: SieveCache | None = None,
        chunk: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        protect: Sequence[Any] | None = None,
        quotas: Sequence[Any] | None = None,
        question: int | None = None,
        reduce: bool = True,
        **options: Any,
    ) -> GenerateResult:
        """``model.generate`` under the plan, with statistics of what really happened.

        input_ids, attention_mask, cache, chunk, progress, protect, quotas, reduce: as for `prefill`; further `options`
        are generate's own (sampling, beams, num_return_sequences, stop strings, streamers ...).

        question: the last so many tokens are a question that the plan is not to see: what comes before them is read and
        reduced, then they are read, attend to what is left, and are kept whole.

        Returns a GenerateResult: `.sequences` int64 [B, N + new], `.stats`, `.cache`, and generate's own `.output`.
        Raises InputError for a prompt, UnsupportedOptionError for an option that cannot be honoured, PlanError under a
        plan that needs a tokenizer and has none (see `attach`; generate's own option `tokenizer` is one as well),
        CacheStateError for a cache of another plan or model, and after the `with` block.
        """
        self._check_attached()
        input_ids, attention_mask = prompt_of(input_ids, attention_mask)
        options["wishes"] = Wishes(protect, quotas, question, reduce)
        if options.get("tokenizer") is not None:
            self.use_tokenizer(options["tokenizer"])
        with sessions.closing():
            return generate(self, input_ids, attention_mask, cache, chunk=chunk, progress=progress, **options)

    def save(
        self,
        cache: SieveCache,
        path: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        ids: Tensor | None = None,
        extra: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        """Write a cache of this sieve to one file (safetensors), which `load` reads; docs/saved_caches.md.

        tokenizer: its vocabulary is then checked on loading. ids: int64 [B, N], the conversation's tokens, to go on
        with. extra: anything JSON can hold. On any failure what was at `path` is untouched. A file there that kvsieve
        did not save is replaced with force=True only.

        Raises CacheStateError while a prompt is half-read, InputError for ids or extra that do not fit and a path where
        another file is, CacheFileError for what cannot be saved or written.
        """
        check_path(path)
        check_tokenizer(tokenizer)
        save_cache(path, self, cache, tokenizer=tokenizer, ids=ids, extra=extra, force=force)

    def load(self, path: str | os.PathLike[str], *, tokenizer: Any = None) -> Saved:
        """What `save` wrote: `.cache` on the model's device, to go on with; `.ids`, `.extra`.

        Raises CacheFileError for a file that is damaged or of another format, and for one that was made with another
        model, dtype, tokenizer (where both are known) or plan.
        """
        check_path(path)
        check_tokenizer(tokenizer)
        return load_cache(path, self, tokenizer=tokenizer)

    def chat(
        self,
        tokenizer: Any,
        system: str | None = None,
        *,
        load: str | os.PathLike[str] | None = None,
        max_new_tokens: int = 512,
        chunk: int | None = 1024,
        **options: Any,
    ) -> Chat:
        """A conversation on one cache: ``chat.ask(message)``, ``chat.stream(message)``, ``chat.messages``.

        tokenizer: with a chat template. system: the system prompt. load: a file that ``chat.save(path)`` wrote, to go
        on with. max_new_tokens: longest answer; where the model's context ends, answers are shorter. chunk: prompt
        tokens per forward pass. options: of `generate`, for every turn; answers are greedy unless these say otherwise.

        Raises InputError for a tokenizer without chat template, UnsupportedOptionError for beams and several answers.
        """
        self._check_attached()
        self.use_tokenizer(tokenizer)
        return Chat(self, tokenizer, system, load=load, max_new_tokens=max_new_tokens, chunk=chunk, **options)


class Attachment(contextlib.AbstractContextManager[Sieve]):
    """What `attach` returns. Entered by ``with``, once, it gives the Sieve; before that nothing is attached."""

    def __init__(self, block: contextlib.AbstractContextManager[Sieve]) -> None:
        self._block = block
        self._entered = False

    def __enter__(self) -> Sieve:
        if self._entered:
            raise KvsieveError("this attach(...) was entered before; call attach(...) again for another block")
        self._entered = True
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._block.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotAttachedError(
            f"attach(...) has no {name}, the sieve that `with` gives may have: write `with kvsieve.attach(model, plan) "
            f"as sieve:` and use sieve.{name} in that block; over several cells of a notebook, `stack = "
            "contextlib.ExitStack()`, `sieve = stack.enter_context(kvsieve.attach(model, plan))` and, at the end, "
            "`stack.close()`"
        )

    def __repr__(self) -> str:
        return "<attach(...): enter it with `with kvsieve.attach(model, plan) as sieve:`>"


def attach(model: Any, plan: Plan, *, decode: str = "auto", tokenizer: Any = None) -> Attachment:
    """Run `model` under `plan` inside the with-block; on exit, also after an error, the model is as it was found.

    model: a causal language model of transformers, unmodified. Inside the block ``sieve.generate`` gives statistics;
    plain ``model.generate(...)`` and ``model(...)`` follow the plan too, with a cache of their own.

    decode: how tokens after a prompt are computed: "eager" as transformers does; "graph" by a CUDA graph; "compile" by
    torch.compile, which takes a minute for each new size of the stores; "packed", on a CPU in bfloat16, with the
    decoder's weights once more in the form its matrix products want (their memory again, faster at once); "auto" by a
    graph on CUDA, else eagerly. What cannot be run so is run eagerly, and ``stats.decoding`` says why.

    tokenizer: the model's, for plans that feed texts of their own (`kvzip`, which asks the model to repeat its prompt;
    ``sieve.chat(tokenizer)`` serves as well), and for parameters that depend on how it splits digits.

    Parameters of a named method that were not given are settled here (Plan.for_model): ``sieve.plan`` has them, and
    ``stats.notes`` say where they are from.

    Raises UnsupportedModelError when the plan cannot run on the model, PlanError when a layer lies outside it or it
    cannot run where heads are divided among processes (docs/parallel.md), and KvsieveError when the model has a plan
    attached already; all of them when the block is entered.
    """
    return Attachment(_attached(model, plan, decode, tokenizer))


@contextlib.contextmanager
def _attached(model: Any, plan: Plan, decode: str, tokenizer: Any) -> Iterator[Sieve]:
    if not isinstance(plan, Plan):
        raise KvsieveError(f"attach takes a Plan, got {plan!r}; make one with kvsieve.plan('snapkv', budget='20%')")
    check_version()
    found = attention_of(text_config(model)) if hasattr(model, "config") else None
    if found == attention.NAME:
        raise KvsieveError("the model has a plan attached already; leave that `with` block first")
    plan = plan.for_model(model, tokenizer)
    check_model(model, plan)
    sieve = Sieve(model, plan, decode)
    caution = plan.caution(sieve.num_layers)
    if caution is not None:
        warnings.warn(caution, KvsieveWarning, stacklevel=4)
    attention.register()
    handles, own = [], vars(model).get("generate")
    try:
        model.set_attn_implementation(attention.NAME)
        if attention_of(sieve.config) != attention.NAME:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not take up another attention implementation, so {plan.name!r} cannot run"
            )
        handles = _hooks(sieve)
        sieve.engine.install()
        sieve.attached = True
        model.generate = with_stats(sieve)
        _log.info("attached %r", sieve)
        if sieve.engine.refusal is not None:
            _log.info("tokens are generated eagerly: %s", sieve.engine.refusal)
        with sessions.closing():
            yield sieve
    finally:
        sieve.attached = False
        for handle in handles:
            handle.remove()
        sieve.engine.remove()
        vars(model).pop("generate", None)
        if own is not None:
            model.generate = own
        _log.info("detached %s", plan.name)
        model.set_attn_implementation(found)


def _hooks(sieve: Sieve) -> list[Any]:
    decoder = sieve.decoder
    names = list(inspect.signature(decoder.forward).parameters)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        _check_call(sieve, module, kwargs)
        cache = kwargs.get("past_key_values")
        if cache is None or _is_generates_own(cache):
            cache = kwargs["past_key_values"] = sieve.new_cache()
        if not isinstance(cache, SieveCache):
            raise UnsupportedOptionError(
                f"past_key_values is a {type(cache).__name__}, on which {sieve.plan.name!r} could not run; pass "
                "sieve.new_cache(), or nothing"
            )
        sieve.check_cache(cache)
        note_cache(cache)
        sessions.open_session(sieve.plan, sieve.source, sieve.num_layers, cache, kwargs, sieve.facts, sieve.ranks)
        return (), kwargs

    def after(module: nn.Module, args: Any, output: Any) -> None:
        sessions.close_session(finished=output is not None)

    handles = [
        decoder.register_forward_pre_hook(before, with_kwargs=True),
        decoder.register_forward_hook(after, always_call=True),
    ]
    if sieve.plan.evict is not None and "hidden" in sieve.plan.evict.traits.needs:
        handles += [layer.register_forward_pre_hook(_enter, with_kwargs=True) for layer in decoder.layers]  # type: ignore[union-attr]
    if sieve.source is None:
        return handles

    def leave(index: int, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        session = sessions.current()
        if session is None or session.step.phase != "prefill":
            return None
        if not isinstance(output, tuple):
            return session.leave(index, output, kwargs)
        return (session.leave(index, output[0], kwargs), *output[1:])

    def enter_deeper(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        session = sessions.current()
        if session is None or not session.narrowed:
            return None
        return args, {**kwargs, **session.narrowed}

    layers = list(decoder.layers)  # type: ignore[arg-type]
    for index in range(sieve.source, len(layers) - 1):
        hook = functools.partial(leave, index)
        handles.append(layers[index].register_forward_hook(hook, with_kwargs=True))
        handles.append(layers[index + 1].register_forward_pre_hook(enter_deeper, with_kwargs=True))
    return handles


def _enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Keep what enters a decoder layer for the evictor that asked for it."""
    session = sessions.current()
    if session is not None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            raise UnsupportedModelError(
                f"{type(module).__name__} is not given hidden states [batch, tokens, channels] as its first argument, "
                f"which {session.plan.name!r} needs to see"
            )
        session.hidden = hidden


def _check_call(sieve: Sieve, module: nn.Module, kwargs: dict[str, Any]) -> None:
    if module.training:
        raise UnsupportedOptionError("the model is in training mode; kvsieve is for inference: call model.eval()")
    if kwargs.get("use_cache") is False:
        raise UnsupportedOptionError("use_cache=False leaves nothing to reduce; leave use_cache unset")
    if kwargs.get("output_attentions") or getattr(sieve.config, "output_attentions", False):
        raise UnsupportedOptionError("output_attentions=True is not supported: attention weights are never formed")
    ids = kwargs.get("input_ids")
    if ids is not None:
        # A token that was just chosen needs no look, which would make a GPU wait.
        check_ids(ids, sieve.config.vocab_size, values=ids.device.type == "cpu" or ids.shape[-1] > 1)
    positions = kwargs.get("position_ids")
    if positions is not None and positions.ndim != 2:
        raise InputError(f"position_ids must be [batch, tokens], got shape {tuple(positions.shape)}")


def _is_generates_own(cache: Any) -> bool:
    """True for the empty cache that generate makes when it is given none."""
    fresh = type(cache) is DynamicCache and not getattr(cache, "_is_user_defined", False)
    return fresh and cache.get_seq_length() == 0


__all__ = ["Attachment", "Sieve", "attach"]
