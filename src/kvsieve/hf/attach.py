"""Attach a plan to a model, and restore the model afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, cast

from kvsieve.errors import KvsieveError, KvsieveWarning, NotAttachedError, PlanError, UnsupportedModelError
from kvsieve.hf import hooks
from kvsieve.hf.cache.copies import Unpicklable, uncopied
from kvsieve.hf.compat import (
    attention_of,
    check_version,
    decoder_of,
    is_compiled,
    layers_of,
    text_config,
    without_wrapper,
)
from kvsieve.hf.forward import attention, passes
from kvsieve.hf.generate.generate import with_stats
from kvsieve.hf.model.parallel import ranks_of
from kvsieve.hf.model.settle import plan_for
from kvsieve.hf.model.support import check_model
from kvsieve.hf.model.weights import why_out_of_reach
from kvsieve.hf.prompt.draft import load_draft
from kvsieve.hf.runtime import DraftModel
from kvsieve.hf.sieve import Sieve
from kvsieve.models.quantized import why_overwritten
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import DraftPropagator

_log = logging.getLogger(__name__)

# The block that each model is in, by the id of its configuration.
_BLOCKS: dict[int, object] = {}


class Attachment(Unpicklable, contextlib.AbstractContextManager[Sieve]):
    """The block returned by `attach`. Entered by ``with``, once, it returns the Sieve; before, nothing is attached."""

    _instead = "call attach(model, plan) where it is to run"

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

    Inside the block ``sieve.generate`` gives statistics; plain ``model.generate(...)`` and ``model(...)`` follow the
    plan too, with a cache of their own. Parameters of a named method that were not given are settled here:
    ``sieve.plan`` has them, and ``stats.notes`` say where they are from.

    Args:
        model: a causal language model of transformers, unmodified.
        plan: made with `kvsieve.plan`, or of role objects.
        decode: how tokens after a prompt are computed: "eager" as transformers does; "graph" by a CUDA graph; "fused",
            on a CPU, with the small operations of norms, positions and gates, and products of few tokens with the
            model's weights, in compiled calls (other rounding); "auto" by a graph on CUDA, and on a CPU fused, where
            float32 weights that are bfloat16 numbers are read from copies in bfloat16 if memory allows them. Passes
            that do not allow it run eagerly, and ``stats.decoding`` says why.
        tokenizer: the model's, for plans that feed texts of their own (`kvzip`, which asks the model to repeat its
            prompt; ``sieve.chat(tokenizer)`` serves as well), for parameters that depend on how it splits digits,
            and for the text of ``result.kept``.

    Raises:
        UnsupportedModelError: the plan cannot run on the model.
        PlanError: a layer is outside the model, or the plan cannot run where heads are divided among processes
            (docs/models.md).
        KvsieveError: the model has a plan attached already. All of them when the block is entered.
    """
    return Attachment(attached(model, plan, decode, tokenizer))


@contextlib.contextmanager
def attached(
    model: Any,
    plan: Plan,
    decode: str = "auto",
    tokenizer: Any = None,
    *,
    hidden: bool = False,
    leaving: Sequence[int] = (),
    any_plan: bool = False,
) -> Iterator[Sieve]:
    """Run `model` under `plan` inside the with-block; see `attach`.

    Args:
        model: of transformers.
        plan: to attach.
        decode: see `attach`.
        tokenizer: see `attach`.
        hidden: record each layer's input in any case.
        leaving: layers that call ``PassRequest.on_leave``.
        any_plan: prompts may be prefilled under other plans as well; see `under`.
    """
    _check_arguments(model, plan)
    check_version()
    model = without_wrapper(model)
    with contextlib.ExitStack() as stack:
        if hasattr(model, "config"):
            stack.enter_context(_alone(model))
        plan = plan_for(plan, model, tokenizer)
        check_model(model, plan)
        reason = why_out_of_reach(model) or _why_compiled(model) or why_overwritten(model)
        if reason is not None:
            raise UnsupportedModelError(f"{type(model).__name__} cannot run {plan.name!r}: {reason}")
        sieve = Sieve(model, plan, decode)
        sieve.tokenizer = tokenizer
        drafts = _DraftModels(stack)
        sieve.open_draft = drafts.for_answers
        if isinstance(plan.propagate, DraftPropagator):
            draft = load_draft(plan.propagate.drafter(), model)
            sieve.drafter = DraftModel(draft.tokenizer, functools.partial(drafts.for_prompt, draft.model))
        caution = plan.caution(sieve.num_layers)
        if caution is not None:
            warnings.warn(caution, KvsieveWarning, stacklevel=4)
        refusal = sieve.engine.refusal
        if decode != "auto" and refusal is not None:
            note = f"decode={decode!r} computes tokens eagerly here: {refusal}; leave it out for the fastest way"
            warnings.warn(note, KvsieveWarning, stacklevel=4)
        hidden = hidden or (plan.evict is not None and "hidden" in plan.evict.traits.needs)
        with _running(sieve, hidden, leaving, any_plan), uncopied(model.modules()), passes.closing():
            yield sieve


class _DraftModels:
    """Draft models of an attached one, each under an empty plan. stack: of the attached model's block."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._open: list[Sieve] = []

    def for_answers(self, model: Any) -> Sieve:
        """Return a draft of answers, attached until the block ends."""
        found = self._found(model)
        if found is None:
            found = self._stack.enter_context(attached(model, Plan(name="draft")))
            self._open.append(found)
        return found

    def for_prompt(self, model: Any) -> contextlib.AbstractContextManager[Sieve]:
        """Attach a draft of prompts for a `with` block."""
        found = self._found(model)
        return attached(model, Plan(name="draft"), "eager") if found is None else contextlib.nullcontext(found)

    def _found(self, model: Any) -> Sieve | None:
        return next((sieve for sieve in self._open if sieve.model is model), None)


def _check_arguments(model: Any, plan: Any) -> None:
    """Raise KvsieveError, with advice, unless these are a model and a plan."""
    if isinstance(model, Plan):
        raise KvsieveError("attach takes the model first and the plan second: attach(model, plan)")
    if isinstance(model, str | os.PathLike):
        raise KvsieveError(
            f"attach takes a model, got the name {str(model)!r}; load it first: model, tokenizer = "
            f"kvsieve.models.load({str(model)!r})"
        )
    if not isinstance(plan, Plan):
        raise KvsieveError(f"attach takes a Plan, got {plan!r}; make one with kvsieve.plan('snapkv', budget='20%')")


@contextlib.contextmanager
def _alone(model: Any) -> Iterator[None]:
    """Lock a model for one block of one thread. Raises KvsieveError if it is locked."""
    config = text_config(model)
    block = object()
    try:
        # One step, so that of two threads only one gets the model.
        if _BLOCKS.setdefault(id(config), block) is not block or attention_of(config) == attention.NAME:
            raise KvsieveError("the model has a plan attached already; leave that `with` block first")
        yield
    finally:
        if _BLOCKS.get(id(config)) is block:
            del _BLOCKS[id(config)]


def _why_compiled(model: Any) -> str | None:
    """Return a clause why a compiled model cannot be attached to, or None if it is not compiled."""
    decoder = decoder_of(model)
    parts = {"forward": model, "decoder": decoder, "first layer": next(iter(layers_of(decoder) or ()), decoder)}
    found = next((name for name, part in parts.items() if is_compiled(part)), None)
    if found is None:
        return None
    return f"its {found} is compiled with torch.compile, where a plan cannot act: attach to the model as it was loaded"


def under(sieve: Sieve, plan: Plan) -> Sieve:
    """Return an attached model under another plan, for prefill; the attached plan stays.

    Args:
        sieve: of `attached` with `any_plan`, within its block.
        plan: the other plan.

    Raises:
        UnsupportedModelError: the plan cannot run on the model.
        PlanError: a parameter of the plan does not fit it, or the plan has a draft model.
    """
    if isinstance(plan.propagate, DraftPropagator):
        raise PlanError(
            f"{plan.name} reads prompts with a draft model, which only `attach` loads: take it in Python or with "
            "`kvsieve run`, and another method in a server"
        )
    other = object.__new__(Sieve)
    vars(other).update(vars(sieve))
    other.plan = plan_for(plan, sieve.model, sieve.tokenizer)
    check_model(sieve.model, other.plan)
    other.context = dataclasses.replace(sieve.context, ranks=ranks_of(sieve.model, other.plan))
    return other


@contextlib.contextmanager
def _running(sieve: Sieve, hidden: bool, leaving: Sequence[int], any_plan: bool) -> Iterator[None]:
    """Modify the model so that a plan runs on it, and restore everything; see hooks.install."""
    model = sieve.model
    decoder = cast("Any", sieve.decoder)
    found = attention_of(sieve.config)
    own = vars(model).get("generate")
    attention.register()
    handles = []
    try:
        decoder.set_attn_implementation(attention.NAME)
        if attention_of(sieve.config) != attention.NAME:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not take up another attention implementation, so {sieve.plan.name!r} "
                "cannot run"
            )
        handles = hooks.install(sieve, hidden=hidden, leaving=leaving, any_plan=any_plan)
        sieve.engine.install(handle.id for handle in handles)
        sieve.any_plan = any_plan
        sieve.attached = True
        model.generate = with_stats(sieve, sieve.own_generate, functools.partial(setattr, sieve, "last_stats"))
        _log.info("attached %r", sieve)
        if sieve.engine.refusal is not None:
            _log.info("tokens are generated eagerly: %s", sieve.engine.refusal)
        yield
    finally:
        sieve.attached = False
        for handle in handles:
            handle.remove()
        sieve.engine.remove()
        vars(model).pop("generate", None)
        if own is not None:
            model.generate = own
        _log.info("detached %s", sieve.plan.name)
        decoder.set_attn_implementation(found)


__all__ = ["Attachment", "Sieve", "attach"]
