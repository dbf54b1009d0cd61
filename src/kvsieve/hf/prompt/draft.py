"""A draft model's choice: a smaller model prefills a prompt first, and scores its tokens.

The draft runs under kvsieve with an empty plan, one row of a batch at a time. With another tokenizer it prefills the
prompt's text, and scores are mapped by the characters that tokens share.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvsieve import models
from kvsieve.errors import InputError, PlanError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.model.context import context_of
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import DraftPropagator, Loaded

Spans = Sequence[tuple[int, int]]
# Tokens before a token that are decoded with it to find its characters, where a text is not tokenized back.
_BEFORE = 6


def load_draft(propagator: DraftPropagator, model: Any) -> Loaded:
    """Return a propagator's draft model, loaded for use beside `model`, in its dtype and on its device.

    Raises:
        PlanError: the draft is the model itself, or shares no tokenizer with it and brings none.
        ModelNotFoundError, ModelLoadError: it cannot be loaded.
    """
    drafter = propagator.drafter()
    draft = _loaded(drafter, model.dtype, str(model.device)) if isinstance(drafter, str) else drafter
    if draft.model is model:
        raise PlanError("the draft is the model itself, which would read every prompt twice: give a smaller one")
    sizes = draft.model.get_input_embeddings().num_embeddings, model.get_input_embeddings().num_embeddings
    if draft.tokenizer is None and sizes[0] < sizes[1]:
        raise PlanError(
            f"the draft knows {sizes[0]} tokens and the model {sizes[1]}, so their tokenizers differ: give "
            "draft=(model, tokenizer), or the draft's directory or hub id"
        )
    return draft


@functools.lru_cache(maxsize=1)
def _loaded(name: str, dtype: torch.dtype, device: str) -> Loaded:
    """Load a draft by name, with the last one cached, so that attaching a plan again does not load it again."""
    return Loaded(name, *models.load(None if name == "demo" else name, dtype, device))


def drafted(
    model: AttachedModel, plan: Plan, input_ids: Tensor, mask: Tensor | None, cache: SieveCache, chunk: int | None
) -> Tensor | None:
    """Return scores of the tokens of a new turn, float32 [B, N], -inf for padding; None if all continue.

    Args:
        model: the attached model.
        plan: acts; its propagator drafts.
        input_ids: int64 [B, all], the whole conversation; the cache has seen the beginning.
        mask: [B, all], None without padding.
        cache: of the conversation.
        chunk: tokens per forward pass of the draft.

    Raises:
        InputError: the conversation is longer than the draft's context.
    """
    propagator = plan.propagate
    start = cache.turn.start
    assert isinstance(propagator, DraftPropagator)
    model.check_tokens(cache, 0, input_ids)
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool().to(input_ids.device)
    counts = real[:, start:].sum(-1).tolist()
    if all(propagator.entries(count) >= count for count in counts):
        return None
    out = torch.full(real.shape, float("-inf"))
    for row in range(len(out)):
        out[row, real[row].cpu()] = _scores(model, propagator, input_ids[row, real[row]].tolist(), chunk)
    return out[:, start:]


def _scores(model: AttachedModel, propagator: DraftPropagator, ids: list[int], chunk: int | None) -> Tensor:
    """Return the scores of one row's tokens, float32 [N]."""
    assert model.drafter is not None
    holder = propagator.own_tokenizer()
    other = model.drafter.tokenizer
    own = None if holder is None else holder.tokenizer
    if other is None or _same_tokens(own, other):
        return _attention(model, propagator, ids, chunk)
    text, spans = text_and_spans(own, ids)
    read = other(text, add_special_tokens=False, return_offsets_mapping=True)
    scores = _attention(model, propagator, read["input_ids"], chunk)
    return carried_over(scores, read["offset_mapping"], spans, len(text))


@functools.lru_cache(maxsize=2)
def _same_tokens(one: Any, other: Any) -> bool:
    return one is None or one is other or one.get_vocab() == other.get_vocab()


def carried_over(scores: Tensor, spans: Spans, onto: Spans, length: int) -> Tensor:
    """Map scores of tokens to other tokens of the same text: the maximum over those with shared characters.

    Args:
        scores: float [M].
        spans: of M tokens, their characters, half-open.
        onto: of N tokens.
        length: characters of the text.

    Returns:
        Float32 [N]; 0 for a token without characters.
    """
    # A token that is not the whole of a character has that character, and so has the next one.
    at = [0.0] * length
    for score, (start, end) in zip(scores.tolist(), spans, strict=True):
        for place in range(start, end):
            at[place] = max(at[place], score)
    return torch.tensor([max(at[start:end], default=0.0) for start, end in onto])


def text_and_spans(tokenizer: Any, ids: list[int]) -> tuple[str, Spans]:
    """Return the text of token ids, and the characters of each token in it, half-open.

    Exact if tokenizing the text returns the ids, as for most prompts. Otherwise each token is decoded with a few before
    it, and a shared character belongs to the last of its tokens.
    """
    text = _decoded(tokenizer, ids)
    if tokenizer.is_fast:
        again = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if again["input_ids"] == ids:
            return text, again["offset_mapping"]
    spans = []
    end = 0
    for place in range(len(ids)):
        before = ids[max(0, place - _BEFORE) : place]
        more = len(_decoded(tokenizer, [*before, ids[place]])) - len(_decoded(tokenizer, before))
        start = end
        end = min(max(end + more, end), len(text))
        spans.append((start, end))
    return text, spans


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _attention(model: AttachedModel, propagator: DraftPropagator, ids: list[int], chunk: int | None) -> Tensor:
    """Let the draft prefill a prompt and continue it; return the prompt's scores, float32 [N]."""
    assert model.drafter is not None
    prompt = len(ids)
    seen = dict[int, Any]()
    with model.drafter.opened() as draft:
        steps = propagator.steps()
        config = draft.config
        context = context_of(config)
        if context is not None and prompt + steps - 1 > context:
            raise InputError(
                f"the draft counts {prompt} tokens and drafts {steps - 1} more, and its context is {context}: use a "
                "draft with a longer context, or another method"
            )
        cache = draft.new_cache()
        stops = _ends(draft)
        cache.begin_turn(prompt, steps)
        fed = torch.tensor([ids], device=draft.model.device)
        result = None
        for start in range(0, prompt, chunk or prompt):
            end = min(start + (chunk or prompt), prompt)
            last = end == prompt
            request = PassRequest(
                phase="prefill",
                last_chunk=last,
                on_layer=(lambda ctx: propagator.observe(ctx, prompt, seen)) if last else None,
            )
            result = draft.feed(cache, fed[:, start:end], None, request, logits=int(last))
        request = PassRequest(phase="decode", on_layer=lambda ctx: propagator.observe(ctx, prompt, seen))
        for _ in range(steps - 1):
            assert result is not None and result.logits is not None
            token = result.logits[:, -1].argmax(-1, keepdim=True)
            if int(token) in stops:
                break
            result = draft.feed(cache, token, None, request, logits=1)
    scores: Tensor = propagator.scores(seen)
    return scores.float().cpu()


def _ends(draft: AttachedModel) -> set[int]:
    ends = draft.model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, (list, tuple)) else {ends}
