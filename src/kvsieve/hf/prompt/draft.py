"""A draft model's choice: a smaller model prefills a prompt first, and scores its tokens.

The draft runs under kvsieve with an empty plan, one row of a batch at a time. With another tokenizer it prefills the
prompt's text, and scores are mapped by the characters that tokens share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvsieve import models
from kvsieve.errors import InputError, PlanError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.request import PassRequest, PassResult
from kvsieve.hf.model.context import context_of
from kvsieve.hf.runtime import AttachedModel
from kvsieve.models.source import is_gguf
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import DraftPropagator, Loaded
from kvsieve.types import LayerContext

Spans = Sequence[tuple[int, int]]
# Tokens before a token that are decoded with it to find its characters, where a text is not tokenized back.
_BEFORE = 6


def load_draft(drafter: str | Loaded, model: Any) -> Loaded:
    """Return a draft model, loaded for use beside `model`, in its dtype and on its device.

    Args:
        drafter: the draft, or its name.
        model: of transformers.

    Raises:
        PlanError: the draft is the model itself, or shares no tokenizer with it and brings none.
        ModelNotFoundError, ModelLoadError: it cannot be loaded.
    """
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
    if is_gguf(name) and device == "cpu" and dtype != torch.bfloat16:
        # The other dtype that weights in blocks are computed with.
        dtype = torch.float32
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
    if other is None or same_tokens(own, other):
        return _attention(model, propagator, ids, chunk)
    text, spans = text_and_spans(own, ids)
    read = other(text, add_special_tokens=False, return_offsets_mapping=True)
    scores = _attention(model, propagator, read["input_ids"], chunk)
    return carried_over(scores, read["offset_mapping"], spans, len(text))


@functools.lru_cache(maxsize=2)
def same_tokens(one: Any, other: Any) -> bool:
    """Return True if two tokenizers have the same vocabulary, or if one is unknown (None)."""
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
    text = decoded(tokenizer, ids)
    if tokenizer.is_fast:
        again = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if again["input_ids"] == ids:
            return text, again["offset_mapping"]
    spans = []
    end = 0
    for place in range(len(ids)):
        before = ids[max(0, place - _BEFORE) : place]
        more = len(decoded(tokenizer, [*before, ids[place]])) - len(decoded(tokenizer, before))
        start = end
        end = min(max(end + more, end), len(text))
        spans.append((start, end))
    return text, spans


def decoded(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of token ids, special tokens included."""
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _attention(model: AttachedModel, propagator: DraftPropagator, ids: list[int], chunk: int | None) -> Tensor:
    """Let the draft prefill a prompt and continue it; return the prompt's scores, float32 [N]."""
    assert model.drafter is not None
    prompt = len(ids)
    seen = dict[int, Any]()
    with model.drafter.opened() as draft:
        steps = propagator.steps()
        context = context_of(draft.config)
        if context is not None and prompt + steps - 1 > context:
            raise InputError(
                f"the draft counts {prompt} tokens and drafts {steps - 1} more, and its context is {context}: use a "
                "draft with a longer context, or another method"
            )
        cache = draft.new_cache()
        stops = ends_of(draft)

        def observe(ctx: LayerContext) -> None:
            propagator.observe(ctx, prompt, seen)

        result = prefilled(draft, cache, ids, chunk, new_tokens=steps, on_layer=observe)
        request = PassRequest(phase="decode", on_layer=observe)
        for _ in range(steps - 1):
            assert result.logits is not None
            token = result.logits[:, -1].argmax(-1, keepdim=True)
            if int(token) in stops:
                break
            result = draft.feed(cache, token, None, request, logits=1)
    scores: Tensor = propagator.scores(seen)
    return scores.float().cpu()


def prefilled(
    draft: AttachedModel,
    cache: SieveCache,
    ids: Sequence[int],
    chunk: int | None,
    *,
    new_tokens: int = 0,
    on_layer: Callable[[LayerContext], None] | None = None,
) -> PassResult:
    """Prefill a prompt of one row into a draft's empty cache, and return the last pass's result with its last logits.

    Args:
        draft: under an empty plan.
        cache: of the draft.
        ids: the prompt.
        chunk: tokens per forward pass, None for all at once.
        new_tokens: expected after the prompt.
        on_layer: called in each layer of the last pass.
    """
    size = len(ids)
    cache.begin_turn(size, new_tokens)
    fed = torch.tensor([list(ids)], device=draft.model.device)
    before = (size - 1) // chunk * chunk if chunk else 0
    for start in range(0, before, chunk or size):
        draft.feed(cache, fed[:, start : start + (chunk or size)], None, PassRequest(phase="prefill", last_chunk=False))
    return draft.feed(cache, fed[:, before:], None, PassRequest(phase="prefill", on_layer=on_layer), logits=1)


def ends_of(model: AttachedModel) -> frozenset[int]:
    """Return the tokens that end an answer of a model, by its generation config."""
    ends = model.model.generation_config.eos_token_id
    return frozenset(ends if isinstance(ends, (list, tuple)) else () if ends is None else (ends,))
